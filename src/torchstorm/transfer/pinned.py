"""An allocator of pinned host memory that does not round sizes to powers of two.

PyTorch's pinned allocator rounds to powers of two and frees memory late. Pinning 2 GiB takes about a second. So the
arena pins a segment with cudaHostRegister when it is first needed, keeps it, and allocates extents in it. A slot may
consist of several pieces, so an allocation succeeds whenever the free extents together are large enough.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from torchstorm.errors import BudgetError
from torchstorm.sizes import format_size
from torchstorm.transfer.engine import StreamCopy
from torchstorm.transfer.extents import Extents

_PART = 8  # of what is held: so much a new segment may add; large ones are pinned faster

Pin = Callable[[torch.Tensor], Callable[[], None]]


class _Segment:
    def __init__(self, nbytes: int, pin: Pin | None) -> None:
        self.extents = Extents(nbytes)
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.buffer = torch.frombuffer(memory, dtype=torch.uint8)
        self.busy: deque[tuple[int, int, StreamCopy]] = deque()  # (start, stop, copy) of freed extents being copied
        # Pinned memory must not be unmapped, even if nobody closes the arena: the unpin function keeps it alive.
        self._unpin = weakref.finalize(self, pin(self.buffer) if pin else _no_unpin)

    def let_go(self) -> None:
        """Unpins and frees the memory, once the copies have ended that use it."""
        for _, _, copy in self.busy:
            copy.synchronize()
        self._unpin()


@dataclass(eq=False, slots=True)
class Slot:
    """An allocation in the arena.

    Attributes:
        pieces: uint8 tensors on the host, in order. There is one, unless the free memory was fragmented or the slot is
            larger than any segment.
        after: copies of previous owners that still use this memory. New copies must wait for them.
        nbytes: total bytes of the pieces.
    """

    pieces: list[torch.Tensor]
    after: list[StreamCopy]
    extents: list[tuple[_Segment, int, int]] = field(repr=False)  # segment, start, bytes
    nbytes: int


class PinnedArena:
    """Pinned host memory up to a budget. Thread-safe.

    A slot that was freed is kept as it is for the next one of just as many bytes, since every step of training asks for
    the same ones. Where there is no room left for another one, all those are given up.

    Args:
        capacity_bytes: the budget, an upper limit for the sum of all segments.
        pin: pins a tensor's memory and returns the function that unpins it; raises RuntimeError if it cannot. None
            leaves the memory pageable.
        available_bytes: returns the free memory of the machine or cgroup; called before a segment is added.
        segment_bytes: size of the first segments; later ones grow with what is held.
        largest_bytes: of a segment; a larger slot has several pieces. None for no limit: then slots have one piece as
            long as there is room.

    Attributes:
        lock: held by every method, and by a tier of this memory.
    """

    __slots__ = ("__dict__", "__weakref__", "_spare", "lock", "peak_bytes", "used_bytes")  # C++ asks for them

    def __init__(
        self,
        capacity_bytes: int,
        *,
        pin: Pin | None,
        available_bytes: Callable[[], int],
        segment_bytes: int = 256 * 2**20,
        largest_bytes: int | None = None,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.not_pinned = "" if pin else "no CUDA device"
        self.used_bytes = 0
        self.peak_bytes = 0
        self._pin = pin
        self._available_bytes = available_bytes
        self._segment_bytes = segment_bytes
        self._largest_bytes = largest_bytes or capacity_bytes or 1
        self._segments: list[_Segment] = []
        self._spare: dict[int, deque[Slot]] = {}  # freed slots by their bytes, the first freed first
        self.lock = threading.RLock()
        self._leaving: list[_Segment] = []  # empty ones that `release_one` unpins

    @property
    def held_bytes(self) -> int:
        """Total bytes of the segments, used or free."""
        return sum(segment.extents.capacity_bytes for segment in [*self._segments, *self._leaving])

    @property
    def is_leaving(self) -> bool:
        """Whether there are segments that `trim` has chosen, and `release_one` would unpin."""
        return bool(self._leaving)

    def allocate(self, nbytes: int) -> Slot:
        """Allocates memory, and adds a segment if no free extent is large enough.

        Raises:
            BudgetError: the budget or the machine's memory is too small.
        """
        with self.lock:
            spare = self._spare.get(nbytes)
            if spare:
                slot = spare.popleft()
                slot.after = [copy for copy in slot.after if not copy.done()]
                for _, _, size in slot.extents:
                    self._count(size)
                return slot
            extents = self._in_one_segment(nbytes)
            if not extents and self._give_up_spare():
                extents = self._in_one_segment(nbytes)
            extents = extents or self._in_parts(nbytes) or self._in_pieces(nbytes)
            pieces, after, left = [], [], nbytes
            for segment, start, size in extents:
                pieces.append(segment.buffer[start : start + min(size, left)])
                left -= pieces[-1].nbytes
                busy, stop = segment.busy, start + size
                while busy and busy[0][2].done():  # the first ones end first, and to ask takes the host 3 us
                    busy.popleft()
                after += [copy for begin, end, copy in busy if begin < stop and start < end and not copy.done()]
                self._count(size)
            return Slot(pieces, after, extents, nbytes)

    def free(self, slot: Slot, *, after: list[StreamCopy]) -> None:
        """Frees a slot. `after` are copies that may still use its memory, and no other slot's."""
        slot.after = [*slot.after, *after]  # the owner may have followed none of those before it
        with self.lock:
            for _, _, size in slot.extents:
                self.used_bytes -= size
            if len(slot.extents) <= max(1, -(-slot.nbytes // self._largest_bytes)):  # as few as there can be
                self._spare.setdefault(slot.nbytes, deque()).append(slot)
            else:
                _give_up([slot])

    def trim(self, keep_bytes: int, *, one_by_one: bool = False) -> None:
        """Frees empty segments, the largest first, while at least `keep_bytes` remain.

        Args:
            keep_bytes: what is kept.
            one_by_one: `release_one` frees them, unless they are needed before.
        """
        with self.lock:
            self._give_up_spare()
            self._segments += self._leaving
            self._leaving = []
            left_bytes = self.held_bytes
            for segment in sorted(self._segments, key=lambda one: one.extents.capacity_bytes, reverse=True):
                size = segment.extents.capacity_bytes
                if segment.extents.used_bytes == 0 and left_bytes - size >= keep_bytes:
                    self._segments.remove(segment)
                    self._leaving.append(segment)
                    left_bytes -= size
            while self._leaving and not one_by_one:
                self.release_one()

    def release_one(self) -> None:
        """Unpins and frees one of the segments that `trim` has chosen, if there is one."""
        with self.lock:
            if self._leaving:
                self._leaving.pop(0).let_go()

    def close(self) -> None:
        """Unpins and frees every segment. A second call does nothing."""
        with self.lock:
            self._give_up_spare()
            leaving, self._segments, self._leaving = [*self._segments, *self._leaving], [], []
            for segment in leaving:
                segment.let_go()

    def _count(self, nbytes: int) -> None:
        self.used_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def _give_up_spare(self) -> bool:
        """Makes what freed slots take free for slots of other sizes; returns whether there were any."""
        spare, self._spare = self._spare, {}
        _give_up([slot for slots in spare.values() for slot in slots])
        return bool(spare)

    def _in_one_segment(self, nbytes: int) -> list[tuple[_Segment, int, int]]:
        for place, segment in enumerate(self._segments):
            start = segment.extents.allocate(nbytes)
            if start is not None:
                if place:  # the next extent is looked for here first
                    self._segments.insert(0, self._segments.pop(place))
                return [(segment, start, segment.extents.rounded(nbytes))]
        return []

    def _in_parts(self, nbytes: int) -> list[tuple[_Segment, int, int]]:
        """Extents of at most the largest segment, each in one, which may be new; none if there is no room for them."""
        if nbytes > self.held_bytes - self.used_bytes + self._room_bytes():
            return []
        extents: list[tuple[_Segment, int, int]] = []
        try:
            for start in range(0, max(nbytes, 1), self._largest_bytes):
                part = min(nbytes - start, self._largest_bytes)
                found = self._in_one_segment(part) if part < nbytes else []  # for all of it `allocate` has looked
                found = found or self._in_new_segment(part)
                if not found:
                    break
                extents += found
        finally:
            is_whole = sum(size for _, _, size in extents) >= nbytes
            if not is_whole:
                _give_up([Slot([], [], extents, nbytes)])
        return extents if is_whole else []

    def _in_new_segment(self, nbytes: int) -> list[tuple[_Segment, int, int]]:
        """An extent of a segment that was about to be unpinned, or of a new one, if the budget and the machine's memory
        allow one."""
        for segment in reversed(self._leaving):
            if segment.extents.rounded(nbytes) <= segment.extents.capacity_bytes:
                self._leaving.remove(segment)
                self._segments.append(segment)
                return self._in_one_segment(nbytes)
        return self._in_one_segment(nbytes) if self._add_segment(nbytes) else []

    def _add_segment(self, nbytes: int) -> bool:
        """Adds a segment of `nbytes` or more, if the budget and the machine's memory allow one."""
        page = mmap.PAGESIZE
        wanted = max(-(-nbytes // page), 1) * page
        if wanted > self._room_bytes():
            self.trim(0)
        room = self._room_bytes() // page * page
        if wanted > room:
            return False
        usual = min(max(self._segment_bytes, self.held_bytes // _PART), self._largest_bytes)
        size = max(wanted, min(usual // page * page, room))
        try:
            segment = _Segment(size, self._pin)
        except RuntimeError as error:
            self.not_pinned = str(error)
            self._pin = None
            segment = _Segment(size, None)
        self._segments.append(segment)
        return True

    def _room_bytes(self) -> int:
        """What segments may be added, by the budget and the machine's memory."""
        return min(self.capacity_bytes - self.held_bytes, self._available_bytes())

    def _free_bytes(self) -> int:
        return sum(segment.extents.capacity_bytes - segment.extents.used_bytes for segment in self._segments)

    def _in_pieces(self, nbytes: int) -> list[tuple[_Segment, int, int]]:
        """Several free extents, the largest first. If they are too small together, segments are added."""
        page = mmap.PAGESIZE
        if nbytes > self._free_bytes():
            self.trim(0)  # a segment that is added may take the place of several that are too small
        missing = max(0, nbytes - self._free_bytes())
        for added in range(0, missing, self._largest_bytes):
            if missing - added > self._room_bytes():
                break
            self._add_segment(min(missing - added, self._largest_bytes))
        if nbytes > self._free_bytes():
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


def _give_up(slots: list[Slot]) -> None:
    """Frees the extents of slots that nobody uses any more."""
    segments = {id(segment): segment for slot in slots for segment, _, _ in slot.extents}
    known = {at: {id(copy) for _, _, copy in segment.busy} for at, segment in segments.items()}
    for slot in slots:
        for segment, start, size in slot.extents:
            segment.extents.free(start, size)
            new = [copy for copy in slot.after if id(copy) not in known[id(segment)]]  # others have a place there
            segment.busy += [(start, start + size, copy) for copy in new]


def _no_unpin() -> None:
    """Stands for the unpin function of pageable memory."""


def pin_memory(buffer: torch.Tensor) -> Callable[[], None]:  # pragma: gpu
    """Pins a host tensor's memory for every CUDA context.

    Returns:
        The function that unpins it.

    Raises:
        RuntimeError: the driver refuses, for example at the limit on locked memory. The memory stays pageable.
    """
    # Faulting the pages in first, in parallel, is faster than in the driver, which does it one by one.
    buffer.zero_()
    runtime, device = torch.cuda.cudart(), torch.cuda.current_device()
    status = runtime.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)
    if int(status) != 0:
        # The runtime would report this error at the next kernel launch, so launch one here and ignore the error.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        raise RuntimeError(
            f"cudaHostRegister refused {format_size(buffer.nbytes)} with error {int(status)}; pageable memory is used "
            "instead, which copies about 7 times slower. Check `ulimit -l` and the container's memory limit."
        )

    def unpin() -> None:
        with torch.cuda.device(device):  # another thread may do it
            runtime.cudaHostUnregister(buffer.data_ptr())

    return unpin
