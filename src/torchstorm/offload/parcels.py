"""What the Session knows of every saved storage while it runs, and how storages become flat bytes and views again."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torchstorm.errors import OutOfVRAMError, TorchstormError, UnsupportedError
from torchstorm.memory.tier import Copy, Handle, Tier
from torchstorm.offload.operators import Operator


@dataclass(eq=False)
class Parcel:
    """Storages that move together, and where they are now.

    Attributes:
        nbytes: as counted on the fast tier and copied to another.
        block: module that saved the first one, for messages.
        movable: False for what must stay (inputs, storages below 4 KiB).
        order: place in the order of making, over all steps.
        buffer: (nbytes,) uint8 on the fast device while resident, else None.
        hold: for a single storage, an alias that shares the version counter of what was saved.
        shared: whether the buffer is the Session's own, with copies of several small storages in it.
        filled: bytes of a shared buffer in use.
        sealed: whether no further storage joins.
        tier, handle: where its bytes also lie, once a copy out was begun.
        back: the copy into `buffer` that has not been waited for yet.
        used: whether an unpack has been answered from the present buffer.
        members: its storages that autograd still holds.
        number: place among the parcels of the step's trace or plan, -1 where it has none.
        recomputed: whether its bytes were let go when they were saved, to be computed again.
    """

    nbytes: int
    block: str
    movable: bool
    order: int
    buffer: torch.Tensor | None = None
    hold: torch.Tensor | None = None
    shared: bool = False
    filled: int = 0
    sealed: bool = True
    tier: Tier | None = None
    handle: Handle | None = None
    back: Copy | None = None
    used: bool = False
    members: set[Saved] = field(default_factory=set)
    number: int = -1
    recomputed: bool = False


@dataclass(eq=False)
class Saved:
    """One storage at one version, saved by autograd at least once.

    Attributes:
        parcel: what it travels in.
        nbytes: bytes of the storage.
        offset: its first byte within the parcel.
        version: autograd's version counter when it was saved.
        counter: shares that version counter, but not the memory; None as long as the parcel's `hold` does.
        watch: keeps the storage's address from being used again for another one.
        pointer: where the storage's memory was.
        block: module that saved it, for messages.
        live: how many saved tensors refer to it.
        ordinal: its number in the step that is running or last ran, -1 once that is over.
        address: where the storage was.
        base: (nbytes,) uint8 over bytes that came back, whose version counter all views of them share; None before.
        base_version: its version counter when it was made.
        kept: tensors that are handed back as they were, by handle.
        stale: whether its bytes changed in place while they were being copied.
        value: where its bytes come from, where the step is recorded.
        fingerprint: with self-check, of bytes that are to be computed again, as they were saved.
        lost: makes the error to raise where its bytes, which were let go, are asked for; None where they were not.
    """

    parcel: Parcel
    nbytes: int
    offset: int
    version: int
    counter: torch.Tensor | None
    address: int
    watch: StorageWeakRef
    pointer: int
    block: str
    live: int = 0
    ordinal: int = -1
    base: torch.Tensor | None = None
    base_version: int = 0
    kept: dict[int, torch.Tensor] = field(default_factory=dict)
    stale: bool = False
    value: Value | None = None
    fingerprint: torch.Tensor | None = None
    lost: Callable[[], TorchstormError] | None = None

    @property
    def has_other_memory(self) -> bool:
        """Whether the storage is still there, and has been given other memory, or none."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.watch.cdata)
        return storage is not None and storage.data_ptr() != self.pointer

    @property
    def token(self) -> torch.Tensor:
        """A tensor that shares the version counter."""
        token = self.counter if self.counter is not None else self.parcel.hold
        assert token is not None
        return token


class Value:
    """The bytes of one storage, as one operation left them.

    Attributes:
        nbytes: of the storage.
        call: the operation that made them; None where that is not known or cannot run again.
        saved: the record of the same bytes saved by autograd, as long as it holds them.
    """

    __slots__ = ("__weakref__", "call", "nbytes", "saved")

    def __init__(self, nbytes: int, call: Call | None) -> None:
        self.nbytes = nbytes
        self.call = call
        self.saved: Saved | None = None


