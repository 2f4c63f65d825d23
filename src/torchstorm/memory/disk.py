"""Disk as a tier: storages in 4096-aligned slots of one spill file, written and read past the page cache.

The budget is kept in program order: `free` gives a slot back at once, and what is put there next is ordered after the
copies that still touch it. So `used_bytes` and BudgetError never depend on how far the disk has come. A slot may lie
in several pieces of the file; hence a put fails for lack of room only where the sum says so, never by fragmentation.
"""

from __future__ import annotations

import os
import shutil
import threading
import weakref
import zlib
from functools import partial
from typing import TYPE_CHECKING

from torchstorm.errors import CorruptionError, StorageError, UnsupportedError
from torchstorm.memory.spill import SpillDirectory
from torchstorm.memory.tier import Handle, TierSpec, check_row_of_bytes, gone, no_room
from torchstorm.storage.aligned import aligned_empty, byte_view
from torchstorm.storage.backend import BackendInfo, IOCounters, StorageCopy
from torchstorm.storage.direct import DirectFile
from torchstorm.transfer.extents import Extents

if TYPE_CHECKING:
    import torch

_POISON_BYTES = 2**20


class DiskHandle:
    """One storage in the spill file.

    Attributes:
        nbytes: bytes that were put.
        label: what the caller calls it; named in errors.
        written: the copy into the file.
    """

    def __init__(self, nbytes: int, label: str, pieces: list[tuple[int, int]], checksum: int | None) -> None:
        self.nbytes = nbytes
        self.label = label
        self.written = StorageCopy()
        self.pieces: list[tuple[int, int]] | None = pieces  # (offset, bytes); None once freed
        self.checksum = checksum
        self.reads: list[StorageCopy] = []


