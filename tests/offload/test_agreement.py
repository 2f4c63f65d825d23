"""Variants of compiled blocks that do not have the same bits are not used, whatever a plan picks."""

from __future__ import annotations

import itertools
import random
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from offload.steps import Outcome, assert_same
from torchstorm.offload import torch_private as private
from torchstorm.offload.compiled import case as case_module
from torchstorm.offload.compiled import compile as compiled_module
from torchstorm.offload.compiled import kind as kind_module
from torchstorm.offload.compiled.agreement import REFERENCE, Agreement, Look
from torchstorm.offload.compiled.repeatable import is_strict
from torchstorm.offload.compiled.stop_watch import StopWatch
from torchstorm.offload.fast import Cpu
from torchstorm.offload.session import Session
from torchstorm.offload.step.shared import Shared
from torchstorm.plan.choose import Blocks, Choice
from torchstorm.plan.trace import Trace
from torchstorm.plan.variants import CHEAP, LEAN, SAVE

ROWS, WIDTH = 8, 64
NUM_BLOCKS = 2  # each is compiled for itself, which is what takes the time

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler", "told_once"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every variant that a block ran in; compiled for no machine, so that compiling takes no time."""
    found: list[str] = []

    def compile_with(function: Callable[..., Any], partitioner: Any, *, cache: bool) -> Callable[..., Any]:
        compiled = torch.compile(function, backend=_backend(partitioner))

        def run(*args: Any) -> Any:
            found.append(partitioner.variant)
            return compiled(*args)

        return run

    monkeypatch.setattr(private, "compile_with", compile_with)
    return found


def _backend(partitioner: Any) -> Callable[..., Any]:
    from functorch.compile import nop
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    def split(joint: Any, inputs: Any, **options: Any) -> Any:
        return partitioner(joint, inputs, **options)

    compilers = {"fw_compiler": nop, "bw_compiler": nop, "inference_compiler": nop}
    backend: Callable[..., Any] = aot_autograd(**compilers, partition_fn=split, decompositions=select_decomp_table())
    return backend


@pytest.fixture
def lean_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of LEAN have other last bits."""
    lean_is_off_where(monkeypatch, lambda module, x: True)


def lean_is_off_where(monkeypatch: pytest.MonkeyPatch, is_off: Callable[[nn.Module, torch.Tensor], bool]) -> None:
    """They have in some calls, told by the block and its first argument."""
    call = kind_module.Kind.call

    def off(self: Any, variant: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        out = call(self, variant, module, args, kwargs)
        return _Off.apply(out) if variant == LEAN and is_off(module, args[0]) else out

    monkeypatch.setattr(kind_module.Kind, "call", off)


class _Off(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * (1 + 2**-20)


class Block(nn.Module):
    """Norms with statistics, dropout, and a note of every call in an object that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.BatchNorm1d(2 * WIDTH), nn.GELU())
        self.out = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, cache: Cache, *, mask: torch.Tensor) -> torch.Tensor:
        out = self.out(nn.functional.dropout(self.inner(x), 0.2))
        cache.values.append(out)
        return x + out.masked_fill(mask, 0.0)


class Cache:
    """As a model's cache of keys and values is."""

    def __init__(self) -> None:
        self.values: list[torch.Tensor] = []


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.num_cached: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache = Cache()
        mask = torch.zeros(x.shape[0], 1, dtype=torch.bool)
        for block in self.blocks:
            x = block(x, cache, mask=mask)
        self.num_cached.append(len(cache.values))
        return x


def choosing(monkeypatch: pytest.MonkeyPatch, wanted: str) -> list[list[str]]:
    """Every plan picks a variant for all blocks, or the nearest that there is. Returns what there was, each time."""
    found: list[list[str]] = []

    def choose(trace: Trace, blocks: Blocks, *_: Any, **options: Any) -> Choice:
        tables, measured = blocks.tables, blocks.measured
        names = {table.name: table.nearest(wanted).name for table in tables}
        found.append(sorted({name for table in tables for name in table.variants}))
        if len(found) > 1 and names == measured:  # a later choice, or one without what did not agree
            return Choice(variants=names, step_ms=1.0, measured_ms=1.0, num_tried=1)
        assert set(measured.values()) == {REFERENCE}, "what the step was measured in"
        return Choice(variants=names, step_ms=1.0, measured_ms=None, num_tried=1)

    monkeypatch.setattr(compiled_module, "choose_variants", choose)
    return found


