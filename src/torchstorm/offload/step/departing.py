"""A step that turns out to be another one than its plan is for: it goes on with another plan, or without one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torchstorm.offload.recompute.watched import Calls
from torchstorm.offload.step.packed import Keeper
from torchstorm.offload.step.parcels import Call, Saved
from torchstorm.offload.step.policy import Follow, Policy
from torchstorm.offload.step.residency import Residency
from torchstorm.offload.step.room import Room
from torchstorm.offload.step.running import Departure, Running, TableOf
from torchstorm.offload.step.saving import Saver
from torchstorm.offload.step.settled import Settled
from torchstorm.offload.step.tables import Table
from torchstorm.offload.step.tracing import Recorder
from torchstorm.plan.forecast import KEEP
from torchstorm.plan.plan import Plan
from torchstorm.plan.recompute import RECOMPUTE
from torchstorm.plan.trace import PACK


class Departing:
    """Takes what a plan has placed so far over to what follows it; under the lock of the hooks.

    Args:
        residency: what is where.
        room: how much is free.
        saver: makes parcels of what stayed.
        owner: gets placeholders back.
        running: the step that runs.
        spot: decides where no plan does.
        table_of: the table of a plan.
        settle_in: the short way through the step, by its present plan.
        drop: gives back what that plan drops at a moment.
    """

    def __init__(
        self,
        residency: Residency,
        room: Room,
        saver: Saver,
        owner: Keeper,
        running: Callable[[], Running],
        *,
        spot: Policy,
        table_of: TableOf,
        settle_in: Callable[[], Settled | None],
        drop: Callable[[int], None],
    ) -> None:
        self._residency, self._room, self._saver, self._owner = residency, room, saver, owner
        self._running, self._table_of, self._settle_in, self._drop = running, table_of, settle_in, drop
        self._spot = spot

    def depart(self, kind: str, ordinal: int, nbytes: int) -> None:
        """The moment that has come is not the plan's: another plan is followed from here on, or none."""
        run = self._running()
        self._change(run, self._departure(run, kind, ordinal, nbytes), run.num_saved)
        if run.plan is not None:
            self._drop(run.moment)

    def made_otherwise(self, ordinal: int, nbytes: int, call: Call | None) -> None:
        """Another operation than the plan's has made what is saved at this moment: the same.

        Args:
            ordinal, nbytes: of the storage, which is counted already, and has no parcel yet.
            call: that operation, if it was recorded.
        """
        run = self._running()
        departure = self._departure(run, PACK, ordinal, nbytes)
        made_by = {**departure.made_by, ordinal: call} if call is not None else departure.made_by
        self._change(run, replace(departure, made_by=made_by, is_made_otherwise=True), ordinal)

    def _change(self, run: Running, departure: Departure, num_saved: int) -> None:
        """Goes on with another plan, or without one, after so many storages."""
        before = run.table
        assert run.change is not None
        assert before is not None
        choice = run.change(departure, before, self._table_of)
        if choice.plan is None:
            self._leave(run, departure, num_saved, choice.measure)
            return
        self._give_up(run)
        run.recorder = run.pace = None
        run.has_changed = True
        run.policy = Follow(choice.plan, self._spot)
        run.is_exact, run.table = choice.is_exact, self._table_of(choice.plan)
        self._place(run, choice.plan, run.table, departure)
        run.recorded = run.table.recorded_after(run.moment, run.recorded)
        run.record_only(run.table.operations, run.table.calls)
        run.settled = self._settle_in()

    def _departure(self, run: Running, kind: str, ordinal: int, nbytes: int) -> Departure:
        kept = {one.ordinal: one for one in self._residency.kept.in_step().values() if one.num_live}
        held = self._of_the_step()
        values = {at: one.value for at, one in kept.items()}
        values |= {
            at: one.value
            for at, one in held.items()
            if one.value is not None and one.value.saved is one and not one.parcel.shared
        }
        return Departure(
            moment=run.moment,
            kind=kind,
            ordinal=ordinal,
            nbytes=nbytes,
            sizes={at: one.nbytes for some in (kept, held) for at, one in some.items()},
            resident={*kept, *(at for at, saved in held.items() if saved.parcel.buffer is not None)},
            made_by={at: one.call for at, one in values.items() if one is not None and one.call is not None},
            recorded=run.recorded,
            can_move=self._residency.default_tier != KEEP,
            is_made_otherwise=False,
        )

    def _of_the_step(self) -> dict[int, Saved]:
        """What autograd holds of the step in parcels, by number."""
        return {saved.ordinal: saved for saved in self._residency.known.all() if saved.ordinal >= 0}

    def _give_up(self, run: Running) -> None:
        """What the plan had for what is saved so far is over."""
        run.settled = None
        self._saver.give_up_kept(self._owner)
        if run.open is not None:
            self._saver.seal(run, move=True)

    def _place(self, run: Running, plan: Plan, table: Table, departure: Departure) -> None:
        """What was saved so far goes to where the plan that is followed now would have it."""
        run.numbered = {}
        for ordinal, saved in self._of_the_step().items():
            number, parcel = plan.trace.storages[ordinal].parcel, saved.parcel
            if number < 0 or parcel.buffer is None:
                continue
            placement = plan.placements[number]
            is_let_go = placement.tier == RECOMPUTE and departure.is_let_go(table, ordinal)
            if is_let_go and self._room.let_go(parcel):
                continue
            if placement.tier != KEEP and parcel.handle is None and departure.can_move:
                is_again = placement.tier == RECOMPUTE  # what made it was not recorded
                self._residency.put(parcel, self._residency.default_tier if is_again else placement.tier)
            if placement.tier in (KEEP, RECOMPUTE) or placement.drop <= run.moment or number in run.numbered:
                self._residency.drop(parcel)
            else:
                parcel.number = number
                run.numbered[number] = parcel

    def _leave(self, run: Running, departure: Departure, num_saved: int, measure: object) -> None:
        """From this moment on, before which so many storages were saved, it is decided on the spot, and measured, if
        anyone does so."""
        plan = run.plan
        self._give_up(run)
        run.num_proven = run.tape.num_calls if run.tape is not None else 0
        run.policy, run.table = self._spot, None
        run.recorder = run.pace = None
        run.numbered = {}
        run.left_plan = True
        if not isinstance(measure, Recorder):
            run.record_only((), Calls(()))
            return
        assert plan is not None
        saved = {at: one for at, one in self._of_the_step().items() if at < num_saved}
        if run.tape is not None:
            for one in saved.values():
                if one.value is None and one.parcel.hold is not None:
                    value = run.tape.name(one.parcel.hold.untyped_storage(), one.version)
                    if value.saved is None:
                        one.value, value.saved, value.held = value, one, None
        measure.begin_late(plan.trace, run.moment, num_saved, saved)
        measure.name(departure.kind, departure.ordinal, departure.nbytes)
        measure.watch(run.moment, self._residency.known)
        measure.lie_still(self._residency.resident.values())
        run.recorder = measure
        run.record_all(measure.clock.mark)
        run.set_up_tape(self._residency, may_repeat=False)
