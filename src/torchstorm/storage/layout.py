"""The layout of a volume, and the table at its start that describes it.

    byte 0     header, a page: magic, version, CRC-32 and bytes of the table, bytes of the volume, CRC-32 of all these
    byte 4096  the table: JSON, one entry per kind
    pages      each kind's records, one after the other, then its checksums: 8 bytes per record

A checksum is 0 for a record that was never written, else 2**32 + CRC-32 of its bytes. The records and the checksums of
a kind start at page boundaries, so that no page is written by both direct and buffered I/O.
"""

from __future__ import annotations

import json
import mmap
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from torchstorm.errors import ConfigError, CorruptionError, StorageError
from torchstorm.sizes import format_size
from torchstorm.storage.aligned import round_up

MAGIC = b"STORMVOL"
VERSION = 1
CHECK_BYTES = 8
_HEADER = struct.Struct("<8sIIQQ")  # magic, version, CRC-32 of the table, bytes of the table, bytes of the volume
_HEADER_CHECK = struct.Struct("<I")
_MOST_TABLE_BYTES = 2**26


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of record: its dtype, shape and number, and its place in the file.

    Attributes:
        dtype: dtype of a record.
        shape: shape of a record; () for a single number.
        length: number of records.
        start_bytes: byte offset of the first record. None for a new volume, which chooses it.
        checks_bytes: byte offset of the checksums; None without checksums.

    Raises:
        ConfigError: a size is negative, or the dtype is not supported.
    """

    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    length: int
    start_bytes: int | None = None
    checks_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES.values():
            raise ConfigError(f"dtype={self.dtype!r}, but a record has one of {', '.join(DTYPES)}.")
        for name, value in (("length", self.length), *(("shape", size) for size in self.shape)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ConfigError(f"{name}={getattr(self, name)!r}, but sizes are whole numbers of at least 0.")

    @property
    def record_bytes(self) -> int:
        """Bytes of one record."""
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of all records."""
        return self.record_bytes * self.length

    @staticmethod
    def at_sectors(start_lba: int, length: int, *, sector_bytes: int = 512, dtype: torch.dtype = torch.uint8) -> Kind:
        """Describes existing sectors of a device or file as records of one sector each.

        Args:
            start_lba: number of the first sector.
            length: number of sectors.
            sector_bytes: size of a sector, a multiple of the dtype's size.
            dtype: dtype of the records.

        Raises:
            ConfigError: a number is negative, or a sector is not a whole number of elements.
        """
        if start_lba < 0 or sector_bytes <= 0 or sector_bytes % dtype.itemsize:
            raise ConfigError(
                f"start_lba={start_lba}, sector_bytes={sector_bytes}: give a start of at least 0, and sectors of a "
                f"multiple of {dtype.itemsize} bytes, the size of {dtype}."
            )
        shape = (sector_bytes // dtype.itemsize,)
        return Kind(dtype=dtype, shape=shape, length=length, start_bytes=start_lba * sector_bytes)


DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
        *(torch.uint16, torch.uint32, torch.uint64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
    )
}
"""Supported dtypes by their name in a volume's table."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The kinds of a volume with their places in the file.

    Attributes:
        kinds: kinds by name.
        nbytes: size of the whole volume.
    """

    kinds: Mapping[str | int, Kind]
    nbytes: int

    @staticmethod
    def place(kinds: Mapping[str, Kind], *, checks: bool) -> Layout:
        """Places kinds one after the other, after the header and the table.

        Args:
            kinds: kinds by name, without `start_bytes`.
            checks: whether every record gets a checksum.

        Raises:
            ConfigError: a kind has `start_bytes` or no name, or the table is too large.
        """
        for name, kind in kinds.items():
            if not isinstance(name, str) or not name:
                raise ConfigError(
                    f"kind {name!r}: in a new volume, the name of a kind must be a text that is not empty."
                )
            if kind.start_bytes is not None or kind.checks_bytes is not None:
                raise ConfigError(
                    f"kind {name!r} has start_bytes, but a new volume chooses it: leave start_bytes out, or use "
                    "Volume.describe for existing data."
                )
        # The table's length depends on the offsets in it, so the records start after the longest possible table.
        widest: dict[str | int, Kind] = {
            name: _placed(kind, 2**63 - 1, 2**63 - 1 if checks else None) for name, kind in kinds.items()
        }
        position = mmap.PAGESIZE + round_up(len(_table(widest)), mmap.PAGESIZE)
        placed: dict[str | int, Kind] = {}
        for name, kind in kinds.items():
            start = position
            position += round_up(kind.nbytes, mmap.PAGESIZE)
            checks_at = position if checks else None
            if checks:
                position += round_up(CHECK_BYTES * kind.length, mmap.PAGESIZE)
            placed[name] = _placed(kind, start, checks_at)
        return Layout(kinds=placed, nbytes=position)

    def header(self) -> bytes:
        """The header's page and the table."""
        table = _table(self.kinds)
        head = _HEADER.pack(MAGIC, VERSION, zlib.crc32(table), len(table), self.nbytes)
        page = (head + _HEADER_CHECK.pack(zlib.crc32(head))).ljust(mmap.PAGESIZE, b"\0")
        return page + table

    @staticmethod
    def read(path: str, data: bytes, file_bytes: int) -> Layout:
        """Reads what `header` wrote.

        Args:
            path: for messages.
            data: the file's first `header_bytes` bytes.
            file_bytes: size of the file.

        Raises:
            CorruptionError: the header or the table is damaged.
            StorageError: it is no volume, has another version, or the file is shorter than the volume.
        """
        table_bytes, table_check, nbytes = _head(path, data)
        table = data[mmap.PAGESIZE : mmap.PAGESIZE + table_bytes]
        if len(table) != table_bytes or zlib.crc32(table) != table_check:
            raise CorruptionError(
                f"{path}: the volume's table of {table_bytes} bytes is not what was written. Restore the file from a "
                "copy, or describe its kinds yourself: Volume.describe(path, kinds)."
            )
        if file_bytes < nbytes:
            raise StorageError(
                f"{path} ends at {format_size(file_bytes)} ({file_bytes}), but its volume has {format_size(nbytes)} "
                f"({nbytes}): the file was truncated. Restore it from a copy."
            )
        kinds: dict[str | int, Kind] = {
            str(name): Kind(
                dtype=DTYPES[fields["dtype"]],
                shape=tuple(fields["shape"]),
                length=fields["length"],
                start_bytes=fields["start_bytes"],
                checks_bytes=fields["checks_bytes"],
            )
            for name, fields in json.loads(table).items()
        }
        return Layout(kinds=kinds, nbytes=nbytes)


