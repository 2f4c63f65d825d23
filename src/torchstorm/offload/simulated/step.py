"""A training step on hardware that is not here, as the `Trace` that a Session would have measured there.

The user's own model and loss run unmodified, forward and backward, on meta tensors: shapes without bytes. So what
autograd saves, when, and in which order memory comes and goes, are the real program's; only seconds are estimated.
The saved-tensor hooks stand where a Session's do, and operations are recorded by the Session's own tape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from torchstorm.offload.loss.by_rows import LossesByRows
from torchstorm.offload.recompute.tape import Probe, Tape
from torchstorm.offload.recompute.tensors import has_bytes
from torchstorm.offload.recompute.traced_ops import TracedOps
from torchstorm.offload.recompute.watched import WatchedCalls
from torchstorm.offload.simulated.cuda_rules import CudaRules, autocast_as_on_cuda
from torchstorm.offload.simulated.gpu import META, SimulatedGPU
from torchstorm.offload.step.naming import Naming
from torchstorm.offload.step.parcels import Call, Value
from torchstorm.offload.step.saving import buffers_of
from torchstorm.offload.torch_private import asks_for_function_modes
from torchstorm.plan.machine import Machine
from torchstorm.plan.packing import Packing
from torchstorm.plan.trace import ENTER, PACK, UNPACK, Moment, SavedStorage, Trace, make_parcels

Batch = TypeVar("Batch")
# A Session's hook takes the host about this long. Source: GPT-2 on one H200, docs/benchmarks.md.
_HOOK_S = 30e-6
_NEVER = 1 << 30


def simulate(
    model: torch.nn.Module,
    example_batch: Batch,
    loss_fn: Callable[[torch.nn.Module, Batch], torch.Tensor],
    machine: Machine,
    *,
    limit_bytes: int,
) -> Simulation:
    """Runs one training step of a model on a GPU that is not here.

    Args:
        model: any nn.Module, on any device, "meta" too; afterwards as it was.
        example_batch: one batch like those of the training; only its shapes count.
        loss_fn: called as `loss_fn(model, example_batch)`; returns the loss, a scalar.
        machine: with the rates of its GPU.
        limit_bytes: the budget on the GPU, which the size of parcels follows.

    Returns:
        The step's trace, for device "cuda", and what the model was given. The optimizer's state is not in it.

    Raises:
        UnsupportedError: the step depends on numbers, not only on shapes; names the operation.
    """
    step = _Step(machine, limit_bytes)
    with torch.random.fork_rng(devices=[]), _on_meta(model) as weights:
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

        def without_bytes(tensor: torch.Tensor) -> torch.Tensor:
            pairs.append((_like(tensor), tensor))
            return pairs[-1][0]

        batch = tree_map_only(torch.Tensor, without_bytes, example_batch)
        step.run(model, batch, loss_fn, [*weights, *pairs])
    return Simulation(trace=step.trace(), inputs=tuple(step.given))


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What a simulated step gave.

    Attributes:
        trace: as a Session would have measured it.
        inputs: the tensors that the model was given at its first call, without bytes.
    """

    trace: Trace
    inputs: tuple[torch.Tensor, ...]


@dataclass(eq=False, kw_only=True)
class _Record:
    """What is learnt of one saved storage. `counted_bytes` is what it takes while the user's program holds it."""

    nbytes: int
    made: int
    block: str
    parcel: int
    value: Value | None
    number: int
    counted_bytes: int
    live: int = 0
    is_left: bool = False  # an input that only autograd holds any more; it stays the user's all the same
    owned: int | None = None
    needed: int | None = None
    freed: int | None = None


class _Placeholder:
    """What autograd holds instead of a tensor; with it goes what the Session would hold."""

    __slots__ = ("_let_go", "dtype", "record", "size", "stride")

    def __init__(self, record: _Record, tensor: torch.Tensor, let_go: Callable[[_Record], None]) -> None:
        self.record = record
        self.size, self.stride, self.dtype = tensor.shape, tensor.stride(), tensor.dtype
        self._let_go = let_go
        record.live += 1

    def __del__(self) -> None:
        self._let_go(self.record)


