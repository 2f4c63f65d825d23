"""Reads .npy files as records, in pieces.

The files are read, not memory-mapped: if a mapped file is truncated, the process dies with SIGBUS, and mapped pages
count as memory of the process.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.lib import format as npy

from torchstorm.errors import DataError
from torchstorm.storage.aligned import aligned_empty, byte_view
from torchstorm.storage.layout import DTYPES
from torchstorm.train.texts import cannot_read

# Remedies for dtypes that records do not support.
_WAYS_OUT = {
    "V": "save each field as a separate array",
    "U": "pack texts as text files, or save numbers",
    "S": "pack texts as text files, or save array.view('uint8')",
    "M": "save array.view('int64')",
    "m": "save array.view('int64')",
    "O": "save an array of numbers",
}


@dataclass(frozen=True, kw_only=True)
class ArrayFile:
    """An array in a .npy file. Its first dimension is the number of records.

    Attributes:
        path: path of the file.
        length: number of records.
        shape: shape of a record.
        dtype: dtype of its elements, in the byte order of the file.
        is_fortran: whether the array is stored in Fortran order (first dimension contiguous).
        start_bytes: byte offset of the data.
    """

    path: Path
    length: int
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    is_fortran: bool
    start_bytes: int

    @staticmethod
    def of(path: Path) -> ArrayFile:
        """Reads the header of a file.

        Raises:
            DataError: it cannot be read, is not a .npy file, is shorter than its header says, or has no records.
        """
        try:
            with open(path, "rb") as file:
                version = npy.read_magic(file)
                read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
                shape, is_fortran, dtype = read(file)
                start_bytes, file_bytes = file.tell(), os.fstat(file.fileno()).st_size
        except OSError as error:
            raise cannot_read(path, error) from error
        except ValueError as error:
            raise DataError(f"{path} is not a .npy file: {error}. Write it with np.save(path, array).") from error
        if dtype.name not in DTYPES:
            way_out = _WAYS_OUT.get(dtype.kind, "save it as one of these")
            raise DataError(f"{path} has dtype {dtype}, but records support {', '.join(DTYPES)}: {way_out}.")
        if not shape:
            raise DataError(f"{path} is a single number without a dimension for records: save array[None].")
        if not math.prod(shape):
            raise DataError(f"{path} is an empty array of shape {shape}: leave it out.")
        found = ArrayFile(
            path=path,
            length=shape[0],
            shape=shape[1:],
            dtype=dtype,
            is_fortran=is_fortran and len(shape) > 1,
            start_bytes=start_bytes,
        )
        if file_bytes < found.stop_bytes:
            raise found.ends_early(file_bytes)
        return found

    @property
    def record_dtype(self) -> torch.dtype:
        """The records' dtype in the byte order of this machine."""
        return DTYPES[self.dtype.name]

    @property
    def record_bytes(self) -> int:
        """Bytes of one record."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def stop_bytes(self) -> int:
        """Byte offset of the end of the data."""
        return self.start_bytes + self.length * self.record_bytes

    def ends_early(self, file_bytes: int) -> DataError:
        """The error if the file is shorter than that."""
        return DataError(
            f"{self.path} ends at byte {file_bytes}, but its array of {self.length} records of {self.record_bytes} "
            f"bytes would end at {self.stop_bytes}: it is truncated. Write it again, and pack it "
            "when no other program writes it."
        )

    def pieces(self, most: int) -> Iterator[torch.Tensor]:
        """Yields all records in order: (n, *shape), n at most `most`.

        Raises:
            DataError: the file cannot be read, or is truncated.
        """
        try:
            with open(self.path, "rb", buffering=0) as file:
                for first in range(0, self.length, most):
                    count = min(most, self.length - first)
                    tensor = aligned_empty(count * self.record_bytes).view(self.record_dtype).view(count, *self.shape)
                    if self.is_fortran:
                        self._fill_from_columns(file.fileno(), tensor, first)
                    else:
                        self._read(file.fileno(), byte_view(tensor), first * self.record_bytes)
                    if not self.dtype.isnative:
                        tensor.numpy().byteswap(inplace=True)
                    yield tensor
        except OSError as error:
            raise cannot_read(self.path, error) from error

    def _fill_from_columns(self, fd: int, tensor: torch.Tensor, first: int) -> None:
        """Reads records from a file in Fortran order."""
        columns = np.empty((math.prod(self.shape), len(tensor)), dtype=self.dtype.newbyteorder("="))
        for number, column in enumerate(columns):
            start = (number * self.length + first) * self.dtype.itemsize
            self._read(fd, memoryview(column).cast("B"), start)
        tensor.numpy()[...] = columns.reshape(*reversed(self.shape), len(tensor)).T

    def _read(self, fd: int, out: memoryview, start: int) -> None:
        done = 0
        while done < len(out):
            count = os.preadv(fd, [out[done:]], self.start_bytes + start + done)
            if not count:
                raise self.ends_early(os.fstat(fd).st_size)
            done += count
