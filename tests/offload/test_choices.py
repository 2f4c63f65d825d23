"""Variants of compiled blocks that are chosen beside training are taken between two steps, and given back if they take
longer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload.test_planning_beside import searching, wait_for_answer
from torchstorm.offload.compiled import compile as compiled_module
from torchstorm.offload.compiled.choices import Choices
from torchstorm.offload.compiled.compile import CompiledBlocks
from torchstorm.offload.replan.planned import Kind
from torchstorm.offload.session import Session
from torchstorm.offload.step.clock import Took
from torchstorm.offload.step.shared import Shared
from torchstorm.plan.beside import PLAN_NOW, Problem, _solved
from torchstorm.plan.choose import Blocks, Choice, choose_variants
from torchstorm.plan.trace import Trace
from torchstorm.plan.variants import CHEAP, LEAST, SAVE

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler", "told_once"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

RAM = 2 * 2**20
NUM_BLOCKS = 4


@pytest.fixture(autouse=True)
def _beside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plans are made beside training, which leaves a core for the search."""
    monkeypatch.setenv(PLAN_NOW, "0")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[Session, CompiledBlocks]]:
    """A Session whose blocks begin in "cheap", and stay so until variants are chosen beside training."""

    def as_they_are(trace: Trace, blocks: Blocks, *_: Any, **options: Any) -> Choice:
        return Choice(variants=dict(blocks.measured), step_ms=1.0, measured_ms=1.0, num_tried=1)

    monkeypatch.setattr(compiled_module, "choose_variants", as_they_are)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(NUM_BLOCKS)))
    with Session(model, ram=RAM, disk=tmp_path) as session:
        yield session, session.compile()


def run_steps(session: Session, num: int) -> torch.Tensor:
    model = session._shared.model
    model.zero_grad()
    for seed in range(num):
        torch.manual_seed(seed)
        with session.step():
            model(torch.randn(256, 64)).square().mean().backward()
    return next(model.parameters()).grad.clone()  # type: ignore[union-attr]


def time_blocks(blocks: CompiledBlocks, monkeypatch: pytest.MonkeyPatch) -> list[Trace]:
    """Has blocks timed by themselves, as on a GPU; the traces with that, as they come."""
    seen: list[Trace] = []

    def timed(self: Shared, trace: Trace) -> Trace:
        seen.append(blocks.timed(trace, self.tiers.fast))
        return seen[-1]

    monkeypatch.setattr(Shared, "timed", timed)
    return seen


def until_chosen_beside(session: Session) -> Problem:
    """Runs steps until a process chooses variants."""
    for _ in range(8):
        run_steps(session, 1)
        planned = session._shared.plans.in_force
        if planned is not None and planned.asked is not None and planned.asked.blocks is not None:
            return planned.asked
    raise AssertionError("nothing is chosen beside training")