def train(
    session_of: Callable[[nn.Module], Session],
    rows: tuple[int, ...] = (ROWS,) * 4,
    before_step: Callable[[int, Model, Session], object] = lambda index, model, session: None,
) -> tuple[Outcome, Session]:
    torch.manual_seed(1)
    random.seed(3)
    np.random.seed(3)
    model = Model()
    outcome = Outcome()
    with session_of(model) as session:
        session.compile()
        for index, num_rows in enumerate(rows):
            torch.manual_seed(100 + index)
            model.zero_grad()
            before_step(index, model, session)
            with session.step():
                loss = model(torch.randn(num_rows, WIDTH)).square().mean()
                loss.backward()
            outcome.losses.append(loss.detach())
            outcome.gradients.append({name: p.grad for name, p in model.named_parameters()})
            # What random numbers come next is part of a step's outcome.
            outcome.losses += [torch.rand(()), torch.tensor(random.random()), torch.tensor(np.random.random())]
        outcome.state = {name: value.clone() for name, value in model.state_dict().items()}
        outcome.losses.append(torch.tensor(model.num_cached))
    return outcome, session


def unlimited(model: nn.Module) -> Session:
    return Session(model, unlimited=True)


def limited(model: nn.Module) -> Session:
    """With a disk, so that blocks begin in the reference."""
    return Session(model, ram="64MiB", disk=f"{tempfile.gettempdir()}:64MiB")


