"""Disk below a CUDA device: bytes pass through two small rings of pinned buffers, one a direction.

A parcel crosses in pieces, so that the link and the disk work at once and the rings stay small whatever a parcel's
size. One thread a direction walks the pieces; the compute thread only waits, and only where the plan says so.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch

from torchstorm.memory.disk import DiskHandle, DiskTier
from torchstorm.memory.tier import Copy, Handle, TierSpec
from torchstorm.storage.backend import BackendInfo
from torchstorm.transfer.engine import StreamCopy
from torchstorm.transfer.pinned import PinnedArena


class CopyEngine(Protocol):
    """What is needed of `transfer.engine.Engine`."""

    def mark(self) -> object:
        """A point in the caller's current stream that later copies can be queued behind."""

    def copy_out(self, host: torch.Tensor, source: torch.Tensor, *, ready: Any) -> StreamCopy:
        """Queues device -> host."""

    def copy_in(self, out: torch.Tensor, host: torch.Tensor, *, ready: Any) -> StreamCopy:
        """Queues host -> device."""


class QueuedCopy:
    """A copy that another thread queues piece by piece; done when the last one is."""

    def __init__(self, last: Future[StreamCopy]) -> None:
        self._last = last

    def wait(self) -> None:
        """Makes the host wait until the last piece is queued, and the current stream until it has ended.

        Raises:
            StorageError: a piece failed.
        """
        self._last.result().wait()

    def synchronize(self) -> None:
        """Makes the host wait for the copy. Raises as `wait` does."""
        self._last.result().synchronize()

    def done(self) -> bool:
        """Whether the copy has ended, well or not."""
        return self._last.done() and (self._last.exception() is not None or self._last.result().done())


class StagedHandle:
    """One storage on disk, in pieces."""

    def __init__(self, nbytes: int, label: str) -> None:
        self.nbytes = nbytes
        self.label = label
        self.pieces: list[DiskHandle] = []
        self.queued: Future[StreamCopy] = Future()
        self.freed = False

    @property
    def written(self) -> Copy:
        """The copy off the device. The disk may still be writing, from the ring."""
        return QueuedCopy(self.queued)


