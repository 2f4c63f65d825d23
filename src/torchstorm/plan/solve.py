"""Chooses what to keep and what to move: (trace, machine, budget) -> Plan.

Memory is a constraint in every interval. Which parcels leave is chosen by furthest next use, the rule that moves the
fewest bytes for a given room (Belady, "A study of replacement algorithms", 1966): in a training step the first
storages saved are needed last. Moving just enough leaves no room for copies under way, and then compute waits for
them; moving more costs link time. So the choice is made for several rooms below the budget, each is scheduled within
the whole budget and played forward, and the fastest wins.

Recomputing instead of moving is not offered yet: a placement has room for it as one more tier.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from torchstorm.errors import BudgetError, PlanError
from torchstorm.plan.forecast import (
    DISK,
    KEEP,
    RAM,
    Figures,
    Placement,
    Profile,
    channel_speed,
    fast_profile,
    forecast_s,
    hops,
    other_profile,
    tier_peak,
)
from torchstorm.plan.machine import Machine
from torchstorm.plan.plan import Budget, Plan
from torchstorm.plan.trace import Trace
from torchstorm.sizes import format_size

_ROOMS = (1.0, 0.97, 0.94, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.0)
# Copies are asked to arrive this much earlier than their bytes over the measured speed would need.
_EARLY = 1.5


def solve(
    trace: Trace,
    machine: Machine,
    budget: Budget,
    *,
    spare: Budget | None = None,
    own_bytes: Callable[[int], int] | None = None,
) -> Plan:
    """Plans a step.

    Args:
        trace: the measured step.
        machine: speeds of the link and the disk.
        budget: bytes per tier.
        spare: bytes of each budget that are kept free of what is planned.
        own_bytes: what a Session with a given budget on the fast tier and a slower one below takes of it for copies;
            the trace's `staging_bytes` where it does not depend on the budget.

    Returns:
        The fastest plan found whose forecast keeps to the budget on every tier.

    Raises:
        BudgetError: no plan does; names the block, its need and the smallest feasible budget.
        PlanError: the machine has no speed for a tier that the budget names.
    """
    spare = spare or Budget()
    fast = "ram" if trace.device == "cpu" else "vram"
    limit = getattr(budget, fast) - getattr(spare, fast)
    fixed = other_profile(trace)
    tier = _slow_tier(trace, machine, budget)
    num_parcels = len(trace.parcels)
    order, peaks = _furthest_first(trace, fixed, tier)
    if min(peaks) > limit:
        own_bytes = own_bytes or (lambda _: trace.staging_bytes)
        raise _too_little(trace, order[: peaks.index(min(peaks))], budget, spare, own_bytes, fast, tier)
    best: Plan | None = None
    seen: set[int] = set()
    overflow: BudgetError | None = None
    for room in _ROOMS:
        number = next((number for number, peak in enumerate(peaks) if peak <= limit * room), None)
        if number is None:  # nothing fits into so small a room: move all that helps
            number = peaks.index(min(peaks))
        if number in seen:
            continue
        seen.add(number)
        leaving = set(order[:number])
        moved = [parcel in leaving for parcel in range(num_parcels)]
        try:
            placements = _assign_tiers(trace, budget, spare, _schedule(trace, machine, fixed, limit, moved, tier))
        except BudgetError as error:  # too much for the slower tiers; a larger room moves less
            if overflow is None or error.needed_bytes < overflow.needed_bytes:
                overflow = error
            continue
        fast_bytes = int(fast_profile(trace, placements).max())
        forecast = Figures(
            step_ms=forecast_s(trace, placements, machine) * 1e3,
            vram_bytes=0 if fast == "ram" else fast_bytes,
            ram_bytes=fast_bytes if fast == "ram" else tier_peak(trace, placements, RAM) + spare.ram,
            disk_bytes=tier_peak(trace, placements, DISK),
        )
        plan = Plan(trace=trace, budget=budget, placements=tuple(placements), forecast=forecast)
        # A fraction of a percent is inside the forecast's error, and fewer bytes moved is then the better plan.
        if best is None or forecast.step_ms < best.forecast.step_ms * 0.998:
            best = plan
    if best is None:
        assert overflow is not None
        raise overflow
    return best


def shift_base(trace: Trace, delta_bytes: int) -> Trace:
    """The same step with `delta_bytes` more memory that is not the Session's in every interval."""
    moments = tuple(replace(moment, other_bytes=max(0, moment.other_bytes + delta_bytes)) for moment in trace.moments)
    return replace(trace, moments=moments, base_bytes=trace.base_bytes + delta_bytes)


