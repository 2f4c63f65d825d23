"""Session: trains an unmodified model within a memory budget.

The first step is measured. From then on every step of the same shape, or a smaller one, follows a plan. The budget:
`vram` is the peak of allocated device memory within a step, weights included. `ram` on CUDA is the pinned arena and
staging; on CPU it is the bytes of saved-tensor storages (each once; weights and gradients not counted) from the time
when autograd saves them until it releases them, with staging and prefetched ones. `disk` is the bytes in spill files.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

import torch

from torchstorm.errors import StorageError, UnsupportedError
from torchstorm.offload import first_calls, misuse
from torchstorm.offload.budget import Tiers, build_tiers
from torchstorm.offload.compiled.begin import compile_blocks
from torchstorm.offload.compiled.compile import CompiledBlocks
from torchstorm.offload.loss.by_rows import LossesByRows
from torchstorm.offload.native import library
from torchstorm.offload.native.classes import classes
from torchstorm.offload.replan.planner import Planner
from torchstorm.offload.replan.plans import Plans
from torchstorm.offload.replan.user_plan import Sizes, check_budget, read_plan
from torchstorm.offload.report import Report
from torchstorm.offload.run.runner import RunMemory, Runner
from torchstorm.offload.run.shortage import is_out_of_memory
from torchstorm.offload.state.optimizer_state import OptimizerState
from torchstorm.offload.step.garbage import rare_collections
from torchstorm.offload.step.hooks import SavedTensors
from torchstorm.offload.step.inputs import ModelTensors
from torchstorm.offload.step.residency import Residency
from torchstorm.offload.step.shared import Shared
from torchstorm.offload.step.step import Step
from torchstorm.plan.beside import Beside, plans_now
from torchstorm.plan.forecast import KEEP, Figures
from torchstorm.plan.plan import Plan

Batch = TypeVar("Batch")


class Session:
    """Keeps the saved tensors of a model's training steps within a budget.

    On CUDA a step waits for a plan that is made quickly. A process beside training, without torch, searches for a
    better one, which is taken over between two steps. On a CPU, where training itself needs the processor, steps wait
    until the search has ended. The environment variable TORCHSTORM_PLAN_NOW=1 has them wait anywhere, and 0 nowhere.

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
        tiers: Tiers = build_tiers(
            model, vram=sizes.vram, ram=sizes.ram, disk=sizes.disk, check=check, unlimited=unlimited
        )
        if given is not None:
            check_budget(given, tiers.budget)
        fast = tiers.fast
        self.device = fast.device
        if not fast.is_beside_host:
            first_calls.settle()
        library.begin(classes)
        state = OptimizerState(model, optimizer)
        residency = Residency(
            fast,
            limit_bytes=tiers.fast_bytes,
            tiers=tiers.slow,
            default_tier=tiers.default_tier,
            staging_bytes=tiers.staging_bytes,
            check=check,
        )
        plans = Plans(given, 4 if fast.is_beside_host else 2)
        self._shared = Shared(
            model=model,
            tensors=ModelTensors(model, partial(misuse.check_unmoved, model, device=self.device)),
            state=state,
            tiers=tiers,
            recompute=recompute and not unlimited,
            unlimited=unlimited,
            clock=fast.clock(),
            residency=residency,
            saved=SavedTensors(residency),
            # One is traced; on CUDA one asks for memory and one only runs, so that clocks settle; one takes times.
            plans=plans,
            planner=Planner(tiers, plans, None if plans_now(on_cpu=not fast.is_beside_host) else Beside()),
            watch=misuse.Watch(model, state.optimizer),
            losses=LossesByRows(model),
        )
        self._running = threading.Lock()
        self._runs = RunMemory()

    # ------------------------------------------------------------------ the step

    def step(self) -> misuse.StepContext:
        """One training step, for `with` or as a decorator: forward and backward inside it, the optimizer after it.

        Raises:
            BudgetError: the step needs more than the budget. Raised before the model runs where earlier steps of other
                sizes tell, else at the end of the step, before any weight changes; at the end of the next such step,
                where compiled blocks must be compared first and the gradients leave no room for that.
            OutOfVRAMError: the device ran out of memory. The step and its new gradients are dropped, and a new plan is
                made: repeat the step. Changes of buffers remain, and values added to existing gradients, which the
                error names.
            StorageError: a disk failed. Weights and optimizer state are unchanged, and spill files are removed.
            UnsupportedError: the step contains something that cannot be exact, or the model is compiled as a whole.
            ConfigError: this Session is already in a step.
            DeviceError: the model was moved to another device.
        """
        return misuse.StepContext(self._running, self._step, self._shared.watch)

    def _step(self) -> Iterator[None]:
        if self._shared.saved.closed:
            raise StorageError(f"This Session is closed ({self._shared.saved.closed}); create a new one.")
        with rare_collections():  # what the step has made is gone when the collector runs again
            yield from self._within(Step(self._shared))

    def _within(self, step: Step) -> Iterator[None]:
        saved = self._shared.saved
        try:
            with step.watching():
                yield
        except BaseException as error:
            if is_out_of_memory(error):
                raise step.ran_out(error) from error
            saved.end()
            told = misuse.better_said(error, self._shared.model, closed=saved.closed)
            if isinstance(error, StorageError):
                self.close(reason=f"after {type(error).__name__}: {error}")
            if told is not None:
                raise told from error
            raise
        step.leave()

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
            model=self._shared.model,
            optimizer=self._shared.state.optimizer(),
            fast=self._shared.tiers.fast,
            memory=self._runs,
            step=self.step,
            add_inputs=self._shared.saved.add_inputs,
            fixed_bytes=self._shared.fixed_bytes,
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

        A loss function that the model has as an attribute is compiled, too: see `offload.compiled.loss`.

        Args:
            model: the Session's model; can be left out.
            blocks, variant: as in `offload.compiled.compile.CompiledBlocks`; without `variant` the Session chooses.

        Raises:
            ConfigError, UnsupportedError: as `offload.compiled.begin.compile_blocks` does.
        """
        shared = self._shared
        compiled = compile_blocks(
            *(shared.saved, shared.model, model, blocks, variant),
            unlimited=shared.unlimited,
            can_move=shared.residency.default_tier != KEEP,
        )
        shared.compiled, shared.unfinished = compiled, None
        shared.refused.clear()
        return compiled

    # ------------------------------------------------------------------ answers

    def usage(self) -> Figures:
        """Peaks of the last step; zeros before the first one has ended. On CUDA without its time, to avoid waiting."""
        return self._shared.measured.last or Figures(step_ms=0.0, vram_bytes=0, ram_bytes=0, disk_bytes=0)

    def plan(self) -> Plan | None:
        """The current plan; None until the first step has ended if none was given, and for steps that no plan fits."""
        return self._shared.plans.plan_in_force(self._shared.planner.machine)

    def report(self) -> Report:
        """The forecast and the measurement. On CUDA, the host waits for the device here."""
        shared = self._shared
        shared.tiers.fast.synchronize()
        shared.learn()
        measured, highest = shared.measured.planned_or_all()
        notes = [*shared.tiers.notes(), *self._runs.notes(), *shared.planner.lessons, *shared.saved.outside.notes()]
        notes += shared.losses.notes
        if shared.compiled is not None:
            notes += [shared.compiled.mix, *shared.compiled.notes]
        return Report(
            forecast=shared.plans.forecast(),
            measured=measured,
            highest=highest,
            budget=shared.tiers.budget,
            num_steps=shared.measured.num_steps,
            num_planned=shared.measured.num_planned,
            num_in_force=shared.measured.num_in_force,
            moved_bytes=shared.residency.moved_bytes,
            notes=tuple(notes),
        )

    def close(self, *, reason: str = "closed by its user") -> None:
        """Frees spill files, pinned memory, threads and the planner's process. A second call does nothing."""
        if not self._shared.saved.closed:
            self._shared.saved.closed = reason
            self._shared.retiming = self._shared.unfinished = None
            self._shared.planner.close()
            self._shared.tiers.close()

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
