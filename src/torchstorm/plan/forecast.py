"""Simulates a step with a plan: bytes on every tier at every moment, and the step time.

Bytes are exact, because they follow from the order of moments alone: a parcel's memory on the fast tier is freed at its
`drop` moment (compute waits there for the copy) and allocated again at its `fetch` moment. Time is an estimate: compute
times from the trace, and one channel per tier and direction, which runs copies in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchstorm.plan.machine import Machine
from torchstorm.plan.recompute import RECOMPUTE, Replay, replays
from torchstorm.plan.trace import PACK, UNPACK, HostCost, Trace

KEEP, RAM, DISK = "keep", "ram", "disk"
SLOT_BYTES = 4096  # slower tiers allocate whole pages
# Of the host's work in following a plan, what counts though the host has the time for it: it is less ahead then.
_NEVER_FREE = 0.1

Profile = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """What happens to one parcel.

    Attributes:
        tier: "keep", "recompute", "ram" or "disk".
        drop: moment when its memory on the fast tier is freed, after waiting for the copy out. A recomputed parcel has
            no memory before `fetch`.
        fetch: moment when its memory is allocated again and its copy back starts, or when it is recomputed. At the
            latest the moment when it is needed.
    """

    tier: str
    drop: int = 0
    fetch: int = 0


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Time and memory of a step, forecast or measured.

    Attributes:
        step_ms: milliseconds of one step.
        vram_bytes: peak of allocated device memory; 0 on CPU.
        ram_bytes: peak of pinned arena and staging on CUDA; of saved storages and staging on CPU.
        disk_bytes: peak bytes in spill files.
    """

    step_ms: float
    vram_bytes: int
    ram_bytes: int
    disk_bytes: int


def fast_profile(trace: Trace, placements: Sequence[Placement]) -> Profile:
    """All bytes on the fast tier in every interval: those of the Session, all others, and temporaries of recomputation
    at the moment before the interval.

    Returns:
        (num_moments,) int64.
    """
    other = other_profile(trace)
    if trace.device == "cuda":
        for moment, replay in (replays(trace, placements) or {}).items():
            still = trace.moments[moment].still_bytes + trace.staging_bytes
            other[moment] = max(other[moment], still + replay.transient_bytes)
    return held_profile(trace, placements) + other


def held_profile(trace: Trace, placements: Sequence[Placement]) -> Profile:
    """Bytes on the fast tier that the Session holds, in every interval: (num_moments,) int64."""
    edges = _kept_edges(trace, placements)
    for parcel, placement in zip(trace.parcels, placements, strict=True):
        if placement.tier == RECOMPUTE:
            _add(edges, placement.fetch, parcel.freed, parcel.nbytes)
        elif placement.tier != KEEP:
            _add(edges, parcel.owned, placement.drop, parcel.nbytes)
            _add(edges, placement.fetch, parcel.freed, parcel.nbytes)
    return np.cumsum(edges)[:-2]


def held_before_profile(trace: Trace, placements: Sequence[Placement]) -> Profile:
    """As `held_profile`, at every moment before its drops, fetches and recomputations: (num_moments,) int64."""
    edges = _kept_edges(trace, placements)
    for parcel, placement in zip(trace.parcels, placements, strict=True):
        if placement.tier != KEEP:
            _add(edges, placement.fetch + 1, parcel.freed, parcel.nbytes)
        if placement.tier not in (KEEP, RECOMPUTE):
            _add(edges, parcel.owned, min(placement.drop + 1, parcel.freed), parcel.nbytes)
    return np.cumsum(edges)[:-2]


def _kept_edges(trace: Trace, placements: Sequence[Placement]) -> Profile:
    """Changes of the bytes that stay on the fast tier: (num_moments + 2,); the cumulative sum gives the bytes."""
    edges = np.zeros(trace.num_moments + 2, dtype=np.int64)
    for storage in trace.storages:
        if storage.parcel < 0 or placements[storage.parcel].tier == KEEP:
            _add(edges, storage.owned, storage.freed, storage.nbytes)
    return edges


def other_profile(trace: Trace) -> Profile:
    """Bytes on the fast tier that do not depend on placements, in every interval: (num_moments,) int64."""
    return np.array([moment.other_bytes for moment in trace.moments], dtype=np.int64) + trace.staging_bytes