def _slow_tier(trace: Trace, machine: Machine, budget: Budget) -> str:
    """Where parcels go first; "keep" where the budget names no tier below the fast one."""
    if trace.device == "cpu":
        tier = DISK if budget.disk else KEEP
    else:
        tier = RAM if budget.ram else DISK if budget.disk else KEEP
    for channel in dict.fromkeys(leg for named in _named_tiers(trace, budget) for leg in hops(trace.device, named)):
        if not min(channel_speed(machine, channel, direction) for direction in ("out", "back")) > 0:
            below = tier if channel != DISK else DISK
            raise PlanError(
                f"{below}={format_size(getattr(budget, below))} was asked, but machine {machine.name!r} says no speed "
                f"for {channel}, which the way there crosses: measure one, or leave {below}= out."
            )
    return tier


def _named_tiers(trace: Trace, budget: Budget) -> list[str]:
    """The tiers below the fast one that the budget names."""
    return [tier for tier in (RAM, DISK) if getattr(budget, tier) and (tier != RAM or trace.device == "cuda")]


def _shortest(sealed: int, needed: int, tier: str) -> Placement:
    """Away for as long as possible: dropped at the first moment after the copy out began, fetched when needed."""
    if tier == KEEP:
        return Placement(tier=KEEP)
    return Placement(tier=tier, drop=sealed + 1, fetch=max(needed, sealed + 1))


def _too_little(
    trace: Trace,
    leaving: Sequence[int],
    budget: Budget,
    spare: Budget,
    own_bytes: Callable[[int], int],
    fast: str,
    tier: str,
) -> BudgetError:
    """The error for a fast tier that is too small even with all those parcels away that help."""
    limit, kept_free = getattr(budget, fast), getattr(spare, fast)
    profile = fast_profile(trace, _away(trace, leaving, tier))
    worst = int(profile.argmax())
    needed = int(profile[worst]) + kept_free
    block = _block_at(trace, worst)
    where = f"block {block!r} alone" if block else "the code around the model"
    smallest = needed
    if tier != KEEP:
        smallest = _with_own(needed - trace.staging_bytes, own_bytes)
        way_out = f"Smallest feasible: {fast}={smallest} ({format_size(smallest)})."
    else:
        least = min(_furthest_first(trace, other_profile(trace), DISK)[1]) + kept_free - trace.staging_bytes
        least = _with_own(least, own_bytes)
        target = 'disk="DIR:SIZE"' if fast == "ram" else "ram= or disk="
        way_out = (
            f"Smallest feasible without a tier to move to: {fast}={needed} ({format_size(needed)}); "
            f"with {target}: {fast}={least} ({format_size(least)})."
        )
    return BudgetError(
        f"{fast}={format_size(limit)}, but {where} needs {format_size(needed)} at once. {way_out}",
        tier=fast,
        budget_bytes=limit,
        needed_bytes=needed,
        smallest_bytes=smallest,
        block=block,
    )


def _with_own(nbytes: int, own_bytes: Callable[[int], int]) -> int:
    """The smallest budget found that holds `nbytes` besides what a Session with it takes for itself."""
    budget = nbytes
    while budget < nbytes + own_bytes(budget):
        budget = nbytes + own_bytes(budget)
    return budget


def _away(trace: Trace, leaving: Sequence[int], tier: str) -> list[Placement]:
    """Those parcels away for as long as possible, the others kept."""
    gone = set(leaving)
    return [
        _shortest(parcel.sealed, parcel.needed, tier if number in gone else KEEP)
        for number, parcel in enumerate(trace.parcels)
    ]


def _block_at(trace: Trace, interval: int) -> str:
    storage = trace.moments[interval].storage
    if storage < 0:
        # The entry or a weight: the nearest moment that belongs to a block says where we are.
        near = sorted(range(trace.num_moments), key=lambda index: abs(index - interval))
        storage = next((trace.moments[index].storage for index in near if trace.moments[index].storage >= 0), -1)
    return trace.storages[storage].block if storage >= 0 else ""


def _furthest_first(trace: Trace, fixed: Profile, tier: str) -> tuple[list[int], list[int]]:
    """Parcels in the order in which they leave, furthest next use first, as long as that lowers some moment.

    Returns:
        The order, and the peak with the first 0, 1, 2, ... of them away.
    """
    num_parcels = len(trace.parcels)
    profile = fast_profile(trace, [Placement(tier=KEEP)] * num_parcels) - other_profile(trace) + fixed
    order: list[int] = []
    peaks = [int(profile.max())]
    if tier == KEEP or not num_parcels:
        return order, peaks
    sealed, needed, freed, owned = (
        np.array([getattr(parcel, name) for parcel in trace.parcels]) for name in ("sealed", "needed", "freed", "owned")
    )
    waiting = np.ones(num_parcels, dtype=bool)
    kept: list[list[tuple[int, int, int]]] = [[] for _ in range(num_parcels)]
    for storage in trace.storages:
        if storage.parcel >= 0:
            kept[storage.parcel].append((storage.owned, storage.freed, storage.nbytes))
    while True:
        worst = int(profile.argmax())
        helps = waiting & (sealed < worst) & (owned <= worst) & (worst < needed) & (worst < freed)
        if not helps.any():
            return order, peaks
        number = int(np.where(helps, needed, -1).argmax())
        waiting[number] = False
        parcel = trace.parcels[number]
        for start, stop, nbytes in kept[number]:
            profile[start:stop] -= nbytes
        profile[parcel.owned : parcel.sealed + 1] += parcel.nbytes
        profile[parcel.needed : parcel.freed] += parcel.nbytes
        order.append(number)
        peaks.append(int(profile.max()))


