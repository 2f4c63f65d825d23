"""Session: trains an unmodified model within a memory budget.

The first step is decided as it goes and measured; from then on every step of the same shape follows a plan. What a
budget means: `vram` is the peak of allocated device memory within a step, weights and all. `ram` on CUDA is the pinned
arena with staging; on CPU it is the bytes of saved-tensor storages (each once; weights and gradients not counted) from
the moment autograd saves them until it lets go, with staging and prefetched ones. `disk` is the bytes in spill files.
"""

from __future__ import annotations

import statistics
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import torch
from torch.utils._pytree import tree_leaves

from torchstorm.errors import BudgetError, ConfigError, StorageError, UnsupportedError
from torchstorm.offload.record import CpuClock, Recorder, seconds_between
from torchstorm.offload.report import Report
from torchstorm.offload.residency import Residency
from torchstorm.offload.saved import SavedTensors, slab_bytes
from torchstorm.offload.stack import Stack, bounce_buffers, build_stack
from torchstorm.plan.forecast import Figures
from torchstorm.plan.plan import Plan
from torchstorm.plan.solve import shift_base, solve
from torchstorm.plan.trace import Trace
from torchstorm.sizes import format_size
from torchstorm.transfer.engine import StreamClock


@dataclass(eq=False)
class _Planned:
    """A plan in use, and what it takes for granted."""

    plan: Plan | None  # None: a step that fits only when it is decided as it goes
    trace: Trace
    forecast: Figures
    base_bytes: int  # bytes that are not the Session's at the step's entry
    times_are_warm: bool = False


