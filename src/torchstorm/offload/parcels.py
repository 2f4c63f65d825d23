"""What the Session knows of every saved storage while it runs, and how storages become flat bytes and views again."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torchstorm.memory.tier import Copy, Handle, Tier


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


@dataclass(eq=False)
class Saved:
    """One storage at one version, saved by autograd at least once.

    Attributes:
        parcel: what it travels in.
        nbytes: bytes of the storage.
        offset: its first byte within the parcel.
        version: autograd's version counter when it was saved.
        live: how many saved tensors refer to it.
        ordinal: its number in the step that is running or last ran, -1 once that is over.
        keys: the (address, version) pairs under which a further save of the same bytes finds it.
        watch: keeps the address from being used again for another storage while `keys` names it.
        kept: tensors that are handed back as they were, by handle.
        stale: whether its bytes changed in place while they were being copied.
    """

    parcel: Parcel
    nbytes: int
    offset: int
    version: int
    live: int = 0
    ordinal: int = -1
    keys: list[tuple[int, int]] = field(default_factory=list)
    watch: list[StorageWeakRef] = field(default_factory=list)
    kept: dict[int, torch.Tensor] = field(default_factory=dict)
    stale: bool = False


def weak_reference(storage: torch.UntypedStorage) -> StorageWeakRef:
    """Tells later whether the storage is gone, and keeps its address from being used again until then."""
    return StorageWeakRef(storage)


def flat_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """A (nbytes,) uint8 tensor over a whole storage; no copy, and a version counter of its own."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


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

    def over(self, buffer: torch.Tensor, base_offset: int) -> torch.Tensor:
        """The same view over bytes that now begin at byte `base_offset` of `buffer`'s storage."""
        offset = (self.offset_bytes + base_offset) // self.dtype.itemsize
        tensor = torch.empty(0, dtype=self.dtype, device=buffer.device)
        tensor.set_(buffer.untyped_storage(), offset, self.size, self.stride)
        if self.conjugate:
            tensor = tensor.conj()
        return torch._neg_view(tensor) if self.negative else tensor


@functools.cache
def fresh_version() -> int:
    """Autograd's version counter of a tensor that `View.over` has just made."""
    buffer = torch.empty(4, dtype=torch.uint8)
    return View.of(buffer).over(buffer, 0)._version


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


def in_place_error(version: int, expected: int, dtype: torch.dtype, size: Sequence[int]) -> RuntimeError:
    """What autograd itself raises for a saved tensor that was changed, in its own words."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{dtype} {list(size)}] is at version {version}; expected version {expected} instead. Hint: enable anomaly "
        "detection to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True)."
    )
