"""What a Session has measured of its steps."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import replace

from torchstorm.offload.report import highest_of
from torchstorm.offload.step.clock import Span, Took
from torchstorm.plan.forecast import Figures


class Measured:
    """Peaks and times: of the last step, of all, and of those that followed the plan in force."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_planned = 0  # steps that followed a plan
        self.num_in_force = 0  # of those, by the plan in force
        self.last: Figures | None = None
        self._highest: Figures | None = None
        self._planned_highest: Figures | None = None
        self._times: deque[Span] = deque(maxlen=256)
        self._unread: deque[tuple[Span, float]] = deque(maxlen=8)  # of steps that followed the plan in force
        self._unread_vram = 0  # their highest peak of device memory

    def plan_changed(self) -> None:
        """Another plan is in force: what the steps of the one before it showed does not tell of this one."""
        self.num_in_force, self._planned_highest = 0, None
        self._unread.clear()
        self._unread_vram = 0

    def count(self, figures: Figures, span: Span, *, times: float, borrowed: bool = False) -> None:
        """A step has ended.

        Args:
            figures, span: what it took.
            times: the work of a step that the plan in force is for, by this one's, which has followed it; 0 where it
                has followed another one or none, or tells nothing of it.
            borrowed: whether it has followed a plan, and tells nothing of it.
        """
        self.num_steps += 1
        self.last = figures
        self._highest = highest_of(self._highest, figures)
        if times:
            if self.num_in_force == 0:
                self._times.clear()  # until a step follows the plan, the earlier ones' times are all there is
            self.num_planned += 1
            self.num_in_force += 1
            self._planned_highest = highest_of(self._planned_highest, figures)
            self._unread.append((span, times))
            self._unread_vram = max(self._unread_vram, figures.vram_bytes)
        self.num_planned += borrowed
        self._times.append(span)

    def note_vram(self, nbytes: int) -> None:
        """So much device memory was allocated at most, in the last step or since."""
        if self._highest is not None:
            self._highest = replace(self._highest, vram_bytes=max(self._highest.vram_bytes, nbytes))

    def new_times(self) -> list[Took]:
        """What steps took that followed the plan in force, each told once; of the device those that it has done. A step
        that was a little smaller tells what it would have taken."""
        found = []
        while self._unread and self._unread[0][0].is_reached:
            span, times = self._unread.popleft()
            found.append(span.took().scaled(times))
        return found

    def new_vram_bytes(self) -> int:
        """The highest peak of device memory of steps that followed the plan in force, told once; 0 for none."""
        found, self._unread_vram = self._unread_vram, 0
        return found

    @property
    def highest_vram_bytes(self) -> int:
        """The highest peak of device memory so far."""
        return self._highest.vram_bytes if self._highest is not None else 0

    def planned_or_all(self) -> tuple[Figures | None, Figures | None]:
        """Over the steps that followed the plan in force, or else over all: peaks and the median time; and the highest
        bytes and the slowest of the steps known. None before the first step has ended."""
        if self._highest is None:
            return None, None
        times_ms = [span.took().step_s * 1e3 for span in self._times]
        measured = replace(self._planned_highest or self._highest, step_ms=statistics.median(times_ms))
        return measured, replace(self._highest, step_ms=max([*times_ms, self._highest.step_ms]))
