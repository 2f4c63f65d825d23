"""A volume: named kinds of records in one file or on one device, read and written by number.

    volume = Volume.create(path, kinds={"tokens": Kind(dtype=torch.int32, shape=(2048,), length=100_000)})
    volume["tokens"].write(7, tokens)
    volume.flush()                          # makes the writes durable
    volume["tokens"].read(0, 32)            # (32, 2048) int32

Every record has a checksum, unless the volume was created without. Reading a record that was damaged by a crash, or
never written, raises an error. A record can be read as soon as its write has ended. It survives a power failure once
`flush` has returned. There are no locks: if two writers write the same record at once, a read returns the data of one
of them, or raises an error.
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
from torchstorm.storage.records import ChecksummedWrite, Checksums, RecordRange, RecordRows, Records
from torchstorm.storage.request import PendingWrites, Request
from torchstorm.storage.staged import StagedFile


class Volume:
    """Named kinds of records in one file or on one device. Use `create`, `open` or `describe`.

    Args:
        file: the backend; closed with the volume.
        kinds: kinds by name, each with `start_bytes`.

    Attributes:
        path: path of the file.
        device: device of the tensors that reads allocate.
    """

    def __init__(self, file: Backend, kinds: Mapping[str | int, Kind], *, read_only: bool) -> None:
        self.path = file.path
        self.device = file.device
        self._file = file
        self._read_only = read_only
        self._writes = PendingWrites(file.path)
        try:
            fd = os.open(self.path, os.O_RDONLY if read_only else os.O_RDWR)  # for checksums, through the page cache
        except OSError as error:
            raise StorageError(f"{self.path} cannot be opened for its checksums: {error.strerror}.") from error
        self._release = weakref.finalize(self, os.close, fd)
        self._kinds: dict[str | int, Records] = {}
        for name, kind in kinds.items():
            checks = (
                None if kind.checks_bytes is None else Checksums(fd, kind.checks_bytes, f"kind {name!r} of {self.path}")
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
        """Creates a volume without any written records, as a sparse file.

        Args:
            path: path of the new file.
            kinds: kinds by name, without `start_bytes`.
            checks: whether every record gets a checksum of 8 bytes, so that reads detect damaged records.
            replace: whether an existing file is overwritten.
            device: a GPU whose tensors are to be read and written, too.
            require: the path that bytes must take; see `storage.choice.open_file`, also for what it raises.

        Raises:
            ConfigError: a kind is invalid.
            StorageError: the file exists, or cannot be created.
        """
        path = user_path(path, name="path")
        layout = Layout.place(kinds, checks=checks)
        if not replace and os.path.lexists(path):
            raise StorageError(
                f"{path} exists. Give another path, replace=True to overwrite it, or Volume.open to use it."
            )
        if replace and os.path.isfile(path):
            os.truncate(path, 0)  # old bytes could look like records
        file = open_file(path, device=device, require=require, size_bytes=layout.nbytes, create=True)
        try:
            file.sync()
            # The header is written last, so that an interrupted creation leaves no valid volume.
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
        """Opens an existing volume. Several processes can have it open.

        Args:
            path: path of the file.
            read_only: opens it for reading only.
            device: a GPU whose tensors are to be read and written, too.
            require: the path that bytes must take; see `storage.choice.open_file`, also for what it raises.

        Raises:
            CorruptionError: its header or table is damaged.
            StorageError: it is no volume, is truncated, or cannot be opened.
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
        """Accesses existing data as records that the caller describes. There are no checksums.

        Args:
            path: a file or a device.
            kinds: kinds by name or number, each with `start_bytes`; see `Kind.at_sectors`.
            read_only: opens it for reading only.
            device: a GPU whose tensors are to be read and written, too.
            require: the path that bytes must take; see `storage.choice.open_file`, also for what it raises.

        Raises:
            ConfigError: a kind has no `start_bytes`, or has `checks_bytes`.
            StorageError: a kind ends beyond the file, or the file cannot be opened.
        """
        for name, kind in kinds.items():
            if kind.start_bytes is None or kind.start_bytes < 0 or kind.checks_bytes is not None:
                raise ConfigError(
                    f"kind {name!r} has start_bytes={kind.start_bytes}, checks_bytes={kind.checks_bytes}: a kind "
                    "described by the caller needs start_bytes of at least 0, and no checks_bytes."
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
            ConfigError: the volume has no kind of that name.
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
        """Starts to read several (kind, i, n, out). Returns one request for all. Raises as `Records.read` does."""
        return self.begin_read([self[name].select(i, n, out) for name, i, n, out in requests])

    def begin_read(self, parts: Sequence[RecordRange]) -> Request:
        """Starts to read ranges of records."""
        copy = self._queue(self._file.read_batch_async, parts)
        return Request(copy, parts, reads=True)

    def begin_read_rows(self, rows: RecordRows, *, verify: bool) -> Request:
        """Starts to read records in any order; `verify` computes their checksums as they arrive."""
        file = self._file.below if isinstance(self._file, StagedFile) else self._file
        if isinstance(file, DirectFile):
            copy = file.read_rows_async(
                rows.tensor, rows.offsets, on_row=rows.add_row if verify and rows.has_checks else None
            )
        else:
            copy = file.read_batch_async([(rows.tensor[row], offset) for row, offset in enumerate(rows.offsets)])
        return Request(copy, [rows], reads=True)

    def begin_write(self, parts: Sequence[RecordRange]) -> Request:
        """Starts to write ranges of records.

        Raises:
            StorageError: the volume is open for reading only.
        """
        if self._read_only:
            raise StorageError(f"{self.path} is open for reading only: open it with read_only=False to write.")
        copy = self._queue(self._file.write_batch_async, parts)
        write = ChecksummedWrite(copy, parts)
        self._writes.add(write, parts)
        return Request(write, parts, reads=False)

    def _queue(self, begin: Callable[..., StorageCopy], parts: Sequence[RecordRange]) -> StorageCopy:
        requests = [(part.tensor, part.offset) for part in parts]
        if not isinstance(self._file, StagedFile):
            return begin(requests)

        def on_bytes(number: int, data: memoryview) -> None:
            if parts[number].has_checks:
                parts[number].add_bytes(data)

        return begin(requests, on_bytes=on_bytes)

    def flush(self) -> None:
        """Waits for all writes of this object, then makes them durable.

        Raises:
            StorageError: a write since the last flush failed, or the disk failed to make data durable. Then every
                later flush raises the error again, until the volume is reopened.
        """
        self._writes.flush(self._file.sync)

    def info(self) -> BackendInfo:
        """The path in use and the reason for it, with the counters that prove it."""
        return self._file.info()

    def close(self) -> None:
        """Waits for running requests, then frees the file and its threads. A second call does nothing."""
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
