"""What the suite for every tier does not ask of the disk below CUDA: its rings, its threads, and what fails midway."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from torchstorm.errors import BudgetError, CorruptionError, StorageError
from torchstorm.memory.disk import DiskTier
from torchstorm.memory.staged import StagedDiskTier
from torchstorm.memory.tier import Copy
from torchstorm.transfer.pinned import PinnedArena

PIECE = 65_536
MIB = 2**20
PATIENCE_S = 10.0
Result = TypeVar("Result")


class GatedCopy:
    """A copy that a thread makes once its gate is open."""

    def __init__(self, target: torch.Tensor, source: torch.Tensor, gate: threading.Event) -> None:
        self._thread: threading.Thread | None = None
        if gate.is_set():
            target.copy_(source)
        else:
            self._thread = threading.Thread(target=self._move, args=(target, source, gate), daemon=True)
            self._thread.start()

    @staticmethod
    def _move(target: torch.Tensor, source: torch.Tensor, gate: threading.Event) -> None:
        gate.wait(PATIENCE_S)
        target.copy_(source)

    def wait(self) -> None:
        self.synchronize()

    def synchronize(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()


class BrokenCopy(GatedCopy):
    """A copy that the device fails after it was queued."""

    def synchronize(self) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


class Engine:
    """Stands for a GPU's copy streams: copies at once while a gate is open. `refuse` and `broken` name a direction."""

    def __init__(self) -> None:
        self.out_gate, self.in_gate = threading.Event(), threading.Event()
        self.open()
        self.refuse = self.broken = ""
        self.marked: list[str] = []  # the threads that did
        self.queued: list[tuple[str, object, int]] = []

    def open(self) -> None:
        self.out_gate.set()
        self.in_gate.set()

    def mark(self) -> object:
        self.marked.append(threading.current_thread().name)
        return len(self.marked)

    def copy_out(self, host: torch.Tensor, source: torch.Tensor, *, ready: object) -> GatedCopy:
        return self._copy("out", host, source, self.out_gate, ready)

    def copy_in(self, out: torch.Tensor, host: torch.Tensor, *, ready: object) -> GatedCopy:
        return self._copy("in", out, host, self.in_gate, ready)

    def _copy(
        self, direction: str, target: torch.Tensor, source: torch.Tensor, gate: threading.Event, ready: object
    ) -> GatedCopy:
        if self.refuse == direction:
            raise RuntimeError("CUDA error: out of memory")
        self.queued.append((direction, ready, target.nbytes))
        return (BrokenCopy if self.broken == direction else GatedCopy)(target, source, gate)


