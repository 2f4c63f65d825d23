"""Times a step that follows its plan as every later one will: on the short way through the hooks, with few marks.

To mark every moment takes the host more than many a kernel takes the device, and a step that waits for the host then
looks as if there were time for many more copies.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import accumulate, pairwise

from torchstorm.offload.fast import FastTier
from torchstorm.offload.native.library import library
from torchstorm.offload.recompute import fused
from torchstorm.offload.recompute.traced_ops import call_seconds
from torchstorm.offload.step.clock import Span, is_reached, seconds_between
from torchstorm.offload.step.parcels import Call
from torchstorm.plan.forecast import DISK, RAM, own_s
from torchstorm.plan.machine import Machine
from torchstorm.plan.plan import Plan
from torchstorm.plan.recompute import Replay, replays
from torchstorm.plan.trace import HostCost, Trace, slower, taking
from torchstorm.plan.typical import (
    MOST_OF_FORWARD,
    beside_the_host,
    forward_of_operations,
    spare_s,
    typical,
    typical_ops,
)

_LITTLE_MORE = 1.25
# What following a plan takes the host in forward, measured on the hosts of an H200: docs/decisions/0014 and 0017.
_RECORD_S, _MOVE_S = 35e-6, 120e-6
_RECORD_IN_CPP_S = 20e-6  # as much less as it is on a CPU: docs/decisions/0021
_MOST_OF_OWN = 0.5  # that following a plan may have in what was measured
_MOST_SLOWER = 1.25  # times what operations take a GPU that has rested: one that is always at work has a slower clock
_FEW = 8  # marks that tell too little
_STALL_S, _STALL = 10e-3, 4.0  # beyond what nine in ten take, so long at least, and so many times as long

_Point = tuple[int, object, object, float]
"""A moment, when the interval before it ended, when the one after it began, and what the host took in between."""


def host_cost() -> HostCost:
    """What following a plan takes the host of a GPU, of which nobody knows yet how much it has to spare."""
    record_s = _RECORD_S if library() is None else _RECORD_IN_CPP_S
    return HostCost(record_s=record_s, move_s=_MOVE_S, fuses=fused.is_there())


class Pace:
    """The times of one step. It is made when the step's first moment comes.

    Where a plan's copies may be waited for, and where something is computed again, the clock stands still: that is what
    forecasts add. But where a GPU does no more meanwhile than wait for the host, it counts.

    Args:
        fast: the fast device.
        span: of the step, which begins at its entry.

    Attributes:
        clock: of the device.
        calls: recorded operations, whose times are taken as well; none on a GPU, where they are known from a step whose
            host was ahead of it.
    """

    def __init__(self, fast: FastTier, span: Span) -> None:
        self.clock = fast.clock()
        self.calls: list[Call] = []
        self._fast = fast
        self._marks: list[tuple[object, float]] = []  # and when the host has made each
        self._stopped = self.mark()
        self._span = span
        self._points: list[_Point] = [(0, span.start, span.start, 0.0)]

    def mark(self) -> object:
        """Takes the time."""
        mark = self.clock.mark()
        self._marks.append((mark, time.perf_counter()))
        return mark

    def stop(self) -> None:
        """The Session's work begins, or the step has ended."""
        self._stopped = self.mark()

    def go_on(self, moment: int) -> None:
        """The work of a moment has ended."""
        stopped_s = self._marks[-1][1]
        mark = self.mark()
        self._points.append((moment, self._stopped, mark, self._marks[-1][1] - stopped_s))

    def end(self, moment: int) -> None:
        """The step is over, of which this was the last moment."""
        self.stop()
        self._points.append((moment + 1, self._stopped, self._stopped, 0.0))

    @property
    def is_reached(self) -> bool:
        """Whether the device has come to the end of the step."""
        return is_reached(self._stopped)

    def refine(self, trace: Trace, plan: Plan, machine: Machine, *, scale: float = 1.0) -> Trace:
        """The trace of the step, which followed a plan, with these times; between two marks, as the trace has them in
        proportion. The host waits for a device that has not come to the end of the step.

        Args:
            trace, plan: of the step, or of one that does `scale` times as much work.
            machine: has the speeds of the link and the disk.
        """
        if self._points[-1][0] != trace.num_moments:
            return trace
        if not self.is_reached:
            self._fast.synchronize()
        times = {call.number: call_seconds(call) * scale for call in self.calls}
        ops = taking(trace.ops, (times.get(op.number, op.compute_s) for op in trace.ops))
        seconds = [moment.compute_s for moment in trace.moments]
        intervals = list(pairwise(self._points))
        stalls_s = self._stalls_within(intervals) if self._fast.is_beside_host else [0.0] * len(intervals)
        for ((first, _, left, _), (last, arrived, _, _)), stall_s in zip(intervals, stalls_s, strict=True):
            known_s, took_s = sum(seconds[first:last]), max(0.0, seconds_between(left, arrived))
            # A host that has waited for the device stood still as well, while that worked.
            measured_s = max(took_s - stall_s, min(took_s, known_s / scale)) * scale
            for moment in range(first, last):
                seconds[moment] = seconds[moment] * measured_s / known_s if known_s else measured_s / (last - first)
        refined = replace(trace, ops=ops)
        if self._fast.is_beside_host:
            again = (replays(trace, plan.placements) or {}) if plan.recomputes else {}
            refined = self._without_gaps(replace(trace, ops=typical_ops(refined)), plan, again)
            for moment, waited_s in self._waited_for_the_host(refined, again):
                seconds[moment] += waited_s
            refined = self._without_own_cost(refined, plan, again, seconds)
        else:
            share = _share_of_the_model(sum(seconds), plan.moved_bytes(DISK) * machine.disk_delay_s_per_byte)
            seconds = [one * share for one in seconds]
        return typical(replace(refined, moments=taking(trace.moments, seconds)))

    def _stalls_within(self, intervals: list[tuple[_Point, _Point]]) -> list[float]:
        """What the host stood still in each."""
        told_s = {id(mark): at for mark, at in [(self._span.start, self._span.began_s), *self._marks]}
        began_s = [told_s[id(left)] for (_, _, left, _), _ in intervals]
        ended_s = [told_s[id(arrived)] for _, (_, arrived, _, _) in intervals]
        took_s = [max(0.0, end - begin) for begin, end in zip(began_s, ended_s, strict=True)]
        return _stalls(took_s, [last - first for (first, *_), (last, *_) in intervals])

    def _without_own_cost(self, trace: Trace, plan: Plan, again: Mapping[int, Replay], seconds: list[float]) -> Trace:
        """Takes out of the forward's seconds what following this plan took the host, as far as the device waited, and
        notes what any plan will take it."""
        forward = trace.turn
        device_s, host_s, whole_s = self._spans_of_forward(forward)
        if not host_s:
            return trace
        own = host_cost()
        following_s = own_s(own, again.values(), num_moved=plan.num_moved)
        operations = forward_of_operations(trace, seconds[:forward])
        if device_s > _LITTLE_MORE * host_s:
            if operations is not None:  # they were timed one by one, on a device that had rested before each
                trace = slower(trace, min(_MOST_SLOWER, max(1.0, sum(seconds[:forward]) / sum(operations))))
            # What the device waits for copies is not counted: a plan with fewer of them leaves the host no time for it.
            return replace(trace, host=replace(own, idle_s=spare_s(seconds[:forward], whole_s - following_s)))
        if operations is not None:
            # Together they take no longer than all that was seen.
            share = min(1.0, sum(seconds[:forward]) / sum(operations))
            operations = [one * share for one in operations]
            base_s = max(whole_s - following_s, (1 - _MOST_OF_OWN) * whole_s)
            seconds[:forward], idle_s = beside_the_host(operations, base_s)
            return replace(trace, host=replace(own, idle_s=idle_s))
        share = _share_of_the_model(sum(seconds[:forward]), following_s)
        seconds[:forward] = [one * share for one in seconds[:forward]]
        return replace(trace, host=own)

    def _spans_of_forward(self, forward: int) -> tuple[float, float, float]:
        """Seconds of the device and of the host for most of the forward, and of the host for all of it; zeros where too
        little is known of it.

        Args:
            forward: moment at which it ends.
        """
        end = next((left for moment, _, left, _ in self._points if moment >= forward), None)
        stop_s = next((at for mark, at in self._marks if mark is end), None)
        if stop_s is None:
            return 0.0, 0.0, 0.0
        marks = [(mark, at) for mark, at in self._marks if at <= stop_s]
        took_s = [after - before for (_, before), (_, after) in pairwise(marks)]
        stalls_s = _stalls(took_s, [1] * len(took_s))
        host_s = list(accumulate(map(operator.sub, took_s, stalls_s), initial=0.0))
        num_most = sum(passed_s <= MOST_OF_FORWARD * host_s[-1] for passed_s in host_s)
        if num_most < _FEW:
            return 0.0, 0.0, 0.0
        device_s = seconds_between(marks[0][0], marks[num_most - 1][0]) - sum(stalls_s[: num_most - 1])
        return max(0.0, device_s), host_s[num_most - 1], host_s[-1]

    def _without_gaps(self, trace: Trace, plan: Plan, again: Mapping[int, Replay]) -> Trace:
        """Operations without the time that the device waited for the host between an operation's first mark and its
        work. Where backward computes them again, and the host is ahead, they have shown what they take."""
        said_s = took_s = 0.0
        num_ops = num_points = 0
        for moment, arrived, left, host_s in self._points[1:-1]:
            made = again.get(moment)
            between_s = seconds_between(arrived, left)
            if made is None or moment in plan.drops or between_s <= _LITTLE_MORE * host_s:
                continue
            if any(plan.placements[source].tier in (RAM, DISK) for source in made.sources):
                continue  # it may have waited for a copy
            said_s, took_s = said_s + _compute_s(trace, made), took_s + between_s
            num_ops, num_points = num_ops + len(made.ops), num_points + 1
        if num_points < _FEW or took_s >= said_s:
            return trace
        gap_s = (said_s - took_s) / num_ops
        seconds = (max((1 - _MOST_OF_OWN) * op.compute_s, op.compute_s - gap_s) for op in trace.ops)
        return replace(trace, ops=taking(trace.ops, seconds))

    def _waited_for_the_host(self, trace: Trace, again: Mapping[int, Replay]) -> Iterator[tuple[int, float]]:
        """Moments of which the device had no more to do than the host took to say it, and what that was beyond what is
        computed again."""
        for moment, arrived, left, host_s in self._points[1:-1]:
            took_s = seconds_between(arrived, left)
            if took_s <= _LITTLE_MORE * host_s:
                made = again.get(moment)
                again_s = _compute_s(trace, made) if made is not None else 0.0
                yield moment, max(0.0, took_s - again_s)


def _stalls(took_s: list[float], nums: list[int]) -> list[float]:
    """What the host stood still: for a size that is new, cuDNN plans its attention for 0.1 s, and cuBLAS chooses its
    kernels.

    Args:
        took_s: seconds of the host between marks; few tell nothing.
        nums: of moments in each.
    """
    if len(took_s) < _FEW:
        return [0.0] * len(took_s)
    usual_s = sorted(one / max(1, num) for one, num in zip(took_s, nums, strict=True))[(len(took_s) - 1) * 9 // 10]
    beyond_s = (one - usual_s * max(1, num) for one, num in zip(took_s, nums, strict=True))
    return [one if one > max(_STALL_S, (_STALL - 1) * usual_s) else 0.0 for one in beyond_s]


def _compute_s(trace: Trace, made: Replay) -> float:
    """What operations that run again take, by the times that the trace has now."""
    return sum(trace.ops[op].compute_s for op in made.ops)


def _share_of_the_model(took_s: float, following_s: float) -> float:
    """What part of a time is the model's own, where so much of it was for following the plan."""
    return max(1 - _MOST_OF_OWN, 1 - following_s / took_s) if took_s else 1.0
