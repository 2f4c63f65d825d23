"""A volume: named kinds of records in one file or on one device, read and written by number.

    volume = Volume.create(path, kinds={"tokens": Kind(dtype=torch.int32, shape=(2048,), length=100_000)})
    volume["tokens"].write(7, tokens)
    volume.flush()                          # what was written is durable now
    volume["tokens"].read(0, 32)            # (32, 2048) int32

Every record has a check, unless that was left out: one that was torn by a crash, or never written, is told when it is
read, never handed out. A record is whole for its readers as soon as its write has ended, and safe from a power cut once
`flush` has returned. Nothing is locked: who writes the same record from two places at once gets one of the two, or an
error when it is read.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self

import torch

from torchstorm.errors import ConfigError, StorageError
from torchstorm.paths import user_path
from torchstorm.sizes import format_size
from torchstorm.storage.aligned import aligned_empty
from torchstorm.storage.backend import Backend, BackendInfo, StorageCopy
from torchstorm.storage.choice import open_file
from torchstorm.storage.device import size_bytes, sync_directory
from torchstorm.storage.direct import DirectFile
from torchstorm.storage.layout import Kind, Layout, header_bytes
from torchstorm.storage.records import Checks, Part, Records, Rows, SealedWrite
from torchstorm.storage.request import Request, Writes
from torchstorm.storage.staged import StagedFile


class Volume:
    """Named kinds of records in one file or on one device. Made by `create`, `open` or `describe`.

    Args:
        file: what it lies on; closed with it.
        kinds: by name, each with its start.

    Attributes:
        path: of the file.
        device: where records are read to unless a tensor is given.
    """

    def __init__(self, file: Backend, kinds: Mapping[str | int, Kind], *, read_only: bool) -> None:
        self.path = file.path
        self.device = file.device
        self._file = file
        self._read_only = read_only
        self._writes = Writes(file.path)
        try:
            fd = os.open(self.path, os.O_RDONLY if read_only else os.O_RDWR)  # for checks, through the page cache
        except OSError as error:
            raise StorageError(f"{self.path} cannot be opened for its checks: {error.strerror}.") from error
        self._release = weakref.finalize(self, os.close, fd)
        self._kinds: dict[str | int, Records] = {}
        for name, kind in kinds.items():
            checks = (
                None if kind.checks_bytes is None else Checks(fd, kind.checks_bytes, f"kind {name!r} of {self.path}")
            )
            self._kinds[name] = Records(self, name, kind, checks)

    @staticmethod
    def create(
        path: str | os.PathLike[str],
        kinds: Mapping[str, Kind],
        *,
        checks: bool = True,
        replace: bool = False,
        device: torch.device | str | None = None,
        require: str | None = None,
    ) -> Volume:
        """Makes a volume of records that are still to be written; its file is sparse until then.

        Args:
            path: a file that does not exist.
            kinds: by name, without their starts.
            checks: whether every record gets a check of 8 bytes, which tells a torn or changed one when it is read.
            replace: whether a file that exists is overwritten.
            device: a GPU whose tensors are to be read and written, too.
            require: the path that bytes must take; see `storage.choice.open_file`, also for what it raises.

        Raises:
            ConfigError: a kind cannot be placed.
            StorageError: the file exists, or cannot be made.
        """
        path = user_path(path, name="path")
        layout = Layout.place(kinds, checks=checks)
        if not replace and os.path.lexists(path):
            raise StorageError(
                f"{path} exists. Give another path, replace=True to overwrite it, or Volume.open to use it."
            )
        if replace and os.path.isfile(path):
            os.truncate(path, 0)  # what lay there would look like records
        file = open_file(path, device=device, require=require, size_bytes=layout.nbytes, create=True)
        try:
            file.sync()
            # Last, so that what broke off before is no volume.
            file.write_from(torch.frombuffer(bytearray(layout.header()), dtype=torch.uint8), 0)
            file.sync()
            sync_directory(os.path.dirname(file.path) or ".")
            return Volume(file, layout.kinds, read_only=False)
        except BaseException:
            file.close()
            raise

    @staticmethod
    def open(
        path: str | os.PathLike[str],
        *,
        read_only: bool = False,
        device: torch.device | str | None = None,
        require: str | None = None,
    ) -> Volume:
        """Opens what `create` made; others may have it open, too.

        Args:
            path: the file.
            read_only: opens it for reading.
            device: a GPU whose tensors are to be read and written, too.
            require: the path that bytes must take; see `storage.choice.open_file`, also for what it raises.

        Raises:
            CorruptionError: its header or table changed.
            StorageError: it is no volume, cut off, or cannot be opened.
        """
        file = open_file(path, device=device, require=require, read_only=read_only)
        try:
            size = size_bytes(file.path)
            page = _bytes_of(file, min(size, mmap.PAGESIZE))
            layout = Layout.read(file.path, _bytes_of(file, min(size, header_bytes(file.path, page))), size)
            return Volume(file, layout.kinds, read_only=read_only)
        except BaseException:
            file.close()
            raise

    @staticmethod
    def describe(
        path: str | os.PathLike[str],
        kinds: Mapping[str | int, Kind],
        *,
        read_only: bool = True,
        device: torch.device | str | None = None,
        require: str | None = None,
    ) -> Volume:
        """Takes data that is there for records, as the caller says; nothing of it is checked.

        Args:
            path: a file or a device.
            kinds: by name or number, each with its start; see `Kind.at_sectors`.
            read_only: whether it is opened for reading alone.
            device: a GPU whose tensors are to be read and written, too.
            require: the path that bytes must take; see `storage.choice.open_file`, also for what it raises.

        Raises:
            ConfigError: a kind has no start, or checks.
            StorageError: a kind ends beyond the file, or the file cannot be opened.
        """
        for name, kind in kinds.items():
            if kind.start_bytes is None or kind.start_bytes < 0 or kind.checks_bytes is not None:
                raise ConfigError(
                    f"kind {name!r} has start_bytes={kind.start_bytes}, checks_bytes={kind.checks_bytes}: what is "
                    "described by hand needs a start of at least 0, and has no checks."
                )
        file = open_file(path, device=device, require=require, read_only=read_only)
        try:
            size = size_bytes(file.path)
            for name, kind in kinds.items():
                assert kind.start_bytes is not None
                stop = kind.start_bytes + kind.nbytes
                if stop > size:
                    raise StorageError(
                        f"{file.path} ends at byte {size}, but kind {name!r} would end at {stop}: {kind.length} "
                        f"records of {kind.record_bytes} bytes from {kind.start_bytes} on."
                    )
            return Volume(file, kinds, read_only=read_only)
        except BaseException:
            file.close()
            raise

    def __getitem__(self, name: str | int) -> Records:
        """The records of a kind.

        Raises:
            ConfigError: there is none of that name.
        """
        if name not in self._kinds:
            raise ConfigError(
                f"{self.path} has no kind {name!r}; it has {', '.join(map(repr, self._kinds)) or 'none'}."
            )
        return self._kinds[name]

    def __iter__(self) -> Iterator[str | int]:
        return iter(self._kinds)

    def __len__(self) -> int:
        return len(self._kinds)

    def read_batch(self, requests: Sequence[tuple[str | int, int, int, torch.Tensor | None]]) -> Request:
        """Begins to read several (kind, i, n, out); one request for all. Raises as `Records.read` does."""
        return self.begin_read([self[name].part(i, n, out) for name, i, n, out in requests])

    def begin_read(self, parts: Sequence[Part]) -> Request:
        """Begins to read parts of its kinds."""
        copy = self._queue(self._file.read_batch_async, parts)
        return Request(copy, parts, reads=True)

    def begin_read_rows(self, rows: Rows, *, look: bool) -> Request:
        """Begins to read records from all over a kind, and to look at each as it comes."""
        file = self._file.below if isinstance(self._file, StagedFile) else self._file
        if isinstance(file, DirectFile):
            copy = file.read_rows_async(rows.tensor, rows.offsets, look=rows.look if look and rows.has_checks else None)
        else:
            copy = file.read_batch_async([(rows.tensor[row], offset) for row, offset in enumerate(rows.offsets)])
        return Request(copy, [rows], reads=True)

    def begin_write(self, parts: Sequence[Part]) -> Request:
        """Begins to write parts of its kinds.

        Raises:
            StorageError: the volume is open for reading only.
        """
        if self._read_only:
            raise StorageError(f"{self.path} is open for reading only: open it with read_only=False to write.")
        copy = self._queue(self._file.write_batch_async, parts)
        write = SealedWrite(copy, parts)
        self._writes.add(write, parts)
        return Request(write, parts, reads=False)

    def _queue(self, begin: Callable[..., StorageCopy], parts: Sequence[Part]) -> StorageCopy:
        requests = [(part.tensor, part.offset) for part in parts]
        if not isinstance(self._file, StagedFile):
            return begin(requests)

        def look(number: int, data: memoryview) -> None:
            if parts[number].has_checks:
                parts[number].look(data)

        return begin(requests, look=look)

    def flush(self) -> None:
        """Makes durable what was written: waits for all writes that this object began, then for the disk.

        Raises:
            StorageError: the disk failed in a write since the last flush, which is named; or it failed to make
                durable what it took, which every later flush tells again, until the volume is opened anew.
        """
        self._writes.flush(self._file.sync)

    def info(self) -> BackendInfo:
        """Which path is in use and why, with the counters that prove it."""
        return self._file.info()

    def close(self) -> None:
        """Lets requests under way end, and gives back the file and its threads. Closing twice does nothing."""
        self._file.close()
        for records in self._kinds.values():
            if records.checks is not None:
                records.checks.close()
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        kinds = ", ".join(
            f"{name!r}: {len(records)} x {records.kind.shape} {str(records.kind.dtype).removeprefix('torch.')}"
            for name, records in self._kinds.items()
        )
        total = sum(records.kind.nbytes for records in self._kinds.values())
        return f"Volume({self.path!r}, {kinds or 'no kinds'}, {format_size(total)})"


def _bytes_of(file: Backend, nbytes: int) -> bytes:
    """The file's first bytes."""
    tensor = aligned_empty(nbytes)
    file.read_into(tensor, 0)
    return tensor.numpy().tobytes()
