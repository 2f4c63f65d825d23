"""The records of one kind of a volume: read, written, and held against their checks."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from isal.isal_zlib import crc32  # the same sum as zlib's, many times as fast

from torchstorm.errors import ConfigError, CorruptionError, StorageError
from torchstorm.storage.aligned import aligned_empty, memory_view
from torchstorm.storage.backend import StorageCopy
from torchstorm.storage.layout import CHECK_BYTES, Kind
from torchstorm.storage.request import Request, places

_WRITTEN = 1 << 32  # of a check: there is a record
_CHECKED_AT_ONCE = 2**24  # bytes
_READ_FOR_ONE_BYTES = 2**15  # of checks, read as fast as a system call for one alone


class Owner(Protocol):
    """The volume that records are of."""

    path: str
    device: torch.device

    def begin_read(self, parts: Sequence[Part]) -> Request:
        """Begins to read."""

    def begin_read_rows(self, rows: Rows, *, look: bool) -> Request:
        """Begins to read records from all over a kind."""

    def begin_write(self, parts: Sequence[Part]) -> Request:
        """Begins to write."""


@dataclass(frozen=True, kw_only=True)
class Condition:
    """What `Records.check` found.

    Attributes:
        num_whole: records that are what was written.
        unwritten: numbers of those that never were.
        damaged: numbers of those that are something else.
    """

    num_whole: int
    unwritten: tuple[int, ...]
    damaged: tuple[int, ...]


class Records:
    """The records of one kind."""

    def __init__(self, volume: Owner, name: str | int, kind: Kind, checks: Checks | None) -> None:
        self.name, self.kind, self.checks = name, kind, checks
        self._volume = volume

    def __len__(self) -> int:
        return self.kind.length

    def __getitem__(self, which: int | slice) -> torch.Tensor:
        """Record i, of the kind's shape, or records i:j, with their number in front. Raises as `read` does."""
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
            out: (n, *shape), contiguous, of the kind's dtype, on the CPU or the volume's device; made there where left
                out.

        Raises:
            ConfigError: they are not all there, or `out` is not such a tensor; nothing is read.
            CorruptionError: a record is not what was written, or never was.
            StorageError: the disk failed.
        """
        return self.read_async(i, n, out).result()

    def read_async(self, i: int, n: int = 1, out: torch.Tensor | None = None) -> Request:
        """Begins `read`; `out` must not be looked at before the request's `wait` has returned."""
        return self._volume.begin_read([self.part(i, n, out)])

    def read_rows_async(
        self, numbers: Sequence[int] | npt.NDArray[np.int64], out: torch.Tensor, *, verify: bool = True
    ) -> Request:
        """Begins to read records from all over the kind.

        Args:
            numbers: of the records, in any order.
            out: (len(numbers), *shape), contiguous, on the CPU, of the kind's dtype.
            verify: False leaves the comparison with their checks to the request's `wait`, if that is to do it.

        Raises:
            ConfigError: they are not all there, or `out` is not such a tensor; nothing is read.
        """
        rows = np.asarray(numbers, dtype=np.int64)
        for number in (rows.min(), rows.max()) if len(rows) else ():
            self.part(int(number), 1, out[:1])  # which says what is wrong
        part = self.part(0, 0, out[:0])
        if len(out) != len(rows) or not out.is_contiguous() or not part.is_on_host:
            raise ConfigError(
                f"{self.where}: {len(rows)} records take a contiguous tensor of as many on the CPU, but this one is "
                f"{tuple(out.shape)} on {out.device}."
            )
        return self._volume.begin_read_rows(Rows(self, rows, out), look=verify)

    def write(self, i: int, source: torch.Tensor) -> None:
        """Writes records from number i on, not yet durable.

        Args:
            i: number of the first.
            source: (n, *shape), or (*shape) for one; of the kind's dtype, on the CPU or the volume's device.

        Raises:
            ConfigError: they have no place, or `source` is not such a tensor; nothing is written.
            StorageError: the disk is full or failed, or the volume is open for reading only.
        """
        self.write_async(i, source).wait()

    def write_async(self, i: int, source: torch.Tensor) -> Request:
        """Begins `write`; `source` must stay unchanged until the request has ended."""
        if tuple(source.shape) == self.kind.shape:
            source = source.unsqueeze(0)
        part = self.part(i, len(source) if source.dim() else 0, source.contiguous())
        return self._volume.begin_write([part])

    def check(self) -> Condition:
        """Reads all records and compares them with their checks.

        Raises:
            ConfigError: this kind has no checks.
            StorageError: the disk failed.
        """
        if self.checks is None:
            raise ConfigError(f"{self.where} has no checks to compare its records with.")
        unwritten: list[int] = []
        damaged: list[int] = []
        at_once = max(1, _CHECKED_AT_ONCE // max(1, self.kind.record_bytes))
        for start in range(0, len(self), at_once):
            count = min(at_once, len(self) - start)
            host = aligned_empty(count * self.kind.record_bytes).view(self.kind.dtype).view(count, *self.kind.shape)
            part = self.part(start, count, host)
            self._volume.begin_read([part]).wait(verify=False)
            for numbers, found in zip((unwritten, damaged), part.compare(), strict=True):
                numbers += found
        num_whole = len(self) - len(unwritten) - len(damaged)
        return Condition(num_whole=num_whole, unwritten=tuple(unwritten), damaged=tuple(damaged))

    @property
    def where(self) -> str:
        """For messages."""
        return f"kind {self.name!r} of {self._volume.path}"

    def part(self, i: int, n: int, tensor: torch.Tensor | None) -> Part:
        """Records and the tensor that they go to or come from; a new one for None."""
        kind = self.kind
        if not all(isinstance(number, int) and not isinstance(number, bool) for number in (i, n)):
            raise ConfigError(f"{self.where}: records {i!r} and on, {n!r} of them; give whole numbers.")
        if i < 0 or n < 0 or i + n > kind.length:
            raise ConfigError(
                f"{self.where}: records {i} to {i + n - 1} were asked for, but there are {kind.length}, from 0 to "
                f"{kind.length - 1}."
            )
        shape = (n, *kind.shape)
        if tensor is None and self._volume.device.type == "cpu":
            tensor = aligned_empty(n * kind.record_bytes).view(kind.dtype).view(shape)
        elif tensor is None:
            tensor = torch.empty(shape, dtype=kind.dtype, device=self._volume.device)
        elif tuple(tensor.shape) != shape or tensor.dtype != kind.dtype:
            raise ConfigError(
                f"{self.where}: records {i} to {i + n - 1} take a tensor of shape {shape} and {kind.dtype}, but this "
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
        return Part(self, i, tensor, kind.start_bytes + i * kind.record_bytes)


class Part:
    """Neighbouring records of one kind, and the tensor that they go to or come from."""

    def __init__(self, records: Records, first: int, tensor: torch.Tensor, offset: int) -> None:
        self.tensor, self.offset = tensor, offset
        self._records, self._first = records, first
        self._seen: list[int] = []  # checks of records that have passed
        self._sum = self._num_summed = 0  # of the one that is passing

    def named(self, extent: tuple[int, int]) -> str:
        """See `Piece`."""
        found = places(self.offset, self.tensor.nbytes, self._records.kind.record_bytes, extent)
        return f"{_which(self._first + found.start, len(found))} of {self._records.where}" if found else ""

    @property
    def has_checks(self) -> bool:
        """Whether its kind has checks."""
        return self._records.checks is not None

    @property
    def is_on_host(self) -> bool:
        """Whether its bytes are at hand; else they are seen as they pass."""
        return self.tensor.device.type == "cpu"

    def look(self, data: memoryview) -> None:
        """The next bytes of the records pass."""
        size = self._records.kind.record_bytes
        while data:
            count = min(size - self._num_summed, len(data))
            self._sum = crc32(data[:count], self._sum)
            self._num_summed += count
            data = data[count:]
            if self._num_summed == size:
                self._seen.append(_WRITTEN + self._sum)
                self._sum = self._num_summed = 0

    def seal(self) -> Sequence[int]:
        """The checks of what the tensor holds."""
        if not self.is_on_host and self.tensor.nbytes and len(self._seen) == len(self.tensor):
            return self._seen
        size = self._records.kind.record_bytes
        host = self.tensor if self.is_on_host else self.tensor.cpu()
        data = memory_view(host.data_ptr(), host.nbytes) if host.nbytes else memoryview(b"")
        return [_WRITTEN + crc32(data[n * size : (n + 1) * size]) for n in range(len(host))]

    def note(self, seals: Sequence[int]) -> None:
        """The records lie on the disk now. Raises StorageError where their checks cannot be written."""
        if self._records.checks is not None:
            self._records.checks.write(self._first, seals)

    def compare(self) -> tuple[list[int], list[int]]:
        """Numbers of records that were never written, and of those that are not what was written."""
        checks = self._records.checks
        assert checks is not None
        pairs = list(enumerate(zip(checks.read(self._first, len(self.tensor)).tolist(), self.seal(), strict=True)))
        unwritten = [self._first + n for n, (kept, _) in pairs if not kept]
        return unwritten, [self._first + n for n, (kept, found) in pairs if kept and kept != found]

    def verify(self) -> None:
        """Raises CorruptionError where a record is not what was written, or never was."""
        if self._records.checks is None:
            return
        _tell(self._records.where, *self.compare())


class Rows:
    """Records from all over a kind, and the tensor that they go to."""

    def __init__(self, records: Records, numbers: npt.NDArray[np.int64], tensor: torch.Tensor) -> None:
        assert records.kind.start_bytes is not None
        self.tensor = tensor
        self.offsets: list[int] = (records.kind.start_bytes + numbers * records.kind.record_bytes).tolist()
        self.has_checks = records.checks is not None
        self._records, self._numbers = records, numbers
        self._seen = [0] * len(numbers)

    def named(self, extent: tuple[int, int]) -> str:
        """See `Piece`."""
        start, stop = extent
        size = self._records.kind.record_bytes
        there = [
            int(number)
            for number, offset in zip(self._numbers, self.offsets, strict=True)
            if offset < stop and offset + size > start
        ]
        more = f" and {len(there) - 1} others" if len(there) > 1 else ""
        return f"record {there[0]}{more} of {self._records.where}" if there else ""

    def look(self, row: int, data: memoryview) -> None:
        """A record has come."""
        self._seen[row] = _WRITTEN + crc32(data)

    def verify(self) -> None:
        """Raises CorruptionError where a record is not what was written, or never was."""
        checks = self._records.checks
        if checks is None or not len(self._numbers):
            return
        if 0 in self._seen:  # not so where each was seen when it came
            for row, tensor in enumerate(self.tensor):
                self.look(row, memory_view(tensor.data_ptr(), tensor.nbytes))
        first, last = int(self._numbers.min()), int(self._numbers.max())
        if (last - first) * CHECK_BYTES <= len(self._numbers) * _READ_FOR_ONE_BYTES:
            kept = checks.read(first, last - first + 1)[self._numbers - first]
        else:
            kept = np.concatenate([checks.read(number, 1) for number in self._numbers.tolist()])
        wrong = kept != np.array(self._seen, dtype=np.uint64)
        if wrong.any():
            _tell(self._records.where, self._numbers[wrong & (kept == 0)].tolist(), self._numbers[wrong].tolist())


class Checks:
    """The checks of one kind, as they lie in the file. Every process sees those of the others at once.

    Args:
        fd: of the file, through the page cache.
        start_bytes: where the first one is.
        where: for messages: "kind 'x' of /a.storm".
    """

    def __init__(self, fd: int, start_bytes: int, where: str) -> None:
        self._fd, self._start, self._where = fd, start_bytes, where

    def read(self, first: int, count: int) -> npt.NDArray[np.uint64]:
        """Those of some records. Raises StorageError where the disk failed or the file ends before."""
        if self._fd < 0:
            raise self._closed()
        data = bytearray(count * CHECK_BYTES)
        self._move(os.preadv, "reading", first, memoryview(data))
        return np.frombuffer(data, dtype="<u8")

    def close(self) -> None:
        """The file is about to be closed."""
        self._fd = -1

    def _closed(self) -> StorageError:
        return StorageError(f"{self._where} is closed, so what was read cannot be held against its checks.")

    def write(self, first: int, checks: Sequence[int]) -> None:
        """Those of some records; all are written, or it raises StorageError."""
        self._move(os.pwritev, "writing", first, memoryview(np.array(checks, dtype="<u8").tobytes()))

    def _move(
        self, call: Callable[[int, Sequence[memoryview], int], int], verb: str, first: int, view: memoryview
    ) -> None:
        offset, done = self._start + first * CHECK_BYTES, 0
        while done < len(view):
            try:
                count = call(self._fd, [view[done:]], offset + done)
            except OSError as failed:
                if self._fd < 0 and failed.errno == errno.EBADF:  # closed since it was looked at
                    raise self._closed() from failed
                error = StorageError(
                    f"{self._where}: {verb} the checks of {_which(first, len(view) // CHECK_BYTES)} failed at offset "
                    f"{offset}: {failed.strerror}. Check the disk and the kernel's log (dmesg)."
                )
                error.errno = failed.errno
                raise error from failed
            if not count:
                raise StorageError(f"{self._where}: its file was cut off before its checks. Restore it from a copy.")
            done += count


class SealedWrite(StorageCopy):
    """A write that has ended when its records' checks are written, too.

    Args:
        copy: of the records.
        parts: what is written.
    """

    def __init__(self, copy: StorageCopy, parts: Sequence[Part]) -> None:
        super().__init__()
        self._copy = copy
        # Of host memory at once: it may change as soon as the write has ended.
        self._parts = [(part, part.seal() if part.is_on_host else None) for part in parts if part.has_checks]
        copy.when_done(self._seal)

    def _seal(self) -> None:
        error = self._copy.error
        try:
            for part, seals in self._parts if error is None else ():
                part.note(part.seal() if seals is None else seals)
        except StorageError as failed:
            error = failed
        self._parts = []
        self.finish(error)


def _tell(where: str, unwritten: Sequence[int], damaged: Sequence[int]) -> None:
    if unwritten:
        raise CorruptionError(
            f"{where}: record {unwritten[0]} was never written{_more(unwritten)}. Write it first, or read others; "
            ".check() lists them all."
        )
    if damaged:
        raise CorruptionError(
            f"{where}: record {damaged[0]} is not what was written{_more(damaged)}: it was cut off in the middle "
            "of a write, or the disk changed it. Write it again; .check() lists them all."
        )


def _more(numbers: Sequence[int]) -> str:
    return f", nor what it should be are {len(numbers) - 1} others" if len(numbers) > 1 else ""


def _which(first: int, count: int) -> str:
    return f"record {first}" if count == 1 else f"records {first} to {first + count - 1}"
