"""What autograd holds instead of the tensors that it saved."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import torch

from torchstorm.offload.recompute.tensors import has_bytes
from torchstorm.offload.step.parcels import Saved, in_place_error
from torchstorm.offload.step.views import View

_OWN_THREADS = "torchstorm-"  # begins the names of the threads that copy


class Keeper(Protocol):
    """Who gives placeholders out."""

    def let_go(self, saved: Saved, placeholder_id: int) -> None:
        """Autograd has dropped a placeholder."""

    def settle_soon(self) -> None:
        """Autograd has let go of something: its memory is given back now, or by whoever looks things up just then."""


class Placeholder:
    """What autograd holds instead of the tensor; when it lets go, so does the Session."""

    __slots__ = ("__weakref__", "_owner", "saved", "view")

    def __init__(self, owner: Keeper, saved: Saved, view: View) -> None:
        self._owner = owner
        self.saved = saved
        self.view = view

    def drop(self) -> None:
        """Autograd has let go of it: what runs then, by way of C++ where that is there."""
        self._owner.let_go(self.saved, id(self))

    __del__ = drop


class Untouched:
    """A tensor that is none of the Session's affair: weights, other devices, layouts without plain strides."""

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # A weight belongs to no graph, and may be held as it is.
        self.tensor = tensor if type(tensor) is torch.nn.Parameter and tensor.is_leaf else tensor.detach()
        self.version = tensor._version

    def unpack(self) -> torch.Tensor:
        """The tensor as it was, unless it changed in place."""
        if self.tensor._version != self.version:
            raise in_place_error(self.tensor._version, self.version, self.tensor.dtype, self.tensor.shape)
        return self.tensor


def storage_of(tensor: torch.Tensor, device: torch.device) -> torch.UntypedStorage | None:
    """The storage of a tensor that a Session with this fast device may care for; None for all others."""
    if not has_bytes(tensor) or tensor.device != device:
        return None
    storage = tensor.untyped_storage()
    return storage if storage.nbytes() else None


def is_of_parameter(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a parameter or a view of one: also one that FSDP2 gathers for a while, of no module's."""
    base = tensor._base
    if base is None:
        return type(tensor) is torch.nn.Parameter
    return base.is_leaf and isinstance(base, torch.nn.Parameter)


def is_own_thread() -> bool:
    """Whether the thread that runs is one of the Session's that copy. It may hold its tier's lock when the collector
    runs in it, so that what has a tier free something is left to others."""
    return threading.current_thread().name.startswith(_OWN_THREADS)


class Locked:
    """Holds a lock, for `with`. No generator: it is entered twice for every saved tensor.

    Args:
        lock: to be held.
        settle: called when it is.
        unlock: releases it.
    """

    __slots__ = ("_lock", "_settle", "_unlock")

    def __init__(self, lock: threading.Lock, *, settle: Callable[[], None], unlock: Callable[[], None]) -> None:
        self._lock, self._settle, self._unlock = lock, settle, unlock

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            self._settle()
        except BaseException:
            self._lock.release()
            raise

    def __exit__(self, *error: object) -> None:
        self._unlock()
