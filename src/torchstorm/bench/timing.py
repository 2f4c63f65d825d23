"""What things take, measured side by side: each in short bursts, in turn with the others, of which the median counts.

In turn, and in another order every round, because a device's clock follows its power and its heat: of two equal
products the one that comes after something light is up to an eighth faster. On CUDA the device is kept waiting while
the host asks for a burst, so that the times are the device's own however slow the host is; what the host takes is told
beside them.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from torchstorm.bench.measure import clean, synchronize
from torchstorm.errors import TorchstormError
from torchstorm.offload.step.clock import CpuClock, seconds_between
from torchstorm.transfer.engine import StreamClock, keep_busy

_SECONDS_A_TIME = 0.2  # how long a time is taken for, in all its bursts
_SECONDS_LONG = 0.4  # what takes longer is run in as few rounds as tell a spread
_ROUNDS, _FEW_ROUNDS = 7, 5  # bursts of each
_MOST = 20  # runs of a burst

K = TypeVar("K")
T = TypeVar("T")
Run = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Took:
    """What a run takes.

    Attributes:
        ms: median milliseconds, of the device.
        fastest_ms, slowest_ms: of the same runs, at least five.
        host_ms: median milliseconds of the host until it has asked for all of it; None on a CPU, where it is `ms`.
        extra_bytes: most device memory in use, beside what was before its preparation; None on a CPU.
    """

    ms: float
    fastest_ms: float
    slowest_ms: float
    host_ms: float | None
    extra_bytes: int | None


@dataclass(frozen=True)
class _First:
    """What the first runs showed."""

    seconds: float
    host_s: float
    extra_bytes: int | None


def take_in_turn(
    prepare: Mapping[K, Callable[[], Run]], device: torch.device
) -> dict[K, Took | TorchstormError | RuntimeError]:
    """What each takes, or why it cannot run.

    Args:
        prepare: each returns what is run, again and again; called before every burst, and not timed.
        device: where they run.
    """
    found: dict[K, Took | TorchstormError | RuntimeError] = {}
    firsts: dict[K, _First] = {}
    for key, each in prepare.items():
        try:
            firsts[key] = _first(each, device)
        except (TorchstormError, RuntimeError) as failed:
            found[key] = failed
            clean(device)
    device_s: dict[K, list[float]] = {key: [] for key in firsts}
    host_s: dict[K, list[float]] = {key: [] for key in firsts}
    order = list(firsts)
    shuffle = random.Random(0).shuffle
    for turn in range(_ROUNDS):
        if turn == _FEW_ROUNDS:
            order = [key for key in order if firsts[key].seconds <= _SECONDS_LONG]
        shuffle(order)
        for key in order:
            taken, asked = _burst(prepare[key](), firsts[key], device)
            device_s[key] += taken
            host_s[key].append(asked)
    for key, first in firsts.items():
        on_gpu = device.type == "cuda"
        found[key] = Took(
            ms=statistics.median(device_s[key]) * 1e3,
            fastest_ms=min(device_s[key]) * 1e3,
            slowest_ms=max(device_s[key]) * 1e3,
            host_ms=statistics.median(host_s[key]) * 1e3 if on_gpu else None,
            extra_bytes=first.extra_bytes,
        )
    return found


def median_ms(run: Callable[[T], object], sets: Sequence[T], device: torch.device) -> float:
    """Milliseconds on the device of something that stands alone; see `take_alone`."""
    return take_alone(run, sets, device).ms


def take_alone(run: Callable[[T], object], sets: Sequence[T], device: torch.device) -> Took:
    """What something takes that stands alone.

    Args:
        run: what is timed.
        sets: what it is given, in turn: enough of them that none is still in the cache when its turn comes.
        device: where it runs.

    Raises:
        TorchstormError, RuntimeError: what it raised.
    """
    took = take_in_turn({"": lambda: over(run, sets)}, device)[""]
    if not isinstance(took, Took):
        raise took
    return took


def over(run: Callable[[T], object], sets: Sequence[T]) -> Run:
    """What gives `run` one set after another, from the first again after the last."""
    turns = itertools.cycle(sets)
    return lambda: run(next(turns))


def _first(prepare: Callable[[], Run], device: torch.device) -> _First:
    """Runs it twice: the first run compiles, allocates and fills caches."""
    on_gpu = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    run = prepare()
    run()
    synchronize(device)
    if on_gpu:  # pragma: gpu
        torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    run()
    host_s = time.perf_counter() - start
    synchronize(device)
    seconds = time.perf_counter() - start
    return _First(seconds, host_s, torch.cuda.max_memory_allocated(device) - before if on_gpu else None)


def _burst(run: Run, first: _First, device: torch.device) -> tuple[list[float], float]:
    """The seconds of each run, and those of the host for one."""
    clock = StreamClock(device) if device.type == "cuda" else CpuClock()
    count = max(1, min(_MOST, math.ceil(_SECONDS_A_TIME / _ROUNDS / max(first.seconds, 1e-9))))
    synchronize(device)
    if device.type == "cuda":  # pragma: gpu
        keep_busy(device, 1.5 * count * first.host_s)
    marks = []
    begun = time.perf_counter()
    for _ in range(count):
        start = clock.mark()
        run()
        marks.append((start, clock.mark()))
    asked = (time.perf_counter() - begun) / count
    synchronize(device)
    return [seconds_between(*pair) for pair in marks], asked
