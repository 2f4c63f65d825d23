"""Shifts single copies of a schedule, where a few parcels of very different sizes make the forced order a bad one."""

from __future__ import annotations

from torchstorm.plan.schedule import KEPT, TO_RAM, Schedule, Scheduler

_GAIN = 1e-9  # seconds below which nothing is better


def polished(scheduler: Scheduler, choice: bytes, limit: int, most_s: float) -> Schedule | None:
    """A choice with moments of leaving and coming back found by changing one parcel's at a time, from all away as long
    as can be on. Takes time with the square of the parcels that move; for a handful.

    Args:
        scheduler, choice, limit: as for `Scheduler.place`.
        most_s: seconds of the step above which nothing is of interest.
    """
    choice, slow_over = scheduler.slow_over(choice)
    least = scheduler.least(choice)
    if least is None:
        return None
    profile, need, again = least
    if profile.max() > limit or scheduler.compute_s + sum(one.seconds for one in again.values()) >= most_s - _GAIN:
        return None
    parcels = scheduler.trace.parcels
    moved = [number for number, code in enumerate(choice) if code >= TO_RAM]
    last = need.tolist()
    if any(last[number] <= parcels[number].sealed + 1 for number in moved):
        return None
    drops = [parcel.sealed + (code >= TO_RAM) for parcel, code in zip(parcels, choice, strict=True)]
    fetches = list(last)

    def take(number: int, sign: int) -> None:
        """What a parcel takes before it is dropped and after it is fetched, beyond the least."""
        start, nbytes = max(parcels[number].sealed + 1, parcels[number].owned), sign * parcels[number].nbytes
        profile[start : max(start, drops[number])] += nbytes
        profile[fetches[number] : last[number]] += nbytes

    def ways(number: int) -> list[tuple[int, int]]:
        end = last[number]
        return [
            (drop, fetch)
            for drop in range(end - 1, parcels[number].sealed, -1)
            for fetch in (range(drop + 1, end + 1) if end < scheduler.num else (end,))
        ]

    best_s = scheduler.seconds(choice, drops, fetches, again)
    improved = True
    while improved:
        improved = False
        for number in moved:
            take(number, -1)
            best = (drops[number], fetches[number])
            for drop, fetch in ways(number):
                drops[number], fetches[number] = drop, fetch
                take(number, 1)
                if profile.max() <= limit:
                    seconds = scheduler.seconds(choice, drops, fetches, again)
                    # At equal time, what comes back later leaves the others more room.
                    equal = seconds <= best_s and (fetch, drop) > (best[1], best[0])
                    if seconds < best_s - _GAIN or equal:
                        best, best_s, improved = (drop, fetch), seconds, True
                take(number, -1)
            drops[number], fetches[number] = best
            take(number, 1)
    for number, code in enumerate(choice):
        if code == KEPT:
            drops[number] = 0
    return Schedule(
        choice=choice, drops=drops, fetches=fetches, over_bytes=0, slow_over_bytes=slow_over, seconds=best_s
    )