@pytest.mark.no_cover
@pytest.mark.parametrize(
    "outcome", ["taken", "taken, replaced before", "not worth compiling", "taken, compiled before", "not in agreement"]
)
def test_variants_chosen_beside_training_are_taken_between_two_steps_if_they_are_worth_it(
    outcome: str, compiled: tuple[Session, CompiledBlocks], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, blocks = compiled
    expected = run_steps(session, 1)
    problem = until_chosen_beside(session)
    assert problem.blocks is not None
    assert len(problem.blocks.tables) == NUM_BLOCKS
    run = searching(session)._running
    assert run is not None
    wait_for_answer(session)
    assert isinstance(run.found, Choice)
    assert set(run.found.variants) == set(blocks.variants)
    if outcome == "taken, compiled before":
        assert blocks.adopt(dict.fromkeys(blocks.variants, LEAST))
        blocks.set(dict.fromkeys(blocks.variants, CHEAP))
    ms = 1.98 if "comp" in outcome else 1.0
    run.found = Choice(variants=dict.fromkeys(blocks.variants, LEAST), step_ms=ms, measured_ms=2.0, num_tried=1)
    if outcome == "not in agreement":
        monkeypatch.setattr(CompiledBlocks, "_agrees", lambda self, name, variant: variant == CHEAP)
    before, plans = session._shared.plans.in_force, session._shared.plans
    assert before is not None
    if outcome == "taken, replaced before":  # as where it waits for a step's begin
        replaced, before = before, replace(before, asked=None)
        assert plans.replace(replaced, before)
        session._shared.planner._chosen = replaced, problem.blocks, run.found
    run_steps(session, 1)  # at its end they are taken
    if outcome.startswith("taken"):
        assert set(blocks.variants.values()) == {LEAST}
        assert not plans.has(before)
    else:
        assert set(blocks.variants.values()) == {CHEAP}
        assert plans.has(before)
        assert before.asked is not None
        assert (before.asked.blocks is not None) is (outcome == "not in agreement")
    assert torch.equal(run_steps(session, 1), expected)


@pytest.mark.parametrize("outcome", ["blocks have changed", "the user has chosen"])
def test_a_choice_that_was_made_of_other_variants_is_not_taken(
    outcome: str, compiled: tuple[Session, CompiledBlocks]
) -> None:
    session, blocks = compiled
    until_chosen_beside(session)
    run = searching(session)._running
    assert run is not None
    wait_for_answer(session)
    run.found = Choice(variants=dict.fromkeys(blocks.variants, LEAST), step_ms=1.0, measured_ms=2.0, num_tried=1)
    if outcome == "blocks have changed":
        blocks.set({"0": SAVE})
    else:
        blocks = session.compile(variant=SAVE)
    expected = dict(blocks.variants)
    run_steps(session, 2)
    assert blocks.variants == expected


@pytest.mark.parametrize(("is_slower", "is_same"), [(True, True), (False, True), (True, False)])
def test_the_variants_before_are_back_where_such_steps_take_longer_in_the_new_ones(
    is_slower: bool, is_same: bool, compiled: tuple[Session, CompiledBlocks]
) -> None:
    session, blocks = compiled
    expected = run_steps(session, 1)
    until_chosen_beside(session)
    planned = session._shared.plans.in_force
    assert planned is not None
    choice = Choice(variants=dict.fromkeys(blocks.variants, LEAST), step_ms=1.0, measured_ms=2.0, num_tried=1)
    key = planned.kind.key if is_same else ((3, 3), 7)
    assert blocks.take(choice, Kind(key=key), 0.1)
    planned.asked, planned.recent = None, [Took(0.2 if is_slower else 0.1)] * 3
    session._shared.learn()
    is_back = is_slower and is_same
    assert set(blocks.variants.values()) == {CHEAP if is_back else LEAST}
    assert session._shared.plans.has(planned) is not is_back
    assert torch.equal(run_steps(session, 1), expected)


def test_variants_are_chosen_until_answers_have_come_whoever_waits_for_them_no_longer(
    compiled: tuple[Session, CompiledBlocks],
) -> None:
    session, blocks = compiled
    problem = until_chosen_beside(session)
    assert all(blocks.to_choose(problem.trace) is not None for _ in range(9)), "longer steps are planned meanwhile"
    choice = Choice(variants=dict(blocks.variants), step_ms=1.0, measured_ms=1.0, num_tried=1)
    for _ in range(4):
        assert blocks.take(choice, Kind(), 1.0) is False
    assert blocks.to_choose(problem.trace) is None


@pytest.mark.no_cover
@pytest.mark.parametrize("is_timed", [False, True])
def test_a_step_that_has_compiled_may_choose_if_blocks_were_timed_by_themselves(
    is_timed: bool, compiled: tuple[Session, CompiledBlocks], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, blocks = compiled
    if is_timed:
        time_blocks(blocks, monkeypatch)
    choices: list[bool] = []
    begin = Choices.begin

    def noted(self: Choices, *, has_compiled: bool, **options: Any) -> bool:
        choices.append(has_compiled)
        return begin(self, has_compiled=has_compiled, **options)

    monkeypatch.setattr(Choices, "begin", noted)
    run_steps(session, 1)
    with session.step():
        session._shared.model(torch.randn(512, 64)).square().mean().backward()
    assert choices == [not is_timed, *[False] * is_timed]


@pytest.mark.parametrize("is_timed", [False, True])
@pytest.mark.no_cover
def test_where_blocks_were_timed_by_themselves_the_second_step_is_planned_for_in_the_variants_that_the_first_chose(
    is_timed: bool, compiled: tuple[Session, CompiledBlocks], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, blocks = compiled
    if is_timed:
        time_blocks(blocks, monkeypatch)

    def least(trace: Trace, blocks: Blocks, *_: Any, **options: Any) -> Choice:
        return Choice(variants=dict.fromkeys(blocks.measured, LEAST), step_ms=1.0, measured_ms=2.0, num_tried=1)

    monkeypatch.setattr(compiled_module, "choose_variants", least)
    for num_steps in (1, 2, 3):
        run_steps(session, 1)
        assert set(blocks.variants.values()) == {LEAST if num_steps >= 2 - is_timed else CHEAP}
        assert (session.plan() is not None) is (num_steps >= 3 - is_timed)


@pytest.mark.no_cover
def test_times_belong_to_the_sizes_that_were_compiled_last_and_to_blocks_that_were_called_once(
    compiled: tuple[Session, CompiledBlocks], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, blocks = compiled
    seen = time_blocks(blocks, monkeypatch)
    run_steps(session, 2)
    assert len(seen[-1].blocks_s) == NUM_BLOCKS
    kind = next(iter(blocks._alike.values()))
    assert kind.is_timed
    assert kind.usable()[CHEAP].forward_s > 0
    kind.costs = list(kind.costs)  # as where another size is compiled
    assert not kind.is_timed
    assert kind.usable()[CHEAP].forward_s == 0
    model, num = session._shared.model, len(seen)
    with session.step():
        (model(torch.randn(512, 64)) + model(torch.randn(512, 64))).square().mean().backward()
    assert len(seen) > num
    assert not seen[-1].blocks_s


def test_compiling_is_taken_out_of_a_steps_times_only_where_all_blocks_were_timed_by_themselves(
    compiled: tuple[Session, CompiledBlocks], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, blocks = compiled
    seen = time_blocks(blocks, monkeypatch)
    run_steps(session, 1)
    fast = session._shared.tiers.fast
    long = replace(seen[-1], moments=tuple(replace(one, compute_s=100.0) for one in seen[-1].moments))
    assert blocks._has_compiled
    assert max(one.compute_s for one in blocks.timed(long, fast).moments) < 1.0
    kind = next(iter(blocks._alike.values()))
    monkeypatch.setattr(kind, "ran_once", lambda name: name != next(iter(blocks.variants)))
    assert max(one.compute_s for one in blocks.timed(long, fast).moments) == 100.0
    monkeypatch.undo()
    monkeypatch.setattr(blocks, "_has_compiled", False)
    assert max(one.compute_s for one in blocks.timed(long, fast).moments) == 100.0


@pytest.mark.no_cover
def test_plans_for_other_variants_are_followed_by_no_step_of_any_size(
    compiled: tuple[Session, CompiledBlocks],
) -> None:
    """They were for steps that save something else, and to follow them until that shows could break the budget."""
    session, blocks = compiled
    plans, model = session._shared.plans, session._shared.model

    def step(num_rows: int) -> None:
        with session.step():
            model(torch.randn(num_rows, 64)).square().mean().backward()

    for num_rows in (600, 600, 600, 1024, 1024):
        step(num_rows)
    earlier = plans.latest_first()
    assert len({one.kind.key for one in earlier}) == 2
    assert blocks.adopt(dict.fromkeys(blocks.variants, LEAST))
    step(1024)
    assert not set(plans.latest_first()) & set(earlier)
    num_planned = session.report().num_planned
    step(600)  # as the larger one's plan has it, or it is traced
    assert session.report().num_planned - num_planned <= 1
    assert not set(plans.latest_first()) & set(earlier)


def test_a_process_chooses_as_a_step_that_waits_would(compiled: tuple[Session, CompiledBlocks]) -> None:
    session, _ = compiled
    problem = until_chosen_beside(session)
    assert problem.blocks is not None
    found = _solved(problem)
    assert isinstance(found, Choice)
    assert found.measured_ms is not None
    alone = choose_variants(problem.trace, problem.blocks, lambda _: None)
    assert alone.step_ms is None
    assert found.num_tried > 1


def test_choices_are_few_and_worth_compiling_and_given_back_once() -> None:
    choices = Choices()
    assert not choices.begin(has_compiled=True)
    assert choices.begin(has_compiled=True), "some models compile in every step"
    assert choices.is_first
    assert not choices.begin(has_compiled=False, most=1)
    assert all(choices.may_begin(has_compiled=True) for _ in range(9)), "only what was chosen counts"
    assert [choices.begin(has_compiled=False) for _ in range(4)] == [True] * 3 + [False]
    assert not choices.may_begin(has_compiled=False)
    assert [choices.begin(has_compiled=True, is_urgent=True) for _ in range(5)] == [True] * 4 + [False]
    for step_ms, measured_ms, if_compiled, if_not in (
        (96.0, 100.0, True, True),
        (98.0, 100.0, False, True),
        (99.6, 100.0, False, False),
        (9.0, None, True, True),
        (None, 9.0, False, False),
    ):
        choice = Choice(variants={}, step_ms=step_ms, measured_ms=measured_ms, num_tried=1)
        assert choices.is_worth(choice, compiles=True) is if_compiled
        assert choices.is_worth(choice, compiles=False) is if_not
    choices, old, new, other = Choices(), Kind(key=((1,),)), Kind(key=((1,),)), Kind(key=((2,),))
    assert choices.back(new, 1.0) is None
    choices.take({"a": CHEAP}, old, None)
    assert choices.back(new, 1.0) is None, "nobody knows what steps took before"
    choices.take({"a": CHEAP}, old, 1.0)
    assert choices.back(old, 9.0) is None, "these steps were before"
    assert choices.back(other, 9.0) is None, "these are others"
    assert choices.back(new, 1.01) is None
    assert choices.back(new, 9.0) is None, "it was asked before"
    choices.take({"a": CHEAP}, old, 1.0)
    assert choices.back(new, 1.1) == {"a": CHEAP}
    assert not choices.begin(has_compiled=False)
    assert choices.begin(has_compiled=False, is_urgent=True), "nothing fits"
