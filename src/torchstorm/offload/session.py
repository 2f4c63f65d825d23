"""Session: trains an unmodified model within a memory budget.

The first step is decided as it goes and measured; from then on every step of the same shape follows a plan. What a
budget means: `vram` is the peak of allocated device memory within a step, weights and all. `ram` on CUDA is the pinned
arena with staging; on CPU it is the bytes of saved-tensor storages (each once; weights and gradients not counted) from
the moment autograd saves them until it lets go, with staging and prefetched ones. `disk` is the bytes in spill files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from torchstorm.errors import BudgetError, ConfigError, OutOfVRAMError, StorageError, UnsupportedError
from torchstorm.offload import oom
from torchstorm.offload.clock import CpuClock, seconds_between
from torchstorm.offload.compiled import CompiledBlocks, compile_blocks
from torchstorm.offload.inputs import NoteInputs
from torchstorm.offload.measured import Measured
from torchstorm.offload.naming import Naming
from torchstorm.offload.optimizer_state import missing_state_bytes
from torchstorm.offload.plans import Planned, Planner
from torchstorm.offload.record import Recorder
from torchstorm.offload.report import Report
from torchstorm.offload.residency import Residency
from torchstorm.offload.run import RunMemory, Runner
from torchstorm.offload.saved import SavedTensors
from torchstorm.offload.stack import Stack, build_stack
from torchstorm.offload.tape import Tape
from torchstorm.plan.forecast import Figures
from torchstorm.plan.plan import Plan
from torchstorm.sizes import format_size
from torchstorm.transfer.engine import StreamClock

Batch = TypeVar("Batch")


class Session:
    """Keeps the saved tensors of a model's training steps within a budget.

    Args:
        model: any nn.Module; it is not modified.
        vram: budget for allocated device memory, int bytes or "24GiB". Default: 90 % of what is free. Only on CUDA.
        ram: budget for host memory. Default: 50 % of what the machine (its cgroup) leaves.
        disk: "DIR" or "DIR:SIZE"; spill files go into a directory of their own below DIR. Default: no disk.
        optimizer: if given, room for its state is kept free before it exists; else twice the parameters' bytes.
        recompute: whether tensors may be computed again. Without it they are only moved, and nothing is recorded.
        check: checksum every tensor that leaves and returns or is computed again, and poison freed buffers. Slow.
        unlimited: keep everything, and only count, by the same means.

    Raises:
        SizeError: a size cannot be read.
        DeviceError: `vram` for a model that is not on a GPU, or a model spread over several devices.
        BudgetError: the weights alone do not fit.
        StorageError: the directory cannot be used.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        vram: int | str | None = None,
        ram: int | str | None = None,
        disk: str | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        recompute: bool = True,
        check: bool = False,
        unlimited: bool = False,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._unlimited = unlimited
        self._recompute = recompute and not unlimited
        self._stack: Stack = build_stack(model, vram=vram, ram=ram, disk=disk, check=check, unlimited=unlimited)
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
        self._plans: dict[tuple[Any, ...], Planned] = {}
        self._key: tuple[Any, ...] | None = None  # None: the step has saved nothing so far
        self._start: object = None
        self._base_bytes = 0
        self._running = False
        self._measured = Measured()
        self._planner = Planner(self._stack)
        self._in_force: Planned | None = None
        self._runs = RunMemory()
        self._naming: Naming | None = None
        self._compiled: CompiledBlocks | None = None
        # One is traced; on CUDA one asks for memory and one only runs, for the clock rate to settle; one takes times.
        self._num_to_measure = 4 if self.device.type == "cuda" else 2

    # ------------------------------------------------------------------ the step

    @contextmanager
    def step(self) -> Iterator[None]:
        """One training step: forward and backward inside it, the optimizer after it.

        Raises:
            BudgetError: the budget is below what the step needs; raised when the step ends, before any weight changes.
            OutOfVRAMError: the device ran out of memory. The step is dropped with the gradients that it made, its plan
                made anew with more room to spare; repeat it. What it added to gradients that there were before stays
                in them, and the error names them.
            StorageError: a disk failed; weights and optimizer state are untouched, spill files are removed.
            UnsupportedError: something in the step cannot be done exactly.
        """
        if self._running:
            raise ConfigError("This Session is already in a step: leave it before entering another.")
        if self._saved.closed:
            raise StorageError(f"This Session is closed ({self._saved.closed}); make a new one to go on.")
        tape = self._enter()
        inputs = self._model.register_forward_pre_hook(NoteInputs(self._saved), with_kwargs=True)
        try:
            with tape, torch.autograd.graph.saved_tensors_hooks(self._saved.pack, self._saved.unpack):
                yield
        except BaseException as error:
            self._running = False
            if oom.is_out_of_memory(error):
                raise self._ran_out(error) from error
            self._saved.end()
            if isinstance(error, StorageError):
                self.close(reason=f"after {type(error).__name__}: {error}")
            if isinstance(error, RuntimeError) and "saved tensor hooks" in str(error):
                raise UnsupportedError(
                    f"{type(self._model).__name__} uses something that cannot run with saved-tensor hooks, on which a "
                    f"Session stands: {error}"
                ) from error
            raise
        finally:
            inputs.remove()
            if self._naming is not None:
                self._naming.stop()
                self._naming = None
        self._leave()

    def _enter(self) -> AbstractContextManager[Any]:
        if self.device.type == "cuda":  # pragma: gpu
            if torch.cuda.is_current_stream_capturing():
                raise UnsupportedError("A step cannot be captured into a CUDA graph: its waits would be lost.")
            torch.cuda.reset_peak_memory_stats(self.device)
            self._base_bytes = torch.cuda.memory_allocated(self.device) - self._residency.resident_bytes
        for tier in self._stack.tiers.values():
            tier.reset_peak()
        self._learn()
        tensors = [*self._model.parameters(), *self._model.buffers()]
        fixed = {tensor.untyped_storage()._cdata for tensor in tensors if type(tensor) in _PLAIN}
        self._gradients = oom.Gradients(oom.trained(self._model, self._optimizer))
        self._running = True
        self._key = None
        self._start = self._clock.mark()
        tape = None
        if self._recompute and (not self._plans or any(self._records(planned) for planned in self._plans.values())):
            tape = Tape(self.device, is_leaf=self._saved.is_leaf, mark=self._clock.mark)
        self._saved.begin(fixed, self._choose, tape=tape)
        if not self._plans and not self._unlimited:
            self._naming = Naming(self._model, self._saved.blocks)
        return tape or nullcontext()

    def _records(self, planned: Planned) -> bool:
        """Whether a step like that has its operations recorded."""
        return self._is_measured_again(planned) or (planned.plan is not None and planned.plan.recomputes)

    def _is_measured_again(self, planned: Planned) -> bool:
        return planned.num_measured < self._num_to_measure

    def _choose(self, key: tuple[Any, ...]) -> tuple[Plan | None, Recorder | None]:
        """Called at the step's first save: the plan for a step that begins like this, and who measures it."""
        if self.device.type == "cuda":  # pragma: gpu
            # A step that finds gradients adds to them, and one that finds none allocates them: the peaks differ.
            key = (*key, self._gradients.nbytes)
        self._key = key
        if self._unlimited:
            return None, None
        planned = self._plans.get(key)
        if planned is not None and self._base_moved(planned):  # pragma: gpu
            planned = self._planner.plan(planned.trace, base_bytes=self._base_bytes, num_measured=planned.num_measured)
            self._plans[key] = planned
        if planned is not None and not self._is_measured_again(planned):
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
        if planned is None and self._naming is None:
            self._naming = Naming(self._model, self._saved.blocks)
        return planned.plan if planned else None, recorder

    def _leave(self) -> None:
        left_plan, shortfall = self._saved.left_plan, self._residency.shortfall
        recorder = self._saved.end()
        stop = self._clock.mark()
        self._running = False
        planned = self._plans.get(self._key) if self._key is not None else None
        followed = planned is not None and not left_plan and recorder is None
        self._count(stop, recorder, planned if followed else None)
        if left_plan and self._key is not None:
            del self._plans[self._key]
        elif recorder is not None and self._key is not None:
            trace = recorder.refine(planned.trace) if planned else recorder.trace()
            num_measured = planned.num_measured + 1 if planned else 1
            base = self._base_bytes if planned else trace.base_bytes + self._reserve_bytes()
            chosen = self._compiled if planned is None else None
            if chosen is not None and chosen.rechoose(trace, lambda mixed: self._planner.quick_plan(mixed, base)):
                return  # the next step is another one, and measured
            try:
                self._in_force = self._planner.plan(trace, base_bytes=base, num_measured=num_measured)
            except BudgetError:
                if planned is not None and planned.plan is not None and not recorder.asks_memory:
                    planned.num_measured = num_measured  # only times changed: what fitted before still fits
                    self._in_force = planned
                elif shortfall is not None or not self._last_kept_to_budget(more_bytes=base - trace.base_bytes):
                    raise
                else:
                    # Storages that stay saved after their first use (retain_graph, double backward) may leave again in
                    # between, which a plan does not foresee: such steps go on as this one went.
                    assert self._measured.last is not None
                    self._in_force = Planned(None, trace, self._measured.last, base, self._num_to_measure)
            self._plans[self._key] = self._in_force
            self._measured.plan_changed()
            self._stack.trim(self._in_force.forecast)
        if shortfall is not None and (left_plan or recorder is None):
            needed, block = shortfall
            where = f"block {block!r} alone" if block else "one moment"
            raise BudgetError(
                f"ram={format_size(self._stack.budget.ram)}, but {where} needs {format_size(needed)} at once in this "
                f"step, which differs from those before it. Give at least ram={needed} "
                f"({format_size(needed)}), or disk= where there is none.",
                tier="ram",
                budget_bytes=self._stack.budget.ram,
                needed_bytes=needed,
                block=block,
            )

    def _ran_out(self, error: BaseException) -> OutOfVRAMError:
        """Drops the running step and plans such steps anew, with more slack."""
        held, budget = self._residency.resident_bytes, 0 if self._unlimited else self._stack.fast_bytes
        shortage = oom.Shortage.read(error, self.device, held_bytes=held, budget_bytes=budget)
        oom.drop_step(self._saved, error)
        planned = self._plans.get(self._key) if self._key is not None else None
        anew = None
        if planned is not None and planned.plan is not None:
            old = planned
            anew, self._planner.slack_bytes = oom.plan_with_slack(
                lambda slack: self._planner.plan_within(slack, old.trace, old.base_bytes, old.num_measured),
                shortage,
                slack_bytes=self._planner.slack_bytes,
                tier=self._stack.fast_tier,
            )
        if anew is not None and self._key is not None:
            self._plans[self._key] = anew
        if self.device.type == "cuda" and not self._unlimited:  # pragma: gpu
            oom.keep_more_free(self._residency, shortage)
        return shortage.error(planned_anew=anew is not None, lost=self._gradients.drop())

    def _fixed_bytes(self, tier: str) -> int:
        """What a step needs on a tier however small its batch is, as far as is known; what plans keep free included."""
        spare: int = getattr(self._stack.spare, tier)
        if tier != self._stack.fast_tier:
            return spare
        return self._base_bytes + self._reserve_bytes() + self._residency.staging_bytes + spare

    def _last_kept_to_budget(self, *, more_bytes: int) -> bool:
        """Whether the last step would have with `more_bytes` on a GPU that are not the Session's."""
        assert self._measured.last is not None
        if self.device.type == "cpu":
            return self._measured.last.ram_bytes <= self._stack.budget.ram
        return self._measured.last.vram_bytes + more_bytes <= self._stack.fast_bytes  # pragma: gpu

    def _base_moved(self, planned: Planned) -> bool:
        """Whether memory that is not the Session's differs from what the plan takes for granted."""
        if self.device.type == "cpu" or planned.plan is None:
            return False
        delta = self._base_bytes - planned.base_bytes  # pragma: gpu
        limit = self._stack.budget.vram  # pragma: gpu
        return delta > self._stack.spare.vram // 2 or delta < -limit // 20  # pragma: gpu

    def _reserve_bytes(self) -> int:
        """Optimizer state that does not exist yet and will."""
        if self.device.type == "cpu" or self._measured.num_steps > 1:
            return 0
        return missing_state_bytes(self._model, self._optimizer)  # pragma: gpu

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
        if followed is not None and followed is not self._in_force:
            self._put_in_force(followed)
        self._measured.count(figures, (self._start, stop), followed=followed is not None)

    def _put_in_force(self, planned: Planned) -> None:
        self._in_force = planned
        self._measured.plan_changed()

    def _learn(self) -> None:
        """Compares the times of steps that have ended with the forecast of the plan in force."""
        for step_s in self._measured.new_times_s():
            planned = self._in_force
            key = next((key for key, one in self._plans.items() if one is planned), None)
            better = self._planner.judge(planned, step_s) if planned is not None and key is not None else None
            if better is not None and planned is not None and key is not None:
                self._plans[key] = better
                if better.plan is not None and better.plan.placements == getattr(planned.plan, "placements", None):
                    self._in_force = better
                else:
                    self._put_in_force(better)
                    return

    def run(
        self,
        fn: Callable[[Batch], tuple[torch.Tensor, torch.Tensor | float]],
        batch: Batch,
        *,
        micro_batches: int | None = None,
    ) -> torch.Tensor:
        """Forward and backward of one step; splits the batch where it does not fit, and repeats after out-of-memory.

        Split along dim 0 of all tensors as long there as the first one; what else is in the batch is given whole. The
        choice follows from the figures of what did not fit, and is remembered. Gradients are those of the whole batch
        up to the order of adding up; not with dropout, BatchNorm or a loss across samples: `report().notes` says what
        of it the modules show, which is not dropout in functions (`scaled_dot_product_attention(dropout_p=...)`). A
        repeat, or the caller after an error, finds gradients, buffers, and torch's, numpy's and Python's random states
        as they were.

        Args:
            fn: called with the batch or a part of it; returns (sum of losses, weight): a tensor with one element, and
                the number by which the sum over all calls is divided, such as that of tokens. For a weight that is a
                tensor on the GPU the host waits until the step has run.
            batch: a tensor, or any nest of dicts, lists and tuples with tensors in it.
            micro_batches: how many parts to split into; left out: as few as fit.

        Returns:
            The mean, sum of losses over sum of weights: a scalar without a graph. Its gradients are added to `.grad`.

        Raises:
            BudgetError: a batch of one sample does not fit, or one of the named number of parts does not.
            ConfigError: `fn` returned something else, the weights' sum is not positive, or `micro_batches` cannot be.
            OutOfVRAMError: out of memory again after repeats and splits.
            StorageError: as in `step`.
            UnsupportedError: something that cannot be split or repeated exactly.
        """
        runner = Runner(
            model=self._model,
            optimizer=self._optimizer,
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
        """Compiles the model block by block; plans then choose what each block's backward computes again.

        Args:
            model: the Session's own; may be left out.
            blocks, variant: as for `offload.compiled.CompiledBlocks`; without `variant` the Session chooses.

        Raises:
            ConfigError, UnsupportedError: as `offload.compiled.compile_blocks` does.
        """
        variant = "save" if self._unlimited and variant is None else variant
        self._compiled = compile_blocks(self._saved, self._model, model, blocks, variant)
        return self._compiled

    # ------------------------------------------------------------------ answers

    def usage(self) -> Figures:
        """Peaks of the last step. Before the first one has ended, zeros. On CUDA without its time: nothing waits."""
        return self._measured.last or Figures(step_ms=0.0, vram_bytes=0, ram_bytes=0, disk_bytes=0)

    def plan(self) -> Plan | None:
        """The plan in force, None before the first step has ended and for steps that no plan fits."""
        return self._in_force.plan if self._in_force else None

    def report(self) -> Report:
        """Forecast beside what was measured. On CUDA the host waits for the device here."""
        if self.device.type == "cuda":  # pragma: gpu
            torch.cuda.synchronize(self.device)
        self._learn()
        measured, highest = self._measured.planned_or_all()
        return Report(
            forecast=self._in_force.forecast if self._in_force else None,
            measured=measured,
            highest=highest,
            budget=self._stack.budget,
            num_steps=self._measured.num_steps,
            num_planned=self._measured.num_planned,
            num_in_force=self._measured.num_in_force,
            moved_bytes=self._residency.moved_bytes,
            notes=(*self._stack.notes(), *self._runs.notes(), *self._planner.lessons),
        )

    def close(self, *, reason: str = "closed by its user") -> None:
        """Gives everything back: spill files, pinned memory, threads. Closing twice does nothing."""
        if not self._saved.closed:
            self._saved.closed = reason
            self._stack.close()

    def __reduce__(self) -> str:
        raise UnsupportedError("A Session holds memory, files and threads of this process: make a new one, not a copy.")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
