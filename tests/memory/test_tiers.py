"""One suite for every tier. To add a tier, add a row to CASES."""

import gc
import os
import random
import re
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchstorm.errors import BudgetError, StorageError, UnsupportedError
from torchstorm.memory.device import DeviceTier
from torchstorm.memory.disk import DiskTier
from torchstorm.memory.host import DoneCopy, HostTier
from torchstorm.memory.simulated import SimulatedTier
from torchstorm.memory.staged import StagedDiskTier
from torchstorm.memory.tier import Tier, TierSpec
from torchstorm.sizes import format_size
from torchstorm.transfer.pinned import PinnedArena

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Case:
    """A tier under test.

    Attributes:
        make: makes one of a capacity in bytes, which may use the directory.
        unit_bytes: what it rounds sizes up to.
        memory: the directory is in memory, not on the disk.
        device: where sources and outs are.
    """

    make: Callable[[Path, int], Any]
    unit_bytes: int = 1
    memory: bool = False
    device: str = "cpu"


def simulated(capacity_bytes: int, *, sleep: bool) -> SimulatedTier:
    speed = 4e9 if sleep else 1e6
    spec = TierSpec(
        name="ram", capacity_bytes=capacity_bytes, write_bytes_per_s=speed, read_bytes_per_s=2 * speed, latency_s=1e-4
    )
    return SimulatedTier(spec, sleep=sleep)


def host(
    capacity_bytes: int, *, segment_bytes: int = 2**28, largest_bytes: int | None = None, check: bool = False
) -> HostTier:
    return HostTier(
        PinnedArena(
            capacity_bytes,
            pin=None,
            available_bytes=lambda: 1 << 40,
            segment_bytes=segment_bytes,
            largest_bytes=largest_bytes,
        ),
        engine=None,
        spec=TierSpec(name="ram", capacity_bytes=capacity_bytes),
        check=check,
    )


class LateCopy:
    """A copy that a thread of its own makes, a little late."""

    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._thread = threading.Thread(target=self._move, args=(target, source))
        self._thread.start()

    @staticmethod
    def _move(target: torch.Tensor, source: torch.Tensor) -> None:
        time.sleep(1e-4)
        target.copy_(source)

    def wait(self) -> None:
        self._thread.join()

    def synchronize(self) -> None:
        self._thread.join()

    def done(self) -> bool:
        return not self._thread.is_alive()


class Engine:
    """Stands for a GPU's copy streams."""

    def __init__(self, *, late: bool) -> None:
        self._late = late

    def mark(self) -> object:
        return object()

    def copy_out(self, host: torch.Tensor, source: torch.Tensor, *, ready: object) -> DoneCopy | LateCopy:
        return self._copy(host, source)

    def copy_in(self, out: torch.Tensor, host: torch.Tensor, *, ready: object) -> DoneCopy | LateCopy:
        return self._copy(out, host)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> DoneCopy | LateCopy:
        if self._late:
            return LateCopy(target, source)
        target.copy_(source)
        return DoneCopy()


def staged(place: Path, capacity_bytes: int, *, late: bool, num_buffers: int = 8) -> StagedDiskTier:
    piece = 65_536
    return StagedDiskTier(
        DiskTier(place, capacity_bytes=capacity_bytes),
        PinnedArena(num_buffers * piece, pin=None, available_bytes=lambda: 1 << 40),
        Engine(late=late),
        piece_bytes=piece,
    )


CASES = {
    "disk": Case(make=lambda place, size: DiskTier(place, capacity_bytes=size), unit_bytes=4096),
    "disk-check": Case(make=lambda place, size: DiskTier(place, capacity_bytes=size, check=True), unit_bytes=4096),
    "disk-small-blocks": Case(
        make=lambda place, size: DiskTier(place, capacity_bytes=size, threads=2, block_bytes=16_384), unit_bytes=4096
    ),
    "disk-tmpfs": Case(make=lambda place, size: DiskTier(place, capacity_bytes=size), unit_bytes=4096, memory=True),
    "host": Case(make=lambda _, size: host(size), unit_bytes=4096),
    "host-check": Case(make=lambda _, size: host(size, check=True), unit_bytes=4096),
    "host-in-pieces": Case(
        make=lambda _, size: host(size, segment_bytes=2 * 4096, largest_bytes=3 * 4096, check=True), unit_bytes=4096
    ),
    "host-small-segments": Case(make=lambda _, size: host(size, segment_bytes=5 * 4096), unit_bytes=4096),
    "staged": Case(make=lambda place, size: staged(place, size, late=False), unit_bytes=4096),
    "staged-late": Case(make=lambda place, size: staged(place, size, late=True), unit_bytes=4096),
    "staged-two-buffers": Case(
        make=lambda place, size: staged(place, size, late=False, num_buffers=2), unit_bytes=4096
    ),
    "device": Case(make=lambda _, size: DeviceTier(TierSpec(name="vram", capacity_bytes=size))),
    "simulated": Case(make=lambda _, size: simulated(size, sleep=False)),
    "simulated-sleep": Case(make=lambda _, size: simulated(size, sleep=True)),
}


