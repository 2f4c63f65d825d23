"""Plans for smaller steps of the same operations.

A plan serves smaller steps as it is, and moves and computes again the same tensors of them. But a smaller step has room
for more of them. And the host takes as long for a short batch as for a long one, so a GPU waits for it there. So steps
that are much smaller than those of the plan which they follow get plans for their sizes: these are foreseen from traces
of two sizes, and searched for beside training.
"""

from __future__ import annotations

import math
import operator

from torchstorm.offload.replan.foresight import known_like, tells
from torchstorm.offload.replan.planned import Planned
from torchstorm.offload.replan.planner import Planner
from torchstorm.offload.replan.plans import Plans
from torchstorm.offload.replan.workload import sizes_of
from torchstorm.plan.forecast import KEEP
from torchstorm.plan.packing import Buffers
from torchstorm.plan.scaled import scaled

Sizes = tuple[int, ...]

_PARTS = 8  # of the full size; steps between two of them share a plan
_MOST, _MOST_UNTOLD = 16, 64  # such plans beside one, and sizes of which the traces do not tell


def part_of(sizes: Sizes, full: Sizes) -> Sizes | None:
    """The sizes that a smaller step is planned for: each in as many parts of the full one as it needs.

    Args:
        sizes: of what the model is given.
        full: what the step's plan is for.

    Returns:
        None where these are the full ones, or something is larger than they are.
    """
    if len(sizes) != len(full) or any(map(operator.gt, sizes, full)):
        return None
    parts = tuple(
        one if one == most else _up(most * _up(_PARTS * one, most), _PARTS)
        for one, most in zip(sizes, full, strict=True)
    )
    return parts if parts != full else None


def _up(one: int, other: int) -> int:
    return -(-one // other)


def plan_for(larger: Planned, inputs: tuple[str, ...] | None) -> Planned | None:
    """The plan for the smallest steps that are no smaller than one; None for that which it is to follow otherwise.

    Args:
        larger: that plan.
        inputs: shapes and types of what the model is given in the step, as a plan's workload has them.
    """
    if not larger.smaller or (sizes := _smaller_sizes(larger, inputs)) is None:
        return None
    found = [
        (math.prod(most), one)
        for most, one in larger.smaller.items()
        if one.plan is not None and all(map(operator.le, sizes, most))
    ]
    return min(found, key=operator.itemgetter(0))[1] if found else None


def is_to_be_traced(larger: Planned, inputs: tuple[str, ...] | None) -> bool:
    """Whether a step is to be traced that could follow a plan for larger ones, so that its sizes tell of others."""
    if not larger.is_to_tell or _unplanned_part(larger, inputs) is None:
        return False
    larger.told()
    larger.stands_for_smaller = False  # but will, once a step has followed it after this one
    return True


def ask_for_plan(
    plans: Plans, planner: Planner, larger: Planned, inputs: tuple[str, ...] | None, buffers: Buffers
) -> None:
    """A step has followed a plan for larger ones to its end, or one for smaller ones in its place: if it was much
    smaller, a plan for its sizes is searched for.

    Args:
        plans: of the Session.
        planner: makes plans.
        larger: the plan.
        inputs: as in `plan_for`.
        buffers: of the Session.
    """
    if not plans.has(larger):  # it took more than the budget
        return
    planner.search_on(larger)
    is_settled = larger.asked is None and not plans.is_measured_again(larger)
    if not is_settled or not tells(larger) or len(larger.smaller) >= _MOST:
        return
    part = _unplanned_part(larger, inputs)
    if part is None or _keeps_all(larger):
        return
    trace = None
    if larger.untold.get(part) != plans.num_put:  # else nothing has come since that could tell
        known = known_like(plans, larger)
        trace = scaled(known, part, buffers) if len(known) > 1 else None
    if trace is not None:
        larger.smaller[part] = planner.plan_smaller(larger, trace)
    elif len(larger.untold) < _MOST_UNTOLD or part in larger.untold:
        larger.num_untold += 1
        larger.untold[part] = plans.num_put


def give_up(planned: Planned, planner: Planner, why: str) -> None:
    """Takes a plan for smaller steps away, so that they follow the larger one again; the report says why, once."""
    planned.plan = planned.asked = None
    lesson = f"A plan for smaller steps was given up, and they follow the one for larger steps again: {why}"
    if lesson not in planner.lessons:
        planner.lessons.append(lesson)


def _smaller_sizes(larger: Planned, inputs: tuple[str, ...] | None) -> Sizes | None:
    """Sizes of what the model is given in a step; None where that is not known, or is other tensors than the plan's."""
    workload = larger.kind.workload
    if inputs is None or workload is None:
        return None
    types, sizes = sizes_of(inputs)
    return sizes if types == sizes_of(workload.inputs)[0] else None


def _unplanned_part(larger: Planned, inputs: tuple[str, ...] | None) -> Sizes | None:
    """The sizes that a much smaller step is planned for, if there is no plan for them, and none was asked for."""
    sizes = _smaller_sizes(larger, inputs)
    if sizes is None:
        return None
    assert larger.kind.workload is not None
    part = part_of(sizes, sizes_of(larger.kind.workload.inputs)[1])
    return part if part not in larger.smaller else None


def _keeps_all(larger: Planned) -> bool:
    return larger.plan is not None and all(one.tier == KEEP for one in larger.plan.placements)
