"""Times a step that follows its plan as every later one will: on the short way through the hooks, with few marks.

To mark every moment takes the host more than many a kernel takes the device, and a step that waits for the host then
looks as if there were time for many more copies.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import torch

from torchstorm.offload.recompute.traced_ops import call_seconds
from torchstorm.offload.step.clock import CpuClock, seconds_between
from torchstorm.offload.step.parcels import Call
from torchstorm.plan.plan import Plan
from torchstorm.plan.recompute import replays
from torchstorm.plan.trace import Trace
from torchstorm.transfer.engine import StreamClock

_LITTLE_MORE = 1.25


class Pace:
    """The times of one step. It is made when the step's first moment comes.

    Where a plan's copies may be waited for, and where something is computed again, the clock stands still: that is what
    forecasts add. But where a GPU does no more meanwhile than wait for the host, it counts.

    Args:
        device: the fast device.
        start: the clock's mark at the step's entry.

    Attributes:
        clock: of the device.
        calls: recorded operations, whose times are taken as well.
    """

    def __init__(self, device: torch.device, start: object) -> None:
        self.clock = StreamClock(device) if device.type == "cuda" else CpuClock()
        self.calls: list[Call] = []
        self._device = device
        self._stopped: object = self.clock.mark()
        self._host_stopped = time.perf_counter()
        # Moment, when the interval before it ended, when the one after it began, what the host took in between.
        self._points = [(0, start, start, 0.0)]

    def stop(self) -> None:
        """The Session's work begins, or the step has ended."""
        self._stopped = self.clock.mark()
        self._host_stopped = time.perf_counter()

    def go_on(self, moment: int) -> None:
        """The work of a moment has ended."""
        host_s = time.perf_counter() - self._host_stopped
        self._points.append((moment, self._stopped, self.clock.mark(), host_s))

    def end(self, moment: int) -> None:
        """The step is over, of which this was the last moment."""
        self.stop()
        self._points.append((moment + 1, self._stopped, self._stopped, 0.0))

    def refine(self, trace: Trace, plan: Plan) -> Trace:
        """The trace of the step, which followed a plan, with these times; between two marks, as the trace has them in
        proportion. On CUDA the host waits for the device here."""
        if self._points[-1][0] != trace.num_moments:
            return trace
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        times = {call.number: call_seconds(call) for call in self.calls}
        ops = tuple(replace(op, compute_s=times.get(op.number, op.compute_s)) for op in trace.ops)
        seconds = [moment.compute_s for moment in trace.moments]
        for (first, _, left, _), (last, arrived, _, _) in pairwise(self._points):
            known_s = sum(seconds[first:last])
            measured_s = max(0.0, seconds_between(left, arrived))
            for moment in range(first, last):
                seconds[moment] = seconds[moment] * measured_s / known_s if known_s else measured_s / (last - first)
        refined = replace(trace, ops=ops)
        if self._device.type == "cuda":
            for moment, waited_s in self._waited_for_the_host(refined, plan):
                seconds[moment] += waited_s
        moments = tuple(replace(one, compute_s=took) for one, took in zip(trace.moments, seconds, strict=True))
        return replace(refined, moments=moments)

    def _waited_for_the_host(self, trace: Trace, plan: Plan) -> Iterator[tuple[int, float]]:
        """Moments of which the device had no more to do than the host took to say it, and what that was beyond what is
        computed again."""
        again = (replays(trace, plan.placements) or {}) if plan.recomputes else {}
        for moment, arrived, left, host_s in self._points[1:-1]:
            took_s = seconds_between(arrived, left)
            if took_s <= _LITTLE_MORE * host_s:
                made = again.get(moment)
                again_s = sum(trace.ops[op].compute_s for op in made.ops) if made is not None else 0.0
                yield moment, max(0.0, took_s - again_s)
