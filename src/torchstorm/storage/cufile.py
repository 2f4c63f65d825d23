"""cuFile's driver, through cuda-bindings: one in a process, opened by its first user and closed by its last.

Codes become StorageErrors whose `errno` is the system's number, or cuFile's own where that is what was told (5000 and
above). Calls release the interpreter's lock while bytes move.
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
_STATISTICS_LEVEL = 3  # the lowest that tells nvidia-fs, P2PDMA and POSIX apart
_MOST_STATISTICS_BYTES = 2**16
_UNTOUCHED = 0xA5
_UNDER_WAY = {1, 2}  # CUFILE_WAITING, CUFILE_PENDING


class Span(NamedTuple):
    """Memory [address, address + nbytes) and the file from `offset` on."""

    address: int
    nbytes: int
    offset: int


@dataclass(frozen=True, kw_only=True)
class PathCounters:
    """Which way cuFile went so far, by its own count (level 3 statistics), all files of this process together.

    Attributes:
        nvidia_fs_reads: by the nvidia-fs kernel module, between the disk and the GPU.
        p2pdma_reads: by the kernel's P2PDMA, between the disk and the GPU.
        posix_reads: through the host, whatever was asked for.
        nvidia_fs_writes: as nvidia_fs_reads.
        p2pdma_writes: as p2pdma_reads.
        posix_writes: as posix_reads.
        nvidia_fs_batches: batches given to nvidia-fs.
        p2pdma_batches: batches given to P2PDMA.
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
        """What was added since `before`."""
        return PathCounters(**{name: value - getattr(before, name) for name, value in vars(self).items()})

    @property
    def direct(self) -> int:
        """All that passed the host by."""
        reads, writes = self.nvidia_fs_reads + self.p2pdma_reads, self.nvidia_fs_writes + self.p2pdma_writes
        return reads + writes + self.nvidia_fs_batches + self.p2pdma_batches

    @property
    def through_host(self) -> int:
        """All that did not."""
        return self.posix_reads + self.posix_writes + self.posix_batch_parts

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in vars(self).items() if value) or "nothing counted"