class _Step:
    def __init__(self, machine: Machine, limit_bytes: int) -> None:
        self._machine = machine
        buffers = buffers_of(limit_bytes)
        self._least_moved, self._packing = buffers.least_moved_bytes, Packing(buffers)
        self._gpu = SimulatedGPU(machine, freed=self._storage_gone)
        self._tape = Tape(META, is_leaf=self._is_leaf, mark=self._gpu.now)
        self._tape.probe = _NoteScratch(self._gpu)
        self._fixed: set[int] = set()
        self._inputs: set[int] = set()
        self._base_bytes = 0
        self._blocks: list[str] = []
        self._records: list[_Record] = []
        self._at: dict[int, dict[int, _Record]] = {}  # by address and version, while the storage lives
        self._released: list[_Record] = []  # since the latest moment
        self._signatures: list[tuple[str, int, int]] = [(ENTER, -1, 0)]
        self._seconds: list[float] = []
        self._others: list[int] = []
        self._stills: list[int] = [0]
        self._left = 0.0
        self.given: list[torch.Tensor] = []  # to the model, at its first call

    @property
    def moment(self) -> int:
        """Number of the latest moment."""
        return len(self._signatures) - 1

    def run(
        self,
        model: torch.nn.Module,
        batch: Any,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        pairs: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        """Runs the step; `pairs` are the tensors there before it, each with the one that has its numbers."""
        weights = [*model.parameters(), *model.buffers()]
        self._fixed = {tensor.untyped_storage()._cdata for tensor in weights}
        for tensor, original in pairs:
            self._gpu.hold(tensor, original)
        self._gpu.live_bytes += self._machine.workspace_bytes
        self._gpu.reset_peak()
        self._base_bytes = self._stills[0] = self._gpu.live_bytes
        naming = Naming(model, self._blocks)
        calls: AbstractContextManager[Any] = nullcontext()
        if not any(asks_for_function_modes(type(module)) for module in model.modules()):
            calls = WatchedCalls(self._tape, self, enters=False)
        inputs = model.register_forward_pre_hook(self._note_inputs, with_kwargs=True)
        try:
            with (
                torch.compiler.set_stance("force_eager"),
                autocast_as_on_cuda(),
                torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack),
                LossesByRows(model).placed(),
                self._gpu,
                self._tape,
                CudaRules(),
                calls,
            ):
                loss_fn(model, batch).backward()
                self._arrive()
        finally:
            inputs.remove()
            naming.stop()

    def trace(self) -> Trace:
        num_moments = len(self._signatures)
        traced = TracedOps([record.value for record in self._records], {})
        storages = tuple(
            SavedStorage(
                nbytes=record.nbytes,
                made=record.made,
                owned=_NEVER if record.owned is None else record.owned,
                needed=num_moments if record.needed is None else record.needed,
                freed=num_moments if record.freed is None else record.freed,
                parcel=record.parcel,
                block=record.block,
                value=-1 if record.value is None else traced.numbers[record.value],
            )
            for record in self._records
        )
        columns = zip(self._signatures, self._seconds, self._others, self._stills, strict=False)
        trace = Trace(
            device="cuda",
            moments=tuple(
                Moment(
                    kind=kind,
                    storage=storage,
                    nbytes=nbytes,
                    compute_s=seconds,
                    other_bytes=other,
                    still_bytes=still,
                )
                for (kind, storage, nbytes), seconds, other, still in columns
            ),
            storages=storages,
            parcels=make_parcels(storages, self._packing.parcel_bytes),
            base_bytes=self._base_bytes,
            staging_bytes=0,
            ops=traced.ops(),
            values=traced.values(),
        )
        self._tape.clear()
        return trace

    # ------------------------------------------------------------------ hooks

    def _pack(self, tensor: torch.Tensor) -> Any:
        if torch._C._is_torch_function_mode_enabled():  # no mode counts what is done here
            with torch._C.DisableTorchFunction():
                return self._pack(tensor)
        storage = tensor.untyped_storage() if has_bytes(tensor) and tensor.is_meta else None
        if storage is None or not storage.nbytes() or storage._cdata in self._fixed:
            with self._gpu.aside():
                return tensor.detach()
        address = storage._cdata
        self._arrive()
        record = self._at.get(address, {}).get(tensor._version)
        if record is None:
            self._signatures.append((PACK, len(self._records), storage.nbytes()))
            record = self._save(tensor, storage)
        else:
            self._signatures.append((PACK, record.number, record.nbytes))
        self._leave()
        return _Placeholder(record, tensor, self._let_go)

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        record = packed.record
        self._arrive()
        self._signatures.append((UNPACK, record.number, record.nbytes))
        self._packing.close()
        if record.needed is None:
            record.needed = len(self._signatures) - 1
        self._leave()
        with self._gpu.aside():  # its bytes are the Session's
            return torch.empty_strided(packed.size, packed.stride, dtype=packed.dtype, device=META)

    def _save(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> _Record:
        nbytes = storage.nbytes()
        is_slice = tensor.grad_fn is None and not tensor.requires_grad and 4 * tensor.nbytes < nbytes
        is_input = is_slice or storage._cdata in self._inputs
        parcel = -1
        if not is_input and nbytes >= self._least_moved:
            parcel = self._packing.parcel_for(nbytes)
        record = _Record(
            nbytes=min(nbytes, tensor.nbytes) if is_input else nbytes,
            made=len(self._signatures) - 1,
            block=self._blocks[-1] if self._blocks else "",
            parcel=parcel,
            value=self._tape.value_of(storage, tensor._version),
            number=len(self._records),
            counted_bytes=-(-nbytes // 512) * 512,
            owned=_NEVER if is_input else None,
        )
        self._records.append(record)
        self._at.setdefault(storage._cdata, {})[tensor._version] = record
        return record

    def _let_go(self, record: _Record) -> None:
        record.live -= 1
        if not record.live and record.freed is None:
            record.freed = len(self._signatures)
            if record.owned is None:
                record.owned = record.freed
            if record.is_left:
                self._gpu.release(record.counted_bytes)

    def _storage_gone(self, address: int) -> bool:
        """The user's program holds a storage no longer. True where autograd does: from the next moment on its bytes
        are the Session's."""
        self._inputs.discard(address)
        held = [record for record in self._at.pop(address, {}).values() if record.live]
        if not held:
            return False
        if held[-1].owned is None:
            self._released.append(held[-1])
        else:
            held[-1].is_left = True
        for record in held:
            record.owned = len(self._signatures) if record.owned is None else record.owned
        return True

    def _note_inputs(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        with torch._C.DisableTorchFunction():  # no mode counts what is done here
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.is_meta]
            if not self.given:
                with self._gpu.aside():
                    self.given = [_like(tensor) for tensor in tensors]
            self._inputs |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def _is_leaf(self, address: int) -> bool:
        return address in self._fixed or address in self._inputs

    # ------------------------------------------------------------------ moments

    def _arrive(self) -> None:
        """The interval ends here."""
        self._seconds.append(self._gpu.now() - self._left)
        self._others.append(self._gpu.peak_bytes)
        for record in self._released:
            self._gpu.release(record.counted_bytes)
        self._released.clear()
        self._stills.append(self._gpu.live_bytes)

    def _leave(self) -> None:
        """The next interval begins. The hook's own time on the host is in it: the device may have run dry meanwhile."""
        self._left = self._gpu.now()
        self._gpu.wait_host(_HOOK_S)
        self._gpu.reset_peak()


class _NoteScratch(Probe):
    """Tells the tape what an operation allocated besides its outputs."""

    def __init__(self, gpu: SimulatedGPU) -> None:
        self._gpu = gpu

    def after(self, call: Call, out: Any) -> None:
        call.scratch_bytes = self._gpu.scratch_bytes


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape, type and strides without bytes."""
    return torch.empty_like(tensor, device=META, requires_grad=tensor.requires_grad)


@contextmanager
def _on_meta(model: torch.nn.Module) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Every tensor of a model replaced by one without bytes, those tied to each other still tied. Gives the pairs."""
    before = [(module, dict(vars(module))) for module in model.modules()]
    known: dict[int, torch.Tensor] = {}
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def replaced(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        if id(item) not in known:
            bare = _like(item.detach())
            if isinstance(item, torch.nn.Parameter):
                bare = torch.nn.Parameter(bare, requires_grad=item.requires_grad)
            known[id(item)] = bare
            pairs.append((bare, item.detach()))
        return known[id(item)]

    try:
        for module, attributes in before:
            for name, value in attributes.items():
                if name in ("_parameters", "_buffers"):
                    vars(module)[name] = {key: replaced(item) for key, item in value.items()}
                elif isinstance(value, torch.Tensor):
                    vars(module)[name] = replaced(value)
        yield pairs
    finally:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)
