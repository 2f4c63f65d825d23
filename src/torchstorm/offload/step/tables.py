"""A plan as lists, which a settled step looks up in place of reading the plan."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Set
from typing import NamedTuple

from torchstorm.offload.native.library import Library
from torchstorm.offload.recompute.repeats import Repeats
from torchstorm.offload.recompute.watched import Calls, call_of, moment_of
from torchstorm.offload.step.parcels import TINY_BYTES
from torchstorm.plan.forecast import KEEP
from torchstorm.plan.plan import Plan
from torchstorm.plan.recompute import RECOMPUTE, replays
from torchstorm.plan.trace import PACK, UNPACK, Trace, num_shared

_MOST_TABLES = 64


def fits(nbytes: int, expected_bytes: int, *, is_exact: bool) -> bool:
    """Whether a storage is as large as a plan has it; where the plan may be for larger steps, or smaller."""
    return nbytes == expected_bytes or (not is_exact and nbytes < expected_bytes)


class Stay(NamedTuple):
    """A moment at which a storage is saved that stays.

    Attributes:
        ordinal, nbytes, counted_bytes, movable, block: of the storage.
        is_noticed: whether the tape hears of it.
        is_read: whether something is computed again from it.
        is_busy: whether something is dropped or fetched at the moment.
    """

    ordinal: int
    nbytes: int
    counted_bytes: int
    movable: bool
    block: str
    is_noticed: bool
    is_read: bool
    is_busy: bool


class Table:
    """A plan as lists, by moment and by storage.

    Args:
        plan: the plan.
        all_recorded: whether all operations of its steps are, so that even what is tiny must be found by its value.

    Attributes:
        signatures: of the moments, `num_moments` of them.
        stays: whether a storage stays.
        stayers: what is saved at each moment, where it stays; None for other moments.
        read: of those, the ones that something is computed again from, and that records do not hold themselves; and
            those that may leave where the step turns out to be another one.
        movable: of the storages, whether they might leave.
        turn: the moment at which backward begins.
        busy: moments at which something is dropped or fetched, and that one.
        leaving: storage -> number of its parcel, where that goes, whether it shares a buffer with others, number and
            name of the operation that makes it, the module that saves it; of those that do not stay.
        saved_again: storages that are saved more than once.
        operations: numbers of those that run again.
        recorded: those, and what plans need that a step may go over to.
        may_change: whether a step may go over to another plan.
        calls: within which these run.
        sizes: bytes of the storages.
        noticed: storages of which the tape hears though they stay: those that are read, and those that a recorded
            operation makes, since its results are told apart by the order in which they are saved.
        made: of the moments at which what is computed again is saved, its number, what makes it, and its bytes.
        read_until: storage -> the last moment at which something is computed again from it.
        repeats: what was recorded of the last step.
        earlier: of the plan that the last such step followed, if that was another, until its records are taken over.
    """

    def __init__(self, plan: Plan, *, all_recorded: bool) -> None:
        storages = plan.trace.storages
        self.signatures = [moment.signature for moment in plan.trace.moments]
        self.num_moments = len(self.signatures)
        self.movable = [storage.parcel >= 0 for storage in storages]
        self.stays = [one.parcel < 0 or plan.placements[one.parcel].tier == KEEP for one in storages]
        again = (replays(plan.trace, plan.placements) or {}) if plan.recomputes else {}
        self.read_until = {
            plan.trace.values[value].storage: moment
            for moment, replay in sorted(again.items())
            for op in replay.ops
            for value in plan.trace.ops[op].inputs
        }
        operations, sources = _makers(plan)
        operations.update(op for replay in again.values() for op in replay.ops)
        sources.update(self.read_until)
        # Records hold what is tiny themselves, unless a recorded operation made it.
        self.read = {
            number
            for number, one in enumerate(storages)
            if number in sources
            and self.stays[number]
            and (all_recorded or one.parcel >= 0 or one.nbytes >= TINY_BYTES)
        }
        self.operations = {plan.trace.ops[op].number for op in operations}
        self.sizes = {one.storage: one.nbytes for one in plan.trace.moments if one.kind == PACK}
        self._all_recorded = all_recorded
        self._native: object | None = None  # see `moments_for`
        self._shared: weakref.WeakKeyDictionary[Table, int] = weakref.WeakKeyDictionary()  # see `num_shared`
        self.turn = plan.trace.turn
        self.busy = {*plan.drops, *plan.fetches, self.turn}
        packed = Counter(one.storage for one in plan.trace.moments if one.kind == PACK)
        self.saved_again = {ordinal for ordinal, times in packed.items() if times > 1}
        self.repeats = Repeats()
        self.earlier: Table | None = None
        self._plan, self._read = plan, self.read
        self._recorded_for: tuple[tuple[weakref.ref[Table], ...], bool] | None = None
        self.record_for(())

    def has(self, moment: int, kind: str, ordinal: int, nbytes: int, *, is_exact: bool) -> bool:
        """Whether a moment that has come is the plan's."""
        if moment >= self.num_moments:
            return False
        planned_kind, planned_ordinal, planned_bytes = self.signatures[moment]
        if planned_kind != kind or planned_ordinal != ordinal:
            return False
        return fits(nbytes, planned_bytes, is_exact=is_exact)

    def moments_for(self, found: Library) -> object:
        """The same for the C++."""
        if self._native is None:
            lists = self.signatures, self.stayers, self.made, self.leaving, self.busy, self.saved_again
            self._native = found.Moments(*lists, dict(self._plan.drops), dict(self._plan.fetches), self.turn, UNPACK)
        return self._native

    def num_shared(self, other: Table) -> int:
        """How many moments it begins with as another plan does, but for sizes."""
        found = self._shared.get(other)
        if found is None:
            found = self._shared[other] = num_shared(self._plan.trace, other._plan.trace)
        return found

    def operations_before(self, moment: int) -> set[int]:
        """Those that run again and are recorded before a moment, if not all operations are."""
        return set() if self._all_recorded else {one for one in self.operations if moment_of(one) < moment}

    def recorded_after(self, moment: int, before: Set[int]) -> set[int]:
        """What is recorded of a step that has recorded other operations until this moment, and these from then on."""
        mine, theirs = self.operations_before(moment), {one for one in before if moment_of(one) < moment}
        return (self.operations - mine) | theirs

    def is_computed_again(self, ordinal: int) -> bool:
        """Whether a storage is let go to be computed again."""
        return not self.stays[ordinal] and self.leaving[ordinal][1] == RECOMPUTE

    def usable_records(self) -> Repeats:
        """What was recorded of the last such step, also where that followed another plan; for a step that begins when
        nothing is left of that."""
        earlier, self.earlier = self.earlier, None
        if earlier is not None:
            differing = {call_of(number) for number in self.recorded ^ earlier.recorded}
            self.repeats.take_over(earlier.repeats, lambda number: call_of(number) not in differing)
        return self.repeats

    def record_for(self, others: tuple[Table, ...], *, any_other: bool = False) -> None:
        """Has recorded what plans need that a step may go over to, as long as it goes like theirs: what is computed
        again by those, and what from. Where it may turn out to be `any_other` step, all that can be computed again."""
        recorded_for = tuple(map(weakref.ref, others)), any_other
        if recorded_for == self._recorded_for:
            return
        self._recorded_for = recorded_for
        self._native = None
        self.repeats.clear()  # what of an operation's results is looked at may differ
        self.recorded, self.read = self.operations, self._read
        self.may_change = any_other or bool(others)
        if any_other:
            self.recorded = self.operations | _possible(self._plan.trace)
            self.read = self.read | {number for number, may_leave in enumerate(self.movable) if may_leave}
        for other in others:
            parting = self.num_shared(other)
            self.recorded = self.recorded | other.operations_before(parting)
            saved = max((ordinal for _, ordinal, _ in self.signatures[:parting]), default=-1) + 1
            left = {number for number, stays in enumerate(other.stays[:saved]) if not stays and self.movable[number]}
            self.read = self.read | left | {number for number in other._read if number < saved}
        self.calls = Calls({call_of(number) for number in self.recorded})
        trace = self._plan.trace
        self.noticed = self.read.union(
            trace.values[value].storage for op in trace.ops if op.number in self.recorded for value in op.outputs
        )
        self.leaving = {number: _leaving(self._plan, number) for number, stays in enumerate(self.stays) if not stays}
        self.stayers = [self._stay(moment, *one) for moment, one in enumerate(self.signatures)]
        self.made = {
            moment: (ordinal, self.leaving[ordinal][3], nbytes)
            for moment, (kind, ordinal, nbytes) in enumerate(self.signatures)
            if kind == PACK and ordinal >= 0 and self.is_computed_again(ordinal)
        }

    def _stay(self, moment: int, kind: str, ordinal: int, nbytes: int) -> Stay | None:
        if kind != PACK or ordinal < 0 or not self.stays[ordinal]:
            return None
        storage, is_noticed = self._plan.trace.storages[ordinal], ordinal in self.noticed
        of_storage = ordinal, nbytes, storage.nbytes, self.movable[ordinal], storage.block
        return Stay(*of_storage, is_noticed, is_noticed and ordinal in self.read, moment in self.busy)


