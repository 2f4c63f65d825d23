"""One training step: made at its entry, dropped at its exit with all that belongs to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from torchstorm.errors import BudgetError, OutOfVRAMError, UnsupportedError
from torchstorm.memory.allocated import allocated_bytes, peak_allocated_bytes
from torchstorm.offload import misuse
from torchstorm.offload import torch_private as private
from torchstorm.offload.recompute.tape import Tape
from torchstorm.offload.recompute.watched import WatchedCalls
from torchstorm.offload.replan.given import check_inputs
from torchstorm.offload.replan.plans import Planned
from torchstorm.offload.replan.workload import state_of, subject_of
from torchstorm.offload.run.shortage import Gradients, Shortage, drop_step, held_by, keep_more_free, trained
from torchstorm.offload.run.split import with_micro_batch
from torchstorm.offload.step.clock import seconds_between
from torchstorm.offload.step.inputs import NoteInputs, storages_of
from torchstorm.offload.step.naming import Naming
from torchstorm.offload.step.pace import Pace
from torchstorm.offload.step.running import Choice
from torchstorm.offload.step.shared import Shared
from torchstorm.offload.step.tracing import Recorder
from torchstorm.plan.forecast import Figures

_FREE = 1.01  # a plan that takes so little longer than the model's own compute needs nothing better


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
        self._device = shared.device
        if self._device.type == "cuda":  # pragma: gpu
            if torch.cuda.is_current_stream_capturing():
                raise UnsupportedError("A step cannot be captured into a CUDA graph, which would lose its waits.")
            torch.cuda.reset_peak_memory_stats(self._device)
            shared.base_bytes = allocated_bytes(self._device) - shared.residency.resident_bytes
        self._base_bytes = shared.base_bytes
        for tier in shared.stack.tiers.values():
            tier.reset_peak()
        shared.learn()
        tensors = shared.tensors
        tensors.read()
        parameters, buffers = tensors.parameters, tensors.buffers
        misuse.check_unmoved(shared.model, parameters, self._device)
        shared.plans.begin(state_of(shared.model, parameters))
        fixed = storages_of([*parameters, *buffers])
        optimizer = shared.state.optimizer()
        self._gradients = Gradients(
            parameters if optimizer is None else {id(one): one for one in (*parameters, *held_by(optimizer))}.values(),
            names=partial(trained, shared.model, optimizer),
        )
        self._inputs = NoteInputs(shared.saved)
        self._key: tuple[Any, ...] | None = None  # None: the step has saved nothing so far
        self._borrowed: Planned | None = None  # a plan that was made for larger steps
        self._naming: Naming | None = None
        self._start = shared.clock.mark()
        self._tape = self._make_tape()
        self._watched: WatchedCalls | None = None
        sees_all = tensors.asks_for_modes or shared.compiled is not None or shared.runs_compiled
        if self._tape is not None and not sees_all:
            saved = shared.saved
            self._watched = WatchedCalls(self._tape, moment=lambda: saved.moment)
        shared.saved.begin(fixed, self._choose, tape=self._tape, watched=self._watched)
        if shared.plans.in_force is None and not shared.unlimited:
            self._naming = Naming(shared.model, shared.saved.blocks)

    def _make_tape(self) -> Tape | None:
        """What records the step's operations; None where no plan needs them."""
        shared = self._shared
        is_outdated = partial(shared.planner.is_outdated, base_bytes=self._base_bytes)
        if not shared.recompute or not shared.plans.needs_operations(is_outdated):
            return None
        return Tape(self._device, is_leaf=shared.saved.is_leaf, mark=shared.clock.mark)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Sees what the model's forward and backward do."""
        saved = self._shared.saved
        mode: AbstractContextManager[Any] = self._watched or self._tape or nullcontext()
        num_compiled = private.num_compiled()
        try:
            with (
                self._shared.model.register_forward_pre_hook(self._inputs, with_kwargs=True),
                mode,
                saved_tensors_hooks(saved.pack, saved.unpack),
            ):
                yield
        finally:
            if self._naming is not None:
                self._naming.stop()
            # Dynamo would compile a function once with the mode and once without it.
            self._shared.runs_compiled |= private.num_compiled() != num_compiled

    def _choose(self, key: tuple[Any, ...]) -> Choice:
        """Called at the step's first save: the plan for a step that begins like this, and who measures it."""
        shared, plans, planner = self._shared, self._shared.plans, self._shared.planner
        if self._device.type == "cuda":  # pragma: gpu
            # A step that finds gradients adds to them, and one that finds none allocates them: the peaks differ.
            key = (*key, self._gradients.nbytes)
        self._key = key
        misuse.check_first_save(shared.model)
        if shared.unlimited:
            return None, None, True
        if self._tape is not None and plans.take_unrecorded(key):
            plans.drop(key)
        if plans.given is not None:
            check_inputs(plans.given, self._inputs.shapes)
        planned = plans.get(key)
        if planned is not None and planner.is_outdated(planned, self._base_bytes):  # pragma: gpu
            planned = planner.renewed(planned, self._base_bytes)
            plans.put(key, planned)
            shared.measured.plan_changed()
        if planned is None:
            self._borrowed = plans.covering(key)
            if self._borrowed is not None and not planner.is_outdated(self._borrowed, self._base_bytes):
                return self._borrowed.plan, None, False
            self._borrowed = None
        if planned is not None and not plans.is_measured_again(planned):
            return planned.plan, None, True
        if planned is not None and planned.num_measured == 2:  # pragma: gpu
            planned.num_measured = 3
            return planned.plan, None, True
        if planned is not None and (self._device.type == "cpu" or planned.num_measured > 1):
            return planned.plan, Pace(self._device, self._start), True
        recorder = Recorder(
            self._device,
            self._start,
            base_bytes=self._base_bytes,
            staging_bytes=shared.residency.staging_bytes,
        )
        if planned is None:
            shared.watch.is_new_kind = True
            self._naming = self._naming or Naming(shared.model, shared.saved.blocks)
        return planned.plan if planned else None, recorder, True

    # ------------------------------------------------------------------ its end

    def leave(self) -> None:
        """The step has ended without an error: counts it, and plans the next ones of its kind where it was measured.

        Raises:
            BudgetError: the step needs more than the budget.
        """
        self._conclude()
        shared = self._shared
        shared.watch.step_ended(self._gradients, self._inputs, shared.saved, has_saved=self._key is not None)

    def _conclude(self) -> None:
        shared, plans = self._shared, self._shared.plans
        left_plan, shortfall = shared.saved.left_plan, shared.residency.shortfall
        recorder = shared.saved.end()
        stop = shared.clock.mark()
        planned = plans.get(self._key) if self._key is not None else None
        followed = planned is not None and not left_plan and recorder is None
        borrowed = self._borrowed is not None and not left_plan
        self._count(stop, recorder, planned if followed else None, borrowed=borrowed)
        other_variants = shared.compiled is not None and shared.compiled.settle()
        if left_plan and self._key is not None and self._borrowed is not None:
            plans.note_own(self._key)
        elif left_plan and self._key is not None:
            dropped = plans.drop(self._key)
            if dropped is not None and dropped.is_given:
                shared.planner.lessons.append("The given plan is for another step: a new plan is made for these steps.")
        elif recorder is not None and self._key is not None and not other_variants:
            found = self._plan_next(self._key, recorder, planned)
            if found is None:
                return  # the next step is another one, and measured
            plans.put(self._key, found)
            shared.measured.plan_changed()
            shared.stack.trim(found.forecast)
        if shortfall is not None:
            is_measured = recorder is not None and not left_plan
            shared.planner.lessons.append(shared.stack.judge_shortfall(*shortfall, is_measured=is_measured))

    def _plan_next(self, key: tuple[Any, ...], recorder: Recorder | Pace, planned: Planned | None) -> Planned | None:
        """The plan for further steps of this kind, by what this one has measured; None where compiled blocks take other
        variants first.

        Raises:
            BudgetError: none fits.
        """
        shared = self._shared
        if isinstance(recorder, Pace):
            assert planned is not None
            assert planned.plan is not None
            trace = recorder.refine(planned.trace, planned.plan, shared.planner.machine())
            retimed = shared.planner.retimed(planned, trace, num_measured=planned.num_measured + 1)
            if retimed is not None:
                return retimed
        else:
            trace = recorder.refine(planned.trace) if planned is not None else recorder.trace()
        num_measured = planned.num_measured + 1 if planned else 1
        base = self._base_bytes if planned else trace.base_bytes + shared.reserve_bytes()
        blocks = shared.compiled if planned is None else None
        quick_plan = partial(shared.planner.quick_plan, base_bytes=base)
        if blocks is not None and blocks.rechoose(trace, quick_plan):
            return None
        blind = planned is None and shared.recompute and self._tape is None
        try:
            found = shared.planner.plan(trace, base_bytes=base, num_measured=num_measured, before=planned)
            blind = blind and found.forecast.step_ms > trace.compute_s * 1e3 * _FREE
        except BudgetError as error:
            if planned is not None and planned.plan is not None and isinstance(recorder, Pace):
                found = planned  # only times changed: what fitted before still fits
                found.num_measured = num_measured
            elif blocks is not None and blocks.rechoose(trace, quick_plan, failed=True):
                return None
            elif not blind and (
                shared.residency.shortfall is not None
                or not shared.stack.allows(shared.measured.last, base - trace.base_bytes)
            ):
                raise with_micro_batch(
                    error,
                    num_samples=self._inputs.num_samples if error.tier == shared.stack.fast_tier else 0,
                    fixed_bytes=shared.fixed_bytes(error.tier),
                ) from None
            else:
                # Storages that stay saved after their first use (retain_graph, double backward) may leave again in
                # between, which no plan foresees: such steps go on as this one. Or the next one is recorded.
                assert shared.measured.last is not None
                found = Planned(None, trace, shared.measured.last, base, shared.plans.num_to_measure)
        if blind:
            shared.plans.note_unrecorded(key)
        if planned is None:
            found.subject = replace(subject_of(shared.model), inputs=self._inputs.shapes or ())
        return found

    def _count(
        self, stop: object, recorder: Recorder | Pace | None, followed: Planned | None, *, borrowed: bool
    ) -> None:
        """Takes note of what the step took."""
        shared, vram = self._shared, 0
        if self._device.type == "cuda":  # pragma: gpu
            vram = peak_allocated_bytes(self._device)
            if isinstance(recorder, Recorder):
                vram = max(vram, recorder.peak_bytes)
        on_cpu = self._device.type == "cpu"
        figures = Figures(
            step_ms=seconds_between(self._start, stop) * 1e3 if on_cpu else 0.0,
            vram_bytes=vram,
            ram_bytes=shared.residency.peak_bytes if on_cpu else shared.stack.ram_bytes(),
            disk_bytes=shared.stack.disk_bytes(),
        )
        if followed is not None and followed is not shared.plans.in_force:
            shared.plans.in_force = followed
            shared.measured.plan_changed()
        shared.measured.count(figures, (self._start, stop), followed=followed is not None, borrowed=borrowed)

    def ran_out(self, error: BaseException) -> OutOfVRAMError:
        """The device ran out of memory: drops what the step saved, and plans such steps anew, with more slack."""
        shared = self._shared
        budget = 0 if shared.unlimited else shared.stack.fast_bytes
        held = shared.residency.resident_bytes
        shortage = Shortage.read(error, self._device, held_bytes=held, budget_bytes=budget)
        drop_step(shared.saved, error)
        planned = self._borrowed or (shared.plans.get(self._key) if self._key is not None else None)
        anew = shared.planner.plan_after(shortage, planned) if planned is not None else None
        if planned is not None and anew is not None and shared.plans.replace(planned, anew):
            shared.measured.plan_changed()
        if self._device.type == "cuda" and not shared.unlimited:  # pragma: gpu
            keep_more_free(shared.residency, shortage)
        return shortage.error(planned_anew=anew is not None, lost=self._gradients.drop())