class StagedDiskTier:
    """A `DiskTier` for tensors on a CUDA device.

    Args:
        disk: where the bytes end up; closed with this tier.
        arena: gives the rings' buffers, half a direction; closed with this tier.
        engine: the device's copy streams.
        piece_bytes: size of one buffer.
    """

    def __init__(self, disk: DiskTier, arena: PinnedArena, engine: CopyEngine, *, piece_bytes: int) -> None:
        self.disk = disk
        self._arena = arena
        self._engine = engine
        self._piece_bytes = piece_bytes
        per_ring = max(arena.capacity_bytes // piece_bytes // 2, 1)
        self._out_ring, self._back_ring = self._ring(per_ring), self._ring(per_ring)
        self._depth = per_ring
        self._out = ThreadPoolExecutor(1, thread_name_prefix="torchstorm-out")
        self._back = ThreadPoolExecutor(1, thread_name_prefix="torchstorm-back")
        self._lock = threading.Lock()
        self._closed = False

    @property
    def spec(self) -> TierSpec:
        """The disk's."""
        return self.disk.spec

    @property
    def used_bytes(self) -> int:
        """Bytes of slots in use on the disk."""
        return self.disk.used_bytes

    @property
    def peak_bytes(self) -> int:
        """The largest `used_bytes` since `reset_peak`."""
        return self.disk.peak_bytes

    def reset_peak(self) -> None:
        """Starts `peak_bytes` again from `used_bytes`."""
        self.disk.reset_peak()

    def info(self) -> BackendInfo:
        """Which path the disk's bytes take, and why."""
        return self.disk.info()

    def put(self, source: torch.Tensor, *, label: str = "") -> StagedHandle:
        """Begins to move (nbytes,) uint8 to disk. What fails is told by the wait for `written`."""
        handle = StagedHandle(source.nbytes, label)
        ready = self._engine.mark()
        self._run(self._out, handle.queued, lambda: self._send(handle, source, ready))
        return handle

    def get(self, handle: Handle, out: torch.Tensor) -> Copy:
        """Begins to bring the bytes back; what fails is told by the wait for the copy."""
        assert isinstance(handle, StagedHandle)
        ready = self._engine.mark()
        queued: Future[StreamCopy] = Future()
        self._run(self._back, queued, lambda: self._bring(handle, out, ready))
        return QueuedCopy(queued)

    def free(self, handle: Handle) -> None:
        """Gives the room on disk back, once the copy out has ended. Freeing twice does nothing."""
        assert isinstance(handle, StagedHandle)
        with self._lock:
            if handle.freed:
                return
            handle.freed = True
        handle.queued.add_done_callback(lambda _: self._free_pieces(handle))

    def close(self) -> None:
        """Lets copies end, removes the spill file and gives the rings back. Closing twice does nothing."""
        if not self._closed:
            self._closed = True
            self._out.shutdown()
            self._back.shutdown()
            self.disk.close()
            self._arena.close()

    def _ring(self, num_buffers: int) -> queue.SimpleQueue[torch.Tensor]:
        ring: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for _ in range(num_buffers):
            (buffer,) = self._arena.allocate(self._piece_bytes).pieces
            ring.put(buffer)
        return ring

    def _run(self, pool: ThreadPoolExecutor, queued: Future[StreamCopy], work: Callable[[], StreamCopy]) -> None:
        def run() -> None:
            try:
                queued.set_result(work())
            except BaseException as error:  # whoever waits for the copy is told
                queued.set_exception(error)

        pool.submit(run)

    def _free_pieces(self, handle: StagedHandle) -> None:
        for piece in handle.pieces:
            self.disk.free(piece)
        handle.pieces = []

    def _send(self, handle: StagedHandle, source: torch.Tensor, ready: object) -> StreamCopy:
        last: StreamCopy | None = None
        try:
            for part in source.split(self._piece_bytes):
                buffer = self._out_ring.get()
                staged = buffer[: part.nbytes]
                try:
                    last = self._engine.copy_out(staged, part, ready=ready)
                    last.synchronize()
                    piece = self.disk.put(staged, label=handle.label)
                except BaseException:
                    self._out_ring.put(buffer)
                    raise
                piece.written.when_done(lambda buffer=buffer: self._out_ring.put(buffer))  # type: ignore[misc]
                handle.pieces.append(piece)
        except BaseException:
            self._free_pieces(handle)
            raise
        assert last is not None
        return last

    def _bring(self, handle: StagedHandle, out: torch.Tensor, ready: object) -> StreamCopy:
        handle.queued.result()
        reading: deque[tuple[torch.Tensor, torch.Tensor, Copy]] = deque()
        copying: deque[tuple[torch.Tensor, StreamCopy]] = deque()
        last: StreamCopy | None = None
        try:
            for part, piece in zip(out.split(self._piece_bytes), handle.pieces, strict=True):
                if len(reading) + len(copying) == self._depth:
                    last = self._pass_on(reading, copying, ready)
                    self._reclaim(copying)
                buffer = self._back_ring.get()
                reading.append((part, buffer, self.disk.get(piece, buffer[: part.nbytes])))
            while reading:
                last = self._pass_on(reading, copying, ready)
        finally:
            while copying:
                self._reclaim(copying)
            for _, buffer, read in reading:  # only after a failure
                while not read.done():
                    threading.Event().wait(0.001)
                self._back_ring.put(buffer)
        assert last is not None
        return last

    def _pass_on(
        self,
        reading: deque[tuple[torch.Tensor, torch.Tensor, Copy]],
        copying: deque[tuple[torch.Tensor, StreamCopy]],
        ready: object,
    ) -> StreamCopy:
        if not reading:
            return copying[-1][1]
        part, buffer, read = reading[0]
        read.synchronize()
        reading.popleft()
        copy = self._engine.copy_in(part, buffer[: part.nbytes], ready=ready)
        copying.append((buffer, copy))
        return copy

    def _reclaim(self, copying: deque[tuple[torch.Tensor, StreamCopy]]) -> None:
        buffer, copy = copying.popleft()
        copy.synchronize()
        self._back_ring.put(buffer)
