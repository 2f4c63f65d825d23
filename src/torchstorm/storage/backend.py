"""The interface of storage backends: reads and writes between a file and host memory, at any offset and any length.

A request is queued and returns a `StorageCopy`. The backend handles alignment, splitting and the choice between direct
and buffered I/O. `info()` reports the path that was really used. Its counters are taken from the results of system
calls, since the requested path is not always the path used.
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
    """Bytes and requests so far, by path.

    Attributes:
        direct_read_bytes: bytes read with O_DIRECT. Reads are whole blocks, so unaligned requests read more bytes than
            requested.
        direct_read_requests: system calls for them.
        direct_write_bytes: bytes written with O_DIRECT, padding included.
        direct_write_requests: system calls for them.
        buffered_read_bytes: bytes read through the page cache.
        buffered_read_requests: system calls for them.
        buffered_write_bytes: bytes written through the page cache.
        buffered_write_requests: system calls for them.
        link_in_bytes: bytes copied to a GPU through pinned buffers.
        link_out_bytes: bytes copied from a GPU through pinned buffers.
        gds_read_bytes: bytes read to a GPU by cuFile. cuFile's own counters show whether they bypassed the host.
        gds_read_requests: calls and parts of batches for them.
        gds_write_bytes: bytes written from a GPU by cuFile.
        gds_write_requests: calls and parts of batches for them.
        nvme_read_bytes: bytes read by NVMe commands, whole sectors.
        nvme_read_commands: successful read commands.
        nvme_write_bytes: bytes written by NVMe commands, whole sectors.
        nvme_write_commands: successful write commands.
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
    """The I/O path in use.

    Attributes:
        path: "direct" (O_DIRECT), "buffered" (through the page cache), "staged" (one of these, with pinned buffers and
            a copy stream to a GPU), "gds" (GPUDirect Storage: between disk and GPU, bypassing the host), or "xnvme"
            (NVMe commands).
        reason: why this path is used, as text.
        counters: bytes and requests that prove it.
    """

    path: Literal["direct", "buffered", "staged", "gds", "xnvme"]
    reason: str
    counters: IOCounters


Drive = Callable[[bool], bool]
ELSEWHERE_S = 0.001


class StorageCopy:
    """A request in progress. It implements the `Copy` protocol of tiers. Waiting blocks the host.

    It is no `concurrent.futures.Future`, since a finished Future keeps its callbacks, and so their tensors, alive.

    Args:
        drive: where no thread ends the copy, but whoever asks for it: finds out what has ended, with True waits for
            something that will, and returns whether anything may come. None where a thread ends it.
    """

    def __init__(self, drive: Drive | None = None) -> None:
        self._pid = os.getpid()
        self._drive = drive
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._calls: list[Callable[[], None]] = []
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None

    def wait(self) -> None:
        """Blocks until the copy has ended.

        Raises:
            StorageError: the copy failed; every call raises it again. Or this process was forked during the copy,
                which ends in the parent process only.
        """
        self.ended()
        if self._error is not None:
            # With only the worker's traceback: a shared one would grow with each wait and keep frames alive.
            raise self._error.with_traceback(self._traceback)

    def ended(self) -> None:
        """Blocks until the copy has succeeded or failed. Raises StorageError only in a forked process."""
        if not self._ended.is_set():
            check_process("The file of this copy", self._pid)
            while self._drive is not None and not self._ended.is_set():
                if not self._drive(True):
                    self._ended.wait(ELSEWHERE_S)  # another thread is about to end it, or what it follows
            self._ended.wait()

    def synchronize(self) -> None:
        """Blocks until the copy has ended. Raises as `wait` does."""
        self.wait()

    def done(self) -> bool:
        """Whether the copy has succeeded or failed. Never blocks."""
        if self._drive is not None and not self._ended.is_set():
            self._drive(False)
        return self._ended.is_set()

    @property
    def error(self) -> BaseException | None:
        """The error of a failed copy; None while it runs and if it succeeded."""
        return self._error

    def finish(self, error: BaseException | None = None) -> None:
        """Marks the copy as ended. The backend calls it once."""
        self._error = error
        self._traceback = error.__traceback__ if error is not None else None
        with self._lock:
            calls, self._calls = self._calls, []
            self._ended.set()
        for call in calls:
            call()

    def when_done(self, call: Callable[[], None]) -> None:
        """Calls `call` when the copy has ended: at once, or in the thread that ends it. It must not raise or block."""
        with self._lock:
            if not self._ended.is_set():
                self._calls.append(call)
                return
        call()


def check_process(name: str, pid: int) -> None:
    """Raises StorageError unless this is process `pid`, which opened `name`: threads do not survive a fork."""
    if os.getpid() != pid:
        raise StorageError(
            f"{name} was opened by process {pid}, and its threads run only there; this is the forked process "
            f"{os.getpid()}. Open it again in this process."
        )


def when_all_done(copies: Sequence[StorageCopy], call: Callable[[], None]) -> None:
    """Calls `call` once, when all `copies` have succeeded or failed. No thread blocks meanwhile."""
    lock = threading.Lock()
    remaining = len(copies) + 1  # one for this call itself, so that it works with no copies

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
    """A file that tensors are read from and written to. Thread-safe.

    Tensors are contiguous, on the CPU or `device`, of any dtype. The backend keeps them alive until the copy has ended.
    A source must stay unchanged until then. Requests run in any order, except that a request starts only after the
    copies in its `after` have succeeded or failed.

    Attributes:
        path: path of the file.
        device: device of the tensors accepted besides those on the CPU.
    """

    path: str
    device: torch.device

    def read_into(self, out: torch.Tensor, offset: int) -> None:
        """Fills `out` from the file's bytes at `offset`.

        Raises:
            StorageError: the file is too short, or the disk failed.
            UnsupportedError: the tensor is not contiguous, or on another device.
        """
        self.read_into_async(out, offset).synchronize()

    def write_from(self, source: torch.Tensor, offset: int) -> None:
        """Writes `source` at `offset`. `sync` makes it durable. Raises as `read_into`, or if the disk is full."""
        self.write_from_async(source, offset).synchronize()

    def read_into_async(self, out: torch.Tensor, offset: int, *, after: Sequence[StorageCopy] = ()) -> StorageCopy:
        """Starts `read_into`. The copy's `wait` raises errors of the disk."""
        return self.read_batch_async([(out, offset)], after=after)

    def write_from_async(self, source: torch.Tensor, offset: int, *, after: Sequence[StorageCopy] = ()) -> StorageCopy:
        """Starts `write_from`. The copy's `wait` raises errors of the disk."""
        return self.write_batch_async([(source, offset)], after=after)

    def read_batch_async(
        self, requests: Sequence[tuple[torch.Tensor, int]], *, after: Sequence[StorageCopy] = ()
    ) -> StorageCopy:
        """Starts to fill several tensors, each from its offset. Returns one copy for all."""

    def write_batch_async(
        self, requests: Sequence[tuple[torch.Tensor, int]], *, after: Sequence[StorageCopy] = ()
    ) -> StorageCopy:
        """Starts to write several tensors, each at its offset. Returns one copy for all."""

    def sync(self) -> None:
        """Makes the data of finished writes durable.

        Raises:
            StorageError: the disk failed, now or in an earlier write-back. Every later call raises it again until the
                file is reopened: the kernel may have dropped the data, and it reports a failed write-back only once.
        """

    def info(self) -> BackendInfo:
        """The path in use and the reason for it, with the counters that prove it."""

    def close(self) -> None:
        """Waits for running copies, then frees threads, memory and the file. A second call does nothing."""
