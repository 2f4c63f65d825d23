"""`NVMeDataLoader` beside torch's DataLoader over the same records of the same file.

torch's has from no worker up to one a core, which it keeps from epoch to epoch, each four batches ahead, and pins what
it brings. The fastest of them is what ours is set against.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from torchstorm.storage.aligned import aligned_empty
from torchstorm.storage.direct import DirectFile
from torchstorm.storage.layout import Kind
from torchstorm.storage.loader import NVMeDataLoader
from torchstorm.storage.volume import Volume

_RECORDS = (64 * 1024, 256 * 1024, 2**20)
_BATCH_BYTES = 8 * 2**20
_DEPTH = 8
_PREFETCH = 4  # batches of each worker
_NUMBERS = 8  # bytes at the start of a record, which say which one it is
_TURNS = 5


class _Records(Dataset[torch.Tensor]):
    """The records of a file, each read when it is asked for: what is mapped would stay in the page cache."""

    def __init__(self, path: str, offset: int, num_records: int, record_bytes: int) -> None:
        self._path, self._offset = path, offset
        self._num_records, self._record_bytes = num_records, record_bytes
        self._descriptor: int | None = None  # each worker opens the file for itself

    def __len__(self) -> int:
        return self._num_records

    def __getitem__(self, number: int) -> torch.Tensor:
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_RDONLY)
        row = torch.empty(self._record_bytes, dtype=torch.uint8)
        os.preadv(self._descriptor, [row.numpy().data], self._offset + number * self._record_bytes)
        return row

    def __del__(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)


def worker_counts() -> list[int]:
    """How many workers torch's DataLoader is tried with: none, and powers of two up to the cores."""
    cores = len(os.sched_getaffinity(0))
    return [0, *(2**power for power in range(cores.bit_length()))]


