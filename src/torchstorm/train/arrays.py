""".npy files as records, read in pieces.

The bytes are read, not mapped: a file that is cut off while it is mapped ends the whole process with SIGBUS, and mapped
pages count as this process's memory.
"""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from torchstorm.errors import DataError
from torchstorm.storage.aligned import aligned_empty, byte_view
from torchstorm.storage.layout import DTYPES
from torchstorm.train.texts import cannot_read

# What numpy's own words for a dtype do not say.
_WAYS_OUT = {
    "V": "save each field as an array of its own",
    "U": "pack texts as text files, or save numbers",
    "S": "pack texts as text files, or save array.view('uint8')",
    "M": "save array.view('int64')",
    "m": "save array.view('int64')",
    "O": "save an array of numbers",
}


@dataclass(frozen=True, kw_only=True)
class ArrayFile:
    """An array in a .npy file, the first dimension of which counts its records.

    Attributes:
        path: of the file.
        length: records.
        shape: of a record.
        dtype: of its elements, in the byte order of the file.
        is_fortran: whether the first dimension, not the last, is the one whose elements lie side by side.
        start_bytes: where they begin.
    """

    path: Path
    length: int
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    is_fortran: bool
    start_bytes: int

    @staticmethod
    def of(path: Path) -> ArrayFile:
        """Reads a file's head.

        Raises:
            DataError: it cannot be read, is no .npy file or shorter than it says, or holds no records.
        """
        try:
            found = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise DataError(
                f"{path} cannot be read as a .npy file: {error}. Write it with np.save(path, array)."
            ) from error
        if not isinstance(found, np.memmap):
            raise DataError(f"{path} is a .npz archive, not a .npy file: save its arrays one by one with np.save.")
        if found.dtype.name not in DTYPES:
            way_out = _WAYS_OUT.get(found.dtype.kind, "save it as one of these")
            raise DataError(
                f"{path} holds elements of dtype {found.dtype}, but a record's have one of {', '.join(DTYPES)}: "
                f"{way_out}."
            )
        if found.ndim == 0:
            raise DataError(f"{path} holds a single number, which has no records to count: save array[None].")
        if found.size == 0:
            raise DataError(f"{path} holds an array of shape {found.shape}, which is empty: leave it out.")
        return ArrayFile(
            path=path,
            length=found.shape[0],
            shape=found.shape[1:],
            dtype=found.dtype,
            is_fortran=not found.flags.c_contiguous,
            start_bytes=found.offset,
        )

    @property
    def record_dtype(self) -> torch.dtype:
        """Of the records, in the byte order of this machine."""
        return DTYPES[self.dtype.name]

    @property
    def record_bytes(self) -> int:
        """Of one record."""
        return math.prod(self.shape) * self.dtype.itemsize

    def pieces(self, most: int) -> Iterator[torch.Tensor]:
        """All records in turn: (n, *shape), n at most `most`.

        Raises:
            DataError: the file cannot be read, or ends before its array does.
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
        """Records out of a file in which each element of all records lies side by side."""
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
                raise DataError(
                    f"{self.path} ends at byte {self.start_bytes + start + done}, but its array of {self.length} "
                    f"records takes {self.start_bytes + self.length * self.record_bytes}: it was cut off meanwhile."
                )
            done += count
