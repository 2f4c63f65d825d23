"""The planner learns from steps whose memory was not what their plan said."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import torchstorm
from plan.naive import all_away_bytes
from plan.traces import gpt_trace
from torchstorm.offload.fast import Gpu
from torchstorm.offload.replan.explain import counted_on
from torchstorm.offload.replan.measured import Measured
from torchstorm.offload.replan.planned import Kind, Planned
from torchstorm.offload.replan.planner import Planner
from torchstorm.offload.replan.plans import Plans
from torchstorm.offload.step.clock import CpuClock, Span, Took
from torchstorm.offload.step.shared import Shared
from torchstorm.plan.forecast import Figures, forecast_s
from torchstorm.plan.machine import Machine
from torchstorm.plan.plan import Budget, Plan
from torchstorm.plan.solve import solve

MIB = 2**20


def plan_of() -> Plan:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(6)])
    return torchstorm.plan(
        model, torch.zeros(4096, 512), lambda model, x: model(x).sum(), machine="rtx4090", vram="400MiB", ram="8GiB"
    )


class FakeTiers(SimpleNamespace):
    def spare_with(self, slack_bytes: int) -> Budget:
        return replace(self.spare, vram=self.spare.vram + slack_bytes)


def planner_of(plan: Plan, plans: Plans) -> Planner:
    machine = plan.machine
    tiers: Any = FakeTiers(
        budget=plan.budget,
        spare=Budget(vram=0, ram=0, disk=0),
        fast=Gpu(torch.device("cuda")),
        fast_bytes=plan.budget.vram,
        machine=lambda: machine,
        own_bytes=lambda fast_bytes: 0,
    )
    return Planner(tiers, plans)


def in_force(plan: Plan) -> Plans:
    plans = Plans(None, 2)
    plans.put(Planned(plan, plan.trace, plan.forecast, plan.trace.base_bytes, 2, kind=Kind(("a step",))))
    return plans


def test_steps_above_the_budget_are_planned_anew_with_what_was_missing_kept_free() -> None:
    plan = plan_of()
    plans = in_force(plan)
    planner = planner_of(plan, plans)
    over = 20 * MIB
    assert planner.learn([], plan.budget.vram + over)
    assert plans.in_force is not None
    assert plans.in_force.forecast.vram_bytes <= plan.budget.vram - over
    assert plans.in_force.plan is not None
    assert plans.in_force.plan.placements != plan.placements
    assert "were forecast and 400.00 MiB" in planner.lessons[0]
    assert planner.slack_bytes > over  # new kinds of steps keep it free, too


def test_plans_leave_a_tenth_of_the_link_free_and_say_what_a_step_takes_with_all_of_it() -> None:
    plan = plan_of()
    assert plan.machine is not None
    planner = planner_of(plan, in_force(plan))
    assert planner.machine() == plan.machine
    tenth_less = counted_on(plan.machine)
    assert tenth_less.d2h_bytes_per_s == 0.9 * plan.machine.d2h_bytes_per_s
    assert tenth_less.h2d_bytes_per_s == 0.9 * plan.machine.h2d_bytes_per_s
    assert tenth_less.disk_write_bytes_per_s == plan.machine.disk_write_bytes_per_s
    planned = planner.plan_within(0, plan.trace, plan.trace.base_bytes, 2)
    assert planned.plan is not None
    solved = solve(plan.trace, tenth_less, plan.budget)
    assert planned.plan.placements == solved.placements
    assert planned.forecast.step_ms == forecast_s(plan.trace, solved.placements, plan.machine) * 1e3


@pytest.mark.parametrize("link", [12e9, 25e9])
def test_steps_whose_copies_get_all_of_the_link_are_no_miss(link: float) -> None:
    """Where everything is away, every step waits for copies."""
    trace = gpt_trace(3, tokens=8192, sequences=2)
    trace = replace(trace, ops=(), values=(), storages=tuple(replace(one, value=-1) for one in trace.storages))
    machine = Machine(name="slow link", d2h_bytes_per_s=link, h2d_bytes_per_s=link)
    budget = Budget(vram=all_away_bytes(trace), ram=2**40)
    plan = solve(trace, counted_on(machine), budget)
    plans = Plans(None, 2)
    planner = planner_of(replace(plan, machine=machine), plans)
    plans.put(planner.plan_within(0, trace, trace.base_bytes, 2))
    assert plans.in_force is not None
    plans.in_force.kind = Kind(("a step",))
    assert plans.in_force.plan is not None
    took_s = forecast_s(trace, plans.in_force.plan.placements, machine)
    for _ in range(12):
        planner.learn([Took(took_s, 0.0, 0.0)], 0)
    assert planner.lessons == []


def test_a_plan_that_left_room_does_not_hide_how_much_was_not_forecast() -> None:
    plan = plan_of()
    plans = in_force(plan)
    planner = planner_of(plan, plans)
    assert plans.in_force is not None
    left, over = 60 * MIB, 5 * MIB
    plans.in_force.forecast = replace(plan.forecast, vram_bytes=plan.budget.vram - left)
    assert planner.learn([], plan.budget.vram + over)
    assert plans.in_force.forecast.vram_bytes + left + over <= plan.budget.vram


def test_a_plan_whose_times_were_corrected_often_is_still_held_to_the_budget() -> None:
    plan = plan_of()
    plans = in_force(plan)
    planner = planner_of(plan, plans)
    assert plans.in_force is not None
    plans.in_force.num_lessons = 100
    assert planner.learn([], plan.budget.vram + MIB)


def test_steps_still_above_the_budget_are_measured_anew() -> None:
    plan = plan_of()
    plans = in_force(plan)
    planner = planner_of(plan, plans)
    assert planner.learn([], plan.budget.vram + MIB)
    assert planner.learn([], plan.budget.vram + MIB)
    assert plans.get(("a step",)) is None
    assert "measured anew" in planner.lessons[1]


def test_steps_within_the_budget_keep_their_plan() -> None:
    plan = plan_of()
    plans = in_force(plan)
    planner = planner_of(plan, plans)
    assert not planner.learn([], plan.budget.vram)
    assert not planner.learn([], 0)
    assert plans.in_force is not None
    assert plans.in_force.plan is plan


def test_where_nothing_fits_beside_what_was_missing_the_plan_stays_and_that_is_said_once() -> None:
    plan = plan_of()
    plans = in_force(plan)
    planner = planner_of(plan, plans)
    for _ in range(3):
        assert not planner.learn([], 20 * plan.budget.vram)
    assert plans.in_force is not None
    assert plans.in_force.plan is plan
    assert len(planner.lessons) == 1
    assert "no plan fits, so they go on" in planner.lessons[0]
    assert planner.slack_bytes == 0
    # Nor is it said of the plan that takes its place once times are known better.
    found = planner.plan(plan.trace, base_bytes=plan.trace.base_bytes, num_measured=4, earlier=plans.in_force)
    plans.put(found, plans.in_force)
    assert not planner.learn([], 20 * plan.budget.vram)
    assert plans.in_force is found
    assert len(planner.lessons) == 1


def test_the_peak_of_steps_that_followed_the_plan_is_told_once_and_not_that_of_others() -> None:
    measured = Measured()
    figures = Figures(step_ms=1.0, vram_bytes=7, ram_bytes=0, disk_bytes=0)
    measured.count(figures, (0.0, 1.0), times=0.0)
    assert measured.new_vram_bytes() == 0
    measured.count(figures, (0.0, 1.0), times=1.0)
    assert [measured.new_vram_bytes(), measured.new_vram_bytes()] == [7, 0]
    measured.count(figures, (0.0, 1.0), times=1.0)
    measured.plan_changed()
    assert measured.new_vram_bytes() == 0


@pytest.mark.parametrize(("num_measured", "kept"), [(1, []), (2, [40 * MIB])])
def test_pinned_memory_is_given_back_when_the_steps_of_the_plan_in_force_were_timed(
    num_measured: int, kept: list[int]
) -> None:
    plan, found = plan_of(), list[int]()
    plans = in_force(plan)
    assert plans.in_force is not None
    plans.in_force.num_measured, plans.in_force.forecast = num_measured, replace(plan.forecast, ram_bytes=40 * MIB)
    shared: Any = SimpleNamespace(plans=plans, tiers=SimpleNamespace(trim=found.append))
    Shared.trim(shared)
    assert found == kept


def test_the_time_of_a_step_a_little_smaller_tells_of_its_plan_but_for_the_first_of_its_sizes() -> None:
    plan = plan_of()
    plans = Plans(None, 2)
    planned = Planned(plan, plan.trace, plan.forecast, plan.trace.base_bytes, 2, kind=Kind(((4, 100), "float32")))
    plans.put(planned)

    def nearly(length: int) -> float:
        return plans.nearly(planned, ((4, length), "float32"), (f"4x{length}",))

    assert [nearly(98), nearly(98), nearly(97), nearly(98)] == [0.0, 100 / 98, 0.0, 100 / 98]
    assert [nearly(90), nearly(90)] == [0.0, 0.0], "it is much smaller"
    assert plans.nearly(planned, None, ()) == plans.nearly(planned, ((4, 98), "float32"), None) == 0.0
    measured = Measured()
    clock = CpuClock()
    for times in (1.0, 1.04, 0.0):
        span = Span(clock)
        span.turned()
        span.end()
        measured.count(plan.forecast, span, times=times, borrowed=not times)
        assert [took.step_s for took in measured.new_times()] == pytest.approx(
            [span.took().step_s * times] if times else []
        )
    assert (measured.num_planned, measured.num_in_force) == (3, 2)
