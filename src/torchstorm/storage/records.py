"""The records of one kind of a volume: reads and writes by number, with checksums."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from isal.isal_zlib import crc32  # the same result as zlib's, many times faster

from torchstorm.errors import ConfigError, CorruptionError, StorageError
from torchstorm.storage.aligned import aligned_empty, memory_view
from torchstorm.storage.backend import StorageCopy
from torchstorm.storage.layout import CHECK_BYTES, Kind
from torchstorm.storage.request import Request, overlapping

_WRITTEN = 1 << 32  # this bit of a checksum says that the record was written
_CHECKED_AT_ONCE = 2**24  # bytes of records
_READ_FOR_ONE_BYTES = 2**15  # bytes of checksums that are read as fast as a single one


class VolumeIO(Protocol):
    """The methods of a volume that its records use."""

    path: str
    device: torch.device

    def begin_read(self, parts: Sequence[RecordRange]) -> Request:
        """Starts to read ranges of records."""

    def begin_read_rows(self, rows: RecordRows, *, verify: bool) -> Request:
        """Starts to read records in any order; `verify` computes their checksums as they arrive."""

    def begin_write(self, parts: Sequence[RecordRange]) -> Request:
        """Starts to write ranges of records."""


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """Result of `Records.check`.

    Attributes:
        num_intact: number of records whose bytes match their checksum.
        unwritten: numbers of the records that were never written.
        damaged: numbers of the records whose bytes do not match their checksum.
    """

    num_intact: int
    unwritten: tuple[int, ...]
    damaged: tuple[int, ...]


class Records:
    """The records of one kind."""

    def __init__(self, volume: VolumeIO, name: str | int, kind: Kind, checks: Checksums | None) -> None:
        self.name, self.kind, self.checks = name, kind, checks
        self._volume = volume

    def __len__(self) -> int:
        return self.kind.length

    def __getitem__(self, which: int | slice) -> torch.Tensor:
        """Record i as a tensor (*shape), or records i:j as (j - i, *shape). Raises as `read` does."""
        if isinstance(which, slice):
            start, stop, step = which.indices(len(self))
            if step != 1 or any(bound is not None and bound < 0 for bound in (which.start, which.stop)):
                raise ConfigError(f"{self.where}[{which}]: give a start and a stop of at least 0, without a step.")
            return self.read(start, max(0, stop - start))
        return self.read(which)[0]

    def read(self, i: int, n: int = 1, out: torch.Tensor | None = None) -> torch.Tensor:
        """Reads records i to i + n - 1.

        Args:
            i: number of the first.
            n: how many.
            out: (n, *shape), contiguous, of the kind's dtype, on the CPU or the volume's device; allocated on the
                volume's device if None.

        Raises:
            ConfigError: a record does not exist, or `out` does not match. Nothing is read then.
            CorruptionError: a record does not match its checksum, or was never written.
            StorageError: the disk failed.
        """
        return self.read_async(i, n, out).result()

    def read_async(self, i: int, n: int = 1, out: torch.Tensor | None = None) -> Request:
        """Starts `read`. `out` must not be used before the request's `wait` has returned."""
        return self._volume.begin_read([self.select(i, n, out)])

    def read_rows_async(
        self, numbers: Sequence[int] | npt.NDArray[np.int64], out: torch.Tensor, *, verify: bool = True
    ) -> Request:
        """Starts to read records in any order.

        Args:
            numbers: numbers of the records.
            out: (len(numbers), *shape), contiguous, on the CPU, of the kind's dtype.
            verify: computes checksums as the records arrive; otherwise the request's `wait(verify=True)` does it.

        Raises:
            ConfigError: a record does not exist, or `out` does not match. Nothing is read then.
        """
        rows = np.asarray(numbers, dtype=np.int64)
        for number in (rows.min(), rows.max()) if len(rows) else ():
            self.select(int(number), 1, out[:1])  # raises if it does not exist or does not match
        part = self.select(0, 0, out[:0])
        if len(out) != len(rows) or not out.is_contiguous() or not part.is_on_host:
            raise ConfigError(
                f"{self.where}: {len(rows)} records need a contiguous tensor of that length on the CPU, but this "
                f"one is {tuple(out.shape)} on {out.device}."
            )
        return self._volume.begin_read_rows(RecordRows(self, rows, out), verify=verify)

    def write(self, i: int, source: torch.Tensor) -> None:
        """Writes records from number i on. The volume's `flush` makes them durable.

        Args:
            i: number of the first.
            source: (n, *shape), or (*shape) for one; of the kind's dtype, on the CPU or the volume's device.

        Raises:
            ConfigError: a record does not exist, or `source` does not match. Nothing is written then.
            StorageError: the disk is full or failed, or the volume is open for reading only.
        """
        self.write_async(i, source).wait()

    def write_async(self, i: int, source: torch.Tensor) -> Request:
        """Starts `write`. `source` must stay unchanged until the request has ended."""
        if tuple(source.shape) == self.kind.shape:
            source = source.unsqueeze(0)
        part = self.select(i, len(source) if source.dim() else 0, source.contiguous())
        return self._volume.begin_write([part])

    def check(self) -> CheckResult:
        """Reads all records and compares them with their checksums.

        Raises:
            ConfigError: this kind has no checksums.
            StorageError: the disk failed.
        """
        if self.checks is None:
            raise ConfigError(f"{self.where} has no checksums to compare its records with.")
        unwritten: list[int] = []
        damaged: list[int] = []
        at_once = max(1, _CHECKED_AT_ONCE // max(1, self.kind.record_bytes))
        for start in range(0, len(self), at_once):
            count = min(at_once, len(self) - start)
            host = aligned_empty(count * self.kind.record_bytes).view(self.kind.dtype).view(count, *self.kind.shape)
            part = self.select(start, count, host)
            self._volume.begin_read([part]).wait(verify=False)
            for numbers, found in zip((unwritten, damaged), part.compare(), strict=True):
                numbers += found
        num_intact = len(self) - len(unwritten) - len(damaged)
        return CheckResult(num_intact=num_intact, unwritten=tuple(unwritten), damaged=tuple(damaged))

    @property
    def where(self) -> str:
        """For messages."""
        return f"kind {self.name!r} of {self._volume.path}"

    def select(self, i: int, n: int, tensor: torch.Tensor | None) -> RecordRange:
        """Checks numbers and tensor, and returns the range. Allocates the tensor if None."""
        kind = self.kind
        if not all(isinstance(number, int) and not isinstance(number, bool) for number in (i, n)):
            raise ConfigError(f"{self.where}: i={i!r}, n={n!r}, but they must be integers.")
        if i < 0 or n < 0 or i + n > kind.length:
            raise ConfigError(
                f"{self.where}: records {i} to {i + n - 1} were requested, but there are {kind.length}, from 0 to "
                f"{kind.length - 1}."
            )
        shape = (n, *kind.shape)
        if tensor is None and self._volume.device.type == "cpu":
            tensor = aligned_empty(n * kind.record_bytes).view(kind.dtype).view(shape)
        elif tensor is None:
            tensor = torch.empty(shape, dtype=kind.dtype, device=self._volume.device)
        elif tuple(tensor.shape) != shape or tensor.dtype != kind.dtype:
            raise ConfigError(
                f"{self.where}: records {i} to {i + n - 1} need a tensor of shape {shape} and {kind.dtype}, but this "
                f"one is {tuple(tensor.shape)} and {tensor.dtype}."
            )
        elif not tensor.is_contiguous():
            raise ConfigError(
                f"{self.where}: a contiguous tensor is needed, but this one has strides {tensor.stride()}. Pass "
                "tensor.contiguous()."
            )
        elif tensor.device.type != "cpu" and tensor.device != self._volume.device:
            raise ConfigError(
                f"{self.where}: a tensor on the CPU or on {self._volume.device}, for which the volume was opened, is "
                f"needed, but this one is on {tensor.device}. Open the volume with device={str(tensor.device)!r}."
            )
        assert kind.start_bytes is not None
        return RecordRange(self, i, tensor, kind.start_bytes + i * kind.record_bytes)


class RecordRange:
    """A range of records of one kind and its tensor; a `FileRegion`."""

    def __init__(self, records: Records, first: int, tensor: torch.Tensor, offset: int) -> None:
        self.tensor, self.offset = tensor, offset
        self._records, self._first = records, first
        self._seen: list[int] = []  # checksums of complete records
        self._sum = self._num_summed = 0  # of the record whose bytes are arriving

    def describe(self, extent: tuple[int, int]) -> str:
        """See `FileRegion`."""
        found = overlapping(self.offset, self.tensor.nbytes, self._records.kind.record_bytes, extent)
        return f"{_record_numbers(self._first + found.start, len(found))} of {self._records.where}" if found else ""

    @property
    def has_checks(self) -> bool:
        """Whether its kind has checksums."""
        return self._records.checks is not None

    @property
    def is_on_host(self) -> bool:
        """Whether the tensor is on the host. Otherwise checksums are computed during the transfer."""
        return self.tensor.device.type == "cpu"

    def add_bytes(self, data: memoryview) -> None:
        """Adds the next bytes of a transfer to the checksums."""
        size = self._records.kind.record_bytes
        while data:
            count = min(size - self._num_summed, len(data))
            self._sum = crc32(data[:count], self._sum)
            self._num_summed += count
            data = data[count:]
            if self._num_summed == size:
                self._seen.append(_WRITTEN + self._sum)
                self._sum = self._num_summed = 0

    def checksums(self) -> Sequence[int]:
        """The checksums of the tensor's records."""
        if not self.is_on_host and self.tensor.nbytes and len(self._seen) == len(self.tensor):
            return self._seen
        size = self._records.kind.record_bytes
        host = self.tensor if self.is_on_host else self.tensor.cpu()
        data = memory_view(host.data_ptr(), host.nbytes) if host.nbytes else memoryview(b"")
        return [_WRITTEN + crc32(data[n * size : (n + 1) * size]) for n in range(len(host))]

    def write_checksums(self, checksums: Sequence[int]) -> None:
        """Stores the checksums after the records were written. Raises StorageError if that fails."""
        if self._records.checks is not None:
            self._records.checks.write(self._first, checksums)

    def compare(self) -> tuple[list[int], list[int]]:
        """(numbers of records that were never written, numbers of records that do not match their checksum)."""
        checks = self._records.checks
        assert checks is not None
        pairs = list(enumerate(zip(checks.read(self._first, len(self.tensor)).tolist(), self.checksums(), strict=True)))
        unwritten = [self._first + n for n, (kept, _) in pairs if not kept]
        return unwritten, [self._first + n for n, (kept, found) in pairs if kept and kept != found]

    def verify(self) -> None:
        """Raises CorruptionError where a record is not what was written, or never was."""
        if self._records.checks is None:
            return
        _raise_corruption(self._records.where, *self.compare())


class RecordRows:
    """Records in any order and the tensor that they are read into; a `FileRegion`."""

    def __init__(self, records: Records, numbers: npt.NDArray[np.int64], tensor: torch.Tensor) -> None:
        assert records.kind.start_bytes is not None
        self.tensor = tensor
        self.offsets: list[int] = (records.kind.start_bytes + numbers * records.kind.record_bytes).tolist()
        self.has_checks = records.checks is not None
        self._records, self._numbers = records, numbers
        self._seen = [0] * len(numbers)

    def describe(self, extent: tuple[int, int]) -> str:
        """See `FileRegion`."""
        start, stop = extent
        size = self._records.kind.record_bytes
        there = [
            int(number)
            for number, offset in zip(self._numbers, self.offsets, strict=True)
            if offset < stop and offset + size > start
        ]
        more = f" and {len(there) - 1} others" if len(there) > 1 else ""
        return f"record {there[0]}{more} of {self._records.where}" if there else ""

    def add_row(self, row: int, data: memoryview) -> None:
        """Computes the checksum of a record that has been read."""
        self._seen[row] = _WRITTEN + crc32(data)

    def verify(self) -> None:
        """Raises CorruptionError where a record is not what was written, or never was."""
        checks = self._records.checks
        if checks is None or not len(self._numbers):
            return
        if 0 in self._seen:  # some checksums were not computed on arrival
            for row, tensor in enumerate(self.tensor):
                self.add_row(row, memory_view(tensor.data_ptr(), tensor.nbytes))
        first, last = int(self._numbers.min()), int(self._numbers.max())
        if (last - first) * CHECK_BYTES <= len(self._numbers) * _READ_FOR_ONE_BYTES:
            kept = checks.read(first, last - first + 1)[self._numbers - first]
        else:
            kept = np.concatenate([checks.read(number, 1) for number in self._numbers.tolist()])
        wrong = kept != np.array(self._seen, dtype=np.uint64)
        if wrong.any():
            _raise_corruption(
                self._records.where, self._numbers[wrong & (kept == 0)].tolist(), self._numbers[wrong].tolist()
            )


class Checksums:
    """The checksums of one kind in the file. Processes see each other's writes at once.

    Args:
        fd: file descriptor, opened without O_DIRECT.
        start_bytes: byte offset of the first checksum.
        where: name for messages: "kind 'x' of /a.storm".
    """

    def __init__(self, fd: int, start_bytes: int, where: str) -> None:
        self._fd, self._start, self._where = fd, start_bytes, where

    def read(self, first: int, count: int) -> npt.NDArray[np.uint64]:
        """Reads the checksums of `count` records. Raises StorageError if the disk failed or the file is too short."""
        if self._fd < 0:
            raise self._closed()
        data = bytearray(count * CHECK_BYTES)
        self._move(os.preadv, "reading", first, memoryview(data))
        return np.frombuffer(data, dtype="<u8")

    def close(self) -> None:
        """Stops access; the caller closes the file afterwards."""
        self._fd = -1

    def _closed(self) -> StorageError:
        return StorageError(f"{self._where} is closed, so the records read cannot be compared with their checksums.")

    def write(self, first: int, checks: Sequence[int]) -> None:
        """Writes the checksums of records from `first` on. Raises StorageError unless all are written."""
        self._move(os.pwritev, "writing", first, memoryview(np.array(checks, dtype="<u8").tobytes()))

    def _move(
        self, call: Callable[[int, Sequence[memoryview], int], int], verb: str, first: int, view: memoryview
    ) -> None:
        offset, done = self._start + first * CHECK_BYTES, 0
        while done < len(view):
            try:
                count = call(self._fd, [view[done:]], offset + done)
            except OSError as failed:
                if self._fd < 0 and failed.errno == errno.EBADF:  # closed by another thread meanwhile
                    raise self._closed() from failed
                error = StorageError(
                    f"{self._where}: {verb} the checksums of {_record_numbers(first, len(view) // CHECK_BYTES)} failed "
                    f"at offset {offset}: {failed.strerror}. Check the disk and the kernel's log (dmesg)."
                )
                error.errno = failed.errno
                raise error from failed
            if not count:
                raise StorageError(f"{self._where}: its file ends before its checksums. Restore it from a copy.")
            done += count


class ChecksummedWrite(StorageCopy):
    """A write of records that ends after their checksums are written, too.

    Args:
        copy: the write of the records.
        parts: the ranges of records.
    """

    def __init__(self, copy: StorageCopy, parts: Sequence[RecordRange]) -> None:
        super().__init__()
        self._copy = copy
        # For host memory now, since the caller may change it as soon as the write has ended.
        self._parts = [(part, part.checksums() if part.is_on_host else None) for part in parts if part.has_checks]
        copy.when_done(self._write_checksums)

    def _write_checksums(self) -> None:
        error = self._copy.error
        try:
            for part, checksums in self._parts if error is None else ():
                part.write_checksums(part.checksums() if checksums is None else checksums)
        except StorageError as failed:
            error = failed
        self._parts = []
        self.finish(error)


def _raise_corruption(where: str, unwritten: Sequence[int], damaged: Sequence[int]) -> None:
    if unwritten:
        raise CorruptionError(
            f"{where}: record {unwritten[0]} was never written{_and_others(unwritten)}. Write it first, or read "
            "others; .check() lists them all."
        )
    if damaged:
        raise CorruptionError(
            f"{where}: record {damaged[0]} is not what was written{_and_others(damaged)}: its write was interrupted, "
            "or the disk changed it. Write it again; .check() lists them all."
        )


def _and_others(numbers: Sequence[int]) -> str:
    return f" ({len(numbers) - 1} more records are affected)" if len(numbers) > 1 else ""


def _record_numbers(first: int, count: int) -> str:
    return f"record {first}" if count == 1 else f"records {first} to {first + count - 1}"
