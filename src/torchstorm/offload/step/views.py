"""How storages become flat bytes, and flat bytes the views of them that autograd saved."""

from __future__ import annotations

import functools
import weakref
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torchstorm.offload.native.library import library


class View(NamedTuple):
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
        offset_bytes = tensor.storage_offset() * tensor.element_size() - base_offset
        look = tensor.dtype, tensor.shape, tensor.stride(), offset_bytes, tensor.is_conj(), tensor.is_neg()
        return tuple.__new__(View, look)  # as its own constructor, which takes the host twice as long

    def over(self, base: torch.Tensor) -> torch.Tensor:
        """The same view over bytes that now are `base`; shares its version counter.

        Args:
            base: 1-D uint8 over the bytes; or any tensor of another dtype in a storage that begins with them.
        """
        if (found := library()) is not None and (seen := found.over(self, base)) is not None:
            return seen
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.over(base)
        dtype = self.dtype
        offset = self.offset_bytes // dtype.itemsize
        if base.dtype is dtype and dtype is not torch.uint8:
            tensor = base.as_strided(self.size, self.stride, offset)
        else:
            if base.dtype is not torch.uint8:
                base = flat_bytes(base.untyped_storage())
            offset += int(base.storage_offset()) // dtype.itemsize
            rest = base.nbytes % dtype.itemsize
            tensor = (base[:-rest] if rest else base).view(dtype).as_strided(self.size, self.stride, offset)
        if tensor.is_conj() is not self.conjugate:  # which the other tensor may be, too
            tensor = tensor.conj()
        return torch._neg_view(tensor) if tensor.is_neg() is not self.negative else tensor


def root_of(tensor: torch.Tensor) -> weakref.ref[torch.Tensor]:
    """What a tensor is a view of, or itself: all views of one tensor share its version counter."""
    base = tensor._base
    return weakref.ref(tensor if base is None else base)


def flat_bytes(storage: torch.UntypedStorage, start: int = 0, nbytes: int | None = None) -> torch.Tensor:
    """A 1-D uint8 tensor over a storage or a part of it; no copy, and a version counter of its own."""
    row = _nothing(torch.uint8, storage.device).data
    return row.set_(storage) if nbytes is None else row.set_(storage, start, (nbytes,), (1,))


def content_of(tensor: torch.Tensor) -> torch.Tensor:
    """What `View.over` takes for all bytes of a tensor's storage."""
    return flat_bytes(tensor.untyped_storage()) if tensor.dtype is torch.uint8 else tensor


def row_of(content: torch.Tensor) -> torch.Tensor:
    """(nbytes,) uint8 over the bytes of what `View.over` takes."""
    return content if content.dtype is torch.uint8 else flat_bytes(content.untyped_storage())


class WeakStorage(StorageWeakRef):
    """PyTorch's, of our own type: C++, where that is there, lets go of each without Python's `__del__`."""

    __slots__ = ()


def weak_reference(storage: torch.UntypedStorage) -> WeakStorage:
    """Tells later whether the storage is gone, and keeps its address from being used again until then."""
    return WeakStorage(storage)  # type: ignore[no-untyped-call]


def has_expired(watch: StorageWeakRef) -> bool:
    """Whether the storage is gone."""
    return bool(watch.expired())


def version_counter(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that shares another's version counter, and none of its memory."""
    token = tensor.detach()
    token.data = _nothing(tensor.dtype, tensor.device)
    return token


@functools.cache
def _nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=device)


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
