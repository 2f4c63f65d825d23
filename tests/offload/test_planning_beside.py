"""Planning does not stop training: a quick plan at once, and a better one from a process beside it."""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.offload.steps import train
from torch import nn

from torchstorm.errors import BudgetError
from torchstorm.offload.replan import planner as planning
from torchstorm.offload.replan import problems
from torchstorm.offload.replan.planned import Planned
from torchstorm.offload.replan.planner import Planner
from torchstorm.offload.report import first_said
from torchstorm.offload.session import Session
from torchstorm.offload.step.clock import Took
from torchstorm.offload.step.pace import Pace
from torchstorm.plan import beside
from torchstorm.plan.beside import PLAN_NOW, Beside, Problem
from torchstorm.plan.machine import Machine
from torchstorm.plan.plan import Budget, Plan
from torchstorm.plan.trace import Trace

NEVER = ("-c", "import time; time.sleep(600)")
RAM = "1200KiB"


def model_of() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)) for _ in range(8)])


def loss_of(model: nn.Module, index: int) -> torch.Tensor:
    loss = model(torch.randn(256, 64)).square().mean()
    loss.backward()
    return loss


@pytest.fixture(autouse=True)
def _beside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plans are made beside training, and the quick ones are stopped so soon that there may always be a better one.
    Training leaves a core for the search: steps that share theirs with it take very different times."""
    monkeypatch.setenv(PLAN_NOW, "0")
    monkeypatch.setattr(planning, "QUICK_S", 0.0)
    monkeypatch.setattr(problems, "QUICK_S", 0.0)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def poor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick plans leave a third of the budget free."""
    solve = Planner._solve

    def solve_poorly(self: Planner, problem: Problem) -> Plan:
        return solve(self, replace(problem, spare=Budget(ram=problem.budget.ram // 3)))

    monkeypatch.setattr(Planner, "_solve", solve_poorly)


@pytest.fixture
def storm() -> Iterator[Session]:
    with Session(model_of(), ram=RAM) as session:
        yield session


def run_steps(storm: Session, num: int) -> None:
    for index in range(num):
        with storm.step():
            loss_of(storm._shared.model, index)


def searching(storm: Session) -> Beside:
    found = storm._shared.planner._beside
    assert found is not None
    return found


def process_of(storm: Session) -> subprocess.Popen[bytes]:
    run = searching(storm)._running
    assert run is not None
    return run._process


def wait_for_answer(storm: Session) -> None:
    run = searching(storm)._running
    assert run is not None
    run.thread.join(60)
    assert not run.thread.is_alive()


def search_out(storm: Session) -> None:
    """Waits until nothing is searched for any more; what was found is in force then."""
    plans = storm._shared.plans
    assert plans.in_force is not None
    while plans.in_force.asked is not None:
        wait_for_answer(storm)
        run_steps(storm, 1)


def searched_out(storm: Session) -> Planned:
    """The plan of steps for which nothing is searched any more, as if none had followed it so far."""
    run_steps(storm, 3)
    search_out(storm)
    found = storm._shared.plans.in_force
    assert found is not None
    assert found.plan is not None
    found.fastest_s = math.inf
    return found


def test_a_time_is_stated_once_it_is_known_and_no_better_plan_is_searched_for(storm: Session) -> None:
    run_steps(storm, 1)
    report = storm.report()
    assert report.forecast is not None
    assert math.isnan(report.forecast.step_ms)  # of a step that was measured
    assert report.forecast.ram_bytes > 0
    assert " ms" not in next(line for line in str(report).splitlines() if line.startswith("step"))[:39]
    run_steps(storm, 2)
    waiting = storm.report().forecast
    assert waiting is not None
    assert math.isnan(waiting.step_ms) or storm._shared.plans.in_force.asked is None  # type: ignore[union-attr]
    search_out(storm)
    report = storm.report()
    assert report.forecast is not None
    assert report.forecast.step_ms > 0
    assert first_said(None, waiting) is waiting
    assert first_said(None, None) is None
    said = first_said(waiting, replace(report.forecast, ram_bytes=0))
    assert said is not None
    if math.isnan(waiting.step_ms):
        assert said == replace(waiting, step_ms=report.forecast.step_ms)
    assert first_said(said, replace(said, step_ms=1.0)) is said


def test_a_step_never_waits_for_the_search_and_keeps_its_budget(
    monkeypatch: pytest.MonkeyPatch, storm: Session
) -> None:
    monkeypatch.setattr(beside, "_ARGUMENTS", NEVER)
    begun = time.perf_counter()
    run_steps(storm, 6)
    assert time.perf_counter() - begun < 60
    assert process_of(storm).poll() is None  # it searches still
    report = storm.report()
    assert report.num_planned == 4  # two are measured
    assert report.measured is not None
    assert report.measured.ram_bytes <= report.budget.ram


def test_the_step_that_is_timed_waits_for_no_plan(monkeypatch: pytest.MonkeyPatch, storm: Session) -> None:
    monkeypatch.setattr(beside, "_ARGUMENTS", NEVER)  # no better one is there by then
    run_steps(storm, 1)
    first = storm.plan()

    def never(*_: Any) -> Plan:
        raise AssertionError("the step waits for a plan")

    monkeypatch.setattr(Planner, "_solve", never)
    run_steps(storm, 1)
    timed = storm.plan()
    assert first is not None
    assert timed is not None
    assert timed.placements == first.placements
    assert timed.forecast.step_ms != first.forecast.step_ms
    assert timed.forecast.ram_bytes == first.forecast.ram_bytes
    assert storm._shared.plans.in_force is not None
    assert storm._shared.plans.in_force.asked is not None
    run_steps(storm, 1)
    assert storm.report().num_planned == 1


@pytest.mark.usefixtures("poor")
def test_a_better_plan_is_taken_over_between_two_steps(storm: Session) -> None:
    run_steps(storm, 3)
    quick = storm.plan()
    wait_for_answer(storm)
    assert storm.plan() is not None
    with storm.step():
        better = storm.plan()
        loss_of(storm._shared.model, 0)
    assert storm.report().num_in_force == 1
    search_out(storm)  # more than the quick one
    best = storm.plan()
    assert best is not None
    assert best.notes == ()
    assert quick is not None
    assert better is not None
    assert better.forecast.step_ms < quick.forecast.step_ms
    assert better.placements != quick.placements
    assert best.forecast.step_ms <= better.forecast.step_ms
    assert storm.usage().ram_bytes <= better.budget.ram
    assert searching(storm)._running is None
    assert not searching(storm).failure


def test_a_step_that_was_timed_is_planned_for_once_the_device_has_come_to_its_end(
    monkeypatch: pytest.MonkeyPatch, storm: Session
) -> None:
    is_reached, refined = [False], list[bool]()
    refine = Pace.refine

    def noted(self: Pace, trace: Trace, plan: Plan, machine: Machine, *, scale: float = 1.0) -> Trace:
        refined.append(self.is_reached)
        return refine(self, trace, plan, machine, scale=scale)

    monkeypatch.setattr(Pace, "is_reached", property(lambda _: is_reached[0]))
    monkeypatch.setattr(Pace, "refine", noted)
    shared = storm._shared
    run_steps(storm, 1)
    traced = shared.plans.in_force
    run_steps(storm, 3)
    assert shared.retiming is not None
    assert shared.plans.in_force is traced, "no other plan is taken over meanwhile"
    forecast = shared.plans.forecast()
    assert forecast is not None
    assert math.isnan(forecast.step_ms)
    assert not refined
    is_reached[0] = True
    run_steps(storm, 1)
    assert refined == [True], "the steps in between were not timed"
    assert shared.retiming is None
    assert shared.plans.in_force is not None
    assert shared.plans.in_force.num_measured == shared.plans.num_to_measure
    search_out(storm)
    assert len(refined) == 1


def test_nothing_is_planned_for_a_timed_step_once_the_session_is_closed(
    monkeypatch: pytest.MonkeyPatch, storm: Session
) -> None:
    is_reached = [False]
    monkeypatch.setattr(Pace, "is_reached", property(lambda _: is_reached[0]))
    run_steps(storm, 3)
    assert storm._shared.retiming is not None
    storm.close()
    is_reached[0] = True
    storm.report()
    assert searching(storm)._running is None


@pytest.mark.usefixtures("poor")
def test_gradients_are_the_same_to_the_bit_when_plans_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planner, "judge", lambda *_: None)  # nothing is searched for anew where a step took long

    def step(model: nn.Module, index: int) -> torch.Tensor:
        if index > 2 and sessions and searching(sessions[0])._running is not None:
            wait_for_answer(sessions[0])
        return loss_of(model, index)

    sessions: list[Session] = []

    def session_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Session:
        sessions.append(Session(model, ram=RAM, check=True))
        return sessions[0]

    plain, _ = train(model_of, step, None, num_steps=7)
    ours, session = train(model_of, step, session_of, num_steps=7)
    assert session is not None
    with session:
        assert searching(session)._running is None
        assert session.report().num_planned == 5
    for one, other in zip(plain.gradients, ours.gradients, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)  # type: ignore[arg-type]


def test_an_answer_that_is_not_better_changes_no_plan_and_says_how_long_was_searched(storm: Session) -> None:
    run_steps(storm, 3)
    for _ in range(2):  # a quick search, and the whole one
        wait_for_answer(storm)
        (planned,) = storm._shared.plans._all
        assert planned.asked is not None
        if planned.asked.time_limit_s < 1:
            run_steps(storm, 1)
    (planned,) = storm._shared.plans._all
    assert planned.plan is not None
    assert planned.asked is not None
    run = searching(storm)._running
    assert run is not None
    object.__setattr__(planned.asked, "than_s", 0.0)
    run.found = replace(planned.plan, notes=("searched",))
    placements = planned.plan.placements
    run_steps(storm, 1)
    plan = storm.plan()
    assert plan is not None
    assert plan.placements == placements
    assert plan.notes == ("searched",)
    assert planned.asked is None


@pytest.mark.usefixtures("poor")
@pytest.mark.parametrize(
    ("share", "is_by_steps", "is_taken"),
    [
        (2.0, False, True),
        (1.01, False, True),
        (0.9, False, False),
        (2.0, True, True),
        (1.01, True, False),
        (0.9, True, False),
    ],
)
def test_a_plan_is_not_taken_over_that_is_slower_at_the_links_whole_speed_or_not_clearly_faster_than_steps_were(
    share: float, is_by_steps: bool, is_taken: bool, storm: Session
) -> None:
    """The one in use is forecast to take, or its steps took, so many times what the other one is forecast to take."""
    run_steps(storm, 3)
    planned = storm._shared.plans.in_force
    assert planned is not None
    assert planned.plan is not None
    assert planned.asked is not None
    wait_for_answer(storm)
    run = searching(storm)._running
    assert run is not None
    found = run.found
    assert isinstance(found, Plan)
    assert found.placements != planned.plan.placements
    object.__setattr__(planned.asked, "than_s", 2 * found.forecast.step_ms / 1e3)
    if is_by_steps:
        planned.fastest_s = found.forecast.step_ms / 1e3 * share
        planned.recent = [Took(planned.fastest_s)] * 3
    else:
        planned.forecast, planned.recent = replace(planned.forecast, step_ms=found.forecast.step_ms * share), []
    run_steps(storm, 1)
    plan = storm.plan()
    assert plan is not None
    assert (plan.placements == found.placements) is is_taken


@pytest.mark.parametrize("num_lessons", [0, 3])
def test_a_plan_that_was_searched_for_by_times_which_steps_have_shown_to_be_wrong_is_not_taken_over(
    num_lessons: int, monkeypatch: pytest.MonkeyPatch, storm: Session
) -> None:
    run_steps(storm, 3)
    wait_for_answer(storm)
    planned = storm._shared.plans.in_force
    assert planned is not None
    assert planned.plan is not None
    assert planned.asked is not None
    object.__setattr__(planned.asked, "time_limit_s", 0.0)  # of a quick search
    planned.num_lessons = num_lessons
    planned.recent = [Took(0.5, waited_s=0.1)]
    trace = replace(planned.trace)
    monkeypatch.setattr(planning, "is_too_slow", lambda *_: True)
    monkeypatch.setattr(problems, "explained", lambda *_: (trace, 1.0))
    before = planned.plan.placements
    is_another = storm._shared.planner.take_better()
    if num_lessons:  # enough
        assert planned.trace is not trace
    else:
        assert not is_another
        assert planned.plan.placements == before
        assert planned.trace is trace
        assert planned.forecast.step_ms == 500.0
        assert planned.num_lessons == 1
        assert planned.asked is not None
        assert planned.asked.time_limit_s == planning.QUICK_S
    monkeypatch.undo()
    search_out(storm)


@pytest.mark.parametrize(("waited_s", "is_late"), [(0.0, False), (0.005, False), (0.1, True)])
def test_on_a_gpu_steps_that_follow_a_quick_plan_are_timed_before_a_better_one_is_searched_for(
    waited_s: float, is_late: bool, storm: Session
) -> None:
    """One whose copies come late is far from the best, so that another quick one is searched for first."""
    run_steps(storm, 3)
    wait_for_answer(storm)
    plans, planner = storm._shared.plans, storm._shared.planner
    planner._times_first = True
    planner.learn([], 0)
    quick = plans.in_force
    assert quick is not None
    assert quick.is_quick
    assert quick.asked is None
    assert quick.plan is not None
    stated = plans.forecast()
    assert stated is not None
    assert math.isnan(stated.step_ms)
    quick.fastest_s = math.inf  # that it has taken so far
    for step_s in (0.5, 0.7, 0.5):
        assert plans.in_force is quick
        planner.learn([Took(step_s, waited_s=waited_s)], 0)
    now = plans.in_force
    assert now is not None
    assert now.plan is not None
    assert now.plan.placements == quick.plan.placements
    assert not now.is_quick
    assert now.asked is not None
    assert now.asked.time_limit_s == (planning.QUICK_S if is_late else planning.FULL_S)
    assert now.asked.start == now.plan.tiers, "the search begins with what is there"
    assert now.num_lessons == quick.num_lessons + is_late  # which are so many at most
    assert now.asked.than_s == pytest.approx(0.5, rel=0.1)  # by times that explain what the steps took
    search_out(storm)


@pytest.mark.parametrize("has_failed", [False, True])
def test_a_quick_plan_is_timed_once_however_much_was_learnt_and_its_time_is_stated(
    has_failed: bool, storm: Session
) -> None:
    quick = searched_out(storm)
    plans, planner = storm._shared.plans, storm._shared.planner
    quick.is_quick, quick.times_s, quick.num_lessons = True, [], planning._MOST_LESSONS
    if has_failed:
        planner._beside = None
    planner.learn([Took(0.5)] * 3, 0)
    now = plans.in_force
    assert now is not None
    assert not now.is_quick
    assert (now.asked is None) is has_failed
    if not has_failed:
        search_out(storm)
    stated = plans.forecast()
    assert stated is not None
    assert stated.step_ms > 0


def test_an_answer_for_a_plan_that_was_replaced_is_dropped(monkeypatch: pytest.MonkeyPatch, storm: Session) -> None:
    monkeypatch.setattr(beside, "_ARGUMENTS", NEVER)
    run_steps(storm, 1)
    first = process_of(storm)
    run_steps(storm, 2)  # the second one was measured, and a plan made for its times
    assert first.returncode is not None
    assert process_of(storm) is not first
    assert len(storm._shared.plans._all) == 1


def test_times_that_differ_are_planned_anew_beside_while_the_plan_stays(storm: Session) -> None:
    before = searched_out(storm)
    plans, planner = storm._shared.plans, storm._shared.planner
    assert before.plan is not None
    assert before.asked is None
    before.times_s, before.is_from_user = [], False
    slow_s = before.forecast.step_ms / 1e3 * 3
    assert not planner.learn([Took(slow_s)] * 3, 0)
    now = plans.in_force
    assert now is not None
    assert now.plan is not None
    assert now.asked is not None
    assert now.plan.placements == before.plan.placements
    assert now.forecast.step_ms == pytest.approx(slow_s * 1e3)
    assert "a better plan is searched for beside training" in planner.lessons[-1]
    assert planner.judge(now, Took(slow_s)) is None
    assert now.times_s == []  # steps are not judged while another plan is about to come
    search_out(storm)


@pytest.mark.parametrize("num_before", [1, 0])
def test_a_plan_whose_steps_took_what_was_forecast_is_not_wrong_when_many_in_a_row_are_disturbed(
    num_before: int, storm: Session
) -> None:
    before = searched_out(storm)
    planner = storm._shared.planner
    before.times_s, before.is_from_user = [], False
    forecast_s, disturbed_s = before.forecast.step_ms / 1e3, before.forecast.step_ms / 1e3 * 1.5
    assert not planner.learn([Took(forecast_s)] * num_before + [Took(disturbed_s)] * (3 - num_before), 0)
    now = storm._shared.plans.in_force
    assert now is not None
    assert now.plan is not None
    assert before.plan is not None
    assert now.forecast.step_ms == pytest.approx(disturbed_s * 1e3)  # it says what steps take now
    assert (now.asked is None) is (num_before > 0)
    assert now.fastest_s == pytest.approx(forecast_s if num_before else disturbed_s)
    if num_before:
        assert "the forecast was corrected." in planner.lessons[-1]
        assert now.trace is before.trace
    else:
        search_out(storm)


@pytest.mark.no_cover
@pytest.mark.parametrize(
    ("new_s", "disturbed_s", "is_kept"), [(0.9, 0.9, True), (1.01, 1.01, True), (1.0, 1.8, True), (1.1, 1.1, False)]
)
def test_a_new_plan_whose_fastest_step_takes_longer_gives_way_to_the_one_before(
    new_s: float, disturbed_s: float, is_kept: bool, storm: Session
) -> None:
    before = searched_out(storm)
    plans, planner = storm._shared.plans, storm._shared.planner
    planner._beside = None  # plans are made at once from here on
    before.times_s, before.recent, before.replaced, before.is_from_user = [], [], None, False
    planner.learn([Took(before.forecast.step_ms / 1e3 * 3)] * 3, 0)
    new, before_s = plans.in_force, before.forecast.step_ms / 1e3 * 3
    assert new is not None
    assert new is not before
    assert new.replaced is before
    assert new.plan is not None
    assert before.plan is not None
    new.plan = replace(new.plan, placements=tuple(reversed(before.plan.placements)))
    planner.learn([Took(disturbed_s * before_s), Took(new_s * before_s)], 0)
    assert plans.in_force is new
    is_changed = planner.learn([Took(disturbed_s * before_s)], 0)
    now = plans.in_force
    assert now is not None
    assert now.plan is not None
    assert new.replaced is None
    if is_kept:
        assert not any("which is back" in lesson for lesson in planner.lessons)
        return
    assert is_changed
    assert now.plan.placements == before.plan.placements
    assert now.forecast.step_ms == now.plan.forecast.step_ms == pytest.approx(before_s * 1e3)
    assert "which is back" in planner.lessons[-1]
    planner.learn([Took(before_s)] * 6, 0)
    assert plans.in_force is now  # and stays


def test_a_new_plan_is_compared_by_steps_beside_which_nothing_is_searched_for(storm: Session) -> None:
    before = searched_out(storm)
    plans, planner = storm._shared.plans, storm._shared.planner
    assert before.plan is not None
    before.recent = [Took(0.1)] * 3
    new = replace(before, plan=replace(before.plan, placements=before.plan.placements[::-1]), times_s=[], recent=[])
    new.forecast = replace(new.forecast, step_ms=100.0)
    new.replaced = before
    assert plans.replace(before, new)
    new.asked = Problem(
        trace=new.trace,
        machine=planner.machine(),
        budget=Budget(),
        spare=Budget(),
        time_limit_s=1.0,
        than_s=1.0,
        fixed={},
    )
    for _ in range(6):
        assert planner.judge(new, Took(0.05)) is None
    assert new.replaced is before
    new.asked = None
    assert planner.judge(new, Took(0.2)) is None
    assert planner.judge(new, Took(0.2)) is None
    was = planner.judge(new, Took(0.2))
    assert was is not None
    assert was.plan is not None
    assert was.plan.placements == before.plan.placements
    same = replace(new, plan=before.plan, times_s=[0.2, 0.2], replaced=before, num_lessons=3)
    assert planner.judge(same, Took(0.2)) is None  # the plan is the same: the machine is slower


def test_training_goes_on_when_the_process_is_killed_and_the_report_says_so(storm: Session) -> None:
    run_steps(storm, 3)
    process_of(storm).kill()
    wait_for_answer(storm)
    run_steps(storm, 3)
    assert storm._shared.planner._beside is None
    (note,) = [note for note in storm.report().notes if "process" in note]
    assert "ended with status" in note
    storm._shared.plans._all.clear()
    run_steps(storm, 3)
    plan = storm.plan()
    assert plan is not None
    assert plan.notes == ()  # found with all the time that it takes


def test_training_goes_on_when_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch, storm: Session) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    run_steps(storm, 4)
    assert storm.report().num_planned == 2
    (note,) = [note for note in storm.report().notes if "process" in note]
    assert "cannot be started" in note


def test_closing_a_session_ends_the_process_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "_ARGUMENTS", NEVER)
    gc.collect()
    threads, fds = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with Session(model_of(), ram=RAM) as storm:
        run_steps(storm, 2)
        process = process_of(storm)
    assert process.returncode is not None  # waited for: no zombie
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == fds
    storm.close()


