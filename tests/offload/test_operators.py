"""Operators stand in for the mode that sees functions: whatever changes, steps are recorded as they are by it."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo  # C++ stands in for the mode only where Dynamo says when it compiles
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from offload.forced import at_random, force_recompute
from torchstorm.offload.native import library
from torchstorm.offload.recompute.watched import Calls
from torchstorm.offload.replan.planner import Planner
from torchstorm.offload.session import Session
from torchstorm.offload.step.departing import Departing
from torchstorm.offload.step.pace import Pace

ROWS, WIDTH, NUM_BLOCKS, NUM_SETTLING = 128, 32, 3, 7

num_modes = torch._C._len_torch_function_stack


class Way(NamedTuple):
    """What may differ from one step to the next."""

    temperature: float = 1.5
    is_called_before: bool = False  # a function, which the mode sees, and may leave after
    at_once: bool = False  # without an instruction in between, after which it may
    product: str = "operator"
    shape: type = tuple
    order: int = 1
    activation: Callable[[torch.Tensor], torch.Tensor] = F.silu
    is_detached: bool = False
    is_cast: bool = False  # by autocast


PRODUCTS: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "operator": lambda x, y: x * y,
    "function": torch.mul,
    "by name": lambda x, y: torch.mul(input=x, other=y),
    "by names the other way": lambda x, y: torch.mul(other=y, input=x),
    "reversed": lambda x, y: y * x,
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor, way: Way) -> torch.Tensor:
        one, other = self.first(x), self.second(x)
        if way.is_called_before:
            torch.ones(1)
        multiply = PRODUCTS[way.product]
        one = multiply(one, way.temperature)
        pair = (one, other)[:: way.order]
        joined = torch.cat(way.shape(pair), -1) if way.shape is list else torch.cat(pair, dim=-1)
        normed = F.layer_norm(joined[:, :WIDTH], way.shape((WIDTH,)), self.weight, eps=1e-5)
        if way.is_detached:
            normed = normed.detach().requires_grad_() * self.weight
        # What is given twice nobody can tell apart: that stays with the mode, which is there in what comes next.
        if way.at_once:
            square, second = map(torch.mul, (normed, other), (normed, way.temperature))
        else:
            square = torch.mul(normed, normed)
            second = torch.mul(other, way.temperature)
        gate = way.activation(normed) * one * square.tanh()
        return x + gate * second.sin() * gate.mean()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.modes: list[int] = []

    def forward(self, x: torch.Tensor, way: Way) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, way)
            self.modes.append(num_modes())
        return x.square().mean()


def step(model: Net, index: int, way: Way) -> list[torch.Tensor]:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(index))
    with torch.autocast("cpu", torch.bfloat16, enabled=way.is_cast):
        loss = model(x, way)
    loss.backward()
    found = [loss.detach(), *(one.grad.clone() for one in model.parameters() if one.grad is not None)]
    model.zero_grad()
    return found


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def compare(
    ways: list[Way],
    monkeypatch: pytest.MonkeyPatch,
    *,
    num_settling: int = NUM_SETTLING,
    before: Mapping[int, Callable[[Session], None]] = MappingProxyType({}),
) -> Net:
    """Takes steps of these ways, after some that are alike, with a Session and without; the model that has had one.
    `before` some steps, something is done with the Session."""
    monkeypatch.setattr(Planner, "judge", lambda *_: None)  # no plan is replaced for the times of its steps
    force_recompute(monkeypatch, at_random(random.Random(0), 0.9))
    plain, model = net(), net()
    ways = [Way()] * num_settling + ways
    expected = [step(plain, index, way) for index, way in enumerate(ways)]
    with Session(model, unlimited=True) as session:
        with session.step():
            step(model, 0, Way())
        ram_bytes = session.usage().ram_bytes
    with tempfile.TemporaryDirectory() as folder, Session(model, ram=int(0.9 * ram_bytes), disk=folder) as session:
        for index, (way, ones) in enumerate(zip(ways, expected, strict=True)):
            model.modes.clear()
            if index in before:
                before[index](session)
            with session.step():
                others = step(model, index, way)
            assert all(map(torch.equal, ones, others)), (index, way)
        plan = session.plan()
        assert plan is not None
        assert plan.recomputes
    return model


def build() -> None:
    with Session(nn.Linear(1, 1), unlimited=True):
        assert not library.wait()


@pytest.fixture(autouse=True, scope="module")
def _built() -> None:
    build()


def check_where_the_mode_is() -> None:
    with pytest.MonkeyPatch.context() as patch:
        model = compare([], patch, num_settling=12)
    assert model.modes[1:] == [0] * (NUM_BLOCKS - 1), model.modes
    known = [one for one in gc.get_objects() if type(one) is Calls and one.operators is not None]
    assert any(len(one._covered) > 0.6 * len(one.moments) and len(one.numbers) > 6 * NUM_BLOCKS for one in known)


@pytest.mark.no_cover
def test_where_operators_are_known_the_mode_is_away_though_all_is_recorded() -> None:
    # In a process of its own: where others have loaded the library twice, the first one has the dispatcher's key.
    code = "from offload import test_operators as tests; tests.build(); tests.check_where_the_mode_is()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)


def test_a_number_that_the_mode_saw_change_is_not_taken_for_the_one_that_was_learnt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen, unseen = Way(temperature=0.7, at_once=True), Way()
    compare([seen, unseen, seen, unseen, unseen, seen], monkeypatch)


@pytest.mark.parametrize(
    "way",
    [
        Way(temperature=0.7, is_called_before=True),
        *(Way(product=name, is_called_before=True) for name in PRODUCTS),
        Way(shape=list, is_called_before=True),
        Way(order=-1, is_called_before=True),
        Way(activation=F.gelu, is_called_before=True),
        Way(activation=torch.sigmoid, is_called_before=True),
        Way(is_detached=True, is_called_before=True),
        Way(is_cast=True, is_called_before=True),
    ],
    ids=lambda way: ", ".join(f"{name}" for name, one in way._asdict().items() if one != getattr(Way(), name)),
)
def test_what_an_operator_is_given_otherwise_is_recorded_otherwise(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    compare([way, Way(), way, way, Way()], monkeypatch)


def test_zeros_of_both_signs_and_numbers_of_other_kinds_are_not_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: list[Any] = [0.0, -0.0, 0, 2, 2.0, True, 1.5]
    compare([Way(temperature=one, is_called_before=bool(at % 2)) for one in numbers for at in (0, 1)], monkeypatch)


def test_a_step_that_is_timed_later_records_anew_what_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its records have marks of the time, and are no earlier step's."""
    paces: list[Pace] = []

    def timed(session: Session) -> None:
        planned = session._shared.plans.in_force
        assert planned is not None
        planned.num_measured -= 1

    make = Pace.__init__
    monkeypatch.setattr(Pace, "__init__", lambda self, *given: (make(self, *given), paces.append(self))[0])
    left: list[object] = []
    leave = Departing._leave
    monkeypatch.setattr(Departing, "_leave", lambda self, *given: (left.append(given), leave(self, *given))[1])
    before = {at: timed for at in (8, 12)}
    compare([Way()] * 8, monkeypatch, before=before)
    assert len(paces) >= len(before)
    assert all(one.calls for one in paces[-2:])
    assert not left


any_way = st.builds(
    Way,
    temperature=st.sampled_from([1.5, 0.7, 2, 0.0, -0.0]),
    is_called_before=st.booleans(),
    at_once=st.booleans(),
    product=st.sampled_from(sorted(PRODUCTS)),
    shape=st.sampled_from([tuple, list]),
    order=st.sampled_from([1, -1]),
    activation=st.sampled_from([F.silu, F.gelu, torch.sigmoid]),
    is_detached=st.booleans(),
    is_cast=st.booleans(),
)


@pytest.mark.no_cover
@settings(max_examples=12, deadline=None)
@given(st.lists(st.one_of(st.just(Way()), any_way), min_size=3, max_size=8))
def test_whatever_differs_from_step_to_step_gradients_are_those_of_no_session(ways: list[Way]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        compare(ways, patch)
