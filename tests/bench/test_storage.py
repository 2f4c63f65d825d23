"""The storage bench shows a rate only where the bytes are right, beside fio where that is there."""

from __future__ import annotations

import ctypes
import io
import json
import mmap
import multiprocessing
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.utils.data import DataLoader

from torchstorm.bench import loading, storage
from torchstorm.bench.loading import bench_loading
from torchstorm.bench.storage import bench_storage
from torchstorm.errors import ConfigError, StorageError
from torchstorm.storage.direct import DirectFile

MIB = 2**20
FIO = """#!/bin/sh
echo 'fio: a word before the figures'
case "$*" in
*--bs=65536*) echo 'no io_uring here' >&2; exit 1;;
*) echo '{"jobs": [{"usr_cpu": 10, "sys_cpu": 40, "job_runtime": 1000,
  "read": {"bw_bytes": 1000000, "io_bytes": 500000000}, "write": {"bw_bytes": 2000000, "io_bytes": 500000000}}]}';;
esac
"""


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_SIZES", (64 * 1024, MIB))
    monkeypatch.setattr(storage, "_DEPTHS", (2,))


def bench(tmp_path: Path, **options: Any) -> tuple[list[storage.StorageRow], str]:
    text = io.StringIO()
    arguments: dict[str, Any] = {"size_bytes": 64 * MIB, "seconds": 0.01, "json_path": None, **options}
    rows = bench_storage(str(tmp_path), "cpu", console=Console(file=text, width=300), **arguments)
    return rows, text.getvalue()


@pytest.mark.usefixtures("few")
def test_rows_are_checked_set_against_fio_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "fio").write_text(FIO)
    (tools / "fio").chmod(stat.S_IRWXU)
    monkeypatch.setattr(loading, "_RECORDS", (MIB,))
    monkeypatch.setattr(loading, "_TURNS", 1)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    room = tmp_path / "room"
    room.mkdir()
    rows, text = bench(room, json_path=tmp_path / "storage.json")
    assert os.listdir(room) == []
    written = json.loads((tmp_path / "storage.json").read_text())["rows"]
    assert [row["way"] for row in written] == [row.way for row in rows]
    files = [row for row in rows if row.pattern != "load"]
    assert {row.pattern for row in files} == {"read", "write", "randread", "randwrite"}
    for row in files:
        if row.way == "fio" and row.block_bytes == MIB:
            assert row.bytes_per_s == (2e6 if row.pattern.endswith("write") else 1e6)
            assert row.cpu_s_per_gb == 1.0
        elif row.way == "fio":
            assert "no io_uring here" in row.note
            assert not row.checked
        else:
            assert row.checked
            assert row.bytes_per_s
            assert row.slowest_bytes_per_s <= row.bytes_per_s <= row.fastest_bytes_per_s
            assert row.file_bytes == 64 * MIB
            assert (row.over is None) == (row.block_bytes != MIB)
    assert "checked" in text


def test_bytes_that_are_wrong_show_no_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = DirectFile.read_batch_async

    def spoiled(self: DirectFile, requests: Sequence[tuple[torch.Tensor, int]], **options: Any) -> Any:
        copy = real(self, requests, **options)
        copy.wait()
        requests[0][0][0] ^= 1
        return copy

    monkeypatch.setattr(DirectFile, "read_batch_async", spoiled)
    monkeypatch.setattr(storage, "_SIZES", (MIB,))
    monkeypatch.setattr(storage, "_DEPTHS", (1,))
    monkeypatch.setenv("PATH", "")
    rows, text = bench(tmp_path, patterns="read")
    assert "fio: not installed" in text
    assert [(row.way, row.checked, row.bytes_per_s) for row in rows] == [
        ("direct", False, None),
        ("buffered", False, None),
    ]


def test_the_disk_alone_is_checked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows"
    path.write_bytes(os.urandom(4096 + 96 * MIB))
    assert loading.read_rows(path, 4096, 96, MIB) > 0
    monkeypatch.setattr(DirectFile, "read_rows_async", lambda self, out, offsets: self.read_batch_async([]))
    with pytest.raises(RuntimeError, match="other bytes"):
        loading.read_rows(path, 4096, 96, MIB)


