"""Schedules a choice: when each parcel's memory is freed, when it is fetched, and how long the step takes.

The orders are fixed. Copies out run in the order in which parcels are complete ("sealed"). When memory is needed, the
parcel whose copy ends first is dropped, as late as memory allows; it is dropped earlier only if its copy has surely
ended. Fetches start in the order in which parcels are needed, each as soon as there is memory for it until then. With
more memory, every fetch starts at the same time or earlier, in the same order.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

import numpy as np
import numpy.typing as npt

from torchstorm.plan.forecast import DISK, KEEP, RAM, SLOT_BYTES, Placement, channel_speed, hops, host_s
from torchstorm.plan.machine import Machine
from torchstorm.plan.recompute import RECOMPUTE, Replay, Replayer
from torchstorm.plan.trace import Trace

TIERS = (KEEP, RECOMPUTE, RAM, DISK)
KEPT, RECOMPUTED, TO_RAM, TO_DISK = range(4)
"""A choice has one byte per parcel: the index of its tier in `TIERS`."""

_MARGIN = 0.3  # relative safety margin: a copy has surely ended after 1.3 times its forecast duration
_DROP, _SEAL, _REPLAY, _NEED, _FETCH = range(5)  # events of one moment, in this order

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(eq=False, kw_only=True)
class Schedule:
    """A choice with the moments of its copies.

    Attributes:
        choice: the choice. Parcels that would be fetched as soon as they are dropped are kept.
        drops, fetches: moments per parcel; 0 for kept parcels.
        over_bytes: bytes above the limit of the fast tier. If positive, there are no moments, and `seconds` is the mean
            number of bytes per interval.
        slow_over_bytes: bytes above the limits of the slower tiers.
        seconds: step time.
    """

    choice: bytes
    drops: list[int]
    fetches: list[int]
    over_bytes: int
    slow_over_bytes: int
    seconds: float

    @property
    def fits(self) -> bool:
        """Whether it is within the limits of all tiers."""
        return not (self.over_bytes or self.slow_over_bytes)

    @property
    def score(self) -> tuple[int, int, float]:
        """Sort key, smaller is better: bytes over the limits first, then time."""
        return (self.over_bytes, self.slow_over_bytes, self.seconds)

    def placements(self) -> tuple[Placement, ...]:
        """The placements, one per parcel."""
        return tuple(
            Placement(tier=KEEP) if code == KEPT else Placement(tier=TIERS[code], drop=drop, fetch=fetch)
            for code, drop, fetch in zip(self.choice, self.drops, self.fetches, strict=True)
        )


class Scheduler:
    """Schedules choices for one trace on one machine.

    Args:
        trace, machine: as in `solve`.
        ram_bytes, disk_bytes: limits of the slower tiers; None for no such tier.
    """

    def __init__(self, trace: Trace, machine: Machine, *, ram_bytes: int | None, disk_bytes: int | None) -> None:
        self.trace, self.machine, self.num = trace, machine, trace.num_moments
        self.limits = {TO_RAM: ram_bytes, TO_DISK: disk_bytes}
        self.spreads = True  # whether parcels that do not fit in RAM go to disk; otherwise the choice says which do
        self.replayer = Replayer(trace)
        self.away = TO_RAM if ram_bytes is not None else TO_DISK if disk_bytes is not None else KEPT
        self._turn = trace.turn
        self._clock = [0.0, *accumulate(moment.compute_s for moment in trace.moments)]
        self.compute_s = self._clock[-1]
        self._other = np.array([m.other_bytes for m in trace.moments], dtype=np.float64) + trace.staging_bytes
        self._still = np.array([m.still_bytes for m in trace.moments], dtype=np.float64) + trace.staging_bytes
        parcels = trace.parcels
        self._nbytes = [parcel.nbytes for parcel in parcels]
        self._sizes = np.array(self._nbytes, dtype=np.float64)
        self._num_storages = np.array([parcel.num_storages for parcel in parcels], dtype=np.int64)
        self._owned = np.array([parcel.owned for parcel in parcels], dtype=np.int64)
        self._sealed = np.array([parcel.sealed for parcel in parcels], dtype=np.int64)
        self._counts_first = self._owned <= self._sealed  # on the fast tier, until it moves
        self._needed = np.array([parcel.needed for parcel in parcels], dtype=np.int64)
        self._freed = np.array([parcel.freed for parcel in parcels], dtype=np.int64)
        self._slots = -(-np.array(self._nbytes, dtype=np.int64) // SLOT_BYTES) * SLOT_BYTES
        by_seal = sorted(range(len(parcels)), key=lambda number: (parcels[number].sealed, number))
        self._by_seal = np.array(by_seal, dtype=np.int64)
        self._by_need = np.array(
            sorted(range(len(parcels)), key=lambda number: (parcels[number].needed, number)), dtype=np.int64
        )
        self._need_rank = np.empty(len(parcels), dtype=np.int64)
        self._need_rank[self._by_need] = np.arange(len(parcels))
        self._seal_rank = np.empty(len(parcels), dtype=np.int64)
        self._seal_rank[self._by_seal] = np.arange(len(parcels))
        self._legs_s = {
            (tier, way): [
                [parcel.nbytes / channel_speed(machine, leg, way) for parcel in parcels]
                for leg in (hops(trace.device, TIERS[tier]) if way == "out" else hops(trace.device, TIERS[tier])[::-1])
            ]
            for tier in (TO_RAM, TO_DISK)
            if self.limits[tier] is not None
            for way in ("out", "back")
        }
        fixed = np.zeros(self.num + 1)
        owner, starts, stops, sizes = [], [], [], []
        for storage in trace.storages:
            if storage.owned >= storage.freed:
                continue
            if storage.parcel < 0:
                fixed[storage.owned] += storage.nbytes
                fixed[storage.freed] -= storage.nbytes
            else:
                owner.append(storage.parcel)
                starts.append(storage.owned)
                stops.append(storage.freed)
                sizes.append(storage.nbytes)
        self._fixed = fixed
        self._part_owner = np.array(owner, dtype=np.int64)
        self._part_owned = np.array(starts, dtype=np.int64)
        self._part_freed = np.array(stops, dtype=np.int64)
        self._part_sizes = np.array(sizes, dtype=np.float64)

    # ------------------------------------------------------------------ bytes

    def lower_bound(self, choice: bytes) -> tuple[Floats, Ints, dict[int, Replay]] | None:
        """Bytes in every interval if every moved parcel is away as long as possible; the moment when each is first
        needed, by itself or for a recomputation; and the recomputations. None if one is impossible."""
        codes = np.frombuffer(choice, dtype=np.uint8)
        again = self.replayer.play(np.flatnonzero(codes == RECOMPUTED).tolist())
        if again is None:
            return None
        other = self._other
        moved = codes >= TO_RAM
        if not again:
            back = np.where(moved, self._needed, self.num)
        else:
            fetch, need = [self.num] * len(codes), self._needed.tolist()
            for moment, replay in reversed(again.items()):
                for number in replay.made:
                    fetch[number] = moment
                for number in replay.sources:
                    need[number] = min(need[number], moment)
            back = np.where(moved, np.maximum(need, self._sealed + 1), fetch)
            if self.trace.device == "cuda":
                at = np.fromiter(again, dtype=np.int64, count=len(again))
                extra = np.array([replay.transient_bytes for replay in again.values()], dtype=np.float64)
                other = other.copy()
                other[at] = np.maximum(other[at], self._still[at] + extra)
        away = codes != KEPT
        out = moved & self._counts_first
        comes = away & (back < self._freed)
        parts = codes[self._part_owner] == KEPT
        places = np.concatenate(
            (
                self._owned[out],
                back[comes],
                self._part_owned[parts],
                self._sealed[out] + 1,
                self._freed[comes],
                self._part_freed[parts],
            )
        )
        sizes = np.concatenate((self._sizes[out], self._sizes[comes], self._part_sizes[parts]))
        edges = np.bincount(places, weights=np.concatenate((sizes, -sizes)), minlength=self.num + 1) + self._fixed
        return edges.cumsum()[:-1] + other, back, again

    def slow_over(self, choice: bytes) -> tuple[bytes, int]:
        """Moves parcels that do not fit in RAM to disk, the last needed first. Returns choice and excess bytes."""
        codes = np.frombuffer(choice, dtype=np.uint8)
        ram, disk = self.limits[TO_RAM], self.limits[TO_DISK]
        if self.spreads and ram is not None and disk is not None:
            codes = np.where(codes == TO_DISK, TO_RAM, codes).astype(np.uint8)
            if self._slow_peak(codes == TO_RAM) > ram:
                order = [number for number in self._by_need[::-1].tolist() if codes[number] == TO_RAM]
                # As few as necessary: each one lowers the peak.
                low, high = 0, len(order)
                while low < high:
                    middle = (low + high) // 2
                    trial = codes == TO_RAM
                    trial[order[:middle]] = False
                    if self._slow_peak(trial) <= ram:
                        high = middle
                    else:
                        low = middle + 1
                codes[order[:low]] = TO_DISK
            choice = codes.tobytes()
        over = 0
        for tier, limit in self.limits.items():
            if limit is not None:
                over = max(over, self._slow_peak(codes == tier) - limit)
        return choice, over

    def slow_peak(self, choice: bytes, tier: int) -> int:
        """Peak bytes on a slower tier."""
        return self._slow_peak(np.frombuffer(choice, dtype=np.uint8) == tier)

    def _slow_peak(self, there: npt.NDArray[np.bool_]) -> int:
        sizes = self._slots[there]
        if not sizes.size:
            return 0
        edges = np.zeros(self.num + 1, dtype=np.int64)
        np.add.at(edges, self._sealed[there], sizes)
        np.subtract.at(edges, self._freed[there], sizes)
        return int(np.cumsum(edges).max())

    # ------------------------------------------------------------------ time

    def place(self, choice: bytes, limit: int, most_s: float = inf, *, drops_late: bool = False) -> Schedule | None:
        """Schedules a choice within a limit on the fast tier; None if a recomputation is impossible, or if even a step
        that waits for no copy takes `most_s` or longer, which is known without the moments of the copies.

        With `drops_late` a copy has surely ended only after 1.3 times the time from the step's begin to its forecast
        end, or when backward begins: the model may compute faster than it was measured, and copies that wait for each
        other are late together.
        """
        if most_s < inf and self.least_s(choice, {}) >= most_s:
            return None
        choice, slow_over = self.slow_over(choice)
        found = self.lower_bound(choice)
        if found is None:
            return None
        profile, need, again = found
        over = max(0, int(profile.max()) - limit)
        if over:
            # Of two choices with equal peaks, the one with fewer bytes on average is closer to fitting.
            return Schedule(
                choice=choice,
                drops=[],
                fetches=[],
                over_bytes=over,
                slow_over_bytes=slow_over,
                seconds=float(profile.mean()),
            )
        if most_s < inf and self.least_s(choice, again) >= most_s:
            return None
        codes = bytearray(choice)
        back = need.tolist()
        moved = self._by_seal[np.frombuffer(choice, dtype=np.uint8)[self._by_seal] >= TO_RAM]
        drops = self._drop(profile, codes, moved, back, limit, drops_late=drops_late)
        self._fetch(profile, codes, moved, back, drops, limit)
        for number, code in enumerate(codes):
            if code == RECOMPUTED:
                drops[number] = self.trace.parcels[number].sealed
        seconds = self.seconds(codes, drops, back, again)
        return Schedule(
            choice=bytes(codes), drops=drops, fetches=back, over_bytes=0, slow_over_bytes=slow_over, seconds=seconds
        )

    def _drop(
        self, profile: Floats, codes: bytearray, moved: Ints, need: list[int], limit: int, *, drops_late: bool
    ) -> list[int]:
        """Chooses the drops, and adds the parcels' bytes until then to the profile. Parcels without a drop are kept."""
        drops = [0] * len(codes)
        if not moved.size:
            return drops
        clock, nbytes = self._clock, self._nbytes
        starts = np.maximum(self._sealed[moved] + 1, self._owned[moved])
        needs = np.minimum(np.array(need, dtype=np.int64)[moved], self.num)
        # A parcel counts from its start, and the profile has it from its need on. Both precede a seal at that moment.
        events = np.concatenate((needs * 3, starts * 3 + 1, self._sealed[moved] * 3 + 2))
        numbers = np.concatenate((moved, moved, moved))
        order = np.lexsort((self._seal_rank[numbers], events))
        highest = np.maximum.accumulate(profile).tolist()
        queue: list[tuple[float, int]] = []
        gone: set[int] = set()
        left: dict[int, float] = {}
        legs = {code: self._legs_s[code, "out"] for code in (TO_RAM, TO_DISK) if (code, "out") in self._legs_s}
        idle_link = idle_disk = delay = held = 0.0
        on_gpu = self.trace.device == "cuda"
        done = 0
        for event, number in zip(events[order].tolist(), numbers[order].tolist(), strict=True):
            moment, kind = divmod(event, 3)
            while queue and done < moment:
                ended, first = queue[0]
                room = limit - held
                forced = moment
                if highest[moment - 1] > room:
                    full = profile[done:moment] > room
                    place = int(full.argmax())
                    if full[place]:
                        forced = done + place
                surely = ended + _MARGIN * legs[codes[first]][-1][first]
                if drops_late:
                    surely = max(surely, min(ended * (1 + _MARGIN), clock[self._turn]))
                free = bisect_left(clock, surely - delay, done, moment)
                if min(free, forced) >= moment:
                    break
                if forced < free:
                    delay = max(delay, ended - clock[forced])
                    done = forced
                else:
                    done = free
                drops[first] = done
                queue.pop(0)
                gone.add(first)
                held -= nbytes[first]
            done = max(done, moment)
            if kind == 2:
                now = clock[moment] + delay
                times = legs[codes[number]]
                if on_gpu:
                    idle_link = now = max(now, idle_link) + times[0][number]
                if codes[number] == TO_DISK:
                    idle_disk = now = max(now, idle_disk) + times[-1][number]
                left[number] = now
            elif kind == 1:
                if need[number] > moment:
                    insort(queue, (left[number], number))
                    held += nbytes[number]
            elif number not in gone:
                codes[number] = KEPT
                if (left.get(number, -1.0), number) in queue:
                    queue.remove((left[number], number))
                    held -= nbytes[number]
        stops = np.array(need, dtype=np.int64)[moved]
        is_gone = np.frombuffer(codes, dtype=np.uint8)[moved] != KEPT
        stops[is_gone] = np.array(drops, dtype=np.int64)[moved][is_gone]
        counts = starts < stops
        sizes = self._sizes[moved][counts]
        edges = np.bincount(
            np.concatenate((starts[counts], stops[counts])),
            weights=np.concatenate((sizes, -sizes)),
            minlength=self.num + 1,
        )
        profile += np.cumsum(edges)[:-1]
        return drops

    def _fetch(
        self, profile: Floats, codes: bytearray, moved: Ints, back: list[int], drops: list[int], limit: int
    ) -> None:
        """Chooses the fetches: replaces the moments in `back`, when parcels are needed, by the fetches."""
        wanted = [number for number in moved.tolist() if codes[number] != KEPT and back[number] < self.num]
        rank = self._need_rank.tolist()
        wanted.sort(key=lambda number: (back[number], rank[number]))
        begin = 0
        for number in wanted:
            last, nbytes = back[number], self._nbytes[number]
            begin = max(begin, drops[number])
            if begin < last:
                full = (profile[begin:last] > limit - nbytes).nonzero()[0]
                if full.size:
                    begin += int(full[-1]) + 1
                profile[begin:last] += nbytes
            fetch = min(begin, last)
            if fetch <= drops[number]:
                codes[number] = KEPT
            back[number] = fetch

    def seconds(
        self, codes: Sequence[int], drops: Sequence[int], fetches: Sequence[int], again: dict[int, Replay]
    ) -> float:
        """Step time in seconds, equal to `forecast.forecast_s` for the same placements."""
        kinds = np.frombuffer(bytes(codes), dtype=np.uint8)
        moved = np.flatnonzero(kinds >= TO_RAM)
        base = len(codes) + 1
        at = np.concatenate(
            (
                np.array(drops, dtype=np.int64)[moved] * 5 + _DROP,
                self._sealed[moved] * 5 + _SEAL,
                np.fromiter(again, dtype=np.int64, count=len(again)) * 5 + _REPLAY,
                self._needed[moved] * 5 + _NEED,
                np.array(fetches, dtype=np.int64)[moved] * 5 + _FETCH,
            )
        )
        within = np.concatenate((moved, moved, np.zeros(len(again), dtype=np.int64), moved, self._need_rank[moved]))
        keys = np.sort(at * base + within)
        by_need = self._by_need.tolist()
        clock = self._clock
        delay = idle_out = idle_write = idle_read = idle_back = 0.0
        left: dict[int, float] = {}
        came: dict[int, float] = {}
        on_gpu = self.trace.device == "cuda"
        empty: list[list[float]] = []
        out_s = {code: self._legs_s.get((code, "out"), empty) for code in (TO_RAM, TO_DISK)}
        back_s = {code: self._legs_s.get((code, "back"), empty) for code in (TO_RAM, TO_DISK)}
        for key in keys.tolist():
            event, number = divmod(key, base)
            moment, kind = divmod(event, 5)
            if moment >= self.num:
                break
            if kind == _DROP:
                delay = max(delay, left[number] - clock[moment])
                continue
            if kind == _SEAL:
                now = clock[moment] + delay
                times = out_s[codes[number]]
                if on_gpu:
                    idle_out = now = max(now, idle_out) + times[0][number]
                if codes[number] == TO_DISK:
                    idle_write = now = max(now, idle_write) + times[-1][number]
                left[number] = now
                continue
            waited: Sequence[int] = (number,)
            if kind == _REPLAY:
                waited = [source for source in again[moment].sources if codes[source] >= TO_RAM]
            elif kind == _FETCH:
                waited = (by_need[number],)
            for one in waited:
                if kind == _REPLAY and drops[one] > moment:
                    continue  # not dropped yet
                if one not in came:
                    now = max(clock[moment] + delay, left[one])
                    times = back_s[codes[one]]
                    if codes[one] == TO_DISK:
                        idle_read = now = max(now, idle_read) + times[0][one]
                    if on_gpu:
                        idle_back = now = max(now, idle_back) + times[-1][one]
                    came[one] = now
                if kind != _FETCH:
                    delay = max(delay, came[one] - clock[moment])
            if kind == _REPLAY:
                delay += again[moment].compute_s
        return clock[self.num] + delay + self._own_s(kinds >= TO_RAM, again)

    def least_s(self, codes: Sequence[int], again: dict[int, Replay]) -> float:
        """Step time in seconds if no copy is waited for; no drops and fetches make a choice faster."""
        moved = np.frombuffer(bytes(codes), dtype=np.uint8) >= TO_RAM
        replays_s = sum(replay.compute_s for moment, replay in again.items() if moment < self.num)
        return self.compute_s + replays_s + self._own_s(moved, again)

    def _own_s(self, moved: npt.NDArray[np.bool_], again: dict[int, Replay]) -> float:
        """What following the choice takes the host."""
        num_moved, moved_bytes = int(self._num_storages @ moved), float(self._sizes @ moved)
        return host_s(self.trace, self.machine, again.values(), num_moved=num_moved, moved_bytes=moved_bytes)