def _possible(trace: Trace) -> set[int]:
    """Numbers of the operations that can run again from what autograd saves, whatever else is let go."""
    possible: set[int] = set()
    for at, op in enumerate(trace.ops):
        inputs = [trace.values[value] for value in op.inputs]
        if all(one.storage >= 0 or one.op in possible for one in inputs):
            possible.add(at)
    return {trace.ops[at].number for at in possible}


def _leaving(plan: Plan, ordinal: int) -> tuple[int, str, bool, tuple[int, str], str]:
    storage = plan.trace.storages[ordinal]
    tier = plan.placements[storage.parcel].tier
    is_shared = tier != RECOMPUTE and plan.trace.parcels[storage.parcel].num_storages > 1
    return storage.parcel, tier, is_shared, plan.maker(ordinal) if tier == RECOMPUTE else (-1, ""), storage.block


def _makers(plan: Plan) -> tuple[set[int], set[int]]:
    """The operations that make what is to be computed again, and the storages that are not and from which they do: also
    where the step itself has no use for it, since a later one may have."""
    trace = plan.trace
    again = [one.parcel >= 0 and plan.placements[one.parcel].tier == RECOMPUTE for one in trace.storages]
    wanted = [one.value for one, is_made in zip(trace.storages, again, strict=True) if is_made]
    operations: set[int] = set()
    sources: set[int] = set()
    while wanted:
        value = trace.values[wanted.pop()]
        if value.storage >= 0 and not again[value.storage]:
            sources.add(value.storage)
        elif value.op >= 0 and value.op not in operations:
            operations.add(value.op)
            wanted += trace.ops[value.op].inputs
    return operations, sources


