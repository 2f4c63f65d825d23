"""File I/O for tensors on a GPU, through a ring of pinned buffers and a copy stream.

A request is split at multiples of `piece_bytes` of the file. One thread per direction processes the pieces of all
requests in order: while one piece is copied over the link, the disk transfers the next ones. The caller's stream waits
only when the caller calls `wait`, so compute continues meanwhile.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch

from torchstorm.errors import UnsupportedError
from torchstorm.sizes import format_size
from torchstorm.storage.aligned import memory_view, round_down
from torchstorm.storage.backend import Backend, BackendInfo, StorageCopy, when_all_done
from torchstorm.transfer.engine import StreamCopy
from torchstorm.transfer.pinned import PinnedArena

OnBytes = Callable[[int, memoryview], None]
"""Called with a request's index in its batch and its next bytes, in order, while they are in host memory."""


class CopyEngine(Protocol):
    """The methods of `transfer.engine.Engine` that are used here."""

    def mark(self) -> Any:
        """Records an event on the caller's current stream. Later copies can wait for it."""

    def copy_out(self, host: torch.Tensor, source: torch.Tensor, *, ready: Any) -> StreamCopy:
        """Queues a device-to-host copy."""

    def copy_in(self, out: torch.Tensor, host: torch.Tensor, *, ready: Any) -> StreamCopy:
        """Queues a host-to-device copy."""


class StagedCopy(StorageCopy):
    """A request through the ring. A read has ended when its last piece is queued on the copy stream."""

    def __init__(self) -> None:
        super().__init__()
        self.last: StreamCopy | None = None

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """Blocks the host until all copies are queued, and makes a stream wait for them.

        Args:
            stream: that stream; None for the current one.

        Raises:
            StorageError: the request failed.
        """
        super().wait()
        if self.last is not None:
            with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
                self.last.wait()

    def synchronize(self) -> None:
        """Blocks the host until all copies have ended. Raises as `wait` does."""
        super().wait()
        if self.last is not None:
            self.last.synchronize()

    def done(self) -> bool:
        """Whether it has ended, copies on the device included. Never blocks."""
        return super().done() and (self.last is None or self.last.done())


