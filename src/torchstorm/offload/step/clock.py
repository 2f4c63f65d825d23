"""Time on the host and on the device."""

from __future__ import annotations

import time
from typing import NamedTuple, Protocol

import torch


class Clock(Protocol):
    """Marks times of a device."""

    def mark(self) -> object:
        """A point in time."""


class CpuClock:
    """Seconds of the host."""

    def mark(self) -> float:
        """A point in time."""
        return time.perf_counter()


def seconds_between(first: object, second: object) -> float:
    """Seconds from one mark to another of the same clock; on CUDA both must have been reached."""
    if isinstance(first, torch.cuda.Event) and isinstance(second, torch.cuda.Event):  # pragma: gpu
        return float(first.elapsed_time(second)) / 1e3
    assert isinstance(first, float)
    assert isinstance(second, float)
    return second - first


def is_reached(mark: object) -> bool:
    """Whether the device has come to a mark."""
    return not isinstance(mark, torch.cuda.Event) or bool(mark.query())


class Took(NamedTuple):
    """What a step took.

    Attributes:
        step_s: seconds, all of it.
        forward_s: until its backward began; 0.0 where that was not noted, as in a step that is measured.
        host_s: of the host, until it had asked for all of that.
        waited_s: of the device, in that time, for copies; None where that was not noted.
    """

    step_s: float
    forward_s: float = 0.0
    host_s: float = 0.0
    waited_s: float | None = None

    def scaled(self, times: float) -> Took:
        """What a step of so many times the work takes the device; the host it takes as long."""
        waited_s = self.waited_s * times if self.waited_s is not None else None
        return Took(self.step_s * times, self.forward_s * times, self.host_s, waited_s)


class Span:
    """Marks of a step: where it begins, where its backward does, and where it ends.

    Args:
        clock: of the device.

    Attributes:
        start: its entry.
        began_s: the host's clock then.
        waits: marks before and after the device may have had to wait for a copy; None where nobody takes them.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.start = clock.mark()
        self.began_s = time.perf_counter()
        self.waits: list[tuple[object, object]] | None = None
        self._num_waits = 0  # in forward
        self._told: Took | None = None
        self._turn: object = None
        self._host_s = 0.0
        self._stop: object = None

    def note_waits(self) -> list[tuple[object, object]]:
        """From now on the waits of the step are noted: where they are to be put."""
        self.waits = []
        return self.waits

    def turned(self) -> None:
        """Backward begins."""
        self._turn, self._host_s = self._clock.mark(), time.perf_counter() - self.began_s
        self._num_waits = len(self.waits or ())

    def end(self) -> None:
        """The step is over."""
        self._stop = self._clock.mark()

    @property
    def is_reached(self) -> bool:
        """Whether the device has come to its end."""
        return is_reached(self._stop)

    def took(self) -> Took:
        """What it took; of a device that has come to its end."""
        if self._told is None:
            self._told = self._read()
            self.waits = None
        return self._told

    def _read(self) -> Took:
        step_s = seconds_between(self.start, self._stop)
        if self._turn is None:
            return Took(step_s)
        waited_s = None
        if self.waits is not None:
            waits = [two for two in self.waits[: self._num_waits] if is_reached(two[1])]  # others' streams wait, too
            waited_s = sum((seconds_between(before, after) for before, after in waits), 0.0)
        return Took(step_s, seconds_between(self.start, self._turn), self._host_s, waited_s)