class Room:
    """Makes tiers, and ends them whatever a test has found."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.engine = Engine()
        self._tiers: list[StagedDiskTier] = []
        self.stuck = False

    def tier(self, *, capacity_bytes: int = 64 * MIB, num_buffers: int = 8, check: bool = False) -> StagedDiskTier:
        disk = DiskTier(self.place, capacity_bytes=capacity_bytes, check=check, threads=2, block_bytes=32_768)
        arena = PinnedArena(num_buffers * PIECE, pin=None, available_bytes=lambda: 1 << 40)
        self._tiers.append(StagedDiskTier(disk, arena, self.engine, piece_bytes=PIECE))
        return self._tiers[-1]

    def within(self, call: Callable[[], Result]) -> Result:
        """Makes a call that must not hang."""
        results: list[Result] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(call())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(PATIENCE_S)
        if thread.is_alive():
            self.stuck = True
            pytest.fail("it hangs")
        if errors:
            raise errors[0]
        return results[0]

    def fetch(self, tier: StagedDiskTier, handle: Any) -> torch.Tensor:
        out = torch.full((handle.nbytes,), 0xEE, dtype=torch.uint8)
        self.within(tier.get(handle, out).wait)
        return out

    def end(self) -> None:
        self.engine.open()
        for tier in self._tiers:
            if self.stuck:  # so that threads that wait for a buffer end, and pytest after them
                for _ in range(1000):
                    tier._out_ring.put(torch.empty(PIECE, dtype=torch.uint8))
                    tier._back_ring.put(torch.empty(PIECE, dtype=torch.uint8))
            tier.close()


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    room = Room(tmp_path)
    yield room
    room.end()
    assert os.listdir(tmp_path) == []


def data(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def becomes(condition: Callable[[], bool]) -> bool:
    stop = time.monotonic() + PATIENCE_S
    while not condition() and time.monotonic() < stop:
        time.sleep(0.001)
    return condition()


def assert_usable(room: Room, tier: StagedDiskTier, *, num_storages: int = 12) -> None:
    """More pieces than the rings have buffers go out and come back."""
    handles = [tier.put(data(3 * PIECE + 5, seed)) for seed in range(num_storages)]
    for seed, handle in enumerate(handles):
        room.within(handle.written.synchronize)
        assert torch.equal(room.fetch(tier, handle), data(3 * PIECE + 5, seed))
        tier.free(handle)


# ---------------------------------------------------------------------- pieces and rings


@pytest.mark.parametrize("nbytes", [0, 1, PIECE - 1, PIECE, PIECE + 1, 40 * PIECE + 5])
@pytest.mark.parametrize("num_buffers", [2, 3, 4, 8])
def test_a_parcel_of_any_size_passes_through_rings_of_any_size(room: Room, num_buffers: int, nbytes: int) -> None:
    tier = room.tier(num_buffers=num_buffers)
    handles = [tier.put(data(nbytes, seed)) for seed in range(3)]
    outs = [torch.empty(nbytes, dtype=torch.uint8) for _ in handles]
    copies = [tier.get(handle, out) for handle, out in zip(handles, outs, strict=True)]
    for seed, (copy, out) in enumerate(zip(copies, outs, strict=True)):
        room.within(copy.wait)
        assert copy.done()
        assert torch.equal(out, data(nbytes, seed))


def test_pieces_are_no_larger_than_a_buffer_and_keep_their_order(room: Room) -> None:
    tier = room.tier()
    handle = tier.put(data(2 * PIECE + 7))
    out = torch.empty(2 * PIECE + 7, dtype=torch.uint8)
    room.within(tier.get(handle, out).wait)
    assert room.engine.queued == [
        ("out", 1, PIECE),
        ("out", 1, PIECE),
        ("out", 1, 7),
        ("in", 2, PIECE),
        ("in", 2, PIECE),
        ("in", 2, 7),
    ], "all behind the one point that the caller's stream had reached"
    assert room.engine.marked == [threading.current_thread().name] * 2, "which only the caller's thread knows"


@pytest.mark.parametrize(
    ("capacity_bytes", "segment_bytes", "piece_bytes"),
    [(24 * 4096, 8 * 4096, 3 * 4096), (56 * 4096, 32 * 4096, 7 * 4096)],
)
def test_pieces_need_not_divide_the_arena_s_segments(
    tmp_path: Path, capacity_bytes: int, segment_bytes: int, piece_bytes: int
) -> None:
    """As for ram=384MiB: pieces of 12 MiB in an arena of 96 MiB with segments of 32 MiB."""
    arena = PinnedArena(capacity_bytes, pin=None, available_bytes=lambda: 1 << 40, segment_bytes=segment_bytes)
    disk = DiskTier(tmp_path, capacity_bytes=MIB)
    try:
        tier = StagedDiskTier(disk, arena, Engine(), piece_bytes=piece_bytes)
        handle = tier.put(data(100_000))
        tier.get(handle, out := torch.empty(100_000, dtype=torch.uint8)).wait()
        assert torch.equal(out, data(100_000))
        assert arena.held_bytes <= capacity_bytes
        tier.close()
        assert arena.held_bytes == 0
    finally:
        disk.close()


def test_both_directions_at_once_from_two_threads(room: Room) -> None:
    tier = room.tier(num_buffers=4)
    kept = [tier.put(data(7 * PIECE + 11, seed)) for seed in range(4)]

    def send() -> None:
        for seed in range(20):
            handle = tier.put(data(5 * PIECE + 3, 100 + seed))
            handle.written.synchronize()
            tier.free(handle)

    def bring() -> None:
        for turn in range(20):
            out = torch.empty(7 * PIECE + 11, dtype=torch.uint8)
            tier.get(kept[turn % 4], out).wait()
            assert torch.equal(out, data(7 * PIECE + 11, turn % 4))

    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(send), threads.submit(bring)]
        for each in both:
            room.within(each.result)
    for handle in kept:
        tier.free(handle)
    assert becomes(lambda: tier.used_bytes == 0)
    assert_usable(room, tier)


# ---------------------------------------------------------------------- order


def test_a_get_follows_a_put_that_has_not_ended(room: Room) -> None:
    tier = room.tier()
    room.engine.out_gate.clear()
    handle = tier.put(data(6 * PIECE + 1))
    out = torch.zeros(6 * PIECE + 1, dtype=torch.uint8)
    copy = tier.get(handle, out)
    time.sleep(0.05)
    assert not handle.written.done()
    assert not copy.done()
    assert not out.any()
    room.engine.open()
    room.within(copy.wait)
    assert handle.written.done()
    assert torch.equal(out, data(6 * PIECE + 1))


def test_freed_before_the_copy_out_has_ended(room: Room) -> None:
    tier = room.tier(capacity_bytes=8 * PIECE)
    room.engine.out_gate.clear()
    handle = tier.put(data(8 * PIECE))
    tier.free(handle)
    tier.free(handle)
    following = tier.put(data(8 * PIECE, 1))  # all the room there is, which the first one has given back
    out = torch.zeros(8 * PIECE, dtype=torch.uint8)
    copy = tier.get(following, out)
    assert not handle.written.done()
    room.engine.open()
    room.within(handle.written.wait)
    room.within(following.written.wait)
    room.within(copy.wait)
    assert torch.equal(out, data(8 * PIECE, 1))
    tier.free(following)
    assert becomes(lambda: tier.used_bytes == tier.disk.used_bytes == 0)
    assert_usable(room, tier, num_storages=1)


def test_freed_before_the_copy_back_has_ended(room: Room) -> None:
    tier = room.tier(capacity_bytes=12 * PIECE, num_buffers=4)
    handle = tier.put(data(12 * PIECE))
    room.within(handle.written.wait)
    room.engine.in_gate.clear()
    out = torch.zeros(12 * PIECE, dtype=torch.uint8)
    copies: list[Copy] = [tier.get(handle, out)]
    tier.free(handle)
    following = tier.put(data(12 * PIECE, 1))
    other = torch.zeros(12 * PIECE, dtype=torch.uint8)
    copies.append(tier.get(following, other))
    time.sleep(0.05)
    assert not any(copy.done() for copy in copies)
    room.engine.open()
    for copy in copies:
        room.within(copy.wait)
    assert torch.equal(out, data(12 * PIECE))
    assert torch.equal(other, data(12 * PIECE, 1))


def test_closing_lets_copies_end_both_ways(room: Room) -> None:
    before = set(threading.enumerate())  # as what compiles the C++ beside the process's first Session
    tier = room.tier(num_buffers=4)
    kept = tier.put(data(9 * PIECE, 1))
    room.within(kept.written.wait)
    room.engine.out_gate.clear()
    room.engine.in_gate.clear()
    handle = tier.put(data(9 * PIECE + 1))
    outs = [torch.zeros(9 * PIECE, dtype=torch.uint8), torch.zeros(9 * PIECE + 1, dtype=torch.uint8)]
    copies = [tier.get(kept, outs[0]), tier.get(handle, outs[1])]
    closing = threading.Thread(target=tier.close)
    closing.start()
    time.sleep(0.05)
    assert closing.is_alive()
    room.engine.open()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert all(copy.done() for copy in [handle.written, *copies])
    for copy in copies:
        copy.wait()
    assert torch.equal(outs[0], data(9 * PIECE, 1))
    assert torch.equal(outs[1], data(9 * PIECE + 1))
    assert os.listdir(room.place) == []
    assert set(threading.enumerate()) <= before


def test_a_closed_tier_says_so_and_gave_its_rings_back(room: Room) -> None:
    tier = room.tier()
    handle = tier.put(data(PIECE))
    tier.close()
    tier.close()
    assert tier._arena.held_bytes == 0
    with pytest.raises(StorageError, match="closed"):
        tier.put(data(PIECE))
    with pytest.raises(StorageError, match="closed"):
        tier.get(handle, torch.empty(PIECE, dtype=torch.uint8))
    tier.free(handle)


# ---------------------------------------------------------------------- budget and labels


def test_the_budget_is_the_disk_s_and_what_did_not_fit_is_named_at_once(room: Room) -> None:
    """At once, so that the caller can send it elsewhere, and in program order, however far the disk has come."""
    tier = room.tier(capacity_bytes=10 * PIECE)
    room.engine.out_gate.clear()
    kept = tier.put(data(7 * PIECE), label="h.1")
    with pytest.raises(
        BudgetError, match=r"disk=640.00 KiB.*, but h\.2 needs 256.00 KiB more with 448.00 KiB in use"
    ) as caught:
        tier.put(data(4 * PIECE), label="h.2")
    assert (caught.value.tier, caught.value.budget_bytes, caught.value.needed_bytes) == ("disk", 10 * PIECE, 11 * PIECE)
    assert tier.used_bytes == tier.peak_bytes == 7 * PIECE
    room.engine.open()
    assert torch.equal(room.fetch(tier, kept), data(7 * PIECE))
    assert torch.equal(room.fetch(tier, tier.put(data(3 * PIECE, 1))), data(3 * PIECE, 1))
    assert tier.used_bytes == tier.disk.used_bytes == 10 * PIECE
    assert tier.info().path in ("direct", "buffered")


def test_changed_bytes_are_found_and_named(room: Room) -> None:
    tier = room.tier(check=True)
    handle = tier.put(data(5 * PIECE), label="h.3.mlp")
    other = tier.put(data(PIECE, 1))
    room.within(handle.written.wait)
    assert torch.equal(room.fetch(tier, handle), data(5 * PIECE))
    with open(Path(tier.disk.path) / "spill", "r+b") as file:
        file.seek(3 * PIECE + 17)
        byte = file.read(1)[0]
        file.seek(3 * PIECE + 17)
        file.write(bytes([byte ^ 1]))
    for _ in range(6):
        copy = tier.get(handle, torch.empty(5 * PIECE, dtype=torch.uint8))
        for _ in range(2):
            with pytest.raises(CorruptionError, match=r"^h\.3\.mlp \(65536 bytes\) was read from .*spill with check"):
                room.within(copy.synchronize)
        assert copy.done()
    assert torch.equal(room.fetch(tier, other), data(PIECE, 1))
    assert_usable(room, tier)


# ---------------------------------------------------------------------- what fails midway


class Faults:
    """Lets the calls of one system call fail that are numbered in `which`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, which: set[int]) -> None:
        self._call = getattr(os, name)
        self._which = which
        self._number = 0
        self._lock = threading.Lock()
        monkeypatch.setattr(os, name, self._run)

    def _run(self, fd: int, views: list[memoryview], offset: int) -> int:
        with self._lock:
            number, self._number = self._number, self._number + 1
        if number in self._which:
            raise OSError(errno.ENOSPC if self._call.__name__ == "pwritev" else errno.EIO, "made to fail")
        return int(self._call(fd, views, offset))


