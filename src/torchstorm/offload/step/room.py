"""Makes room on the fast device where no plan has: moves what is needed latest, or lets it go to compute it again."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

import torch

from torchstorm.offload.recompute.traced_ops import call_seconds
from torchstorm.offload.step.parcels import Call, Parcel, Place, Value
from torchstorm.offload.step.residency import Residency
from torchstorm.offload.step.running import Running
from torchstorm.plan.forecast import KEEP

_AHEAD = 16  # part of the budget that is made free beyond what is asked for: to look through all parcels takes time


class Room:
    """What is decided on the spot; under the lock of the hooks.

    Args:
        residency: what is where.
        running: the step that runs: knows which operations can run again.
        give_up_kept: makes parcels of what stays by plan.
    """

    def __init__(
        self,
        residency: Residency,
        *,
        running: Callable[[], Running],
        give_up_kept: Callable[[], None],
    ) -> None:
        self._residency = residency
        self._running = running
        self._give_up_kept = give_up_kept
        self._excess_bytes = 0  # that any stretch of the user's work was measured to take so far
        residency.make_room = self.make

    def make(self, nbytes: int, block: str) -> None:
        """Makes room for `nbytes` more within a budget of what is saved; where all counts, plans see to that."""
        residency = self._residency
        if residency.fast.counts_all or residency.resident_bytes + nbytes <= residency.limit_bytes:
            return
        self._push_out_until(nbytes)
        needed = residency.resident_bytes + nbytes
        if needed > residency.limit_bytes and (residency.shortfall is None or needed > residency.shortfall[0]):
            residency.shortfall = (needed, block)

    def part_of(self, nbytes: int) -> int:
        """How much of `nbytes` fits a budget of what is saved after pushing out what can be; where all counts, all."""
        return nbytes if self._residency.fast.counts_all else min(nbytes, self._push_out_until(nbytes))

    def keep_free(self, nbytes: int, *, spare: Parcel | None = None) -> None:
        """Where all counts, and no plan is followed, nobody knows what the next block allocates: keeps free `nbytes`
        and twice what any has so far, or half."""
        residency = self._residency
        limit = residency.limit_bytes
        if not residency.fast.counts_all:
            return
        recorder = self._running().recorder
        if recorder is not None:
            self._excess_bytes = max(self._excess_bytes, recorder.excess_bytes)
        allowed = min(limit // 2, limit - 2 * self._excess_bytes)
        held: list[Parcel] = []
        for victim in [one for one in self._victims() if one is not spare]:
            if residency.fast.allocated_bytes() + nbytes <= allowed:
                return
            # What others hold as well frees nothing now. If it were gone when they let go of it, which a block does
            # that has saved all its tensors at its end, the next stretch would seem to take less than it does by plan.
            if recorder is not None and not recorder.is_alone(victim):
                held.append(victim)
            else:
                self._push_out(victim)
        # But the budget comes first: where the next stretch does not fit beside it, it goes all the same.
        expected = residency.fast.allocated_bytes() + nbytes + self._excess_bytes
        for victim in held:
            if expected <= limit:
                return
            self._push_out(victim)
            expected -= victim.nbytes

    def look_ahead(self) -> None:
        """Without a plan: brings back what was made just before the latest parcel that backward has reached."""
        residency = self._residency
        for order in heapq.nlargest(2, residency.away):
            parcel = residency.away[order]
            room = residency.limit_bytes - residency.resident_bytes
            if residency.fast.counts_all:
                room = residency.limit_bytes // 2 - residency.fast.allocated_bytes()
            if order < residency.first_order or parcel.nbytes * 2 > room:
                return
            residency.fetch(parcel)

    # ------------------------------------------------------------------ moving

    def _push_out_until(self, nbytes: int) -> int:
        """Moves parcels, and then lets go of some, until `nbytes` fit or none is left that can go; returns the room
        there is then."""
        residency = self._residency
        stuck: set[Parcel] = set()  # the tiers have no room for these
        while residency.resident_bytes + nbytes > residency.limit_bytes:
            victim = next((parcel for parcel in self._victims() if parcel not in stuck), None)
            if victim is None and residency.kept.is_waiting:  # another thread has let go of it meanwhile
                residency.kept.settle()
                continue
            if victim is None and residency.kept.in_step():  # beside what another step's graph holds
                self._give_up_kept()
                continue
            if victim is None:
                self._forget_until(nbytes)
                break
            self._push_out(victim)
            if victim.buffer is not None:
                stuck.add(victim)
        return residency.limit_bytes - residency.resident_bytes

    def _victims(self) -> Iterator[Parcel]:
        """Resident parcels in the order in which they can best be spared: first made, last needed."""
        residency = self._residency
        if residency.default_tier == KEEP:
            return
        in_use: list[Parcel] = []
        for parcel in list(residency.resident.values()):
            if not parcel.movable or parcel.buffer is None:
                continue
            if parcel.used:
                in_use.append(parcel)
            else:
                yield parcel
        # After retain_graph a parcel stays in use as far as autograd tells; the storage's references tell more.
        for parcel in in_use:
            if parcel.buffer is not None and residency.is_alone(parcel):
                yield parcel

    def _push_out(self, parcel: Parcel) -> None:
        parcel.sealed = True
        if parcel.handle is None:
            self._residency.put(parcel, self._residency.default_tier)
        self._residency.drop(parcel)

    # ------------------------------------------------------------------ computing again

    def let_go(self, parcel: Parcel) -> bool:
        """Lets go of a parcel whose operation and what that reads are known, to compute it again; returns whether it
        could."""
        value = self._only_value(parcel)
        calls = self._calls_to_make(value, lambda one: one.call is not None) if value is not None else None
        if calls is None:
            return False
        self._forget(parcel, calls)
        return True

    def _forget_until(self, nbytes: int) -> None:
        """Lets go of what takes least to compute again, by its bytes, until `nbytes` fit and some more do."""
        residency, run = self._residency, self._running()
        goal = residency.limit_bytes - nbytes - residency.limit_bytes // _AHEAD
        heap: list[tuple[float, int, Parcel, Value]] = []
        for parcel in residency.resident.values():
            value = self._only_value(parcel)
            calls = self._calls_to_make(value, run.can_make) if value is not None else None
            if value is not None and calls is not None:
                heap.append((_seconds(calls) / parcel.nbytes, parcel.order, parcel, value))
        heapq.heapify(heap)
        while heap and residency.resident_bytes > goal:
            _, order, parcel, value = heapq.heappop(heap)
            calls = self._calls_to_make(value, run.can_make)  # more by now, where what it is made from was let go
            if calls is None:
                continue
            price = _seconds(calls) / parcel.nbytes
            if heap and price > heap[0][0]:
                heapq.heappush(heap, (price, order, parcel, value))
            elif run.is_as_made(value, parcel):
                self._forget(parcel, calls)

    def _forget(self, parcel: Parcel, calls: list[Call]) -> None:
        for call in calls:
            for one in call.inputs:
                one.is_read = True
        self._residency.forget(parcel)

    def _only_value(self, parcel: Parcel) -> Value | None:
        """What lies in a parcel that may be computed again; None where nothing may. Parts of a storage that were saved
        with a version counter each are not told apart by what made them."""
        if not parcel.movable or parcel.used or parcel.shared or parcel.handle is not None or len(parcel.members) != 1:
            return None
        (saved,) = parcel.members
        if parcel.buffer is None or saved.ordinal < 0 or saved.has_other_memory:
            return None
        if saved.value is None or saved.value.saved is not saved or len(self._residency.known.at(saved.address)) > 1:
            return None
        return None if self._residency.is_stale(saved) else saved.value

    def _calls_to_make(self, value: Value, can_make: Callable[[Value], bool]) -> list[Call] | None:
        """The operations that would have to run to make a value that is let go; None where it cannot be made so."""
        calls: dict[Call, None] = {}
        wanted = [value]
        while wanted:
            one = wanted.pop()
            if one is not value and self._is_at_hand(one):
                continue
            if one.call is None or not can_make(one):
                return None
            if one.call not in calls:
                calls[one.call] = None
                wanted += one.call.inputs
        return list(calls)

    def _is_at_hand(self, value: Value) -> bool:
        saved = value.saved
        if saved is None:
            return value.held is not None and value.held[0]._version == value.held[1]
        return saved.parcel.place is not Place.ABSENT and not self._residency.is_stale(saved)


def _seconds(calls: list[Call]) -> float:
    """What the operations take; on a GPU, where that is not known yet, by their number."""
    if any(call.marks is not None and isinstance(call.marks[0], torch.cuda.Event) for call in calls):
        return float(len(calls))  # pragma: gpu
    return sum(map(call_seconds, calls))
