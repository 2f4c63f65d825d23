"""GPUDirect Storage: transfers between a disk and GPU memory that bypass the host, through NVIDIA's cuFile.

The aligned body of a request is split into blocks for cuFile. The blocks of a single tensor use cuFileRead and
cuFileWrite in several threads; a batch of tensors uses cuFile's batches. The head and the tail, which cover only a part
of an aligned unit, use the underlying backend (a pinned buffer and a copy stream). Requests that cuFile refuses use it,
too, and `info()` reports that.

A file is opened this way only if `gds_guard` finds no obstacle and `gds_canary` proves that a read bypassed the host.
`info()` reports the path "gds" as long as cuFile's own counters agree.

What was tested: no machine with GPUDirect Storage was available. The checks of `gds_guard` ran with the real cuFile
1.20, on machines where it hangs and where it opens without a GPU and registers no file; the underlying backend was used
then. All code after these checks ran only with a fake libcufile, in which device memory is host memory. Not tested: a
GPU (contexts, raw CUDA pointers), nvidia-fs, P2PDMA, and speed.
"""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch

from torchstorm.errors import StorageError, UnsupportedError
from torchstorm.storage import cufile
from torchstorm.storage.aligned import direct_alignment, round_down, round_up
from torchstorm.storage.backend import Backend, BackendInfo, StorageCopy, when_all_done
from torchstorm.storage.blocks import BlockPool
from torchstorm.storage.cufile import LARGEST_BATCH, CuFile, Span
from torchstorm.storage.direct import DirectFile
from torchstorm.storage.gds_canary import PAGE_BYTES, Ready, prove_direct, version_of
from torchstorm.storage.gds_guard import SYSTEM_PATHS, SystemPaths, why_unavailable
from torchstorm.storage.gds_resources import DevicePointer, GdsResources, Memory, as_tensor
from torchstorm.storage.staged import StagedCopy

# cuFile's codes for a file, disk or GPU that it does not support.
_FILE_REFUSED = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, 5007, 5008, 5009, 5018, 5019, 5020, 5034}
# cuFile's codes for memory that it does not support: not from cudaMalloc, or too large to be pinned.
_MEMORY_REFUSED = {5012, 5013, 5014, 5016, 5017, 5024, 5036}


