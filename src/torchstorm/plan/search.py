"""Searches the fastest choice of keep, recompute or move for every parcel.

With few parcels, every choice is tried. With many, equal parcels (same bytes, same operations to recompute them) form a
group: the same tensor of every repeated block. The search starts from a few choices. It changes several members of a
group at once, the first or the last ones, by large steps and then by small ones, as long as the forecast improves. Then
it uses simulated annealing, and exchanges what becomes of parcels of two groups. In the end it keeps parcels that need
not move. The forecast does not change if their copies overlap with compute, but they wear the disk, and on a
CPU the copying threads compete for the same cores.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from torchstorm.plan.anneal import anneal
from torchstorm.plan.polish import polish
from torchstorm.plan.schedule import KEPT, RECOMPUTED, TO_DISK, TO_RAM, Schedule, Scheduler

_EXHAUSTIVE = 800  # largest number of choices to try all of
_POLISHED = 5  # largest number of moved parcels for `polish`
_MOST_FITTING = 20  # numbers of groups that are computed again in starts that fit
_STARTS = 2  # starts to continue from
_ROUNDS = 2  # rounds of annealing
_STEPS = 35  # steps of a round per parcel; fewer with very many parcels, since each step takes longer
_STEP_S = 4e-6  # seconds of a step of annealing per parcel, at most
_REPAID = 1000  # training steps that must be able to gain what a round of annealing takes
_SMALL_STEP = 2  # members of a group that change together after annealing
_TOLD_APART = 8  # operations that make a parcel, the last ones: by these it is told from others
_SAME = 1e-6  # relative difference below which times count as equal
_GOOD = 1e-3  # relative overhead below which a plan is good enough


@dataclass(frozen=True, kw_only=True)
class ParcelGroup:
    """Equal parcels in the order of creation.

    Attributes:
        members: numbers of the parcels.
        seconds: time to recompute one if its inputs exist; infinite if impossible.
        nbytes: bytes of one parcel.
    """

    members: tuple[int, ...]
    seconds: float
    nbytes: int

    @property
    def seconds_per_byte(self) -> float:
        """Recompute time per byte saved."""
        return self.seconds / max(self.nbytes, 1)

    def without(self, others: Container[int]) -> ParcelGroup:
        """The group without some parcels."""
        return replace(self, members=tuple(number for number in self.members if number not in others))


def group_parcels(scheduler: Scheduler) -> list[ParcelGroup]:
    """Groups equal parcels of a trace; the group that is cheapest to recompute per byte comes first."""
    trace = scheduler.trace
    groups: dict[tuple[object, ...], list[int]] = {}
    seconds: dict[tuple[object, ...], float] = {}
    for number, parcel in enumerate(trace.parcels):
        replay = scheduler.replayer.alone(number)
        if parcel.needed >= trace.num_moments and scheduler.away != KEPT:
            replay = None  # what it is made of would stay, too: a step that does use it must be able to make it
        ops = () if replay is None else tuple(trace.ops[index].name for index in replay.ops[-_TOLD_APART:])
        key = (parcel.nbytes, parcel.num_storages, replay is None, ops)
        groups.setdefault(key, []).append(number)
        seconds[key] = max(seconds.get(key, 0.0), math.inf if replay is None else replay.seconds)
    found = [
        ParcelGroup(members=tuple(members), seconds=seconds[key], nbytes=trace.parcels[members[0]].nbytes)
        for key, members in groups.items()
    ]
    return sorted(found, key=lambda one: (one.seconds_per_byte, one.members))


class Search:
    """Searches the best choice within a limit on the fast tier.

    Args:
        scheduler: schedules choices.
        limit: bytes of the fast tier.
        deadline: end of the search, by `time.perf_counter`.
        fixed: code of every parcel whose choice is made already.
        start: a choice that is likely to be good; None where there is none.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        limit: int,
        deadline: float,
        fixed: Mapping[int, int] = MappingProxyType({}),
        start: bytes | None = None,
    ) -> None:
        self.scheduler, self.limit, self.deadline = scheduler, limit, deadline
        self.complete = True
        groups = group_parcels(scheduler)
        self._able = [False] * len(scheduler.trace.parcels)
        for one in groups:
            for number in one.members:
                self._able[number] = one.seconds < math.inf
        self._fixed = {at: code for at, code in fixed.items() if code != RECOMPUTED or self._able[at]}
        self._groups = [rest for one in groups if (rest := one.without(self._fixed)).members]
        # The search for a choice that fits must not depend on measured times: a budget that an error message names as
        # sufficient must be sufficient in the next step, whose times differ.
        self._by_bytes = sorted(self._groups, key=lambda one: (-one.nbytes, one.members))
        self._start = self._allowed(start) if start is not None else None
        self._largest_step = 1 << max((len(one.members) for one in self._groups), default=1).bit_length() - 1
        self._seen: dict[bytes, Schedule | None] = {}
        self._has_fitting = False  # whether a choice that fits is known

    def run(self) -> Schedule:
        """The best schedule found. It exceeds the limit if none was found that fits."""
        found = self._best()
        if not found.fits:
            return found
        # In the search this would take room that fetches have a use for, and choices are tried faster without it.
        late = self.scheduler.place(found.choice, self.limit, drops_late=True)
        return late if late is not None and _is_as_good(late, found) else found

    def _best(self) -> Schedule:
        away = [self.scheduler.away] if self.scheduler.away != KEPT else []
        options = [[KEPT, *away, *([RECOMPUTED] if able else [])] for able in self._able]
        for number, code in self._fixed.items():
            options[number] = [code]
        if math.prod(len(choices) for choices in options) <= _EXHAUSTIVE:
            return self._try_all(options)
        ranked = self._ranked(self._starts(self._groups))[:_STARTS]
        fitting = self._ranked(itertools.chain(self._begun(), self._fitting()))[:_STARTS]
        if ranked[0].over_bytes and not any(found.fits for found in fitting):
            ranked, fitting = self._ranked(self._starts(self._by_bytes))[:_STARTS], []
        starts = sorted([*ranked, *fitting], key=lambda found: found.score)
        self._has_fitting = starts[0].fits
        climbed = {id(found): self._climb(found) for found in starts}  # those first that are likely to be in time
        best, other = (
            min((climbed[id(found)] for found in some), key=lambda found: found.score)
            for some in (ranked, fitting or ranked)
        )
        if not best.fits or other.seconds < best.seconds * (1 - _GOOD):
            best = min(best, other, key=lambda found: found.score)  # else copies have more time where they are spread
        if best.slow_over_bytes and not best.over_bytes:
            best = min((best, *map(self._climb, self._keeping_most())), key=lambda found: found.score)
        if not best.fits:
            return best
        if best.seconds > self.scheduler.compute_s * (1 + _GOOD):
            # A step cannot become faster than its compute. Where that is close, as in steps of a few milliseconds, a
            # long search takes more than a training would ever gain. The forecast says how close, and no clock does, so
            # that a trace always has the same plan, if the search begins alike.
            num_parcels = len(self._able)
            repaid = (best.seconds - self.scheduler.compute_s) * _REPAID / (_STEP_S * num_parcels)
            most = min(_STEPS * num_parcels, _STEPS * 10_000 // num_parcels)
            best = self._annealed(best, int(min(most, repaid)))
            if repaid > most:
                best = self._exchanged(best, most)
        return self._keeping_more(best)

    def _allowed(self, choice: bytes) -> bytes:
        """A choice with what is fixed as it is, and nothing computed again that cannot be."""
        codes = dict(enumerate(choice)) | self._fixed
        able, away = self._able, self.scheduler.away
        return bytes(away if code == RECOMPUTED and not able[at] else code for at, code in codes.items())

    def _annealed(self, best: Schedule, num_steps: int) -> Schedule:
        groups = [(one.members, tuple(self._options(one))) for one in self._groups]
        for seed in range(_ROUNDS):
            found = anneal(
                best,
                groups,
                self.attempt,
                compute_s=self.scheduler.compute_s,
                num_steps=num_steps,
                seed=seed,
                is_late=self._late,
            )
            best = self._climb(found, _SMALL_STEP)
        return best

    def attempt(self, choice: bytes, most_s: float = math.inf) -> Schedule | None:
        """Schedules one choice; None if it is impossible, or certain to take `most_s` or longer. Results are cached."""
        if self._fixed:
            changed = bytearray(choice)
            for number, code in self._fixed.items():
                changed[number] = code
            choice = bytes(changed)
        if choice in self._seen:
            return self._seen[choice]
        found = self.scheduler.place(choice, self.limit, most_s)
        if found is not None or most_s == math.inf:
            self._seen[choice] = found
        return found

    def _try_all(self, options: list[list[int]]) -> Schedule:
        choices = [bytes(choice) for choice in itertools.product(*options)]
        best = min((found for choice in choices if (found := self.attempt(choice))), key=lambda found: found.score)
        if not best.fits:
            return best
        to_disk = any(TO_DISK in found.choice for found in self._seen.values() if found is not None)
        if to_disk and self.scheduler.away != TO_DISK:
            both = [one if at in self._fixed else [*one, TO_DISK] for at, one in enumerate(options)]
            if math.prod(len(one) for one in both) <= _EXHAUSTIVE:
                self.scheduler.spreads = False
                self._seen.clear()
                choices = [bytes(choice) for choice in itertools.product(*both)]
                tried = (found for choice in choices if (found := self.attempt(choice)))
                best = min((best, *tried), key=lambda found: found.score)
        for choice in choices:
            if self._late():
                break
            if sum(code >= TO_RAM for code in choice) <= _POLISHED:
                found = polish(self.scheduler, choice, self.limit, best.seconds)
                if found is not None and found.score < best.score:
                    best = found
        return best

    def _late(self) -> bool:
        if time.perf_counter() < self.deadline:
            return False
        self.complete = False
        return True

    def _ranked(self, choices: Iterator[bytes]) -> list[Schedule]:
        """Starting choices, the best first."""
        starts: dict[bytes, Schedule] = {}
        for choice in choices:
            found = self.attempt(choice)
            if found is not None:
                starts.setdefault(found.choice, found)
        return sorted(starts.values(), key=lambda found: found.score)

    def _starts(self, groups: list[ParcelGroup]) -> Iterator[bytes]:
        """Everything kept, everything moved, and both with more and more groups recomputed."""
        for rest in dict.fromkeys((KEPT, self.scheduler.away)):
            choice = bytearray([rest]) * len(self._able)
            yield bytes(choice)
            for one in groups:
                if one.seconds == math.inf:
                    continue
                for number in one.members:
                    choice[number] = RECOMPUTED
                yield bytes(choice)

    def _fitting(self) -> Iterator[bytes]:
        """More and more groups computed again, the cheapest first; of the others no more parcels move than have to,
        those that are needed last: the largest, or those that take longest to compute again."""
        parcels, away = self.scheduler.trace.parcels, self.scheduler.away
        base = bytearray([KEPT]) * len(parcels)
        able = [one for one in self._groups if one.seconds < math.inf]
        for at in range(0, len(able) + 1, -(-len(able) // _MOST_FITTING) or 1):
            for one in able[:at]:
                for number in one.members:
                    base[number] = RECOMPUTED
            if self._late():
                return
            if not self._is_too_much(base):
                yield bytes(base)
                return
            if away == KEPT:
                continue
            rest = [number for group in self._groups[at:] for number in group.members]
            for order in (
                sorted(rest, key=lambda number: (-parcels[number].nbytes, parcels[number].sealed)),
                rest[::-1],
            ):
                yield from self._least(bytes(base), order, away)

    def _begun(self) -> Iterator[bytes]:
        """The start; where it is too much, with as few more parcels that move, or are computed again, as have to."""
        if self._start is None:
            return
        yield self._start
        if self._is_too_much(self._start):
            code = self.scheduler.away if self.scheduler.away != KEPT else RECOMPUTED
            numbers = (number for one in self._groups for number in one.members if self._start[number] == KEPT)
            kept = [number for number in numbers if code != RECOMPUTED or self._able[number]]
            for order in kept, kept[::-1]:
                yield from self._least(self._start, order, code)

    def _least(self, base: bytes, order: list[int], code: int) -> Iterator[bytes]:
        """The choice in which the fewest parcels, the first in an order, have a code for the rest to fit."""
        low, high = 1, len(order)
        while low < high:
            middle = (low + high) // 2
            if self._is_too_much(_changed(base, (order[:middle], code))):
                low = middle + 1
            else:
                high = middle
        if order:
            yield _changed(base, (order[:low], code))

    def _is_too_much(self, choice: bytes | bytearray) -> bool:
        least = self.scheduler.lower_bound(bytes(choice))
        return least is None or bool(least[0].max() > self.limit)

    def _keeping_most(self) -> Iterator[Schedule]:
        """Moves everything, then keeps what fits: the last created first (they are needed first), or the largest."""
        parcels = self.scheduler.trace.parcels
        for rank in (lambda number: parcels[number].sealed, lambda number: parcels[number].nbytes):
            choice = bytearray([self.scheduler.away]) * len(parcels)
            for number in sorted({*range(len(parcels))} - self._fixed.keys(), key=rank, reverse=True):
                choice[number] = KEPT
                if self._is_too_much(choice):
                    choice[number] = self.scheduler.away
            found = self.attempt(bytes(choice))
            if found is not None:
                yield found

    def _exchanged(self, best: Schedule, most: int) -> Schedule:
        """Exchanges what becomes of some parcels of one group for what becomes of others, of as many bytes: a parcel
        that is computed again for one that moves or stays, or one that moves for one that stays. Either change alone
        does not fit, or is slower. Tries `most` exchanges."""
        exchanges = functools.partial(self._exchanges, tries=iter(range(most)))
        while True:
            found = self._climb(self._improved(best, exchanges), _SMALL_STEP)
            if not _is_better(found, best) or self._late():
                return found
            best = found

    def _exchanges(self, best: Schedule, tries: Iterator[int]) -> Iterator[bytes]:
        """Choices in which some members of one group become what members of another are, and those what the first were.
        These have at least as many bytes, and the fewest that do."""
        for one, gain, other, give in self._pairs(best.choice):
            code, better = (self._kind(best.choice[some[0]]) for some in (gain, give))
            for gaining, giving in self._ends(one, gain, other, give):
                if next(tries, None) is None:
                    return
                yield _changed(best.choice, (gaining, better), (giving, code))

    def _pairs(self, choice: bytes) -> Iterator[tuple[ParcelGroup, list[int], ParcelGroup, list[int]]]:
        """Members of one group, and members of another of which there is something better."""
        away = self.scheduler.away
        codes = [(RECOMPUTED, KEPT), *([(RECOMPUTED, away), (away, KEPT)] if away != KEPT else [])]
        members: list[dict[int, list[int]]] = [{} for _ in self._groups]
        for one, by_code in zip(self._groups, members, strict=True):
            for number in one.members:
                by_code.setdefault(self._kind(choice[number]), []).append(number)
        groups = list(zip(self._groups, members, strict=True))
        for one, mine in groups:
            if self._late():
                return
            for other, theirs in groups:
                for code, better in codes if other is not one else ():
                    gain, give = mine.get(code), theirs.get(better)
                    if gain and give and code in self._options(other):
                        yield one, gain, other, give

    def _ends(
        self, one: ParcelGroup, gain: list[int], other: ParcelGroup, give: list[int]
    ) -> Iterator[tuple[list[int], list[int]]]:
        """The first or last of some members of one group, and of another as many as have at least their bytes."""
        step = self._largest_step
        while step:
            if one.nbytes < other.nbytes:
                num_gained, num_given = min(step * other.nbytes // one.nbytes, len(gain)), step
            else:
                num_gained, num_given = step, -(-step * one.nbytes // other.nbytes)
            if num_gained <= len(gain) and num_given <= len(give):
                yield from itertools.product(
                    (gain[:num_gained], gain[-num_gained:]), (give[:num_given], give[-num_given:])
                )
            step //= 2

    def _keeping_more(self, best: Schedule) -> Schedule:
        """Keeps parcels while the step stays as fast: the largest first, and of a group the last created first."""
        start, step = best, self._largest_step
        while step:
            for one in self._by_bytes:
                while moved := [number for number in one.members if best.choice[number] >= TO_RAM]:
                    if self._late():
                        return best
                    found = self.attempt(_changed(best.choice, (moved[-step:], KEPT)))
                    if found is None or not _is_as_good(found, start):
                        break
                    best = found
            step //= 2
        return best

    def _climb(self, best: Schedule, step: int = 0) -> Schedule:
        step = step or self._largest_step
        while step:
            best = self._improved(best, functools.partial(self._moves, step=step))
            step //= 2
        return best

    def _improved(self, best: Schedule, choices: Callable[[Schedule], Iterator[bytes]]) -> Schedule:
        """Takes the first of some choices that is better than the best so far, again and again."""
        improved = True
        while improved:
            improved = False
            for changed in choices(best):
                # No time limit until a choice fits, so that an error message names the true requirement.
                if (best.fits or self._has_fitting) and self._late():
                    return best
                found = self.attempt(changed, best.seconds * (1 - _SAME) if best.fits else math.inf)
                if found is not None and _is_better(found, best):
                    best, improved = found, True
                    break
        return best

    def _moves(self, best: Schedule, step: int) -> Iterator[bytes]:
        """Choices that differ in one group by `step` members."""
        for one in self._by_bytes if best.over_bytes else self._groups:
            yield from self._moves_of(best.choice, one, step)

    def _moves_of(self, choice: bytes, one: ParcelGroup, step: int) -> Iterator[bytes]:
        options = self._options(one)
        for source in options:
            places = [number for number in one.members if self._kind(choice[number]) == source]
            if not places:
                continue
            for target in options:
                if target == source:
                    continue
                for chosen in (places[:step], places[-step:]) if len(places) > step else (places,):
                    yield _changed(choice, (chosen, target))

    def _options(self, one: ParcelGroup) -> list[int]:
        """The codes that parcels of a group may have."""
        return [*dict.fromkeys((KEPT, self.scheduler.away)), *([RECOMPUTED] if one.seconds < math.inf else [])]

    def _kind(self, code: int) -> int:
        return self.scheduler.away if code >= TO_RAM else code


def _changed(choice: bytes, *changes: tuple[list[int], int]) -> bytes:
    """A choice with other codes for some parcels."""
    changed = bytearray(choice)
    for numbers, code in changes:
        for number in numbers:
            changed[number] = code
    return bytes(changed)


def _is_as_good(found: Schedule, best: Schedule) -> bool:
    return found.fits and found.seconds <= best.seconds * (1 + _SAME)


def _is_better(found: Schedule, best: Schedule) -> bool:
    if (found.over_bytes, found.slow_over_bytes) != (best.over_bytes, best.slow_over_bytes):
        return found.score < best.score
    return found.seconds < best.seconds * (1 - _SAME)