@pytest.mark.parametrize("which", [{0}, {9}, {39}, {3, 4, 5, 20}, set(range(1000))])
def test_a_disk_that_fails_while_it_writes_is_told_by_the_wait(
    room: Room, monkeypatch: pytest.MonkeyPatch, which: set[int]
) -> None:
    tier = room.tier(num_buffers=4)
    kept = tier.put(data(3 * PIECE, 1))
    assert torch.equal(room.fetch(tier, kept), data(3 * PIECE, 1))
    with monkeypatch.context() as patch:
        Faults(patch, "pwritev", which)  # each piece is two of them
        handle = tier.put(data(20 * PIECE), label="h.0")
        copies = [tier.get(handle, torch.empty(20 * PIECE, dtype=torch.uint8)) for _ in range(5)]
        for copy in copies:
            with pytest.raises(StorageError, match=r"spill: writing .* made to fail"):
                room.within(copy.wait)
            with pytest.raises(StorageError, match="made to fail"):
                room.within(copy.synchronize)
            assert copy.done()
        assert handle.written.done(), "ended, well or not"
    tier.free(handle)
    assert becomes(lambda: tier.used_bytes == tier.disk.used_bytes == 3 * PIECE)
    assert torch.equal(room.fetch(tier, kept), data(3 * PIECE, 1))
    assert_usable(room, tier)