class GdsFile:
    """A `Backend` for memory on one GPU. Tensors on the host use the underlying backend. Created by `open_gds`.

    Args:
        below: another backend for the same file: for edges, for refused requests, and for tensors on the host.
        driver: the cuFile driver. The caller has acquired it, and `close` releases it.
        device: the GPU.
        mark: as `Engine.mark`. A transfer waits for the earlier work of the caller's stream.
        threads: calls or batches under way at once.
        block_bytes: bytes of one call, rounded up to the alignment.
        read_only: opens the file for reading.

    Raises:
        StorageError: the file cannot be opened with O_DIRECT, or cuFile refuses it. The driver is released.
    """

    def __init__(
        self,
        below: Backend,
        driver: CuFile,
        *,
        device: torch.device,
        mark: Callable[[], Ready],
        threads: int = 4,
        block_bytes: int = 4 * 2**20,
        read_only: bool = False,
    ) -> None:
        self.path, self.device = below.path, device
        self._below, self._driver, self._mark = below, driver, mark
        owned = GdsResources(driver)
        self._owned = owned
        self._release = weakref.finalize(self, owned.close)
        try:
            owned.fd = os.open(self.path, (os.O_RDONLY if read_only else os.O_RDWR) | os.O_DIRECT)
            owned.handle = driver.register_file(owned.fd)
        except OSError as error:  # a StorageError, too
            self._release()
            told = StorageError(f"{self.path} cannot be opened for GPUDirect Storage: {error}")
            told.errno = error.errno
            raise told from error
        self.align_bytes = max(PAGE_BYTES, direct_alignment(owned.fd)[0])
        self.block_bytes = round_up(max(block_bytes, 1), self.align_bytes)
        self._pool = BlockPool(self.path, threads)
        self._lock = threading.Lock()
        self._counts = [0] * 4
        self._refused = ""
        self._memory_refused = 0
        self._evidence = "not proven"
        self._before = driver.path_counters()

    def read_into(self, out: Memory, offset: int) -> None:
        """See `Backend`."""
        self.read_into_async(out, offset).synchronize()

    def write_from(self, source: Memory, offset: int) -> None:
        """See `Backend`."""
        self.write_from_async(source, offset).synchronize()

    def read_into_async(self, out: Memory, offset: int, *, after: Sequence[StorageCopy] = ()) -> StagedCopy:
        """See `Backend`."""
        return self.read_batch_async([(out, offset)], after=after)

    def write_from_async(self, source: Memory, offset: int, *, after: Sequence[StorageCopy] = ()) -> StagedCopy:
        """See `Backend`."""
        return self.write_batch_async([(source, offset)], after=after)

    def read_batch_async(
        self, requests: Sequence[tuple[Memory, int]], *, after: Sequence[StorageCopy] = ()
    ) -> StagedCopy:
        """See `Backend`."""
        return self._queue(False, requests, after)

    def write_batch_async(
        self, requests: Sequence[tuple[Memory, int]], *, after: Sequence[StorageCopy] = ()
    ) -> StagedCopy:
        """See `Backend`."""
        return self._queue(True, requests, after)

    def register_buffer(self, memory: Memory) -> None:
        """Pins a tensor's whole storage for repeated use (cuFileBufRegister).

        It is kept alive and pinned until `deregister_buffer` or `close`. For unregistered memory, cuFile uses its own
        buffers on the GPU.

        Raises:
            StorageError: it cannot be pinned, for example because the GPU's BAR1 is too small.
            UnsupportedError: it is on another device.
        """
        self._pool.check_usable()
        storage = self._tensor(memory).untyped_storage()
        with self._lock:
            if storage.nbytes() and storage.data_ptr() not in self._owned.buffers:
                self._driver.register_memory(storage.data_ptr(), storage.nbytes())
                self._owned.buffers[storage.data_ptr()] = storage

    def deregister_buffer(self, memory: Memory) -> None:
        """Undoes `register_buffer`. No request may be using the memory."""
        self._pool.check_usable()
        base = self._tensor(memory).untyped_storage().data_ptr()
        with self._lock:
            if self._owned.buffers.pop(base, None) is not None:
                self._driver.deregister_memory(base)

    def sync(self) -> None:
        """See `Backend`."""
        self._pool.check_usable()
        self._below.sync()

    def info(self) -> BackendInfo:
        """See `Backend`. The path is "gds" only if cuFile's own counters show no request through the host."""
        below = self._below.info()
        with self._lock:
            reads, read_bytes, writes, written_bytes = self._counts
            refused, memory_refused = self._refused, self._memory_refused
        counters = replace(
            below.counters,
            gds_read_bytes=read_bytes,
            gds_read_requests=reads,
            gds_write_bytes=written_bytes,
            gds_write_requests=writes,
        )
        reason = f"cuFile {version_of(self._driver.version)}; {self._evidence}"
        now = self._driver.path_counters() if self._owned.usable else None
        if now is not None and self._before is not None:
            since = now.since(self._before)
            reason += f"; requests in this process since it was opened: {since}"
            if since.through_host and not refused:
                refused = f"cuFile itself went through the host ({since})"
        if memory_refused:
            reason += f"; {memory_refused} blocks used the underlying backend, since cuFile refused their memory"
        if refused:
            return replace(below, reason=f"{refused}; {below.path}: {below.reason}", counters=counters)
        return BackendInfo(path="gds", reason=reason, counters=counters)

    def close(self) -> None:
        """See `Backend`."""
        self.close_this()
        self._below.close()

    def close_this(self) -> None:
        """As `close`, but leaves the underlying backend open."""
        self._pool.close()
        self._release()

    def prove(self, paths: SystemPaths) -> None:
        """Reads a canary. Raises UnsupportedError if it went through the host, StorageError if the read failed."""
        self._evidence = prove_direct(
            self.path, self._driver, device=self.device, mark=self._mark, statistics=paths.nvidia_fs_statistics
        )
        self._before = self._driver.path_counters()

    def _queue(self, write: bool, requests: Sequence[tuple[Memory, int]], after: Sequence[StorageCopy]) -> StagedCopy:
        self._pool.check_usable()
        cufile.check_not_forked()
        rows = [(self._tensor(memory, moved=True), offset) for memory, offset in requests]
        for row, offset in rows:
            if offset < 0 or offset + row.nbytes > 2**63 - 1:
                raise StorageError(
                    f"{self.path} has no {row.nbytes} bytes at offset {offset}: offsets go to 2**63 - 1."
                )
        rest: list[tuple[torch.Tensor, int]] = []  # for the underlying backend
        pieces: list[_Piece] = []
        for row, offset in rows:
            if row.device != self.device or self._refused:
                rest.append((row, offset))
                continue
            row = row.view(-1).view(torch.uint8) if row.nbytes else row.new_empty(0, dtype=torch.uint8)
            stop = offset + row.nbytes
            first, last = round_up(offset, self.align_bytes), round_down(stop, self.align_bytes)
            if first >= last:
                rest.append((row, offset))
                continue
            rest += [(row[: first - offset], offset)] if offset < first else []
            rest += [(row[last - offset :], last)] if last < stop else []
            cuts = [first, *range(round_down(first, self.block_bytes) + self.block_bytes, last, self.block_bytes), last]
            pieces += [
                _Piece(row[start - offset : end - offset], start, offset, row.nbytes) for start, end in pairwise(cuts)
            ]
        # Several requests use cuFile's batches; the blocks of a single request use several threads.
        size = LARGEST_BATCH if len(requests) > 1 else 1
        parts = [pieces[start : start + size] for start in range(0, len(pieces), size)]
        ready = self._mark() if parts else None
        body = self._pool.queue(
            parts, lambda part: self._run(write, part, ready), tensors=[piece.row for piece in pieces], after=after
        )
        copy = StagedCopy()
        try:
            queue = self._below.write_batch_async if write else self._below.read_batch_async
            edges = queue(rest, after=after)
        except BaseException:
            body.ended()  # no other caller waits for it
            raise

        def ended() -> None:
            copy.last = getattr(edges, "last", None)
            copy.finish(body.error or edges.error)

        when_all_done([body, edges], ended)
        return copy

    def _tensor(self, memory: Memory, *, moved: bool = False) -> torch.Tensor:
        if isinstance(memory, DevicePointer):
            if memory.device_index != (-1 if self.device.index is None else self.device.index):
                raise UnsupportedError(f"{self.path} was opened for {self.device}, but this is {memory}.")
            return as_tensor(memory, self.device)
        if memory.device != self.device and (memory.device.type != "cpu" or not moved):
            raise UnsupportedError(f"{self.path} was opened for {self.device}, but a tensor is on {memory.device}.")
        if moved and (not memory.is_contiguous() or memory.is_conj() or memory.is_neg()):
            raise UnsupportedError(
                f"{self.path}: a contiguous tensor is needed, but this one is {tuple(memory.shape)} with strides "
                f"{memory.stride()}. Pass tensor.contiguous() (and resolve_conj, resolve_neg)."
            )
        return memory

    def _run(self, write: bool, part: list[_Piece], ready: Ready | None) -> None:
        assert ready is not None
        if self.device.type == "cuda":  # pragma: gpu
            torch.cuda.set_device(self.device)  # per thread: cuFile needs the context of the memory's GPU
        ready.synchronize()
        if not write:
            size_bytes = os.fstat(self._owned.fd).st_size
            for piece in part:
                if piece.offset + piece.nbytes > size_bytes:
                    raise self._too_short(piece, size_bytes)
        done = [0] * len(part)
        if len(part) > 1 and not self._refused:
            done = self._move_batch(write, part)
        for piece, moved in zip(part, done, strict=True):
            self._move(write, piece, moved)

    def _move_batch(self, write: bool, part: list[_Piece]) -> list[int]:
        try:
            batch = self._owned.borrow_batch()
        except StorageError:
            return [0] * len(part)
        try:
            moved = self._driver.move_batch(batch, self._owned.handle, write, [piece.span(0) for piece in part])
        except BaseException:
            self._driver.close_batch(batch)
            raise
        if any(moved):
            self._owned.batches.append(batch)
        else:  # refused: its state is unknown
            self._driver.close_batch(batch)
        for count in moved:
            self._counted(write, count)
        return moved

    def _move(self, write: bool, piece: _Piece, done: int) -> None:
        """Transfers a piece after its first `done` bytes by cuFile, and the rest by the underlying backend."""
        while not self._refused:
            done = round_down(done, self.align_bytes)
            if done == piece.row.nbytes:
                return
            try:
                count = self._driver.move(self._owned.handle, write, piece.span(done))
            except StorageError as error:
                if not self._goes_below(error):
                    told = StorageError(
                        f"{self.path}: {'writing' if write else 'reading'} {piece.nbytes} bytes at offset "
                        f"{piece.offset} failed in the block at {piece.start + done}: {error}. See cufile.log and the "
                        "kernel's log (dmesg)."
                    )
                    told.errno, told.extent = error.errno, (piece.start + done, piece.start + piece.row.nbytes)
                    raise told from error
                break
            self._counted(write, count)
            if count < min(self.align_bytes, piece.row.nbytes - done):
                break  # no aligned progress: the underlying backend continues, or raises
            done += count
        if done < piece.row.nbytes:
            queue = self._below.write_from_async if write else self._below.read_into_async
            queue(piece.row[done:], piece.start + done).synchronize()

    def _goes_below(self, error: StorageError) -> bool:
        with self._lock:
            if error.errno in _MEMORY_REFUSED:
                self._memory_refused += 1
                return True
            if error.errno in _FILE_REFUSED:
                self._refused = f"cuFile refuses this file ({error})"
                return True
        return False

    def _counted(self, write: bool, count: int) -> None:
        with self._lock:
            self._counts[2 * write] += count > 0
            self._counts[2 * write + 1] += count

    def _too_short(self, piece: _Piece, size_bytes: int) -> StorageError:
        error = StorageError(
            f"{self.path} is too short: wanted {piece.nbytes} bytes at offset {piece.offset}, got "
            f"{max(min(size_bytes - piece.offset, piece.nbytes), 0)}; it is {size_bytes} bytes long."
        )
        error.extent = piece.start, piece.start + piece.row.nbytes
        return error


