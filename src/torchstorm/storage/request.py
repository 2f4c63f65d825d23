"""Running requests. Their errors are raised by `wait` and by `flush`."""

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


class FileRegion(Protocol):
    """A region of a file and the tensor that it is read into or written from."""

    tensor: torch.Tensor

    def describe(self, extent: tuple[int, int]) -> str:
        """Names its part in the file's bytes [start, stop): "record 3 of kind 'x' of /a.storm"; "" if there is none."""

    def verify(self) -> None:
        """Raises CorruptionError if the bytes read do not match their checksums."""


class Request:
    """A running read or write.

    Attributes:
        id: its number in this process.

    Args:
        copy: the transfer.
        parts: the regions that are read or written.
        reads: whether it is a read, whose bytes are compared with their checksums.
        stream: the CUDA stream that `wait` makes wait; None for the current one. Unused for host memory.
    """

    def __init__(
        self, copy: StorageCopy, parts: Sequence[FileRegion], *, reads: bool, stream: torch.cuda.Stream | None = None
    ) -> None:
        self.id = next(_numbers)
        self._copy, self._stream = copy, stream
        self._parts: Sequence[FileRegion] | None = parts
        self._unverified = reads
        self._lock = threading.Lock()

    def wait(self, stream: torch.cuda.Stream | None = None, *, verify: bool = True) -> None:
        """Blocks the host until the disk has finished, and compares the bytes read with their checksums.

        A stream is made to wait for copies to a GPU that are still running.

        Args:
            stream: that stream; None for the current one.
            verify: False skips the comparison.

        Raises:
            CorruptionError: a record does not match its checksum, or was never written. Every wait raises it again.
            StorageError: the disk failed, or the request was released.
        """
        parts = self._parts_in_use()
        try:
            if isinstance(self._copy, StagedCopy):
                self._copy.wait(stream or self._stream)
            else:
                self._copy.wait()
        except StorageError as error:
            described = with_context(parts, error)
            raise described from described.__cause__
        with self._lock:
            if self._unverified and verify:
                for part in parts:
                    part.verify()
                self._unverified = False

    def result(self) -> torch.Tensor:
        """Waits for a read of one region, and returns its tensor. Raises as `wait` does."""
        self.wait()
        (part,) = self._parts_in_use()
        return part.tensor

    def done(self) -> bool:
        """Whether it has succeeded or failed. Never blocks."""
        self._parts_in_use()
        return self._copy.done()

    def ended(self) -> None:
        """Blocks until the disk has finished, successfully or not."""
        self._copy.ended()

    def when_ended(self, call: Callable[[], None]) -> None:
        """Calls `call` when the disk has finished, successfully or not. `call` must not raise or block."""
        self._copy.when_done(call)

    def release(self) -> None:
        """Drops the references to its tensors. The transfer itself continues.

        Raises:
            StorageError: it was released before.
        """
        self._parts_in_use()
        self._parts = None

    def _parts_in_use(self) -> Sequence[FileRegion]:
        if self._parts is None:
            raise StorageError(f"Request {self.id} was released: make a new request.")
        return self._parts


class PendingWrites:
    """The writes of one object: those still running, and the first failure since the last flush.

    Args:
        path: path of the file, for messages.
    """

    def __init__(self, path: str) -> None:
        self._path, self._pid = path, os.getpid()
        self._lock = threading.Lock()
        self._running: dict[StorageCopy, Sequence[FileRegion]] = {}
        self._failed: BaseException | None = None

    def add(self, copy: StorageCopy, pieces: Sequence[FileRegion]) -> None:
        """Adds a write. Its regions are dropped when it has ended."""
        with self._lock:
            self._running[copy] = pieces
        copy.when_done(lambda: self._ended(copy))

    def flush(self, sync: Callable[[], None]) -> None:
        """Waits for all writes added so far, then calls `sync`.

        Args:
            sync: makes their data durable.

        Raises:
            StorageError: a write failed since the last flush, or `sync` failed.
        """
        check_process(self._path, self._pid)
        with self._lock:
            running = list(self._running)
        for copy in running:
            copy.ended()
            self._ended(copy)  # here too, since the copy's callback may run only later
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
                self._failed = self._failed or with_context(pieces, copy.error)


def with_context(pieces: Sequence[FileRegion], error: BaseException) -> BaseException:
    """Prefixes an error of the disk with the regions that it affects. Returns other errors unchanged.

    Args:
        pieces: regions of the failed request.
        error: its error.
    """
    if type(error) is not StorageError or error.extent is None:
        return error
    names = [name for piece in pieces if (name := piece.describe(error.extent))]
    described = StorageError(f"{', '.join(names)}: {error}")
    described.errno, described.extent = error.errno, error.extent
    described.__cause__ = error
    return described


def overlapping(offset: int, nbytes: int, size: int, extent: tuple[int, int]) -> range:
    """Indices of the items, stored one after the other, that overlap a range of the file.

    Args:
        offset: byte offset of the first item.
        nbytes: size of all items.
        size: size of one item.
        extent: the range [start, stop) in bytes.
    """
    start, stop = max(extent[0], offset), min(extent[1], offset + nbytes)
    return range((start - offset) // size, (stop - 1 - offset) // size + 1) if start < stop else range(0)
