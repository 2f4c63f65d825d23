"""The loader: every record once, the same order for the same seed, resumable anywhere, and no thread left behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchstorm.errors import ConfigError, CorruptionError, DeviceError, StorageError
from torchstorm.storage.layout import Kind
from torchstorm.storage.loader import NVMeDataLoader
from torchstorm.storage.records import Checksums
from torchstorm.storage.volume import Volume

NUM = 37


def make(path: Path, num_records: int = NUM, **kinds: Kind) -> Volume:
    kinds = kinds or {"tokens": Kind(dtype=torch.int32, shape=(3,), length=num_records)}
    volume = Volume.create(path, kinds)
    for name, kind in kinds.items():
        rows = torch.arange(kind.length).view(-1, *[1] * len(kind.shape)).expand(kind.length, *kind.shape)
        volume[name].write(0, rows.to(kind.dtype).contiguous())
    volume.flush()
    return volume


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Volume]:
    with make(tmp_path / "x.storm") as volume:
        yield volume
    assert not loader_threads()


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "torchstorm-loader"]


def numbers(batch: Any) -> list[int]:
    assert isinstance(batch, torch.Tensor)
    assert (batch == batch[:, :1]).all()
    return batch[:, 0].tolist()


def epoch(loader: NVMeDataLoader) -> list[list[int]]:
    return [numbers(batch) for batch in loader]


@pytest.mark.parametrize("depth", [1, 2, 100])
def test_in_order_every_record_comes_once_and_the_last_batch_is_what_is_left(volume: Volume, depth: int) -> None:
    loader = NVMeDataLoader(volume, 5, prefetch_depth=depth)
    batches = epoch(loader)
    assert batches == [list(range(start, min(start + 5, NUM))) for start in range(0, NUM, 5)]
    assert len(loader) == len(batches) == 8
    assert epoch(loader) == batches


def test_drop_last_leaves_the_last_batch_out(volume: Volume) -> None:
    loader = NVMeDataLoader(volume, 5, drop_last=True)
    assert len(loader) == 7
    assert [len(batch) for batch in epoch(loader)] == [5] * 7


def test_shuffled_epochs_have_every_record_once_in_orders_of_their_own_that_a_seed_gives_again(volume: Volume) -> None:
    loader = NVMeDataLoader(volume, 5, shuffle=True, seed=3)
    first, second = epoch(loader), epoch(loader)
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(NUM))
    assert first != second
    again = NVMeDataLoader(volume, 5, shuffle=True, seed=3, prefetch_depth=1)
    assert [epoch(again), epoch(again)] == [first, second]
    again.set_epoch(0)
    assert epoch(again) == first
    assert epoch(NVMeDataLoader(volume, 5, shuffle=True, seed=4)) != first


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_ranks_share_the_records_and_have_as_many_each(volume: Volume, world_size: int, drop_last: bool) -> None:
    ranks = [
        NVMeDataLoader(volume, 4, shuffle=True, rank=rank, world_size=world_size, drop_last=drop_last)
        for rank in range(world_size)
    ]
    batches = [epoch(loader) for loader in ranks]
    assert len({len(each) for each in batches}) == len({len(loader) for loader in ranks}) == 1
    assert len(batches[0]) == len(ranks[0])
    found = [number for each in batches for batch in each for number in batch]
    if drop_last:
        assert len(set(found)) == len(found)
    else:
        assert set(found) == set(range(NUM))


@settings(max_examples=40, deadline=None)
@given(
    num_records=st.integers(0, 40),
    batch_size=st.integers(1, 9),
    depth=st.integers(1, 5),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    stop=st.integers(0, 20),
    data=st.data(),
)
def test_a_state_goes_on_where_it_was_taken_wherever_that_was(
    num_records: int,
    batch_size: int,
    depth: int,
    shuffle: bool,
    drop_last: bool,
    stop: int,
    data: st.DataObject,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    options: dict[str, Any] = {"shuffle": shuffle, "drop_last": drop_last, "prefetch_depth": depth, "seed": 1}
    with make(tmp_path_factory.mktemp("loader") / "x", num_records) as volume:
        whole = NVMeDataLoader(volume, batch_size, **options)
        expected = epoch(whole) + epoch(whole)
        stop = min(stop, len(expected))
        broken = NVMeDataLoader(volume, batch_size, **options)
        found: list[list[int]] = []
        while len(found) < stop:
            for batch in broken:
                found.append(numbers(batch))
                if len(found) == stop:
                    break
        state = broken.state_dict()
        broken.close()
        going_on = NVMeDataLoader(volume, batch_size, **{**options, "prefetch_depth": data.draw(st.integers(1, 3))})
        going_on.load_state_dict(state)
        while len(found) < len(expected):
            found += epoch(going_on)
        assert found == expected


def test_a_state_of_another_loader_is_refused_with_what_differs(volume: Volume) -> None:
    state = NVMeDataLoader(volume, 5, shuffle=True, seed=1).state_dict()
    with pytest.raises(ConfigError, match="seed=1, but this one has seed=2"):
        NVMeDataLoader(volume, 5, shuffle=True, seed=2).load_state_dict(state)
    with pytest.raises(ConfigError, match="batch_size=5"):
        NVMeDataLoader(volume, 6, shuffle=True, seed=1).load_state_dict(state)
    with pytest.raises(ConfigError, match="batch 9, but an epoch has 8"):
        NVMeDataLoader(volume, 5, shuffle=True, seed=1).load_state_dict({**state, "batch": 9})
    with pytest.raises(ConfigError, match="epoch=None"):
        NVMeDataLoader(volume, 5, shuffle=True, seed=1).load_state_dict({**state, "epoch": None})


def test_an_epoch_that_is_abandoned_ends_its_thread_and_returns_its_memory(tmp_path: Path) -> None:
    kind = Kind(dtype=torch.uint8, shape=(2**20,), length=64)
    with make(tmp_path / "x", big=kind) as volume:
        loader = NVMeDataLoader(volume, 8, prefetch_depth=4)
        before = resident_bytes()
        for _ in range(3):
            for _batch in loader:
                break
            del _batch
            assert not loader_threads()
        gc.collect()
        assert resident_bytes() - before < 16 * 2**20
        batches = iter(loader)
        next(batches)
        assert len(loader_threads()) == 1
        del batches
        assert not loader_threads()


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_no_more_batches_than_the_depth_are_under_way_and_it_may_change_meanwhile(volume: Volume) -> None:
    loader = NVMeDataLoader(volume, 1, prefetch_depth=2)
    batches = iter(loader)
    next(batches)
    running = loader._running
    assert running is not None
    assert settled(lambda: len(running._done) == 2)
    loader.prefetch_depth = 6
    assert loader.prefetch_depth == 6
    next(batches)
    assert settled(lambda: len(running._done) == 6)
    loader.prefetch_depth = 1
    for _ in range(6):
        next(batches)
    assert settled(lambda: len(running._done) == 1)
    assert [numbers(batch)[0] for batch in batches] == list(range(8, NUM))


def settled(condition: Any) -> bool:
    """Whether it becomes true, and stays so."""
    stop = time.monotonic() + 10
    while not condition() and time.monotonic() < stop:
        time.sleep(0.001)
    time.sleep(0.02)
    return bool(condition())


def test_several_kinds_make_a_dictionary(tmp_path: Path) -> None:
    kinds = {
        "images": Kind(dtype=torch.float32, shape=(2, 5), length=9),
        "labels": Kind(dtype=torch.int64, length=9),
        "other": Kind(dtype=torch.int64, length=3),
    }
    with make(tmp_path / "x", **kinds) as volume:
        with pytest.raises(ConfigError, match="equal length"):
            NVMeDataLoader(volume, 4)
        for batch in NVMeDataLoader(volume, 4, kinds=["images", "labels"], shuffle=True):
            assert isinstance(batch, dict)
            assert batch["images"].shape == (len(batch["labels"]), 2, 5)
            assert (batch["images"] == batch["labels"].view(-1, 1, 1)).all()


def test_a_damaged_record_is_an_error_at_its_batch_and_what_was_before_it_comes(volume: Volume) -> None:
    kind = volume["tokens"].kind
    assert kind.start_bytes is not None
    with open(volume.path, "r+b") as file:
        file.seek(kind.start_bytes + 21 * kind.record_bytes)
        file.write(b"\xff")
    loader = NVMeDataLoader(volume, 5, prefetch_depth=8)
    batches = iter(loader)
    assert [numbers(next(batches)) for _ in range(4)] == [list(range(start, start + 5)) for start in range(0, 20, 5)]
    with pytest.raises(CorruptionError, match="record 21"):
        next(batches)
    assert next(batches, None) is None
    assert loader.state_dict()["batch"] == 4
    assert len(list(NVMeDataLoader(volume, 5, verify=False))) == 8


def test_a_volume_that_is_closed_meanwhile_is_an_error_and_no_hang(tmp_path: Path) -> None:
    volume = make(tmp_path / "x")
    batches = iter(NVMeDataLoader(volume, 5, prefetch_depth=2))
    next(batches)
    volume.close()
    with pytest.raises(StorageError, match="is closed"):
        list(batches)


def test_checks_that_are_read_while_their_file_closes_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread closes it after they were found open."""
    (tmp_path / "x").write_bytes(bytes(64))
    descriptor = os.open(tmp_path / "x", os.O_RDONLY)
    checks, read = Checksums(descriptor, 0, "kind 'x'"), os.preadv
    assert len(checks.read(0, 2)) == 2

    def late(*arguments: Any) -> int:
        checks.close()
        os.close(descriptor)
        return read(*arguments)

    monkeypatch.setattr(os, "preadv", late)
    with pytest.raises(StorageError, match="kind 'x' is closed"):
        checks.read(0, 2)


