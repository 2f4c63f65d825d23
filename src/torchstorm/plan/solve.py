"""The planner: chooses what to keep, recompute and move. (trace, machine, budget) -> Plan.

Memory is limited in every interval. `search` generates choices, `schedule` computes the moments of their copies, and
`forecast` simulates the step. The result is the fastest choice that fits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from torchstorm.errors import BudgetError, PlanError
from torchstorm.plan.forecast import (
    DISK,
    RAM,
    Figures,
    channel_speed,
    fast_profile,
    forecast_s,
    hops,
    tier_peak,
)
from torchstorm.plan.machine import Machine
from torchstorm.plan.plan import Budget, Plan
from torchstorm.plan.schedule import KEPT, TIERS, TO_DISK, TO_RAM, Schedule, Scheduler
from torchstorm.plan.search import Search
from torchstorm.plan.trace import Trace
from torchstorm.sizes import format_size


def solve(
    trace: Trace,
    machine: Machine,
    budget: Budget,
    *,
    spare: Budget | None = None,
    own_bytes: Callable[[int], int] | None = None,
    slow_own_bytes: int = 0,
    time_limit_s: float = 10.0,
    fixed: Mapping[int, str] = MappingProxyType({}),
    start: Sequence[str] = (),
) -> Plan:
    """Plans a step.

    Args:
        trace: the measured step.
        machine: speeds of the link and the disk.
        budget: bytes per tier.
        spare: bytes of each budget that the plan leaves free.
        own_bytes: returns the bytes of the fast tier that a Session with a given budget uses for copies, if there is a
            slower tier; the trace's `staging_bytes` if they do not depend on the budget.
        slow_own_bytes: bytes of a slower tier that a Session needs besides planned ones, before it has a plan.
        time_limit_s: seconds after which the best plan found so far is returned, with a note.
        fixed: parcel -> its tier, where that is decided already. Where no plan fits with these, they are left out.
        start: of every parcel the tier that it has by another plan, for a step like this one. The search begins with
            it, so that it is soon as good. Empty for none, and left out where it is of another number of parcels.

    Returns:
        The fastest plan found whose forecast is within the budget on every tier. With few parcels all choices are
        tried; with more, a larger budget may give a plan that is slower by some tenths of a percent.

    Raises:
        BudgetError: no plan fits. The message names the block, its requirement and the smallest feasible budget.
        PlanError: the machine has no speed for a tier of the budget.
    """
    spare = spare or Budget()
    deadline = time.perf_counter() + time_limit_s
    fast = "ram" if trace.device == "cpu" else "vram"
    limit = getattr(budget, fast) - getattr(spare, fast)
    _check_speeds(trace, machine, budget)
    scheduler = Scheduler(
        trace,
        machine,
        ram_bytes=budget.ram - spare.ram if budget.ram and trace.device == "cuda" else None,
        disk_bytes=budget.disk - spare.disk if budget.disk else None,
    )
    codes = {number: _code(tier, scheduler) for number, tier in fixed.items()}
    begin = bytes(_code(tier, scheduler) for tier in start) if len(start) == len(trace.parcels) else None
    search = Search(scheduler, limit, deadline, codes, begin)
    found = search.run()
    if codes and not found.fits:
        search = Search(scheduler, limit, deadline, start=begin)
        found = search.run()
    if found.over_bytes:
        raise _too_little(scheduler, found, budget, spare, own_bytes or (lambda _: trace.staging_bytes), fast)
    if found.slow_over_bytes:
        raise _too_little_below(scheduler, found, budget, spare, slow_own_bytes)
    placements = found.placements()
    fast_bytes = int(fast_profile(trace, placements).max())
    forecast = Figures(
        step_ms=forecast_s(trace, placements, machine) * 1e3,
        vram_bytes=0 if fast == "ram" else fast_bytes,
        ram_bytes=fast_bytes if fast == "ram" else tier_peak(trace, placements, RAM) + spare.ram,
        disk_bytes=tier_peak(trace, placements, DISK),
    )
    notes = (
        () if search.complete else (f"The planner stopped after {time_limit_s:g} s with the best plan it had found.",)
    )
    return Plan(trace=trace, budget=budget, placements=placements, forecast=forecast, notes=notes)


def _code(tier: str, scheduler: Scheduler) -> int:
    """What stands in a choice for a tier; a search does not tell the slower tiers apart."""
    return scheduler.away if tier in (RAM, DISK) else TIERS.index(tier)


def shift_base(trace: Trace, delta_bytes: int) -> Trace:
    """The same step with `delta_bytes` more memory outside the Session in every interval."""
    if not delta_bytes:
        return trace
    moments = tuple(
        replace(
            moment,
            other_bytes=max(0, moment.other_bytes + delta_bytes),
            still_bytes=max(0, moment.still_bytes + delta_bytes),
        )
        for moment in trace.moments
    )
    return replace(trace, moments=moments, base_bytes=trace.base_bytes + delta_bytes)


def _check_speeds(trace: Trace, machine: Machine, budget: Budget) -> None:
    named = [tier for tier in (RAM, DISK) if getattr(budget, tier) and (tier != RAM or trace.device == "cuda")]
    for channel in dict.fromkeys(leg for tier in named for leg in hops(trace.device, tier)):
        if not min(channel_speed(machine, channel, direction) for direction in ("out", "back")) > 0:
            below = named[0] if channel != DISK else DISK
            raise PlanError(
                f"{below}={format_size(getattr(budget, below))} was given, but machine {machine.name!r} has no speed "
                f"for {channel}, which copies there use: measure it, or leave {below}= out."
            )


def _too_little(
    scheduler: Scheduler, found: Schedule, budget: Budget, spare: Budget, own_bytes: Callable[[int], int], fast: str
) -> BudgetError:
    """The error for a fast tier that is too small for every choice.

    With any limit that is too small, the search minimizes the peak in the same way. So the peak that it found is the
    smallest limit with which it finds a plan.
    """
    trace = scheduler.trace
    limit, kept_free = getattr(budget, fast), getattr(spare, fast)
    needed = limit + found.over_bytes
    least = scheduler.lower_bound(found.choice)
    assert least is not None
    block = _block_at(trace, int(least[0].argmax()))
    where = f"block {block!r} alone" if block else "the code around the model"
    smallest = needed
    if scheduler.away != KEPT:
        smallest = _with_own(needed - trace.staging_bytes, own_bytes)
        way_out = f"Smallest feasible: {fast}={smallest} ({format_size(smallest)})."
    else:
        any_speed = Machine(
            name="any",
            d2h_bytes_per_s=1e9,
            h2d_bytes_per_s=1e9,
            disk_write_bytes_per_s=1e9,
            disk_read_bytes_per_s=1e9,
        )
        roomy = Scheduler(trace, any_speed, ram_bytes=None, disk_bytes=1 << 60)
        with_tier = Search(roomy, -1, time.perf_counter() + 10.0).run().over_bytes - 1
        with_tier = _with_own(with_tier + kept_free - trace.staging_bytes, own_bytes)
        target = 'disk="DIR:SIZE"' if fast == "ram" else "ram= or disk="
        way_out = (
            f"Smallest feasible without a tier to move to: {fast}={needed} ({format_size(needed)}); "
            f"with {target}: {fast}={with_tier} ({format_size(with_tier)})."
        )
    return BudgetError(
        f"{fast}={format_size(limit)}, but {where} needs {format_size(needed)} at once. {way_out}",
        tier=fast,
        budget_bytes=limit,
        needed_bytes=needed,
        smallest_bytes=smallest,
        block=block,
    )


def _too_little_below(
    scheduler: Scheduler, found: Schedule, budget: Budget, spare: Budget, slow_own_bytes: int
) -> BudgetError:
    """The error for slower tiers that are too small for the parcels that must move."""
    for tier, code in ((RAM, TO_RAM), (DISK, TO_DISK)):
        bounded = scheduler.limits[code]
        peak, limit = scheduler.slow_peak(found.choice, code) + getattr(spare, tier), getattr(budget, tier)
        if bounded is not None and peak > limit:
            break
    smallest = peak + slow_own_bytes
    return BudgetError(
        f"{tier}={format_size(limit)}, but the tensors moved there need {format_size(peak)} at once. "
        f"Give {tier}={smallest} ({format_size(smallest)}), or a larger budget on the fast tier.",
        tier=tier,
        budget_bytes=limit,
        needed_bytes=peak,
        smallest_bytes=smallest,
    )


def _with_own(nbytes: int, own_bytes: Callable[[int], int]) -> int:
    """The smallest budget found for `nbytes` and the Session's own bytes with that budget."""
    budget = nbytes
    while budget < nbytes + own_bytes(budget):
        budget = nbytes + own_bytes(budget)
    return budget


def _block_at(trace: Trace, interval: int) -> str:
    storage = trace.moments[interval].storage
    if storage < 0:
        # The step's entry or a weight: use the nearest moment that belongs to a block.
        near = sorted(range(trace.num_moments), key=lambda index: abs(index - interval))
        storage = next((trace.moments[index].storage for index in near if trace.moments[index].storage >= 0), -1)
    return trace.storages[storage].block if storage >= 0 else ""
