"""Functions of PyTorch's that a settled step records as a whole run one operation, and nothing besides."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from offload.forced import at_random, force_recompute, recomputing, recorded_as_a_whole
from offload.noted import SeenOperations
from torchstorm.errors import UnsupportedError
from torchstorm.offload.recompute.operators import function, single
from torchstorm.offload.replan import problems
from torchstorm.offload.session import Session
from torchstorm.plan.plan import Plan
from torchstorm.plan.solve import solve

WIDTH, ROWS, NUM_BLOCKS = 32, 512, 4

Run = Callable[[torch.Tensor], Any]
RUNS: dict[str, Run] = {
    "mul": lambda x: x * x,
    "mul by a number": lambda x: x * 0.5,
    "add": lambda x: x + x,
    "add, scaled": lambda x: torch.add(x, x, alpha=2),
    "sub": lambda x: x - 1.0,
    "div": lambda x: x / 3.0,
    "div, rounded": lambda x: torch.div(x, x, rounding_mode="floor"),
    "neg": lambda x: -x,
    "pow": lambda x: x.pow(2),
    "pow, of a number": lambda x: torch.pow(2.0, x),
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 1),
    "sqrt": torch.sqrt,
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "tanh": lambda x: x.tanh(),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "mean of all": lambda x: x.mean(),
    "sum": lambda x: x.sum(0),
    "sum, wider": lambda x: x.sum(0, dtype=torch.float64),
    "cat": lambda x: torch.cat((x, x), dim=-1),
    "stack": lambda x: torch.stack([x, x]),
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "mish": F.mish,
    "softplus": F.softplus,
    "masked_fill": lambda x: x.masked_fill(x > 0, 1.0),
    "clamp": lambda x: x.clamp(-1, 1),
    "cumsum": lambda x: x.cumsum(0),
    "index_select": lambda x: x.index_select(0, torch.tensor([0, 2])),
    "mm": lambda x: torch.mm(x, x.t()),
    "addmm": lambda x: torch.addmm(x[0, :ROWS].sum() * torch.ones(ROWS), x, x.t()),
    "clone": lambda x: x.clone(),
    "to": lambda x: x.to(torch.bfloat16),
    "to, what it is": lambda x: x.to(torch.float32),
    "float": lambda x: x.bfloat16().float(),
    "contiguous": lambda x: x.t().contiguous(),
    "contiguous already": lambda x: x.contiguous(),
    "repeat": lambda x: x.repeat(2, 1),
    "lerp": lambda x: torch.lerp(x, -x, 0.3),
    "rsub": lambda x: torch.rsub(x, 1.0),
    "addcmul": lambda x: torch.addcmul(x, x, x),
}


class SeenFunctions(TorchFunctionMode):
    """For each function that is recorded as a whole, the operations within it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, SeenOperations, torch.Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with SeenOperations() as operations:
            out = func(*args, **(kwargs or {}))
        if function(func) is not None:
            self.seen.append((func, operations, out))
        return out


@pytest.mark.parametrize("run", [pytest.param(run, id=name) for name, run in RUNS.items()])
def test_what_is_recorded_as_a_whole_runs_one_operation_that_makes_what_it_returns(run: Run) -> None:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with SeenFunctions() as functions:
        run(x)
    assert functions.seen, "it is recorded as a whole"
    for func, operations, out in functions.seen:
        assert type(out) is torch.Tensor
        is_nothing = out is x or (not operations.seen and func.__name__ in ("to", "contiguous"))
        assert len(operations.seen) == (0 if is_nothing else 1), operations.seen


MORE = (
    *(F.linear, F.dropout, F.softmax, F.layer_norm, F.embedding, F.mse_loss, F.scaled_dot_product_attention),
    *(torch.softmax, torch.dropout, torch.layer_norm, torch.matmul, torch.einsum, torch.split, torch.max),
    *(torch.Tensor.view, torch.Tensor.reshape, torch.Tensor.add_, torch.Tensor.uniform_, torch.rand_like),
)