def bench_loading(path: Path, device: torch.device, *, size_bytes: int) -> Iterator[dict[str, Any]]:
    """Times whole shuffled epochs, ways in turn, the page cache emptied before each.

    Args:
        path: of the volume, which is made and removed again.
        device: where batches are wanted.
        size_bytes: of all records.

    Yields:
        The fields of a `StorageRow`: for each way the median of five epochs. On a GPU also "disk", the same records
        read in random order into host memory and no further, and "loader-training", which is set against that.
    """
    for record_bytes in _RECORDS:
        with _make(path, size_bytes // record_bytes, record_bytes) as volume:
            yield from _bench_records(volume, path, device, size_bytes // record_bytes, record_bytes)
        path.unlink()


def _bench_records(
    volume: Volume, path: Path, device: torch.device, num_records: int, record_bytes: int
) -> Iterator[dict[str, Any]]:
    batch = max(1, _BATCH_BYTES // record_bytes)
    start = volume["data"].kind.start_bytes
    assert start is not None
    ways: dict[str, Callable[[], Iterable[Any]]] = {}
    for workers in worker_counts():
        loader = DataLoader(
            _Records(volume.path, start, num_records, record_bytes),
            batch,
            shuffle=True,
            num_workers=workers,
            pin_memory=device.type == "cuda",
            persistent_workers=workers > 0,
            prefetch_factor=_PREFETCH if workers else None,
        )
        next(iter(loader))  # starts its workers
        ways[f"torch-{workers}"] = partial(_itself, loader)
    for way, verify in (("loader", True), ("loader-unchecked", False)):
        ways[way] = partial(
            NVMeDataLoader, volume, batch, shuffle=True, prefetch_depth=_DEPTH, device=device, verify=verify
        )
    rows = list(_rows(ways, path, device, num_records, record_bytes))
    yield from rows
    if device.type == "cuda":  # pragma: gpu
        alone = next(row["bytes_per_s"] for row in rows if row["way"] == "loader")
        yield from _beside_training(ways["loader"], path, device, start, num_records, record_bytes, alone)


def _itself(loader: DataLoader[torch.Tensor]) -> DataLoader[torch.Tensor]:
    return loader


def _rows(
    ways: dict[str, Callable[[], Iterable[Any]]],
    path: Path,
    device: torch.device,
    num_records: int,
    record_bytes: int,
) -> Iterator[dict[str, Any]]:
    times: dict[str, list[float]] = {way: [] for way in ways}
    wrong: set[str] = set()
    for _ in range(_TURNS):
        for way, make in ways.items():
            seconds, is_right = _epoch(make, path, device, num_records)
            times[way].append(seconds)
            if not is_right:
                wrong.add(way)
    rate = {way: num_records / statistics.median(seconds) for way, seconds in times.items()}
    best = max((way for way in ways if way.startswith("torch")), key=rate.__getitem__)
    for way, taken in times.items():
        is_torch = way.startswith("torch")
        yield {
            "pattern": "load",
            "block_bytes": record_bytes,
            "depth": 0 if is_torch else _DEPTH,
            "way": way,
            **({"bytes_per_s": None} if way in wrong else _rates(taken, num_records * record_bytes)),
            "over": None if way in wrong else rate[way] / rate[best],
            "checked": way not in wrong,
            "note": f"{rate[way]:.0f} samples/s" + f"; over {best}" * (not is_torch),
        }


def _rates(seconds: list[float], nbytes: int) -> dict[str, float]:
    """The median rate of epochs and the range, by the names of a row's fields."""
    return {
        "bytes_per_s": nbytes / statistics.median(seconds),
        "slowest_bytes_per_s": nbytes / max(seconds),
        "fastest_bytes_per_s": nbytes / min(seconds),
    }


def _beside_training(  # pragma: gpu
    make: Callable[[], Iterable[Any]],
    path: Path,
    device: torch.device,
    start_bytes: int,
    num_records: int,
    record_bytes: int,
    alone_bytes_per_s: float,
) -> Iterator[dict[str, Any]]:
    """The disk alone, and the loader while a network trains on what it brings for nine tenths of the time; in turns."""
    weight = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16).requires_grad_()

    def step(rows: torch.Tensor) -> None:
        x = rows.view(-1)[: _BATCH_BYTES // 4].view(-1, 8192)
        x = x.to(torch.bfloat16).expand(8, *x.shape).reshape(-1, 8192)
        (x @ weight).square().mean().backward()
        weight.grad = None

    example = torch.zeros(_BATCH_BYTES, dtype=torch.uint8, device=device)
    for _ in range(3):
        step(example)
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(10):
        step(example)
    torch.cuda.synchronize(device)
    step_s = (time.perf_counter() - start) / 10
    steps = max(1, round(0.9 * _BATCH_BYTES / alone_bytes_per_s / step_s))

    def train(rows: torch.Tensor) -> None:
        for _ in range(steps if rows.nbytes == _BATCH_BYTES else 0):
            step(rows)

    disk_s, training_s, is_right = list[float](), list[float](), True
    for _ in range(_TURNS):
        disk_s.append(read_rows(path, start_bytes, num_records, record_bytes))
        seconds, came = _epoch(make, path, device, num_records, train)
        training_s.append(seconds)
        is_right &= came
    fields = {"pattern": "load", "block_bytes": record_bytes}
    disk, training = (_rates(each, num_records * record_bytes) for each in (disk_s, training_s))
    yield fields | disk | {"depth": 0, "way": "disk", "checked": True}
    busy = num_records * record_bytes // _BATCH_BYTES * steps * step_s / statistics.median(training_s)
    yield (
        fields
        | (training if is_right else {"bytes_per_s": None})
        | {
            "depth": _DEPTH,
            "way": "loader-training",
            "over": training["bytes_per_s"] / disk["bytes_per_s"] if is_right else None,
            "checked": is_right,
            "note": f"the GPU trains for {busy:.0%} of the time",
        }
    )


def read_rows(path: Path, start_bytes: int, num_records: int, record_bytes: int) -> float:
    """Seconds of reading all records in random order into host memory, past the page cache, and doing nothing else.

    Raises:
        RuntimeError: what came last is not what the file has.
    """
    offsets = (start_bytes + np.random.default_rng(0).permutation(num_records) * record_bytes).tolist()
    at_once = max(1, 8 * _BATCH_BYTES // record_bytes)
    rows = aligned_empty(min(at_once, num_records) * record_bytes).view(-1, record_bytes)
    drop_cache(path)
    file = DirectFile(path, threads=16, read_only=True)
    try:
        start = time.perf_counter()
        for first in range(0, num_records, at_once):
            some = offsets[first : first + at_once]
            file.read_rows_async(rows[: len(some)], some).wait()
        seconds = time.perf_counter() - start
    finally:
        file.close()
    with open(path, "rb") as plain:
        plain.seek(some[-1])
        if plain.read(record_bytes) != rows[len(some) - 1].numpy().tobytes():
            raise RuntimeError(f"{path} at {some[-1]} has other bytes than those read there.")
    return seconds


def _nothing(rows: torch.Tensor) -> None:
    """Does nothing with a batch."""


def _epoch(
    make: Callable[[], Iterable[Any]],
    path: Path,
    device: torch.device,
    num_records: int,
    use: Callable[[torch.Tensor], None] = _nothing,
) -> tuple[float, bool]:
    """Seconds of an epoch, and whether every record came once."""
    batches = make()
    drop_cache(path)
    numbers = []
    start = time.perf_counter()
    for rows in batches:
        moved = rows.to(device, non_blocking=True)
        numbers.append(moved[:, :_NUMBERS].clone())
        use(moved)
    if device.type == "cuda":  # pragma: gpu
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    found = torch.cat(numbers).cpu().contiguous().view(torch.int64).flatten()
    return seconds, bool(torch.equal(found.sort().values, torch.arange(num_records)))


def drop_cache(path: Path) -> None:
    """Makes the file's pages leave the page cache, so that what reads it next must ask the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _make(path: Path, num_records: int, record_bytes: int) -> Volume:
    volume = Volume.create(path, {"data": Kind(dtype=torch.uint8, shape=(record_bytes,), length=num_records)})
    at_once = max(1, _BATCH_BYTES // record_bytes)
    rows = aligned_empty(at_once * record_bytes).view(at_once, record_bytes)
    rows.random_(generator=torch.Generator().manual_seed(0))
    for first in range(0, num_records, at_once):
        count = min(at_once, num_records - first)
        rows[:count, :_NUMBERS] = torch.arange(first, first + count).view(-1, 1).view(torch.uint8)
        volume["data"].write(first, rows[:count])
    volume.flush()
    return volume
