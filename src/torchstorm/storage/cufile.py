"""cuFile's driver, through cuda-bindings: one per process, opened by its first user and closed by its last.

Error codes are raised as StorageErrors, whose `errno` is the system's number below 5000 and cuFile's own from there on.
Calls release the GIL during transfers.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from torchstorm.errors import StorageError

LARGEST_BATCH = 128
_ALREADY_OPEN = 5026
_STATISTICS_LEVEL = 3  # the lowest level that distinguishes nvidia-fs, P2PDMA and POSIX
_MOST_STATISTICS_BYTES = 2**16
_UNTOUCHED = 0xA5
_UNDER_WAY = {1, 2}  # CUFILE_WAITING, CUFILE_PENDING


class Span(NamedTuple):
    """Memory [address, address + nbytes) and the file's bytes [offset, offset + nbytes)."""

    address: int
    nbytes: int
    offset: int


@dataclass(frozen=True, kw_only=True)
class PathCounters:
    """cuFile's own counts of requests by path (level 3 statistics), for all files of this process.

    Attributes:
        nvidia_fs_reads: reads by the nvidia-fs kernel module, from disk to GPU.
        p2pdma_reads: reads by the kernel's P2PDMA, from disk to GPU.
        posix_reads: reads through the host.
        nvidia_fs_writes: as nvidia_fs_reads.
        p2pdma_writes: as p2pdma_reads.
        posix_writes: as posix_reads.
        nvidia_fs_batches: batches submitted to nvidia-fs.
        p2pdma_batches: batches submitted to P2PDMA.
        posix_batch_parts: parts of batches that went through the host.
    """

    nvidia_fs_reads: int = 0
    p2pdma_reads: int = 0
    posix_reads: int = 0
    nvidia_fs_writes: int = 0
    p2pdma_writes: int = 0
    posix_writes: int = 0
    nvidia_fs_batches: int = 0
    p2pdma_batches: int = 0
    posix_batch_parts: int = 0

    def since(self, before: PathCounters) -> PathCounters:
        """The difference from the earlier counters `before`."""
        return PathCounters(**{name: value - getattr(before, name) for name, value in vars(self).items()})

    @property
    def direct(self) -> int:
        """Number of requests that bypassed the host."""
        reads, writes = self.nvidia_fs_reads + self.p2pdma_reads, self.nvidia_fs_writes + self.p2pdma_writes
        return reads + writes + self.nvidia_fs_batches + self.p2pdma_batches

    @property
    def through_host(self) -> int:
        """Number of requests through the host."""
        return self.posix_reads + self.posix_writes + self.posix_batch_parts

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in vars(self).items() if value) or "nothing counted"


