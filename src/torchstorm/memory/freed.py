"""Gives memory that the process has freed back to the system, where the C library (glibc) would keep it.

glibc keeps freed blocks of up to 32 MiB for later ones. Small blocks that live on come to lie beside them, so that many
a later block fits no gap: within a few steps a process holds two or three times what it uses. Memory that was given
back costs the system four times as much when the program takes it again, because each page is then filled anew. So it
is given back only where enough has gathered, and so rarely that both together take a share of the time that is small.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Callable
from pathlib import Path

_SHARE = 0.02  # of the time may go into giving memory back and taking it again
_COST = 6.0  # what both take, in times of what giving back takes; measured: 4 to 6


class FreedMemory:
    """Watches how much more a process holds than a budget allows, and gives back what of that was freed.

    Args:
        budget_bytes: so much may be in use; freed memory may come to a tenth of it beyond.
        held_bytes: asks how much memory the process holds.
        give_back: gives back what was freed.
    """

    def __init__(self, budget_bytes: int, *, held_bytes: Callable[[], int], give_back: Callable[[], object]) -> None:
        self._budget_bytes = budget_bytes
        self._spare_bytes = budget_bytes // 10
        self._held_bytes = held_bytes
        self._give_back = give_back
        self._unseen_bytes = 0  # freed since the last look
        self._rest_until_s = 0.0
        self._thread = threading.get_ident()  # whose time is measured
        self._other_bytes = held_bytes()  # what is held for others

    def add(self, nbytes: int, *, used_bytes: int) -> None:
        """`nbytes` of the budget were freed, and `used_bytes` are still in use."""
        self._unseen_bytes += nbytes
        if 2 * self._unseen_bytes < self._spare_bytes or threading.get_ident() != self._thread:
            return
        start_s = time.thread_time()  # other work on the machine does not change what is found
        if start_s < self._rest_until_s:
            return
        self._unseen_bytes = 0
        grown_bytes = self._held_bytes() - self._other_bytes
        if grown_bytes - max(self._budget_bytes, used_bytes) <= self._spare_bytes:
            return
        self._give_back()
        stop_s = time.thread_time()
        self._rest_until_s = stop_s + (stop_s - start_s) * _COST / _SHARE
        self._other_bytes = self._held_bytes() - used_bytes


def freed_memory(budget_bytes: int) -> FreedMemory | None:
    """Of this process; None where its C library has no `malloc_trim` or the system does not tell what it holds."""
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is None or not anonymous_bytes():
        return None
    return FreedMemory(budget_bytes, held_bytes=anonymous_bytes, give_back=lambda: give_back(0))


def anonymous_bytes() -> int:
    """Bytes of memory that the process holds and no file lies behind; 0 where the system does not tell."""
    try:
        fields = Path("/proc/self/statm").read_bytes().split()
    except OSError:
        return 0
    return (int(fields[1]) - int(fields[2])) * mmap.PAGESIZE
