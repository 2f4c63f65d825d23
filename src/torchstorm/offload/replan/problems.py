"""What is solved for a plan: a step, beside other memory, within a Session's budget, at the speeds that steps show."""

from __future__ import annotations

import math

from torchstorm.offload.budget import Tiers
from torchstorm.offload.replan.explain import counted_on, explained, slowed
from torchstorm.offload.replan.planned import Planned
from torchstorm.offload.replan.plans import Plans
from torchstorm.plan.beside import Problem
from torchstorm.plan.forecast import SLOT_BYTES
from torchstorm.plan.machine import Machine
from torchstorm.plan.plan import Plan
from torchstorm.plan.solve import shift_base, solve
from torchstorm.plan.trace import Trace

# Time limits of the search: while a step waits, where another plan shows it the way or none does, and else.
SHORT_S, QUICK_S, FULL_S = 0.1, 0.3, 10.0
_UNSEEN_PART = 100  # of the budget


class Problems:
    """Of one Session.

    Args:
        tiers: tiers and budget.
        plans: of the Session.

    Attributes:
        slack_bytes: of the budget, kept free of plans since the device ran out of memory.
    """

    def __init__(self, tiers: Tiers, plans: Plans) -> None:
        self._tiers = tiers
        self._plans = plans
        self.slack_bytes = 0
        self._link_share = 1.0  # of the measured speed of link and disk that copies were seen to get

    @property
    def unseen_bytes(self) -> int:
        """What a plan that no step has followed so far keeps free on a GPU. Only such a step tells how an allocator
        rounds what stays (of 25 MiB PyTorch's makes 26), and which workspaces libraries take at other sizes."""
        return self._tiers.budget.vram // _UNSEEN_PART if self._tiers.fast.counts_all else 0

    def machine(self) -> Machine:
        """Speeds as measured, and as steps have shown them since."""
        return slowed(self._tiers.machine(), self._link_share)

    def is_outdated(self, planned: Planned, base_bytes: int) -> bool:
        """Whether memory that is not the Session's differs from what the plan takes for granted."""
        if not self._tiers.fast.counts_all or planned.plan is None:
            return False
        delta, limit = base_bytes - planned.base_bytes, self._tiers.budget.vram
        is_less = delta < -limit // 20 and not planned.is_from_user
        return delta > self._tiers.spare.vram // 2 or is_less

    def _problem(
        self, slack_bytes: int, trace: Trace, base_bytes: int, *, time_limit_s: float, start: Plan | None = None
    ) -> Problem:
        return Problem(
            trace=shift_base(trace, base_bytes - trace.base_bytes) if self._tiers.fast.counts_all else trace,
            machine=counted_on(self.machine()),
            budget=self._tiers.budget,
            spare=self._tiers.spare_with(slack_bytes),
            time_limit_s=time_limit_s,
            than_s=math.inf,
            fixed=self._plans.placed_before(trace),
            start=start.tiers if start is not None else (),
        )

    def _solve(self, problem: Problem) -> Plan:
        return solve(
            problem.trace,
            problem.machine,
            problem.budget,
            spare=problem.spare,
            own_bytes=self._tiers.own_bytes,
            # A step without a plan fills a tier in the order in which it saves: the last parcel may just not fit.
            slow_own_bytes=max((parcel.nbytes for parcel in problem.trace.parcels), default=0) + SLOT_BYTES,
            time_limit_s=problem.time_limit_s,
            fixed=problem.fixed,
            start=problem.start,
        )

    def quick_plan(self, trace: Trace, base_bytes: int) -> Plan:
        """A plan that need not be the best, to compare many steps by. Raises BudgetError as `solve` does."""
        return self._solve(self._problem(self.slack_bytes, trace, base_bytes, time_limit_s=QUICK_S))

    def _explained(self, planned: Planned, plan: Plan) -> Trace:
        """The trace with times that explain what steps took: the fastest one."""
        trace, self._link_share = explained(
            *(planned.trace, plan, planned.recent, planned.fastest_s, self._tiers.machine()), self._link_share
        )
        return trace
