"""What the saved-tensor hooks know of the step that runs: made at its entry, dropped at its exit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.multiprocessing.reductions import StorageWeakRef

from torchstorm.offload.recompute.probe import TracingProbe
from torchstorm.offload.recompute.tape import Tape
from torchstorm.offload.recompute.watched import NO_CALLS, Calls, WatchedCalls
from torchstorm.offload.step.pace import Pace
from torchstorm.offload.step.parcels import Call, Parcel, Value, is_made_by
from torchstorm.offload.step.policy import Count, Policy
from torchstorm.offload.step.residency import Residency
from torchstorm.offload.step.settled import Settled
from torchstorm.offload.step.tables import Table, fits
from torchstorm.offload.step.tracing import Recorder
from torchstorm.offload.step.views import row_of
from torchstorm.plan.plan import Plan


class Choice(NamedTuple):
    """What is done with a step from here on.

    Attributes:
        plan: the one to follow; None where it is decided on the spot.
        measure: who measures the step.
        is_exact: whether the plan is for steps of just these sizes; else none may be larger.
        others: plans that it may go over to.
        any_other: whether it may turn out to be one that has no plan, and can keep the budget by computing again alone.
        turned: called when backward begins, where a plan is followed that nothing measures.
    """

    plan: Plan | None
    measure: Recorder | Pace | None = None
    is_exact: bool = True
    others: tuple[Plan, ...] = ()
    any_other: bool = False
    turned: Callable[[], None] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Departure:
    """Where a step turns out to be another one than its plan is for.

    Attributes:
        moment: its number, the first that is not the plan's.
        kind, ordinal, nbytes: what the moment is.
        sizes: bytes of the storages that autograd holds of this step, by number.
        resident: those of them that are on the fast device.
        made_by: of those the operations that made them, as far as these were recorded.
        recorded: numbers of the operations that were recorded so far.
        can_move: whether they have somewhere to go.
        is_made_otherwise: whether the moment is the plan's, but another operation has made what is saved.
    """

    moment: int
    kind: str
    ordinal: int
    nbytes: int
    sizes: Mapping[int, int]
    resident: Collection[int]
    made_by: Mapping[int, Call]
    recorded: Set[int]
    can_move: bool
    is_made_otherwise: bool

    def is_of(self, other: Table, before: Table, *, is_exact: bool) -> bool:
        """Whether a step that has followed one plan so far is one of another's: all its moments are."""
        return (
            other.num_shared(before) >= self.moment
            and other.has(self.moment, self.kind, self.ordinal, self.nbytes, is_exact=is_exact)
            and all(fits(nbytes, other.sizes[at], is_exact=is_exact) for at, nbytes in self.sizes.items())
            and (not self.is_made_otherwise or self._is_made_as(other))
        )

    def may_follow(self, other: Table) -> bool:
        """Whether such a step may go on with that plan: what is to be computed again was recorded, or can be moved."""
        if not other.operations_before(self.moment) <= self.recorded:
            return False
        return self.can_move or all(self.is_let_go(other, at) for at in self.resident if other.is_computed_again(at))

    def made_otherwise_than(self, other: Table) -> list[int]:
        """The storages on the fast device that another plan computes again, and that another operation has made."""
        again = [at for at in self.resident if other.is_computed_again(at)]
        return [at for at in again if at in self.made_by and not self.is_let_go(other, at)]

    def _is_made_as(self, other: Table) -> bool:
        """Whether what the moment saves was made as another plan has it, where that computes it again."""
        return not other.is_computed_again(self.ordinal) or self.is_let_go(other, self.ordinal)

    def is_let_go(self, other: Table, ordinal: int) -> bool:
        """Whether a storage on the fast device can be let go, since another plan computes it again."""
        return ordinal in self.made_by and is_made_by(self.made_by[ordinal], other.leaving[ordinal][3])


TableOf = Callable[[Plan], Table]
Change = Callable[[Departure, Table, TableOf], Choice]
"""What to do with a step from where it departs from its plan, of which the table is given."""