def test_a_session_that_is_let_go_of_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "_ARGUMENTS", NEVER)
    storm = Session(model_of(), ram=RAM)
    run_steps(storm, 2)
    process = process_of(storm)
    del storm
    gc.collect()
    assert process.returncode is not None


def test_two_sessions_plan_at_once() -> None:
    with Session(model_of(), ram=RAM) as one, Session(model_of(), ram=RAM) as other:
        for _ in range(3):
            run_steps(one, 1)
            run_steps(other, 1)
        assert process_of(one).pid != process_of(other).pid
        for storm in (one, other):
            search_out(storm)
            assert not searching(storm).failure


def test_several_problems_are_solved_one_after_another(storm: Session) -> None:
    run_steps(storm, 3)
    asked = process_of(storm)
    (planned,) = storm._shared.plans._all
    assert planned.asked is not None
    ours, problems = searching(storm), [replace(planned.asked) for _ in range(3)]
    for problem in problems:
        ours.ask(problem)
    assert process_of(storm) is asked
    answers = []
    wanted = {id(problems[0]), id(problems[2])}
    while len(answers) < 2:
        found = ours.answer(lambda problem: id(problem) in wanted)
        if found is not None:
            answers.append(found[0])
        if ours._running is not None:
            ours._running.thread.join(60)
    assert answers == [problems[0], problems[2]]
    assert asked.returncode is not None