class DiskTier:
    """A spill file in a directory of its own, which goes when the tier is closed or the process ends; a `Tier`.

    Copies block the host when they are waited for. Buffers from `aligned_empty` are read into with no bounce buffer.

    Args:
        directory: where the spill directory is made. It is itself made where only its parent exists. Spill
            directories in it whose process has died are removed.
        capacity_bytes: the budget; None: 90 % of what is free there.
        check: checksums every storage and overwrites freed slots; for finding errors, not for speed.
        threads: blocks under way at once.
        block_bytes: bytes of one system call.
        write_bytes_per_s: speed for `spec`, as `measure_disk` gives it.
        read_bytes_per_s: the same for what comes back.

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
        write_bytes_per_s: float = float("inf"),
        read_bytes_per_s: float = float("inf"),
    ) -> None:
        self._spill = SpillDirectory(directory)
        # Now, and not when all is well: the process may end, or the next line fail, without close().
        self._remove = weakref.finalize(self, self._spill.remove)
        if capacity_bytes is None:
            capacity_bytes = shutil.disk_usage(self._spill.path).free * 9 // 10
        self.spec = TierSpec(
            name="disk",
            capacity_bytes=capacity_bytes,
            write_bytes_per_s=write_bytes_per_s,
            read_bytes_per_s=read_bytes_per_s,
        )
        self._file = DirectFile(self._spill.file_path, create=True, threads=threads, block_bytes=block_bytes)
        self._extents = Extents(capacity_bytes, alignment_bytes=self._file.align_bytes)
        self._check = check
        self._poison: torch.Tensor | None = None
        self._busy: list[tuple[int, int, StorageCopy]] = []  # (start, stop, copy) that still touches freed bytes
        self._lock = threading.Lock()
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
        """Host bytes of bounce buffers: `threads * block_bytes`, allocated as they are first needed."""
        return self._file.staging_bytes

    def reset_peak(self) -> None:
        """Starts `peak_bytes` again from `used_bytes`."""
        with self._lock:
            self.peak_bytes = self.used_bytes

    def counters(self) -> IOCounters:
        """What the system calls moved so far."""
        return self._file.info().counters

    def info(self) -> BackendInfo:
        """Which path the bytes take, and why."""
        return self._file.info()

    def put(self, source: torch.Tensor, *, label: str = "") -> DiskHandle:
        """Begins to write a contiguous 1-D uint8 tensor.

        Args:
            source: unchanged until `written` of the handle has ended.
            label: what to call it in errors.

        Raises:
            BudgetError: the slots in use and this one exceed the capacity.
            StorageError: the tier is closed. A full or failing disk is told by the wait for `written`; the slot has
                then been given back and the tier stays usable.
            UnsupportedError: the tensor is not of that kind or not on the CPU.
        """
        _check_bytes(source)
        checksum = zlib.crc32(byte_view(source)) if self._check and source.nbytes else None
        with self._lock:
            self._check_open()
            pieces = self._allocate(source.nbytes, label)
            handle = DiskHandle(source.nbytes, label, pieces, checksum)
            self._busy = [entry for entry in self._busy if not entry[2].done()]
            after = [
                copy
                for start, stop, copy in self._busy
                if any(offset < stop and start < offset + nbytes for offset, nbytes in pieces)
            ]
            write = self._file.write_batch_async(_requests(source, pieces), after=after, whole_blocks=True)
        write.when_done(partial(self._put_ended, handle, pieces, write))
        return handle

    def get(self, handle: Handle, out: torch.Tensor) -> StorageCopy:
        """Begins to read a storage back; follows the `put` where that has not ended.

        Returns:
            The copy. Its wait raises CorruptionError where `check` found other bytes than were put, and the error of
            the `put` where that failed.

        Raises:
            StorageError: the handle was freed, or the tier is closed, or `out` has another size.
            UnsupportedError: `out` is not contiguous 1-D uint8 on the CPU.
        """
        assert isinstance(handle, DiskHandle)
        _check_bytes(out, nbytes=handle.nbytes, label=handle.label)
        copy = StorageCopy()
        with self._lock:
            self._check_open()
            if handle.pieces is None:
                if handle.written.error is not None:
                    return handle.written
                raise gone(handle.label)
            read = self._file.read_batch_async(_requests(out, handle.pieces), after=[handle.written])
            handle.reads = [earlier for earlier in handle.reads if not earlier.done()] + [copy]
        read.when_done(partial(self._get_ended, handle, out, read, copy))
        return copy

    def free(self, handle: Handle) -> None:
        """Gives the slot back; what is put there next waits for the copies under way. Freeing twice does nothing."""
        assert isinstance(handle, DiskHandle)
        with self._lock:
            if handle.pieces is None or self._closed:
                return
            after = [copy for copy in [handle.written, *handle.reads] if not copy.done()]
            if self._check:
                after = [self._file.write_batch_async(self._poison_requests(handle.pieces), after=after)]
            self._give_back(handle, after)

    def close(self) -> None:
        """Lets copies end, then removes the spill file and its directory. Closing twice does nothing."""
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
            raise no_room(self.spec, label=label, wanted_bytes=needed, used_bytes=used, where=where)
        pieces = []
        while needed:
            size = min(needed, self._extents.largest_free_bytes())
            offset = self._extents.allocate(size)
            assert offset is not None
            pieces.append((offset, size))
            needed -= size
        self.peak_bytes = max(self.peak_bytes, self._extents.used_bytes)
        return pieces

    def _give_back(self, handle: DiskHandle, after: list[StorageCopy]) -> None:
        assert handle.pieces is not None
        for offset, nbytes in handle.pieces:
            self._extents.free(offset, nbytes)
            self._busy += [(offset, offset + nbytes, copy) for copy in after]
        handle.pieces = None

    def _put_ended(self, handle: DiskHandle, pieces: list[tuple[int, int]], write: StorageCopy) -> None:
        if write.error is not None:
            # What a put that failed has written would keep a full disk full. It is safe also where the slot was freed
            # meanwhile: the next owner's write waits for `handle.written`.
            for offset, nbytes in pieces:
                self._file.discard(offset, nbytes)
            with self._lock:
                if handle.pieces is not None:
                    self._give_back(handle, [])
        handle.written.finish(write.error)

    def _get_ended(self, handle: DiskHandle, out: torch.Tensor, read: StorageCopy, copy: StorageCopy) -> None:
        error = handle.written.error or read.error
        if error is None and handle.checksum is not None:
            found = zlib.crc32(byte_view(out))
            if found != handle.checksum:
                error = CorruptionError(
                    f"{handle.label or 'a saved tensor'} ({handle.nbytes} bytes) came back from "
                    f"{self._spill.file_path} with checksum {found:08x}, but was put with {handle.checksum:08x}. "
                    "The disk or memory is faulty, or something else wrote to the file."
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
    check_row_of_bytes(tensor, nbytes=nbytes, label=label)
    if tensor.device.type != "cpu":
        raise UnsupportedError(f"the disk reaches host memory, not {tensor.device}: a StagedDiskTier goes between.")
