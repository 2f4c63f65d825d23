"""O_DIRECT on any file with a few threads: the default backend.

A request is split at multiples of `block_bytes` of the file, and the blocks run in parallel. A block is transferred
directly between disk and tensor if the tensor's address, the offset and the length are aligned. Other blocks use bounce
buffers, at most one per thread:

- Reads are always direct: the whole pages around the requested range are read into the bounce buffer.
- Writes: the aligned body is written directly. The head and the tail, which cover only a part of a page, are written
  through the page cache. A read-modify-write in this process would need a lock against other writing processes (another
  rank, a loader's worker), and would round up the file's length. The kernel has that lock and keeps the length. Mixing
  both kinds of I/O is safe: no page gets both in one request, a direct read first writes back dirty pages in its range,
  and a direct write drops cached ones.
- With `whole_blocks=True`, a caller that owns whole pages of the file (a spill slot) lets the tail be padded. Then all
  of the write is direct.

Many small aligned reads (`read_rows_async`) are submitted in batches through io_uring, where that is allowed.

If the file system refuses O_DIRECT, at open or later, all I/O goes through the page cache, and `info()` reports it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import torch

from torchstorm.errors import StorageError
from torchstorm.paths import user_path
from torchstorm.sizes import format_size
from torchstorm.storage.aligned import aligned_empty, bytes_beyond, direct_alignment, memory_view, round_down, round_up
from torchstorm.storage.backend import Backend, BackendInfo, IOCounters, StorageCopy
from torchstorm.storage.blocks import Block, BlockPool, check_request
from torchstorm.storage.unattended import Unattended
from torchstorm.storage.uring import Ring

_RING_ENTRIES = 64
_RING_BYTES = 2**21  # in flight per ring: enough for a disk while other threads process their rows
_PUNCH_HOLE = 3  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class DirectFile(Backend):
    """A `Backend` that reads and writes a file with O_DIRECT if possible.

    Args:
        path: the file.
        size_bytes: new length of the file (it is extended sparsely or truncated); None keeps its length.
        threads: number of blocks in flight; 4 to 8 keep an NVMe drive busy.
        block_bytes: bytes of one system call, rounded up to whole pages.
        straight_bytes: the same where memory and file are aligned, so that nothing goes through a bounce buffer; 0 for
            `block_bytes`. Large ones take less of the processor, small ones share a request out among the threads.
        create: creates the file if it does not exist, readable by its owner only.
        read_only: opens it for reading only.
        direct: False always uses the page cache.
        unattended: no thread takes part where requests are aligned and there is an io_uring; see `Unattended`.

    Raises:
        StorageError: the file cannot be opened.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        size_bytes: int | None = None,
        threads: int = 4,
        block_bytes: int = 2**20,
        straight_bytes: int = 0,
        create: bool = False,
        read_only: bool = False,
        direct: bool = True,
        unattended: bool = False,
    ) -> None:
        self.path = str(user_path(path, name="path"))
        self.device = torch.device("cpu")
        flags = os.O_RDONLY if read_only else os.O_RDWR
        try:
            # Opened without O_DIRECT first, since a file system that refuses it would leave an empty file.
            self._fd = os.open(self.path, flags | (os.O_CREAT if create else 0), 0o600)
        except OSError as error:
            raise _storage_error(
                error,
                f"{self.path} cannot be opened: {error.strerror}. Give a file that exists (or create=True), in a "
                "directory that this user may use.",
            ) from error
        fds = [self._fd]
        self._release = weakref.finalize(self, _close_all, fds)
        self._direct_fd = -1
        try:
            if size_bytes is not None:
                os.ftruncate(self._fd, size_bytes)
        except OSError as error:
            self._release()
            raise _storage_error(
                error, f"{self.path} cannot be resized to {size_bytes} bytes: {error.strerror}."
            ) from error
        self._sync_error: OSError | None = None
        self._reason = "asked for"
        offset_align = address_align = 0
        if direct:
            try:
                self._direct_fd = os.open(self.path, flags | os.O_DIRECT)
                fds.append(self._direct_fd)
                offset_align, address_align = direct_alignment(self._direct_fd)
                self._reason = f"O_DIRECT accepted; offsets at {offset_align}, addresses at {address_align} bytes"
                if not offset_align:
                    self._reason = "O_DIRECT accepted by a file system that reports no alignment (such as tmpfs or NFS)"
            except OSError as error:
                self._reason = f"the file system refuses O_DIRECT at open: {error.strerror}"
        self._direct = self._direct_fd >= 0
        self._address_align = address_align or mmap.PAGESIZE
        self.align_bytes = max(offset_align, mmap.PAGESIZE)  # no page gets both direct and buffered writes
        self.block_bytes = round_up(max(block_bytes, 1), self.align_bytes)
        self._straight_bytes = max(round_up(straight_bytes, self.align_bytes), self.block_bytes)
        self._threads = threads
        self._unattended: Unattended | None = None
        if unattended and self._direct:
            with contextlib.suppress(OSError):
                alignment = self.align_bytes, self._address_align
                self._unattended = Unattended(self.path, self._direct_fd, alignment, self._attend)
        self.drive = self._unattended.drive if self._unattended is not None else None
        self._pool = BlockPool(self.path, threads, self.drive)
        self._bounce: list[torch.Tensor] = []
        self._rings: list[Ring] = []
        self._has_rings = True
        self._counts = [0] * 8
        self._lock = threading.Lock()

    @property
    def staging_bytes(self) -> int:
        """Bytes of all bounce buffers, `threads * block_bytes`. Each is allocated on first use, and kept."""
        return self._threads * self.block_bytes

    def read_batch_async(
        self, requests: Sequence[tuple[torch.Tensor, int]], *, after: Sequence[StorageCopy] = ()
    ) -> StorageCopy:
        """See `Backend`."""
        return self._queue("reading", self._read_block, requests, after)

    def read_rows_async(
        self, out: torch.Tensor, offsets: Sequence[int], *, on_row: Callable[[int, memoryview], None] | None = None
    ) -> StorageCopy:
        """Starts to fill the rows of a tensor, each from its own offset. Returns one copy for all.

        Args:
            out: (len(offsets), ...), contiguous, on the CPU.
            offsets: byte offset of each row in the file.
            on_row: called with a row's number and bytes when it has been read, in the reading thread.
        """
        size = out.nbytes // max(len(offsets), 1)
        for offset in (min(offsets), max(offsets)) if size else ():
            check_request(self.path, out[:1], offset)
        check_request(self.path, out, 0)
        if not size:
            return self.read_batch_async([])
        address = out.data_ptr()
        view = memory_view(address, out.nbytes)
        is_aligned = self._direct and not address % self._address_align and size <= self.block_bytes
        is_aligned = is_aligned and not any(offset % self.align_bytes for offset in (size, *offsets))

        def patient(block: Block) -> None:
            for start, stop in self._cuts(block.start, block.stop, self.block_bytes):
                self._read_block(Block(block.address + start - block.start, start, stop, block.start, size))

        def move(rows: range) -> None:
            came = self._read_rows(address, offsets, size, rows) if is_aligned else [0] * len(rows)
            for row, count in zip(rows, came, strict=True):
                if count != size:
                    start = offsets[row]
                    self._run("reading", patient, Block(address + row * size, start, start + size, start, size))
                if on_row is not None:
                    on_row(row, view[row * size : (row + 1) * size])

        step = max(1, min(_RING_ENTRIES, _RING_BYTES // size))
        shares = [range(row, min(row + step, len(offsets))) for row in range(0, len(offsets), step)]
        return self._pool.queue(shares, move, tensors=[out], after=())

    def _read_rows(self, address: int, offsets: Sequence[int], size: int, rows: range) -> list[int]:
        """Reads rows with one request each; returns the bytes read. The caller repeats short and failed reads."""
        ring = self._borrow_ring() if len(rows) > 1 else None
        try:
            if ring is None:
                views = [memory_view(address + row * size, size) for row in rows]
                came = [os.preadv(self._direct_fd, [view], offsets[row]) for row, view in zip(rows, views, strict=True)]
            else:
                places, wanted = address + np.array(rows) * size, np.array(offsets[rows.start : rows.stop])
                came = ring.read(self._direct_fd, places, wanted, size).tolist()
        except OSError:
            return [0] * len(rows)
        finally:
            if ring is not None:
                self._rings.append(ring)
        whole = came.count(size)
        self._count(0, whole * size, whole)
        return came

    def _borrow_ring(self) -> Ring | None:
        """A ring, or None if io_uring is not available. A thread uses one at a time, so there are at most `threads`."""
        with contextlib.suppress(IndexError):
            return self._rings.pop()
        if self._has_rings:
            try:
                return Ring(_RING_ENTRIES)
            except OSError:
                self._has_rings = False
        return None

    def _count(self, index: int, nbytes: int, num_requests: int) -> None:
        with self._lock:
            self._counts[index] += nbytes
            self._counts[index + 1] += num_requests

    def write_batch_async(
        self,
        requests: Sequence[tuple[torch.Tensor, int]],
        *,
        after: Sequence[StorageCopy] = (),
        whole_blocks: bool = False,
    ) -> StorageCopy:
        """See `Backend`.

        Args:
            requests: tensors and their byte offsets.
            after: copies that must end before this one starts.
            whole_blocks: the file may be overwritten from each tensor's end to the next multiple of `align_bytes`, so
                no write needs the page cache.
        """
        return self._queue("writing", partial(self._write_block, whole_blocks), requests, after)

    def sync(self) -> None:
        """See `Backend`."""
        self._pool.check_usable()
        try:
            if self._sync_error is not None:
                raise self._sync_error
            os.fsync(self._fd)
        except OSError as error:
            # The kernel reports a failed write-back only once and may have dropped the data, so the next fsync would
            # succeed.
            self._sync_error = OSError(error.errno, error.strerror)
            raise _storage_error(
                error,
                f"{self.path}: making it durable failed: {error.strerror}. Data written since the last successful "
                "flush may be lost, and a later flush cannot repair that: see dmesg, reopen the file, and write the "
                "data again.",
            ) from error

    def discard(self, offset: int, nbytes: int) -> None:
        """Frees the disk blocks of a range, which then reads as zeros. Does nothing if the file system cannot."""
        with contextlib.suppress(AttributeError):  # the C library has no fallocate
            punch_hole = ctypes.CDLL(None).fallocate
            punch_hole(self._fd, _PUNCH_HOLE, ctypes.c_int64(offset), ctypes.c_int64(nbytes))

    def info(self) -> BackendInfo:
        """See `Backend`."""
        counters = IOCounters(*self._counts)  # without the lock: a worker may have held it at a fork of this process
        return BackendInfo(path="direct" if self._direct else "buffered", reason=self._reason, counters=counters)

    def close(self) -> None:
        """See `Backend`."""
        if self._unattended is not None:
            self._unattended.close()
        self._pool.close()
        self._bounce.clear()
        self._rings.clear()
        self._release()

    def _queue(
        self,
        verb: str,
        move: Callable[[Block], None],
        requests: Sequence[tuple[torch.Tensor, int]],
        after: Sequence[StorageCopy],
    ) -> StorageCopy:
        blocks = [block for tensor, offset in requests for block in self._blocks(tensor, offset)]
        tensors = [tensor for tensor, _ in requests]
        if self._direct and (kernel := self._unattended) is not None and kernel.takes(blocks):
            return kernel.accept([(block, verb == "writing") for block in blocks], tensors=tensors, after=after)
        return self._pool.queue(blocks, partial(self._run, verb, move), tensors=tensors, after=after)

    def _attend(self, block: Block, write: bool, count: int) -> None:
        if count == block.stop - block.start:
            self._count(2 if write else 0, count, 1)
        elif write:
            self._run("writing", partial(self._write_block, False), block)
        else:
            self._run("reading", self._read_block, block)

    def _blocks(self, tensor: torch.Tensor, offset: int) -> list[Block]:
        check_request(self.path, tensor, offset)
        nbytes = tensor.nbytes
        stop = offset + nbytes
        if not nbytes:
            return []
        base = tensor.data_ptr() - offset
        is_straight = self._direct and not offset % self.align_bytes and not tensor.data_ptr() % self._address_align
        size = self._straight_bytes if is_straight else self.block_bytes
        return [Block(base + start, start, end, offset, nbytes) for start, end in self._cuts(offset, stop, size)]

    def _cuts(self, start: int, stop: int, size: int) -> Iterable[tuple[int, int]]:
        """Splits a range of the file at multiples of `size`: where it takes bounce buffers, the whole pages around each
        part fit into one."""
        return pairwise([start, *range(round_down(start, size) + size, stop, size), stop])

    def _run(self, verb: str, move: Callable[[Block], None], block: Block) -> None:
        try:
            move(block)
        except StorageError as error:
            error.extent = block.start, block.stop
            raise
        except OSError as error:
            told = self._explain(verb, block, error)
            told.extent = block.start, block.stop
            raise told from error

    def _explain(self, verb: str, block: Block, error: OSError) -> StorageError:
        way_out = "Check the disk and the kernel's log (dmesg)."
        if error.errno in _FULL:
            space = os.fstatvfs(self._fd)
            way_out = (
                f"{format_size(space.f_bavail * space.f_frsize)} are free there. Free some space, raise the quota or "
                "limit (ulimit -f), or use a directory on another disk."
            )
        return _storage_error(
            error,
            f"{self.path}: {verb} {block.nbytes} bytes at offset {block.offset} failed in the block at {block.start}: "
            f"{error.strerror}. {way_out}",
        )

    def _read_block(self, block: Block) -> None:
        if self._direct:
            try:
                self._read_direct(block)
                return
            except OSError as error:
                self._give_up_direct(error)
        self._move(False, False, block, memory_view(block.address, block.stop - block.start), block.start, 0)

    def _read_direct(self, block: Block) -> None:
        address, start, stop = block.address, block.start, block.stop
        end = round_up(stop, self.align_bytes)
        body = round_down(stop, self.align_bytes)
        if start % self.align_bytes == 0 and address % self._address_align == 0:
            if end - stop <= bytes_beyond(address + stop - start):
                body = end
            if start < body:
                view = memory_view(address, body - start)
                self._move(False, True, block, view, start, max(body - stop, 0))
            if body >= stop:
                return
            address, start = address + body - start, body
        first = round_down(start, self.align_bytes)
        bounce = self._borrow()
        assert end - first <= bounce.nbytes
        try:
            view = memory_view(bounce.data_ptr(), end - first)
            self._move(False, True, block, view, first, end - stop)
            ctypes.memmove(address, bounce.data_ptr() + start - first, stop - start)
        finally:
            self._bounce.append(bounce)

    def _write_block(self, whole_blocks: bool, block: Block) -> None:
        if self._direct:
            try:
                self._write_direct(whole_blocks, block)
                return
            except OSError as error:
                self._give_up_direct(error)
        self._move(True, False, block, memory_view(block.address, block.stop - block.start), block.start, 0)

    def _write_direct(self, whole_blocks: bool, block: Block) -> None:
        base = block.address - block.start  # the address that corresponds to file offset 0
        body = min(round_up(block.start, self.align_bytes), block.stop)
        tail = max(round_down(block.stop, self.align_bytes), body)
        whole = whole_blocks and block.start % self.align_bytes == 0
        end = round_up(block.stop, self.align_bytes) if whole else tail
        straight = (base + body) % self._address_align == 0
        if block.start < body:
            self._move(True, False, block, memory_view(block.address, body - block.start), block.start, 0)
        if straight and body < tail:
            self._move(True, True, block, memory_view(base + body, tail - body), body, 0)
            body = tail
        if body < end:
            bounce = self._borrow()
            try:
                filled = min(end, block.stop) - body
                ctypes.memmove(bounce.data_ptr(), base + body, filled)
                ctypes.memset(bounce.data_ptr() + filled, 0, end - body - filled)
                self._move(True, True, block, memory_view(bounce.data_ptr(), end - body), body, 0)
            finally:
                self._bounce.append(bounce)
        if end < block.stop:
            self._move(True, False, block, memory_view(base + tail, block.stop - tail), tail, 0)

    def _move(self, write: bool, direct: bool, block: Block, view: memoryview, offset: int, spare: int) -> None:
        """Repeats the call until all of `view` is done. The last `spare` bytes of a read may be past the file's end."""
        done = 0
        while done < len(view) - spare:
            fd = self._direct_fd if direct else self._fd
            if write:
                count = os.pwritev(fd, [view[done:]], offset + done)
            else:
                count = os.preadv(fd, [view[done:]], offset + done)
            self._count((0 if direct else 4) + (2 if write else 0), count, 1)
            if count == 0:
                if write:
                    raise OSError(errno.EIO, "the disk accepted no bytes")
                size_bytes = os.lseek(self._fd, 0, os.SEEK_END)  # works for devices, too
                raise StorageError(
                    f"{self.path} is too short: wanted {block.nbytes} bytes at offset {block.offset}, got "
                    f"{max(min(size_bytes - block.offset, block.nbytes), 0)}; it is {size_bytes} bytes long."
                )
            done += count
            if count % self.align_bytes:  # a short transfer to an unaligned offset, where direct I/O cannot continue
                direct = False

    def _give_up_direct(self, error: OSError) -> None:
        if error.errno != errno.EINVAL:
            raise error
        with self._lock:
            self._direct = False
            self._reason = f"the file system refuses O_DIRECT transfers ({error.strerror})"

    def _borrow(self) -> torch.Tensor:
        try:
            return self._bounce.pop()
        except IndexError:  # a thread uses one at a time, so there are at most `threads`
            return aligned_empty(self.block_bytes)


def _storage_error(cause: OSError, message: str) -> StorageError:
    error = StorageError(message)
    error.errno = cause.errno
    return error


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