class StagedFile(Backend):
    """A `Backend` for tensors on one device. Tensors on the host use the underlying backend directly.

    Args:
        file: the underlying backend for host memory; closed with this one.
        device: the device.
        engine: the copy streams of the device.
        pin: as in `PinnedArena`; None leaves the ring pageable.
        num_buffers: buffers per direction, allocated when the direction is first used.
        piece_bytes: size of a buffer, rounded down to whole pages.
        why: why this path was chosen, for `info`.
    """

    def __init__(
        self,
        file: Backend,
        device: torch.device,
        engine: CopyEngine,
        *,
        pin: Callable[[torch.Tensor], Callable[[], None]] | None,
        num_buffers: int = 6,
        piece_bytes: int = 4 * 2**20,
        why: str = "",
    ) -> None:
        self.why = why
        self.path, self.device = file.path, device
        self.below, self._engine = file, engine
        self._pid = os.getpid()
        self._piece_bytes = round_down(piece_bytes, mmap.PAGESIZE)
        # One more page, so that a piece that starts within a page can be read from the page's start.
        size = num_buffers * (self._piece_bytes + mmap.PAGESIZE)
        self._shape = f"{num_buffers} pinned buffers of {format_size(self._piece_bytes)} per direction"

        def ring() -> tuple[PinnedArena, list[torch.Tensor]]:
            arena = PinnedArena(size, pin=pin, available_bytes=lambda: size, segment_bytes=size)
            (memory,) = arena.allocate(size).pieces
            return arena, list(memory.split(size // num_buffers))

        self._in, self._out = _ReadLane(file, engine, ring), _WriteLane(file, engine, ring)
        self._stop = weakref.finalize(self, _stop, self._in, self._out)
        self._closed = False

    def read_batch_async(
        self,
        requests: Sequence[tuple[torch.Tensor, int]],
        *,
        after: Sequence[StorageCopy] = (),
        on_bytes: OnBytes | None = None,
    ) -> StagedCopy:
        """See `Backend`. `on_bytes` receives the bytes read for tensors on the device."""
        return self._queue(self._in, requests, after, on_bytes, self.below.read_batch_async)

    def write_batch_async(
        self,
        requests: Sequence[tuple[torch.Tensor, int]],
        *,
        after: Sequence[StorageCopy] = (),
        on_bytes: OnBytes | None = None,
    ) -> StagedCopy:
        """See `Backend`. `on_bytes` receives the bytes written from tensors on the device."""
        return self._queue(self._out, requests, after, on_bytes, self.below.write_batch_async)

    def sync(self) -> None:
        """See `Backend`."""
        self.below.sync()

    def info(self) -> BackendInfo:
        """See `Backend`."""
        below = self.below.info()
        why = f"; {self.why}" if self.why else ""
        return replace(
            below,
            path="staged",
            reason=f"{self._shape} and a copy stream, on top of {below.path}: {below.reason}{why}",
            counters=replace(below.counters, link_in_bytes=self._in.moved_bytes, link_out_bytes=self._out.moved_bytes),
        )

    def close(self) -> None:
        """See `Backend`."""
        self._closed = True
        self._stop()
        self.below.close()

    def _queue(
        self,
        lane: _Lane,
        requests: Sequence[tuple[torch.Tensor, int]],
        after: Sequence[StorageCopy],
        on_bytes: OnBytes | None,
        below: Callable[..., StorageCopy],
    ) -> StagedCopy:
        if self._closed or os.getpid() != self._pid:
            below([]).synchronize()  # raises the error
        here = [(number, *each) for number, each in enumerate(requests) if self._is_mine(each[0])]
        mine = {number for number, _, _ in here}
        request = _Request(on_bytes)
        pieces: list[_Piece] = []
        for number, tensor, offset in here:
            if not tensor.is_contiguous() or offset < 0:
                raise UnsupportedError(
                    f"A contiguous tensor and an offset of at least 0 are needed, but this one is "
                    f"{tuple(tensor.shape)} with strides {tensor.stride()}, at offset {offset}."
                )
            pieces += self._pieces(request, number, tensor, offset)
        if not here:
            rest = below(requests, after=after)
        else:
            request.ready = self._engine.mark()
            rest = below([each for number, each in enumerate(requests) if number not in mine], after=after)
        request.remaining = len(pieces) + 1
        rest.when_done(lambda: request.ended(rest.error))
        when_all_done(after, lambda: lane.add(pieces))
        return request.copy

    def _is_mine(self, tensor: torch.Tensor) -> bool:
        if tensor.device == self.device:
            return True
        if tensor.device.type != "cpu":
            raise UnsupportedError(f"This file was opened for {self.device}, but a tensor is on {tensor.device}.")
        return False

    def _pieces(self, request: _Request, number: int, tensor: torch.Tensor, offset: int) -> list[_Piece]:
        row = tensor.view(-1).view(torch.uint8) if tensor.nbytes else tensor.new_empty(0, dtype=torch.uint8)
        size, stop = self._piece_bytes, offset + row.nbytes
        if stop == offset:
            return []
        cuts = [offset, *range(round_down(offset, size) + size, stop, size), stop]
        return [_Piece(request, number, row[start - offset : end - offset], start) for start, end in pairwise(cuts)]


class _Piece(NamedTuple):
    request: _Request
    number: int
    tensor: torch.Tensor  # (nbytes,) uint8 on the device
    offset: int


class _Request:
    def __init__(self, on_bytes: OnBytes | None) -> None:
        self.copy = StagedCopy()
        self.ready: Any = None
        self.on_bytes = on_bytes
        self.remaining = 0
        self.error: BaseException | None = None
        self._lock = threading.Lock()

    def ended(self, error: BaseException | None, last: StreamCopy | None = None) -> None:
        """Counts an ended piece, or the ended request to the underlying backend."""
        with self._lock:
            # The traceback is dropped, since its frames would keep tensors and buffers alive.
            self.error = self.error or (error.with_traceback(None) if error is not None else None)
            self.copy.last = last or self.copy.last
            self.remaining -= 1
            if self.remaining:
                return
        self.on_bytes = None
        self.copy.finish(self.error)


class _Lane:
    """The pieces of one direction, and the thread that processes them. The first piece starts the thread."""

    def __init__(
        self, file: Backend, engine: CopyEngine, ring: Callable[[], tuple[PinnedArena, list[torch.Tensor]]]
    ) -> None:
        self.moved_bytes = 0
        self._pid = os.getpid()
        self._file, self._engine, self._ring = file, engine, ring
        self._pieces: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()
        self._free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        self._num_buffers = 0
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def add(self, pieces: Sequence[_Piece]) -> None:
        """Queues pieces."""
        with self._lock:
            if pieces and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="torchstorm-staged", daemon=True)
                self._thread.start()
        for piece in pieces:
            self._pieces.put(piece)

    def stop(self) -> None:
        """Waits for the pieces and ends the thread. Does nothing in a forked process."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            thread = self._thread
        if thread is not None:
            self._pieces.put(None)
            thread.join()

    def _run(self) -> None:
        try:
            arena, buffers = self._ring()
        except BaseException as error:  # becomes the error of every request
            while (piece := self._pieces.get()) is not None:
                piece.request.ended(error)
            return
        for buffer in buffers:
            self._free.put(buffer)
        self._num_buffers = len(buffers)
        del buffers
        try:
            self._walk()
        finally:
            for _ in range(self._num_buffers):
                self._free.get()
            arena.close()

    def _walk(self) -> None:
        """Moves the pieces of its direction until it is told to stop; each direction has its own way."""
        raise NotImplementedError


class _ReadLane(_Lane):
    def _walk(self) -> None:
        reading: deque[tuple[_Piece, torch.Tensor, StorageCopy]] = deque()
        copying: deque[tuple[_Piece, torch.Tensor, StreamCopy]] = deque()
        stopping = False

        def advance() -> None:
            if copying and (not reading or copying[0][2].done()):
                _, buffer, copy = copying.popleft()  # keeps the piece's tensor alive until here
                with contextlib.suppress(Exception):  # a failed device raises in its users' own calls
                    copy.synchronize()
                self._free.put(buffer)
            elif reading:
                piece, buffer, read = reading.popleft()
                copied = self._pass_on(piece, buffer, read)
                if copied is None:
                    self._free.put(buffer)
                else:
                    copying.append((piece, buffer, copied))

        while True:
            found, piece = _take(self._pieces, block=not (reading or copying or stopping))
            if not found:
                if not reading and not copying:
                    return
                advance()
            elif piece is None:
                stopping = True
            else:
                while self._free.empty():
                    advance()
                buffer = self._free.get()
                started = self._begin_read(piece, buffer)
                if started is None:
                    self._free.put(buffer)
                else:
                    reading.append((piece, buffer, started))

    def _begin_read(self, piece: _Piece, buffer: torch.Tensor) -> StorageCopy | None:
        if piece.request.error is not None:
            piece.request.ended(None)
            return None
        first = round_down(piece.offset, mmap.PAGESIZE)  # page-aligned, so that the file needs no bounce buffer
        try:
            return self._file.read_into_async(buffer[: piece.offset - first + piece.tensor.nbytes], first)
        except BaseException as error:
            piece.request.ended(error)
            return None

    def _pass_on(self, piece: _Piece, buffer: torch.Tensor, read: StorageCopy) -> StreamCopy | None:
        request, pad = piece.request, piece.offset % mmap.PAGESIZE
        host = buffer[pad : pad + piece.tensor.nbytes]
        try:
            read.wait()
            if request.on_bytes is not None:
                request.on_bytes(piece.number, memory_view(host.data_ptr(), host.nbytes))
            copied = self._engine.copy_in(piece.tensor, host, ready=request.ready)
        except BaseException as error:
            request.ended(error)
            return None
        self.moved_bytes += host.nbytes
        request.ended(None, copied)
        return copied


class _WriteLane(_Lane):
    def _walk(self) -> None:
        copying: deque[tuple[_Piece, torch.Tensor, StreamCopy]] = deque()
        while True:
            found, piece = _take(self._pieces, block=not copying)
            if piece is not None:
                while copying and (self._free.empty() or copying[0][2].done()):
                    self._write(*copying.popleft())
                buffer = self._free.get()  # writes return their buffer when they end
                host = buffer[: piece.tensor.nbytes]
                try:
                    if piece.request.error is not None:
                        raise piece.request.error
                    copying.append(
                        (piece, buffer, self._engine.copy_out(host, piece.tensor, ready=piece.request.ready))
                    )
                except BaseException as error:
                    self._free.put(buffer)
                    piece.request.ended(error)
            elif copying:
                self._write(*copying.popleft())
                if found:  # the stop marker: handled after the running copies
                    self._pieces.put(None)
            else:
                return

    def _write(self, piece: _Piece, buffer: torch.Tensor, copied: StreamCopy) -> None:
        request, host = piece.request, buffer[: piece.tensor.nbytes]

        def written(write: StorageCopy) -> None:
            self._free.put(buffer)
            request.ended(write.error)

        try:
            copied.synchronize()
            self.moved_bytes += host.nbytes
            if request.on_bytes is not None:
                request.on_bytes(piece.number, memory_view(host.data_ptr(), host.nbytes))
            write = self._file.write_from_async(host, piece.offset)
        except BaseException as error:
            self._free.put(buffer)
            request.ended(error)
            return
        write.when_done(lambda: written(write))


def _take(pieces: queue.SimpleQueue[_Piece | None], *, block: bool) -> tuple[bool, _Piece | None]:
    """(whether there was an item, the item). An item of None stops the lane."""
    try:
        return True, pieces.get(block=block)
    except queue.Empty:
        return False, None


def _stop(*lanes: _Lane) -> None:
    for lane in lanes:
        lane.stop()
