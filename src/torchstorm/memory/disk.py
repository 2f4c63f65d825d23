"""Disk as a tier: storages in 4096-aligned slots of one spill file, written and read with O_DIRECT.

The budget is counted in program order: `free` frees a slot at once, and the next storage there waits for the copies
that still use it. So `used_bytes` and BudgetError do not depend on the disk's progress. A slot may consist of several
pieces of the file, so `put` never fails because of fragmentation.
"""

from __future__ import annotations

import os
import shutil
import threading
import weakref
import zlib
from ctypes import memmove, string_at
from functools import partial
from mmap import PAGESIZE
from typing import TYPE_CHECKING

from torchstorm.errors import CorruptionError, StorageError, UnsupportedError
from torchstorm.memory.spill import SpillDirectory
from torchstorm.memory.tier import Handle, TierSpec, budget_error, check_bytes_tensor, freed_error
from torchstorm.storage.aligned import aligned_empty, byte_view, round_down
from torchstorm.storage.backend import BackendInfo, Drive, IOCounters, StorageCopy
from torchstorm.storage.direct import DirectFile
from torchstorm.transfer.extents import Extents

if TYPE_CHECKING:
    import torch

_POISON_BYTES = 2**20
_LEAST_BYTES = 4 * PAGESIZE  # of a storage whose edges stay


class DiskHandle:
    """A storage in the spill file: its whole pages of memory, while what lies before and behind them stays here.

    Direct I/O wants memory at whole pages, and most tensors begin in the middle of one. So nothing of them is copied.

    Attributes:
        nbytes: size of the storage.
        label: name for error messages.
        written: the copy into the file.
        phase: at how many bytes in a page the storage began, where that matters.
        before, behind: its bytes that are not in the file.
    """

    def __init__(
        self,
        source: torch.Tensor,
        label: str,
        pieces: list[tuple[int, int]],
        checksum: int | None,
        drive: Drive | None,
    ) -> None:
        self.nbytes = nbytes = source.nbytes
        self.label = label
        address, first, last = source.data_ptr(), 0, nbytes
        if len(pieces) == 1 and nbytes >= _LEAST_BYTES:
            first = -address % PAGESIZE
            last = first + round_down(nbytes - first, PAGESIZE)
        self.phase = -first % PAGESIZE
        self.before, self.behind = string_at(address, first), string_at(address + last, nbytes - last)
        self.written = StorageCopy(drive)
        self.pieces: list[tuple[int, int]] | None = pieces  # (offset, bytes); None after `free`
        self.checksum = checksum
        self.reads: list[StorageCopy] = []

    def pages(self, tensor: torch.Tensor) -> torch.Tensor:
        """What of a tensor of its size is in the file."""
        first, last = len(self.before), self.nbytes - len(self.behind)
        return tensor[first:last] if last - first != self.nbytes else tensor

    def fill_edges(self, out: torch.Tensor) -> None:
        """Copies the rest into such a tensor."""
        address = out.data_ptr()
        memmove(address, self.before, len(self.before))
        memmove(address + self.nbytes - len(self.behind), self.behind, len(self.behind))


