"""Much smaller steps than those of a plan get plans for their own sizes, in which more stays: exactly, and within the
budget."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from offload.test_foresight import gradients, llama, unlimited_bytes
from torchstorm.errors import OutOfVRAMError
from torchstorm.offload.replan import smaller
from torchstorm.offload.replan.planned import Planned
from torchstorm.offload.replan.smaller import part_of
from torchstorm.offload.session import Session
from torchstorm.offload.step import step as step_module
from torchstorm.plan.beside import PLAN_NOW, Beside
from torchstorm.plan.forecast import KEEP
from torchstorm.plan.scaled import scaled
from torchstorm.plan.trace import Trace

SHORTER, FULL = 96, 160


class Training:
    """A model in a Session, and its like without one."""

    def __init__(self, share: float, disk: Path | None = None) -> None:
        self.budget = int(unlimited_bytes(FULL) * share)
        self.plain, self.model = llama(), llama()
        self.session = Session(self.model, ram=self.budget, disk=str(disk) if disk is not None else None)

    def step(self, length: int, batch: int = 4) -> None:
        expected = gradients(self.plain, length, None, batch=batch)
        found = gradients(self.model, length, self.session, batch=batch)
        assert all(map(torch.equal, expected, found)), length
        assert self.session.usage().ram_bytes <= self.budget, length

    def ask(self) -> None:
        """Steps until a plan for shorter ones is searched for beside training."""
        for length in (SHORTER, FULL, FULL, FULL):
            self.step(length)
        while self.largest.asked is not None or (4, 100, 4, 100) not in self.largest.smaller:
            self.step(100)

    @property
    def largest(self) -> Planned:
        """The plan for the largest steps."""
        return max(self.session._shared.plans._all, key=lambda one: one.trace.saved_bytes)


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> list[Planned | None]:
    """What steps have followed to their end."""
    found: list[Planned | None] = []
    count = step_module.Step._count

    def noted(self: Any, recorder: Any, planned: Planned | None) -> None:
        found.append(planned)
        count(self, recorder, planned)

    monkeypatch.setattr(step_module.Step, "_count", noted)
    return found


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Training, Beside]]:
    """A training for whose shorter steps a plan is searched for beside it, and what searches."""
    monkeypatch.setenv(PLAN_NOW, "0")
    training = Training(0.6)
    with training.session:
        training.ask()
        found = training.session._shared.planner._beside
        assert found is not None
        yield training, found


def num_leaving(planned: Planned | None) -> int:
    assert planned is not None
    assert planned.plan is not None
    return sum(one.tier != KEEP for one in planned.plan.placements)


@pytest.mark.no_cover
@pytest.mark.parametrize("disk", [True, False], ids=["RAM and disk", "RAM alone"])
def test_much_smaller_steps_follow_plans_in_which_more_stays(
    disk: bool, tmp_path: Path, followed: list[Planned | None]
) -> None:
    training = Training(0.6, tmp_path if disk else None)
    for length in (SHORTER, FULL, FULL, FULL):
        training.step(length)
    assert followed[-1] is training.largest
    training.step(100)
    assert followed[-1] is training.largest, "there was none for such steps"
    for length in (100, 99, 81, 100):
        training.step(length)
        assert followed[-1] is training.largest.smaller[4, 100, 4, 100]
    assert list(training.largest.smaller) == [(4, 100, 4, 100)]
    assert num_leaving(followed[-1]) < num_leaving(training.largest)
    training.step(60)
    assert followed[-1] is training.largest.smaller[4, 100, 4, 100], "the smallest that is large enough"
    training.step(60)
    assert followed[-1] is training.largest.smaller[4, 60, 4, 60]
    assert num_leaving(followed[-1]) == 0
    training.step(FULL - 1)
    assert followed[-1] is training.largest, "which is nearly as large"
    training.step(FULL)
    assert followed[-1] is training.largest
    report = training.session.report()
    assert report.num_steps - report.num_planned <= 4
    assert not any("smaller" in note for note in report.notes)


@pytest.mark.no_cover
def test_sizes_at_random_and_of_batches_too_are_exact_and_within_the_budget(tmp_path: Path) -> None:
    training, rng = Training(0.5, tmp_path), random.Random(0)
    for _ in range(30):
        training.step(rng.randint(8, FULL), rng.randint(1, 4))
    assert training.largest.smaller


@pytest.mark.no_cover
def test_where_only_one_size_is_known_a_ninth_smaller_step_is_traced_and_tells_of_the_others(
    followed: list[Planned | None],
) -> None:
    training = Training(0.6)
    for length in [FULL] * 4 + [70] * 8:
        training.step(length)
    assert followed[-1] is training.largest
    assert not training.largest.smaller
    training.step(90)
    assert followed[-1] is None, "traced"
    for length in (FULL, 70, 70):
        training.step(length)
    assert followed[-1] is training.largest.smaller[4, 80, 4, 80]
    (planned,) = training.session._shared.plans._all
    assert planned is training.largest


def test_sizes_of_which_the_traces_do_not_tell_are_told_by_a_step_that_is_traced(
    followed: list[Planned | None],
) -> None:
    training = Training(0.6)
    for length in (SHORTER, FULL, FULL, FULL):
        training.step(length)
    for _ in range(8):  # the number of sequences has never changed before
        training.step(150, batch=3)
        assert followed[-1] is training.largest
    assert not training.largest.smaller
    training.step(150, batch=3)
    assert followed[-1] is None, "traced"
    for length, batch in ((FULL, 4), (150, 3), (150, 3)):
        training.step(length, batch)
    assert followed[-1] is training.largest.smaller[3, FULL, 3, FULL]


@pytest.mark.no_cover
def test_operations_are_recorded_where_only_a_plan_for_smaller_steps_computes_anything_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = Training(0.6)
    for length in (SHORTER, FULL, FULL, FULL, 100):
        training.step(length)
    (small,) = training.largest.smaller.values()
    plans = training.session._shared.plans
    monkeypatch.setattr(Planned, "recomputes", property(lambda self: self is small))
    assert plans.needs_operations(lambda _: False)
    monkeypatch.setattr(Planned, "recomputes", property(lambda self: False))
    assert not plans.needs_operations(lambda _: False)


@pytest.mark.no_cover
def test_a_model_whose_steps_are_much_the_same_size_is_never_traced_for_smaller_ones(
    followed: list[Planned | None],
) -> None:
    training = Training(0.6)
    for length in [FULL] * 3 + [FULL - at for at in range(10)]:
        training.step(length)
    assert None not in followed[3:]
    assert not training.largest.smaller


@pytest.mark.no_cover
def test_a_plan_for_sizes_that_were_foreseen_too_small_is_given_up_and_the_report_says_so(
    monkeypatch: pytest.MonkeyPatch, followed: list[Planned | None]
) -> None:
    def too_small(*given: Any) -> Trace | None:
        trace = scaled(*given)
        assert trace is not None
        moves = [trace.storages[one.storage].parcel >= 0 for one in trace.moments]
        at = moves.index(True, trace.turn // 2)
        less = replace(trace.moments[at], nbytes=trace.moments[at].nbytes - 512)
        return replace(trace, moments=(*trace.moments[:at], less, *trace.moments[at + 1 :]))

    training = Training(0.6)
    for length in (SHORTER, FULL, FULL, FULL):
        training.step(length)
    monkeypatch.setattr(smaller, "scaled", too_small)
    for _ in range(3):
        training.step(100)
    assert followed[-1] is training.largest
    assert training.largest.smaller[4, 100, 4, 100].plan is None
    assert "follow the one for larger steps again" in training.session.report().notes[-1]


@pytest.mark.no_cover
def test_a_better_plan_for_smaller_steps_is_searched_for_beside_training(
    followed: list[Planned | None], beside: tuple[Training, Beside]
) -> None:
    training, search = beside
    assert None not in followed[4:]
    found = training.largest.smaller[4, 100, 4, 100]
    while found.plan is None:
        assert search._running is not None
        search._running.thread.join(60)
        training.step(100)
    assert found.asked is None
    training.step(100)
    assert followed[-1] is found


@pytest.mark.no_cover
def test_another_state_of_the_model_forgets_plans_for_smaller_steps(followed: list[Planned | None]) -> None:
    training = Training(0.6)
    for length in (SHORTER, FULL, FULL, FULL, 100, 100):
        training.step(length)
    was = followed[-1]
    for model in (training.plain, training.model):
        next(model.parameters()).requires_grad_(False)
    for length in (FULL, FULL, FULL, 100, 100):
        training.step(length)
    assert was not in followed[-5:]


numbers = st.lists(st.tuples(st.integers(0, 4096), st.integers(0, 4096)), min_size=1, max_size=4)


@given(numbers)
def test_a_part_is_no_smaller_than_the_sizes_and_at_most_an_eighth_of_the_full_ones_more(
    pairs: list[tuple[int, int]],
) -> None:
    sizes, full = tuple(min(pair) for pair in pairs), tuple(max(pair) for pair in pairs)
    part = part_of(sizes, full)
    for one, found, most in zip(sizes, part or full, full, strict=True):
        assert one <= found <= most
        assert part is None or found - one < most / 8 + 1
    assert part_of(full, full) is None
    assert part_of((*sizes, 1), full) is None
    assert part_of(tuple(most + 1 for most in full), full) is None


class Padded(nn.Module):
    """Pads short sequences, and says that there is no memory if it is to; so two lengths tell too little of a third."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48), nn.Tanh()) for _ in range(6))
        self.blocks = nn.ModuleList(blocks)
        self.is_full = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        x = torch.cat([x, x.new_zeros(len(x), max(0, 70 - x.shape[1]), 48)], 1)
        for block in self.blocks[1:]:
            x = block(x)
        if self.is_full:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 KiB.")
        return x.square().mean()