@pytest.mark.no_cover
def test_a_bench_made_in_parts_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_SIZES", (MIB,))
    monkeypatch.setattr(storage, "_DEPTHS", (1,))
    monkeypatch.setattr(loading, "_RECORDS", (MIB,))
    monkeypatch.setattr(loading, "_TURNS", 1)
    monkeypatch.setenv("PATH", "")
    file = tmp_path / "storage.json"
    first, _ = bench(tmp_path, patterns="read", json_path=file)
    second, _ = bench(tmp_path, patterns="load", json_path=file)
    assert {row.pattern for row in first} == {"read"}
    assert {row.pattern for row in second} == {"load"}
    assert [storage.StorageRow(**row) for row in json.loads(file.read_text())["rows"]] == first + second


def test_every_loader_gives_every_record_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_RECORDS", (64 * 1024,))
    monkeypatch.setattr(loading, "_TURNS", 1)
    rows = list(bench_loading(tmp_path / "x", torch.device("cpu"), size_bytes=8 * MIB))
    assert all(row["checked"] for row in rows)
    counts = loading.worker_counts()
    assert {row["way"] for row in rows} == {*(f"torch-{count}" for count in counts), "loader", "loader-unchecked"}
    (best,) = (row["way"] for row in rows if row["way"].startswith("torch") and row["over"] == 1.0)
    assert all(row["note"].endswith(f"over {best}") for row in rows if row["way"].startswith("loader"))
    assert multiprocessing.active_children() == [], "workers end with their bench"


@pytest.mark.parametrize(
    ("cores", "counts"), [(1, [0, 1]), (2, [0, 1, 2]), (6, [0, 1, 2, 4]), (16, [0, 1, 2, 4, 8, 16])]
)
def test_torch_has_up_to_one_worker_a_core(cores: int, counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert loading.worker_counts() == counts


def test_what_cannot_be_benched_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 64"):
        bench(tmp_path, size_bytes=MIB)
    with pytest.raises(ConfigError, match="--pattern 'erase'"):
        bench(tmp_path, patterns="erase")
    with pytest.raises(StorageError, match="name another directory, or a smaller size"):
        bench(tmp_path, size_bytes=2**60)
    with pytest.raises(StorageError, match="cannot be used"):
        bench(tmp_path / "nowhere")


@pytest.mark.parametrize("workers", [0, 1])
def test_torchs_epoch_leaves_nothing_in_the_page_cache_for_the_next_way(workers: int, tmp_path: Path) -> None:
    """Pages that a process has mapped would stay, whatever it is told; and the next way would read them from memory."""
    path = tmp_path / "rows"
    path.write_bytes(os.urandom(16 * MIB))
    dataset = loading._Records(str(path), 0, 16, MIB)
    numbers = torch.arange(16)
    with open(path, "r+b") as file:
        for number in range(16):
            file.seek(number * MIB)
            file.write(numbers[number].numpy().tobytes())

    loader = DataLoader(dataset, 4, num_workers=workers, persistent_workers=workers > 0)
    next(iter(loader))
    for _ in range(2):
        _, is_right = loading._epoch(lambda: loader, path, torch.device("cpu"), 16)
        assert is_right
        loading.drop_cache(path)
        assert resident_bytes(path) < MIB


def resident_bytes(path: Path) -> int:
    """Of a file, in the page cache."""
    private = {"prot": mmap.PROT_READ | mmap.PROT_WRITE, "flags": mmap.MAP_PRIVATE}
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, **private) as pages:
        first = ctypes.c_char.from_buffer(pages)
        found = (ctypes.c_ubyte * (len(pages) // mmap.PAGESIZE))()
        assert ctypes.CDLL(None).mincore(ctypes.byref(first), ctypes.c_size_t(len(pages)), found) == 0
        del first
        return sum(page & 1 for page in found) * mmap.PAGESIZE
