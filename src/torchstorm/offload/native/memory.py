"""Memory of our own for the large tensors of a CPU, as long as a Session there has a budget (docs/decisions/0037).

The C library keeps what was freed, and where sizes change it serves badly again: a process came to hold ten times its
budget. So PyTorch takes what is large from the C++ beside this, which begins at the next step once that is there.
"""

from __future__ import annotations

import threading
import weakref

import torch

from torchstorm.offload.native.library import library

_holders: weakref.WeakSet[object] = weakref.WeakSet()
_lock = threading.RLock()  # Python may collect a holder within


def begin_step(holder: object) -> None:
    """A step of a Session begins, which wants such memory until it lets go or is gone.

    Args:
        holder: stands for the Session.
    """
    found = library()
    if found is None:
        return
    with _lock:
        if holder not in _holders:
            _holders.add(holder)
            weakref.finalize(holder, _end).atexit = False
        found.own_memory(True)


def let_go(holder: object) -> None:
    """A Session has ended. After the last one PyTorch allocates as ever, and what is free goes back to the system."""
    with _lock:
        if holder in _holders:
            _holders.discard(holder)
            _end()


def _end() -> None:
    found = library()
    with _lock:
        if found is not None and not list(_holders):  # its length still counts one that is just going
            found.own_memory(False)


def empty(nbytes: int) -> torch.Tensor | None:
    """Allocates (nbytes,) uint8 from it, uninitialized, at the begin of a page; None for what is small, and where no
    Session has it."""
    found = library()
    return found.own_memory_of(nbytes) if found is not None else None
