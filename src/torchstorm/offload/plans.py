"""The plans of a Session, one for each kind of step, and what it learns when a step comes out otherwise."""

from __future__ import annotations

import statistics
from contextlib import suppress
from dataclasses import dataclass, field, replace

from torchstorm.errors import BudgetError
from torchstorm.offload.saved import slab_bytes
from torchstorm.offload.stack import Stack, bounce_buffers
from torchstorm.plan.forecast import SLOT_BYTES, Figures, forecast_s
from torchstorm.plan.machine import Machine
from torchstorm.plan.plan import Plan
from torchstorm.plan.solve import shift_base, solve
from torchstorm.plan.trace import Trace

# A step's time is judged by the median of so many that followed the plan.
_NUM_JUDGED = 3
# Below this a miss is noise; above the second, the plan itself may be wrong and is made anew.
_NOISE, _MISS = 0.02, 0.08
_MOST_LESSONS = 3  # of one plan: a machine whose times keep changing is not chased for ever
_LINK_SHARES = tuple(1 - step / 20 for step in range(15))


@dataclass(eq=False)
class Planned:
    """A plan in use, and what it takes for granted.

    Attributes:
        plan: None for a step that fits only when it is decided as it goes.
        trace: the step, without memory that was moved into it since.
        forecast: of the plan; of a step without one what was measured.
        base_bytes: bytes that are not the Session's at the step's entry.
        num_measured: steps that measured something of it.
        num_lessons: how often its times were corrected.
        times_s: of steps that followed it.
    """

    plan: Plan | None
    trace: Trace
    forecast: Figures
    base_bytes: int
    num_measured: int = 0
    num_lessons: int = 0
    times_s: list[float] = field(default_factory=list)


class Planner:
    """Plans steps within a Session's budget.

    Args:
        stack: tiers and budget.
    """

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self.slack_bytes = 0  # of the budget, kept free of plans since the device ran out of memory
        self._link_share = 1.0  # of the measured speed of link and disk that copies were seen to get
        self.lessons: list[str] = []

    def machine(self) -> Machine:
        """Speeds as measured, and as steps have shown them since."""
        return _slowed(self._stack.machine(), self._link_share)

    def plan(self, trace: Trace, *, base_bytes: int, num_measured: int) -> Planned:
        """Makes a plan that keeps the slack free, if any does so.

        Raises:
            BudgetError: as `solve` does.
        """
        if self.slack_bytes:
            with suppress(BudgetError):  # nothing fits with so much kept free, so less has to do
                return self.plan_within(self.slack_bytes, trace, base_bytes, num_measured)
        return self.plan_within(0, trace, base_bytes, num_measured)

    def plan_within(
        self, slack_bytes: int, trace: Trace, base_bytes: int, num_measured: int, *, time_limit_s: float = 10.0
    ) -> Planned:
        """Makes a plan that keeps so much of the budget free.

        Raises:
            BudgetError: as `solve` does.
        """
        shifted = shift_base(trace, base_bytes - trace.base_bytes) if trace.device == "cuda" else trace
        spare = self._stack.spare_with(slack_bytes)
        plan = solve(
            shifted,
            self.machine(),
            self._stack.budget,
            spare=spare,
            own_bytes=self._own_bytes,
            # A step without a plan fills a tier in the order in which it saves: the last parcel may just not fit.
            slow_own_bytes=max((parcel.nbytes for parcel in trace.parcels), default=0) + SLOT_BYTES,
            time_limit_s=time_limit_s,
        )
        return Planned(plan, trace, plan.forecast, base_bytes, num_measured)

    def quick_plan(self, trace: Trace, base_bytes: int) -> Plan | None:
        """A plan that need not be the best, to compare many steps by.

        Raises:
            BudgetError: as `solve` does.
        """
        return self.plan_within(self.slack_bytes, trace, base_bytes, 1, time_limit_s=0.3).plan

    def judge(self, planned: Planned, step_s: float) -> Planned | None:
        """Takes note of the time of a step that followed the plan.

        Returns:
            What replaces the plan, or the forecast alone, where the times of several steps say that it is wrong.
        """
        planned.times_s.append(step_s)
        plan = planned.plan
        if plan is None or len(planned.times_s) != _NUM_JUDGED or planned.num_lessons >= _MOST_LESSONS:
            return None
        measured_s, expected_s = statistics.median(planned.times_s), planned.forecast.step_ms / 1e3
        if abs(measured_s - expected_s) <= _NOISE * measured_s:
            return None
        said = f"Steps took {measured_s * 1e3:.1f} ms, where {expected_s * 1e3:.1f} ms were forecast: "
        forecast = replace(planned.forecast, step_ms=measured_s * 1e3)
        corrected = replace(
            planned, plan=replace(plan, forecast=forecast), forecast=forecast, num_lessons=planned.num_lessons + 1
        )
        corrected.times_s = []
        if abs(measured_s - expected_s) <= _MISS * measured_s:
            self.lessons.append(said + "the forecast was corrected.")
            return corrected
        trace = self._explain(planned, plan, measured_s)
        with suppress(BudgetError):
            anew = self.plan(trace, base_bytes=planned.base_bytes, num_measured=planned.num_measured)
            anew.num_lessons = planned.num_lessons + 1
            self.lessons.append(said + "such steps were planned anew.")
            return anew
        return corrected

    def _own_bytes(self, fast_bytes: int) -> int:
        """What a Session with such a budget on the fast tier takes of it: bounce buffers, and larger shared buffers."""
        growth = max(0, slab_bytes(fast_bytes) - slab_bytes(self._stack.fast_bytes))
        threads, block = bounce_buffers(fast_bytes) if self._stack.device.type == "cpu" else (0, 0)
        return threads * block + 2 * growth

    def _explain(self, planned: Planned, plan: Plan, measured_s: float) -> Trace:
        """Finds what makes the forecast come true: slower copies if those can, else slower compute."""
        machine = self._stack.machine()

        def miss(share: float) -> float:
            return abs(forecast_s(plan.trace, plan.placements, _slowed(machine, share)) - measured_s)

        share = min((one for one in _LINK_SHARES if one <= self._link_share), key=miss)
        if miss(share) <= _MISS * measured_s:
            self._link_share = share
            return planned.trace
        factor = measured_s / forecast_s(plan.trace, plan.placements, self.machine())
        moments = tuple(replace(one, compute_s=one.compute_s * factor) for one in planned.trace.moments)
        ops = tuple(replace(op, compute_s=op.compute_s * factor) for op in planned.trace.ops)
        return replace(planned.trace, moments=moments, ops=ops)


def _slowed(machine: Machine, share: float) -> Machine:
    return replace(
        machine,
        d2h_bytes_per_s=machine.d2h_bytes_per_s * share,
        h2d_bytes_per_s=machine.h2d_bytes_per_s * share,
        disk_write_bytes_per_s=machine.disk_write_bytes_per_s * share,
        disk_read_bytes_per_s=machine.disk_read_bytes_per_s * share,
    )
