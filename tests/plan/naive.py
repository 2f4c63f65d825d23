"""What a plan comes to, worked out moment by moment with nothing shared with the planner."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchstorm.plan.forecast import Placement
from torchstorm.plan.machine import Machine
from torchstorm.plan.trace import Trace


@dataclass
class Again:
    """What is computed at one moment: by hand, one value after the other."""

    ops: list[int]
    made: set[int]
    sources: set[int]
    transient_bytes: int
    seconds: float


class Impossible(Exception):
    """Something that is to be computed again cannot be."""


def computed_again(trace: Trace, placements: Sequence[Placement]) -> dict[int, Again]:
    """Plays recomputation as a Session does it.

    Raises:
        Impossible: something cannot be computed from what is there.
    """
    lost = {number for number, place in enumerate(placements) if place.tier == "recompute"}
    storage_of = {storage.parcel: storage for storage in trace.storages if storage.parcel in lost}
    if any(trace.parcels[number].num_storages > 1 for number in lost):
        raise Impossible
    found: dict[int, Again] = {}
    for now in range(trace.num_moments):
        for target in [number for number in lost if trace.parcels[number].needed == now]:
            again = Again([], set(), set(), 0, 0.0)
            local: set[int] = set()
            lives: list[tuple[int, int, bool, bool]] = []  # value, made by, whether it stays, whether it is in use

            def has(value: int, again: Again = again, local: set[int] = local, now: int = now) -> bool:
                number = trace.values[value].storage
                storage = trace.storages[number] if number >= 0 else None
                if value in local or storage is None or not storage.made <= now < storage.freed:
                    return value in local
                if storage.parcel not in lost:
                    before = storage.parcel >= 0 and placements[storage.parcel].tier != "recompute"
                    again.sources |= {storage.parcel} if before else set()
                    local.add(value)
                return value in local

            def get(
                value: int,
                again: Again = again,
                local: set[int] = local,
                now: int = now,
                lives: list[tuple[int, int, bool, bool]] = lives,
            ) -> None:
                if has(value):
                    return
                if trace.values[value].op < 0:
                    raise Impossible
                op = trace.ops[trace.values[value].op]
                # Everything is looked for, and so fetched, before anything is computed.
                for other in [other for other in op.inputs if not has(other)]:
                    get(other)
                again.ops.append(trace.values[value].op)
                again.seconds += op.compute_s
                for output in op.outputs:
                    in_use = output not in local
                    local.add(output)
                    where = trace.values[output].storage
                    saved = trace.storages[where] if where >= 0 else None
                    if saved is not None and saved.parcel in lost and saved.made <= now < saved.freed:
                        lost.discard(saved.parcel)
                        again.made.add(saved.parcel)
                        lives.append((output, len(again.ops) - 1, True, True))
                    else:
                        lives.append((output, len(again.ops) - 1, False, in_use))

            if storage_of[target].value < 0 or trace.values[storage_of[target].value].op < 0:
                raise Impossible
            get(storage_of[target].value)
            for place, number in enumerate(again.ops):
                # While this one runs: what stays, what it makes, and what it or a later one reads.
                later = {value for other in again.ops[place:] for value in trace.ops[other].inputs}
                there = sum(
                    trace.values[value].nbytes
                    for value, by, stays, in_use in lives
                    if by <= place and (stays or by == place or (in_use and value in later))
                )
                kept = sum(trace.values[value].nbytes for value, _, stays, _ in lives if stays)
                peak = there + trace.ops[number].scratch_bytes - kept
                again.transient_bytes = max(again.transient_bytes, peak)
            found[now] = again
    for number in lost:
        value = storage_of[number].value
        if value < 0 or trace.values[value].op < 0:
            raise Impossible
        if storage_of[number].freed == trace.num_moments and not _later(trace, lost, value):
            raise Impossible
    return found


def _later(trace: Trace, lost: set[int], value: int) -> bool:
    """Whether a value can be computed once the step is over, from what autograd still holds."""
    number = trace.values[value].storage
    storage = trace.storages[number] if number >= 0 else None
    if storage is not None and storage.freed == trace.num_moments and storage.parcel not in lost:
        return True
    op = trace.values[value].op
    return op >= 0 and all(_later(trace, lost, other) for other in trace.ops[op].inputs)


def fast_bytes(trace: Trace, placements: Sequence[Placement], again: dict[int, Again] | None = None) -> list[int]:
    """Bytes on the fast tier in each interval; on CUDA also at the moment before it, while something is computed."""
    again = computed_again(trace, placements) if again is None else again
    found = []
    for now, moment in enumerate(trace.moments):
        held = trace.staging_bytes
        for storage in trace.storages:
            stays = storage.parcel < 0 or placements[storage.parcel].tier == "keep"
            if stays and storage.owned <= now < storage.freed:
                held += storage.nbytes
        for number, (parcel, placement) in enumerate(zip(trace.parcels, placements, strict=True)):
            if placement.tier == "recompute":
                made = [at for at, one in again.items() if number in one.made]
                held += parcel.nbytes * any(at <= now < parcel.freed for at in made)
            elif placement.tier != "keep":
                before = parcel.owned <= now < placement.drop
                after = placement.fetch <= now < parcel.freed
                assert not (before and after), "it takes room once, at most"
                held += parcel.nbytes * (before or after)
        peak = held + moment.other_bytes
        if now in again and trace.device == "cuda":
            peak = max(peak, held + moment.still_bytes + again[now].transient_bytes)
        found.append(peak)
    return found


def held_before(trace: Trace, placements: Sequence[Placement], again: dict[int, Again]) -> list[int]:
    """Bytes that the Session alone has on the fast tier when each moment comes, and nothing has happened there yet."""
    found = []
    for now in range(trace.num_moments):
        held = 0
        for storage in trace.storages:
            stays = storage.parcel < 0 or placements[storage.parcel].tier == "keep"
            held += storage.nbytes * (stays and storage.owned <= now < storage.freed)
        for number, (parcel, placement) in enumerate(zip(trace.parcels, placements, strict=True)):
            came = [at for at, one in again.items() if number in one.made]
            not_left = False
            if placement.tier in ("ram", "disk"):
                came, not_left = [placement.fetch], parcel.owned <= now <= placement.drop
            there = not_left or any(at < now for at in came)
            held += parcel.nbytes * (placement.tier != "keep" and there and now < parcel.freed)
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


def step_s(
    trace: Trace, placements: Sequence[Placement], machine: Machine, again: dict[int, Again] | None = None
) -> float:
    """Seconds of the step. A parcel for the disk of a GPU's host crosses the link first, and last on its way back."""
    again = computed_again(trace, placements) if again is None else again
    out = {"ram": _Channel(machine.d2h_bytes_per_s or 1), "disk": _Channel(machine.disk_write_bytes_per_s or 1)}
    back = {"ram": _Channel(machine.h2d_bytes_per_s or 1), "disk": _Channel(machine.disk_read_bytes_per_s or 1)}
    left: dict[int, float] = {}
    arrived: dict[int, float] = {}
    now_s = 0.0

    def fetch(number: int) -> float:
        if number not in arrived:
            ready_s = max(now_s, left[number])
            if placements[number].tier == "disk":
                ready_s = back["disk"].serve(trace.parcels[number].nbytes, ready_s)
            if trace.device == "cuda":
                ready_s = back["ram"].serve(trace.parcels[number].nbytes, ready_s)
            arrived[number] = ready_s
        return arrived[number]

    moved = [number for number, place in enumerate(placements) if place.tier in ("ram", "disk")]
    for now, moment in enumerate(trace.moments):
        for number in moved:
            if placements[number].drop == now:
                now_s = max(now_s, left[number])
        for number in moved:
            if trace.parcels[number].sealed == now:
                ready_s = now_s
                if trace.device == "cuda":
                    ready_s = out["ram"].serve(trace.parcels[number].nbytes, ready_s)
                if placements[number].tier == "disk":
                    ready_s = out["disk"].serve(trace.parcels[number].nbytes, ready_s)
                left[number] = ready_s
        if now in again:
            # In any order: the last one is waited for.
            for number in sorted(again[now].sources & set(moved)):
                if placements[number].drop <= now:
                    assert placements[number].fetch <= now, "what is read must be there"
                    now_s = max(now_s, fetch(number))
            now_s += again[now].seconds
        for number in moved:
            if trace.parcels[number].needed == now:
                now_s = max(now_s, fetch(number))
        for number in sorted(moved, key=lambda number: (trace.parcels[number].needed, number)):
            if placements[number].fetch == now:
                fetch(number)
        now_s += moment.compute_s
    if trace.device == "cpu":
        return now_s + sum(trace.parcels[number].nbytes for number in moved) * machine.disk_delay_s_per_byte
    num_moved = sum(trace.parcels[number].num_storages for number in moved)
    host_s = num_moved * trace.host.move_s + sum(len(one.ops) for one in again.values()) * trace.host.record_s
    return now_s + max(host_s / 10, host_s - trace.host.idle_s)