def test_a_second_iteration_ends_the_first_which_says_so(volume: Volume) -> None:
    loader = NVMeDataLoader(volume, 5)
    first = iter(loader)
    next(first)
    second = iter(loader)
    assert numbers(next(second)) == list(range(5))
    with pytest.raises(ConfigError, match="ended this one"):
        next(first)
    assert len(list(second)) == 7


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 2.0}, "batch_size=2.0"),
        ({"batch_size": 2, "prefetch_depth": 0}, "prefetch_depth=0"),
        ({"batch_size": 2, "kinds": ["images"]}, "no kind 'images'"),
        ({"batch_size": 2, "kinds": "tokens"}, "give a list"),
        ({"batch_size": 2, "rank": 2, "world_size": 2}, "rank=2, world_size=2"),
        ({"batch_size": 2, "rank": 0}, "give both"),
    ],
)
def test_what_makes_no_loader_is_refused_with_its_value(volume: Volume, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        NVMeDataLoader(volume, **options)


def test_a_device_that_is_not_there_is_refused(volume: Volume) -> None:
    with pytest.raises(DeviceError, match="xpu"):
        NVMeDataLoader(volume, 2, device="xpu")


def spawned(path: str, results: Any) -> None:
    with Volume.open(path, read_only=True) as volume:
        results.put(epoch(NVMeDataLoader(volume, 5)))


@pytest.mark.no_cover
def test_a_spawned_worker_reads_the_volume_of_its_own(volume: Volume) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    worker = context.Process(target=spawned, args=(volume.path, results))
    worker.start()
    assert results.get(timeout=60) == epoch(NVMeDataLoader(volume, 5))
    worker.join(30)
    assert worker.exitcode == 0
