"""Plans a step of sizes that were never seen before it begins, from the steps that were: so it follows a plan from its
first operation on, and one that no plan fits raises before it."""

from __future__ import annotations

import operator
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from torchstorm.errors import BudgetError
from torchstorm.offload.replan.explain import MISS, stated
from torchstorm.offload.replan.planned import Kind, Planned
from torchstorm.offload.replan.planner import Planner
from torchstorm.offload.replan.plans import Plans
from torchstorm.offload.replan.workload import sizes_of
from torchstorm.plan.machine import Machine
from torchstorm.plan.packing import Buffers
from torchstorm.plan.scaled import Known, Law, UnknownLawError, is_too_far, run_alike, scaled
from torchstorm.plan.trace import Trace

_MOST_TRACES = 4  # that a law is told from


class _Seen(NamedTuple):
    """A plan, and the sizes of what the model is given in its steps."""

    sizes: tuple[int, ...]
    planned: Planned


def foresee(
    plans: Plans, planner: Planner, inputs: tuple[str, ...], rest: tuple[Any, ...], *, base_bytes: int, buffers: Buffers
) -> Planned | None:
    """The plan for a step of sizes that were never seen, and that no plan is large enough for.

    Args:
        plans: of the Session.
        planner: makes plans.
        inputs: shapes and types of what the model is given, as a plan's workload has them.
        rest: what tells the step from others beside its first saved tensor: the end of its key.
        base_bytes: bytes that are not the Session's at the step's entry.
        buffers: of the Session.

    Returns:
        The plan, which is not among the others yet. None where there is one, or nothing can be told.

    Raises:
        BudgetError: no plan fits, whichever of the known kinds of steps it is.
    """
    types, sizes = sizes_of(inputs)
    seen: list[_Seen] = []
    for planned in plans.latest_first():
        workload, key = planned.kind.workload, planned.kind.key
        if workload is None or len(key) < 2 or key[2:] != rest:
            continue
        its_types, its_sizes = sizes_of(workload.inputs)
        if its_types != types:
            continue
        if all(map(operator.ge, its_sizes, sizes)):
            return None  # as in every settled step, by the first of them
        seen.append(_Seen(its_sizes, planned))
    error: BudgetError | None = None
    is_sure = all(tells(each.planned) for each in seen)
    for group in _groups([each for each in seen if tells(each.planned)]):
        known = _known(group)
        trace = scaled(known, sizes, buffers)
        if trace is None:
            is_sure = False
            continue
        try:
            if is_too_far((one.trace for one in known), trace):
                planner.quick_plan(trace, base_bytes)  # where the least that it takes fits, the step itself will tell
                is_sure = False
                continue
            like = max(group, key=lambda one: one.planned.trace.saved_bytes).planned.plan
            found = planner.plan(trace, base_bytes=base_bytes, num_measured=1, like=like)
        except BudgetError as too_little:
            error = error or too_little
            continue
        found.kind, found.is_foreseen = _kind(group, sizes, inputs), True
        return found
    if error is not None and is_sure:
        raise error
    return None


def came_true(planned: Planned | None, trace: Trace, machine: Machine) -> Planned | None:
    """A plan that was foreseen, by the times of the first step that followed it.

    Args:
        planned: the plan; None for one that was not foreseen.
        trace: with these times.
        machine: has the speeds of link and disk.

    Returns:
        None where such steps are to be planned anew, since they take clearly more or less than was forecast.
    """
    if planned is None or planned.plan is None:
        return None
    plan = stated(replace(planned.plan, trace=trace), machine)
    if abs(plan.forecast.step_ms - planned.forecast.step_ms) > MISS * plan.forecast.step_ms:
        return None
    return replace(planned, plan=plan, trace=trace, forecast=plan.forecast, num_measured=planned.num_measured + 1)


def known_like(plans: Plans, planned: Planned) -> list[Known]:
    """Traces of steps of the same operations as a plan's on different sizes, its own first.

    Args:
        plans: of the Session.
        planned: one of those that tell.
    """
    assert planned.kind.workload is not None
    types, sizes = sizes_of(planned.kind.workload.inputs)
    seen = [_Seen(sizes, planned)]
    for one in plans.latest_first():
        if one.kind.workload is not None and tells(one) and one.kind.key[1:] == planned.kind.key[1:]:
            its_types, its_sizes = sizes_of(one.kind.workload.inputs)
            seen += [_Seen(its_sizes, one)] if its_types == types else []
    return _known(_groups(seen)[0])


def _known(group: list[_Seen]) -> list[Known]:
    return [Known(each.sizes, each.planned.trace) for each in group]


def tells(planned: Planned) -> bool:
    """Whether a plan's trace is of whole steps with one call of the model each, and has all that such a step needs."""
    kind = planned.kind
    is_whole = not (kind.is_of_rest or planned.is_unrecorded or planned.is_from_user)
    return is_whole and planned.plan is not None and kind.num_calls == 1


def _groups(seen: list[_Seen]) -> list[list[_Seen]]:
    """Plans for the same operations on different sizes, the last used first."""
    groups: list[list[_Seen]] = []
    for each in seen:
        group = next((one for one in groups if run_alike(one[0].planned.trace, each.planned.trace)), None)
        if group is None:
            groups.append([each])
        elif len(group) < _MOST_TRACES and all(other.sizes != each.sizes for other in group):
            group.append(each)
    return groups


def _kind(group: list[_Seen], sizes: tuple[int, ...], inputs: tuple[str, ...]) -> Kind:
    """How the step will begin, if it does so as those that it was foreseen from."""
    first = group[0].planned.kind
    assert first.workload is not None
    shapes = [each.planned.kind.key[0] for each in group]
    shape: tuple[int, ...] = ()
    if len({len(one) for one in shapes}) == 1:
        with suppress(UnknownLawError):
            shape = Law([each.sizes for each in group], sizes).numbers(shapes)
    return Kind((shape, *first.key[1:]), replace(first.workload, inputs=inputs), first.num_calls)
