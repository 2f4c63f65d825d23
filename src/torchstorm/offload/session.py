"""Session: trains an unmodified model within a memory budget.

The first step is measured. From then on every step of the same shape follows a plan. The budget: `vram` is the peak of
allocated device memory within a step, weights included. `ram` on CUDA is the pinned arena and staging; on CPU it is the
bytes of saved-tensor storages (each once; weights and gradients not counted) from the time when autograd saves them
until it releases them, with staging and prefetched ones. `disk` is the bytes in spill files.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch.autograd.graph import saved_tensors_hooks

from torchstorm.errors import BudgetError, OutOfVRAMError, StorageError, UnsupportedError
from torchstorm.offload import misuse, oom
from torchstorm.offload.clock import CpuClock, seconds_between
from torchstorm.offload.compiled import CompiledBlocks, compile_blocks
from torchstorm.offload.garbage import rare_collections
from torchstorm.offload.given import Sizes, check_budget, check_inputs, read_plan
from torchstorm.offload.inputs import NoteInputs, storages_of
from torchstorm.offload.measured import Measured
from torchstorm.offload.naming import Naming
from torchstorm.offload.optimizer_state import OptimizerState
from torchstorm.offload.plans import Planned, Planner, Plans
from torchstorm.offload.record import Recorder
from torchstorm.offload.report import Report
from torchstorm.offload.residency import Residency
from torchstorm.offload.run import RunMemory, Runner
from torchstorm.offload.saved import SavedTensors
from torchstorm.offload.split import with_micro_batch
from torchstorm.offload.stack import Stack, build_stack
from torchstorm.offload.subject import state_of, subject_of
from torchstorm.offload.tape import Tape
from torchstorm.plan.forecast import Figures
from torchstorm.plan.plan import Plan
from torchstorm.transfer.engine import StreamClock

Batch = TypeVar("Batch")


class Session:
    """Keeps the saved tensors of a model's training steps within a budget.

    Args:
        model: any nn.Module; it is not modified.
        vram: budget for allocated device memory, int bytes or "24GiB". Default: 90 % of the free memory. Only on CUDA.
        ram: budget for host memory. Default: 50 % of the memory available to the machine or cgroup.
        disk: "DIR" or "DIR:SIZE", str or Path; spill files are in a new directory below DIR. Default: no disk.
        optimizer: memory for its state is reserved before the state exists. Default: twice the parameters' bytes.
            The Session holds only a weak reference, so that a replaced optimizer frees its state.
        plan: a `Plan`, or a file from `Plan.save`, that steps follow from the first one on. Budgets that are left out
            are those of the plan.
        recompute: whether tensors may be recomputed. Otherwise they are only moved, and operations are not recorded.
        check: compares checksums of all moved and recomputed tensors, and overwrites freed buffers. Slow.
        unlimited: keeps everything, and only measures memory.

    Raises:
        SizeError, ConfigError: a size or a path is invalid.
        DeviceError: `vram` was given for a model on the CPU, or the model is on several devices.
        BudgetError: the weights or the plan do not fit.
        PlanError: the plan cannot be read, or is for another model or device.
        StorageError: the directory cannot be used.
        UnsupportedError: the model is compiled as a whole; use `compile` to compile it block by block.

    Warns:
        TorchstormWarning: correct results, but no budget is kept or nothing is trained. Once per kind.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        vram: int | str | None = None,
        ram: int | str | None = None,
        disk: str | os.PathLike[str] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        plan: Plan | str | os.PathLike[str] | None = None,
        recompute: bool = True,
        check: bool = False,
        unlimited: bool = False,
    ) -> None:
        misuse.check_model(model)
        misuse.check_optimizer(optimizer)
        given = read_plan(plan, model, recompute=recompute and not unlimited) if plan is not None else None
        sizes = Sizes(vram=vram, ram=ram, disk=disk).with_those_of(given)
        self._model = model
        self._state = OptimizerState(model, optimizer)
        self._watch = misuse.Watch(model, self._state.optimizer)
        self._unlimited = unlimited
        self._recompute = recompute and not unlimited
        self._stack: Stack = build_stack(
            model, vram=sizes.vram, ram=sizes.ram, disk=sizes.disk, check=check, unlimited=unlimited
        )
        if given is not None:
            check_budget(given, self._stack.budget)
        self.device = self._stack.device
        self._clock = StreamClock(self.device) if self.device.type == "cuda" else CpuClock()
        self._residency = Residency(
            self.device,
            limit_bytes=self._stack.fast_bytes,
            tiers=self._stack.tiers,
            default_tier=self._stack.default_tier,
            empty=self._stack.empty,
            staging_bytes=self._stack.staging_bytes,
            check=check,
        )
        self._saved = SavedTensors(self._residency)
        # One is traced; on CUDA one asks for memory and one only runs, for the clock rate to settle; one takes times.
        self._plans = Plans(given, 4 if self.device.type == "cuda" else 2)
        self._key: tuple[Any, ...] | None = None  # None: the step has saved nothing so far
        self._base_bytes = 0
        self._running = threading.Lock()
        self._measured = Measured()
        self._planner = Planner(self._stack)
        self._runs = RunMemory()
        self._naming: Naming | None = None
        self._compiled: CompiledBlocks | None = None

    # ------------------------------------------------------------------ the step

    def step(self) -> misuse.StepContext:
        """One training step, for `with` or as a decorator: forward and backward inside it, the optimizer after it.

        Raises:
            BudgetError: the step needs more than the budget. Raised at the end of the step, before any weight changes.
            OutOfVRAMError: the device ran out of memory. The step and its new gradients are dropped, and a new plan is
                made: repeat the step. Changes of buffers remain, and values added to existing gradients, which the
                error names.
            StorageError: a disk failed. Weights and optimizer state are unchanged, and spill files are removed.
            UnsupportedError: the step contains something that cannot be exact, or the model is compiled as a whole.
            ConfigError: this Session is already in a step.
            DeviceError: the model was moved to another device.
        """
        return misuse.StepContext(self._running, self._step, self._watch)

    def _step(self) -> Iterator[None]:
        if self._saved.closed:
            raise StorageError(f"This Session is closed ({self._saved.closed}); create a new one.")
        tape = self._enter()
        self._inputs = NoteInputs(self._saved)
        inputs = self._model.register_forward_pre_hook(self._inputs, with_kwargs=True)
        try:
            with inputs, rare_collections(), tape, saved_tensors_hooks(self._saved.pack, self._saved.unpack):
                yield
        except BaseException as error:
            if oom.is_out_of_memory(error):
                raise self._ran_out(error) from error
            self._saved.end()
            told = misuse.better_said(error, self._model, closed=self._saved.closed)
            if isinstance(error, StorageError):
                self.close(reason=f"after {type(error).__name__}: {error}")
            if told is not None:
                raise told from error
            raise
        finally:
            if self._naming is not None:
                self._naming.stop()
                self._naming = None
        self._leave()
        self._watch.step_ended(self._gradients, self._inputs, self._saved, has_saved=self._key is not None)

    def _enter(self) -> AbstractContextManager[Any]:
        if self.device.type == "cuda":  # pragma: gpu
            if torch.cuda.is_current_stream_capturing():
                raise UnsupportedError("A step cannot be captured into a CUDA graph, which would lose its waits.")
            torch.cuda.reset_peak_memory_stats(self.device)
            self._base_bytes = torch.cuda.memory_allocated(self.device) - self._residency.resident_bytes
        for tier in self._stack.tiers.values():
            tier.reset_peak()
        self._learn()
        parameters = misuse.unmoved_parameters(self._model, self.device)
        self._plans.begin(state_of(self._model, parameters))
        fixed = storages_of([*parameters, *self._model.buffers()])
        self._gradients = oom.Gradients(oom.trained(self._model, self._state.optimizer()))
        self._key = None
        self._start = self._clock.mark()
        tape, is_outdated = None, partial(self._planner.is_outdated, base_bytes=self._base_bytes)
        if self._recompute and self._plans.needs_operations(is_outdated):
            tape = Tape(self.device, is_leaf=self._saved.is_leaf, mark=self._clock.mark)
        self._saved.begin(fixed, self._choose, tape=tape)
        self._is_recorded = tape is not None
        if self._plans.in_force is None and not self._unlimited:
            self._naming = Naming(self._model, self._saved.blocks)
        return tape or nullcontext()

    def _choose(self, key: tuple[Any, ...]) -> tuple[Plan | None, Recorder | None]:
        """Called at the step's first save: the plan for a step that begins like this, and who measures it."""
        if self.device.type == "cuda":  # pragma: gpu
            # A step that finds gradients adds to them, and one that finds none allocates them: the peaks differ.
            key = (*key, self._gradients.nbytes)
        self._key = key
        misuse.check_first_save(self._model)
        if self._unlimited:
            return None, None
        if self._is_recorded and self._plans.take_unrecorded(key):
            self._plans.drop(key)
        if self._plans.given is not None:
            check_inputs(self._plans.given, self._inputs.shapes)
        planned = self._plans.get(key)
        if planned is not None and self._planner.is_outdated(planned, self._base_bytes):  # pragma: gpu
            planned = self._planner.renewed(planned, self._base_bytes)
            self._plans.put(key, planned)
            self._measured.plan_changed()
        if planned is not None and not self._plans.is_measured_again(planned):
            return planned.plan, None
        if planned is not None and planned.num_measured == 2:  # pragma: gpu
            planned.num_measured = 3
            return planned.plan, None
        recorder = Recorder(
            self.device,
            self._start,
            base_bytes=self._base_bytes,
            staging_bytes=self._residency.staging_bytes,
            memory=planned is None or planned.num_measured == 1,
        )
        if planned is None:
            self._watch.is_new_kind = True
            self._naming = self._naming or Naming(self._model, self._saved.blocks)
        return planned.plan if planned else None, recorder

    def _leave(self) -> None:
        left_plan, shortfall = self._saved.left_plan, self._residency.shortfall
        recorder = self._saved.end()
        stop = self._clock.mark()
        key, planned = self._key, self._plans.get(self._key) if self._key is not None else None
        followed = planned is not None and not left_plan and recorder is None
        self._count(stop, recorder, planned if followed else None)
        other_variants = self._compiled is not None and self._compiled.settle()
        if left_plan and key is not None:
            dropped = self._plans.drop(key)
            if dropped is not None and dropped.is_given:
                self._planner.lessons.append("The given plan is for another step: a new plan is made for these steps.")
        elif recorder is not None and key is not None and not other_variants:
            trace = recorder.refine(planned.trace) if planned else recorder.trace()
            num_measured = planned.num_measured + 1 if planned else 1
            base = self._base_bytes if planned else trace.base_bytes + self._reserve_bytes()
            blocks = self._compiled if planned is None else None
            quick_plan = partial(self._planner.quick_plan, base_bytes=base)
            if blocks is not None and blocks.rechoose(trace, quick_plan):
                return  # the next step is another one, and measured
            blind = planned is None and self._recompute and not self._is_recorded
            try:
                found = self._planner.plan(trace, base_bytes=base, num_measured=num_measured, before=planned)
                blind = blind and found.forecast.step_ms > trace.compute_s * 1e3 * _FREE
            except BudgetError as error:
                if planned is not None and planned.plan is not None and not recorder.asks_memory:
                    found = planned  # only times changed: what fitted before still fits
                    found.num_measured = num_measured
                elif blocks is not None and blocks.rechoose(trace, quick_plan, failed=True):
                    return
                elif not blind and (
                    shortfall is not None or not self._stack.allows(self._measured.last, base - trace.base_bytes)
                ):
                    raise with_micro_batch(
                        error,
                        num_samples=self._inputs.num_samples if error.tier == self._stack.fast_tier else 0,
                        fixed_bytes=self._fixed_bytes(error.tier),
                    ) from None
                else:
                    # Storages that stay saved after their first use (retain_graph, double backward) may leave again in
                    # between, which no plan foresees: such steps go on as this one. Or the next one is recorded.
                    assert self._measured.last is not None
                    found = Planned(None, trace, self._measured.last, base, self._plans.num_to_measure)
            if blind:
                self._plans.note_unrecorded(key)
            if planned is None:
                found.subject = replace(subject_of(self._model), inputs=self._inputs.shapes or ())
            self._plans.put(key, found)
            self._measured.plan_changed()
            self._stack.trim(found.forecast)
        if shortfall is not None:
            is_measured = recorder is not None and not left_plan
            self._planner.lessons.append(self._stack.judge_shortfall(*shortfall, is_measured=is_measured))

    def _ran_out(self, error: BaseException) -> OutOfVRAMError:
        """Drops the running step and plans such steps anew, with more slack."""
        held, budget = self._residency.resident_bytes, 0 if self._unlimited else self._stack.fast_bytes
        shortage = oom.Shortage.read(error, self.device, held_bytes=held, budget_bytes=budget)
        oom.drop_step(self._saved, error)
        planned = self._plans.get(self._key) if self._key is not None else None
        anew = self._planner.plan_after(shortage, planned) if planned is not None else None
        if anew is not None and self._key is not None:
            self._plans.put(self._key, anew)
            self._measured.plan_changed()
        if self.device.type == "cuda" and not self._unlimited:  # pragma: gpu
            oom.keep_more_free(self._residency, shortage)
        return shortage.error(planned_anew=anew is not None, lost=self._gradients.drop())

    def _fixed_bytes(self, tier: str) -> int:
        """What a step needs on a tier however small its batch is, as far as is known; what plans keep free included."""
        spare: int = getattr(self._stack.spare, tier)
        if tier != self._stack.fast_tier:
            return spare
        return self._base_bytes + self._reserve_bytes() + self._residency.staging_bytes + spare

    def _reserve_bytes(self) -> int:
        """Optimizer state that does not exist yet and will."""
        if self.device.type == "cpu" or (self._state.optimizer() is None and self._measured.num_steps > 1):
            return 0
        return self._state.missing_bytes()  # pragma: gpu

    # ------------------------------------------------------------------ watching

    def _count(self, stop: object, recorder: Recorder | None, followed: Planned | None) -> None:
        vram = 0
        if self.device.type == "cuda":  # pragma: gpu
            vram = torch.cuda.max_memory_allocated(self.device)
            if recorder is not None:
                vram = max(vram, recorder.peak_bytes)
        figures = Figures(
            step_ms=0.0 if self.device.type == "cuda" else seconds_between(self._start, stop) * 1e3,
            vram_bytes=vram,
            ram_bytes=self._residency.peak_bytes if self.device.type == "cpu" else self._stack.ram_bytes(),
            disk_bytes=self._stack.disk_bytes(),
        )
        if followed is not None and followed is not self._plans.in_force:
            self._plans.in_force = followed
            self._measured.plan_changed()
        self._measured.count(figures, (self._start, stop), followed=followed is not None)

    def _learn(self) -> None:
        """Compares the steps that have ended with the forecast of the plan in force."""
        if self._planner.learn(self._plans, self._measured.new_times_s(), self._measured.new_vram_bytes()):
            self._measured.plan_changed()

    def run(
        self,
        fn: Callable[[Batch], tuple[torch.Tensor, torch.Tensor | float]],
        batch: Batch,
        *,
        micro_batches: int | None = None,
    ) -> torch.Tensor:
        """Forward and backward of one step. Splits a batch that does not fit, and repeats after out-of-memory errors.

        Tensors with the same dim 0 as the first one are split along it; everything else is passed whole. The number of
        parts follows from the missing memory, and is stored. Gradients equal those of the whole batch up to the order
        of summation, except with dropout, BatchNorm or a loss across samples. `report().notes` names such modules; it
        cannot detect dropout in functions (`scaled_dot_product_attention(dropout_p=...)`). Before a repeat, and after
        an error, gradients, buffers, and torch's, numpy's and Python's random states are restored.

        Args:
            fn: called with the batch or a part of it. Returns (sum of losses, weight): a tensor with one element, and a
                number, such as the number of tokens. The sum of losses over all calls is divided by the sum of weights.
                If the weight is a tensor on the GPU, the host waits for the step.
            batch: a tensor, or nested dicts, lists and tuples of tensors.
            micro_batches: number of parts; None for as few as fit.

        Returns:
            The mean loss, sum of losses / sum of weights: a detached scalar. Gradients are accumulated in `.grad`.

        Raises:
            BudgetError: a batch of one sample does not fit, or a part does not fit with the given `micro_batches`.
            ConfigError: `fn` returned an invalid result, or `micro_batches` is invalid.
            OutOfVRAMError: the device ran out of memory again after repeats and splits.
            StorageError: as in `step`.
            UnsupportedError: the step contains something that cannot be split or repeated exactly.
        """
        runner = Runner(
            model=self._model,
            optimizer=self._state.optimizer(),
            device=self.device,
            memory=self._runs,
            step=self.step,
            add_inputs=self._saved.add_inputs,
            fixed_bytes=self._fixed_bytes,
        )
        return runner.run(fn, batch, micro_batches)

    def compile(
        self,
        model: torch.nn.Module | None = None,
        *,
        blocks: Iterable[torch.nn.Module | str] | None = None,
        variant: str | None = None,
    ) -> CompiledBlocks:
        """Compiles the model block by block. Plans then choose what each block's backward recomputes.

        Args:
            model: the Session's model; can be left out.
            blocks, variant: as in `offload.compiled.CompiledBlocks`; without `variant` the Session chooses.

        Raises:
            ConfigError, UnsupportedError: as `offload.compiled.compile_blocks` does.
        """
        self._compiled = compile_blocks(self._saved, self._model, model, blocks, variant, unlimited=self._unlimited)
        return self._compiled

    # ------------------------------------------------------------------ answers

    def usage(self) -> Figures:
        """Peaks of the last step; zeros before the first one has ended. On CUDA without its time, to avoid waiting."""
        return self._measured.last or Figures(step_ms=0.0, vram_bytes=0, ram_bytes=0, disk_bytes=0)

    def plan(self) -> Plan | None:
        """The current plan; None until the first step has ended if none was given, and for steps that no plan fits."""
        return self._plans.plan_in_force(self._planner.machine)

    def report(self) -> Report:
        """The forecast and the measurement. On CUDA, the host waits for the device here."""
        if self.device.type == "cuda":  # pragma: gpu
            torch.cuda.synchronize(self.device)
        self._learn()
        measured, highest = self._measured.planned_or_all()
        notes = self._saved.outside.notes() + ((self._compiled.mix, *self._compiled.notes) if self._compiled else ())
        return Report(
            forecast=self._plans.in_force.forecast if self._plans.in_force else None,
            measured=measured,
            highest=highest,
            budget=self._stack.budget,
            num_steps=self._measured.num_steps,
            num_planned=self._measured.num_planned,
            num_in_force=self._measured.num_in_force,
            moved_bytes=self._residency.moved_bytes,
            notes=(*self._stack.notes(), *self._runs.notes(), *self._planner.lessons, *notes),
        )

    def close(self, *, reason: str = "closed by its user") -> None:
        """Frees spill files, pinned memory and threads. A second call does nothing."""
        if not self._saved.closed:
            self._saved.closed = reason
            self._stack.close()

    def __reduce__(self) -> str:
        raise UnsupportedError(
            "A Session owns memory, files and threads of this process and cannot be copied: create a new one."
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_FREE = 1.01  # a plan that takes so little longer than the model's own compute needs nothing better