@dataclass
class Room:
    case: Case
    place: Path
    tiers: list[Any]

    def tier(self, capacity_bytes: int = 64 * MIB) -> Any:
        self.tiers.append(self.case.make(self.place, capacity_bytes))
        return self.tiers[-1]

    def rounded(self, nbytes: int) -> int:
        return -(-nbytes // self.case.unit_bytes) * self.case.unit_bytes

    def data(self, nbytes: int, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=generator).to(self.case.device)

    def fetch(self, tier: Any, handle: Any) -> torch.Tensor:
        out = torch.full((handle.nbytes,), 0xEE, dtype=torch.uint8, device=self.case.device)
        tier.get(handle, out).wait()
        return out


@pytest.fixture(params=CASES)
def room(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Room]:
    case = CASES[request.param]
    with tempfile.TemporaryDirectory(dir="/dev/shm" if case.memory else tmp_path) as place:
        room = Room(case, Path(place), [])
        yield room
        for tier in room.tiers:
            tier.close()
        assert os.listdir(place) == []


@pytest.mark.no_cover
@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, MIB - 1, MIB, MIB + 1, 10 * MIB])
def test_the_same_bytes_come_back_as_often_as_wanted(room: Room, nbytes: int) -> None:
    tier = room.tier()
    data = room.data(nbytes)
    handle = tier.put(data.clone(), label="x")
    assert (handle.nbytes, handle.label) == (nbytes, "x")
    handle.written.synchronize()
    assert handle.written.done()
    for _ in range(2):
        assert torch.equal(room.fetch(tier, handle), data)
    copy = tier.get(handle, torch.empty(nbytes, dtype=torch.uint8, device=room.case.device))
    copy.synchronize()
    assert copy.done()


@pytest.mark.no_cover
def test_a_get_before_the_put_has_ended_follows_it(room: Room) -> None:
    tier = room.tier()
    data = [room.data(MIB + 1, seed) for seed in range(8)]
    handles = [tier.put(source) for source in data]
    outs = [torch.empty_like(source) for source in data]
    copies = [tier.get(handle, out) for handle, out in zip(handles, outs, strict=True)]
    for copy in reversed(copies):
        copy.wait()
    assert all(torch.equal(out, source) for out, source in zip(outs, data, strict=True))
    assert all(handle.written.done() for handle in handles)


@pytest.mark.no_cover
def test_freed_while_copies_are_under_way(room: Room) -> None:
    """The slot's next owner must not disturb a get still under way, nor the put of its last owner the next one's."""
    tier = room.tier(room.rounded(MIB + 1))
    for seed in range(12):
        data = room.data(MIB + 1, seed)
        handle = tier.put(data)
        out = torch.empty_like(data)
        copy = tier.get(handle, out)
        tier.free(handle)
        assert tier.used_bytes == 0
        other = room.data(MIB, 100 + seed)
        following = tier.put(other)
        fetched = room.fetch(tier, following)
        copy.wait()
        assert torch.equal(out, data)
        assert torch.equal(fetched, other)
        tier.free(following)


def test_freed_twice_is_freed_once(room: Room) -> None:
    tier = room.tier()
    kept, freed = tier.put(room.data(5000)), tier.put(room.data(5000))
    tier.free(freed)
    tier.free(freed)
    assert tier.used_bytes == room.rounded(5000)
    another = tier.put(room.data(5000, 1))
    tier.free(freed)
    assert tier.used_bytes == 2 * room.rounded(5000)
    assert torch.equal(room.fetch(tier, kept), room.data(5000))
    assert torch.equal(room.fetch(tier, another), room.data(5000, 1))


