"""Time on the host and on the device."""

from __future__ import annotations

import time

import torch


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
