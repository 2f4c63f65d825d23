"""Times a step that follows its plan as every later one will: on the short way through the hooks, with few marks.

To mark every moment takes the host more than many a kernel takes the device, and a step that waits for the host then
looks as if there were time for many more copies.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch

from torchstorm.offload.recompute.traced_ops import call_seconds
from torchstorm.offload.step.clock import CpuClock, seconds_between
from torchstorm.offload.step.parcels import Call
from torchstorm.plan.trace import Trace
from torchstorm.transfer.engine import StreamClock


class Pace:
    """The times of one step. It is made when the step's first moment comes.

    Where a plan's copies may be waited for, and where something is computed again, the clock stands still.

    Args:
        device: the fast device.
        start: the clock's mark at the step's entry.

    Attributes:
        clock: of the device.
        calls: recorded operations, whose times are taken as well.
    """

    asks_memory = False

    def __init__(self, device: torch.device, start: object) -> None:
        self.clock = StreamClock(device) if device.type == "cuda" else CpuClock()
        self.calls: list[Call] = []
        self._device = device
        self._stopped: object = self.clock.mark()
        self._points = [(0, start, start)]  # moment, when the interval before it ended, when the one after it began

    def stop(self) -> None:
        """The Session's work begins, or the step has ended."""
        self._stopped = self.clock.mark()

    def go_on(self, moment: int) -> None:
        """The work of a moment has ended."""
        self._points.append((moment, self._stopped, self.clock.mark()))

    def end(self, moment: int) -> None:
        """The step is over, of which this was the last moment."""
        self.stop()
        self._points.append((moment + 1, self._stopped, self._stopped))

    def refine(self, trace: Trace) -> Trace:
        """The step's trace with these times; between two marks, as the trace has them in proportion. On CUDA the host
        waits for the device here."""
        if self._points[-1][0] != trace.num_moments:
            return trace
        if self._device.type == "cuda":  # pragma: gpu
            torch.cuda.synchronize(self._device)
        seconds = [moment.compute_s for moment in trace.moments]
        for (first, _, left), (last, arrived, _) in pairwise(self._points):
            known_s = sum(seconds[first:last])
            measured_s = max(0.0, seconds_between(left, arrived))
            for moment in range(first, last):
                seconds[moment] = seconds[moment] * measured_s / known_s if known_s else measured_s / (last - first)
        moments = tuple(replace(one, compute_s=took) for one, took in zip(trace.moments, seconds, strict=True))
        times = {call.number: call_seconds(call) for call in self.calls}
        ops = tuple(replace(op, compute_s=times.get(op.number, op.compute_s)) for op in trace.ops)
        return replace(trace, moments=moments, ops=ops)