def test_used_and_peak(room: Room) -> None:
    tier = room.tier()
    assert tier.used_bytes == tier.peak_bytes == 0
    first, second = tier.put(room.data(4097)), tier.put(room.data(MIB))
    both = room.rounded(4097) + room.rounded(MIB)
    assert tier.used_bytes == tier.peak_bytes == both
    tier.free(second)
    assert (tier.used_bytes, tier.peak_bytes) == (room.rounded(4097), both)
    tier.reset_peak()
    assert tier.peak_bytes == room.rounded(4097)
    tier.free(first)
    assert tier.used_bytes == 0


def test_the_budget_holds_to_the_byte(room: Room) -> None:
    tier = room.tier(3 * 4096)
    handles = [tier.put(room.data(4096, seed)) for seed in range(2)]
    with pytest.raises(BudgetError) as caught:
        tier.put(room.data(4097), label="blocks.7")
    error, name = caught.value, tier.spec.name
    assert (error.tier, error.budget_bytes) == (name, 12_288)
    assert error.needed_bytes == 8192 + room.rounded(4097)
    assert re.fullmatch(
        rf"{name}=12\.00 KiB(| in {re.escape(str(room.place))}\S*| \(simulated\)), but blocks\.7 needs "
        rf"{re.escape(format_size(room.rounded(4097)))} more with 8\.00 KiB in use\. Give {name}= at least "
        rf"{re.escape(format_size(error.needed_bytes))}, or a larger budget on a faster tier\.",
        str(error),
    )
    with pytest.raises(BudgetError, match="but a saved tensor needs"):
        tier.put(room.data(4097))
    assert tier.used_bytes == tier.peak_bytes == 8192
    handles.append(tier.put(room.data(4096, 2)))
    for seed, handle in enumerate(handles):
        assert torch.equal(room.fetch(tier, handle), room.data(4096, seed))


def test_scattered_room_is_room(room: Room) -> None:
    """What the sum has room for is put, however the free room lies."""
    tier = room.tier(16 * 4096)
    handles = [tier.put(room.data(4096, seed)) for seed in range(16)]
    for handle in handles[::2]:
        tier.free(handle)
    large = tier.put(room.data(8 * 4096 - 5, 99))
    assert torch.equal(room.fetch(tier, large), room.data(8 * 4096 - 5, 99))
    for seed in range(1, 16, 2):
        assert torch.equal(room.fetch(tier, handles[seed]), room.data(4096, seed))


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=25, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["put", "put", "get", "get", "free", "wait"]),
            st.integers(0, 2**16),
            st.sampled_from([0, 1, 100, 4095, 4096, 4097, 40_000, 100_001]),
        ),
        max_size=40,
    )
)
def test_any_order_of_calls(
    name: str, tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]]
) -> None:
    case = CASES[name]
    with tempfile.TemporaryDirectory(dir="/dev/shm" if case.memory else tmp_path_factory.getbasetemp()) as place:
        room = Room(case, Path(place), [])
        capacity = 200_704
        tier = room.tier(capacity)
        held: dict[Any, torch.Tensor] = {}
        under_way = []
        used = peak = 0
        for seed, (what, which, nbytes) in enumerate(steps):
            handle = list(held)[which % len(held)] if held else None
            if what == "put" and used + room.rounded(nbytes) <= capacity:
                data = room.data(nbytes, seed)
                held[tier.put(data)] = data
                used += room.rounded(nbytes)
                peak = max(peak, used)
            elif what == "put":
                with pytest.raises(BudgetError):
                    tier.put(room.data(nbytes))
            elif what == "get" and handle is not None:
                out = torch.empty_like(held[handle])
                under_way.append((tier.get(handle, out), out, held[handle]))
            elif what == "free" and handle is not None:
                used -= room.rounded(handle.nbytes)
                del held[handle]
                tier.free(handle)
            elif what == "wait" and under_way:
                copy, out, data = under_way.pop(which % len(under_way))
                copy.wait()
                assert torch.equal(out, data)
            assert (tier.used_bytes, tier.peak_bytes) == (used, peak)
        for copy, out, data in under_way:
            copy.wait()
            assert torch.equal(out, data)
        for handle, data in held.items():
            assert torch.equal(room.fetch(tier, handle), data)
        tier.close()


