"""Pointwise operations that run again in one kernel give the bits that they give one after another, or are not used."""

from __future__ import annotations

import dataclasses
import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from offload import host_kernels
from offload.forced import at_random, force_recompute
from offload.steps import assert_same, train
from offload.test_odd_models import THIRD_PARTY
from offload.test_recompute import ALL
from torchstorm import nvrtc
from torchstorm.errors import UnsupportedError
from torchstorm.offload.recompute import compared, fused, pointwise
from torchstorm.offload.recompute.compared import Example, Kernel, is_exact
from torchstorm.offload.recompute.geometry import Geometry, Look
from torchstorm.offload.recompute.groups import Group
from torchstorm.offload.recompute.pointwise import Input, Operand, Operation
from torchstorm.offload.session import Session
from torchstorm.offload.step.parcels import Call, Chain, Value
from torchstorm.plan.recompute import POINTWISE

CPU = torch.device("cpu")
FLOATS = tuple(pointwise.C_TYPES)
FIRST, SECOND = Operand("input", 0), Operand("input", 1)
EXACT_ON_A_CPU: dict[str, Callable[..., torch.Tensor]] = {
    "abs": torch.abs,
    "neg": torch.neg,
    "reciprocal": torch.reciprocal,
    "square": torch.square,
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
}


def kernel_of(example: Example, *operations: Operation) -> Kernel:
    code = pointwise.source_of(
        operations,
        example.inputs,
        example.outputs,
        num_numbers=len(example.numbers),
        num_dims=example.num_dims,
        width=example.width,
    )
    return Kernel(nvrtc.Source(kernel=pointwise.KERNEL, code=code), CPU, example)


@st.composite
def looks(draw: st.DrawFn) -> list[Look]:
    """How inputs look: repeated along some dimensions, with gaps, in another order."""
    size = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 8, 16, 40]), min_size=1, max_size=4)))
    if torch.Size(size).numel() == 1:
        size = (*size, 8)

    def stride(order: tuple[int, ...], repeats: tuple[bool, ...], gap: int) -> tuple[int, ...]:
        found, step = [0] * len(size), 1
        for place, dim in enumerate(reversed(order)):
            if size[dim] > 1 and not repeats[dim]:
                found[dim] = step
                step *= size[dim] * (gap if place == 0 else 1)
        return tuple(found)

    dims = tuple(range(len(size)))
    order = tuple(draw(st.permutations(dims)))
    return [
        Look(
            torch.float32,
            size,
            stride(
                draw(st.sampled_from([order, dims])),
                draw(st.tuples(*(st.booleans() for _ in dims))),
                draw(st.sampled_from([1, 1, 2])),
            ),
        )
        for _ in range(2)
    ]


@pytest.mark.no_cover
@settings(max_examples=60, deadline=None)
@given(found=looks(), dtype=st.sampled_from([torch.float32, torch.bfloat16]), last=st.sampled_from(["mul", "sub"]))
def test_any_layout_is_walked_through(found: list[Look], dtype: torch.dtype, last: str) -> None:
    inputs = [dataclasses.replace(one, dtype=dtype) for one in found]
    first, second = (compared._values(one, CPU, torch.Generator()) for one in inputs)
    result = Look.of(first + second)
    if result is None or result.size != inputs[0].size:
        return
    geometry = Geometry.of(result, inputs, [0, 0])
    if geometry is None:  # a result whose innermost dimension is none of its own, or too many dimensions
        return
    example = Example(
        calls=(
            (torch.add, (FIRST, SECOND), {}),
            (getattr(torch, last), (Operand("made", 0), Operand("number", 0)), {}),
            (torch.Tensor.to, (Operand("made", 1), dtype), {}),
        ),
        results=tuple(dataclasses.replace(result, dtype=one) for one in (dtype, dtype, dtype)),
        looks=tuple(inputs),
        outputs=(0, 1),
        numbers=(1.5,),
        inputs=tuple(Input(dtype, one[-1] if one[-1] in (0, 1) else 2) for one in geometry.steps),
        num_dims=len(geometry.sizes),
        width=geometry.width,
    )
    operations = (
        Operation("add", (FIRST, SECOND), dtype),
        Operation(last, (Operand("made", 0), Operand("number", 0)), dtype),
        Operation("convert", (Operand("made", 1),), dtype),
    )
    with pytest.MonkeyPatch.context() as patch:
        host_kernels.use(patch)
        patch.setattr(compared, "_INEXACT", (2.5,))  # on a CPU, PyTorch rounds a number to bfloat16
        assert is_exact(kernel_of(example, *operations)), geometry