def test_with_plan_now_there_is_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLAN_NOW, "1")
    with Session(model_of(), ram=RAM) as storm:
        run_steps(storm, 3)
        assert storm._shared.planner._beside is None
        plan = storm.plan()
    assert plan is not None
    assert plan.notes == ()


def test_where_nothing_fits_the_error_is_the_same_as_with_plan_now(monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    for now in ("0", "1"):
        monkeypatch.setenv(PLAN_NOW, now)
        with pytest.raises(BudgetError) as caught, Session(model_of(), ram="100KiB") as storm:
            run_steps(storm, 1)
        said.append(str(caught.value))
    assert said[0] == said[1]


def test_the_process_imports_no_torch_and_ends_with_the_one_that_asked() -> None:
    code = (
        "import sys, torchstorm.plan.beside as beside\n"
        "assert 'torch' not in sys.modules\n"
        "sys.modules['torch'] = None  # importing it would raise\n"
        "beside.main()"
    )
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    path = os.pathsep.join(part for part in sys.path if part)
    with subprocess.Popen([sys.executable, "-P", "-c", code], env={**os.environ, "PYTHONPATH": path}, **pipes) as child:
        _, told = child.communicate(b"", timeout=60)
    assert b"EOFError" in told
    assert b"AssertionError" not in told
    waits = "import threading, torchstorm.plan.beside as beside; beside._end_with_parent()"
    with subprocess.Popen(
        [sys.executable, "-P", "-c", waits], env={**os.environ, "PYTHONPATH": path}, **pipes
    ) as child:
        child.communicate(b"", timeout=60)
    assert child.returncode == 1


SCRIPT = """
import os, sys
with open(sys.argv[1], "a") as log:
    print(__name__, file=log)
import torch
from torch import nn
from torchstorm import Session
from torchstorm.offload.replan import planner

planner.QUICK_S = 0.0
model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)) for _ in range(8)])
storm = Session(model, ram="1200KiB")
for index in range(4):
    with storm.step():
        model(torch.randn(256, 64)).square().mean().backward()
    run = storm._shared.planner._beside._running
    if index < 3 and run is not None:
        run.thread.join()
        assert not run.failure, run.failure
        assert run.found is not None
        print("answered")
"""


def test_a_script_without_a_guard_is_run_once(tmp_path: Path) -> None:
    script, log = tmp_path / "script.py", tmp_path / "log"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)}
    command = [sys.executable, str(script), str(log)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "answered" in done.stdout
    assert log.read_text().split() == ["__main__"]


def test_a_quick_plan_that_smaller_steps_alone_follow_is_not_waited_for_to_be_timed(storm: Session) -> None:
    storm._shared.planner._times_first = True
    run_steps(storm, 3)
    wait_for_answer(storm)
    run_steps(storm, 1)
    quick = storm._shared.plans.in_force
    assert quick is not None
    assert quick.is_quick
    for index in range(planning._NUM_UNTIMED + 1):  # one of which is traced, to tell of smaller ones
        assert quick.asked is None
        with storm.step():
            storm._shared.model(torch.randn(192 + index, 64)).square().mean().backward()
    assert quick.asked is not None
    assert quick.asked.time_limit_s == planning.FULL_S
    search_out(storm)