def _schedule(
    trace: Trace, machine: Machine, fixed: Profile, limit: int, moved: Sequence[bool], tier: str
) -> list[Placement]:
    """Gives every moved parcel a drop as late and a fetch as early as the budget and the clock have use for."""
    placements = [
        _shortest(parcel.sealed, parcel.needed, tier if goes else KEEP)
        for parcel, goes in zip(trace.parcels, moved, strict=True)
    ]
    profile = fast_profile(trace, placements) - other_profile(trace) + fixed
    starts = np.concatenate([[0.0], np.cumsum([moment.compute_s for moment in trace.moments])])[:-1]
    clock = starts.tolist()
    channels = hops(trace.device, tier) if tier != KEEP else ()
    numbers = [number for number, goes in enumerate(moved) if goes]

    def seconds(number: int, direction: str) -> float:
        return max(trace.parcels[number].nbytes / channel_speed(machine, channel, direction) for channel in channels)

    arrival = 0.0
    for number in sorted(numbers, key=lambda number: trace.parcels[number].sealed):
        parcel = trace.parcels[number]
        arrival = max(arrival, clock[parcel.sealed]) + seconds(number, "out") * _EARLY
        wanted = min(bisect_left(clock, arrival), parcel.needed)
        # What the parcel's own user still holds takes no room of ours, so waiting for it costs nothing.
        first = max(parcel.sealed + 1, min(parcel.owned, parcel.needed))
        drop = _grow_forward(profile, first, max(first, wanted), parcel.nbytes, limit)
        profile[max(parcel.sealed + 1, parcel.owned) : drop] += parcel.nbytes
        placements[number] = replace(placements[number], drop=drop, fetch=max(parcel.needed, drop))
    due = float("inf")
    latest: dict[int, float] = {}
    by_need = sorted(
        (number for number in numbers if trace.parcels[number].needed < trace.num_moments),
        key=lambda number: trace.parcels[number].needed,
    )
    for number in reversed(by_need):
        due = min(due, clock[trace.parcels[number].needed]) - seconds(number, "back") * _EARLY
        latest[number] = due
    for number in by_need:
        parcel, drop = trace.parcels[number], placements[number].drop
        wanted = max(bisect_right(clock, latest[number]) - 1, drop)
        fetch = parcel.needed
        while fetch > wanted and profile[fetch - 1] + parcel.nbytes <= limit:
            fetch -= 1
        profile[fetch : parcel.needed] += parcel.nbytes
        # A parcel with room all the way from its making to its need has no reason to travel.
        stays = fetch <= drop
        placements[number] = Placement(tier=KEEP) if stays else replace(placements[number], fetch=fetch)
    return placements


def _grow_forward(profile: Profile, first: int, wanted: int, nbytes: int, limit: int) -> int:
    """The latest drop in [first, wanted] for which every interval before it has room."""
    too_full = np.flatnonzero(profile[first:wanted] + nbytes > limit)
    return first + int(too_full[0]) if too_full.size else wanted


def _assign_tiers(trace: Trace, budget: Budget, spare: Budget, placements: list[Placement]) -> list[Placement]:
    """Sends to disk what does not fit in RAM: the parcels that have longest until they are needed."""
    if trace.device == "cuda" and budget.ram and budget.disk:
        order = sorted(range(len(placements)), key=lambda number: -trace.parcels[number].needed)
        for number in order:
            if tier_peak(trace, placements, RAM) + spare.ram <= budget.ram:
                break
            if placements[number].tier == RAM:
                placements[number] = replace(placements[number], tier=DISK)
    for tier in (RAM, DISK):
        if tier == RAM and trace.device == "cpu":
            continue
        peak, limit = tier_peak(trace, placements, tier) + getattr(spare, tier), getattr(budget, tier)
        if peak > limit:
            raise BudgetError(
                f"{tier}={format_size(limit)}, but what leaves the fast tier takes {format_size(peak)} there at once. "
                f"Give {tier}={peak} ({format_size(peak)}), or a larger budget on the fast tier.",
                tier=tier,
                budget_bytes=limit,
                needed_bytes=peak,
                smallest_bytes=peak,
            )
    return placements