@pytest.mark.parametrize("name", EXACT_ON_A_CPU)
def test_an_operation_gives_the_bits_of_pytorchs_and_a_wrong_one_is_found(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    host_kernels.use(monkeypatch)
    look = Look(torch.float32, (64, 96), (96, 1))
    known = pointwise.formula_of(name, ())
    assert known is not None
    operands = (FIRST, SECOND)[: known[1]]
    example = Example(
        calls=((EXACT_ON_A_CPU[name], operands, {}),),
        results=(look,),
        looks=(look,) * known[1],
        outputs=(0,),
        numbers=(),
        inputs=(Input(torch.float32, 1),) * known[1],
        num_dims=1,
        width=8,
    )
    assert is_exact(kernel_of(example, Operation(known[0], operands, torch.float32)))
    other = "neg" if known[1] == 1 and known[0] != "neg" else "add" if known[0] != "add" else "sub"
    wrong = (FIRST,) if other == "neg" else (FIRST, operands[-1])
    assert not is_exact(kernel_of(example, Operation(other, wrong, torch.float32)))


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a", "sm_120"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_operation_compiles_for_every_gpu(arch: str, dtype: torch.dtype) -> None:
    names = [*pointwise._OF_ONE, *pointwise._OF_TWO]
    operations = [Operation(one, (FIRST,), dtype) for one in pointwise._OF_ONE]
    operations += [Operation(one, (FIRST, Operand("made", 0)), dtype) for one in pointwise._OF_TWO]
    inputs = (Input(dtype, 1),)
    code = pointwise.source_of(tuple(operations), inputs, tuple(range(len(names))), num_numbers=0, num_dims=2, width=8)
    found = nvrtc.compile_source(nvrtc.Source(kernel=pointwise.KERNEL, code=code), arch)
    assert found.cubin
    assert "spill" not in found.log or " 0 bytes spill stores, 0 bytes spill loads" in found.log


@pytest.mark.filterwarnings(*THIRD_PARTY)
@pytest.mark.parametrize("name", [name for name in ALL if name.startswith("hugging face: ")] + ["dropout"])
@pytest.mark.parametrize("share", [0.3, 0.7])
def test_real_models_train_to_the_same_bits(name: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = host_kernels.use(monkeypatch)
    make, step, _ = ALL[name]
    expected, _ = train(make, step, None, num_steps=7)
    force_recompute(monkeypatch, at_random(random.Random(name), share))
    found, _ = train(make, step, lambda model, _: Session(model, ram="1GiB"), num_steps=7)
    assert_same(expected, found)
    if name == "hugging face: Llama":
        assert ran


class Norms(nn.Module):
    """Layers with a chain of pointwise operations, whose products are saved."""

    def __init__(self, temperature: Callable[[], float] = lambda: 0.5) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(64)) for _ in range(3))
        self.products = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))
        self.temperature = temperature

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight, product in zip(self.weights, self.products, strict=True):
            y = product(x)
            x = product(weight * (y * y * self.temperature()).neg()) + x
        return x


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Group]:
    """Chains on the CPU run by kernels, and plans compute most of what is saved again. The groups that have run."""
    found = host_kernels.use(monkeypatch)
    force_recompute(monkeypatch, lambda number: number % 5 != 1)
    torch.manual_seed(0)
    return found


def run(
    session: Session | None,
    model: nn.Module,
    seed: int,
    between: Callable[[], None] = lambda: None,
    length: int = 16,
    size: tuple[int, ...] | None = None,
) -> list[Any]:
    model.zero_grad()
    x = torch.randn(size or (32, length, 64), generator=torch.Generator().manual_seed(seed))
    with session.step() if session else torch.enable_grad():
        loss = model(x).square().mean()
        between()
        loss.backward()
    return [one.grad.clone() for one in model.parameters() if one.grad is not None]


def test_a_number_that_changes_between_steps_is_not_that_of_the_kernel(ran: list[Group]) -> None:
    model = Norms()
    temperatures: list[float] = []
    model.temperature = lambda: temperatures[-1]
    with Session(model, ram="1GiB") as session:
        for step, temperature in enumerate([0.5, 0.5, 0.5, 0.5, 0.25, 5.5, 6.5, 7.5, 8.5]):
            temperatures.append(temperature)
            assert all(map(torch.equal, run(session, model, step), run(None, model, step)))
    assert ran


