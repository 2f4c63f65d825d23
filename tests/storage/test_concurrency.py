"""Many threads and many processes on one file: nobody's bytes are lost, nobody hangs, nothing wrong is handed out."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from storage.faulty_disk import READS, WRITES, Disk, on_a_faulty_disk
from torchstorm.errors import CorruptionError, StorageError
from torchstorm.storage.direct import DirectFile
from torchstorm.storage.layout import Kind
from torchstorm.storage.nvme import NVMe
from torchstorm.storage.volume import Volume

KIND = Kind(dtype=torch.int32, shape=(701,), length=64)


def record(index: int, turn: int = 0) -> torch.Tensor:
    return torch.arange(701, dtype=torch.int32) + 1000 * (64 * turn + index)


def turn_of(index: int, found: torch.Tensor) -> int:
    """Which turn's record this is; it fails where it is that of none."""
    turn, rest = divmod(int(found[0]) // 1000 - index, 64)
    assert rest == 0
    assert torch.equal(found, record(index, turn)), index
    return turn


def child(work: Callable[[], None]) -> int:
    """Forks a process that does some work and then ends as processes do; its number."""
    number = os.fork()
    if number:
        return number
    try:
        work()
        sys.stdout.flush()
        os._exit(0)
    finally:
        os._exit(1)


def ended(number: int, *, seconds: float = 20) -> int:
    """How a child ended; it is killed where it hangs."""
    stop = time.monotonic() + seconds
    while time.monotonic() < stop:
        found, status = os.waitpid(number, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(number, signal.SIGKILL)
    os.waitpid(number, 0)
    raise AssertionError(f"the child hangs after {seconds} s")


# ---------------------------------------------------------------------- threads


def test_sixty_four_threads_on_odd_ranges_of_one_file(place: Path) -> None:
    """Half of them write ranges of their own, side by side within pages, while the others read what stays."""
    sizes = [random.Random(1).choice([1, 511, 777, 4096, 5003, 20_001]) for _ in range(64)]
    starts = [sum(sizes[:index]) for index in range(64)]
    before = os.urandom(sum(sizes))
    path = place / "threads"
    path.write_bytes(before)
    file = DirectFile(path, block_bytes=8192)
    start_together = threading.Barrier(64)

    def work(index: int) -> bytes:
        start_together.wait()
        start, size = starts[index], sizes[index]
        mine = before[start : start + size]
        for turn in range(6):
            out = torch.empty(size, dtype=torch.uint8)
            if index % 2:
                mine = random.Random(64 * turn + index).randbytes(size)
                file.write_from(torch.frombuffer(bytearray(mine), dtype=torch.uint8), start)
            file.read_into(out, start)
            assert out.numpy().tobytes() == mine, (index, turn)
        return mine

    with ThreadPoolExecutor(64) as threads:
        expected = b"".join(threads.map(work, range(64)))
    file.close()
    assert path.read_bytes() == expected


@on_a_faulty_disk
def test_a_request_that_nobody_keeps_ends_by_itself_and_gives_its_memory_back(disk: Disk, path: Path) -> None:
    with Volume.create(path, kinds={"x": KIND}) as volume:
        volume["x"].write(0, torch.stack([record(index) for index in range(64)]))
        gc.collect()
        gc.freeze()  # so that the next collection takes less time than the disk
        with disk.failing(path, READS + WRITES, delay_ms=300):
            out, source = torch.zeros(1, 701, dtype=torch.int32), record(5, 1)
            alive = [weakref.ref(out), weakref.ref(source)]
            for request in (volume["x"].read_async(4, 1, out), volume["x"].write_async(5, source)):
                assert not request.done()
            del request, out, source
            gc.collect()
            assert all(each() is not None for each in alive)  # the disk is not done with them
            volume.flush()
            volume["x"].read_async(6, 1)  # never seen by anybody
        stop = time.monotonic() + 5
        while any(each() is not None for each in alive) and time.monotonic() < stop:
            time.sleep(0.005)
        assert [each() for each in alive] == [None, None]
        assert turn_of(5, volume["x"][5]) == 1
    descriptors = len(os.listdir("/proc/self/fd"))
    with disk.failing(path, WRITES, delay_ms=50):
        volume = Volume.open(path)
        volume["x"].write_async(6, record(6, 1))
        del volume  # while it writes; nobody closes it
        gc.collect()
        stop = time.monotonic() + 5
        while len(os.listdir("/proc/self/fd")) > descriptors and time.monotonic() < stop:
            gc.collect()
            time.sleep(0.005)
        assert len(os.listdir("/proc/self/fd")) == descriptors
    with Volume.open(path) as volume:
        assert turn_of(6, volume["x"][6]) == 1


# ---------------------------------------------------------------------- processes


@on_a_faulty_disk
def test_two_processes_write_a_volume_while_others_open_and_read_it(disk: Disk, path: Path) -> None:
    """Records of 2804 bytes: neighbours share pages, and so do their checks."""
    Volume.create(path, kinds={"x": KIND}).close()

    def write(first: int) -> Callable[[], None]:
        def work() -> None:
            with Volume.open(path) as volume:
                for turn in range(8):
                    for index in range(first, 64, 2):
                        volume["x"].write_async(index, record(index, turn))
                    volume.flush()

        return work

    writers = [child(write(0)), child(write(1))]
    seen = [-1] * 64
    num_read = num_told = 0
    while os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None or num_read + num_told < 64:
        with Volume.open(path, read_only=True) as reader:
            for index in random.sample(range(64), 16):
                try:
                    turn = turn_of(index, reader["x"][index])
                except CorruptionError:  # never written yet, or just being written over
                    num_told += 1
                else:
                    num_read += 1
                    assert turn >= seen[index], "an old record came back"
                    seen[index] = turn
    assert [ended(writer) for writer in writers] == [0, 0]
    with Volume.open(path, read_only=True) as reader:
        assert [turn_of(index, reader["x"][index]) for index in range(64)] == [7] * 64


@on_a_faulty_disk
def test_a_writer_killed_while_it_writes_over_records_leaves_old_ones_new_ones_or_tells(disk: Disk, path: Path) -> None:
    random.seed(0)
    with Volume.create(path, kinds={"x": KIND}) as volume:
        for index in range(64):
            volume["x"].write(index, record(index))
        volume.flush()
    num_told = num_cut = 0
    for turn in range(1, 31):
        reading, writing = os.pipe()

        def work(turn: int = turn, writing: int = writing) -> None:
            with Volume.open(path) as volume:
                for index in range(64):
                    volume["x"].write_async(index, record(index, turn))
                    if index % 8 == 7:
                        volume.flush()
                        os.write(writing, bytes([index + 1]))

        writer = child(work)
        os.close(writing)
        time.sleep(random.random() * 0.02)
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        with open(reading, "rb") as reports:
            flushed = max(reports.read(), default=0)
        num_cut += flushed < 64
        with Volume.open(path) as volume:
            damaged = volume["x"].check().damaged
            assert not volume["x"].check().unwritten
            assert min(damaged, default=64) >= flushed, (turn, flushed, damaged)
            for index in range(64):
                if index in damaged:
                    with pytest.raises(CorruptionError, match=f"record {index} is not what was written"):
                        volume["x"].read(index)
                    volume["x"].write(index, record(index, turn))
                    num_told += 1
                else:
                    found = turn_of(index, volume["x"][index])
                    assert found == turn if index < flushed else found <= turn
            volume.flush()
    assert num_cut > 5, "hardly any was killed before it was done"


# ---------------------------------------------------------------------- fork and spawn


@on_a_faulty_disk
def test_what_a_forked_process_inherits_says_so_and_never_hangs(disk: Disk, path: Path) -> None:
    with Volume.create(path, kinds={"x": KIND}) as volume, NVMe(path, read_only=False) as device:
        volume["x"].write(0, record(0))
        done = volume["x"].read_async(0)
        done.wait()
        with disk.failing(path, READS + WRITES, delay_ms=400):
            reading, writing = volume["x"].read_async(0), volume["x"].write_async(1, record(1))
            sectors = device.read_async(0, 1)

            def use() -> None:
                for each in (
                    reading.wait,
                    reading.result,
                    writing.wait,
                    sectors.wait,
                    lambda: volume["x"].read(0),
                    lambda: volume["x"].write(1, record(1)),
                    volume.flush,
                    volume["x"].check,
                    lambda: device.read(0, 1),
                    lambda: device.write(0, 1, torch.zeros(128)),
                    device.flush,
                ):
                    with pytest.raises(StorageError, match=r"forked process .* Open it again in this process"):
                        each()
                assert done.done()
                assert turn_of(0, done.result()[0]) == 0  # that had ended before
                volume.info(), device.info(), repr(volume), repr(device), reading.done()
                volume.close()
                device.close()
                with Volume.open(path) as again:
                    assert turn_of(0, again["x"][0]) == 0

            assert ended(child(use)) == 0
            assert turn_of(0, reading.result()[0]) == 0
            writing.wait()
            sectors.wait()
        volume.flush()
        assert turn_of(1, volume["x"][1]) == 0


@on_a_faulty_disk
def test_locks_that_were_held_when_a_process_was_forked_hang_nobody(disk: Disk, path: Path) -> None:
    """As a thread of the parent may hold them at that moment; nobody gives them back in the child."""
    with Volume.create(path, kinds={"x": KIND}) as volume:
        file = volume._file
        assert isinstance(file, DirectFile)

        def use() -> None:
            for each in (lambda: volume["x"].write(0, record(0)), lambda: volume["x"].read(0), volume.flush):
                with pytest.raises(StorageError, match="forked"):
                    each()
            volume.info()
            volume.close()

        with file._pool._idle, file._lock, volume._writes._lock:
            forked = child(use)
        assert ended(forked) == 0


def _work_in_a_spawned_process(path: str, index: int) -> int:
    with Volume.open(path) as volume:
        volume["x"].write(index, record(index, 3))
        volume.flush()
        return turn_of(index + 1, volume["x"][index + 1])


@pytest.mark.no_cover
def test_spawned_workers_open_it_for_themselves(tmp_path: Path) -> None:
    path = tmp_path / "spawned"
    with Volume.create(path, kinds={"x": KIND}) as volume:
        volume["x"].write(0, torch.stack([record(index, 2) for index in range(64)]))
        with multiprocessing.get_context("spawn").Pool(2) as pool:
            found = pool.starmap(_work_in_a_spawned_process, [(str(path), index) for index in (0, 10, 20)])
        assert found == [2, 2, 2]
        assert [turn_of(index, volume["x"][index]) for index in (0, 10, 20, 1)] == [3, 3, 3, 2]
        with pytest.raises(TypeError, match="pickle"):  # a volume itself does not travel: its path does
            multiprocessing.get_context("spawn").Process(target=print, args=(volume,)).start()
