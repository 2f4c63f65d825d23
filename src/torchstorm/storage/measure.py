"""Measures the speed of a disk for spill files."""

from __future__ import annotations

import os
import tempfile
import time

import torch

from torchstorm.errors import StorageError
from torchstorm.paths import user_path
from torchstorm.storage.aligned import aligned_empty
from torchstorm.storage.direct import DirectFile


def measure_disk(directory: str | os.PathLike[str], *, nbytes: int = 64 * 2**20) -> tuple[float, float]:
    """Overwrites a file and reads it back, in blocks of 1 MiB, four at a time, with O_DIRECT if possible.

    Args:
        directory: where the file is created. It is removed at the end.
        nbytes: size of the file, and of the host memory used.

    Returns:
        Bytes per second written (including fsync), and bytes per second read.

    Raises:
        StorageError: the directory is not writable, or full.
    """
    directory = user_path(directory, name="directory")
    buffer = aligned_empty(nbytes)
    buffer.random_(generator=torch.Generator().manual_seed(0))  # random bytes, since some disks compress
    try:
        descriptor, path = tempfile.mkstemp(prefix="torchstorm-measure-", dir=directory)
    except OSError as error:
        raise StorageError(
            f"{directory} cannot be measured: {error.strerror}. Give a directory that exists and is writable."
        ) from error
    try:
        file = DirectFile(path)
        try:
            file.write_from(buffer, 0)
            file.sync()
            start = time.perf_counter()
            file.write_from(buffer, 0)
            file.sync()
            written = time.perf_counter() - start
            # If the page cache is in use, reads must not be served from it.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            start = time.perf_counter()
            file.read_into(buffer, 0)
            read = time.perf_counter() - start
        finally:
            file.close()
    finally:
        os.close(descriptor)
        os.unlink(path)
    return nbytes / written, nbytes / read