def test_no_memory_where_a_step_has_gone_over_from_a_plan_for_smaller_ones_costs_the_larger_plan_nothing() -> None:
    unlimited = Session(model := Padded(), unlimited=True)
    with unlimited.step():
        model(torch.randn(8, 256, 48)).backward()
    budget = unlimited.usage().ram_bytes * 3 // 10
    unlimited.close()
    plain, model = Padded(), Padded()
    session = Session(model, ram=budget)

    def step(length: int) -> None:
        x = torch.randn(8, length, 48)
        with session.step():
            model(x).backward()
        plain(x).backward()
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
        plain.zero_grad()
        model.zero_grad()
        assert session.usage().ram_bytes <= budget, length

    for length in (256, 256, 256, *[120] * 9, 200, 100, 100, 100, 50):
        step(length)
    model.is_full = True
    with pytest.raises(OutOfVRAMError), session.step():
        model(torch.randn(8, 50, 48)).backward()
    model.is_full = False
    model.zero_grad()
    for length in (256, 200, 120, 50, 50, 256):
        step(length)
    assert all(one.plan is not None for one in session._shared.plans._all)
    given_up = [note for note in session.report().notes if "smaller" in note]
    assert len(given_up) == len(set(given_up)) == 1


@pytest.mark.no_cover
def test_where_the_process_that_searches_fails_plans_for_smaller_steps_are_found_at_once(
    followed: list[Planned | None], beside: tuple[Training, Beside]
) -> None:
    training, search = beside
    if search._running is not None:
        search._running._process.kill()
        search._running.thread.join(60)
    for _ in range(3):
        training.step(100)
    assert followed[-1] is training.largest.smaller[4, 100, 4, 100]


@pytest.mark.no_cover
def test_a_few_steps_alone_are_ready_to_be_traced_for_smaller_ones(
    monkeypatch: pytest.MonkeyPatch, followed: list[Planned | None]
) -> None:
    training = Training(0.6)
    for length in [FULL] * 4 + [70] * 8:
        training.step(length)
    monkeypatch.setattr(Planned, "recomputes", False)  # else all steps are
    ready = list[bool]()
    for _ in range(6):
        ready.append(training.largest.is_to_tell)
        training.step(FULL)
    assert ready == [True] * 4 + [False] * 2
    training.step(70)
    assert followed[-1] is training.largest