def every_placement(trace: Trace, tiers: Sequence[str]) -> Iterator[tuple[list[Placement], dict[int, Again]]]:
    """Every choice of these tiers with all moments of leaving and coming back; no two parcels of which make sense only
    together are left out. For a handful of parcels. What the step does not need is not computed again where it can
    move: what it is made of would have to stay, for a step that does need it."""
    can_move = not {"ram", "disk"}.isdisjoint(tiers)
    for chosen in itertools.product(tiers, repeat=len(trace.parcels)):
        unneeded = (one.needed >= trace.num_moments for one in trace.parcels)
        if can_move and any(a and b == "recompute" for a, b in zip(unneeded, chosen, strict=True)):
            continue
        try:
            again = computed_again(trace, [Placement(tier=tier) for tier in chosen])
        except Impossible:
            continue
        options: list[list[Placement]] = []
        for number, (parcel, tier) in enumerate(zip(trace.parcels, chosen, strict=True)):
            if tier == "keep":
                options.append([Placement(tier=tier)])
            elif tier == "recompute":
                made = [moment for moment, one in again.items() if number in one.made]
                fetch = made[0] if made else trace.num_moments
                options.append([Placement(tier=tier, drop=parcel.sealed, fetch=fetch)])
            else:
                reads = [at for at, one in again.items() if number in one.sources and at > parcel.sealed]
                last = min([parcel.needed, *reads])
                drops = range(parcel.sealed + 1, last + 1)
                options.append(
                    [
                        Placement(tier=tier, drop=drop, fetch=fetch)
                        for drop in drops
                        for fetch in ([last] if last == trace.num_moments else range(drop + 1, last + 1))
                    ]
                )
        for placements in itertools.product(*options):
            yield list(placements), again


def best_s(trace: Trace, machine: Machine, limit: int, tiers: Sequence[str]) -> float:
    """Seconds of the fastest placements within a limit on the fast tier; infinite where there are none."""
    best = math.inf
    for placements, again in every_placement(trace, tiers):
        if max(fast_bytes(trace, placements, again)) <= limit:
            best = min(best, step_s(trace, placements, machine, again))
    return best


def num_placements(trace: Trace, num_slower: int) -> int:
    """At most so many placements."""
    ways = [parcel.needed - parcel.sealed for parcel in trace.parcels]
    return math.prod(2 + num_slower * way * (way + 1) // 2 for way in ways)