class Session:
    """Keeps the saved tensors of a model's training steps within a budget.

    Args:
        model: any nn.Module; it is not modified.
        vram: budget for allocated device memory, int bytes or "24GiB". Default: 90 % of what is free. Only on CUDA.
        ram: budget for host memory. Default: 50 % of what the machine (its cgroup) leaves.
        disk: "DIR" or "DIR:SIZE"; spill files go into a directory of their own below DIR. Default: no disk.
        optimizer: if given, room for its state is kept free before it exists; else twice the parameters' bytes.
        check: checksum every tensor that leaves and returns, and poison freed buffers. Slow.
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
        check: bool = False,
        unlimited: bool = False,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._unlimited = unlimited
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
        self._plans: dict[tuple[Any, ...], _Planned] = {}
        self._key: tuple[Any, ...] | None = None  # None: the step has saved nothing so far
        self._start: object = None
        self._base_bytes = 0
        self._running = False
        self._num_steps = 0
        self._last: Figures | None = None
        self._highest: Figures | None = None
        self._in_force: _Planned | None = None
        self._planned_highest: Figures | None = None  # of the steps that followed the plan in force
        self._num_planned = 0
        self._naming: list[Any] = []
        self._times: deque[tuple[object, object]] = deque(maxlen=256)

    # ------------------------------------------------------------------ the step

    @contextmanager
    def step(self) -> Iterator[None]:
        """One training step: forward and backward inside it, the optimizer after it.

        Raises:
            BudgetError: the budget is below what the step needs; raised when the step ends, before any weight changes.
            StorageError: a disk failed; weights and optimizer state are untouched, spill files are removed.
            UnsupportedError: something in the step cannot be done exactly.
        """
        if self._running:
            raise ConfigError("This Session is already in a step: leave it before entering another.")
        if self._saved.closed:
            raise StorageError(f"This Session is closed ({self._saved.closed}); make a new one to go on.")
        self._enter()
        inputs = self._model.register_forward_pre_hook(_NoteInputs(self._saved), with_kwargs=True)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._saved.pack, self._saved.unpack):
                yield
        except BaseException as error:
            self._saved.end()
            self._running = False
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
            self._stop_naming()
        self._leave()

    def _enter(self) -> None:
        if self.device.type == "cuda":  # pragma: gpu
            if torch.cuda.is_current_stream_capturing():
                raise UnsupportedError("A step cannot be captured into a CUDA graph: its waits would be lost.")
            torch.cuda.reset_peak_memory_stats(self.device)
            self._base_bytes = torch.cuda.memory_allocated(self.device) - self._residency.resident_bytes
        for tier in self._stack.tiers.values():
            tier.reset_peak()
        tensors = [*self._model.parameters(), *self._model.buffers()]
        fixed = {tensor.untyped_storage()._cdata for tensor in tensors if type(tensor) in _PLAIN}
        self._running = True
        self._key = None
        self._start = self._clock.mark()
        self._saved.begin(fixed, self._choose)
        if not self._plans and not self._unlimited:
            self._start_naming()

    def _choose(self, key: tuple[Any, ...]) -> tuple[Plan | None, Recorder | None]:
        """Called at the step's first save: the plan for a step that begins like this, and who measures it."""
        self._key = key
        if self._unlimited:
            return None, None
        planned = self._plans.get(key)
        if planned is not None and self._base_moved(planned):  # pragma: gpu
            planned = self._plan(planned.trace, base_bytes=self._base_bytes, warm=planned.times_are_warm)
            self._plans[key] = planned
        if planned is not None and planned.times_are_warm:
            return planned.plan, None
        recorder = Recorder(
            self.device, self._start, base_bytes=self._base_bytes, staging_bytes=self._residency.staging_bytes
        )
        if planned is None and not self._naming:
            self._start_naming()
        return planned.plan if planned else None, recorder

    def _leave(self) -> None:
        left_plan, shortfall = self._saved.left_plan, self._residency.shortfall
        recorder = self._saved.end()
        stop = self._clock.mark()
        self._running = False
        self._num_steps += 1
        planned = self._plans.get(self._key) if self._key is not None else None
        followed = planned is not None and not left_plan and recorder is None
        self._count(stop, recorder, planned if followed else None)
        if left_plan and self._key is not None:
            del self._plans[self._key]
        elif recorder is not None and self._key is not None:
            trace = recorder.refine(planned.trace) if planned else recorder.trace()
            warm = planned is not None
            base = trace.base_bytes + self._reserve_bytes() if not warm else self._base_bytes
            try:
                self._in_force = self._plan(trace, base_bytes=base, warm=warm)
            except BudgetError:
                if shortfall is not None or not self._last_kept_to_budget(more_bytes=base - trace.base_bytes):
                    raise
                # Storages that stay saved after their first use (retain_graph, double backward) may leave again in
                # between, which a plan does not foresee: such steps go on as this one went.
                assert self._last is not None
                self._in_force = _Planned(None, trace, self._last, base, times_are_warm=True)
            self._plans[self._key] = self._in_force
            self._num_planned, self._planned_highest = 0, None
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

    def _plan(self, trace: Trace, *, base_bytes: int, warm: bool) -> _Planned:
        shifted = shift_base(trace, base_bytes - trace.base_bytes) if self.device.type == "cuda" else trace
        plan = solve(
            shifted, self._stack.machine(), self._stack.budget, spare=self._stack.spare, own_bytes=self._own_bytes
        )
        return _Planned(plan, trace, plan.forecast, base_bytes, times_are_warm=warm)

    def _own_bytes(self, fast_bytes: int) -> int:
        """What a Session with such a budget on the fast tier takes of it: bounce buffers, and larger shared buffers."""
        growth = max(0, slab_bytes(fast_bytes) - slab_bytes(self._stack.fast_bytes))
        threads, block = bounce_buffers(fast_bytes) if self.device.type == "cpu" else (0, 0)
        return threads * block + 2 * growth

    def _last_kept_to_budget(self, *, more_bytes: int) -> bool:
        """Whether the last step would have with `more_bytes` on a GPU that are not the Session's."""
        assert self._last is not None
        if self.device.type == "cpu":
            return self._last.ram_bytes <= self._stack.budget.ram
        return self._last.vram_bytes + more_bytes <= self._stack.fast_bytes  # pragma: gpu

    def _base_moved(self, planned: _Planned) -> bool:
        """Whether memory that is not the Session's differs from what the plan takes for granted."""
        if self.device.type == "cpu" or planned.plan is None:
            return False
        delta = self._base_bytes - planned.base_bytes  # pragma: gpu
        limit = self._stack.budget.vram  # pragma: gpu
        return delta > self._stack.spare.vram // 2 or delta < -limit // 20  # pragma: gpu

    def _reserve_bytes(self) -> int:
        """Optimizer state that does not exist yet and will."""
        if self.device.type == "cpu" or self._num_steps > 1:
            return 0
        parameters = sum(p.nbytes for p in self._model.parameters() if p.requires_grad)  # pragma: gpu
        if self._optimizer is None:  # pragma: gpu
            return 2 * parameters
        return max(0, expected_state_bytes(self._optimizer) - state_bytes(self._optimizer))  # pragma: gpu

    # ------------------------------------------------------------------ watching

    def _start_naming(self) -> None:
        """While a step is measured, keeps the stack of running modules, so that a block can be named."""
        if any(_is_compiled(module) for module in self._model.modules()):
            return  # the hooks would be compiled too, and their names lost
        names = {module: name for name, module in self._model.named_modules()}
        blocks = self._saved.blocks

        def enter(module: torch.nn.Module, args: object) -> None:
            if torch.compiler.is_compiling():
                return
            blocks.append(names.get(module, blocks[-1] if blocks else ""))

        def leave(module: torch.nn.Module, args: object, output: object) -> None:
            if blocks and not torch.compiler.is_compiling():
                blocks.pop()

        self._naming = [
            torch.nn.modules.module.register_module_forward_pre_hook(enter),
            torch.nn.modules.module.register_module_forward_hook(leave, always_call=True),
        ]

    def _stop_naming(self) -> None:
        for hook in self._naming:
            hook.remove()
        self._naming = []

    def _count(self, stop: object, recorder: Recorder | None, followed: _Planned | None) -> None:
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
        self._last = figures
        self._highest = _highest(self._highest, figures)
        if followed is not None:
            if followed is not self._in_force:
                self._in_force, self._num_planned, self._planned_highest = followed, 0, None
            if self._num_planned == 0:
                self._times.clear()  # until a step follows the plan, the earlier ones' times are all there is
            self._num_planned += 1
            self._planned_highest = _highest(self._planned_highest, figures)
        self._times.append((self._start, stop))

    # ------------------------------------------------------------------ answers

    def usage(self) -> Figures:
        """Peaks of the last step. Before the first one has ended, zeros. On CUDA without its time: nothing waits."""
        return self._last or Figures(step_ms=0.0, vram_bytes=0, ram_bytes=0, disk_bytes=0)

    def plan(self) -> Plan | None:
        """The plan in force, None before the first step has ended and for steps that no plan fits."""
        return self._in_force.plan if self._in_force else None

    def report(self) -> Report:
        """Forecast beside what was measured. On CUDA the host waits for the device here."""
        if self.device.type == "cuda":  # pragma: gpu
            torch.cuda.synchronize(self.device)
        measured = highest = None
        if self._highest is not None:
            times_ms = [seconds_between(*pair) * 1e3 for pair in self._times]
            measured = replace(self._planned_highest or self._highest, step_ms=statistics.median(times_ms))
            highest = replace(self._highest, step_ms=max([*times_ms, self._highest.step_ms]))
        return Report(
            forecast=self._in_force.forecast if self._in_force else None,
            measured=measured,
            highest=highest,
            budget=self._stack.budget,
            num_steps=self._num_steps,
            num_planned=self._num_planned,
            moved_bytes=self._residency.moved_bytes,
            notes=self._stack.notes(),
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


class _NoteInputs:
    """The hook that tells which tensors the user gave to the model; in a copy of the model it does nothing."""

    def __init__(self, saved: SavedTensors | None = None) -> None:
        self._saved = weakref.ref(saved) if saved is not None else None

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        saved = self._saved() if self._saved is not None else None
        if saved is not None:
            saved.add_inputs([leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)])

    def __reduce__(self) -> tuple[type[_NoteInputs], tuple[()]]:
        return _NoteInputs, ()


def _is_compiled(module: torch.nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _highest(one: Figures | None, other: Figures) -> Figures:
    if one is None:
        return other
    return Figures(
        step_ms=max(one.step_ms, other.step_ms),
        vram_bytes=max(one.vram_bytes, other.vram_bytes),
        ram_bytes=max(one.ram_bytes, other.ram_bytes),
        disk_bytes=max(one.disk_bytes, other.disk_bytes),
    )


def state_bytes(optimizer: torch.optim.Optimizer) -> int:  # pragma: gpu
    """Bytes of an optimizer's state on CUDA devices."""
    tensors = tree_leaves([list(state.values()) for state in optimizer.state.values()])
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.is_cuda)


def expected_state_bytes(optimizer: torch.optim.Optimizer) -> int:  # pragma: gpu
    """Bytes its state will have: none for SGD without momentum, one copy with; for all others two (three: amsgrad)."""
    total = 0
    for group in optimizer.param_groups:
        nbytes = sum(parameter.nbytes for parameter in group["params"] if parameter.requires_grad)
        if isinstance(optimizer, torch.optim.SGD):
            total += nbytes if group.get("momentum") else 0
        else:
            total += nbytes * (3 if group.get("amsgrad") else 2)
    return total
