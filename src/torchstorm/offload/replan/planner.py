"""Makes a Session's plans, and learns from steps that come out otherwise than planned.

A step waits for a quick plan only. Where more time might find a better one, a process beside training searches for it,
and it is taken over between two steps.
"""

from __future__ import annotations

import math
import statistics
from contextlib import suppress
from dataclasses import replace

from torchstorm.errors import BudgetError
from torchstorm.offload.budget import Tiers
from torchstorm.offload.replan.explain import MISS, is_too_slow, stated
from torchstorm.offload.replan.planned import NOISE, NUM_JUDGED, Planned
from torchstorm.offload.replan.plans import Plans
from torchstorm.offload.replan.problems import FULL_S, QUICK_S, SHORT_S, Problems
from torchstorm.offload.replan.proven import as_it_was, last_proven
from torchstorm.offload.run.shortage import Shortage, plan_with_slack
from torchstorm.offload.step.clock import Took
from torchstorm.plan.beside import Beside
from torchstorm.plan.choose import Blocks, Choice
from torchstorm.plan.forecast import Figures, forecast_s
from torchstorm.plan.plan import Plan
from torchstorm.plan.trace import Trace
from torchstorm.sizes import format_size

_MOST_LESSONS = 3  # of one plan: a machine whose times keep changing is not chased for ever
_MARGIN_BYTES = 2**20
_NUM_UNTIMED = 12  # smaller steps by a quick plan, while none tells what it takes


