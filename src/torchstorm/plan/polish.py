"""Local search over the moments of single copies, for schedules with few parcels of very different sizes."""

from __future__ import annotations

from collections.abc import Iterator

from torchstorm.plan.schedule import KEPT, TO_RAM, Schedule, Scheduler

_GAIN = 1e-9  # smallest improvement in seconds


def polish(scheduler: Scheduler, choice: bytes, limit: int, most_s: float) -> Schedule | None:
    """Searches the drop and fetch moments of a choice, changing one parcel at a time. It starts with every parcel away
    as long as possible. Of one parcel it tries every fetch, each with the latest drop that memory allows: with an
    earlier one, no wait is shorter. So the time grows with the number of moments, and not with its square.

    Args:
        scheduler, choice, limit: as in `Scheduler.place`.
        most_s: upper limit of the step time; slower schedules are rejected.
    """
    choice, slow_over = scheduler.slow_over(choice)
    least = scheduler.lower_bound(choice)
    if least is None:
        return None
    profile, need, again = least
    least_s = scheduler.least_s(choice, again)
    if profile.max() > limit or least_s >= most_s - _GAIN:
        return None
    parcels = scheduler.trace.parcels
    moved = [number for number, code in enumerate(choice) if code >= TO_RAM]
    last = need.tolist()
    if any(last[number] <= parcels[number].sealed + 1 for number in moved):
        return None
    drops = [parcel.sealed + (code >= TO_RAM) for parcel, code in zip(parcels, choice, strict=True)]
    fetches = list(last)

    def take(number: int, sign: int) -> None:
        """Adds (sign 1) or removes (-1) a parcel's bytes before its drop and after its fetch."""
        start, nbytes = max(parcels[number].sealed + 1, parcels[number].owned), sign * parcels[number].nbytes
        profile[start : max(start, drops[number])] += nbytes
        profile[fetches[number] : last[number]] += nbytes

    def ways(number: int) -> Iterator[tuple[int, int]]:
        """The drops and fetches with which a parcel fits beside the others, whose bytes are in the profile."""
        end, sealed = last[number], parcels[number].sealed
        start = max(sealed + 1, parcels[number].owned)
        full = (profile[:end] > limit - parcels[number].nbytes).nonzero()[0]
        place = int(full.searchsorted(start))
        latest = min(end - 1, int(full[place]) if place < full.size else end)
        # A parcel that the step does not need comes back after it.
        first = end if end >= scheduler.num else max(sealed + 2, int(full[-1]) + 1 if full.size else 0)
        for fetch in range(first, end + 1):
            yield min(fetch - 1, latest), fetch

    best_s = scheduler.seconds(choice, drops, fetches, again)
    improved = True
    while improved and best_s > least_s + _GAIN:  # where no copy is waited for, nothing is left to gain
        improved = False
        for number in moved:
            take(number, -1)
            best = (drops[number], fetches[number])
            for drop, fetch in ways(number):
                drops[number], fetches[number] = drop, fetch
                seconds = scheduler.seconds(choice, drops, fetches, again)
                # At equal time, a later fetch leaves more memory for the others.
                equal = seconds <= best_s and (fetch, drop) > (best[1], best[0])
                if seconds < best_s - _GAIN or equal:
                    best, best_s, improved = (drop, fetch), seconds, True
            drops[number], fetches[number] = best
            take(number, 1)
    for number, code in enumerate(choice):
        if code == KEPT:
            drops[number] = 0
    return Schedule(
        choice=choice, drops=drops, fetches=fetches, over_bytes=0, slow_over_bytes=slow_over, seconds=best_s
    )
