"""GPU utilization in one step, from the intervals of kernels and copies that CUPTI reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Busy:
    """The result of one profiled step.

    Attributes:
        gpu_busy: union of the kernels' intervals (without copies and memsets), relative to wall time.
        overlap: share of the union of the intervals of host-device copies during which a kernel runs; None without
            copies.
    """

    gpu_busy: float | None = None
    overlap: float | None = None


def profile_step(step: Callable[[], float]) -> Busy:  # pragma: gpu
    """Profiles one step.

    Args:
        step: runs the step, waits for the device, and returns the duration in seconds.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as run:
        seconds = step()
    kernels: list[Interval] = []
    copies: list[Interval] = []
    for event in run.events() or []:
        if event.device_type != torch._C._autograd.DeviceType.CUDA or getattr(event, "is_user_annotation", False):
            continue
        interval = (event.time_range.start, event.time_range.end)
        if "HtoD" in event.name or "DtoH" in event.name:
            copies.append(interval)
        elif not event.name.startswith(("Memcpy", "Memset", "Optimizer.", "ProfilerStep", "## ")):
            kernels.append(interval)
    return Busy(gpu_busy=length(kernels) / 1e6 / seconds, overlap=overlap(copies, kernels))


def overlap(first: Sequence[Interval], second: Sequence[Interval]) -> float | None:
    """Share of the union of `first` that overlaps with `second`; None if `first` is empty."""
    ones, others = union(first), union(second)
    total = sum(stop - start for start, stop in ones)
    if total == 0:
        return None
    shared, index = 0.0, 0
    for start, stop in ones:
        while index < len(others) and others[index][1] <= start:
            index += 1
        at = index
        while at < len(others) and others[at][0] < stop:
            shared += min(stop, others[at][1]) - max(start, others[at][0])
            at += 1
    return shared / total


def length(intervals: Sequence[Interval]) -> float:
    """Total length of the union, in the intervals' unit."""
    return sum(stop - start for start, stop in union(intervals))


def union(intervals: Sequence[Interval]) -> list[Interval]:
    """The union as sorted, disjoint intervals."""
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged
