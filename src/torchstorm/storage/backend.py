"""What every storage backend promises: bytes between a file and host memory, at any offset and any length.

A request is queued and answered with a `StorageCopy`; alignment, splitting and the choice between direct and buffered
I/O are the backend's own affair. What it really did is told by `info()`, whose counters count what the system calls
returned, because a path that was asked for is not always the path that was taken.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Protocol

from torchstorm.errors import StorageError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class IOCounters:
    """What the system calls moved so far.

    Attributes:
        direct_read_bytes: bytes that came past the page cache; whole blocks, so more than was asked for where it was
            not aligned.
        direct_read_requests: system calls that brought them.
        direct_write_bytes: bytes that went past the page cache, padding included.
        direct_write_requests: system calls that took them.
        buffered_read_bytes: bytes that came through the page cache.
        buffered_read_requests: system calls that brought them.
        buffered_write_bytes: bytes that went through the page cache.
        buffered_write_requests: system calls that took them.
        link_in_bytes: bytes that went on to a GPU through pinned buffers.
        link_out_bytes: bytes that came from a GPU through pinned buffers.
        gds_read_bytes: bytes that cuFile brought to a GPU; whether past the host, cuFile's own counters say.
        gds_read_requests: calls and parts of batches that brought them.
        gds_write_bytes: bytes that cuFile took from a GPU.
        gds_write_requests: calls and parts of batches that took them.
        nvme_read_bytes: bytes that the drive's own commands brought; whole sectors.
        nvme_read_commands: read commands that ended well.
        nvme_write_bytes: bytes that the drive's own commands took; whole sectors.
        nvme_write_commands: write commands that ended well.
    """

    direct_read_bytes: int = 0
    direct_read_requests: int = 0
    direct_write_bytes: int = 0
    direct_write_requests: int = 0
    buffered_read_bytes: int = 0
    buffered_read_requests: int = 0
    buffered_write_bytes: int = 0
    buffered_write_requests: int = 0
    link_in_bytes: int = 0
    link_out_bytes: int = 0
    gds_read_bytes: int = 0
    gds_read_requests: int = 0
    gds_write_bytes: int = 0
    gds_write_requests: int = 0
    nvme_read_bytes: int = 0
    nvme_read_commands: int = 0
    nvme_write_bytes: int = 0
    nvme_write_commands: int = 0


@dataclass(frozen=True, kw_only=True)
class BackendInfo:
    """Which path is in use.

    Attributes:
        path: "direct" (past the page cache), "buffered" (through it), "staged" (either, then pinned buffers and a
            copy stream to a GPU), "gds" (between the disk and a GPU, past the host), or "xnvme" (a drive's own
            commands).
        reason: why, for people.
        counters: the proof.
    """

    path: Literal["direct", "buffered", "staged", "gds", "xnvme"]
    reason: str
    counters: IOCounters


class StorageCopy:
    """A request under way. Structurally a tier's `Copy`; waiting blocks the host, since host memory is what moves.

    Not a `concurrent.futures.Future`: that keeps its callbacks, and with them whole tensors, after it has ended.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._calls: list[Callable[[], None]] = []
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None

    def wait(self) -> None:
        """Blocks until the copy has ended.

        Raises:
            StorageError: the copy failed. Every wait raises it again. Or this process was forked while it was under
                way: it goes on in the other one.
        """
        self.ended()
        if self._error is not None:
            # The worker's traceback alone: it would grow with each wait and keep the waiters' frames alive.
            raise self._error.with_traceback(self._traceback)

    def ended(self) -> None:
        """Blocks until the copy has ended, well or not. Raises StorageError where it never will, as `wait` does."""
        if not self._ended.is_set():
            check_process("What this copy is for", self._pid)
            self._ended.wait()

    def synchronize(self) -> None:
        """Blocks until the copy has ended. Raises as `wait` does."""
        self.wait()

    def done(self) -> bool:
        """Whether the copy has ended, well or not. Never blocks."""
        return self._ended.is_set()

    @property
    def error(self) -> BaseException | None:
        """What it failed with; None while it is under way and where it ended well."""
        return self._error

    def finish(self, error: BaseException | None = None) -> None:
        """Ends the copy; for whoever carries it out, once."""
        self._error = error
        self._traceback = error.__traceback__ if error is not None else None
        with self._lock:
            calls, self._calls = self._calls, []
            self._ended.set()
        for call in calls:
            call()

    def when_done(self, call: Callable[[], None]) -> None:
        """Calls `call` when the copy has ended: at once, or in the thread that ends it. It must not raise or wait."""
        with self._lock:
            if not self._ended.is_set():
                self._calls.append(call)
                return
        call()


