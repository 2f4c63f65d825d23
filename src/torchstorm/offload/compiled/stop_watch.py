"""Times what a device takes for work that the host gives it, however late the host is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torchstorm.offload.fast import FastTier
from torchstorm.offload.step.clock import seconds_between

_BUSY_S = 20e-3


class StopWatch:
    """Called, it is a context whose work is timed. Before that the device is kept busy, so that the host gets ahead.

    Args:
        fast: the device.
    """

    def __init__(self, fast: FastTier) -> None:
        self._fast, self._clock = fast, fast.clock()
        self._marks: list[tuple[object, object]] = []

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self._fast.keep_busy(_BUSY_S)
        begin = self._clock.mark()
        yield
        self._marks.append((begin, self._clock.mark()))

    def forward_and_backward(self) -> tuple[float, float]:
        """Seconds of the two contexts, for which the host waits here; zeros where there were none."""
        if len(self._marks) != 2:
            return 0.0, 0.0
        self._fast.synchronize()
        forward, backward = self._marks
        return seconds_between(*forward), seconds_between(*backward)