@pytest.mark.parametrize("func", MORE)
def test_what_may_do_more_is_not_recorded_as_a_whole(func: Any) -> None:
    assert function(func) is None


def test_an_operator_of_others_is_not_taken_for_pytorch_s_of_the_same_name() -> None:
    with torch.library._scoped_library("torchstorm_test_functions", "DEF") as library:
        library.define("mul(Tensor x, Tensor y) -> Tensor")
        assert function(torch.ops.torchstorm_test_functions.mul) is None
        assert function(torch.ops.torchstorm_test_functions.mul.default) is None
    assert function(torch.mul) is not None


@pytest.mark.parametrize("shape", [(ROWS, WIDTH), (4, 8, WIDTH), (1, 1, WIDTH), (3, 1, WIDTH), (1, WIDTH)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_trained", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_linear_is_the_product_that_is_recorded_for_it(
    shape: tuple[int, ...], has_bias: bool, is_trained: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(16, WIDTH, generator=generator, dtype=dtype).requires_grad_(is_trained)
    args = (rows, weight, torch.randn(16, generator=generator, dtype=dtype)) if has_bias else (rows, weight)
    found = single(F.linear, args, {})
    assert found is not None
    again, what = found
    with SeenOperations() as expected:
        out = F.linear(*args)
    with SeenOperations() as replayed, torch._C._AutoDispatchBelowAutograd():
        made = again(*(one.detach() for one in args))
    seen = [one for one in expected.seen if one[0] != "aten._unsafe_view.default"]  # of what the product has made
    assert seen == replayed.seen
    assert [name for name, _ in seen] == [what.name]
    assert torch.equal(out.flatten(), made.flatten())


def test_linear_of_other_rows_is_not_taken_for_a_product() -> None:
    weight, bias = torch.randn(16, WIDTH), torch.randn(16)
    assert single(F.linear, (torch.randn(WIDTH), weight), {}) is None
    assert single(F.linear, (torch.randn(2, 2, 2, WIDTH), weight, bias), {}) is None
    assert single(F.linear, (torch.randn(WIDTH, ROWS).t(), weight), {}) is None
    assert single(F.linear, (torch.randn(0, WIDTH), weight), {}) is None
    assert single(F.linear, (torch.randn(ROWS, WIDTH), weight[0]), {}) is None
    assert single(F.linear, (torch.randn(ROWS, WIDTH),), {"weight": weight}) is None


@pytest.mark.parametrize("has_weight", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_norm_is_the_operation_that_is_recorded_for_it(
    has_weight: bool, has_bias: bool, by_name: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(4, 8, WIDTH, generator=generator, dtype=dtype).transpose(0, 1)
    weight = torch.randn(WIDTH, generator=generator, dtype=dtype) if has_weight else None
    bias = torch.randn(WIDTH, generator=generator, dtype=dtype) if has_bias else None
    args, kwargs = ((rows, [WIDTH], weight, bias, 1e-3), {})
    if by_name:
        args, kwargs = (rows,), {"normalized_shape": [WIDTH], "bias": bias, "weight": weight, "eps": 1e-3}
    found = single(F.layer_norm, args, kwargs)
    assert found is not None
    again, what = found
    with SeenOperations() as expected:
        out = F.layer_norm(*args, **kwargs)
    with SeenOperations() as replayed, torch._C._AutoDispatchBelowAutograd():
        made = again(*args, **kwargs)
    assert expected.seen == replayed.seen
    assert [name for name, _ in expected.seen] == [what.name]
    assert torch.equal(out, made[0])


@pytest.mark.parametrize("trained", [one for one in itertools.product((False, True), repeat=3) if any(one)], ids=str)
def test_autograd_saves_what_a_layer_norm_makes_in_one_order(trained: tuple[bool, bool, bool]) -> None:
    rows, weight, bias = torch.randn(8, WIDTH) + 3, torch.randn(WIDTH), torch.randn(WIDTH)
    _, *made = torch.native_layer_norm(rows, [WIDTH], weight, bias, 1e-5)
    given = [one.requires_grad_(flag) for one, flag in zip((rows, weight, bias), trained, strict=True)]
    saved: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if all(tensor.untyped_storage()._cdata != one.untyped_storage()._cdata for one in given):
            saved.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        F.layer_norm(rows, [WIDTH], weight, bias, 1e-5)
    assert len(saved) in (0, 2)
    assert all(torch.equal(one, other) for one, other in zip(saved, made, strict=bool(saved)))


class Norms(nn.Module):
    """Autograd saves what a layer norm makes beside its result."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(NUM_BLOCKS))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(NUM_BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(-1, 4)  # enough rows for their means to be parcels of their own
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x)).tanh()
        return x


@pytest.mark.parametrize("again", [(0, 1, 2), (0,), (1,), (2,), (0, 1), (0, 2), (1, 2)], ids=str)
def test_what_a_layer_norm_makes_is_computed_again_whatever_of_it_stays(
    again: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_wanted: list[int] = []

    def forced(trace: Any, machine: Any, budget: Any, **options: Any) -> Plan:
        made: dict[int, list[int]] = {}  # operation -> parcels, in the order in which they are saved
        for storage in trace.storages:
            op = trace.values[storage.value].op if storage.value >= 0 else -1
            if op >= 0 and trace.ops[op].name == "aten.native_layer_norm.default":
                made.setdefault(op, []).append(storage.parcel)
        # Means and deviations are saved within the function, and the rows by what comes after it.
        wanted = {parcels[(place - 1) % 3] for parcels in made.values() for place in again if len(parcels) == 3}
        num_wanted.append(len(wanted))
        return recomputing(solve(trace, machine, budget, **options), lambda number: number in wanted)

    monkeypatch.setattr(problems, "solve", forced)
    recorded = recorded_as_a_whole(monkeypatch)
    torch.manual_seed(0)
    model = Norms()
    with Session(model, ram="512KiB", disk=str(tmp_path), check=True) as session:
        plan = train(model, session, 6)
        assert num_wanted[-1] == len(again) * NUM_BLOCKS
        assert sum(one.tier == "recompute" for one in plan.placements) >= num_wanted[-1]
        assert session.report().num_planned >= 4
    assert "aten.native_layer_norm.default" in recorded


class SavesResults(nn.Module):
    """Autograd saves what these functions make before they have returned it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=index % 2 == 0) for index in range(NUM_BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(x).tanh() * 0.5
            x = x + torch.sigmoid(hidden).exp() * torch.rsqrt(hidden * hidden + 1.0)
            x = x * torch.vmap(torch.tanh)(x)
        return x


def take_step(model: nn.Module, index: int) -> list[torch.Tensor]:
    loss = model(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(index))).square().mean()
    loss.backward()
    found = [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)]
    model.zero_grad()
    return found


def train(model: nn.Module, session: Session, num_steps: int) -> Plan:
    """Steps with and without the Session, which have the same bits; returns the plan in force then."""
    for index in range(num_steps):
        expected = take_step(model, index)
        with session.step():
            found = take_step(model, index)
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True)), index
    plan = session.plan()
    assert plan is not None
    return plan