class CuFile:
    """The driver of this process. Made by `acquire`, given back by `release`.

    Args:
        library: cuFile's library; "" for the one that cuda-bindings finds.

    Raises:
        StorageError: it cannot be loaded or opened.
    """

    def __init__(self, library: str) -> None:
        self._lock = threading.Lock()
        self._memory: dict[int, tuple[int, int]] = {}  # base -> (bytes, users)
        with _told("loading cuFile"):
            if library:
                ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)  # the bindings take what is loaded already
            self._api: Any = importlib.import_module("cuda.bindings.cufile")
            self.version: int = self._api.get_version()
        self.batch_stall_s = 60.0
        self._counts = True
        self._count(lambda: self._api.set_stats_level(_STATISTICS_LEVEL))
        self.ours = True  # else somebody else's in this process, to be left open
        with _told("cuFileDriverOpen"), _stdin_kept():
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
            with _told("cuFileDriverClose"):
                self._api.driver_close()

    def register_file(self, fd: int) -> int:
        """A handle for an open file. Raises StorageError."""
        description = np.zeros(1, dtype=self._api.descr_dtype)
        description["type"] = int(self._api.FileHandleType.OPAQUE_FD)
        description["handle"]["fd"] = fd
        with _told(f"cuFileHandleRegister of file descriptor {fd}"):
            return int(self._api.handle_register(description.ctypes.data))

    def deregister_file(self, handle: int) -> None:
        """Gives a handle back, before its file is closed."""
        self._api.handle_deregister(handle)

    def register_memory(self, base: int, nbytes: int) -> None:
        """Makes memory known, so that it is moved to and from without cuFile's own buffers; counts its users.

        Args:
            base: address.
            nbytes: bytes from there on.

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
                with _told(f"cuFileBufRegister of {nbytes} bytes"):
                    self._api.buf_register(base, nbytes, 0)
            self._memory[base] = (nbytes, users + 1)

    def deregister_memory(self, base: int) -> None:
        """Undoes one `register_memory`."""
        with self._lock:
            nbytes, users = self._memory.pop(base)
            if users > 1:
                self._memory[base] = (nbytes, users - 1)
                return
            with _told(f"cuFileBufDeregister of {nbytes} bytes"):
                self._api.buf_deregister(base)

    def move(self, handle: int, write: bool, span: Span) -> int:
        """One cuFileRead or cuFileWrite.

        Returns:
            Bytes moved; fewer than asked for at the file's end, and whenever cuFile likes.

        Raises:
            StorageError: it failed.
        """
        base, within = self._place(span)
        call = self._api.write if write else self._api.read
        name = "cuFileWrite" if write else "cuFileRead"
        with _told(name):
            told = call(handle, base, span.nbytes, span.offset, within)
            if told is None:
                raise StorageError(
                    f"{name}: this cuda-bindings does not tell how many bytes moved. Install 13.1 or newer."
                )
            count = int(told)
            if count < 0:  # the bindings raise for -1 alone
                raise _failed(name, -count, self._api.op_status_error(-count) if -count >= 5000 else "")
        return count

    def open_batch(self) -> int:
        """Room for `LARGEST_BATCH` parts that are under way at once. Raises StorageError."""
        with _told("cuFileBatchIOSetUp"):
            return int(self._api.batch_io_set_up(LARGEST_BATCH))

    def close_batch(self, batch: int) -> None:
        """Gives it back."""
        self._api.batch_io_destroy(batch)

    def move_batch(self, batch: int, handle: int, write: bool, spans: Sequence[Span]) -> list[int]:
        """Moves up to `LARGEST_BATCH` spans at once and waits for all.

        Returns:
            Bytes moved of each; 0 where it failed or the batch was not taken: asking for it alone tells the reason.

        Raises:
            StorageError: what was under way was lost sight of. The batch is of no more use than to be closed.
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
            with _told("cuFileBatchIOGetStatus"):
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
                with _told("cuFileBatchIOCancel"):
                    self._api.batch_io_cancel(batch)
                raise StorageError(
                    f"cuFile told nothing of {len(remaining)} of {len(spans)} parts of a batch for "
                    f"{self.batch_stall_s:g} s. See cufile.log and the kernel's log (dmesg)."
                )
        return moved

    def path_counters(self) -> PathCounters | None:
        """Which way bytes went; None where this cuFile keeps no such count."""
        if not self._counts:
            return None
        basic = self._api.stats_level1_dtype
        whole = self._api.stats_level3_dtype
        gpu = self._api.per_gpu_stats_dtype
        # A library newer or older than the bindings has a longer or shorter first part. What it wrote tells its length;
        # the rest follows as it always did.
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
        """(bytes,) uint8 as the library filled it, which may be more than the bindings know of."""
        room = np.full(_MOST_STATISTICS_BYTES, _UNTOUCHED, dtype=np.uint8)
        return room if self._count(lambda: ask(room.ctypes.data)) else None

    def _count(self, call: Callable[[], object]) -> bool:
        """Whether a call for statistics, which older libraries lack, did what it should."""
        try:
            call()
        except Exception:  # no such function (RuntimeError), or a code (cuFileError, an Exception)
            self._counts = False
        return self._counts

    def _place(self, span: Span) -> tuple[int, int]:
        """(base, offset from it) as cuFile wants registered memory named; other memory is its own base."""
        with self._lock:
            for base, (nbytes, _) in self._memory.items():
                if base <= span.address and span.address + span.nbytes <= base + nbytes:
                    return base, span.address - base
        return span.address, 0


class _Shared:
    """The process's driver and its number of users."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.driver: CuFile | None = None
        self.users = 0
        self.pid = 0


_shared = _Shared()


def acquire(library: str = "") -> CuFile:
    """The process's driver, opened where it is not yet.

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
    """Undoes one `acquire`. In a forked process, does nothing."""
    if _shared.pid != os.getpid():
        return
    with _shared.lock:
        _shared.users -= 1
        if not _shared.users:
            driver, _shared.driver = _shared.driver, None
            assert driver is not None
            driver.close()


def check_not_forked() -> None:
    """Raises StorageError where the driver was opened before this process was forked."""
    if _shared.driver is not None and _shared.pid != os.getpid():
        raise StorageError(
            f"cuFile was opened by process {_shared.pid} and cannot be used in the forked process {os.getpid()}. Start "
            "processes with spawn, or before the first file is opened for GPUDirect Storage."
        )


def _failed(what: str, code: int, meaning: str) -> StorageError:
    """Codes below 5000 are the system's."""
    if code < 5000:
        meaning = os.strerror(code)
    error = StorageError(f"{what} failed with {code}: {meaning}")
    error.errno = code
    return error


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Makes what the bindings raise a StorageError."""
    try:
        yield
    except (StorageError, AssertionError):
        raise
    except Exception as error:
        if (code := getattr(error, "status", None)) is not None:
            raise _failed(what, int(code), str(error)) from error
        # A -1 with errno: the bindings look the number up among cuFile's codes, where it is not.
        if found := re.fullmatch(r"(\d+) is not a valid OpError", str(error)):
            raise _failed(what, int(found[1]), "") from error
        raise StorageError(f"{what} failed: {error}") from error


@contextlib.contextmanager
def _stdin_kept() -> Iterator[None]:
    """Opens file descriptor 0 again where it was closed meanwhile: the next file opened would become it."""
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
