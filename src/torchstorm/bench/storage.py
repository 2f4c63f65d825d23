"""Files and the loader beside their strongest peers: `fio` on the same file, torch's DataLoader on the same records.

A rate is shown only where what was read, or written, is what it must be.
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from torchstorm.bench.cases import bench_device, pick
from torchstorm.bench.loading import bench_loading, drop_cache
from torchstorm.bench.record import Record, RecordRow
from torchstorm.errors import ConfigError, StorageError
from torchstorm.paths import user_path
from torchstorm.sizes import format_size
from torchstorm.storage.aligned import aligned_empty
from torchstorm.storage.backend import Backend
from torchstorm.storage.choice import open_file
from torchstorm.storage.direct import DirectFile

MIB = 2**20
_PATTERNS = {"read": "read", "write": "write", "randread": "random read", "randwrite": "random write"}
_LOAD = "load"
_SIZES = (4096, 64 * 1024, MIB, 4 * MIB)
_DEPTHS = (1, 8)
_BATCH_BYTES = 64 * MIB
_TURNS = 5
_MOST_REQUESTS = 512  # of a batch


@dataclass(frozen=True, kw_only=True)
class StorageRow(RecordRow):
    """One way's result.

    Attributes:
        pattern: "read", "write", "randread", "randwrite", or "load" for a loader.
        block_bytes: of one request; of one record for a loader.
        depth: requests under way at once; batches for a loader; 0 for its peers.
        way: "fio", "direct", "buffered", "staged", "loader", "torch-0" (workers), ...
        bytes_per_s: moved, the median of five turns; None where that was not what it must be.
        slowest_bytes_per_s, fastest_bytes_per_s: of the same turns.
        cpu_s_per_gb: seconds of all cores of this process (for fio: of fio) per 1e9 bytes; None where others work too.
        over: rate by that of the peer: fio's of the same row, the fastest of torch's DataLoaders, or, for
            "loader-training", the disk's own ("disk").
        file_bytes: of the file, or of all records; 0 in a record of before.
        checked: whether the bytes are what they must be.
        note: what else is to be said.
    """

    pattern: str
    block_bytes: int
    depth: int
    way: str
    bytes_per_s: float | None = None
    slowest_bytes_per_s: float | None = None
    fastest_bytes_per_s: float | None = None
    cpu_s_per_gb: float | None = None
    over: float | None = None
    file_bytes: int = 0
    checked: bool = False
    note: str = ""

    @property
    def key(self) -> tuple[str, int, int, str]:
        """What there is one row for in a file."""
        return (self.pattern, self.block_bytes, self.depth, self.way)


def bench_storage(
    directory: str | None,
    device: str | None,
    *,
    patterns: str | None = None,
    size_bytes: int,
    seconds: float,
    json_path: Path | None,
    console: Console,
) -> list[StorageRow]:
    """Times paths and the loader, prints a table, and with `json_path` writes it.

    Args:
        directory: where the file of `size_bytes` is made, and removed again; None for the temporary directory.
        device: "cpu", "cuda" or "cuda:N"; None for CUDA where there is one.
        patterns: some of "read", "write", "randread", "randwrite" and "load" (the loader), with commas between; None
            for all.
        size_bytes: of the file, at least 64 MiB. It should be larger than the disk's own cache.
        seconds: a row takes five times as long, in turns with the other ways.
        json_path: where the rows go.
        console: where they are printed.

    Raises:
        TorchstormError: the device or the directory is not there, or there is no room.
    """
    if size_bytes < _BATCH_BYTES:
        raise ConfigError(f"size={format_size(size_bytes)}, but at least {format_size(_BATCH_BYTES)} are needed.")
    target = bench_device(device)
    say = partial(console.print, highlight=False, soft_wrap=True, markup=False)
    known = (*_PATTERNS, _LOAD)
    chosen = known if patterns is None else pick(patterns, known, option="--pattern")
    record = Record("storage", target, StorageRow, format_row, path=json_path, say=say)
    with _room(directory, size_bytes) as path:
        say(f"{path.parent}: {format_size(size_bytes)}, {_TURNS} x {seconds:g} s a row, in turns")
        say(HEADER)
        of_files = [pattern for pattern in _PATTERNS if pattern in chosen]
        if of_files:
            fio = _Fio(path, seconds, size_bytes)
            if fio.why_not:
                say(f"fio: {fio.why_not}")
            _fill(path, size_bytes)
            for case in itertools.product(of_files, _SIZES, _DEPTHS):
                peer: StorageRow | None = None
                for row in _in_turns(fio, path, target, case, seconds, size_bytes):
                    if row.way == "fio":
                        peer = row
                    elif row.bytes_per_s and peer is not None and peer.bytes_per_s:
                        row = replace(row, over=row.bytes_per_s / peer.bytes_per_s)
                    record.add(replace(row, file_bytes=size_bytes))
            path.unlink()
        if _LOAD in chosen:
            for fields in bench_loading(path, target, size_bytes=size_bytes):
                record.add(StorageRow(**fields, file_bytes=size_bytes))
    record.write()
    return record.rows


HEADER = f"{'pattern':<10}{'block':>11}{'depth':>6}  {'way':<18}{'rate':>14}{'over peer':>10}{'CPU s/GB':>10}  bytes"


def format_row(row: StorageRow) -> str:
    """One line of the table under `HEADER`."""
    rate = "-" if row.bytes_per_s is None else f"{row.bytes_per_s / 1e9:.3f} GB/s"
    over = "-" if row.over is None else f"{row.over:.2f}"
    cpu = "-" if row.cpu_s_per_gb is None else f"{row.cpu_s_per_gb:.2f}"
    checked = "checked" if row.checked else "NOT CHECKED"
    return (
        f"{row.pattern:<10}{format_size(row.block_bytes):>11}{row.depth:>6}  {row.way:<18}{rate:>14}{over:>10}{cpu:>10}"
        f"  {checked}{'; ' if row.note else ''}{row.note}"
    )


@contextmanager
def _room(directory: str | None, size_bytes: int) -> Iterator[Path]:
    within = None if directory is None else user_path(directory, name="--directory")
    try:
        folder = Path(tempfile.mkdtemp(prefix="torchstorm-bench-", dir=within))
    except OSError as error:
        raise StorageError(f"{directory} cannot be used: {error.strerror}. Name one that is writable.") from error
    try:
        free = shutil.disk_usage(folder).free
        if free < size_bytes * 1.05:
            raise StorageError(
                f"{folder.parent} has {format_size(free)} free, but the bench's file takes {format_size(size_bytes)}: "
                "name another directory, or a smaller size."
            )
        yield folder / "file"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _fill(path: Path, size_bytes: int) -> None:
    """Random bytes, which no disk compresses; and no holes, which no disk reads."""
    generator = torch.Generator().manual_seed(0)
    piece = aligned_empty(_BATCH_BYTES)
    file = DirectFile(path, create=True, size_bytes=size_bytes)
    try:
        for offset in range(0, size_bytes, _BATCH_BYTES):
            piece.random_(generator=generator)
            file.write_from(piece[: min(_BATCH_BYTES, size_bytes - offset)], offset)
        file.sync()
    finally:
        file.close()


def _open(path: Path, device: torch.device, way: str, block_bytes: int, depth: int) -> Backend:
    if way == "staged":  # pragma: gpu
        return open_file(path, device=device, require="staged")
    return DirectFile(path, threads=depth, block_bytes=block_bytes, direct=way == "direct")


def _in_turns(
    fio: _Fio, path: Path, device: torch.device, case: tuple[str, int, int], seconds: float, size: int
) -> list[StorageRow]:
    """The median of each way, all in turns: what else a disk does changes its rate from second to second."""
    ways = ["direct", "buffered", *(["staged"] if device.type == "cuda" else [])]
    turns: dict[str, list[StorageRow]] = {}
    for _ in range(_TURNS):
        found = [fio.run(*case), *(_time(path, device, *case, way, seconds, size) for way in ways)]
        for row in found:
            if row is not None:
                turns.setdefault(row.way, []).append(row)
    medians = []
    for rows in turns.values():
        # One that failed, or was wrong, is what is to be seen.
        wrong = [row for row in rows if row.bytes_per_s is None]
        medians.append(wrong[0] if wrong else _median(rows))
    return medians


def _median(rows: list[StorageRow]) -> StorageRow:
    """The one of median rate, with the slowest and the fastest rate beside."""
    inorder = sorted(rows, key=lambda row: row.bytes_per_s or 0)
    slowest, fastest = inorder[0].bytes_per_s, inorder[-1].bytes_per_s
    return replace(inorder[len(rows) // 2], slowest_bytes_per_s=slowest, fastest_bytes_per_s=fastest)


def _time(
    path: Path, device: torch.device, pattern: str, block_bytes: int, depth: int, way: str, seconds: float, size: int
) -> StorageRow:
    where = device if way == "staged" else torch.device("cpu")
    count = min(_BATCH_BYTES // block_bytes, _MOST_REQUESTS)
    buffers = list(_noise(count * block_bytes).to(where).split(block_bytes))
    drop_cache(path)
    file = _open(path, device, way, block_bytes, depth)
    try:
        writes = pattern.endswith("write")
        begin = file.write_batch_async if writes else file.read_batch_async
        offsets = _offsets(pattern.startswith("rand"), block_bytes, size)
        moved, start, cpu = 0, time.perf_counter(), time.process_time()
        while (took := time.perf_counter() - start) < seconds or not moved:
            last = [(buffer, next(offsets)) for buffer in buffers]
            begin(last).synchronize()
            moved += count * block_bytes
        cpu = time.process_time() - cpu
        info = file.info()
    finally:
        file.close()
    checked = _is_right(path, last)
    wanted = "direct" if way == "staged" else way
    return StorageRow(
        pattern=pattern,
        block_bytes=block_bytes,
        depth=depth,
        way=way,
        bytes_per_s=moved / took if checked else None,
        cpu_s_per_gb=cpu / (moved / 1e9),
        checked=checked,
        note="" if wanted in info.reason or info.path == wanted else info.reason,
    )


@cache
def _noise(nbytes: int) -> torch.Tensor:
    memory = aligned_empty(nbytes)
    return memory.random_(generator=torch.Generator().manual_seed(1))


def _offsets(is_random: bool, block_bytes: int, size_bytes: int) -> Iterator[int]:
    """Without end; none twice before all have come."""
    count = size_bytes // block_bytes
    order = np.random.default_rng(0).permutation(count) if is_random else np.arange(count)
    return itertools.cycle((order * block_bytes).tolist())


def _is_right(path: Path, requests: list[tuple[torch.Tensor, int]]) -> bool:
    """Whether the file has at every offset what the tensor has, as a plain read says."""
    # A later request of a batch may have been for the same place, where the file has fewer blocks than a batch.
    newest = {offset: tensor for tensor, offset in requests}
    drop_cache(path)
    with open(path, "rb") as file:
        for offset, tensor in newest.items():
            file.seek(offset)
            if file.read(tensor.nbytes) != tensor.cpu().numpy().tobytes():
                return False
    return True


class _Fio:
    """The `fio` command, with io_uring, past the page cache.

    Attributes:
        why_not: why there are no rows of it, "" where there are.
    """

    def __init__(self, path: Path, seconds: float, size_bytes: int) -> None:
        self._path, self._seconds, self._size_bytes = path, seconds, size_bytes
        self._call: Callable[..., subprocess.CompletedProcess[str]] = partial(
            subprocess.run, capture_output=True, text=True, check=False
        )
        self.why_not = "" if shutil.which("fio") else "not installed, so nothing is compared with it"

    def run(self, pattern: str, block_bytes: int, depth: int) -> StorageRow | None:
        """One row; None where fio cannot run."""
        if self.why_not:
            return None
        found = self._call(
            [
                *("fio", "--name=bench", f"--filename={self._path}", "--ioengine=io_uring", "--direct=1"),
                *(f"--rw={pattern}", f"--bs={block_bytes}", f"--iodepth={depth}", f"--size={self._size_bytes}"),
                *(f"--runtime={self._seconds:g}", "--time_based", "--output-format=json"),
            ]
        )
        row = StorageRow(pattern=pattern, block_bytes=block_bytes, depth=depth, way="fio")
        try:
            told = json.loads(found.stdout[found.stdout.index("{") :])
            job = told["jobs"][0]
            side = job["write" if pattern.endswith("write") else "read"]
            busy_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
            rate, moved = float(side["bw_bytes"]), float(side["io_bytes"])
        except (ValueError, KeyError, IndexError):
            return replace(row, note=f"fio failed: {(found.stderr or found.stdout).strip()[-200:]}")
        if found.returncode or not moved:
            return replace(row, note=f"fio failed: {found.stderr.strip()[-200:]}")
        return replace(
            row, bytes_per_s=rate, cpu_s_per_gb=busy_s / (moved / 1e9), checked=True, note=told.get("fio version", "")
        )
