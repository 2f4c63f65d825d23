"""The time that something takes, of many runs of it."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from torchstorm.bench.measure import synchronize
from torchstorm.offload.clock import CpuClock, seconds_between
from torchstorm.transfer.engine import StreamClock

_SECONDS_A_TIME = 0.2  # how long a time is taken for
_SECONDS_ONCE = 2.0  # what takes longer is run once
_FEWEST, _MOST = 3, 30  # runs; fewer where one takes longer than that

T = TypeVar("T")


def median_ms(run: Callable[[T], object], sets: Sequence[T], device: torch.device) -> float:
    """Milliseconds on the device, the median of several runs; what ran before has warmed up.

    Args:
        run: what is timed.
        sets: what it is given, in turn: enough of them that none is still in the cache when its turn comes.
        device: where it runs.
    """
    clock = StreamClock(device) if device.type == "cuda" else CpuClock()
    turns = itertools.cycle(sets)

    def once() -> tuple[object, object]:
        inputs = next(turns)
        start = clock.mark()
        run(inputs)
        return start, clock.mark()

    first = once()
    synchronize(device)
    seconds = seconds_between(*first)
    repeats = max(_FEWEST, min(_MOST, int(_SECONDS_A_TIME / max(seconds, 1e-9))))
    if seconds > _SECONDS_ONCE:
        return seconds * 1e3
    # The first of slow runs counts, too: what it lost on the way is little beside it.
    marks = [first, once()] if seconds > _SECONDS_A_TIME else [once() for _ in range(repeats)]
    synchronize(device)
    return statistics.median(seconds_between(*pair) for pair in marks) * 1e3
