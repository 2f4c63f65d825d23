"""Memory for direct I/O: page-aligned tensors, views by address, and the alignment that a file requires."""

from __future__ import annotations

import ctypes
import mmap
import struct
import weakref

import numpy as np
import torch

_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_PYBUF_WRITE = 0x200

# Views are made from addresses, since tensor methods would call an active dispatch mode.
_memory_view = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_memory_view.restype = ctypes.py_object

# Address of the data's end -> mapping, for each live `aligned_empty` tensor. An entry is removed with its memory.
_aligned_ends: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()


def aligned_empty(nbytes: int) -> torch.Tensor:
    """Allocates a host tensor that direct I/O can use without a bounce buffer.

    Args:
        nbytes: size in bytes; the memory behind it is rounded up to whole pages.

    Returns:
        (nbytes,) uint8, page-aligned, with a storage of exactly `nbytes`, filled with zeros.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    memory = _map(nbytes)
    tensor = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes)
    _aligned_ends[tensor.data_ptr() + nbytes] = memory
    return tensor


def empty_at_phase(nbytes: int, phase: int) -> torch.Tensor:
    """Allocates a host tensor where the C library allocates PyTorch's own, so that memory which those have freed serves
    again: to make new memory takes the kernel longer than a fast disk takes to fill it.

    Args:
        nbytes: size in bytes.
        phase: at how many bytes in a page it begins, so that its pages are those of another tensor.

    Returns:
        (nbytes,) uint8 with a storage of exactly `nbytes`, uninitialized.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    room = np.empty(nbytes + 2 * mmap.PAGESIZE, dtype=np.uint8)  # PyTorch would fill it under deterministic algorithms
    first = -room.ctypes.data % mmap.PAGESIZE + phase
    return torch.frombuffer(room, dtype=torch.uint8, count=nbytes, offset=first)


class AlignedPool:
    """Allocates host tensors as `aligned_empty` does, and reuses the memory of freed ones.

    Mapping new memory takes the kernel as long as a fast disk takes to fill it.

    Args:
        nbytes: size of each tensor.
        most: number of free buffers to keep. Further ones are returned to the system.
    """

    def __init__(self, nbytes: int, most: int) -> None:
        self._nbytes, self._most = nbytes, most
        self._free: list[mmap.mmap] = []
        self._lease = ctypes.c_ubyte * nbytes

    def take(self) -> torch.Tensor:
        """(nbytes,) uint8, page-aligned, uninitialized."""
        if not self._nbytes:
            return torch.empty(0, dtype=torch.uint8)
        memory = self._free.pop() if self._free else _map(self._nbytes)
        # The tensor keeps the lease alive, so the lease's finalizer runs when the tensor is freed.
        lease = self._lease.from_buffer(memory)
        weakref.finalize(lease, _give_back, weakref.ref(self), memory).atexit = False
        return torch.frombuffer(lease, dtype=torch.uint8)

    def _give_back(self, memory: mmap.mmap) -> None:
        if len(self._free) < self._most:
            self._free.append(memory)


def _give_back(pool: weakref.ref[AlignedPool], memory: mmap.mmap) -> None:
    there = pool()
    if there is not None:
        there._give_back(memory)


def _map(nbytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, round_up(nbytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= 2**21 and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def bytes_beyond(end: int) -> int:
    """Unused bytes after address `end`: the rest of the last page, if an `aligned_empty` tensor ends there.

    Any tensor that ends there is that tensor or a view of it. 0 for all other addresses.
    """
    return -end % mmap.PAGESIZE if end in _aligned_ends else 0


def memory_view(address: int, nbytes: int) -> memoryview:
    """A writable view of memory. The caller keeps the memory alive."""
    return _memory_view(address, nbytes, _PYBUF_WRITE)  # type: ignore[no-any-return]


def byte_view(tensor: torch.Tensor) -> memoryview:
    """A view of the bytes of a contiguous CPU tensor. The caller keeps the tensor alive."""
    return memory_view(tensor.data_ptr(), tensor.nbytes)


def direct_alignment(fd: int) -> tuple[int, int]:
    """(offset, address) alignment for O_DIRECT in bytes, from Linux 6.1 on; zeros if the kernel does not report it."""
    try:
        statx = ctypes.CDLL(None).statx
    except AttributeError:  # a C library older than statx
        return 0, 0
    buffer = ctypes.create_string_buffer(256)
    if statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, buffer) != 0:
        return 0, 0
    address_align, offset_align = struct.unpack_from("=II", buffer, 152)
    return (offset_align, address_align) if offset_align and address_align else (0, 0)


def round_up(value: int, unit: int) -> int:
    """The smallest multiple of `unit` that is at least `value`."""
    return -(-value // unit) * unit


def round_down(value: int, unit: int) -> int:
    """The largest multiple of `unit` that is at most `value`."""
    return value // unit * unit