class Planner(Problems):
    """Plans steps within a Session's budget.

    Args:
        tiers: tiers and budget.
        plans: of the Session.
        beside: searches for better plans while training goes on; without it, steps wait until the search has ended.
    """

    def __init__(self, tiers: Tiers, plans: Plans, beside: Beside | None = None) -> None:
        super().__init__(tiers, plans)
        self._beside = beside
        self._times_first = tiers.fast.is_beside_host  # steps tell more of a GPU than those that were measured
        self.lessons: list[str] = []
        self._chosen: tuple[Planned, Blocks, Choice] | None = None

    def plan(
        self,
        trace: Trace,
        *,
        base_bytes: int,
        num_measured: int,
        earlier: Planned | None = None,
        like: Plan | None = None,
    ) -> Planned:
        """Makes a plan that keeps the slack free, and a margin if any does: `unseen_bytes` where none was followed yet.

        Args:
            trace, base_bytes, num_measured: as in `Planned`.
            earlier: the plan that such steps followed, whose margin this one keeps, too.
            like: a plan for steps of the same operations.

        Raises:
            BudgetError: as `solve` does.
        """
        margin_bytes = self.unseen_bytes if num_measured == 1 else earlier.margin_bytes if earlier is not None else 0
        for free_bytes in sorted({self.slack_bytes + margin_bytes, self.slack_bytes} - {0}, reverse=True):
            with suppress(BudgetError):  # nothing fits with so much kept free, so less has to do
                found = self.plan_within(free_bytes, trace, base_bytes, num_measured, like)
                found.margin_bytes = free_bytes - self.slack_bytes
                break
        else:
            found = self.plan_within(0, trace, base_bytes, num_measured, like)
        if earlier is not None:
            found.is_over, found.is_least, found.is_foreseen = earlier.is_over, earlier.is_least, earlier.is_foreseen
        return found

    def plan_within(
        self, slack_bytes: int, trace: Trace, base_bytes: int, num_measured: int, like: Plan | None = None
    ) -> Planned:
        """Makes a plan that keeps so much of the budget free, and has a better one searched for if there may be one.

        Raises:
            BudgetError: as `solve` does, however quick: no time limit ends its search before a plan fits.
        """
        is_shown = like is not None and len(like.placements) == len(trace.parcels)
        limit_s = FULL_S if self._beside is None else SHORT_S if is_shown else QUICK_S
        problem = self._problem(slack_bytes, trace, base_bytes, time_limit_s=limit_s, start=like)
        found = self._solve(problem)
        plan = stated(found, self.machine())
        planned = Planned(plan, trace, plan.forecast, base_bytes, num_measured)
        if self._beside is not None and plan.notes:  # the time was up
            than_s = found.forecast.step_ms / 1e3
            planned.asked = replace(problem, time_limit_s=FULL_S, than_s=than_s, start=found.tiers)
            self._beside.ask(planned.asked)
        return planned

    @property
    def is_beside(self) -> bool:
        """Whether better plans are searched for while training goes on."""
        return self._beside is not None

    def retimed(
        self, planned: Planned, plan: Plan, trace: Trace, *, num_measured: int, blocks: Blocks | None = None
    ) -> Planned:
        """The same plan with the times of a settled step, and a better one searched for beside training: a quick one
        first. What fits still does, so no step waits.

        Args:
            planned, plan: what the step has followed.
            trace, num_measured: as in `Planned`.
            blocks: whose variants are to be chosen anew before that; None for none.
        """
        found = replace(planned, num_measured=num_measured, times_s=[], recent=[], num_marked=0, num_far=0)
        if self._beside is not None:  # else the search has failed meanwhile
            self._search_beside(self._beside, found, plan, trace, limit_s=QUICK_S, blocks=blocks)
        return found

    def search_after_choice(self, planned: Planned, blocks: Blocks | None) -> None:
        """Compiled blocks stay as they are, so what was put off is searched for; or other variants, of these blocks."""
        if self._beside is not None and planned.plan is not None:
            known = planned, planned.plan, planned.trace, planned.forecast
            self._search_beside(self._beside, *known, limit_s=QUICK_S, blocks=blocks)

    @property
    def has_chosen(self) -> bool:
        """Whether variants were chosen beside training, and not taken from here."""
        return self._chosen is not None

    def take_choice(self) -> tuple[Planned, Blocks, Choice]:
        """Those, with the plan of the step by which they were chosen and the blocks as they were then."""
        assert self._chosen is not None
        found, self._chosen = self._chosen, None
        return found

    def _search_beside(
        self,
        beside: Beside,
        planned: Planned,
        plan: Plan,
        trace: Trace,
        took: Figures | None = None,
        *,
        limit_s: float,
        blocks: Blocks | None = None,
    ) -> None:
        """A plan goes on for a step of other times, and a better one is searched for. Its forecast is what it takes by
        those times, or what was measured."""
        slack_bytes = self.slack_bytes + planned.margin_bytes
        problem = self._problem(slack_bytes, trace, planned.base_bytes, time_limit_s=limit_s, start=plan)
        than_s = forecast_s(problem.trace, plan.placements, problem.machine)
        planned.trace, planned.asked = trace, replace(problem, than_s=than_s, blocks=blocks)
        plan = replace(plan, trace=problem.trace)
        planned.forecast = took or stated(plan, self.machine()).forecast
        planned.plan = replace(plan, forecast=planned.forecast)
        beside.ask(planned.asked)

    def _search_by_steps(self, beside: Beside, planned: Planned, plan: Plan, took_s: float, *, limit_s: float) -> None:
        """The same by times that explain what steps took."""
        trace, forecast = self._explained(planned, plan), replace(planned.forecast, step_ms=took_s * 1e3)
        self._search_beside(beside, planned, plan, trace, forecast, limit_s=limit_s)

    def search_on(self, planned: Planned) -> None:
        """A smaller step has followed a plan. A quick one waits to be timed before a better one is searched for; but
        where sizes change, few steps are as large as it is for. So after some of these it waits no longer."""
        if self._beside is None or planned.plan is None or not planned.is_quick or planned.asked is not None:
            return
        planned.num_smaller += 1
        if planned.num_smaller >= _NUM_UNTIMED:
            planned.is_quick = False
            known = planned, planned.plan, planned.trace, planned.forecast
            self._search_beside(self._beside, *known, limit_s=FULL_S)

    def plan_smaller(self, larger: Planned, trace: Trace) -> Planned:
        """A plan for smaller steps than another's, of the same operations: it has none as long as that is searched for
        beside training, and where nothing fits.

        Args:
            larger: which they follow as long as there is none.
            trace: of such steps.
        """
        found = replace(larger, plan=None, trace=trace, smaller={}, untold={}, asked=None, replaced=None)
        found.margin_bytes = self.unseen_bytes
        time_limit_s, free_bytes = QUICK_S if self._beside is None else FULL_S, self.slack_bytes + found.margin_bytes
        problem = self._problem(free_bytes, trace, larger.base_bytes, time_limit_s=time_limit_s)
        if self._beside is not None:
            found.asked = problem
            self._beside.ask(problem)
            return found
        with suppress(BudgetError):
            found.plan = stated(self._solve(problem), self.machine())
            found.forecast = found.plan.forecast
        return found

    def plan_after(self, shortage: Shortage, planned: Planned) -> Planned | None:
        """A plan for the step that ran out of memory, which keeps more free, as all do from now on; None for none."""
        if planned.plan is None:
            return None
        anew, self.slack_bytes = plan_with_slack(
            lambda slack: self.plan_within(slack, planned.trace, planned.base_bytes, planned.num_measured),
            shortage,
            slack_bytes=self.slack_bytes,
            tier=self._tiers.fast.name,
        )
        return anew

    def renewed(self, planned: Planned, base_bytes: int) -> Planned:  # pragma: gpu
        """A plan for the same step beside so much memory that is not the Session's.

        Raises:
            BudgetError: as `solve` does.
        """
        if planned.is_from_user:
            self.lessons.append(
                f"The plan that was given takes {format_size(planned.base_bytes)} of other memory for granted, and "
                f"there are {format_size(base_bytes)}: such steps are planned anew."
            )
        earlier = replace(planned, is_least=False)
        return self.plan(planned.trace, base_bytes=base_bytes, num_measured=planned.num_measured, earlier=earlier)

    def learn(self, steps: list[Took], vram_bytes: int) -> bool:
        """Compares what steps that followed the plan in force took with its forecast.

        Args:
            steps: what such steps took.
            vram_bytes: their highest peak of device memory; 0 where it does not count.

        Returns:
            Whether another plan is in force now.
        """
        plans = self._plans
        is_over = vram_bytes > self._tiers.budget.vram
        if is_over and plans.in_force is not None and self.learn_peak(plans.in_force, vram_bytes):
            return True
        for took in steps:
            planned = plans.in_force
            better = self.judge(planned, took) if planned is not None else None
            if planned is None or better is None or not plans.replace(planned, better):
                continue
            if better.plan is None or planned.plan is None or better.plan.placements != planned.plan.placements:
                return True
        return self.take_better()

    def take_better(self) -> bool:
        """Takes over a plan that was found beside training; returns whether there is one. It has to take less by the
        link's whole speed, too, or than steps took: else it may only wait less for copies that are not late."""
        beside, plans = self._beside, self._plans
        if beside is None:
            return False
        answer = beside.answer(lambda problem: plans.waiting_for(problem) is not None)
        if beside.failure:
            self.lessons.append(
                f"The process that searches for better plans has failed: {beside.failure}. Steps wait for the "
                "whole search from now on."
            )
            self._beside = None
            plans.nothing_is_asked()
        if answer is None:
            return False
        problem, better = answer
        planned = plans.waiting_for(problem)
        assert planned is not None
        planned.asked = None
        if isinstance(better, Choice) and problem.blocks is not None:
            self._chosen = planned, problem.blocks, better
        if not isinstance(better, Plan):
            return False
        plan = stated(better, self.machine())
        if planned.plan is None:  # it is for smaller steps, which have followed a larger plan so far
            planned.plan, planned.forecast = plan, plan.forecast
            return False
        may_be_wrong = problem.time_limit_s < FULL_S and planned.num_lessons < _MOST_LESSONS
        if may_be_wrong and is_too_slow(planned.trace, planned.plan, planned.recent):
            planned.num_lessons += 1  # steps have shown meanwhile that it is no plan for them
            self._search_by_steps(beside, planned, planned.plan, planned.took_s, limit_s=QUICK_S)
            return False
        is_better = better.forecast.step_ms < problem.than_s * 1e3 and plan.forecast.step_ms < planned.to_beat_ms
        now = planned
        if is_better:
            now = replace(planned, plan=plan, forecast=plan.forecast, times_s=[], recent=[], num_marked=0)
            now.fastest_s = math.inf
            now.replaced = last_proven(planned)
        is_quick = bool(better.notes) and problem.time_limit_s < FULL_S  # the time was up
        if is_quick and self._times_first:
            now.is_quick, now.num_smaller = True, 0
        elif is_quick:
            than_s = min(problem.than_s, better.forecast.step_ms / 1e3)
            start = better.tiers if is_better else planned.plan.tiers
            now.asked = replace(problem, time_limit_s=FULL_S, than_s=than_s, start=start)
            beside.ask(now.asked)
        elif not is_better:
            planned.plan = replace(planned.plan, notes=better.notes)
        return is_better and plans.replace(planned, now)

    def close(self) -> None:
        """Ends the search for better plans."""
        if self._beside is not None:
            self._beside.close()

    def learn_peak(self, planned: Planned, vram_bytes: int) -> bool:
        """Steps that followed a plan took more than the budget. Returns whether another plan is in force now."""
        better = self.judge_peak(planned, vram_bytes)
        return better is not planned and self._plans.replace(planned, better)

    def judge_peak(self, planned: Planned, vram_bytes: int) -> Planned | None:
        """Decides what becomes of a plan whose steps took more than the budget.

        First what was missing is kept free. Where that does not help, something takes room at a moment when it did not
        before, and only measuring tells which.

        Returns:
            What replaces the plan: itself where nothing does, None where such steps must be measured anew.
        """
        budget = self._tiers.budget.vram
        said = (
            f"Steps took {format_size(vram_bytes)} of device memory, where {format_size(planned.forecast.vram_bytes)} "
            f"were forecast and {format_size(budget)} allowed: "
        )
        if planned.plan is None or planned.is_least:
            return planned
        if planned.is_over:
            self.lessons.append(said + "such steps are measured anew.")
            return None
        # What was not forecast, and not only what was over: the next plan may use room that this one left.
        missed = vram_bytes - planned.forecast.vram_bytes
        slack = max(self.slack_bytes + (vram_bytes - budget), missed) + _MARGIN_BYTES
        try:
            anew = self.plan_within(slack, planned.trace, planned.base_bytes, planned.num_measured)
        except BudgetError:
            planned.is_least = True
            self.lessons.append(said + f"with {format_size(slack)} kept free no plan fits, so they go on as they are.")
            return planned
        self.slack_bytes = slack
        anew.is_over = True
        anew.num_lessons = planned.num_lessons + 1
        self.lessons.append(said + f"such steps were planned anew, with {format_size(slack)} kept free.")
        return anew

    def judge(self, planned: Planned, took: Took) -> Planned | None:
        """Takes note of what a step took that followed the plan.

        Returns:
            What replaces the plan, or the forecast alone, where the times of several steps say that it is wrong.
        """
        planned.recent = [*planned.recent[1 - NUM_JUDGED :], took]
        planned.fastest_s = min(planned.fastest_s, took.step_s)
        if self._beside is not None and planned.asked is not None:
            return None  # it may soon be replaced, and its steps share the processor with the search
        planned.times_s.append(took.step_s)
        if planned.replaced is not None and len(planned.times_s) == NUM_JUDGED:
            earlier, planned.replaced = planned.replaced, None
            if (found := as_it_was(earlier, planned)) is not None:
                was, said = found
                self.lessons.append(said)
                return was
        plan = planned.plan
        if plan is None or len(planned.times_s) != NUM_JUDGED:
            return None
        measured_s, expected_s = statistics.median(planned.times_s), planned.forecast.step_ms / 1e3
        was_quick, planned.is_quick = planned.is_quick, False
        if was_quick and self._beside is not None:
            # One whose copies are waited for was made for a slower model, and is far from the best.
            is_poor = min(one.waited_s or 0.0 for one in planned.recent) > NOISE * measured_s
            is_poor &= planned.num_lessons < _MOST_LESSONS
            searched = replace(planned, times_s=[], num_lessons=planned.num_lessons + is_poor)
            limit_s = QUICK_S if is_poor else FULL_S
            self._search_by_steps(self._beside, searched, plan, measured_s, limit_s=limit_s)
            return searched
        if planned.num_lessons >= _MOST_LESSONS or abs(measured_s - expected_s) <= NOISE * measured_s:
            return None
        said = f"Steps took {measured_s * 1e3:.1f} ms, where {expected_s * 1e3:.1f} ms were forecast: "
        forecast = replace(planned.forecast, step_ms=measured_s * 1e3)
        corrected = replace(planned, plan=replace(plan, forecast=forecast), forecast=forecast, times_s=[])
        corrected.num_lessons = planned.num_lessons + 1
        if planned.is_from_user:
            self.lessons.append(said + "the plan that was given is kept.")
            return corrected
        # A plan whose steps once took what was forecast is not wrong: they are disturbed now.
        if min(abs(took_s - expected_s) for took_s in (measured_s, planned.fastest_s)) <= MISS * measured_s:
            self.lessons.append(said + "the forecast was corrected.")
            return corrected
        if self._beside is not None:
            self._search_by_steps(self._beside, corrected, plan, measured_s, limit_s=QUICK_S)
            self.lessons.append(said + "the forecast was corrected, and a better plan is searched for beside training.")
            return corrected
        trace = self._explained(planned, plan)
        with suppress(BudgetError):
            anew = self.plan(trace, base_bytes=planned.base_bytes, num_measured=planned.num_measured, earlier=planned)
            anew.num_lessons = planned.num_lessons + 1
            anew.replaced = last_proven(planned)
            anew.smaller, anew.num_untold, anew.untold = planned.smaller, planned.num_untold, planned.untold
            self.lessons.append(said + "such steps were planned anew.")
            return anew
        return corrected