def header_bytes(path: str, page: bytes) -> int:
    """Bytes of header and table together, from the file's first page. Raises as `Layout.read` does."""
    return mmap.PAGESIZE + _head(path, page)[0]


def _head(path: str, page: bytes) -> tuple[int, int, int]:
    """(bytes of the table, its CRC-32, bytes of the volume)."""
    size = _HEADER.size
    if page[: len(MAGIC)] != MAGIC:
        raise StorageError(
            f"{path} is no torchstorm volume: it begins with {page[:8]!r}. Make one with Volume.create or `torchstorm "
            "pack`, or describe the kinds of records in it: Volume.describe(path, kinds)."
        )
    if len(page) < size + 4 or _HEADER_CHECK.unpack_from(page, size)[0] != zlib.crc32(page[:size]):
        raise CorruptionError(f"{path}: the volume's header is not what was written. Restore the file from a copy.")
    _, version, table_check, table_bytes, nbytes = _HEADER.unpack_from(page)
    if version != VERSION or table_bytes > _MOST_TABLE_BYTES:
        raise StorageError(
            f"{path} is a volume of version {version} with a table of {format_size(table_bytes)}; this torchstorm "
            f"reads version {VERSION} with tables of up to {format_size(_MOST_TABLE_BYTES)}."
        )
    return table_bytes, table_check, nbytes


def _placed(kind: Kind, start: int, checks: int | None) -> Kind:
    return Kind(dtype=kind.dtype, shape=kind.shape, length=kind.length, start_bytes=start, checks_bytes=checks)


def _table(kinds: Mapping[str | int, Kind]) -> bytes:
    entries = {
        name: {
            "dtype": str(kind.dtype).removeprefix("torch."),
            "shape": list(kind.shape),
            "length": kind.length,
            "start_bytes": kind.start_bytes,
            "checks_bytes": kind.checks_bytes,
        }
        for name, kind in kinds.items()
    }
    return json.dumps(entries, ensure_ascii=False).encode()