class CuFile:
    """The cuFile driver of this process. `acquire` opens it, `release` closes it.

    Args:
        library: path of libcufile; "" for the one that cuda-bindings finds.

    Raises:
        StorageError: it cannot be loaded or opened.
    """

    def __init__(self, library: str) -> None:
        self._lock = threading.Lock()
        self._memory: dict[int, tuple[int, int]] = {}  # base -> (bytes, users)
        with _as_storage_errors("loading cuFile"):
            if library:
                ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)  # the bindings use a library that is already loaded
            self._api: Any = importlib.import_module("cuda.bindings.cufile")
            self.version: int = self._api.get_version()
        self.batch_stall_s = 60.0
        self._counts = True
        self._count(lambda: self._api.set_stats_level(_STATISTICS_LEVEL))
        self.ours = True  # False: other code in this process opened the driver, and it stays open
        with _as_storage_errors("cuFileDriverOpen"), _stdin_kept():
            try:
                self._api.driver_open()
            except self._api.cuFileError as error:
                if error.status != _ALREADY_OPEN:
                    raise
                self.ours = False
        self._count(self._api.stats_start)

    def close(self) -> None:
        """Closes the driver."""
        if self.ours:
            with _as_storage_errors("cuFileDriverClose"):
                self._api.driver_close()

    def register_file(self, fd: int) -> int:
        """Returns cuFile's handle for an open file. Raises StorageError."""
        description = np.zeros(1, dtype=self._api.descr_dtype)
        description["type"] = int(self._api.FileHandleType.OPAQUE_FD)
        description["handle"]["fd"] = fd
        with _as_storage_errors(f"cuFileHandleRegister of file descriptor {fd}"):
            return int(self._api.handle_register(description.ctypes.data))

    def deregister_file(self, handle: int) -> None:
        """Frees a handle. Must be called before the file is closed."""
        self._api.handle_deregister(handle)

    def register_memory(self, base: int, nbytes: int) -> None:
        """Registers memory, so that cuFile needs no buffers of its own. Registrations are counted.

        Args:
            base: start address.
            nbytes: size.

        Raises:
            StorageError: it cannot be pinned, or overlaps other registered memory.
        """
        with self._lock:
            known, users = self._memory.get(base, (nbytes, 0))
            if known != nbytes:
                raise StorageError(
                    f"{nbytes} bytes at {base:#x} are to be registered with cuFile, but {known} bytes there are already"
                )
            if not users:
                with _as_storage_errors(f"cuFileBufRegister of {nbytes} bytes"):
                    self._api.buf_register(base, nbytes, 0)
            self._memory[base] = (nbytes, users + 1)

    def deregister_memory(self, base: int) -> None:
        """Undoes one `register_memory`."""
        with self._lock:
            nbytes, users = self._memory.pop(base)
            if users > 1:
                self._memory[base] = (nbytes, users - 1)
                return
            with _as_storage_errors(f"cuFileBufDeregister of {nbytes} bytes"):
                self._api.buf_deregister(base)

    def move(self, handle: int, write: bool, span: Span) -> int:
        """One cuFileRead or cuFileWrite.

        Returns:
            Bytes moved. They can be fewer than requested, at the file's end or elsewhere.

        Raises:
            StorageError: it failed.
        """
        base, within = self._place(span)
        call = self._api.write if write else self._api.read
        name = "cuFileWrite" if write else "cuFileRead"
        with _as_storage_errors(name):
            told = call(handle, base, span.nbytes, span.offset, within)
            if told is None:
                raise StorageError(
                    f"{name}: this version of cuda-bindings does not return the bytes moved. Install 13.1 or newer."
                )
            count = int(told)
            if count < 0:  # the bindings raise only for -1
                raise _failed(name, -count, self._api.op_status_error(-count) if -count >= 5000 else "")
        return count

    def open_batch(self) -> int:
        """Creates a batch of up to `LARGEST_BATCH` requests. Raises StorageError."""
        with _as_storage_errors("cuFileBatchIOSetUp"):
            return int(self._api.batch_io_set_up(LARGEST_BATCH))

    def close_batch(self, batch: int) -> None:
        """Frees a batch."""
        self._api.batch_io_destroy(batch)

    def move_batch(self, batch: int, handle: int, write: bool, spans: Sequence[Span]) -> list[int]:
        """Moves up to `LARGEST_BATCH` spans at once and waits for all.

        Returns:
            Bytes moved for each span; 0 if it failed or the batch was refused. `move` on the span raises the reason.

        Raises:
            StorageError: the state of the requests is unknown. The batch can only be closed.
        """
        parts = np.zeros(len(spans), dtype=self._api.io_params_dtype)
        for number, span in enumerate(spans):
            base, within = self._place(span)
            place = parts[number]["u"]["batch"]
            place["dev_ptr_base"], place["dev_ptr_offset"] = base, within
            place["file_offset"], place["size_"] = span.offset, span.nbytes
        parts["mode"] = int(self._api.BatchMode.BATCH)
        parts["fh"] = handle
        parts["opcode"] = int(self._api.Opcode.WRITE if write else self._api.Opcode.READ)
        parts["cookie"] = np.arange(len(spans)) + 1  # never null
        moved = [0] * len(spans)
        try:
            self._api.batch_io_submit(batch, len(spans), parts.ctypes.data, 0)
        except (self._api.cuFileError, ValueError):
            return moved
        events = np.zeros(len(spans), dtype=self._api.io_events_dtype)
        timeout = np.array([1, 0], dtype=np.int64)  # struct timespec
        remaining, last_s = set(range(1, len(spans) + 1)), time.monotonic()
        while remaining:
            found = np.array([len(remaining)], dtype=np.uint32)
            with _as_storage_errors("cuFileBatchIOGetStatus"):
                self._api.batch_io_get_status(batch, 1, found.ctypes.data, events.ctypes.data, timeout.ctypes.data)
            for event in events[: int(found[0])]:
                if int(event["status"]) in _UNDER_WAY:
                    continue
                remaining.discard(int(event["cookie"]))
                last_s = time.monotonic()
                count = int(event["ret"].view(np.int64))  # unsigned in the header, but an error is negative
                if int(event["status"]) == int(self._api.Status.COMPLETE) and count > 0:
                    moved[int(event["cookie"]) - 1] = count
            if remaining and time.monotonic() - last_s > self.batch_stall_s:
                with _as_storage_errors("cuFileBatchIOCancel"):
                    self._api.batch_io_cancel(batch)
                raise StorageError(
                    f"cuFile reported no result for {len(remaining)} of {len(spans)} parts of a batch for "
                    f"{self.batch_stall_s:g} s. See cufile.log and the kernel's log (dmesg)."
                )
        return moved

    def path_counters(self) -> PathCounters | None:
        """Requests by path; None if this version of cuFile does not count them."""
        if not self._counts:
            return None
        basic = self._api.stats_level1_dtype
        whole = self._api.stats_level3_dtype
        gpu = self._api.per_gpu_stats_dtype
        # In other versions of the library, the first part of the structure is longer or shorter than in the bindings.
        # Its length follows from the bytes that the library wrote. The layout of the rest is fixed.
        first = self._statistics(self._api.get_stats_l1)
        everything = self._statistics(self._api.get_stats_l3)
        if first is None or everything is None:
            return None
        shift = int(np.max(np.nonzero(first != _UNTOUCHED)[0], initial=-1)) + 1 - basic.itemsize
        at = whole.fields["num_gpus"][1] + shift
        num_gpus = int(everything[at : at + 4].view(np.uint32)[0])
        at = whole.fields["per_gpu_stats"][1] + shift
        if not 0 <= num_gpus <= 16:
            return None
        gpus = everything[at : at + num_gpus * gpu.itemsize].copy().view(gpu)

        def batches(name: str) -> int:
            start = basic.fields[name][1]
            return int(everything[start : start + 8].view(np.uint64)[0])

        def total(name: str) -> int:
            return int(gpus[name].sum())

        return PathCounters(
            nvidia_fs_reads=total("n_nvfs_reads"),
            p2pdma_reads=total("n_p2p_reads"),
            posix_reads=total("n_posix_reads"),
            nvidia_fs_writes=total("n_nvfs_writes"),
            p2pdma_writes=total("n_p2p_writes"),
            posix_writes=total("n_posix_writes"),
            nvidia_fs_batches=batches("batch_nvfs_submit_ops"),
            p2pdma_batches=batches("batch_p2p_submit_ops"),
            posix_batch_parts=batches("batch_posix_enqueued_ops"),
        )

    def _statistics(self, ask: Callable[[int], object]) -> Any:
        """(bytes,) uint8 as filled by the library, which may write more bytes than the bindings expect."""
        room = np.full(_MOST_STATISTICS_BYTES, _UNTOUCHED, dtype=np.uint8)
        return room if self._count(lambda: ask(room.ctypes.data)) else None

    def _count(self, call: Callable[[], object]) -> bool:
        """Whether a statistics call succeeded. Older libraries lack these functions."""
        try:
            call()
        except Exception:  # a missing function (RuntimeError), or an error code (cuFileError)
            self._counts = False
        return self._counts

    def _place(self, span: Span) -> tuple[int, int]:
        """(base, offset from base): the registered base for registered memory, else the memory's own address."""
        with self._lock:
            for base, (nbytes, _) in self._memory.items():
                if base <= span.address and span.address + span.nbytes <= base + nbytes:
                    return base, span.address - base
        return span.address, 0


