"""The proof that cuFile moves bytes past the host: a canary is read, and counters say which way it came.

Success is no proof, since cuFile reads through the host where it must (compatibility mode) and says nothing. So:

- the canary's bytes must be those that a plain read gives, by checksum;
- of cuFile's level 3 statistics, n_nvfs_reads or n_p2p_reads must have risen and n_posix_reads must not. They count
  for the whole process;
- where a cuFile has no such statistics (before 1.15), the reads that the nvidia-fs module counts must have risen. They
  count for the whole machine.
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

PAGE_BYTES = 4096  # of what cuFile calls aligned, whatever the host's pages are
CANARY_BYTES = 2**20


class Ready(Protocol):
    """A point in the caller's stream; `transfer.engine.Engine.mark` makes one."""

    def synchronize(self) -> None:
        """Blocks the host until the stream has come to it."""


def prove_direct(path: str, driver: CuFile, *, device: torch.device, mark: Callable[[], Ready], statistics: str) -> str:
    """Reads a canary from beside a file, or from the file itself where nothing may be written there.

    Args:
        path: the file.
        driver: cuFile.
        device: the GPU that the canary is read to.
        mark: as `Engine.mark`.
        statistics: the nvidia-fs module's file of counters, asked where cuFile has none.

    Returns:
        What proved that it passed the host by.

    Raises:
        UnsupportedError: that could not be proven.
        StorageError: the canary could not be made or read.
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
            f"{path}: {nbytes} bytes of a canary came through cuFile other than they are: SHA-256 {found[:12]}... for "
            f"{expected[:12]}... . Do not use GPUDirect Storage here."
        )
    told = f"a canary of {format_size(nbytes)}"
    if before is not None and after is not None:
        since = after.since(before)
        if since.through_host or not since.direct:
            raise UnsupportedError(
                f"{path}: cuFile read {told}, but by its counters not past the host ({since}): compatibility mode. See "
                "cufile.log, and whether nvidia-fs serves this file system."
            )
        return f"proven by {told}, for which cuFile counted {since}"
    if kernel_before is not None and kernel_after is not None and kernel_after > kernel_before:
        return f"proven by {told}, for which reads in {statistics} rose from {kernel_before} to {kernel_after}"
    raise UnsupportedError(
        f"{path}: neither cuFile {version_of(driver.version)} nor {statistics} tells which way {told} came. "
        "Take cuFile 1.15 or newer, or set nvidia-fs's parameter rw_stats_enabled to 1."
    )


def version_of(number: int) -> str:
    """1000 * major + 10 * minor, as cuFile tells it, for people."""
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
            start = round_up(os.lseek(file.fileno(), 0, os.SEEK_DATA), PAGE_BYTES)  # a hole is on no disk
        except OSError:  # nothing but a hole, or nothing
            start = size_bytes
    nbytes = min(round_down(max(size_bytes - start, 0), PAGE_BYTES), CANARY_BYTES)
    if not nbytes:
        raise StorageError(
            f"{path} is {size_bytes} bytes long, without {PAGE_BYTES} to read for a proof, and nothing may be written "
            "beside it. Make its directory writable."
        )
    return path, start, nbytes


def _kernel_reads(statistics: str) -> int | None:
    """Reads that the nvidia-fs module did; None where it does not count them."""
    try:
        text = Path(statistics).read_text()
    except OSError:
        return None
    found = re.search(r"^Reads\s*:\s*n=\d+\s+ok=(\d+)", text, re.MULTILINE)
    return int(found[1]) if found and re.search(r"^IO stats: Enabled", text, re.MULTILINE) else None
