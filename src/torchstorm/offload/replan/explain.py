"""Explains what steps took that followed a plan, where something else was forecast.

Of a GPU, what the forward takes the device and the host is known then. A step's first measurements are of a host that
has marks to make. Where it comes late, they say little of the device; and how much of its time following a plan takes
is a guess. Steps that only follow their plan tell both.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from torchstorm.offload.step.clock import Took
from torchstorm.plan.forecast import forecast_s, own_s
from torchstorm.plan.machine import Machine
from torchstorm.plan.plan import Plan
from torchstorm.plan.recompute import replays
from torchstorm.plan.trace import Trace, slower, taking
from torchstorm.plan.typical import forward_of_operations, with_forward

MISS = 0.08  # of what was measured: with so much, the plan itself may be wrong
# Of a link's speed. Where the model computes faster than it was measured, copies come late, and steps wait for them.
# What is computed again instead takes a tenth of what its copy would.
_COUNTED_ON = 0.9
_LINK_SHARES = tuple(1 - step / 20 for step in range(15))


def explained(
    trace: Trace, plan: Plan, steps: Sequence[Took], measured_s: float, machine: Machine, link_share: float
) -> tuple[Trace, float]:
    """Finds what makes the forecast come true: what the forward is seen to take; then slower copies if those can, else
    slower compute. What takes longer by little is left; but nothing takes longer than steps have shown.

    Args:
        trace: of such steps.
        plan: that they have followed.
        steps: what the last of them took.
        measured_s: what such a step takes.
        machine: has the speeds of link and disk as measured.
        link_share: of these that copies were seen to get so far.

    Returns:
        The trace with other times, and another share.
    """
    trace = with_settled_forward(trace, plan, steps)

    @functools.cache
    def forecast(share: float) -> float:
        return forecast_s(trace, plan.placements, slowed(machine, share))

    expected_s = forecast(link_share)
    if measured_s < expected_s and link_share < 1.0:  # copies were thought to be slower than they are
        shares = [one for one in reversed(_LINK_SHARES) if one >= link_share]
        link_share = next((one for one in shares if forecast(one) <= measured_s), 1.0)
        expected_s = forecast(link_share)
    if measured_s >= expected_s:
        if measured_s - expected_s <= MISS * measured_s:
            return trace, link_share
        shares = [one for one in _LINK_SHARES if one <= link_share]
        at = bisect_left(shares, measured_s, key=forecast)  # the slower the copies, the longer the step
        share = min(shares[max(0, at - 1) : at + 1], key=lambda one: abs(forecast(one) - measured_s))
        if abs(forecast(share) - measured_s) <= MISS * measured_s:
            return trace, share
    factor = measured_s / expected_s
    moments = taking(trace.moments, (one.compute_s * factor for one in trace.moments))
    return replace(slower(trace, factor), moments=moments), link_share


def slowed(machine: Machine, share: float) -> Machine:
    """A machine whose copies get a share of the measured speeds."""
    return replace(
        machine,
        d2h_bytes_per_s=machine.d2h_bytes_per_s * share,
        h2d_bytes_per_s=machine.h2d_bytes_per_s * share,
        disk_write_bytes_per_s=machine.disk_write_bytes_per_s * share,
        disk_read_bytes_per_s=machine.disk_read_bytes_per_s * share,
    )


def counted_on(machine: Machine) -> Machine:
    """A machine with the part of a GPU's link that a plan fills."""
    return replace(
        machine,
        d2h_bytes_per_s=machine.d2h_bytes_per_s * _COUNTED_ON,
        h2d_bytes_per_s=machine.h2d_bytes_per_s * _COUNTED_ON,
    )


def stated(plan: Plan, machine: Machine) -> Plan:
    """A plan, which may count on a part of a link, with the time that it takes where copies get all of it."""
    step_s = forecast_s(plan.trace, plan.placements, machine)
    return replace(plan, forecast=replace(plan.forecast, step_ms=step_s * 1e3))


def is_too_slow(trace: Trace, plan: Plan, steps: Sequence[Took]) -> bool:
    """Whether the forward of such steps is so much shorter than the trace's that plans for it are far from the best."""
    return with_settled_forward(trace, plan, steps).forward_s < (1 - MISS) * trace.forward_s


def with_settled_forward(trace: Trace, plan: Plan, steps: Sequence[Took]) -> Trace:
    """The trace with a forward that takes what it took in such steps, and with what the host had to spare in it.

    The fastest of them tells: what disturbs a host only adds.

    Args:
        trace: of such steps.
        plan: that they have followed.
        steps: what they took. Those of which the forward is not known say nothing; neither do those of which it is not
            known how long they waited for copies in it. Else what a plan that moves too much waits for would look like
            time for as many copies.
    """
    known = [one for one in steps if one.forward_s and (one.waited_s is not None or not plan.num_moved)]
    if not known or trace.device == "cpu":
        return trace
    forward_s = min(max(0.0, one.forward_s - (one.waited_s or 0.0)) for one in known)
    host_s = min(one.host_s for one in known)
    again = replays(trace, plan.placements) or {}
    following_s = own_s(trace.host, again.values(), num_moved=plan.num_moved)
    seconds = forward_of_operations(trace)
    if seconds is None:
        seconds = [moment.compute_s for moment in trace.moments[: trace.turn]]
        share = forward_s / sum(seconds) if any(seconds) else 1.0
    else:
        share = min(1.0, forward_s / sum(seconds))  # the rest is waiting for the host
    return with_forward(trace, [one * share for one in seconds], max(0.0, host_s - following_s))