class _Shared:
    """The process's driver and the number of its users."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.driver: CuFile | None = None
        self.users = 0
        self.pid = 0


_shared = _Shared()


def acquire(library: str = "") -> CuFile:
    """Returns the process's driver, and opens it on first use.

    Raises:
        StorageError: it cannot be opened, or was opened before this process was forked.
    """
    check_not_forked()
    with _shared.lock:
        if _shared.driver is None:
            _shared.driver, _shared.pid = CuFile(library), os.getpid()
        _shared.users += 1
        return _shared.driver


def release() -> None:
    """Undoes one `acquire`. Does nothing in a forked process."""
    if _shared.pid != os.getpid():
        return
    with _shared.lock:
        _shared.users -= 1
        if not _shared.users:
            driver, _shared.driver = _shared.driver, None
            assert driver is not None
            driver.close()


def check_not_forked() -> None:
    """Raises StorageError if the driver was opened before this process was forked."""
    if _shared.driver is not None and _shared.pid != os.getpid():
        raise StorageError(
            f"cuFile was opened by process {_shared.pid} and cannot be used in the forked process {os.getpid()}. Start "
            "processes with spawn, or before the first file is opened for GPUDirect Storage."
        )


def _failed(what: str, code: int, meaning: str) -> StorageError:
    """Codes below 5000 are errno values."""
    if code < 5000:
        meaning = os.strerror(code)
    error = StorageError(f"{what} failed with {code}: {meaning}")
    error.errno = code
    return error


@contextlib.contextmanager
def _as_storage_errors(what: str) -> Iterator[None]:
    """Converts exceptions of the bindings to StorageErrors."""
    try:
        yield
    except (StorageError, AssertionError):
        raise
    except Exception as error:
        if (code := getattr(error, "status", None)) is not None:
            raise _failed(what, int(code), str(error)) from error
        # A result of -1 with errno: the bindings look errno up among cuFile's codes, and do not find it.
        if found := re.fullmatch(r"(\d+) is not a valid OpError", str(error)):
            raise _failed(what, int(found[1]), "") from error
        raise StorageError(f"{what} failed: {error}") from error


@contextlib.contextmanager
def _stdin_kept() -> Iterator[None]:
    """Reopens file descriptor 0 if it was closed meanwhile. Otherwise the next opened file would get it."""
    try:
        saved = os.dup(0)
    except OSError:  # there was none
        yield
        return
    try:
        yield
    finally:
        try:
            os.fstat(0)
        except OSError:
            os.dup2(saved, 0)
        os.close(saved)