def test_many_threads(room: Room) -> None:
    tier = room.tier(6 * MIB)

    def work(seed: int) -> None:
        for round_ in range(6):
            nbytes = random.Random(seed * 100 + round_).randrange(MIB // 2)
            data = room.data(nbytes, seed * 100 + round_)
            handle = tier.put(data)
            assert torch.equal(room.fetch(tier, handle), data)
            tier.free(handle)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert tier.used_bytes == 0
    assert tier.peak_bytes <= 6 * MIB


@pytest.mark.no_cover
def test_nothing_grows(room: Room) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    tier = room.tier(MIB)
    data, out = room.data(200_001), torch.empty(200_001, dtype=torch.uint8, device=room.case.device)
    started = None
    for cycle in range(200):
        handle = tier.put(data)
        tier.get(handle, out).wait()
        tier.free(handle)
        if cycle == 20:
            started = len(os.listdir("/proc/self/fd"))
    assert torch.equal(out, data)
    assert len(os.listdir("/proc/self/fd")) == started
    assert tier.peak_bytes == room.rounded(200_001)
    assert sum(path.stat().st_size for path in room.place.rglob("*")) <= MIB
    tier.close()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
    assert os.listdir(room.place) == []


def test_tensors_are_let_go_when_their_copies_have_ended(room: Room) -> None:
    tier = room.tier()
    source, out = room.data(MIB), torch.empty(MIB, dtype=torch.uint8, device=room.case.device)
    alive = [weakref.ref(source), weakref.ref(out)]
    handle = tier.put(source)
    tier.get(handle, out).wait()
    del source, out
    stop = time.monotonic() + 5
    while any(reference() is not None for reference in alive) and time.monotonic() < stop:
        time.sleep(0.001)  # a worker may still be leaving the function that held it
    assert [reference() for reference in alive] == [None, None]
    assert torch.equal(room.fetch(tier, handle), room.data(MIB))


def test_what_is_no_row_of_bytes_is_refused(room: Room) -> None:
    tier = room.tier()
    handle, unnamed = tier.put(room.data(8), label="h.2.mlp"), tier.put(room.data(8))
    wrongs = (
        torch.zeros(2),
        torch.zeros(8, dtype=torch.int8),
        torch.zeros(8, dtype=torch.bool),
        room.data(8).view(2, 4),
        room.data(1).view(()),
        room.data(16)[::2],
        room.data(1).expand(8),
        torch.empty(8, dtype=torch.uint8, device="meta"),
    )
    for wrong in wrongs:
        with pytest.raises(UnsupportedError, match="a tier moves contiguous 1-D uint8 tensors, not torch"):
            tier.put(wrong)
        with pytest.raises(UnsupportedError, match="a tier moves contiguous 1-D uint8 tensors, not torch"):
            tier.get(handle, wrong)
    assert tier.used_bytes == 2 * room.rounded(8)
    for nbytes in (0, 7, 9):
        with pytest.raises(StorageError, match=rf"^h\.2\.mlp has 8 bytes, but out has {nbytes}\.$"):
            tier.get(handle, room.data(nbytes))
        with pytest.raises(StorageError, match=r"^a saved tensor has 8 bytes"):
            tier.get(unnamed, room.data(nbytes))
    for freed, named in ((handle, r"h\.2\.mlp"), (unnamed, "a saved tensor")):
        assert torch.equal(room.fetch(tier, freed), room.data(8))
        tier.free(freed)
        with pytest.raises(StorageError, match=f"^{named} was freed before it was read back"):
            tier.get(freed, room.data(8))


def test_closing_lets_copies_end(room: Room) -> None:
    tier = room.tier()
    data = room.data(3 * MIB)
    handle = tier.put(data)
    copy = tier.get(handle, out := torch.empty_like(data))
    tier.close()
    tier.close()
    assert copy.done()
    assert torch.equal(out, data)
    tier.free(handle)
    with pytest.raises(StorageError, match="closed"):
        tier.put(data)
    with pytest.raises(StorageError, match="closed"):
        tier.get(handle, out)


def test_it_is_a_tier(room: Room) -> None:
    tier: Tier = room.tier(5 * MIB)
    assert tier.spec.capacity_bytes == 5 * MIB
