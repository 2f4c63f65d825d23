"""Measures a step while it runs: from hook calls to a `Trace`."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torchstorm.plan.trace import ENTER, Moment, SavedStorage, Trace, make_parcels
from torchstorm.transfer.engine import StreamClock


@dataclass(eq=False, kw_only=True)
class StorageRecord:
    """What is being learnt of one saved storage; `None` where it has not happened yet."""

    nbytes: int
    made: int
    block: str
    parcel: int = -1
    owned: int | None = None
    needed: int | None = None
    freed: int | None = None
    watch: StorageWeakRef | None = None
    own_references: int = 0


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


class Recorder:
    """Collects one step.

    The hooks call `arrive` when they are entered and `leave` when they return, so that the time and the memory between
    a `leave` and the next `arrive` are the user's own.

    Args:
        device: the fast device.
        start: the clock's mark at the step's entry.
        base_bytes: as in `Trace`.
        staging_bytes: as in `Trace`.
    """

    def __init__(self, device: torch.device, start: object, *, base_bytes: int, staging_bytes: int) -> None:
        self.clock = StreamClock(device) if device.type == "cuda" else CpuClock()
        self.storages: list[StorageRecord] = []
        self.parcel_bytes: list[int] = []
        self._device = device
        self._base_bytes = base_bytes
        self._staging_bytes = staging_bytes
        self._signatures: list[tuple[str, int, int]] = [(ENTER, -1, 0)]
        self._marks: list[tuple[object, object]] = []
        self._left = start
        self._peaks: list[int] = []
        # What the Session held alone in the interval that is running: it is not "other".
        self._held_bytes = 0
        self.peak_bytes = 0
        self.excess_bytes = 0
        self._start_bytes = 0

    @property
    def moment(self) -> int:
        """Number of the latest moment."""
        return len(self._signatures) - 1

    def arrive(self) -> None:
        """The interval ends here: a hook was entered, or the step is over."""
        self._marks.append((self._left, self.clock.mark()))
        peak = 0
        if self._device.type == "cuda":  # pragma: gpu
            peak = torch.cuda.max_memory_allocated(self._device)
            self.peak_bytes = max(self.peak_bytes, peak)
            self.excess_bytes = max(self.excess_bytes, peak - self._start_bytes)
            peak -= self._held_bytes
        self._peaks.append(peak)

    def name(self, kind: str, storage: int, nbytes: int) -> None:
        """Says what the moment that has just arrived is."""
        self._signatures.append((kind, storage, nbytes))

    def leave(self, held_bytes: int) -> None:
        """The next interval begins; `held_bytes` are on the fast device because of the Session alone."""
        if self._device.type == "cuda":  # pragma: gpu
            torch.cuda.reset_peak_memory_stats(self._device)
            self._start_bytes = torch.cuda.memory_allocated(self._device)
        self._held_bytes = held_bytes
        self._left = self.clock.mark()

    def trace(self) -> Trace:
        """The finished step as a value. On CUDA the host waits for the device here."""
        num_moments = len(self._signatures)
        storages = tuple(
            SavedStorage(
                nbytes=record.nbytes,
                made=record.made,
                owned=record.made if record.owned is None else record.owned,
                needed=num_moments if record.needed is None else record.needed,
                freed=num_moments if record.freed is None else record.freed,
                parcel=record.parcel,
                block=record.block,
            )
            for record in self.storages
        )
        return Trace(
            device=self._device.type,
            moments=self._moments(),
            storages=storages,
            parcels=make_parcels(storages, self.parcel_bytes),
            base_bytes=self._base_bytes,
            staging_bytes=self._staging_bytes,
        )

    def refine(self, trace: Trace) -> Trace:
        """The same step with this run's times and memory: the first step's times hold warm-up too."""
        moments = self._moments()
        if len(moments) != trace.num_moments:
            return trace
        pairs = zip(trace.moments, moments, strict=True)
        return replace(
            trace,
            base_bytes=self._base_bytes,
            moments=tuple(replace(new, storage=old.storage, nbytes=old.nbytes) for old, new in pairs),
        )

    def _moments(self) -> tuple[Moment, ...]:
        if self._device.type == "cuda":  # pragma: gpu
            torch.cuda.synchronize(self._device)
        return tuple(
            Moment(
                kind=kind,
                storage=storage,
                nbytes=nbytes,
                compute_s=max(0.0, seconds_between(*marks)),
                other_bytes=max(0, peak),
            )
            for (kind, storage, nbytes), marks, peak in zip(self._signatures, self._marks, self._peaks, strict=True)
        )
