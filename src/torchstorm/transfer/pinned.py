"""Pinned host memory in exact sizes.

PyTorch's own pinned allocator rounds to powers of two and gives back late; pinning costs about a second for 2 GiB. So
the arena pins segments with cudaHostRegister as they are first needed and keeps them, and hands out extents of them. A
slot may lie in several pieces, so that what the sum has room for always fits.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from torchstorm.errors import BudgetError
from torchstorm.sizes import format_size
from torchstorm.transfer.engine import StreamCopy
from torchstorm.transfer.extents import Extents

Pin = Callable[[torch.Tensor], Callable[[], None]]


class _Segment:
    def __init__(self, nbytes: int, pin: Pin | None) -> None:
        self.extents = Extents(nbytes)
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.buffer = torch.frombuffer(memory, dtype=torch.uint8)
        self.busy: list[tuple[int, int, StreamCopy]] = []  # (start, stop, copy) of freed extents still being copied
        # Memory must not go back to the system while it is pinned, not even where nobody closed the arena: what undoes
        # the pinning keeps the memory alive.
        self.release = weakref.finalize(self, pin(self.buffer) if pin else _nothing)


@dataclass(eq=False)
class Slot:
    """Room in the arena.

    Attributes:
        pieces: uint8 tensors on the host, in order; one, unless free room was scattered.
        after: copies that still touch this memory for its previous owners; new ones must follow them.
    """

    pieces: list[torch.Tensor]
    after: list[StreamCopy]
    extents: list[tuple[_Segment, int, int]] = field(repr=False)  # segment, start, bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.nbytes for piece in self.pieces)


class PinnedArena:
    """Host memory that the copy streams can reach directly, up to a budget. Safe to call from several threads.

    Args:
        capacity_bytes: the budget; segments are added until their sum would pass it.
        pin: pins a tensor's memory and returns what undoes it; raises RuntimeError where it cannot. None: pageable.
        available_bytes: what the machine (its cgroup) still has, asked before a segment is added.
        segment_bytes: size of a segment; an extent larger than that gets a segment of its own.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        pin: Pin | None,
        available_bytes: Callable[[], int],
        segment_bytes: int = 256 * 2**20,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.not_pinned = "" if pin else "no CUDA device"
        self.used_bytes = 0
        self.peak_bytes = 0
        self._pin = pin
        self._available_bytes = available_bytes
        self._segment_bytes = segment_bytes
        self._segments: list[_Segment] = []
        self._lock = threading.RLock()

    @property
    def held_bytes(self) -> int:
        """Bytes of all segments: what the arena takes from the machine."""
        return sum(segment.extents.capacity_bytes for segment in self._segments)

    def allocate(self, nbytes: int) -> Slot:
        """Takes room, adding a segment where no free extent is large enough.

        Raises:
            BudgetError: the budget or the machine has no room for it.
        """
        with self._lock:
            extents = self._whole(nbytes) or self._grown(nbytes) or self._scattered(nbytes)
            pieces, after, left = [], [], nbytes
            for segment, start, size in extents:
                pieces.append(segment.buffer[start : start + min(size, left)])
                left -= pieces[-1].nbytes
                segment.busy = [entry for entry in segment.busy if not entry[2].done()]
                after += [copy for begin, end, copy in segment.busy if begin < start + size and start < end]
                self.used_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
            return Slot(pieces, after, extents)

    def free(self, slot: Slot, *, after: list[StreamCopy]) -> None:
        """Gives room back; `after` are copies that may still be touching it."""
        with self._lock:
            for segment, start, size in slot.extents:
                segment.extents.free(start, size)
                self.used_bytes -= size
                segment.busy += [(start, start + size, copy) for copy in after]

    def trim(self, keep_bytes: int) -> None:
        """Gives empty segments back to the machine, large ones first, while at least `keep_bytes` remain."""
        with self._lock:
            for segment in sorted(self._segments, key=lambda one: one.extents.capacity_bytes, reverse=True):
                size = segment.extents.capacity_bytes
                if segment.extents.used_bytes == 0 and self.held_bytes - size >= keep_bytes:
                    self._release(segment)

    def close(self) -> None:
        """Unpins and gives back every segment. Closing twice does nothing."""
        with self._lock:
            for segment in list(self._segments):
                self._release(segment)

    def _whole(self, nbytes: int) -> list[tuple[_Segment, int, int]]:
        for segment in self._segments:
            start = segment.extents.allocate(nbytes)
            if start is not None:
                return [(segment, start, segment.extents.rounded(nbytes))]
        return []

    def _grown(self, nbytes: int) -> list[tuple[_Segment, int, int]]:
        """A new segment's extent, if budget and machine have room for one."""
        return self._whole(nbytes) if self._grow(nbytes) else []

    def _grow(self, nbytes: int) -> bool:
        """Adds a segment of `nbytes` or more, if budget and machine have room for one."""
        page = mmap.PAGESIZE
        wanted = max(-(-nbytes // page), 1) * page
        available = self._available_bytes()
        if wanted > min(self.capacity_bytes - self.held_bytes, available):
            self.trim(0)
            available = self._available_bytes()
        room = min(self.capacity_bytes - self.held_bytes, available) // page * page
        if wanted > room:
            return False
        size = max(wanted, min(self._segment_bytes, room))
        try:
            segment = _Segment(size, self._pin)
        except RuntimeError as error:
            self.not_pinned = str(error)
            self._pin = None
            segment = _Segment(size, None)
        self._segments.append(segment)
        return True

    def _scattered(self, nbytes: int) -> list[tuple[_Segment, int, int]]:
        """Extents that together have room, the largest first; what is missing is added."""
        page = mmap.PAGESIZE
        free = sum(segment.extents.capacity_bytes - segment.extents.used_bytes for segment in self._segments)
        if nbytes > free and not self._grow(nbytes - free):
            raise BudgetError(
                f"ram={format_size(self.capacity_bytes)}, but {format_size(nbytes)} more is needed with "
                f"{format_size(self.held_bytes)} already held ({format_size(self.used_bytes)} of it in use) and "
                f"{format_size(self._available_bytes())} available on this machine. Give a larger ram=, or disk=, or a "
                "larger vram=.",
                tier="ram",
                budget_bytes=self.capacity_bytes,
                needed_bytes=self.used_bytes + -(-nbytes // page) * page,
            )
        extents: list[tuple[_Segment, int, int]] = []
        while nbytes > 0:
            segment = max(self._segments, key=lambda segment: segment.extents.largest_free_bytes())
            size = min(segment.extents.rounded(nbytes), segment.extents.largest_free_bytes())
            start = segment.extents.allocate(size)
            assert start is not None
            extents.append((segment, start, size))
            nbytes -= size
        return extents

    def _release(self, segment: _Segment) -> None:
        for _, _, copy in segment.busy:
            copy.synchronize()
        segment.release()
        self._segments.remove(segment)


def _nothing() -> None:
    """Undoes no pinning."""


def pin_memory(buffer: torch.Tensor) -> Callable[[], None]:  # pragma: gpu
    """Pins a host tensor's memory for every CUDA context.

    Returns:
        What unpins it.

    Raises:
        RuntimeError: the driver refuses (a limit on locked memory, say); the memory stays pageable.
    """
    # Touching the pages first, in parallel, is quicker than letting the driver fault them in one by one.
    buffer.zero_()
    runtime = torch.cuda.cudart()
    status = runtime.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)
    if int(status) != 0:
        # The runtime keeps the error and would raise it from the next kernel's launch: let this one take it.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        raise RuntimeError(
            f"cudaHostRegister refused {format_size(buffer.nbytes)} with error {int(status)}; pageable memory is used "
            "instead, which copies about 7 times slower. Check `ulimit -l` and the container's memory limit."
        )

    def unpin() -> None:
        runtime.cudaHostUnregister(buffer.data_ptr())

    return unpin
