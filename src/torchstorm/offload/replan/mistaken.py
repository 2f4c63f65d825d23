"""Plans by whose trace an operation made a saved tensor that another one has made."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

from torchstorm.errors import BudgetError
from torchstorm.offload.replan.planned import Planned
from torchstorm.offload.replan.planner import Planner
from torchstorm.offload.replan.plans import Plans
from torchstorm.plan.trace import without_origin


def correct(plans: Plans, planner: Planner, mistaken: Collection[tuple[Planned, int]]) -> bool:
    """Makes such plans anew: the first part of their trace is that of another plan, and steps of both may have differed
    before it was seen.

    Args:
        plans: of the Session.
        planner: makes plans.
        mistaken: such plans, and the numbers of the storages.

    Returns:
        Whether another plan is in force.
    """
    is_another = False
    for planned in {id(one): one for one, _ in mistaken if one.kind.is_of_rest}.values():
        trace = planned.trace
        for at in {at for one, at in mistaken if one is planned}:
            trace = without_origin(trace, at)
        anew = None
        with suppress(BudgetError):
            base, num_measured = planned.base_bytes, planned.num_measured
            anew = planner.plan(trace, base_bytes=base, num_measured=num_measured, earlier=planned)
        is_another |= plans.replace(planned, anew)
    return is_another
