"""Access to a device or a file by sector number: the level below a volume, without kinds, checksums or a table.

with NVMe("/dev/nvme0n1") as device:
    device.read(0, 8)                       # (8, 512) uint8
    device.read_async(8, 8, out).wait()     # any dtype of 8 sectors' bytes
"""

from __future__ import annotations

import contextlib
import os
from types import TracebackType
from typing import Self

import torch

from torchstorm.errors import ConfigError, StorageError
from torchstorm.paths import user_path
from torchstorm.sizes import format_size
from torchstorm.storage.aligned import aligned_empty
from torchstorm.storage.backend import Backend, BackendInfo
from torchstorm.storage.choice import open_file
from torchstorm.storage.device import check_unused, is_block_device, sector_bytes, size_bytes
from torchstorm.storage.request import PendingWrites, Request, overlapping
from torchstorm.storage.xnvme import XnvmeDevice


class NVMe:
    """The sectors of a block device or a file, read and written by number (LBA). Thread-safe.

    If a file's size is not a multiple of the sector size, its last bytes are never accessed.

    Args:
        path: a block device or an existing file; for require="xnvme", a `uri` of `XnvmeDevice`.
        sector_bytes: size of a sector; None uses the device's, and 512 for a file.
        read_only: opens it for reading only.
        allow_mounted: writes to a device even if it is mounted, swap, or part of a RAID; never through xNVMe.
        device: a GPU, to read and write its tensors, too.
        require: the I/O path to use; see `storage.choice.open_file`, also for its errors.

    Attributes:
        path: path as given.
        sector_bytes: size of a sector.
        num_sectors: number of sectors. The first is number 0.
        read_only: whether it is open for reading only.

    Raises:
        ConfigError: `sector_bytes` is not positive, or not a multiple of the device's sector size.
        StorageError: it is neither a file nor a block device, cannot be opened, is smaller than a sector, or is opened
            for writing while in use.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        sector_bytes: int | None = None,
        read_only: bool = True,
        allow_mounted: bool = False,
        device: torch.device | str | None = None,
        require: str | None = None,
    ) -> None:
        self.path, self.read_only = str(user_path(path, name="path")), read_only
        if require != "xnvme" and is_block_device(self.path) and not read_only and not allow_mounted:
            check_unused(self.path)  # XnvmeDevice does its own check
        self._file = open_file(self.path, device=device, require=require, read_only=read_only)
        try:
            self.sector_bytes, self.num_sectors = _geometry(self._file, sector_bytes)
        except BaseException:
            self._file.close()
            raise
        self._writes = PendingWrites(self.path)

    def read(self, lba: int, count: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Reads sectors lba to lba + count - 1.

        Args:
            lba: number of the first.
            count: how many.
            out: contiguous, any dtype and shape with count * sector_bytes bytes; allocated if None.

        Returns:
            `out`, or (count, sector_bytes) uint8 on the CPU.

        Raises:
            ConfigError: a sector does not exist, or `out` does not match. Nothing is read then.
            StorageError: the disk failed, or it is closed.
        """
        return self.read_async(lba, count, out).result()

    def read_async(
        self, lba: int, count: int, out: torch.Tensor | None = None, stream: torch.cuda.Stream | None = None
    ) -> Request:
        """Starts `read`. `out` must not be used before the request's `wait` has returned.

        Args:
            lba: number of the first.
            count: how many.
            out: as in `read`.
            stream: for an `out` on a GPU, the stream that `wait` makes wait; None for the current one.
        """
        part = self._sectors(lba, count, out, stream)
        with _on(stream):
            copy = self._file.read_batch_async([(part.tensor, part.offset)])
        return Request(copy, [part], reads=True, stream=stream)

    def write(self, lba: int, count: int, source: torch.Tensor) -> None:
        """Writes sectors lba to lba + count - 1. `flush` makes them durable.

        Args:
            lba: number of the first.
            count: how many.
            source: contiguous, any dtype and shape with count * sector_bytes bytes.

        Raises:
            ConfigError: a sector does not exist, or `source` does not match. Nothing is written then.
            StorageError: the disk failed, or it is closed or open for reading only.
        """
        self.write_async(lba, count, source).wait()

    def write_async(
        self, lba: int, count: int, source: torch.Tensor, stream: torch.cuda.Stream | None = None
    ) -> Request:
        """Starts `write`. `source` must stay unchanged until the request has ended.

        Args:
            lba: number of the first.
            count: how many.
            source: as in `write`.
            stream: for a `source` on a GPU, the stream that computes it; None for the current one.
        """
        part = self._sectors(lba, count, source, stream)
        if self.read_only:
            raise StorageError(f"{self.path} is open for reading only: open it with read_only=False to write.")
        with _on(stream):
            copy = self._file.write_batch_async([(part.tensor, part.offset)])
        self._writes.add(copy, [part])
        return Request(copy, [part], reads=False, stream=stream)

    def flush(self) -> None:
        """Waits for all writes of this object, then makes them durable.

        Raises:
            StorageError: a write since the last flush failed, or the disk failed to make data durable. Then every
                later flush raises the error again, until the device or file is reopened.
        """
        self._writes.flush(self._file.sync)

    def info(self) -> BackendInfo:
        """The path in use and the reason for it, with the counters that prove it."""
        return self._file.info()

    def close(self) -> None:
        """Waits for running requests, then frees the file and its threads. A second call does nothing."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        size = format_size(self.num_sectors * self.sector_bytes)
        use = "reading only" if self.read_only else "reading and writing"
        return f"NVMe({self.path!r}, {self.num_sectors} sectors of {self.sector_bytes} bytes, {size}, {use})"

    def _sectors(self, lba: int, count: int, tensor: torch.Tensor | None, stream: torch.cuda.Stream | None) -> _Sectors:
        if not all(isinstance(number, int) and not isinstance(number, bool) for number in (lba, count)):
            raise ConfigError(f"{self.path}: lba={lba!r}, count={count!r}, but they must be integers.")
        if lba < 0 or count < 0 or lba + count > self.num_sectors:
            raise ConfigError(
                f"{self.path}: {count} sectors from {lba} on were requested, but there are {self.num_sectors} of "
                f"{self.sector_bytes} bytes, from 0 to {self.num_sectors - 1}."
            )
        nbytes = count * self.sector_bytes
        if tensor is None:
            tensor = aligned_empty(nbytes).view(count, self.sector_bytes)
        elif tensor.nbytes != nbytes:
            raise ConfigError(
                f"{self.path}: {count} sectors of {self.sector_bytes} bytes need a tensor of {nbytes} bytes, but this "
                f"one has {tensor.nbytes}: {tuple(tensor.shape)} {tensor.dtype}."
            )
        elif not tensor.is_contiguous():
            raise ConfigError(
                f"{self.path}: a contiguous tensor is needed, but this one is {tuple(tensor.shape)} with strides "
                f"{tensor.stride()}. Pass tensor.contiguous()."
            )
        if stream is not None and tensor.device.type != "cuda":
            raise ConfigError(
                f"{self.path}: stream={stream} was given for a tensor on {tensor.device}, but only tensors on a GPU "
                "use a stream. Leave it out."
            )
        return _Sectors(self, lba, tensor)


class _Sectors:
    """A range of sectors and its tensor; a `FileRegion`."""

    def __init__(self, device: NVMe, first: int, tensor: torch.Tensor) -> None:
        self.tensor, self.offset = tensor, first * device.sector_bytes
        self._first = first
        self._path, self._sector_bytes = device.path, device.sector_bytes

    def describe(self, extent: tuple[int, int]) -> str:
        """See `FileRegion`."""
        found = overlapping(self.offset, self.tensor.nbytes, self._sector_bytes, extent)
        first, last = self._first + found.start, self._first + found.stop - 1
        return f"{f'sector {first}' if first == last else f'sectors {first} to {last}'} of {self._path}"

    def verify(self) -> None:
        """See `FileRegion`. Sectors have no checksums."""


def _geometry(file: Backend, given: int | None) -> tuple[int, int]:
    """(bytes per sector, number of sectors)."""
    is_device = isinstance(file, XnvmeDevice) or is_block_device(file.path)
    if isinstance(file, XnvmeDevice):  # it need not have a device file
        found, size = file.sector_bytes, file.size_bytes
    else:
        found, size = sector_bytes(file.path), size_bytes(file.path)
    if given is not None:
        if not isinstance(given, int) or isinstance(given, bool) or given <= 0:
            raise ConfigError(f"sector_bytes={given!r}, but it must be an integer of at least 1.")
        if is_device and given % found:
            raise ConfigError(
                f"sector_bytes={given}, but {file.path} has sectors of {found} bytes: give a multiple of that."
            )
        found = given
    if size < found:
        raise StorageError(
            f"{file.path} is too small: it has {size} bytes, and a sector has {found}. Use another file, or a "
            "smaller sector_bytes."
        )
    return found, size // found


def _on(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext()
