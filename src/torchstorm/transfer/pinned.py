"""Pinned host memory in exact sizes.

PyTorch's own pinned allocator rounds to powers of two and gives back late; pinning costs about a second for 2 GiB. So
the arena pins segments with cudaHostRegister as they are first needed and keeps them, and hands out extents of them.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from torchstorm.errors import BudgetError
from torchstorm.sizes import format_size
from torchstorm.transfer.engine import StreamCopy
from torchstorm.transfer.extents import Extents


@dataclass(eq=False)
class Slot:
    """Room in the arena.

    Attributes:
        buffer: (nbytes,) uint8 on the host.
        after: copies that still touch this memory for its previous owner; a new one must follow them.
    """

    buffer: torch.Tensor
    after: list[StreamCopy]
    segment: _Segment = field(repr=False)
    start: int = field(repr=False)


class _Segment:
    def __init__(self, nbytes: int, pin: Callable[[torch.Tensor], Callable[[], None]] | None) -> None:
        self.extents = Extents(nbytes)
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.buffer = torch.frombuffer(memory, dtype=torch.uint8)
        self.unpin = pin(self.buffer) if pin else None
        self.busy: list[tuple[int, int, StreamCopy]] = []  # (start, stop, copy) of freed extents still being copied


class PinnedArena:
    """Host memory that the copy streams can reach directly, up to a budget.

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
        pin: Callable[[torch.Tensor], Callable[[], None]] | None,
        available_bytes: Callable[[], int],
        segment_bytes: int = 256 * 2**20,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.not_pinned = "" if pin else "no CUDA device"
        self._pin = pin
        self._available_bytes = available_bytes
        self._segment_bytes = segment_bytes
        self._segments: list[_Segment] = []
        self.used_bytes = 0
        self.peak_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of all segments: what the arena takes from the machine."""
        return sum(segment.extents.capacity_bytes for segment in self._segments)

    def allocate(self, nbytes: int) -> Slot:
        """Takes room, adding a segment where no free extent is large enough.

        Raises:
            BudgetError: the budget or the machine has no room for it.
        """
        start = None
        for segment in self._segments:
            start = segment.extents.allocate(nbytes)
            if start is not None:
                break
        else:
            segment = self._grow(nbytes)
            start = segment.extents.allocate(nbytes)
        assert start is not None
        stop = start + segment.extents.rounded(nbytes)
        segment.busy = [entry for entry in segment.busy if not entry[2].done()]
        after = [copy for begin, end, copy in segment.busy if begin < stop and start < end]
        self.used_bytes += stop - start
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return Slot(buffer=segment.buffer[start : start + nbytes], after=after, segment=segment, start=start)

    def free(self, slot: Slot, *, after: list[StreamCopy]) -> None:
        """Gives room back; `after` are copies that may still be touching it."""
        nbytes = slot.buffer.nbytes
        slot.segment.extents.free(slot.start, nbytes)
        size = slot.segment.extents.rounded(nbytes)
        self.used_bytes -= size
        slot.segment.busy += [(slot.start, slot.start + size, copy) for copy in after]

    def trim(self, keep_bytes: int) -> None:
        """Gives empty segments back to the machine while at least `keep_bytes` remain."""
        for segment in list(self._segments):
            size = segment.extents.capacity_bytes
            if segment.extents.used_bytes == 0 and self.held_bytes - size >= keep_bytes:
                self._release(segment)

    def close(self) -> None:
        """Unpins and gives back every segment. Closing twice does nothing."""
        for segment in list(self._segments):
            self._release(segment)

    def _grow(self, nbytes: int) -> _Segment:
        left = self.capacity_bytes - self.held_bytes
        page = mmap.PAGESIZE
        wanted = -(-nbytes // page) * page
        if wanted > left:
            self.trim(0)
            left = self.capacity_bytes - self.held_bytes
        available = self._available_bytes()
        if wanted > left or wanted > available:
            raise BudgetError(
                f"ram={format_size(self.capacity_bytes)}, but {format_size(nbytes)} more is needed with "
                f"{format_size(self.held_bytes)} already held ({format_size(self.used_bytes)} of it in use) and "
                f"{format_size(available)} available on this machine. Give a larger ram=, or disk=, or a larger vram=.",
                tier="ram",
                budget_bytes=self.capacity_bytes,
                needed_bytes=self.held_bytes + nbytes,
            )
        size = max(wanted, min(self._segment_bytes, left // page * page, available // page * page))
        try:
            segment = _Segment(size, self._pin)
        except RuntimeError as error:
            self.not_pinned = str(error)
            self._pin = None
            segment = _Segment(size, None)
        self._segments.append(segment)
        return segment

    def _release(self, segment: _Segment) -> None:
        for _, _, copy in segment.busy:
            copy.synchronize()
        if segment.unpin:
            segment.unpin()
        self._segments.remove(segment)


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