class _Piece(NamedTuple):
    """A part of the request for `nbytes` at `offset`, aligned in the file."""

    row: torch.Tensor  # (bytes,) uint8 on the device
    start: int
    offset: int
    nbytes: int

    def span(self, done: int) -> Span:
        """The piece without its first `done` bytes."""
        return Span(self.row.data_ptr() + done, self.row.nbytes - done, self.start + done)


def open_gds(
    below: Backend,
    *,
    device: torch.device,
    mark: Callable[[], Ready],
    threads: int = 4,
    block_bytes: int = 4 * 2**20,
    read_only: bool = False,
    paths: SystemPaths = SYSTEM_PATHS,
) -> GdsFile:
    """Opens a file for GPUDirect Storage if that is proven to work.

    Args:
        below: another backend for the same file. Closed with this one; left open if this function fails.
        device: a GPU.
        mark: `Engine(device).mark`.
        threads: calls or batches under way at once.
        block_bytes: bytes of one call.
        read_only: opens it for reading.
        paths: where the guard looks.

    Raises:
        UnsupportedError: GPUDirect Storage cannot be used here, or is not proven to work. The message gives the reason.
    """
    if reason := why_unavailable(paths):
        raise UnsupportedError(f"{below.path}: no GPUDirect Storage: {reason}")
    try:
        driver = cufile.acquire(paths.libcufile)
        file = GdsFile(
            below, driver, device=device, mark=mark, threads=threads, block_bytes=block_bytes, read_only=read_only
        )
    except StorageError as error:
        raise UnsupportedError(f"{below.path}: no GPUDirect Storage: {error}") from error
    try:
        file.prove(paths)
    except BaseException as error:
        file.close_this()
        if isinstance(error, OSError):
            raise UnsupportedError(f"{below.path}: no GPUDirect Storage: {error}") from error
        raise
    return file


def prove(
    path: str | os.PathLike[str],
    *,
    device: torch.device,
    mark: Callable[[], Ready],
    paths: SystemPaths = SYSTEM_PATHS,
) -> str:
    """Proves that GPUDirect Storage works between a file's disk and a GPU. Returns the evidence as text.

    Args:
        path: a file that exists.
        device: the GPU.
        mark: `Engine(device).mark`.
        paths: where the guard looks.

    Raises:
        UnsupportedError: it does not work, or is not proven to work. The message gives the reason.
        StorageError: the file cannot be opened.
    """
    below = DirectFile(path, read_only=True)
    try:
        file = open_gds(below, device=device, mark=mark, read_only=True, paths=paths)
    except BaseException:
        below.close()
        raise
    evidence = file.info().reason
    file.close()
    return evidence
