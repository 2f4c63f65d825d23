"""How fast a disk is, measured as a spill file uses it."""

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
    """Writes a file over blocks it already has and reads it back: 1 MiB blocks, four at a time, O_DIRECT where it can.

    Args:
        directory: where; the file of `nbytes` bytes is removed again.
        nbytes: size of the file, and of the host memory that this takes.

    Returns:
        Bytes per second written (made durable), and read.

    Raises:
        StorageError: the directory cannot be written, or is full.
    """
    directory = user_path(directory, name="directory")
    buffer = aligned_empty(nbytes)
    buffer.random_(generator=torch.Generator().manual_seed(0))  # some disks compress
    try:
        descriptor, path = tempfile.mkstemp(prefix="torchstorm-measure-", dir=directory)
    except OSError as error:
        raise StorageError(
            f"{directory} cannot be measured: {error.strerror}. Name one that exists and is writable."
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
            # Where the page cache is in use, reading must not find what writing left in it.
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
