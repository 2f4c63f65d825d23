"""Tells a Session that the memory of a storage is about to be freed or replaced by `UntypedStorage.resize_`.

FSDP2 frees a gathered weight by `untyped_storage().resize_(0)` and fills it again before backward; a model may do the
same with an activation. Autograd's version counter does not count this, and the memory may come back at the same
address, so that nothing shows it afterwards. Hence the method itself is watched, in this process and for good, from the
first Session on. What C++ code resizes passes it by; there a storage's address tells.
"""

from __future__ import annotations

import functools
import weakref
from typing import Protocol

import torch


class Listener(Protocol):
    """What wants to know of resized storages."""

    def before_resize(self, storage: torch.UntypedStorage) -> None:
        """The storage still has its bytes. Called from whatever thread resizes it."""


_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()


def listen(listener: Listener) -> None:
    """From now on `listener`, as long as it lives, is told of every storage before it is resized."""
    _watch()
    _listeners.add(listener)


def resize_unnoticed(storage: torch.UntypedStorage, nbytes: int) -> None:
    """Resizes a storage without a word to the listeners: for memory whose users all know of it."""
    _resize(storage, nbytes)


_resize = torch._C.StorageBase.resize_  # type: ignore[attr-defined]


@functools.cache
def _watch() -> None:
    @functools.wraps(_resize)
    def resize_(self: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        for listener in list(_listeners):
            listener.before_resize(self)
        _resize(self, nbytes)
        return self

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
