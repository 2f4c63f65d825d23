"""Disk as a tier below a CUDA device, through two small rings of pinned buffers, one per direction.

A storage is copied in pieces, so that the link and the disk work at the same time, and the rings stay small for
storages of any size. One thread per direction processes the pieces. The compute thread waits only where the plan says.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from torchstorm.errors import BudgetError, StorageError
from torchstorm.memory.disk import DiskHandle, DiskTier
from torchstorm.memory.tier import Copy, Handle, TierSpec, budget_error, check_bytes_tensor, freed_error
from torchstorm.storage.backend import BackendInfo
from torchstorm.storage.staged import CopyEngine
from torchstorm.transfer.engine import StreamCopy
from torchstorm.transfer.pinned import PinnedArena

_PAGE = 4096


class QueuedCopy:
    """A copy whose pieces another thread queues. It has ended when the last piece has."""

    def __init__(self, last: Future[StreamCopy]) -> None:
        self._last = last

    def wait(self) -> None:
        """Makes the host wait until the last piece is queued, and the current stream until the copy has ended.

        Raises:
            StorageError: a piece failed.
        """
        self._last.result().wait()

    def synchronize(self) -> None:
        """Makes the host wait for the copy. Raises as `wait` does."""
        self._last.result().synchronize()

    def done(self) -> bool:
        """Whether the copy has succeeded or failed."""
        return self._last.done() and (self._last.exception() is not None or self._last.result().done())


class StagedHandle:
    """A storage on disk, in pieces."""

    phase = 0

    def __init__(self, nbytes: int, label: str) -> None:
        self.nbytes = nbytes
        self.label = label
        self.pieces: list[DiskHandle] = []
        self.queued: Future[StreamCopy] = Future()
        self.freed = False
        self.num_busy = 1  # the number of running puts and gets

    @property
    def written(self) -> Copy:
        """The copy from the device to the ring. The write to disk may still be running."""
        return QueuedCopy(self.queued)


class StagedDiskTier:
    """A `DiskTier` for tensors on a CUDA device.

    Args:
        disk: the disk tier; closed with this tier.
        arena: allocates the buffers of both rings, half for each; closed with this tier.
        engine: the device's copy streams.
        piece_bytes: size of one buffer.
    """

    def __init__(self, disk: DiskTier, arena: PinnedArena, engine: CopyEngine, *, piece_bytes: int) -> None:
        self.disk = disk
        self._arena = arena
        self._engine = engine
        self._piece_bytes = piece_bytes
        self._depth = max(arena.capacity_bytes // piece_bytes // 2, 1)
        # One allocation: a new arena returns it in one piece, whatever its segment size.
        (buffers,) = arena.allocate(2 * self._depth * piece_bytes).pieces
        rings = buffers.split(self._depth * piece_bytes)
        self._out_ring, self._back_ring = self._ring(rings[0]), self._ring(rings[1])
        self._out = ThreadPoolExecutor(1, thread_name_prefix="torchstorm-out")
        self._back = ThreadPoolExecutor(1, thread_name_prefix="torchstorm-back")
        # The budget is counted here, in program order. The disk tier counts later, when the copies run.
        self._used = self._peak = 0
        self._changed = threading.Condition()
        self._closed = False

    @property
    def spec(self) -> TierSpec:
        """The disk's."""
        return self.disk.spec

    @property
    def used_bytes(self) -> int:
        """Bytes of slots in use on the disk."""
        return self._used

    @property
    def peak_bytes(self) -> int:
        """The largest `used_bytes` since `reset_peak`."""
        return self._peak

    def reset_peak(self) -> None:
        """Sets `peak_bytes` to `used_bytes`."""
        with self._changed:
            self._peak = self._used

    def info(self) -> BackendInfo:
        """The disk's I/O path and the reason for it."""
        return self.disk.info()

    def put(self, source: torch.Tensor, *, label: str = "") -> StagedHandle:
        """Starts to move a tensor (nbytes,) uint8 to disk.

        Raises:
            BudgetError: the disk's budget is too small.
            StorageError: the tier is closed. Waits raise later failures.
            UnsupportedError: the tensor is not contiguous 1-D uint8.
        """
        check_bytes_tensor(source)
        ready = self._engine.mark()
        wanted = self._rounded(source.nbytes)
        with self._changed:
            self._check_open()
            if self._used + wanted > self.spec.capacity_bytes:
                where = f" in {self.disk.path}"
                raise budget_error(self.spec, label=label, wanted_bytes=wanted, used_bytes=self._used, where=where)
            self._used += wanted
            self._peak = max(self._peak, self._used)
            handle = StagedHandle(source.nbytes, label)
            self._run(self._out, handle, handle.queued, lambda: self._send(handle, source, ready))
        return handle

    def get(self, handle: Handle, out: torch.Tensor) -> Copy:
        """Starts to read the bytes back. Waiting for the copy raises its errors.

        Raises:
            StorageError: the handle was freed, `out` has another size, or the tier is closed.
            UnsupportedError: `out` is not contiguous 1-D uint8.
        """
        assert isinstance(handle, StagedHandle)
        check_bytes_tensor(out, nbytes=handle.nbytes, label=handle.label)
        ready = self._engine.mark()
        queued: Future[StreamCopy] = Future()
        with self._changed:
            self._check_open()
            if handle.freed:
                raise freed_error(handle.label)
            handle.num_busy += 1
            self._run(self._back, handle, queued, lambda: self._bring(handle, out, ready))
        return QueuedCopy(queued)

    def free(self, handle: Handle) -> None:
        """Frees the slot. The next storage there waits for running copies. A second call does nothing."""
        assert isinstance(handle, StagedHandle)
        with self._changed:
            if not handle.freed:
                handle.freed = True
                self._used -= self._rounded(handle.nbytes)
                if not handle.num_busy:
                    self._free_pieces(handle)

    def close(self) -> None:
        """Waits for copies, removes the spill file and frees the rings. A second call does nothing."""
        with self._changed:
            self._closed = True
        self._out.shutdown()
        self._back.shutdown()
        self.disk.close()
        self._arena.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError(f"the disk tier in {self.disk.path} is closed.")

    def _rounded(self, nbytes: int) -> int:
        """Bytes on disk for a storage of `nbytes`, each piece rounded up."""
        whole, rest = divmod(nbytes, self._piece_bytes)
        return whole * -(-self._piece_bytes // _PAGE) * _PAGE + -(-rest // _PAGE) * _PAGE

    def _ring(self, buffers: torch.Tensor) -> queue.SimpleQueue[torch.Tensor]:
        ring: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for buffer in buffers.split(self._piece_bytes):
            ring.put(buffer)
        return ring

    def _run(
        self,
        pool: ThreadPoolExecutor,
        handle: StagedHandle,
        queued: Future[StreamCopy],
        work: Callable[[], StreamCopy],
    ) -> None:
        def run() -> None:
            last, failed = None, None
            try:
                last = work()
            except BaseException as error:  # raised again by waits for the copy
                failed = error.with_traceback(None)  # its frames would keep the tensors alive
            with self._changed:
                handle.num_busy -= 1
                if handle.freed and not handle.num_busy:
                    self._free_pieces(handle)
            if last is not None:
                queued.set_result(last)
            else:
                queued.set_exception(failed)

        pool.submit(run)

    def _free_pieces(self, handle: StagedHandle) -> None:
        for piece in handle.pieces:
            self.disk.free(piece)
        handle.pieces = []
        self._changed.notify_all()

    def _put_piece(self, staged: torch.Tensor, label: str) -> DiskHandle:
        """Puts a piece on disk. It fits by the count in program order, but may have to wait for earlier frees."""
        with self._changed:
            while True:
                try:
                    return self.disk.put(staged, label=label)
                except BudgetError:
                    self._changed.wait()

    def _send(self, handle: StagedHandle, source: torch.Tensor, ready: object) -> StreamCopy:
        last: StreamCopy | None = None
        try:
            for part in source.split(self._piece_bytes):
                buffer = self._out_ring.get()
                staged = buffer[: part.nbytes]
                try:
                    last = self._engine.copy_out(staged, part, ready=ready)
                    last.synchronize()
                    piece = self._put_piece(staged, handle.label)
                except BaseException:
                    self._out_ring.put(buffer)
                    raise
                piece.written.when_done(lambda buffer=buffer: self._out_ring.put(buffer))  # type: ignore[misc]
                handle.pieces.append(piece)
        except BaseException:
            with self._changed:
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
                try:
                    reading.append((part, buffer, self.disk.get(piece, buffer[: part.nbytes])))
                except BaseException:
                    self._back_ring.put(buffer)
                    raise
            while reading:
                last = self._pass_on(reading, copying, ready)
            while copying:
                self._reclaim(copying)
        finally:
            while copying:  # reached only after a failure
                with contextlib.suppress(Exception):
                    self._reclaim(copying)
            for _, buffer, read in reading:
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
        part, buffer, read = reading[0]  # stays in the list until its copy to the device is queued
        read.synchronize()
        copy = self._engine.copy_in(part, buffer[: part.nbytes], ready=ready)
        reading.popleft()
        copying.append((buffer, copy))
        return copy

    def _reclaim(self, copying: deque[tuple[torch.Tensor, StreamCopy]]) -> None:
        buffer, copy = copying.popleft()
        try:
            copy.synchronize()
        finally:
            self._back_ring.put(buffer)