@dataclass(eq=False, kw_only=True, slots=True)
class Running:
    """The state of a step; of none, as long as none runs.

    Attributes:
        in_step: whether a step runs.
        fixed: addresses of storages that never move: parameters and buffers.
        inputs: the model's inputs by storage address, which the reference keeps taken.
        choose: called at the first save; None after it.
        change: called where the step turns out to be another one than its plan is for.
        moment: number of the latest moment.
        num_saved: storages saved so far.
        call_begins: the number of the first storage that the running autograd.Function saves.
        policy: what becomes of what is saved.
        is_exact: whether the plan that is followed is for steps of just these sizes; else none may be larger.
        turned: called when backward begins; None where nobody asks.
        left_plan: whether the step turned out to be another one than its plan is for.
        numbered: parcels by their number in the plan.
        settled: the short way; None where the long one is taken.
        recorder: measures the step.
        pace: measures only what a settled step takes.
        tape: records its operations.
        watched: within which calls it does so; None where it sees all of the step.
        table: of the plan that is followed.
        probe: finds out what of them can run again.
        recorded: numbers of those that were recorded by plans so far.
        num_proven: how many were recorded when the step left its plan: those are known to run again.
        has_changed: whether the step has gone over to another plan.
        open: the buffer that takes the next small storage.
        blocks: names of the modules that run, innermost last.
    """

    in_step: bool = False
    fixed: set[int] = field(default_factory=set)
    inputs: dict[int, StorageWeakRef] = field(default_factory=dict)
    choose: Callable[[tuple[Any, ...]], Choice] | None = None
    change: Change | None = None
    moment: int = 0
    num_saved: int = 0
    call_begins: int = 0
    policy: Policy = field(default_factory=Count)
    is_exact: bool = True
    turned: Callable[[], None] | None = None
    left_plan: bool = False
    numbered: dict[int, Parcel] = field(default_factory=dict)
    settled: Settled | None = None
    recorder: Recorder | None = None
    pace: Pace | None = None
    tape: Tape | None = None
    watched: WatchedCalls | None = None
    table: Table | None = None
    probe: TracingProbe | None = None
    recorded: Set[int] = frozenset()
    num_proven: int = 0
    has_changed: bool = False
    open: Parcel | None = None
    blocks: list[str] = field(default_factory=list)

    @property
    def plan(self) -> Plan | None:
        """The plan that is followed; None for none."""
        return self.policy.plan

    def set_up_tape(self, residency: Residency, *, may_repeat: bool) -> None:
        """The step's plan is known now, or that it is traced: so is what its operations are recorded for.

        Args:
            residency: what is where.
            may_repeat: whether records of an earlier step may be used again, of which nothing is left.
        """
        tape, recorder = self.tape, self.recorder
        if tape is None:
            return
        if recorder is not None:
            recorder.calls = tape.calls
            if self.plan is None:
                room_bytes = residency.unused_bytes
                self.probe = tape.probe = TracingProbe(residency.fast, aside=recorder.aside, room_bytes=room_bytes)
        elif self.table is None or not (self.table.recorded or self.table.may_change):
            tape.clear()
            self.record_only((), NO_CALLS)
        else:
            tape.mark = None
            if self.pace is not None and not residency.fast.is_beside_host:
                self.pace.calls, tape.mark = tape.calls, self.pace.mark
            elif may_repeat:
                tape.repeats = self.table.usable_records()
                tape.repeats.begin()
            self.record_only(self.table.recorded, self.table.calls)

    def note_turn(self, moment: int) -> None:
        """A moment has come: maybe the one at which backward begins."""
        if self.turned is not None and self.table is not None and moment == self.table.turn:
            self.turned()

    def can_make(self, value: Value) -> bool:
        """Whether the operation that made a value is known to make it again: by the plan that was followed when it ran,
        or because it has."""
        if value.call is None:
            return False
        if value.call.order < self.num_proven and value.call.number in self.recorded:
            return True
        return self.probe is not None and self.probe.can_make(value)

    def is_as_made(self, value: Value, parcel: Parcel) -> bool:
        """Whether a parcel has the bytes that its operation made, as far as that is known."""
        assert parcel.buffer is not None
        return self.probe is None or self.probe.is_as_made(value, row_of(parcel.buffer))

    def record_only(self, operations: Collection[int], calls: Calls) -> None:
        """From now on the tape records these operations, which run within these calls; where it sees all, it records
        all."""
        if self.tape is not None and self.watched is not None:
            self.tape.wanted = operations
            self.watched.record_within(calls)

    def record_all(self, mark: Callable[[], object]) -> None:
        """From now on the tape records everything, and its time."""
        if self.tape is not None:
            self.tape.begin_late(mark)
        if self.watched is not None:
            self.watched.record_within(None)
