"""Requests under way, and what is told of those that failed: to who waits for them, and to who flushes."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from torchstorm.errors import StorageError
from torchstorm.storage.backend import StorageCopy, check_process
from torchstorm.storage.staged import StagedCopy

_numbers = itertools.count(1)


class Piece(Protocol):
    """What lies somewhere in a file, and the tensor that it goes to or comes from."""

    tensor: torch.Tensor

    def named(self, extent: tuple[int, int]) -> str:
        """What of it lies at the file's bytes [start, stop): "record 3 of kind 'x' of /a.storm"; "" for nothing."""

    def verify(self) -> None:
        """Raises CorruptionError where what was read is not what was written."""


class Request:
    """A read or a write under way.

    Attributes:
        id: its number in this process.

    Args:
        copy: moves the bytes.
        parts: what is read or written.
        reads: whether it is a read, whose result is held against its checks.
        stream: the CUDA stream that waits in `wait`; None for the current one. Host memory blocks the host.
    """

    def __init__(
        self, copy: StorageCopy, parts: Sequence[Piece], *, reads: bool, stream: torch.cuda.Stream | None = None
    ) -> None:
        self.id = next(_numbers)
        self._copy, self._stream = copy, stream
        self._parts: Sequence[Piece] | None = parts
        self._unverified = reads
        self._lock = threading.Lock()

    def wait(self, stream: torch.cuda.Stream | None = None, *, verify: bool = True) -> None:
        """Blocks the host until the disk has done its part, and compares what was read with its checks.

        What is still on its way to a GPU then, a stream is made to wait for.

        Args:
            stream: that stream; None for the current one.
            verify: False leaves the comparison out.

        Raises:
            CorruptionError: a record is not what was written, or never was; every wait raises it again.
            StorageError: the disk failed, with what it failed, or the request was released.
        """
        parts = self._held()
        try:
            if isinstance(self._copy, StagedCopy):
                self._copy.wait(stream or self._stream)
            else:
                self._copy.wait()
        except StorageError as error:
            told = explained(parts, error)
            raise told from told.__cause__
        with self._lock:
            if self._unverified and verify:
                for part in parts:
                    part.verify()
                self._unverified = False

    def result(self) -> torch.Tensor:
        """Waits for a read of one part, and returns what it read. Raises as `wait` does."""
        self.wait()
        (part,) = self._held()
        return part.tensor

    def done(self) -> bool:
        """Whether it has ended, well or not. Never blocks."""
        self._held()
        return self._copy.done()

    def ended(self) -> None:
        """Blocks until the disk has done its part, well or not."""
        self._copy.ended()

    def when_ended(self, call: Callable[[], None]) -> None:
        """Calls `call` when the disk has done its part, well or not; it must not raise or wait."""
        self._copy.when_done(call)

    def release(self) -> None:
        """Lets go of its tensors; it runs to its end by itself.

        Raises:
            StorageError: it was released before.
        """
        self._held()
        self._parts = None

    def _held(self) -> Sequence[Piece]:
        if self._parts is None:
            raise StorageError(f"Request {self.id} was released: ask again for what it was about.")
        return self._parts


class Writes:
    """The writes that one object began: which are under way, and what of them failed since its last flush.

    Args:
        path: of the file, for messages.
    """

    def __init__(self, path: str) -> None:
        self._path, self._pid = path, os.getpid()
        self._lock = threading.Lock()
        self._running: dict[StorageCopy, Sequence[Piece]] = {}
        self._failed: BaseException | None = None

    def add(self, copy: StorageCopy, pieces: Sequence[Piece]) -> None:
        """Notes a write; its pieces are let go of when it has ended."""
        with self._lock:
            self._running[copy] = pieces
        copy.when_done(lambda: self._ended(copy))

    def flush(self, sync: Callable[[], None]) -> None:
        """Waits for the writes that were added before, then calls `sync`.

        Args:
            sync: makes durable what they wrote.

        Raises:
            StorageError: one failed since the last flush, which is named, or `sync` failed.
        """
        check_process(self._path, self._pid)
        with self._lock:
            running = list(self._running)
        for copy in running:
            copy.ended()
            self._ended(copy)  # the copy itself may come to say so only after this
        with self._lock:
            failed, self._failed = self._failed, None
        if failed is not None:
            raise StorageError(
                f"{self._path}: a write since the last flush failed, so not all is durable. {failed} Write it again, "
                "then flush."
            ) from failed
        sync()

    def _ended(self, copy: StorageCopy) -> None:
        with self._lock:
            pieces = self._running.pop(copy, None)
            if pieces is not None and copy.error is not None:
                self._failed = self._failed or explained(pieces, copy.error)


def explained(pieces: Sequence[Piece], error: BaseException) -> BaseException:
    """A disk's error, with what it was about in front; one that is not about bytes of the file stays as it is.

    Args:
        pieces: of the request that failed.
        error: what it failed with.
    """
    if type(error) is not StorageError or error.extent is None:
        return error
    names = [name for piece in pieces if (name := piece.named(error.extent))]
    told = StorageError(f"{', '.join(names)}: {error}")
    told.errno, told.extent = error.errno, error.extent
    told.__cause__ = error
    return told


def places(offset: int, nbytes: int, size: int, extent: tuple[int, int]) -> range:
    """Which of some neighbours reach into a range of the file, counted from 0.

    Args:
        offset: where the first one begins.
        nbytes: of all of them.
        size: of one.
        extent: the range [start, stop).
    """
    start, stop = max(extent[0], offset), min(extent[1], offset + nbytes)
    return range((start - offset) // size, (stop - 1 - offset) // size + 1) if start < stop else range(0)
