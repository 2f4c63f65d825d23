"""A volume gives back what was written, to the byte, and says so where it cannot."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import forked
from torchstorm.errors import ConfigError, CorruptionError, StorageError
from torchstorm.storage.layout import DTYPES, Kind
from torchstorm.storage.volume import Volume

TOKENS = Kind(dtype=torch.int32, shape=(7,), length=50)
LABELS = Kind(dtype=torch.int64, length=50)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.storm"


def tokens(start: int, count: int) -> torch.Tensor:
    return (torch.arange(count * 7, dtype=torch.int32) + start * 7).reshape(count, 7)


def filled(path: Path) -> Volume:
    volume = Volume.create(path, kinds={"tokens": TOKENS, "labels": LABELS})
    volume["tokens"].write(0, tokens(0, 50))
    volume["labels"].write(0, torch.arange(50))
    volume.flush()
    return volume


# ---------------------------------------------------------------------- what was written comes back


def test_what_was_written_is_there_when_the_volume_is_opened_again(path: Path) -> None:
    filled(path).close()
    with Volume.open(path, read_only=True) as volume:
        assert list(volume) == ["tokens", "labels"]
        assert len(volume["tokens"]) == 50
        assert torch.equal(volume["tokens"].read(3, 4), tokens(3, 4))
        assert torch.equal(volume["tokens"][3], tokens(3, 1)[0])
        assert torch.equal(volume["tokens"][45:60], tokens(45, 5))
        assert volume["tokens"][5:5].shape == (0, 7)
        assert volume["labels"][9].shape == ()
        assert int(volume["labels"][9]) == 9
        out = torch.empty(2, 7, dtype=torch.int32)
        assert volume["tokens"].read(8, 2, out=out) is out
        assert torch.equal(out, tokens(8, 2))
        assert "tokens': 50 x (7,) int32" in repr(volume)
        assert volume.info().counters.direct_read_requests + volume.info().counters.buffered_read_requests > 0


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (5, 0), (2, 3, 1)], ids=str)
def test_every_dtype_and_shape_comes_back_to_the_bit(name: str, shape: tuple[int, ...], path: Path) -> None:
    kind = Kind(dtype=DTYPES[name], shape=shape, length=4)
    bits = torch.randint(0, 2 if name == "bool" else 256, (4 * kind.record_bytes,), dtype=torch.uint8)
    data = bits.view(kind.dtype).view(4, *shape) if bits.numel() else torch.empty((4, *shape), dtype=kind.dtype)
    with Volume.create(path, kinds={"a": Kind(dtype=torch.uint8, shape=(3,), length=1), "x": kind}) as volume:
        volume["x"].write(0, data)
    with Volume.open(path) as volume:
        found = volume["x"].read(0, 4)
    assert (found.dtype, found.shape) == (data.dtype, data.shape)
    assert found.flatten().view(torch.uint8).tolist() == bits.tolist()


actions = st.lists(
    st.tuples(st.sampled_from(["write", "read", "flush", "reopen"]), st.integers(0, 19), st.integers(0, 20)),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(record_bytes=st.sampled_from([1, 7, 512, 4096, 5000]), todo=actions, seed=st.integers(0, 99))
@pytest.mark.no_cover
def test_any_writes_and_reads_agree_with_a_table_in_memory(
    record_bytes: int, todo: list[tuple[str, int, int]], seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    torch.manual_seed(seed)
    path = tmp_path_factory.mktemp("volume") / "a.storm"
    expected: dict[int, torch.Tensor] = {}
    volume = Volume.create(path, kinds={"x": Kind(dtype=torch.uint8, shape=(record_bytes,), length=20)})
    for what, i, n in todo:
        n = min(n, 20 - i)
        if what == "write":
            data = torch.randint(0, 256, (n, record_bytes), dtype=torch.uint8)
            volume["x"].write(i, data)
            expected |= {i + k: data[k] for k in range(n)}
        elif what == "flush":
            volume.flush()
        elif what == "reopen":
            volume.close()
            volume = Volume.open(path)
        elif all(k in expected for k in range(i, i + n)):
            found = volume["x"].read(i, n)
            assert all(torch.equal(found[k], expected[i + k]) for k in range(n))
        else:
            with pytest.raises(CorruptionError, match="never written"):
                volume["x"].read(i, n)
    condition = volume["x"].check()
    assert condition.num_intact == len(expected)
    assert condition.damaged == ()
    assert condition.unwritten == tuple(k for k in range(20) if k not in expected)
    volume.close()


def test_a_batch_is_one_request_over_several_kinds(path: Path) -> None:
    with filled(path) as volume:
        some, one = torch.empty(3, 7, dtype=torch.int32), torch.empty(1, dtype=torch.int64)
        request = volume.read_batch([("tokens", 1, 3, some), ("labels", 7, 1, one), ("tokens", 0, 0, None)])
        request.wait()
        assert request.done()
        assert torch.equal(some, tokens(1, 3))
        assert one.item() == 7


def test_a_request_has_a_number_and_is_of_no_use_once_released(path: Path) -> None:
    with filled(path) as volume:
        first, second = volume["tokens"].read_async(0, 2), volume["tokens"].read_async(2, 2)
        assert second.id > first.id
        first.release()
        for use in (first.wait, first.result, first.done, first.release):
            with pytest.raises(StorageError, match=f"Request {first.id} was released"):
                use()
        assert torch.equal(second.result(), tokens(2, 2))


def test_a_request_that_is_dropped_runs_to_its_end(path: Path) -> None:
    with filled(path) as volume:
        for index in range(50):
            volume["tokens"].write_async(index, tokens(100 + index, 1))
        volume.flush()
        assert torch.equal(volume["tokens"].read(0, 50), tokens(100, 50))


def test_another_reader_sees_a_record_as_soon_as_it_is_written(path: Path) -> None:
    with filled(path) as volume, Volume.open(path, read_only=True) as reader:
        volume["tokens"].write(4, tokens(9, 1))
        assert torch.equal(reader["tokens"][4], tokens(9, 1)[0])


def test_sixty_four_threads_write_and_read_records_of_their_own(path: Path) -> None:
    def work(number: int) -> bool:
        for turn in range(8):
            records.write(number, tokens(number + 64 * turn, 1))
            if not torch.equal(records[number], tokens(number + 64 * turn, 1)[0]):
                return False
        return True

    with Volume.create(path, kinds={"tokens": Kind(dtype=torch.int32, shape=(7,), length=64)}) as volume:
        records = volume["tokens"]
        with ThreadPoolExecutor(64) as pool:
            assert all(pool.map(work, range(64)))
        volume.flush()
        assert records.check().num_intact == 64


FORKED = """
import os, sys, torch
from torchstorm.errors import StorageError
from torchstorm.storage.volume import Volume
volume = Volume.open(sys.argv[1])
if os.fork() == 0:
    try:
        volume["tokens"].read(0)
    except StorageError as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