def test_each_length_is_walked_through_as_it_is(ran: list[Group]) -> None:
    model = Norms()
    lengths: set[int] = set()
    with Session(model, ram="1GiB") as session:
        for step in range(40):
            length = 16 if step < 6 else 8 + step % 9
            ran.clear()
            found, expected = (run(one, model, step, length=length) for one in (session, None))
            assert all(map(torch.equal, found, expected))
            if ran:
                lengths.add(length)
    assert len(lengths) > 3


def test_a_weight_that_changes_before_backward_is_refused(ran: list[Group]) -> None:
    model = Norms()
    with Session(model, ram="1GiB") as session:
        for step in range(6):
            run(session, model, step)
        assert ran

        def change() -> None:
            with torch.no_grad():
                model.weights[1].add_(1)

        with pytest.raises((UnsupportedError, RuntimeError), match=r"changed since|modified by an inplace operation"):
            run(session, model, 7, change)


class Between(nn.Module):
    """Layers with something pointwise between two products, made of an error function that is not saved."""

    def __init__(self, middle: Callable[[Between, torch.Tensor, torch.Tensor, int], torch.Tensor], width: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(width)) for _ in range(3))
        self.products = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))
        self.others = nn.ParameterList(nn.Parameter(torch.randn(width)) for _ in range(2))
        self.whole = nn.ParameterList(nn.Parameter(torch.randn(8, width, width)) for _ in range(3))
        self.register_buffer("wide", torch.randn(width))
        self.register_buffer("narrow", torch.randn(width).bfloat16())
        self.middle, self.step = middle, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, (weight, product) in enumerate(zip(self.weights, self.products, strict=True)):
            x = product(self.middle(self, torch.erf(product(x)), weight, number)) + x
        return x


MIDDLES: dict[str, Callable[[Any, torch.Tensor, torch.Tensor, int], torch.Tensor]] = {
    "read in another order": lambda s, h, w, k: w * (h.neg() + h.transpose(1, 2)),
    "read once a row": lambda s, h, w, k: w * (h.neg() - h[..., :1]),
    "one weight that becomes two": lambda s, h, w, k: w * ((h + s.others[0]) + s.others[int(s.step > 5)]).neg(),
    "a buffer of another dtype": lambda s, h, w, k: w * (h * (s.wide if s.step < 6 else s.narrow)).neg(),
    "arguments that change places": lambda s, h, w, k: (
        w * (torch.sub(h, s.wide) if s.step < 6 else torch.sub(s.wide, h)).neg() * 3
    ),
    "an input that is repeated later": lambda s, h, w, k: (
        w * torch.mul(h.neg(), s.whole[0] if s.step < 6 else s.wide).neg()
    ),
    "alpha by its place": lambda s, h, w, k: w * torch.rsub(h.neg(), 1.0, *(() if k != 1 else (2.0,))),
    "zeros of either sign": lambda s, h, w, k: s.whole[k] * (h.abs() * (0.0 if k % 2 == 0 else -0.0)),
    "whole numbers that float32 rounds": lambda s, h, w, k: (
        w * (h * (3 if k != 1 else 2**60 + 2**36 + 1) * (1.0 if k != 1 else 1e-18)).neg()
    ),
    "a function of all": lambda s, h, w, k: w * ((h + 1.5).neg() * 0.1 - h.square()),
}


@pytest.mark.parametrize(("period", "kept"), [(3, 1), (4, 2), (5, 1), (5, 3)])
@pytest.mark.parametrize("name", MIDDLES)
def test_what_lies_or_reads_otherwise_in_a_later_step_or_layer(
    name: str, period: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    host_kernels.use(monkeypatch)
    force_recompute(monkeypatch, lambda number: number % period != kept)
    torch.manual_seed(0)
    model = Between(MIDDLES[name], 64)
    with Session(model, ram="1GiB") as session:
        for step in range(12):
            model.step = step
            found, expected = (run(one, model, step, size=(8, 64, 64)) for one in (session, None))
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one, other)
                assert torch.equal(one.signbit(), other.signbit())


@pytest.mark.usefixtures("ran")
def test_a_step_of_a_single_element_follows_larger_ones() -> None:
    model = Between(lambda s, h, w, k: w * (h * 0.5).neg(), 1)
    with Session(model, ram="1GiB") as session:
        for step in range(9):
            found, expected = (run(one, model, step, size=(8192 if step < 6 else 1, 1)) for one in (session, None))
            assert all(map(torch.equal, found, expected))


def test_a_comparison_takes_little_memory_however_far_apart_an_input_lies() -> None:
    # Every other element of a part of a packed tensor.
    look = Look(torch.bfloat16, (8, 1024, 32, 64), (1024 * 2304, 2304, 128, 2))
    found = compared._like(look, compared._small(look))
    assert compared._span(found) <= compared._MOST_COMPARED
    assert found.stride[-1] == 2


