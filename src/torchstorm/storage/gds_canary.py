"""Proves that cuFile's transfers bypass the host: it reads a canary and compares counters before and after.

A successful read is no proof, since cuFile can silently read through the host (compatibility mode). So:

- the canary's bytes must have the checksum of a plain read;
- in cuFile's level 3 statistics, n_nvfs_reads or n_p2p_reads must have increased and n_posix_reads must not. They count
  for the whole process;
- without these statistics (cuFile before 1.15), the nvidia-fs module's count of reads must have increased. It counts
  for the whole machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import torch

from torchstorm.errors import StorageError, UnsupportedError
from torchstorm.sizes import format_size
from torchstorm.storage.aligned import memory_view, round_down, round_up
from torchstorm.storage.cufile import CuFile, Span

PAGE_BYTES = 4096  # cuFile's alignment, whatever the host's page size
CANARY_BYTES = 2**20


class Ready(Protocol):
    """An event on the caller's stream, as `transfer.engine.Engine.mark` records it."""

    def synchronize(self) -> None:
        """Blocks the host until the stream has reached it."""


def prove_direct(path: str, driver: CuFile, *, device: torch.device, mark: Callable[[], Ready], statistics: str) -> str:
    """Reads a canary file next to a file, or bytes of the file itself if its directory is not writable.

    Args:
        path: the file.
        driver: the cuFile driver.
        device: the GPU that the canary is read to.
        mark: as `Engine.mark`.
        statistics: the nvidia-fs module's file of counters, read if cuFile has none.

    Returns:
        The evidence that the read bypassed the host.

    Raises:
        UnsupportedError: the read went through the host, or there is no evidence.
        StorageError: the canary could not be written or read.
    """
    with _canary(path) as (name, offset, nbytes):
        with open(name, "rb") as plain:
            plain.seek(offset)
            expected = hashlib.sha256(plain.read(nbytes)).hexdigest()
        out = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        mark().synchronize()
        before, kernel_before = driver.path_counters(), _kernel_reads(statistics)
        _read(driver, name, out, offset)
        after, kernel_after = driver.path_counters(), _kernel_reads(statistics)
    host = out.cpu()
    found = hashlib.sha256(memory_view(host.data_ptr(), nbytes)).hexdigest()
    if found != expected:
        raise UnsupportedError(
            f"{path}: cuFile read {nbytes} bytes of a canary wrongly: SHA-256 {found[:12]}... instead of "
            f"{expected[:12]}... . Do not use GPUDirect Storage here."
        )
    told = f"a canary of {format_size(nbytes)}"
    if before is not None and after is not None:
        since = after.since(before)
        if since.through_host or not since.direct:
            raise UnsupportedError(
                f"{path}: cuFile read {told}, but through the host by its counters ({since}): compatibility mode. See "
                "cufile.log, and whether nvidia-fs serves this file system."
            )
        return f"proven by {told}, for which cuFile counted {since}"
    if kernel_before is not None and kernel_after is not None and kernel_after > kernel_before:
        return f"proven by {told}, for which reads in {statistics} rose from {kernel_before} to {kernel_after}"
    raise UnsupportedError(
        f"{path}: neither cuFile {version_of(driver.version)} nor {statistics} counts the path of {told}. "
        "Use cuFile 1.15 or newer, or set nvidia-fs's parameter rw_stats_enabled to 1."
    )


def version_of(number: int) -> str:
    """Formats cuFile's version number, 1000 * major + 10 * minor."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _read(driver: CuFile, name: str, out: torch.Tensor, offset: int) -> None:
    fd = os.open(name, os.O_RDONLY | os.O_DIRECT)
    try:
        handle = driver.register_file(fd)
        try:
            done = 0
            while done < out.nbytes:
                count = driver.move(handle, False, Span(out.data_ptr() + done, out.nbytes - done, offset + done))
                if not count:
                    raise StorageError(f"{name}: a canary of {out.nbytes} bytes ended after {done}.")
                done += count
        finally:
            driver.deregister_file(handle)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _canary(path: str) -> Iterator[tuple[str, int, int]]:
    """(file, offset, bytes)."""
    with contextlib.ExitStack() as stack:
        try:
            folder = os.path.dirname(os.path.abspath(path))
            scratch = stack.enter_context(tempfile.NamedTemporaryFile(dir=folder, prefix=".torchstorm-canary-"))
        except OSError:
            yield _own_bytes(path)
            return
        scratch.write(os.urandom(CANARY_BYTES))
        scratch.flush()
        os.fsync(scratch.fileno())
        yield scratch.name, 0, CANARY_BYTES


def _own_bytes(path: str) -> tuple[str, int, int]:
    size_bytes = os.path.getsize(path)
    with open(path, "rb") as file:
        try:
            start = round_up(os.lseek(file.fileno(), 0, os.SEEK_DATA), PAGE_BYTES)  # a hole has no bytes on disk
        except OSError:  # the file is empty or one hole
            start = size_bytes
    nbytes = min(round_down(max(size_bytes - start, 0), PAGE_BYTES), CANARY_BYTES)
    if not nbytes:
        raise StorageError(
            f"{path} is {size_bytes} bytes long, without {PAGE_BYTES} to read for a proof, and no file can be created "
            "next to it. Make its directory writable."
        )
    return path, start, nbytes


def _kernel_reads(statistics: str) -> int | None:
    """Number of reads by the nvidia-fs module; None if it does not count them."""
    try:
        text = Path(statistics).read_text()
    except OSError:
        return None
    found = re.search(r"^Reads\s*:\s*n=\d+\s+ok=(\d+)", text, re.MULTILINE)
    return int(found[1]) if found and re.search(r"^IO stats: Enabled", text, re.MULTILINE) else None