print(volume["tokens"].read(1).tolist())
"""


def test_a_forked_child_gets_an_error_and_no_hang(path: Path) -> None:
    filled(path).close()
    command = [sys.executable, "-W", "ignore", "-c", FORKED, str(path)]
    done = forked.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    told, read = done.stdout.splitlines()
    assert "forked" in told
    assert read == str(tokens(1, 1).tolist())


def test_what_lies_in_a_file_is_described_by_hand(tmp_path: Path) -> None:
    data = torch.arange(4096, dtype=torch.uint8).repeat(2)
    (tmp_path / "raw").write_bytes(data.numpy().tobytes())
    kinds = {
        3: Kind.at_sectors(2, 4, sector_bytes=512),
        "words": Kind(dtype=torch.int16, shape=(5,), length=6, start_bytes=1001),
    }
    with Volume.describe(tmp_path / "raw", kinds) as volume:
        assert torch.equal(volume[3].read(1, 2).flatten(), data[1536:2560])
        assert torch.equal(volume["words"].read(0, 6).view(torch.uint8).flatten(), data[1001:1061])
        with pytest.raises(StorageError, match="reading only"):
            volume[3].write(0, torch.zeros(512, dtype=torch.uint8))
        with pytest.raises(ConfigError, match="no checks"):
            volume[3].check()
    with pytest.raises(StorageError, match="ends at byte 8192, but kind 'x' would end at 8193"):
        Volume.describe(tmp_path / "raw", {"x": Kind(dtype=torch.uint8, length=8193, start_bytes=0)})
    with pytest.raises(ConfigError, match="needs start_bytes"):
        Volume.describe(tmp_path / "raw", {"x": Kind(dtype=torch.uint8, length=1)})
    with pytest.raises(ConfigError, match="multiple of 8 bytes"):
        Kind.at_sectors(0, 1, sector_bytes=12, dtype=torch.int64)


# ---------------------------------------------------------------------- what is asked wrongly


@pytest.mark.parametrize(("i", "n"), [(-1, 1), (50, 1), (0, 51), (3, -1), (True, 1), (1.0, 1), (49, 2)])
def test_records_that_are_not_there_are_an_error_with_kind_index_and_limit(path: Path, i: int, n: int) -> None:
    with filled(path) as volume:
        with pytest.raises(ConfigError, match=r"kind 'tokens' of .*a\.storm"):
            volume["tokens"].read(i, n)
        with pytest.raises(ConfigError, match=r"but there are 50, from 0 to 49|must be integers"):
            volume["tokens"].read(i, n)
        with pytest.raises(ConfigError, match="kind 'tokens'"):
            volume["tokens"][-3:-1]
        with pytest.raises(ConfigError, match="no kind 'nothing'; it has 'tokens', 'labels'"):
            volume["nothing"]


@pytest.mark.parametrize(
    "out",
    [
        torch.empty(2, 7),
        torch.empty(3, 7, dtype=torch.int32),
        torch.empty(7, 2, dtype=torch.int32).t(),
        torch.empty(2, 7, dtype=torch.int32, device="meta"),
    ],
    ids=["dtype", "shape", "strides", "device"],
)
def test_an_out_that_does_not_fit_is_an_error_and_stays_as_it_was(path: Path, out: torch.Tensor) -> None:
    with filled(path) as volume, pytest.raises(ConfigError, match=r"kind 'tokens' of .*tensor"):
        volume["tokens"].read(0, 2, out=out)


def test_a_source_of_another_dtype_or_beyond_the_end_is_not_written(path: Path) -> None:
    with filled(path) as volume:
        for i, source in ((0, tokens(5, 2).long()), (49, tokens(5, 2)), (0, torch.zeros(2, 6, dtype=torch.int32))):
            with pytest.raises(ConfigError, match="kind 'tokens'"):
                volume["tokens"].write(i, source)
        assert torch.equal(volume["tokens"].read(0, 50), tokens(0, 50))
        volume["tokens"].write(0, tokens(1, 7).t()[:, :7].contiguous().t())  # strides of its own are copied
    with pytest.raises(StorageError, match="closed"):
        volume["tokens"].read(0)


@pytest.mark.parametrize(
    "kind",
    [
        {"dtype": torch.quint8, "length": 1},
        {"dtype": torch.int32, "length": -1},
        {"dtype": torch.int8, "shape": (1.5,)},
    ],
    ids=["dtype", "length", "shape"],
)
def test_a_kind_that_cannot_be_is_an_error(kind: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"dtype=|length=-1|shape="):
        Kind(**{"length": 1, **kind})  # type: ignore[arg-type]


def test_a_volume_is_not_made_over_a_file_by_mistake(path: Path) -> None:
    filled(path).close()
    with pytest.raises(StorageError, match=r"exists\. Give another path"):
        Volume.create(path, kinds={"x": LABELS})
    with Volume.create(path, kinds={"x": LABELS}, replace=True) as volume:
        assert volume["x"].check().unwritten == tuple(range(50))
    with pytest.raises(ConfigError, match="has start_bytes"):
        Volume.create(path, kinds={"x": Kind(dtype=torch.int8, length=1, start_bytes=0)}, replace=True)


# ---------------------------------------------------------------------- what went wrong with the file


def test_a_flipped_bit_is_told_with_kind_and_record_and_the_others_are_read(path: Path) -> None:
    filled(path).close()
    with Volume.open(path) as volume:
        start = volume["tokens"].kind.start_bytes
    assert start is not None
    with path.open("r+b") as file:
        file.seek(start + 5 * 28 + 3)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    with Volume.open(path) as volume:
        with pytest.raises(CorruptionError, match=r"kind 'tokens' of .*: record 5 is not what was written: its write"):
            volume["tokens"].read(0, 50)
        assert torch.equal(volume["tokens"].read(6, 44), tokens(6, 44))
        assert volume["tokens"].check().damaged == (5,)
        assert volume["labels"].check().num_intact == 50


def test_without_checks_nothing_is_held_against_them(path: Path) -> None:
    with Volume.create(path, kinds={"tokens": TOKENS}, checks=False) as volume:
        assert torch.equal(volume["tokens"][0], torch.zeros(7, dtype=torch.int32))
        volume["tokens"].write(1, tokens(1, 1))
        volume.flush()
        assert torch.equal(volume["tokens"][1], tokens(1, 1)[0])


@pytest.mark.parametrize("where", [0, 9, 14, 25, 33, 4100])
def test_a_changed_header_or_table_is_never_taken_for_a_volume(path: Path, where: int) -> None:
    filled(path).close()
    with path.open("r+b") as file:
        file.seek(where)
        byte = file.read(1)[0]
        file.seek(where)
        file.write(bytes([byte ^ 0x40]))
    with pytest.raises(StorageError, match=r"no torchstorm volume|is not what was written"):
        Volume.open(path)


def test_a_file_that_is_none_is_told_so(path: Path, tmp_path: Path) -> None:
    for content in (b"", b"STORM", b"hello" * 2000):
        path.write_bytes(content)
        with pytest.raises(StorageError, match="no torchstorm volume"):
            Volume.open(path)
    with pytest.raises(StorageError, match="cannot be opened"):
        Volume.open(tmp_path)
    with pytest.raises(StorageError, match="cannot be opened"):
        Volume.open(tmp_path / "nowhere")


def test_a_file_that_was_cut_off_is_told_when_it_is_opened_and_when_it_is_read(path: Path) -> None:
    volume = filled(path)
    size = path.stat().st_size
    os.truncate(path, size // 2)
    with pytest.raises(StorageError, match="is too short: wanted 400 bytes"):
        volume["labels"].read(0, 50)
    volume.close()
    with pytest.raises(StorageError, match="the file was truncated"):
        Volume.open(path)


FULL = """
import resource, signal, sys, torch
from torchstorm.storage.layout import Kind
from torchstorm.storage.volume import Volume
from torchstorm.errors import StorageError
volume = Volume.create(sys.argv[1], kinds={"x": Kind(dtype=torch.uint8, shape=(65536,), length=64)})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
start = volume["x"].kind.start_bytes
resource.setrlimit(resource.RLIMIT_FSIZE, (start + 20 * 65536 + 1000, resource.RLIM_INFINITY))
data = torch.full((64, 65536), 7, dtype=torch.uint8)
try:
    volume["x"].write(0, data)