@pytest.mark.parametrize("seed", range(4))
def test_functions_that_save_their_results_are_computed_again_as_planned(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_recompute(monkeypatch, at_random(random.Random(seed), 1.0 if seed == 0 else 0.6))
    torch.manual_seed(0)
    model = SavesResults()
    recorded = recorded_as_a_whole(monkeypatch)
    with Session(model, ram="3MiB", disk=str(tmp_path), check=True) as session:
        plan = train(model, session, 7)
        assert plan.recomputes
        assert session.report().num_planned >= 5
    assert {f"torch.{name}" for name in ("tanh", "sigmoid", "exp", "mul")} <= set(recorded) if seed == 0 else recorded


class Products(nn.Module):
    """Under autocast, each product is of what was converted for it, which autograd saves."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 6 for _ in range(NUM_BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.t().contiguous()
        for weight in self.weights:
            with torch.autocast("cpu", torch.bfloat16):
                hidden = torch.mm(weight, x)  # converts its last argument first
            x = x + hidden.float().sin()
        return x


def test_what_autocast_converts_within_a_function_is_computed_again_as_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forced(trace: Any, machine: Any, budget: Any, **options: Any) -> Plan:
        makers = [trace.values[storage.value].op if storage.value >= 0 else -1 for storage in trace.storages]
        converted = {
            storage.parcel
            for storage, op in zip(trace.storages, makers, strict=True)
            if op >= 0 and trace.ops[op].name == "aten._to_copy.default" and storage.nbytes == 2 * ROWS * WIDTH
        }
        return recomputing(solve(trace, machine, budget, **options), lambda number: number in converted)

    monkeypatch.setattr(problems, "solve", forced)
    torch.manual_seed(0)
    model = Products()
    with Session(model, ram="1MiB", disk=str(tmp_path), check=True) as session:
        plan = train(model, session, 6)
        assert sum(one.tier == "recompute" for one in plan.placements) == NUM_BLOCKS
        assert session.report().num_planned >= 4


class Lists(nn.Module):
    """Gives functions a list that it changes afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            shape, dims = [4, WIDTH // 4], [1]
            y = F.layer_norm(x.view(-1, *shape).sin(), shape)
            shape.pop(0)
            z = F.layer_norm(y.cos(), shape).flatten(1)
            w = torch.flip(z.sin(), dims).exp()
            dims[0] = 0
            x = x + layer(z * w * 0.1).tanh()
        return x


def test_a_list_that_is_changed_after_the_call_is_recorded_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_recompute(monkeypatch)
    recorded = recorded_as_a_whole(monkeypatch)
    torch.manual_seed(0)
    with Session(Lists(), ram="3MiB", disk=str(tmp_path)) as session:
        assert train(session._shared.model, session, 6).recomputes
    assert {"aten.native_layer_norm.default", "torch.flip"} <= set(recorded)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.full((WIDTH,), 1.5) for _ in range(NUM_BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            x = (x * scale).sin() + x
        return x


def test_a_weight_that_is_given_other_memory_before_it_is_read_again_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autograd's counter does not tell of it."""
    force_recompute(monkeypatch)
    torch.manual_seed(0)
    model = Scaled()
    with Session(model, ram="3MiB", disk=str(tmp_path)) as session:
        assert train(model, session, 6).recomputes

        def swap() -> None:
            with session.step():
                loss = model(torch.randn(ROWS, WIDTH)).square().mean()
                model.scales[0].data = torch.full((WIDTH,), 2.5)
                loss.backward()

        with pytest.raises(UnsupportedError, match="was given other memory since"):
            swap()
        model.zero_grad()
        train(model, session, 3)


class Louder(TorchFunctionMode):
    """Changes what a function returns."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 1.5 if func in (torch.tanh, torch.Tensor.tanh, F.layer_norm) else out


@pytest.mark.parametrize("is_whole", [False, True], ids=["changed", "on a device"])
def test_a_function_that_a_mode_of_the_user_s_changes_is_recorded_as_what_runs(
    is_whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_recompute(monkeypatch)
    recorded = recorded_as_a_whole(monkeypatch)
    torch.manual_seed(0)
    model = SavesResults()
    with torch.device("cpu") if is_whole else Louder(), Session(model, ram="3MiB", disk=str(tmp_path)) as session:
        assert train(model, session, 6).recomputes
        assert session.report().num_planned >= 3
    assert ("torch.tanh" in recorded) == is_whole