@pytest.mark.parametrize("which", [{0}, {9}, {39}, set(range(1000))])
def test_a_disk_that_fails_while_it_reads_is_told_by_the_wait(
    room: Room, monkeypatch: pytest.MonkeyPatch, which: set[int]
) -> None:
    tier = room.tier(num_buffers=4)
    handle = tier.put(data(20 * PIECE), label="h.0")
    room.within(handle.written.wait)
    for _ in range(5):
        with monkeypatch.context() as patch:
            Faults(patch, "preadv", which)
            copy = tier.get(handle, torch.empty(20 * PIECE, dtype=torch.uint8))
            with pytest.raises(StorageError, match=r"spill: reading .* made to fail"):
                room.within(copy.wait)
            assert copy.done()
    assert torch.equal(room.fetch(tier, handle), data(20 * PIECE)), "the bytes are still there"
    assert_usable(room, tier)


@pytest.mark.parametrize("at", [0, 2, 4])
def test_a_disk_that_refuses_a_piece_is_told_by_both_waits(
    room: Room, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    tier = room.tier(num_buffers=4)
    put = tier.disk.put
    for _ in range(5):
        calls: list[int] = []

        def refuse(source: torch.Tensor, *, label: str = "", calls: list[int] = calls) -> Any:
            calls.append(source.nbytes)
            if len(calls) == at + 1:
                raise StorageError("refused")
            return put(source, label=label)

        with monkeypatch.context() as patch:
            patch.setattr(tier.disk, "put", refuse)
            handle = tier.put(data(5 * PIECE))
            copy = tier.get(handle, torch.empty(5 * PIECE, dtype=torch.uint8))
            for each in (handle.written, copy, handle.written):
                with pytest.raises(StorageError, match="refused"):
                    room.within(each.wait)
                assert each.done()
        tier.free(handle)
    assert becomes(lambda: tier.used_bytes == tier.disk.used_bytes == 0)
    assert_usable(room, tier)


@pytest.mark.parametrize("at", [0, 2, 4])
def test_a_disk_that_refuses_to_read_a_piece_is_told_by_the_wait(
    room: Room, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    tier = room.tier(num_buffers=4)
    handle = tier.put(data(5 * PIECE))
    get = tier.disk.get
    for _ in range(5):
        calls: list[int] = []

        def refuse(piece: Any, out: torch.Tensor, calls: list[int] = calls) -> Any:
            calls.append(out.nbytes)
            if len(calls) == at + 1:
                raise StorageError("refused")
            return get(piece, out)

        with monkeypatch.context() as patch:
            patch.setattr(tier.disk, "get", refuse)
            copy = tier.get(handle, torch.empty(5 * PIECE, dtype=torch.uint8))
            with pytest.raises(StorageError, match="refused"):
                room.within(copy.wait)
    assert torch.equal(room.fetch(tier, handle), data(5 * PIECE))
    assert_usable(room, tier)


@pytest.mark.parametrize("how", ["refuse", "broken"])
def test_a_device_that_fails_on_the_way_out_is_told_by_the_wait(room: Room, how: str) -> None:
    tier = room.tier(num_buffers=4)
    setattr(room.engine, how, "out")
    for _ in range(5):
        handle = tier.put(data(5 * PIECE))
        with pytest.raises(RuntimeError, match="CUDA error"):
            room.within(handle.written.wait)
        tier.free(handle)
    setattr(room.engine, how, "")
    assert becomes(lambda: tier.used_bytes == tier.disk.used_bytes == 0)
    assert_usable(room, tier)


@pytest.mark.parametrize("how", ["refuse", "broken"])
def test_a_device_that_fails_on_the_way_back_is_told_by_the_wait(room: Room, how: str) -> None:
    tier = room.tier(num_buffers=4)
    handle = tier.put(data(5 * PIECE))
    setattr(room.engine, how, "in")
    for _ in range(5):
        copy = tier.get(handle, torch.empty(5 * PIECE, dtype=torch.uint8))
        with pytest.raises(RuntimeError, match="CUDA error"):
            room.within(copy.wait)
    setattr(room.engine, how, "")
    assert torch.equal(room.fetch(tier, handle), data(5 * PIECE))
    assert_usable(room, tier)


def test_a_failure_keeps_no_tensor_alive(room: Room) -> None:
    """Device memory: with the step's error on its way, somebody may still hold the handle."""
    tier = room.tier()
    kept = tier.put(data(PIECE))
    source, out = data(5 * PIECE), torch.empty(PIECE, dtype=torch.uint8)
    alive = [weakref.ref(source), weakref.ref(out)]
    room.engine.refuse = "out"
    handle = tier.put(source)
    with pytest.raises(RuntimeError, match="CUDA error"):
        room.within(handle.written.wait)
    room.engine.refuse = "in"
    copy = tier.get(kept, out)
    with pytest.raises(RuntimeError, match="CUDA error"):
        room.within(copy.wait)
    del source, out
    gc.collect()
    assert becomes(lambda: [reference() for reference in alive] == [None, None])
    assert handle.written.done()
    assert copy.done()