except StorageError as error:
    print("told", error)
try:
    volume.flush()
except StorageError as error:
    print("flush", error)
print(volume["x"].check().num_intact)
"""


def test_a_disk_that_is_full_is_told_and_no_part_of_the_write_looks_whole(path: Path) -> None:
    done = forked.run([sys.executable, "-c", FULL, str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    told, flush, whole = done.stdout.splitlines()
    assert told.startswith("told ")
    assert "since the last flush failed" in flush
    assert whole == "0"


KILLED = """
import os, random, signal, sys, time, torch
from torchstorm.storage.layout import Kind
from torchstorm.storage.volume import Volume

path, turns = sys.argv[1], int(sys.argv[2])
random.seed(0)
record = lambda turn, index: torch.full((3000,), (turn * 64 + index) % 2**31, dtype=torch.int32)
kinds = {"x": Kind(dtype=torch.int32, shape=(3000,), length=64)}
num_flushed = num_cut = 0
for turn in range(turns):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        with Volume.create(path, kinds=kinds, replace=True) as volume:
            os.write(write, bytes([255]))
            for index in range(64):
                volume["x"].write_async(index, record(turn, index))
                if index % 4 == 3:
                    volume.flush()
                    os.write(write, bytes([index]))
        os._exit(0)
    os.close(write)
    os.read(read, 1)
    time.sleep(random.random() * 0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    reports = b"".join(iter(lambda: os.read(read, 64), b""))
    os.close(read)
    flushed = max(reports, default=-1) + 1
    with Volume.open(path) as volume:
        found = volume["x"].check()
        missing = {*found.unwritten, *found.damaged}
        assert not missing & set(range(flushed)), (turn, flushed, found)
        for index in range(64):
            if index not in missing:
                assert torch.equal(volume["x"][index], record(turn, index)), (turn, index)
    num_flushed += flushed
    num_cut += flushed < 64
print(num_flushed, num_cut)
"""


def test_a_writer_killed_a_hundred_times_leaves_every_flushed_record_whole_and_no_other_wrong(path: Path) -> None:
    done = forked.run(
        [sys.executable, "-W", "ignore", "-c", KILLED, str(path), "100"], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    num_flushed, num_cut = map(int, done.stdout.split())
    assert num_flushed > 0
    assert num_cut > 10, "hardly any was killed before it was done"
