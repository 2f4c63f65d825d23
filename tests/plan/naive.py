"""What a plan comes to, worked out moment by moment with nothing shared with the planner."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torchstorm.plan.forecast import Placement
from torchstorm.plan.machine import Machine
from torchstorm.plan.trace import Trace


def fast_bytes(trace: Trace, placements: Sequence[Placement]) -> list[int]:
    """Bytes on the fast tier in each interval."""
    found = []
    for now, moment in enumerate(trace.moments):
        held = moment.other_bytes + trace.staging_bytes
        for storage in trace.storages:
            stays = storage.parcel < 0 or placements[storage.parcel].tier == "keep"
            if stays and storage.owned <= now < storage.freed:
                held += storage.nbytes
        for parcel, placement in zip(trace.parcels, placements, strict=True):
            if placement.tier != "keep":
                before = parcel.owned <= now < placement.drop
                after = placement.fetch <= now < parcel.freed
                assert not (before and after), "it takes room once, at most"
                held += parcel.nbytes * (before or after)
        found.append(held)
    return found


def slow_bytes(trace: Trace, placements: Sequence[Placement], tier: str) -> list[int]:
    """Bytes on "ram" or "disk" in each interval: whole pages."""
    pairs = list(zip(trace.parcels, placements, strict=True))
    return [
        sum(
            math.ceil(parcel.nbytes / 4096) * 4096
            for parcel, place in pairs
            if place.tier == tier and parcel.sealed <= now < parcel.freed
        )
        for now in range(trace.num_moments)
    ]


def away(trace: Trace, tier: str) -> list[Placement]:
    """Everything moved, for as long as possible."""
    return [Placement(tier=tier, drop=parcel.sealed + 1, fetch=parcel.needed) for parcel in trace.parcels]


def keep(trace: Trace) -> list[Placement]:
    """Nothing moved."""
    return [Placement(tier="keep") for _ in trace.parcels]


def all_away_bytes(trace: Trace) -> int:
    """The peak on the fast tier with everything moved."""
    return max(fast_bytes(trace, away(trace, "disk")))


def all_kept_bytes(trace: Trace) -> int:
    """The peak on the fast tier with nothing moved."""
    return max(fast_bytes(trace, keep(trace)))


class _Channel:
    """Serves one copy after the other."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.idle_s = 0.0

    def serve(self, nbytes: int, ready_s: float) -> float:
        self.idle_s = max(ready_s, self.idle_s) + nbytes / self.bytes_per_s
        return self.idle_s


def step_s(trace: Trace, placements: Sequence[Placement], machine: Machine) -> float:
    """Seconds of the step. A parcel for the disk of a GPU's host crosses the link first, and last on its way back."""
    out = {"ram": _Channel(machine.d2h_bytes_per_s or 1), "disk": _Channel(machine.disk_write_bytes_per_s or 1)}
    back = {"ram": _Channel(machine.h2d_bytes_per_s or 1), "disk": _Channel(machine.disk_read_bytes_per_s or 1)}
    left: dict[int, float] = {}
    arrived: dict[int, float] = {}
    now_s = 0.0
    for now, moment in enumerate(trace.moments):
        moved = [
            (number, parcel, place)
            for number, (parcel, place) in enumerate(zip(trace.parcels, placements, strict=True))
            if place.tier != "keep"
        ]
        for number, _, place in moved:
            if place.drop == now:
                now_s = max(now_s, left[number])
        for number, parcel, place in moved:
            if parcel.sealed == now:
                ready_s = now_s
                if trace.device == "cuda":
                    ready_s = out["ram"].serve(parcel.nbytes, ready_s)
                if place.tier == "disk":
                    ready_s = out["disk"].serve(parcel.nbytes, ready_s)
                left[number] = ready_s
        for number, parcel, place in moved:
            if place.fetch == now:
                ready_s = max(now_s, left[number])
                if place.tier == "disk":
                    ready_s = back["disk"].serve(parcel.nbytes, ready_s)
                if trace.device == "cuda":
                    ready_s = back["ram"].serve(parcel.nbytes, ready_s)
                arrived[number] = ready_s
        for number, parcel, _ in moved:
            if parcel.needed == now:
                now_s = max(now_s, arrived[number])
        now_s += moment.compute_s
    return now_s
