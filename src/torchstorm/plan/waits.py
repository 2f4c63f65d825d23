"""What a plan costs beside the model's own compute: seconds of recomputing, and what each copy makes compute wait."""

from __future__ import annotations

from collections.abc import Sequence

from torchstorm.plan.forecast import DISK, KEEP, RAM, Placement, channel_speed, hops
from torchstorm.plan.machine import Machine
from torchstorm.plan.recompute import RECOMPUTE, replays
from torchstorm.plan.trace import PACK, UNPACK, Trace


def recompute_seconds(trace: Trace, placements: Sequence[Placement]) -> list[float]:
    """For every parcel, seconds of operations that run again because it is needed; shared among those made at once."""
    seconds = [0.0] * len(trace.parcels)
    for replay in (replays(trace, placements) or {}).values():
        for number in replay.made:
            seconds[number] += replay.seconds / len(replay.made)
    return seconds


def waiting_seconds(trace: Trace, placements: Sequence[Placement], machine: Machine) -> list[float]:
    """For every parcel, seconds that compute waits for its copies: at its drop until it has left, and when it is needed
    until it is back.

    The clock is the forecast's: compute from the trace, one channel out and one back, first come first served.
    """
    waits = [0.0] * len(trace.parcels)
    again = replays(trace, placements) or {}
    drops: dict[int, list[int]] = {}
    fetches: dict[int, list[int]] = {}
    seals: dict[int, list[int]] = {}
    needs: dict[int, list[int]] = {}
    for number, (parcel, placement) in enumerate(zip(trace.parcels, placements, strict=True)):
        if placement.tier not in (KEEP, RECOMPUTE):
            seals.setdefault(parcel.sealed, []).append(number)
            drops.setdefault(placement.drop, []).append(number)
            fetches.setdefault(placement.fetch, []).append(number)
            needs.setdefault(parcel.needed, []).append(number)
    clock = 0.0
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
        waits[number] += max(0.0, until - clock)
        clock = max(clock, until)

    def fetch(number: int) -> float:
        if number not in back:
            back[number] = move(number, "back", max(clock, left[number]))
        return back[number]

    for index, moment in enumerate(trace.moments):
        for number in drops.get(index, ()):
            wait(number, left[number])
        if moment.kind == PACK:
            for number in seals.get(index, ()):
                left[number] = move(number, "out", clock)
        if index in again:
            for number in again[index].sources:
                if placements[number].tier in (RAM, DISK) and placements[number].drop <= index:
                    wait(number, fetch(number))
            clock += again[index].seconds
        if moment.kind == UNPACK:
            for number in needs.get(index, ()):
                wait(number, fetch(number))
        for number in sorted(fetches.get(index, ()), key=lambda number: (trace.parcels[number].needed, number)):
            fetch(number)
        clock += moment.compute_s
    return waits