def tier_peak(trace: Trace, placements: Sequence[Placement], tier: str) -> int:
    """Peak bytes of the step on a slower tier."""
    edges = np.zeros(trace.num_moments + 1, dtype=np.int64)
    for parcel, placement in zip(trace.parcels, placements, strict=True):
        if placement.tier == tier:
            _add(edges, parcel.sealed, parcel.freed, -(-parcel.nbytes // SLOT_BYTES) * SLOT_BYTES)
    return int(np.cumsum(edges).max())


def forecast_s(
    trace: Trace, placements: Sequence[Placement], machine: Machine, *, waits: list[float] | None = None
) -> float:
    """Step time in seconds: compute, waiting for copies, and what the host's own work adds.

    Args:
        trace, placements, machine: as in `solve`; one placement per parcel.
        waits: seconds per parcel; the time that compute waits for its copies is added.
    """
    drops: dict[int, list[int]] = {}
    fetches: dict[int, list[int]] = {}
    seals: dict[int, list[int]] = {}
    needs: dict[int, list[int]] = {}
    again = replays(trace, placements) or {}
    for number, (parcel, placement) in enumerate(zip(trace.parcels, placements, strict=True)):
        if placement.tier not in (KEEP, RECOMPUTE):
            seals.setdefault(parcel.sealed, []).append(number)
            drops.setdefault(placement.drop, []).append(number)
            if placement.fetch < trace.num_moments:
                fetches.setdefault(placement.fetch, []).append(number)
            if parcel.needed < trace.num_moments:
                needs.setdefault(parcel.needed, []).append(number)
    clock = 0.0
    # (tier, direction) -> time when it is next idle. On CUDA, a parcel for the disk uses the link first.
    idle: dict[tuple[str, str], float] = {}
    left: dict[int, float] = {}
    back: dict[int, float] = {}

    def move(number: int, direction: str, start: float) -> float:
        legs = hops(trace.device, placements[number].tier)
        for leg in legs if direction == "out" else reversed(legs):
            start = max(start, idle.get((leg, direction), 0.0))
            start += trace.parcels[number].nbytes / channel_speed(machine, leg, direction)
            idle[(leg, direction)] = start
        return start

    def wait(number: int, until: float) -> None:
        nonlocal clock
        if waits is not None:
            waits[number] += max(0.0, until - clock)
        clock = max(clock, until)

    def arrive(number: int) -> None:
        """Waits for a parcel. If its fetch has not started, it starts before all others."""
        if number not in back:
            back[number] = move(number, "back", max(clock, left[number]))
        wait(number, back[number])

    for index, moment in enumerate(trace.moments):
        for number in drops.get(index, ()):
            wait(number, left[number])
        if moment.kind == PACK:
            for number in seals.get(index, ()):
                left[number] = move(number, "out", clock)
        if index in again:
            for number in again[index].sources:
                if placements[number].tier in (RAM, DISK) and placements[number].drop <= index:
                    arrive(number)
            clock += again[index].compute_s
        if moment.kind == UNPACK:
            for number in needs.get(index, ()):
                arrive(number)
        for number in sorted(fetches.get(index, ()), key=lambda number: (trace.parcels[number].needed, number)):
            if number not in back:
                back[number] = move(number, "back", max(clock, left[number]))
        clock += moment.compute_s
    moved = [one for one, to in zip(trace.parcels, placements, strict=True) if to.tier in (RAM, DISK)]
    num_moved, moved_bytes = sum(one.num_storages for one in moved), sum(one.nbytes for one in moved)
    return clock + host_s(trace, machine, again.values(), num_moved=num_moved, moved_bytes=moved_bytes)


def host_s(trace: Trace, machine: Machine, again: Iterable[Replay], *, num_moved: int, moved_bytes: float) -> float:
    """Seconds that a step takes longer because following a plan is work for the host.

    Args:
        trace, machine: as in `solve`.
        again: what is computed again.
        num_moved, moved_bytes: of the storages that move.
    """
    if trace.device == "cpu":
        return moved_bytes * machine.disk_delay_s_per_byte
    following_s = own_s(trace.host, again, num_moved=num_moved)
    return max(_NEVER_FREE * following_s, following_s - trace.host.idle_s)


def own_s(host: HostCost, again: Iterable[Replay], *, num_moved: int) -> float:
    """Seconds that following a plan takes the host of a GPU, whether the device notices or not.

    Args:
        host: what it takes for each.
        again: what is computed again, of which the operations are recorded.
        num_moved: storages that move.
    """
    return num_moved * host.move_s + host.record_s * sum(len(replay.ops) for replay in again)


def hops(device: str, tier: str) -> tuple[str, ...]:
    """The channels of a parcel's copy out, in order."""
    if device == "cpu":
        return (DISK,)
    return (RAM,) if tier == RAM else (RAM, DISK)


def channel_speed(machine: Machine, channel: str, direction: str) -> float:
    """Bytes per second of a channel in one direction ("out" or "back")."""
    if channel == RAM:
        return machine.d2h_bytes_per_s if direction == "out" else machine.h2d_bytes_per_s
    return machine.disk_write_bytes_per_s if direction == "out" else machine.disk_read_bytes_per_s


def _add(edges: Profile, start: int, stop: int, nbytes: int) -> None:
    if start < stop:
        edges[start] += nbytes
        edges[stop] -= nbytes