def check_process(name: str, pid: int) -> None:
    """Raises StorageError where this is not process `pid`, which opened `name`: threads do not follow a fork."""
    if os.getpid() != pid:
        raise StorageError(
            f"{name} was opened by process {pid} and its threads stayed there; this is the forked process "
            f"{os.getpid()}. Open it again in this one."
        )


def when_all_done(copies: Sequence[StorageCopy], call: Callable[[], None]) -> None:
    """Calls `call` once, when every one of `copies` has ended, well or not; no thread waits meanwhile."""
    lock = threading.Lock()
    remaining = len(copies) + 1  # one for this call itself, so that it works for none, too

    def one_ended() -> None:
        nonlocal remaining
        with lock:
            remaining -= 1
            last = remaining == 0
        if last:
            call()

    for copy in copies:
        copy.when_done(one_ended)
    one_ended()


class Backend(Protocol):
    """A file that tensors are read from and written to. Safe to call from several threads.

    Tensors are contiguous, on the CPU or `device`, of any dtype; their bytes are what moves. They are kept alive until
    the copy has ended; a source must stay unchanged until then. Requests of their own run in any order, except that a
    request starts after those named in its `after` have ended, well or not.

    Attributes:
        path: of the file.
        device: whose tensors it takes besides those on the CPU; the CPU for none.
    """

    path: str
    device: torch.device

    def read_into(self, out: torch.Tensor, offset: int) -> None:
        """Fills `out` from the file's bytes at `offset`.

        Raises:
            StorageError: the file ends before, or the disk failed.
            UnsupportedError: the tensor is not contiguous, or on another device.
        """
        self.read_into_async(out, offset).synchronize()

    def write_from(self, source: torch.Tensor, offset: int) -> None:
        """Writes `source` at `offset`, not yet durable. Raises as `read_into`, or where the disk is full."""
        self.write_from_async(source, offset).synchronize()

    def read_into_async(self, out: torch.Tensor, offset: int, *, after: Sequence[StorageCopy] = ()) -> StorageCopy:
        """Begins `read_into`. What the disk raises is raised by the copy's `wait`."""
        return self.read_batch_async([(out, offset)], after=after)

    def write_from_async(self, source: torch.Tensor, offset: int, *, after: Sequence[StorageCopy] = ()) -> StorageCopy:
        """Begins `write_from`. What the disk raises is raised by the copy's `wait`."""
        return self.write_batch_async([(source, offset)], after=after)

    def read_batch_async(
        self, requests: Sequence[tuple[torch.Tensor, int]], *, after: Sequence[StorageCopy] = ()
    ) -> StorageCopy:
        """Begins to fill several tensors, each from its offset; one copy for all."""

    def write_batch_async(
        self, requests: Sequence[tuple[torch.Tensor, int]], *, after: Sequence[StorageCopy] = ()
    ) -> StorageCopy:
        """Begins to write several tensors, each at its offset; one copy for all."""

    def sync(self) -> None:
        """Makes durable what the copies that have ended wrote.

        Raises:
            StorageError: the disk failed, now or in an earlier write-back. Every later call raises it again, until the
                file is opened anew: what the kernel could not write it may have dropped, and will not tell twice.
        """

    def info(self) -> BackendInfo:
        """Which path is in use and why, with the counters that prove it."""

    def close(self) -> None:
        """Lets copies under way end, then gives back threads, memory and the file. Closing twice does nothing."""
