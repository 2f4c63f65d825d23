"""Memory as direct I/O wants it: page-aligned tensors, views by address, and the alignment that a file asks for."""

from __future__ import annotations

import ctypes
import mmap
import struct
import weakref

import torch

_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_PYBUF_WRITE = 0x200

# By address: a tensor's own methods would pass through whatever dispatch mode is active.
_memory_view = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_memory_view.restype = ctypes.py_object

# Where the data of each live `aligned_empty` tensor ends -> its mapping. Entries go when the memory does.
_aligned_ends: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()


def aligned_empty(nbytes: int) -> torch.Tensor:
    """Makes a host tensor that direct I/O reaches without a bounce buffer.

    Args:
        nbytes: size in bytes; the memory behind it is rounded up to whole pages.

    Returns:
        (nbytes,) uint8, page-aligned, with a storage of exactly `nbytes`. Its first contents are zeros.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    memory = _map(nbytes)
    tensor = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes)
    _aligned_ends[tensor.data_ptr() + nbytes] = memory
    return tensor


class AlignedPool:
    """Host tensors like those of `aligned_empty`, whose memory is used again once nobody holds them.

    Memory that is new costs the kernel as much time as a fast disk takes to fill it.

    Args:
        nbytes: size of each.
        most: so many that nobody holds are kept; memory beyond that goes back to the system.
    """

    def __init__(self, nbytes: int, most: int) -> None:
        self._nbytes, self._most = nbytes, most
        self._free: list[mmap.mmap] = []
        self._lease = ctypes.c_ubyte * nbytes

    def take(self) -> torch.Tensor:
        """(nbytes,) uint8, page-aligned, of any contents."""
        if not self._nbytes:
            return torch.empty(0, dtype=torch.uint8)
        memory = self._free.pop() if self._free else _map(self._nbytes)
        # The tensor keeps the lease alive, and the lease's end tells that nobody holds the tensor.
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
    """Bytes from address `end` on that are nobody's: the rest of the last page where an `aligned_empty` tensor ends.

    A tensor that ends there is that tensor or a view of it, for the mapping is alive and ours alone. 0 elsewhere.
    """
    return -end % mmap.PAGESIZE if end in _aligned_ends else 0


def memory_view(address: int, nbytes: int) -> memoryview:
    """A writable view of memory that the caller keeps alive."""
    return _memory_view(address, nbytes, _PYBUF_WRITE)  # type: ignore[no-any-return]


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied; the caller keeps the tensor alive."""
    return memory_view(tensor.data_ptr(), tensor.nbytes)


def direct_alignment(fd: int) -> tuple[int, int]:
    """(offset, address) alignment in bytes that the kernel (6.1 or newer) tells for O_DIRECT; zeros where not."""
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
