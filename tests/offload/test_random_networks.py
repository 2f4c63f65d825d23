"""Whatever the network and the budget: the same bits, never over budget, and a forecast that comes true."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from offload.steps import assert_same, train
from torchstorm.errors import BudgetError
from torchstorm.offload.session import Session

WIDTH = 16
# A storage has a few hundred bytes, 64 KiB or 256 KiB: too small to move, moved with others, moved alone.
ROWS = (4, 1000, 4096)

pytestmark = pytest.mark.no_cover


class Cube(torch.autograd.Function):
    """Saves its input, its output and a tensor of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        square = x * x
        y = square * x
        ctx.save_for_backward(x, square, y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        x, square, y = ctx.saved_tensors
        assert torch.equal(square * x, y)
        return 3 * square * gradient


def linear(x: torch.Tensor, layer: nn.Module, others: list[torch.Tensor]) -> torch.Tensor:
    return layer(x)


def gelu(x: torch.Tensor, layer: nn.Module, others: list[torch.Tensor]) -> torch.Tensor:
    return F.gelu(x)


def dropout(x: torch.Tensor, layer: nn.Module, others: list[torch.Tensor]) -> torch.Tensor:
    return F.dropout(x, 0.3)


def chunks(x: torch.Tensor, layer: nn.Module, others: list[torch.Tensor]) -> torch.Tensor:
    one, other = layer(x).chunk(2, dim=-1)
    return torch.cat([one * torch.tanh(other), other * torch.sin(one)], dim=-1)


def transposes(x: torch.Tensor, layer: nn.Module, others: list[torch.Tensor]) -> torch.Tensor:
    y = layer(x).t()
    return (torch.softmax(y, dim=0) * y).t()


def views(x: torch.Tensor, layer: nn.Module, others: list[torch.Tensor]) -> torch.Tensor:
    y = layer(x).view(-1, 2, WIDTH // 2)
    return (y.flip(1) * y[:, :1].expand_as(y)).reshape(x.shape)


def relu_in_place(x: torch.Tensor, layer: nn.Module, others: list[torch.Tensor]) -> torch.Tensor:
    return F.relu(layer(x), inplace=True)


def add_in_place(x: torch.Tensor, layer: nn.Module, others: list[torch.Tensor]) -> torch.Tensor:
    y = layer(x)
    y[:, ::2] += 1
    return y.mul_(0.5)


def residual(x: torch.Tensor, layer: nn.Module, others: list[torch.Tensor]) -> torch.Tensor:
    return x + others[0]


def earlier_twice(x: torch.Tensor, layer: nn.Module, others: list[torch.Tensor]) -> torch.Tensor:
    return x * torch.sigmoid(others[0]) + others[-1] * others[0] * 0.1


def layer_norm(x: torch.Tensor, layer: nn.Module, others: list[torch.Tensor]) -> torch.Tensor:
    return F.layer_norm(x, (WIDTH,))


def many_uses(x: torch.Tensor, layer: nn.Module, others: list[torch.Tensor]) -> torch.Tensor:
    return torch.tanh(x * x * x + torch.sin(x) * torch.cos(x) + x.abs())


def no_grad_island(x: torch.Tensor, layer: nn.Module, others: list[torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        mask = layer(x) > 0
    return torch.where(mask, x, x * 0.1)


def detached(x: torch.Tensor, layer: nn.Module, others: list[torch.Tensor]) -> torch.Tensor:
    return x * layer(x).detach().exp().clamp(max=2)


def custom_function(x: torch.Tensor, layer: nn.Module, others: list[torch.Tensor]) -> torch.Tensor:
    return Cube.apply(torch.tanh(x))


def gathered(x: torch.Tensor, layer: nn.Module, others: list[torch.Tensor]) -> torch.Tensor:
    return torch.gather(x, 1, x.argsort(dim=1)) + layer(x)


def gates(x: torch.Tensor, layer: nn.Module, others: list[torch.Tensor]) -> torch.Tensor:
    """As recurrent cells do: chunks that are changed in place, each with a version counter of its own."""
    one, other = layer(x).unsafe_chunk(2, dim=-1)
    return torch.cat([one.sigmoid_(), other.tanh_()], dim=-1)


OPERATIONS: list[Callable[[torch.Tensor, nn.Module, list[torch.Tensor]], torch.Tensor]] = [
    linear,
    gelu,
    dropout,
    chunks,
    transposes,
    views,
    relu_in_place,
    add_in_place,
    residual,
    earlier_twice,
    layer_norm,
    many_uses,
    no_grad_island,
    detached,
    custom_function,
    gathered,
]


class RandomNetwork(nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        by_name = {operation.__name__: operation for operation in [*OPERATIONS, gates]}
        self.operations = [linear, *(by_name[name] for name in names)]
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in self.operations)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = [x]
        for operation, layer in zip(self.operations, self.layers, strict=True):
            # `outputs` holds what nobody changes in place afterwards: each operation changes only its own.
            outputs.append(operation(outputs[-1], layer, outputs))
        return outputs[-1]


def step_of(rows: int, ending: str) -> Callable[[nn.Module, int], torch.Tensor]:
    def step(model: nn.Module, index: int) -> torch.Tensor:
        x = torch.randn(rows, WIDTH)
        loss = model(x).square().mean()
        if ending == "twice":  # the module is called again
            loss = loss + model(x * 0.5).mean()
        if ending == "accumulated":
            loss.backward()
            loss = model(x.flip(0)).square().mean()
        loss.backward()
        return loss

    return step


def unlimited_bytes(make: Callable[[], nn.Module], step: Callable[[nn.Module, int], torch.Tensor]) -> int:
    _, session = train(make, step, lambda model, optimizer: Session(model, unlimited=True), num_steps=1)
    assert session is not None
    return session.usage().ram_bytes


def smallest_bytes(make: Callable[[], nn.Module], step: Callable[[nn.Module, int], torch.Tensor], disk: str) -> int:
    """What the error names for a hopeless budget, asked again until it holds (a test of its own says it must)."""
    smallest = 1024
    for _ in range(8):
        try:
            with tempfile.TemporaryDirectory(dir=disk) as directory:
                _, session = train(make, step, lambda m, o: Session(m, ram=smallest, disk=directory), num_steps=1)  # noqa: B023
            assert session is not None
            session.close()
        except BudgetError as error:
            smallest = error.smallest_bytes or error.needed_bytes
        else:
            break
    return smallest


def check(names: list[str], rows: int, ending: str, share: float, self_check: bool) -> None:
    """Trains with a budget `share` of the way from the smallest feasible one to all that is saved."""

    def make() -> nn.Module:
        return RandomNetwork(names)

    step = step_of(rows, ending)
    with tempfile.TemporaryDirectory() as directory:
        everything = unlimited_bytes(make, step)
        smallest = smallest_bytes(make, step, directory)
        budget = smallest + int(share * max(everything - smallest, 0))
        note(f"saved {everything}, smallest feasible {smallest}, budget {budget}")
        expected, _ = train(make, step, None, num_steps=5)
        found, session = train(
            make, step, lambda m, o: Session(m, ram=budget, disk=directory, check=self_check), num_steps=5
        )
        assert session is not None
        assert_same(expected, found)
        report = session.report()
        session.close()
        assert list(Path(directory).iterdir()) == []
    assert report.highest is not None
    assert report.measured is not None
    assert report.forecast is not None
    assert report.highest.ram_bytes <= budget
    if report.num_in_force:
        assert report.measured.ram_bytes == pytest.approx(report.forecast.ram_bytes, rel=0.05)
        assert report.measured.disk_bytes == pytest.approx(report.forecast.disk_bytes, rel=0.05, abs=4096)


networks = st.lists(st.sampled_from([operation.__name__ for operation in OPERATIONS]), min_size=1, max_size=8)
# No shrinking: a failure is told with its numbers, and shrinking what trains four times takes minutes.
options = settings(
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@settings(options, max_examples=12)
@given(
    names=networks,
    rows=st.sampled_from(ROWS),
    ending=st.sampled_from(["once", "twice", "accumulated"]),
    share=st.floats(0, 1),
    self_check=st.booleans(),
)
def test_a_random_network_within_a_random_budget_is_exact_and_as_forecast(
    names: list[str], rows: int, ending: str, share: float, self_check: bool
) -> None:
    torch.set_num_threads(1)
    check(names, rows, ending, share, self_check)


@settings(options, max_examples=4)
@given(names=networks, rows=st.sampled_from(ROWS[1:]), at=st.integers(0, 8), share=st.floats(0, 1))
def test_chunks_changed_in_place_one_by_one_are_exact_too(names: list[str], rows: int, at: int, share: float) -> None:
    torch.set_num_threads(1)
    check([*names[:at], "gates", *names[at:]], rows, "once", share, False)


@settings(options, max_examples=5)
@given(
    names=networks, rows=st.lists(st.sampled_from((100, 300, 2000)), min_size=4, max_size=6), share=st.floats(0.1, 1)
)
def test_a_random_network_with_changing_lengths_is_exact(names: list[str], rows: list[int], share: float) -> None:
    torch.set_num_threads(1)

    def make() -> nn.Module:
        return RandomNetwork(names)

    def step(model: nn.Module, index: int) -> torch.Tensor:
        return step_of(rows[index], "once")(model, index)

    longest = step_of(max(rows), "once")
    with tempfile.TemporaryDirectory() as directory:
        smallest = smallest_bytes(make, longest, directory)
        budget = smallest + int(share * max(unlimited_bytes(make, longest) - smallest, 0))
        expected, _ = train(make, step, None, num_steps=len(rows))
        found, session = train(make, step, lambda m, o: Session(m, ram=budget, disk=directory), num_steps=len(rows))
        assert session is not None
        assert_same(expected, found)
        highest = session.report().highest
        session.close()
    assert highest is not None
    assert highest.ram_bytes <= budget


@pytest.mark.parametrize("at_once", [1, 2, 3])
@settings(options, max_examples=4)
@given(numel=st.integers(1100, 4000), odd=st.integers(1, 511))
def test_small_storages_of_any_size_leave_together_within_a_budget_of_any(at_once: int, numel: int, odd: int) -> None:
    torch.set_num_threads(1)

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(numel))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(70):
                x = torch.tanh(x * self.weight)
            return x

    def step(model: nn.Module, index: int) -> torch.Tensor:
        loss: torch.Tensor = model(torch.linspace(-1, 1, numel)).sum()
        loss.backward()
        return loss

    expected, _ = train(Chain, step, None)
    # A buffer takes a 32nd of the budget: so many such storages, and not quite the room that the last one rounds up to.
    budget = 32 * (at_once * (-(-4 * numel // 512) * 512) - 512 + 4 * numel % 512) + odd
    with tempfile.TemporaryDirectory() as directory:
        found, session = train(
            Chain, step, lambda m, o: Session(m, ram=budget, disk=directory, recompute=False, check=True)
        )
        assert session is not None
        report = session.report()
        session.close()
    assert_same(expected, found)
    assert report.highest is not None
    assert report.highest.disk_bytes > 0
    assert report.highest.ram_bytes <= budget