@pytest.mark.no_cover
def test_a_variant_that_disagrees_is_left_out_and_the_report_says_why(
    lean_is_off: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = train(unlimited)
    tables = choosing(monkeypatch, LEAN)
    found, session = train(limited)
    assert_same(expected, found)
    assert any(LEAN in names for names in tables)
    assert LEAN not in tables[-1], "chosen anew without it"
    assert session._shared.compiled is not None
    assert LEAN not in session._shared.compiled.variants.values()
    (note,) = [note for note in session.report().notes if "not used" in note]
    assert note.startswith("variant 'lean' of blocks.0, blocks.1 is not used: the gradient of ")
    assert "differs from that of 'cheap', by " in note


@pytest.mark.no_cover
@pytest.mark.parametrize("fails", [False, True])
def test_variants_that_agree_are_timed_between_steps_and_all_is_put_back(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = train(unlimited)
    choosing(monkeypatch, LEAN)
    seen: list[dict[str, set[str]]] = []

    def forward_and_backward(self: StopWatch) -> tuple[float, float]:
        if fails:
            raise ValueError("what a block may say to random numbers")
        return told(self)

    def timed(self: Shared, trace: Trace) -> Trace:
        assert self.compiled is not None
        found = self.compiled.timed(trace, self.tiers.fast)  # as where that is a GPU
        tables = {table.name: table.variants.values() for table in self.compiled.tables()}
        seen.append({name: {one.name for one in every if one.forward_s} for name, every in tables.items()})
        assert [name for name, _ in found.blocks_s] == ([] if fails else list(tables))
        return found

    told = StopWatch.forward_and_backward
    monkeypatch.setattr(StopWatch, "forward_and_backward", forward_and_backward)
    monkeypatch.setattr(Shared, "timed", timed)
    found, _ = train(limited)
    assert_same(expected, found)
    assert seen[0] == dict.fromkeys(("blocks.0", "blocks.1"), set() if fails else {REFERENCE})
    assert fails or seen[-1]["blocks.0"] == {REFERENCE, LEAN}


class Noting(nn.Module):
    """A block that puts a term of the loss into a list of its own, as experts do; the model sums them up."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.terms: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.gelu(self.inner(x))
        self.terms.append(hidden.square().mean())
        return x + self.out(hidden)


def test_what_a_block_notes_when_it_is_compared_and_timed_is_no_part_of_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def trained(session_of: Callable[[nn.Module], Session]) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(Noting(), Noting())
        losses = []
        with session_of(model) as session:
            session.compile()
            for _ in range(4):
                model.zero_grad()
                with session.step():
                    loss = model(torch.randn(ROWS, WIDTH)).square().mean()
                    for block in model:
                        assert len(block.terms) == 1
                        loss = loss + block.terms.pop()
                    loss.backward()
                losses.append(loss.detach())
        return losses

    monkeypatch.setattr(Shared, "timed", lambda self, trace: self.compiled.timed(trace, self.tiers.fast))
    expected = trained(unlimited)
    choosing(monkeypatch, LEAN)
    assert trained(limited) == expected


@pytest.mark.no_cover
def test_a_variant_is_compared_between_steps_once_and_all_is_put_back(
    monkeypatch: pytest.MonkeyPatch, ran: list[str]
) -> None:
    """Random states, statistics and caches are those of an unlimited Session, which compares another variant."""
    expected, _ = train(unlimited)
    assert ran.count(SAVE) == NUM_BLOCKS + 3 * NUM_BLOCKS, "compared, then three steps of every block"
    ran.clear()
    choosing(monkeypatch, LEAN)
    found, session = train(limited)
    assert_same(expected, found)
    assert session._shared.compiled is not None
    assert set(session._shared.compiled.variants.values()) == {LEAN}
    # A step that tells that blocks are whole graphs, one that is planned for, then both compared, then the others. Each
    # block is a specialization: each finds another cache.
    assert ran == [REFERENCE] * 2 * NUM_BLOCKS + [REFERENCE, LEAN] * NUM_BLOCKS + [LEAN] * 2 * NUM_BLOCKS


def _room_for(monkeypatch: pytest.MonkeyPatch, room: str) -> list[bool]:
    """Where there is memory to run blocks by themselves. Returns whether gradients existed each time when one did."""
    compared, models = list[bool](), list[nn.Module]()
    set_up, difference = Model.__init__, case_module.Case.difference

    def has_gradients() -> bool:
        return any(parameter.grad is not None for model in models for parameter in model.parameters())

    def made(self: Model) -> None:
        set_up(self)
        models.append(self)

    def unused_bytes(self: Cpu, limit_bytes: int) -> int:
        return 0 if room == "none" or has_gradients() else 1 << 62

    def noted(self: case_module.Case, *args: Any) -> str:
        compared.append(has_gradients())
        return difference(self, *args)

    monkeypatch.setattr(Model, "__init__", made)
    monkeypatch.setattr(Cpu, "unused_bytes", unused_bytes)
    monkeypatch.setattr(case_module.Case, "difference", noted)
    return compared


@pytest.mark.no_cover
def test_where_gradients_leave_no_room_variants_are_compared_when_the_next_step_begins(
    monkeypatch: pytest.MonkeyPatch, ran: list[str]
) -> None:
    expected, _ = train(unlimited, (ROWS,) * 5)
    compared = _room_for(monkeypatch, "as a step begins")
    choosing(monkeypatch, LEAN)
    ran.clear()
    found, session = train(limited, (ROWS,) * 5)
    assert_same(expected, found)
    assert compared == [False] * NUM_BLOCKS
    assert session._shared.compiled is not None
    assert set(session._shared.compiled.variants.values()) == {LEAN}
    assert ran == [REFERENCE] * 2 * NUM_BLOCKS + [REFERENCE, LEAN] * NUM_BLOCKS + [LEAN] * 3 * NUM_BLOCKS
    assert session.report().num_planned == 1, "the fourth step, which follows its plan, is timed"
    assert not [note for note in session.report().notes if "no room" in note]


def test_without_room_to_compare_them_variants_are_left_out_and_the_report_says_so(
    monkeypatch: pytest.MonkeyPatch, ran: list[str]
) -> None:
    expected, _ = train(unlimited)
    compared = _room_for(monkeypatch, "none")
    choosing(monkeypatch, LEAN)
    ran.clear()
    found, session = train(limited)
    assert_same(expected, found)
    assert not compared
    assert ran == [REFERENCE] * 4 * NUM_BLOCKS
    assert session.report().num_planned > 0
    (note,) = [note for note in session.report().notes if "no room" in note]
    assert note.startswith(
        "variants of compiled blocks were not compared, and are not used: the budget has no room for "
    )


@pytest.mark.no_cover
def test_blocks_are_compared_in_the_mode_in_which_they_ran_whatever_it_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared as the third step begins has run in the second one."""

    def change(index: int, model: Model, _: Session) -> None:
        model.train(index != 2)

    expected, _ = train(unlimited, (ROWS,) * 6, change)
    lean_is_off_where(monkeypatch, lambda module, x: module.training)
    compared = _room_for(monkeypatch, "as a step begins")
    choosing(monkeypatch, LEAN)
    found, session = train(limited, (ROWS,) * 6, change)
    assert_same(expected, found)
    assert compared
    assert any("is not used" in note for note in session.report().notes)


@pytest.mark.no_cover
def test_blocks_that_are_frozen_now_are_compared_as_they_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(index: int, model: Model, _: Session) -> None:
        model.blocks.requires_grad_(index != 2)
        model.blocks[-1].out.requires_grad_()

    expected, _ = train(unlimited, (ROWS,) * 5, change)
    compared = _room_for(monkeypatch, "as a step begins")
    choosing(monkeypatch, LEAN)
    found, session = train(limited, (ROWS,) * 5, change)
    assert_same(expected, found)
    assert compared
    assert not [note for note in session.report().notes if "is not used" in note]


@pytest.mark.no_cover
def test_a_variant_that_was_not_compared_for_new_sizes_is_not_used_for_them_even_if_it_is_set(
    monkeypatch: pytest.MonkeyPatch, ran: list[str]
) -> None:
    rows = (ROWS,) * 4 + (2 * ROWS,) * 7

    def change(index: int, _: Model, session: Session) -> None:
        blocks = session._shared.compiled
        assert blocks is not None
        if index == 4:
            monkeypatch.setattr(Cpu, "unused_bytes", lambda self, limit_bytes: 0)
        elif index == 9:
            assert not session._shared.unfinished, "settled steps wait for nothing"
            assert set(blocks.variants.values()) == {REFERENCE}
            blocks.set(dict.fromkeys(blocks.variants, LEAN))
            ran.clear()

    expected, _ = train(unlimited, rows)
    lean_is_off_where(monkeypatch, lambda module, x: x.shape[0] == 2 * ROWS)
    choosing(monkeypatch, LEAN)
    found, _ = train(limited, rows, change)
    assert_same(expected, found)
    assert set(ran) == {REFERENCE}


@pytest.mark.parametrize("num_samples", [64, 1])
def test_a_step_that_fits_is_not_refused_for_one_before_it_whose_conclusion_has_waited(
    num_samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(NUM_BLOCKS)]
    model, calls = nn.Sequential(*layers), list[int]()

    def run(rows: int) -> None:
        def loss_sum(x: torch.Tensor) -> tuple[torch.Tensor, int]:
            calls.append(len(x))
            return model(x).square().sum(), len(x)

        calls.clear()
        model.zero_grad()
        session.run(loss_sum, torch.randn(rows, 64))

    monkeypatch.setattr(Cpu, "unused_bytes", lambda self, limit_bytes: 0)
    with Session(model, ram="160KiB", recompute=False) as session:
        session.compile()
        for rows in (512, 512, num_samples, num_samples):
            run(rows)
            assert calls == [rows]
        assert session._shared.refused, "the large ones were too large, which showed later"
        run(512)
        assert calls[0] == 512
        assert len(calls) > 1, "it is split when it has ended"
        assert all(error.__traceback__ is None for error in session._shared.refused.values()), "frames hold tensors"


@pytest.mark.no_cover
def test_what_waits_for_the_next_step_is_dropped_when_the_session_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = _room_for(monkeypatch, "as a step begins")
    choosing(monkeypatch, LEAN)
    _, session = train(limited, (ROWS, ROWS))
    assert session.plan() is None, "it waits for the next step"
    assert session._shared.unfinished is None
    assert not compared


@pytest.mark.no_cover
def test_a_call_of_another_shape_runs_in_the_reference_until_it_was_compared(
    monkeypatch: pytest.MonkeyPatch, ran: list[str]
) -> None:
    rows = (ROWS, ROWS, ROWS, 2 * ROWS, 2 * ROWS, 3 * ROWS, 3 * ROWS, 5 * ROWS, 4 * ROWS)
    expected, _ = train(unlimited, rows)
    choosing(monkeypatch, LEAN)
    ran.clear()
    found, session = train(limited, rows)
    assert_same(expected, found)
    one_shape = [REFERENCE] * NUM_BLOCKS + [REFERENCE, LEAN] * NUM_BLOCKS + [LEAN] * NUM_BLOCKS
    # A second size makes Dynamo compile for all sizes. The third one shows it: the others are no specializations.
    assert ran == [REFERENCE] * NUM_BLOCKS + one_shape * 2 + [REFERENCE] * NUM_BLOCKS + [LEAN] * 3 * NUM_BLOCKS
    assert session.report().num_steps == len(rows)


@pytest.mark.no_cover
def test_comparing_compiles_nothing_that_the_steps_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would compare another specialization than the one that trains."""
    choosing(monkeypatch, LEAN)
    before = private.num_compiled()
    train(limited)
    assert private.num_compiled() - before == NUM_BLOCKS * 2, "a graph for each block in two variants"


def test_blocks_with_hooks_stay_in_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Hooked(Model):
        def __init__(self) -> None:
            super().__init__()
            self.num_calls = 0
            self.blocks[1].register_forward_hook(self.count)

        def count(self, *_: object) -> None:
            self.num_calls += 1

    monkeypatch.setattr(f"{__name__}.Model", Hooked)
    choosing(monkeypatch, LEAN)
    _, session = train(limited, (ROWS,) * 6)
    assert session._shared.compiled is not None
    assert session._shared.compiled.variants == {"blocks.0": LEAN, "blocks.1": REFERENCE}
    (note,) = [note for note in session.report().notes if "not used" in note]
    assert note == (
        "variant 'lean' of blocks.1 is not used: it cannot be compared without running the hooks on the block once more"
    )
    model = session._shared.model
    assert isinstance(model, Hooked)
    assert model.num_calls == 6, "six steps"


def test_what_only_nondeterministic_algorithms_make_differ_is_no_disagreement(
    monkeypatch: pytest.MonkeyPatch, lean_is_off: None
) -> None:
    seen: list[bool] = []

    class OnlyThen(_Off):
        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            seen.append(torch.are_deterministic_algorithms_enabled())
            return grad if seen[-1] else grad * (1 + 2**-20)

    monkeypatch.setattr(f"{__name__}._Off", OnlyThen)
    choosing(monkeypatch, LEAN)
    _, session = train(limited)
    assert session._shared.compiled is not None
    assert set(session._shared.compiled.variants.values()) == {LEAN}
    assert seen[:3] == [False, False, True]
    assert not torch.are_deterministic_algorithms_enabled()


_num_backwards = itertools.count()


@torch.library.custom_op("torchstorm_test::product", mutates_args=())
def product(x: torch.Tensor) -> torch.Tensor:
    """As cuBLAS's do where CUBLAS_WORKSPACE_CONFIG is not set."""
    if is_strict():
        raise RuntimeError("Deterministic behavior was enabled, and this has none")
    return x.clone()


@torch.library.custom_op("torchstorm_test::attention_backward", mutates_args=())
def attention_backward(grad: torch.Tensor) -> torch.Tensor:
    """As flash attention's: other bits each time, unless all that has no deterministic way is to raise."""
    return grad.clone() if is_strict() else grad * (1 + 2**-20 * next(_num_backwards))


@torch.library.custom_op("torchstorm_test::attention", mutates_args=())
def attention(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


product.register_fake(torch.empty_like)
product.register_autograd(lambda ctx, grad: grad)
attention_backward.register_fake(torch.empty_like)
attention.register_fake(torch.empty_like)
attention.register_autograd(lambda ctx, grad: attention_backward(grad))


class Attending(Block):
    def forward(self, x: torch.Tensor, cache: Cache, *, mask: torch.Tensor) -> torch.Tensor:
        return attention(product(super().forward(x, cache, mask=mask)))


def test_attention_that_is_deterministic_only_where_products_would_raise_is_no_disagreement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(f"{__name__}.Block", Attending)
    choosing(monkeypatch, LEAN)
    _, session = train(limited)
    assert session._shared.compiled is not None
    assert session._shared.compiled.notes == ()
    assert set(session._shared.compiled.variants.values()) == {LEAN}
    assert not torch.are_deterministic_algorithms_enabled()


# ---------------------------------------------------------------------- without a compiler


class Calls:
    """Runs a module in any variant, as it is."""

    def __init__(self) -> None:
        self.variants: list[str] = []

    def __call__(self, variant: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.variants.append(variant)
        return module(*args, **kwargs)


def step(
    agreement: Agreement, module: nn.Module, *args: Any, is_compiled: bool, sizes: tuple[int, ...] = (2, 4)
) -> str:
    """One call of a step; returns the variant that it may run in."""
    key = Look("kinds", sizes)
    variant = agreement.variant(key, LEAN)
    given = module, args, {}
    agreement.ran(key, agreement.freeze(key, given), given, is_compiled=is_compiled)
    return variant


CPU = torch.device("cpu")


def test_a_call_that_is_compiled_again_though_it_looks_the_same_is_compared_again() -> None:
    agreement, calls, module, x = Agreement(), Calls(), nn.Linear(4, 4), torch.randn(2, 4)
    used = []
    for is_compiled in (True, False, True, True, False):
        used.append(step(agreement, module, x, is_compiled=is_compiled))
        assert agreement.agrees(LEAN, calls, CPU)
        agreement.settle()
    assert used == [REFERENCE, LEAN, LEAN, REFERENCE, LEAN]
    assert calls.variants == [REFERENCE, LEAN] * 2


def test_calls_of_one_step_that_look_alike_and_are_compiled_apart_are_all_compared() -> None:
    agreement, calls, module, x = Agreement(), Calls(), nn.Linear(4, 4), torch.randn(2, 4)
    used = []
    for compiled in ((True, True), (False, False), (False, False)):
        used += [step(agreement, module, x, is_compiled=is_compiled) for is_compiled in compiled]
        assert agreement.agrees(LEAN, calls, CPU)
        agreement.settle()
    assert used == [REFERENCE] * 4 + [LEAN] * 2
    assert calls.variants == [REFERENCE, LEAN] * 3, "the first one, and both again"


def used_with(sizes: list[tuple[int, ...]], compiled: set[int]) -> tuple[list[str], list[str]]:
    """In which variants steps of such sizes may run, of which some are compiled; and what runs between them."""
    agreement, calls, module, x = Agreement(), Calls(), nn.Linear(4, 4), torch.randn(2, 4)
    used = []
    for number, size in enumerate(sizes):
        used.append(step(agreement, module, x, is_compiled=number in compiled, sizes=size))
        assert agreement.agrees(LEAN, calls, CPU)
        agreement.settle()
    return used, calls.variants


def test_calls_of_sizes_that_dynamo_keeps_open_are_one_specialization() -> None:
    used, ran = used_with([(2, 4), (3, 4), (5, 4), (7, 4), (9, 4), (2, 4)], compiled={0, 1})
    assert used == [REFERENCE] * 3 + [LEAN] * 3, "the third shows that nothing is compiled for other sizes"
    assert ran == [REFERENCE, LEAN] * 2


def test_what_one_block_of_a_step_has_compiled_does_not_show_that_sizes_are_open() -> None:
    agreement, calls, module, x = Agreement(), Calls(), nn.Linear(4, 4), torch.randn(2, 4)
    used = []
    for size in (2, 3, 5, 7):
        for name, is_compiled in (("first", size < 4), ("second", False)):  # two blocks, which share what is compiled
            key, given = Look(name, (size, 4)), (module, (x,), dict[str, Any]())
            used.append(agreement.variant(key, LEAN))
            agreement.ran(key, agreement.freeze(key, given), given, is_compiled=is_compiled)
        assert agreement.agrees(LEAN, calls, CPU)
        agreement.settle()
    assert used == [REFERENCE] * 6 + [LEAN] * 2


def test_other_sizes_than_the_open_ones_and_those_of_0_and_1_are_specializations_of_their_own() -> None:
    opened = [(2, 4), (3, 4), (5, 4)]
    for other in ((5, 8), (1, 4), (0, 4), (5, 4, 4)):
        assert used_with([*opened, other, other], compiled={0, 1, 3})[0][3:] == [REFERENCE, LEAN]


def test_what_is_compiled_for_an_open_size_is_compared_before_the_next_step_and_closes_it() -> None:
    used, ran = used_with([(2, 4), (3, 4), (5, 4), (7, 4), (9, 4), (9, 4), (11, 4)], compiled={0, 1, 3})
    assert used == [REFERENCE] * 3 + [LEAN, REFERENCE, LEAN, LEAN]
    assert ran == [REFERENCE, LEAN] * 3


def test_within_a_step_calls_that_look_alike_run_in_one_variant() -> None:
    """Checkpointing runs a block twice, and compares what both have saved."""
    agreement, calls, module, x = Agreement(), Calls(), nn.Linear(4, 4), torch.randn(2, 4)
    step(agreement, module, x, is_compiled=True)
    assert agreement.agrees(LEAN, calls, CPU)
    assert step(agreement, module, x, is_compiled=False) == REFERENCE
    agreement.settle()
    assert step(agreement, module, x, is_compiled=False) == LEAN


def test_arguments_that_cannot_be_copied_are_a_reason() -> None:
    class Local:
        pass

    agreement = Agreement()
    step(agreement, nn.Identity(), Local(), is_compiled=True)
    assert not agreement.agrees(LEAN, Calls(), CPU)
    assert agreement.dropped[LEAN].startswith("it cannot be compared, since the block's arguments cannot be copied (")


def test_a_variant_that_cannot_run_is_a_reason() -> None:
    def call(variant: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if variant == LEAN:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nand so on")
        return module(*args)

    agreement = Agreement()
    step(agreement, nn.Linear(4, 4), torch.randn(2, 4), is_compiled=True)
    assert not agreement.agrees(LEAN, call, CPU)
    expected = "it could not be compared (OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB)"
    assert agreement.dropped == {LEAN: expected}


def test_masks_and_indices_keep_their_values_and_other_tensors_only_their_looks() -> None:
    seen: list[tuple[torch.Tensor, ...]] = []

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, *args: torch.Tensor) -> torch.Tensor:
            seen.append(args)
            return args[0] * self.weight

    x = torch.randn(3, 4, requires_grad=True).t()
    mask = torch.tensor([True, False, True]).expand(4, 3)
    indices = torch.arange(12).view(3, 4)[:, 1:]
    empty = torch.empty(0, 2)
    agreement = Agreement()
    step(agreement, Looks(), x, mask, indices, x, empty, is_compiled=True)
    assert agreement.agrees(LEAN, Calls(), CPU)
    for args in seen:
        for found, expected in zip(args, (x, mask, indices, x, empty), strict=True):
            assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype)
        assert args[0] is args[3]
        assert args[0].requires_grad
        assert not torch.equal(args[0], x)
        assert torch.equal(args[1], mask)
        assert torch.equal(args[2], indices)
    assert torch.equal(seen[0][0], seen[1][0])


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (0.0, -0.0, False),
        (float("nan"), -float("nan"), True),
        (1.0, 1.0, True),
        (1.0, 1.0 + 2**-20, False),
    ],
)
def test_bits_are_compared_and_not_values(one: float, other: float, same: bool) -> None:
    assert case_module._same_bits(torch.tensor([one]), torch.tensor([other])) == same
    assert CHEAP == REFERENCE


@pytest.mark.no_cover
def test_variants_are_not_chosen_by_the_times_of_a_step_that_compiles_but_for_once(
    monkeypatch: pytest.MonkeyPatch, ran: list[str]
) -> None:
    """A second size does: what it took is no time of the step's."""
    found = choosing(monkeypatch, LEAN)
    _, session = train(limited, (ROWS, 2 * ROWS, 2 * ROWS, 2 * ROWS))
    assert session._shared.compiled is not None
    assert set(session._shared.compiled.variants.values()) == {LEAN}
    assert len(found) == 1
    assert ran[: 3 * NUM_BLOCKS] == [REFERENCE] * 3 * NUM_BLOCKS, "which found it, which compiled, and which chose"
