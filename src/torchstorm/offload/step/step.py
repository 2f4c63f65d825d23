"""One training step: made at its entry, dropped at its exit with all that belongs to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch.autograd.graph import saved_tensors_hooks

from torchstorm.errors import BudgetError, OutOfVRAMError
from torchstorm.offload import misuse
from torchstorm.offload.compiled.call import refuse_compiled_whole
from torchstorm.offload.native.library import hooks_of
from torchstorm.offload.recompute.tape import Tape
from torchstorm.offload.recompute.watched import WatchedCalls
from torchstorm.offload.replan.foresight import foresee
from torchstorm.offload.replan.planned import Planned
from torchstorm.offload.replan.smaller import give_up, is_to_be_traced, plan_for
from torchstorm.offload.replan.user_plan import check_inputs
from torchstorm.offload.run.shortage import Gradients, Shortage, drop_step, held_by, keep_more_free, trained
from torchstorm.offload.step.clock import Span
from torchstorm.offload.step.conclude import Ended, conclude, with_part_that_fits
from torchstorm.offload.step.inputs import NoteInputs
from torchstorm.offload.step.naming import Naming
from torchstorm.offload.step.pace import Pace
from torchstorm.offload.step.running import Choice, Departure, TableOf
from torchstorm.offload.step.shared import Shared
from torchstorm.offload.step.tables import Table
from torchstorm.offload.step.tracing import Recorder
from torchstorm.plan.forecast import KEEP, Figures
from torchstorm.plan.trace import PACK
from torchstorm.sizes import format_size


class Step:
    """Chooses the plan of a step, has it followed or measured, and draws the conclusions when it is over.

    Args:
        shared: of the Session.

    Raises:
        UnsupportedError: the device is capturing a CUDA graph.
        DeviceError: the model was moved to another device.
    """

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._fast = fast = shared.tiers.fast
        shared.tiers.begin_step()
        shared.finish()
        # Where only what autograd saved counts, nothing is but what the Session has.
        held_bytes = shared.residency.resident_bytes if fast.counts_all else 0
        self._base_bytes = shared.base_bytes = fast.allocated_bytes() - held_bytes
        shared.take_better()
        tensors = shared.tensors
        tensors.read()
        refuse_compiled_whole(shared.model)
        variants = tuple(shared.compiled.variants.values()) if shared.compiled is not None else ()
        state = None if tensors.state is None else hash((shared.model.training, tensors.state, variants))
        shared.plans.begin(state)
        optimizer = shared.state.optimizer()
        held = held_by(optimizer) if optimizer is not None else []
        others = {id(one): one for one in held if id(one) not in tensors.numbers}.values()
        self._gradients = Gradients([*tensors.parameters, *others], names=partial(trained, shared.model, optimizer))
        self._inputs = NoteInputs(shared.saved, self._foresee)
        self._key: tuple[Any, ...] | None = None  # None: the step has saved nothing so far
        self._planned: Planned | None = None  # what the step follows, as far as it has come
        self._larger: Planned | None = None  # while it follows a plan for smaller steps, the one that it has beside
        self._foreseen: Planned | None = None  # a plan for steps of its sizes, which no step has had so far
        self._mistaken: list[tuple[Planned, int]] = []  # plans that have a storage made by what did not make it
        self._is_planned_for = True  # whether what is measured is for a plan
        self._is_exact = True  # whether that is for steps of just these sizes, and not for larger ones
        self._naming: Naming | None = None
        self._span = Span(shared.clock)
        self._tape = self._make_tape()
        self._watched: WatchedCalls | None = None
        sees_all = tensors.asks_for_modes or shared.runs_compiled
        sees_all |= shared.compiled is not None and not shared.compiled.are_whole
        if self._tape is not None and not sees_all:
            self._watched = WatchedCalls(self._tape, may_go=shared.compiled is None)
        shared.saved.begin(tensors.fixed, self._choose, self._change, tape=self._tape, watched=self._watched)
        if shared.plans.in_force is None and not shared.unlimited:
            self._naming = Naming(shared.model, shared.saved.blocks)

    def _make_tape(self) -> Tape | None:
        """What records the step's operations; None where no plan needs them."""
        shared = self._shared
        is_outdated = partial(shared.planner.is_outdated, base_bytes=self._base_bytes)
        # With nowhere to move tensors, a step that no plan is for keeps the budget by computing again alone.
        may_be_needed = shared.residency.default_tier == KEEP or shared.plans.needs_operations(is_outdated)
        if not shared.recompute or not may_be_needed:
            return None
        return Tape(shared.device, is_leaf=shared.saved.is_leaf, mark=shared.clock.mark)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Sees what the model's forward and backward do."""
        saved = self._shared.saved
        mode: AbstractContextManager[Any] = self._watched or self._tape or nullcontext()
        num_compiled = self._shared.num_compiled()
        try:
            with (
                self._shared.model.register_forward_pre_hook(self._inputs, with_kwargs=True),
                self._shared.losses.placed(),
                mode,
                saved_tensors_hooks(*hooks_of(saved)),
            ):
                yield
        finally:
            if self._naming is not None:
                self._naming.stop()
            # Dynamo would compile a function once with the mode and once without it.
            self._shared.runs_compiled |= self._shared.num_compiled() != num_compiled

    def _foresee(self) -> None:
        """Called before the model's first forward: plans a step of sizes that were never seen.

        Raises:
            BudgetError: no plan fits.
        """
        shared = self._shared
        if self._key is not None or shared.unlimited or shared.plans.from_user is not None:
            return
        assert self._inputs.shapes is not None
        try:
            self._foreseen = foresee(
                *(shared.plans, shared.planner, self._inputs.shapes, self._key_of_state()),
                base_bytes=self._base_bytes,
                buffers=shared.buffers(),
            )
        except BudgetError as error:
            if shared.compiled is None or shared.compiled.fixed:  # else other variants may fit
                raise with_part_that_fits(shared, error, self._inputs) from None
        if self._foreseen is not None:  # the step's time is without that of planning it
            self._span = Span(shared.clock)

    def _key_of_state(self) -> tuple[int, ...]:
        """What tells kinds of steps apart beside their first saved tensor: on a GPU, gradients that exist are added to,
        and others are allocated, so the peaks differ."""
        return (self._gradients.nbytes,) if self._fast.counts_all else ()

    def _choose(self, key: tuple[Any, ...]) -> Choice:
        """Called at the step's first save: the plan for a step that begins like this, and who measures it."""
        shared, plans, planner = self._shared, self._shared.plans, self._shared.planner
        self._key = key = (*key, *self._key_of_state())
        misuse.check_first_save(shared.model)
        if shared.unlimited:
            return Choice(None)
        if plans.from_user is not None:
            check_inputs(plans.from_user, self._inputs.shapes)
        planned = plans.get(key)
        if planned is not None and planned.is_unrecorded and self._tape is not None:
            plans.drop(planned)
            planned = None
        if planned is not None and planner.is_outdated(planned, self._base_bytes):  # pragma: gpu
            planned, before = planner.renewed(planned, self._base_bytes), planned
            shared.put(planned, before)
        if planned is None:
            planned = plans.covering(key)
            if planned is not None and planner.is_outdated(planned, self._base_bytes):
                planned = None
            if planned is not None and self._tape is not None and is_to_be_traced(planned, self._inputs.shapes):
                return self._traced()
            self._is_exact = planned is None
        if planned is None and self._foreseen is not None and self._foreseen.kind.key == key:
            planned = self._foreseen
            shared.put(planned)
        self._planned = planned
        if planned is None:
            return self._traced()
        planned.num_untold += planned.is_to_tell and not planned.recomputes  # else there is a tape anyway
        is_tight = plans.have_left or planned.is_tight(shared.residency.limit_bytes)
        has_tight_ram = shared.residency.default_tier == KEEP and is_tight
        others = tuple(plans.near(planned, key))
        smaller = plan_for(planned, self._inputs.shapes) if not self._is_exact else None
        if smaller is not None and not planner.is_outdated(smaller, self._base_bytes):
            self._planned, self._larger, planned = smaller, planned, smaller
        measure = self._measure(planned)
        turned = self._span.turned if measure is None else None
        if turned is not None and self._fast.is_beside_host and self._larger is None and planned.is_to_tell_waits(key):
            shared.residency.waits = self._span.note_waits()
        return Choice(planned.plan, measure, self._is_exact, others, has_tight_ram, turned)

    def _traced(self) -> Choice:
        """No plan is followed from here on, and a trace is made for one."""
        shared = self._shared
        shared.watch.is_new_kind = True
        self._naming = self._naming or Naming(shared.model, shared.saved.blocks)
        return Choice(None, self._recorder())

    def _recorder(self) -> Recorder:
        staging_bytes = self._shared.residency.staging_bytes
        return Recorder(self._fast, self._span, base_bytes=self._base_bytes, staging_bytes=staging_bytes)

    def _measure(self, planned: Planned) -> Recorder | Pace | None:
        """Who measures a step that follows a plan."""
        if not self._shared.plans.is_measured_again(planned) or self._shared.retiming is not None:
            return None
        assert self._key is not None
        if self._fast.is_beside_host and not planned.is_timed_by(self._key):
            return None
        if planned.num_measured == 2:  # pragma: gpu
            planned.num_measured = 3
            return None
        is_known = planned.num_measured > 1 or planned.is_foreseen  # all but its times
        if not self._fast.counts_all or is_known or not self._is_exact:
            return Pace(self._fast, self._span)
        return self._recorder()

    def _change(self, departure: Departure, before: Table, table_of: TableOf) -> Choice:
        """Called where the step turns out to be another one than its plan is for: the plan to go on with, or who
        measures the rest of the step."""
        shared, plans, planned = self._shared, self._shared.plans, self._planned
        assert planned is not None
        assert self._key is not None
        if departure.is_made_otherwise:
            self._mistaken.append((planned, departure.ordinal))
        larger, self._larger, is_known = self._larger, None, False
        self._planned = larger or planned
        for other, is_exact in plans.others(planned, self._key):
            assert other.plan is not None
            table = table_of(other.plan)
            if shared.planner.is_outdated(other, self._base_bytes):
                continue
            if not departure.is_of(table, before, is_exact=is_exact):
                continue
            plans.use(other)  # the next step may begin with it
            self._mistaken += [(other, at) for at in departure.made_otherwise_than(table)]
            if other is larger:
                give_up(planned, shared.planner, "a step was not as foreseen.")
            if departure.may_follow(table):
                self._planned, self._is_exact = other, is_exact
                return Choice(other.plan, None, is_exact)
            is_known = True
            break
        # What backward has let go of by now has the sizes of the plan, which may be for larger steps.
        has_all_sizes = self._is_exact or departure.kind == PACK
        self._is_planned_for = not is_known and plans.left() and not planned.is_from_user and has_all_sizes
        # With nowhere to move tensors, what is recorded tells what can be computed again.
        is_needed = self._is_planned_for or shared.residency.default_tier == KEEP
        if not is_needed or (shared.recompute and self._tape is None):
            return Choice(None)
        return self._traced()

    # ------------------------------------------------------------------ its end

    def leave(self) -> None:
        """The step has ended without an error: counts it, and concludes what follows from it; see `Shared.conclude`.

        Raises:
            BudgetError: the step needs more than the budget.
        """
        shared = self._shared
        ended = self._end()
        shared.conclude(partial(conclude, shared, ended), key=ended.key, was_measured=ended.recorder is not None)
        shared.watch.step_ended(self._gradients, self._inputs, shared.saved, has_saved=self._key is not None)
        shared.learn()

    def _end(self) -> Ended:
        shared = self._shared
        left_plan, recorder = shared.saved.left_plan, shared.saved.end()
        self._span.end()
        if shared.compiled is not None:
            shared.compiled.step_ended()
        self._count(recorder, self._planned if not left_plan else None)
        return Ended(
            key=self._key,
            inputs=self._inputs,
            base_bytes=self._base_bytes,
            reserve_bytes=shared.reserve_bytes() if recorder is not None else 0,
            recorder=recorder,
            last=self._planned,
            larger=self._larger,
            foreseen=self._foreseen,
            mistaken=tuple(self._mistaken),
            left_plan=left_plan,
            is_planned_for=self._is_planned_for,
            is_exact=self._is_exact,
            is_recorded=self._tape is not None,
        )

    def _count(self, recorder: Recorder | Pace | None, planned: Planned | None) -> None:
        """Takes note of what the step took.

        Args:
            recorder: who has measured it.
            planned: what it has followed to its end.
        """
        followed = planned if recorder is None else None
        shared, fast, vram = self._shared, self._fast, self._fast.peak_bytes()
        if isinstance(recorder, Recorder):
            vram = max(vram, recorder.peak_bytes)
            if fast.counts_all and vram > max(shared.tiers.fast_bytes, shared.measured.highest_vram_bytes):
                self._note_over(vram)
        elif planned is not None and fast.counts_all:
            planned.took_bytes(vram, is_exact=self._is_exact)
        figures = Figures(
            step_ms=0.0 if fast.is_beside_host else self._span.took().step_s * 1e3,
            vram_bytes=vram,
            ram_bytes=shared.tiers.ram_bytes() if fast.counts_all else shared.residency.peak_bytes,
            disk_bytes=shared.tiers.disk_bytes(),
        )
        times = 0.0
        if followed is not None:
            shared.plans.followed(followed)
            sizes = self._inputs.shapes if fast.is_beside_host else None
            times = 1.0 if self._is_exact else shared.plans.nearly(followed, self._key, sizes)
        if self._larger is not None:
            times = 0.0
        is_over = fast.counts_all and vram > shared.tiers.fast_bytes and not isinstance(recorder, Recorder)
        if planned is not None and is_over and not times:
            if self._larger is not None:
                give_up(planned, shared.planner, f"a step took {format_size(vram)}, more than the budget.")
            elif shared.planner.learn_peak(planned, vram):
                shared.measured.plan_changed()
        if times and followed is not shared.plans.in_force:
            shared.plans.in_force = followed
            shared.measured.plan_changed()
        shared.measured.count(figures, self._span, times=times, borrowed=followed is not None and not times)

    def _note_over(self, vram_bytes: int) -> None:
        """A step that was measured took more than the budget, and than all before."""
        planned, budget = self._planned, format_size(self._shared.tiers.fast_bytes)
        said = f"A step that was measured took {format_size(vram_bytes)} of {self._fast.name}={budget}"
        if planned is not None and planned.plan is not None:
            said += f", where {format_size(planned.plan.forecast.vram_bytes)} were forecast"
        self._shared.planner.lessons.append(f"{said}.")

    def ran_out(self, error: BaseException) -> OutOfVRAMError:
        """The device ran out of memory: drops what the step saved, and plans such steps anew, with more slack."""
        shared = self._shared
        budget = 0 if shared.unlimited else shared.tiers.fast_bytes
        held = shared.residency.resident_bytes
        shortage = Shortage.read(error, self._fast, held_bytes=held, budget_bytes=budget)
        drop_step(shared.saved, error)
        planned = self._larger or self._planned
        if self._larger is not None and self._planned is not None:
            give_up(self._planned, shared.planner, "the device ran out of memory.")
        anew = shared.planner.plan_after(shortage, planned) if planned is not None else None
        if planned is not None and anew is not None and shared.plans.replace(planned, anew):
            shared.measured.plan_changed()
        if self._fast.counts_all and not shared.unlimited:
            keep_more_free(shared.residency, shortage)
        return shortage.error(planned_anew=anew is not None, lost=self._gradients.drop())