class Tables:
    """The tables of the plans that were followed last."""

    def __init__(self) -> None:
        self._tables: dict[tuple[int, int, bool], tuple[Plan, Table]] = {}
        self._followed: dict[tuple[int, bool], Table] = {}  # the last one of those for the same steps

    def of(self, plan: Plan, *, all_recorded: bool) -> Table:
        """The table of a plan. One that differs in what is forecast alone has the same, with all records."""
        # Such a plan is made of another one, and shares these tuples with it; an empty one is shared by everybody.
        key = id(plan.placements or plan), id(plan.trace.storages), all_recorded
        found = self._tables.get(key)
        if found is None:
            if len(self._tables) >= _MOST_TABLES:
                oldest = next(iter(self._tables))
                del self._tables[oldest]
                self._followed.pop(oldest[1:], None)
            found = self._tables[key] = plan, Table(plan, all_recorded=all_recorded)
        return found[1]

    def follow(self, plan: Plan, others: tuple[Plan, ...], any_other: bool, all_recorded: bool) -> Table:
        """The table of a plan that a step follows from its begin.

        Args:
            plan, others, any_other: as in `Choice`.
            all_recorded: as in `Table`.
        """
        table = self.of(plan, all_recorded=all_recorded)
        table.record_for(tuple(self.of(one, all_recorded=all_recorded) for one in others), any_other=any_other)
        key = id(plan.trace.storages), all_recorded
        earlier = self._followed.get(key, table)
        if earlier is not table:
            table.earlier = earlier
        self._followed[key] = table
        return table
