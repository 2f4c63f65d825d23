"""Returns memory that the process has freed to the system, where the C library (glibc) would keep it.

glibc keeps freed blocks of up to 32 MiB for reuse. Small long-lived blocks between them divide the free memory, so
later blocks often fit no gap: within a few steps, a process holds two or three times the memory that it uses. Taking
returned memory again costs four times as much as returning it, because the system fills each page. So memory is
returned only when enough has gathered, and so rarely that both take a small share of the time.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Callable
from pathlib import Path

_SHARE = 0.02  # largest share of the time for returning memory and taking it again
_COST = 6.0  # duration of both, as a multiple of the duration of returning; measured: 4 to 6


class FreedMemory:
    """Returns freed memory to the system when the process holds more than its budget.

    Args:
        budget_bytes: limit of the used memory. Freed memory may be a tenth of it in addition.
        held_bytes: returns the bytes of memory that the process holds.
        give_back: returns freed memory to the system.
    """

    def __init__(self, budget_bytes: int, *, held_bytes: Callable[[], int], give_back: Callable[[], object]) -> None:
        self._budget_bytes = budget_bytes
        self._spare_bytes = budget_bytes // 10
        self._held_bytes = held_bytes
        self._give_back = give_back
        self._unseen_bytes = 0  # freed since the last check
        self._rest_until_s = 0.0
        self._thread = threading.get_ident()  # the thread whose time is measured
        self._other_bytes = held_bytes()  # memory that does not count against the budget

    def add(self, nbytes: int, *, used_bytes: int) -> None:
        """Counts freed bytes, and returns memory to the system if it is due.

        Args:
            nbytes: bytes of the budget that were freed.
            used_bytes: bytes of the budget that are still in use.
        """
        self._unseen_bytes += nbytes
        if 2 * self._unseen_bytes < self._spare_bytes or threading.get_ident() != self._thread:
            return
        start_s = time.thread_time()  # CPU time, so that other work on the machine does not matter
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
    """The `FreedMemory` of this process; None without `malloc_trim` or /proc/self/statm."""
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is None or not anonymous_bytes():
        return None
    return FreedMemory(budget_bytes, held_bytes=anonymous_bytes, give_back=lambda: give_back(0))


def anonymous_bytes() -> int:
    """Bytes of memory of the process that no file backs; 0 without /proc/self/statm."""
    try:
        fields = Path("/proc/self/statm").read_bytes().split()
    except OSError:
        return 0
    return (int(fields[1]) - int(fields[2])) * mmap.PAGESIZE