@pytest.mark.parametrize("what", ["not exact", "does not compile"])
def test_without_a_kernel_that_gives_equal_bits_pytorchs_own_run(
    what: str, ran: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    if what == "not exact":
        monkeypatch.setitem(pointwise._OF_TWO, "add", "__fsub_rn({0}, {1})")
        monkeypatch.setitem(pointwise._OF_TWO, "mul", "__fadd_rn({0}, {1})")
    else:

        def fail(kernel: Kernel) -> None:
            kernel.is_exact, kernel.is_compiled = False, True

        monkeypatch.setattr(compared, "compile_one", fail)
    torch.manual_seed(0)
    model = Norms()
    with Session(model, ram="1GiB") as session:
        for step in range(6):
            assert all(map(torch.equal, run(session, model, step), run(None, model, step)))
    assert not ran
    assert compared._kernels


def test_what_is_needed_beyond_a_groups_results_runs_one_by_one(
    ran: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Norms()
    with Session(model, ram="1GiB") as session:
        for step in range(5):
            run(session, model, step)
        assert ran
        ran.clear()
        monkeypatch.setattr(Group, "is_as_planned", lambda self: False)
        for step in range(2):
            assert all(map(torch.equal, run(session, model, step), run(None, model, step)))
        assert not ran


@pytest.mark.usefixtures("ran")
def test_an_input_at_an_odd_address_runs_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Norms()
    with Session(model, ram="1GiB") as session:
        for step in range(5):
            run(session, model, step)
        answers: list[Any] = []
        run_group = Group.run

        def odd(self: Group, there: Any) -> Any:
            assert self.layout is not None
            self.layout = dataclasses.replace(self.layout, odd=((1 << 62) - 1,) * len(self.inputs))
            answers.append(run_group(self, there))
            return answers[-1]

        monkeypatch.setattr(Group, "run", odd)
        assert all(map(torch.equal, run(session, model, 9), run(None, model, 9)))
        assert answers
        assert not any(answers)


def test_nothing_of_a_step_is_held_by_a_cycle(ran: list[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    num_ran: list[int] = []

    def left_over() -> int:
        """How many records are there after a Session, without the collector's help."""
        torch.manual_seed(0)
        model = Norms()
        with Session(model, ram="1GiB") as session:
            for step in range(6):
                run(session, model, step)
        del session, model
        num_ran.append(len(ran))
        ran.clear()
        return sum(type(one) in (Value, Call, Chain) for one in gc.get_objects())

    monkeypatch.setattr(fused, "is_on", lambda device: False)
    left_over()
    gc.collect()
    gc.disable()
    try:
        without = left_over()
        gc.collect()
        monkeypatch.setattr(fused, "is_on", lambda device: True)
        assert left_over() == without
    finally:
        gc.enable()
    assert num_ran[-1] > 0


def test_plans_know_which_operations_are_pointwise() -> None:
    ours = {*pointwise._OF_ONE, *pointwise._OF_TWO, *pointwise._OTHER_NAMES, "pow", "rsub"}
    assert ours - {"convert", "cube", "gelu_tanh", pointwise.NEGATIVE_PRODUCT} == POINTWISE
    for name in POINTWISE - {"pow", "rsub"}:
        assert pointwise.formula_of(name, ()) is not None


def test_functions_that_are_not_pointwise_or_not_known_are_not_taken() -> None:
    assert pointwise.formula_of("softmax", ()) is None
    assert pointwise.formula_of("pow", (2.5,)) is None
    assert pointwise.formula_of("pow", (3.0,)) == ("cube", 1)
    assert pointwise.formula_of("gelu", (), "tanh") == ("gelu_tanh", 1)


def test_the_way_that_is_taken_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fused.describe().endswith(f"in one kernel, by NVRTC {nvrtc.compiler_version()}")
    assert not fused.is_on(CPU)
    assert fused.is_on(torch.device("cuda", 0))
    monkeypatch.setenv("TORCHSTORM_FUSED", "0")
    assert fused.describe().endswith("one by one, since TORCHSTORM_FUSED=0")
    assert not fused.is_on(torch.device("cuda", 0))
    monkeypatch.delenv("TORCHSTORM_FUSED")
    monkeypatch.setattr(nvrtc, "is_usable", lambda: False)
    assert "there is no NVRTC" in fused.describe()
    assert not fused.is_on(torch.device("cuda", 0))