@dataclass(eq=False, slots=True)
class Leaf:
    """A tensor that no operation of the step made: a weight, an input, a constant."""

    tensor: torch.Tensor
    version: int


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that an earlier operation made."""

    value: Value
    view: View


@dataclass(eq=False, slots=True)
class Call:
    """One operation as it was called.

    Attributes:
        device: where its outputs are.
        func: the operator.
        operator: what it does to its arguments.
        args, kwargs: as they were, each tensor replaced by a `Ref` or a `Leaf`.
        inputs: the values among them that are needed to run it again, each once.
        outputs: the values it made; dead where nobody has a use for one any more.
        places: which of its output tensors holds each of those.
        state: random state that it drew from, None for an operation that draws none.
        number, signature: as in `plan.trace.Op`.
        scratch_bytes: as in `plan.trace.Op`.
        marks: when it began and ended, where times are measured.
    """

    device: torch.device
    func: Any
    operator: Operator
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[Value]
    outputs: list[weakref.ref[Value]]
    places: list[int]
    state: torch.Tensor | None
    number: int
    signature: int
    scratch_bytes: int = 0
    marks: tuple[object, object] | None = None


def weak_reference(storage: torch.UntypedStorage) -> StorageWeakRef:
    """Tells later whether the storage is gone, and keeps its address from being used again until then."""
    return StorageWeakRef(storage)


def flat_bytes(storage: torch.UntypedStorage, start: int = 0, nbytes: int | None = None) -> torch.Tensor:
    """A 1-D uint8 tensor over a storage or a part of it; no copy, and a version counter of its own."""
    size = storage.nbytes() if nbytes is None else nbytes
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, start, (size,), (1,))


def version_counter(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that shares another's version counter, and none of its memory."""
    token = tensor.detach()
    token.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return token


def share_a_counter(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors share a version counter, so that equal versions mean unchanged bytes.

    Parts made by `unsafe_chunk` (every recurrent cell does) have one storage and a counter each. PyTorch tells it only
    by example: set the one, look at the other, set it back. Where it cannot be asked, the answer is False, which only
    means that bytes are saved twice.
    """
    set_counter = getattr(torch._C._autograd, "_unsafe_set_version_counter", None)
    version = one._version
    if set_counter is None or other._version != version:
        return False
    set_counter((one,), (version + (1 << 30),))
    shared = other._version != version
    set_counter((one,), (version,))
    return shared


@dataclass(frozen=True, slots=True)
class View:
    """How a tensor looks at its storage: everything but the bytes."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset_bytes: int
    conjugate: bool
    negative: bool

    @staticmethod
    def of(tensor: torch.Tensor, base_offset: int = 0) -> View:
        """The view that a strided tensor is, counted from byte `base_offset` of its storage."""
        return View(
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()) * tensor.element_size() - base_offset,
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def over(self, base: torch.Tensor) -> torch.Tensor:
        """The same view over bytes that now are `base`, 1-D uint8; shares its version counter."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.over(base)
        itemsize = self.dtype.itemsize
        offset = (int(base.storage_offset()) + self.offset_bytes) // itemsize
        tensor = base[: base.nbytes // itemsize * itemsize].view(self.dtype)
        tensor = tensor.as_strided(self.size, self.stride, offset)
        if self.conjugate:
            tensor = tensor.conj()
        return torch._neg_view(tensor) if self.negative else tensor


def held_only_here(alias: torch.Tensor, *, aliases: int) -> bool:
    """Whether only `aliases` tensors, `alias` one of them, refer to a storage any more.

    PyTorch has no public count; where the private one is missing the answer is False, which only means that the plan
    credits a move with less memory than it gives back.
    """
    return _use_count(alias.untyped_storage()) <= _count_of_one() + aliases - 1


@functools.cache
def _count_of_one() -> int:
    """What the private count says of a storage that one tensor refers to, asked in the same way."""
    alias = torch.empty(1)
    return _use_count(alias.untyped_storage())


def _use_count(storage: torch.UntypedStorage) -> int:
    count = getattr(torch._C, "_storage_Use_Count", None)
    return int(count(storage._cdata)) if count else 1 << 30


def has_expired(watch: StorageWeakRef) -> bool:
    """Whether the storage is gone."""
    return bool(watch.expired())


def dropped_error() -> OutOfVRAMError:
    """For a saved tensor whose step ran out of memory."""
    return OutOfVRAMError("The step that saved this tensor ran out of memory and was dropped: run it again.")


def resized_error(block: str) -> UnsupportedError:
    """For a saved tensor whose storage has been resized since."""
    return UnsupportedError(
        f"The memory of a tensor saved in {block or 'the model'} was freed or replaced before backward used it (as by "
        "untyped_storage().resize_). A Session cannot tell what it should hold now: leave the memory of such a tensor "
        "alone and give the Session a smaller budget instead, or run that module without one."
    )


def in_place_error(version: int, expected: int, dtype: torch.dtype, size: Sequence[int]) -> RuntimeError:
    """What autograd itself raises for a saved tensor that was changed, in its own words."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{dtype} {list(size)}] is at version {version}; expected version {expected} instead. Hint: enable anomaly "
        "detection to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True)."
    )
