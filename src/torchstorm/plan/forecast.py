"""Plays a plan forward: bytes on every tier at every moment, and how long the step takes.

Bytes are exact, because they follow from the order of moments alone: a parcel leaves the fast tier at its `drop`
moment, whatever the clock says (the compute waits for the copy there), and takes room again from its `fetch` moment.
Time is an estimate: compute from the trace, one channel out and one back, first come first served.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchstorm.plan.machine import Machine
from torchstorm.plan.recompute import RECOMPUTE, replays
from torchstorm.plan.trace import PACK, UNPACK, Trace

KEEP, RAM, DISK = "keep", "ram", "disk"
SLOT_BYTES = 4096  # slower tiers hand out whole pages

Profile = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """What happens to one parcel.

    Attributes:
        tier: "keep", "recompute", "ram" or "disk".
        drop: moment at which its room on the fast tier is given back, after waiting for the copy out. A recomputed one
            takes none from the start.
        fetch: moment at which it takes room again and its copy back begins, or at which it is computed again; where
            it is needed at the latest.
    """

    tier: str
    drop: int = 0
    fetch: int = 0


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What a step costs, forecast or measured.

    Attributes:
        step_ms: milliseconds of one step.
        vram_bytes: peak of allocated device memory; 0 on CPU.
        ram_bytes: on CUDA pinned arena and staging; on CPU saved storages and staging, at their peak.
        disk_bytes: bytes in spill files, at their peak.
    """

    step_ms: float
    vram_bytes: int
    ram_bytes: int
    disk_bytes: int


def fast_profile(trace: Trace, placements: Sequence[Placement]) -> Profile:
    """Bytes on the fast tier in every interval: what the Session holds and what it does not, and what computing again
    takes at the moment before it.

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
    """Bytes on the fast tier that the Session alone keeps there, in every interval: (num_moments,) int64."""
    edges = _kept_edges(trace, placements)
    for parcel, placement in zip(trace.parcels, placements, strict=True):
        if placement.tier == RECOMPUTE:
            _add(edges, placement.fetch, parcel.freed, parcel.nbytes)
        elif placement.tier != KEEP:
            _add(edges, parcel.owned, placement.drop, parcel.nbytes)
            _add(edges, placement.fetch, parcel.freed, parcel.nbytes)
    return np.cumsum(edges)[:-2]


def held_before_profile(trace: Trace, placements: Sequence[Placement]) -> Profile:
    """The same at every moment, before anything leaves, comes back or is computed there: (num_moments,) int64."""
    edges = _kept_edges(trace, placements)
    for parcel, placement in zip(trace.parcels, placements, strict=True):
        if placement.tier != KEEP:
            _add(edges, placement.fetch + 1, parcel.freed, parcel.nbytes)
        if placement.tier not in (KEEP, RECOMPUTE):
            _add(edges, parcel.owned, min(placement.drop + 1, parcel.freed), parcel.nbytes)
    return np.cumsum(edges)[:-2]


def _kept_edges(trace: Trace, placements: Sequence[Placement]) -> Profile:
    """Where bytes that neither leave nor are computed again come and go: (num_moments + 2,), to be added up."""
    edges = np.zeros(trace.num_moments + 2, dtype=np.int64)
    for storage in trace.storages:
        if storage.parcel < 0 or placements[storage.parcel].tier == KEEP:
            _add(edges, storage.owned, storage.freed, storage.nbytes)
    return edges


def other_profile(trace: Trace) -> Profile:
    """Bytes of the fast tier that no placement changes, in every interval: (num_moments,) int64."""
    return np.array([moment.other_bytes for moment in trace.moments], dtype=np.int64) + trace.staging_bytes


def tier_peak(trace: Trace, placements: Sequence[Placement], tier: str) -> int:
    """Most bytes at once that a slower tier holds for the step."""
    edges = np.zeros(trace.num_moments + 1, dtype=np.int64)
    for parcel, placement in zip(trace.parcels, placements, strict=True):
        if placement.tier == tier:
            _add(edges, parcel.sealed, parcel.freed, -(-parcel.nbytes // SLOT_BYTES) * SLOT_BYTES)
    return int(np.cumsum(edges).max())


def forecast_s(
    trace: Trace, placements: Sequence[Placement], machine: Machine, *, waits: list[float] | None = None
) -> float:
    """Seconds of the step: compute, and what it waits for copies.

    Args:
        trace, placements, machine: as for `solve`; one placement per parcel.
        waits: by parcel; what compute waits for its copies is added.
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
    # (tier, direction) -> when it is next idle. A parcel bound for disk on CUDA crosses the link first.
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
        """Waits for a parcel; one that nobody has fetched yet is fetched before all others."""
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
            clock += again[index].seconds
        if moment.kind == UNPACK:
            for number in needs.get(index, ()):
                arrive(number)
        for number in sorted(fetches.get(index, ()), key=lambda number: (trace.parcels[number].needed, number)):
            if number not in back:
                back[number] = move(number, "back", max(clock, left[number]))
        clock += moment.compute_s
    return clock


def hops(device: str, tier: str) -> tuple[str, ...]:
    """The channels a parcel crosses on its way out."""
    if device == "cpu":
        return (DISK,)
    return (RAM,) if tier == RAM else (RAM, DISK)


def channel_speed(machine: Machine, channel: str, direction: str) -> float:
    """Bytes per second of one channel in one direction ("out" or "back")."""
    if channel == RAM:
        return machine.d2h_bytes_per_s if direction == "out" else machine.h2d_bytes_per_s
    return machine.disk_write_bytes_per_s if direction == "out" else machine.disk_read_bytes_per_s


def _add(edges: Profile, start: int, stop: int, nbytes: int) -> None:
    if start < stop:
        edges[start] += nbytes
        edges[stop] -= nbytes