class DiskTier:
    """A `Tier` with a spill file in its own directory, which is removed when the tier is closed or the process ends.

    Waiting for a copy blocks the host. Reads into buffers of `empty_at_phase` need no bounce buffer.

    Args:
        directory: parent of the spill directory. It is created if its own parent exists. Spill directories of dead
            processes in it are removed.
        capacity_bytes: the budget; None for 90 % of the free space.
        check: compares checksums of each storage, and overwrites freed slots. Slow; for debugging.
        threads: number of blocks in flight.
        block_bytes, straight_bytes: bytes of one system call, as for a `DirectFile`.
        unattended: likewise, for callers that ask for their copies.
        write_bytes_per_s: write speed for `spec`, as measured by `measure_disk`.
        read_bytes_per_s: read speed for `spec`.

    Raises:
        StorageError: the directory cannot be used.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        capacity_bytes: int | None,
        check: bool = False,
        threads: int = 4,
        block_bytes: int = 2**20,
        straight_bytes: int = 0,
        unattended: bool = False,
        write_bytes_per_s: float = float("inf"),
        read_bytes_per_s: float = float("inf"),
    ) -> None:
        self._spill = SpillDirectory(directory)
        # Registered first, since the process may end, or the next line fail, without close().
        self._remove = weakref.finalize(self, self._spill.remove)
        if capacity_bytes is None:
            capacity_bytes = shutil.disk_usage(self._spill.path).free * 9 // 10
        self.spec = TierSpec(
            name="disk",
            capacity_bytes=capacity_bytes,
            write_bytes_per_s=write_bytes_per_s,
            read_bytes_per_s=read_bytes_per_s,
        )
        self._file = DirectFile(
            self._spill.file_path,
            create=True,
            threads=threads,
            block_bytes=block_bytes,
            straight_bytes=straight_bytes,
            unattended=unattended,
        )
        self._extents = Extents(capacity_bytes, alignment_bytes=self._file.align_bytes)
        self._check = check
        self._poison: torch.Tensor | None = None
        self._busy: list[tuple[int, int, StorageCopy]] = []  # freed extents that copies still use
        self._lock = threading.RLock()  # whoever asks for a copy may be the one that ends others
        self._closed = False
        self.peak_bytes = 0

    @property
    def path(self) -> str:
        """The spill directory."""
        return self._spill.path

    @property
    def used_bytes(self) -> int:
        """Bytes of slots in use, each rounded up to whole pages of the file."""
        return self._extents.used_bytes

    @property
    def staging_bytes(self) -> int:
        """Host bytes of bounce buffers: `threads * block_bytes`, allocated on first use."""
        return self._file.staging_bytes

    def reset_peak(self) -> None:
        """Sets `peak_bytes` to `used_bytes`."""
        with self._lock:
            self.peak_bytes = self.used_bytes

    def counters(self) -> IOCounters:
        """Bytes and requests so far."""
        return self._file.info().counters

    def info(self) -> BackendInfo:
        """The I/O path and the reason for it."""
        return self._file.info()

    def put(self, source: torch.Tensor, *, label: str = "") -> DiskHandle:
        """Starts to write a contiguous 1-D uint8 tensor.

        Args:
            source: must stay unchanged until the handle's `written` has ended.
            label: name for error messages.

        Raises:
            BudgetError: the slots in use and this one exceed the budget.
            StorageError: the tier is closed. If the disk is full or fails, waiting for `written` raises the error; the
                slot is freed then, and the tier stays usable.
            UnsupportedError: the tensor is not contiguous 1-D uint8 on the CPU.
        """
        _check_bytes(source)
        checksum = zlib.crc32(byte_view(source)) if self._check and source.nbytes else None
        with self._lock:
            self._check_open()
            pieces = self._allocate(source.nbytes, label)
            handle = DiskHandle(source, label, pieces, checksum, self._file.drive)
            self._busy = [entry for entry in self._busy if not entry[2].done()]
            after = [
                copy
                for start, stop, copy in self._busy
                if any(offset < stop and start < offset + nbytes for offset, nbytes in pieces)
            ]
            requests = _requests(handle.pages(source), pieces)
            write = self._file.write_batch_async(requests, after=after, whole_blocks=True)
        write.when_done(partial(self._put_ended, handle, pieces, write))
        return handle

    def get(self, handle: Handle, out: torch.Tensor) -> StorageCopy:
        """Starts to read a storage back, after its `put` has ended.

        Returns:
            The copy. Its wait raises CorruptionError if `check` finds changed bytes, and the error of a failed `put`.

        Raises:
            StorageError: the handle was freed, or the tier is closed, or `out` has another size.
            UnsupportedError: `out` is not contiguous 1-D uint8 on the CPU.
        """
        assert isinstance(handle, DiskHandle)
        _check_bytes(out, nbytes=handle.nbytes, label=handle.label)
        copy = StorageCopy(self._file.drive)
        with self._lock:
            self._check_open()
            if handle.pieces is None:
                if handle.written.error is not None:
                    return handle.written
                raise freed_error(handle.label)
            handle.fill_edges(out)
            requests = _requests(handle.pages(out), handle.pieces)
            read = self._file.read_batch_async(requests, after=[handle.written])
            handle.reads = [earlier for earlier in handle.reads if not earlier.done()] + [copy]
        read.when_done(partial(self._get_ended, handle, out, read, copy))
        return copy

    def free(self, handle: Handle) -> None:
        """Frees the slot. The next storage there waits for running copies. A second call does nothing."""
        assert isinstance(handle, DiskHandle)
        with self._lock:
            if handle.pieces is None or self._closed:
                return
            after = [copy for copy in [handle.written, *handle.reads] if not copy.done()]
            if self._check:
                after = [self._file.write_batch_async(self._poison_requests(handle.pieces), after=after)]
            self._free_slot(handle, after)

    def close(self) -> None:
        """Waits for copies, then removes the spill file and its directory. A second call does nothing."""
        with self._lock:
            self._closed = True
        self._file.close()
        self._remove()

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError(f"the disk tier in {self.path} is closed.")

    def _allocate(self, nbytes: int, label: str) -> list[tuple[int, int]]:
        needed = self._extents.rounded(nbytes)
        used = self._extents.used_bytes
        if used + needed > self._extents.capacity_bytes:
            where = f" in {self.path}"
            raise budget_error(self.spec, label=label, wanted_bytes=needed, used_bytes=used, where=where)
        pieces = []
        while needed:
            size = min(needed, self._extents.largest_free_bytes())
            offset = self._extents.allocate(size)
            assert offset is not None
            pieces.append((offset, size))
            needed -= size
        self.peak_bytes = max(self.peak_bytes, self._extents.used_bytes)
        return pieces

    def _free_slot(self, handle: DiskHandle, after: list[StorageCopy]) -> None:
        assert handle.pieces is not None
        for offset, nbytes in handle.pieces:
            self._extents.free(offset, nbytes)
            self._busy += [(offset, offset + nbytes, copy) for copy in after]
        handle.pieces = None

    def _put_ended(self, handle: DiskHandle, pieces: list[tuple[int, int]], write: StorageCopy) -> None:
        if write.error is not None:
            # Discard the bytes of a failed put, which would keep a full disk full. This is safe even if the slot was
            # freed meanwhile: the next owner's write waits for `handle.written`.
            for offset, nbytes in pieces:
                self._file.discard(offset, nbytes)
            with self._lock:
                if handle.pieces is not None:
                    self._free_slot(handle, [])
        handle.written.finish(write.error)

    def _get_ended(self, handle: DiskHandle, out: torch.Tensor, read: StorageCopy, copy: StorageCopy) -> None:
        error = handle.written.error or read.error
        if error is None and handle.checksum is not None:
            found = zlib.crc32(byte_view(out))
            if found != handle.checksum:
                error = CorruptionError(
                    f"{handle.label or 'a saved tensor'} ({handle.nbytes} bytes) was read from "
                    f"{self._spill.file_path} with checksum {found:08x}, but written with {handle.checksum:08x}. "
                    "The disk or memory is faulty, or another program wrote to the file."
                )
        copy.finish(error)

    def _poison_requests(self, pieces: list[tuple[int, int]]) -> list[tuple[torch.Tensor, int]]:
        if self._poison is None:
            self._poison = aligned_empty(_POISON_BYTES).fill_(0xFF)
        return [
            (self._poison[: min(_POISON_BYTES, offset + nbytes - start)], start)
            for offset, nbytes in pieces
            for start in range(offset, offset + nbytes, _POISON_BYTES)
        ]


def _requests(tensor: torch.Tensor, pieces: list[tuple[int, int]]) -> list[tuple[torch.Tensor, int]]:
    if len(pieces) == 1:
        return [(tensor, pieces[0][0])]
    requests = []
    start = 0
    for offset, nbytes in pieces:
        requests.append((tensor[start : start + nbytes], offset))
        start += nbytes
    return requests


def _check_bytes(tensor: torch.Tensor, *, nbytes: int | None = None, label: str = "") -> None:
    check_bytes_tensor(tensor, nbytes=nbytes, label=label)
    if tensor.device.type != "cpu":
        raise UnsupportedError(f"the disk tier accepts host memory, not {tensor.device}: use a StagedDiskTier.")
