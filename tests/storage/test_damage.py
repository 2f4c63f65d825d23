"""Whatever changes in a volume's file is told, or is padding: no record is ever handed out other than it was."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torchstorm.errors import CorruptionError, StorageError
from torchstorm.storage.layout import Kind
from torchstorm.storage.volume import Volume

KINDS = {"a": Kind(dtype=torch.int32, shape=(175,), length=12), "b": Kind(dtype=torch.int64, length=9)}
NUM_WRITTEN = {"a": 10, "b": 9}
SIZE = 8 * 4096


def records(name: str) -> torch.Tensor:
    kind = KINDS[name]
    return torch.arange(kind.nbytes // kind.dtype.itemsize, dtype=kind.dtype).view(kind.length, *kind.shape) * 7919


@cache
def whole(folder: Path) -> bytes:
    path = folder / "whole"
    with Volume.create(path, kinds=KINDS) as volume:
        for name, count in NUM_WRITTEN.items():
            volume[name].write(0, records(name)[:count])
        volume.flush()
    return path.read_bytes()


def look(path: Path, content: bytes) -> int:
    """Opens and reads all there is; how many records were told, -1 where the volume was. It fails on a wrong one."""
    path.write_bytes(content)
    try:
        volume = Volume.open(path, read_only=True)
    except StorageError:
        return -1
    with volume:
        assert list(volume) == list(KINDS)
        num_told = 0
        for name in KINDS:
            told = set()
            for index in range(len(volume[name])):
                try:
                    assert torch.equal(volume[name][index], records(name)[index]), (name, index)
                except CorruptionError:
                    told.add(index)
                except StorageError:
                    assert len(content) < SIZE
                    told.add(index)
            condition = volume[name].check()
            assert told == {*condition.unwritten, *condition.damaged}
            num_told += len(told - {*range(NUM_WRITTEN[name], len(volume[name]))})
        return num_told


@cache
def told_at(folder: Path) -> bytes:
    """For each byte of the file, what `look` finds where it changes: 255 the volume, 1 a record, 0 nothing."""
    content = whole(folder)
    told = bytearray(len(content))
    told[:36] = b"\xff" * 36  # the header
    table_bytes = int.from_bytes(content[16:24], "little")
    told[4096 : 4096 + table_bytes] = b"\xff" * table_bytes
    with Volume.open(folder / "whole", read_only=True) as volume:
        for name, count in NUM_WRITTEN.items():
            kind = volume[name].kind
            for start, size in ((kind.start_bytes, kind.record_bytes), (kind.checks_bytes, 8)):
                assert start is not None
                told[start : start + size * count] = b"\1" * (size * count)
    return bytes(told)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damage")


@settings(max_examples=150, deadline=None)
@given(bit=st.integers(0, 8 * SIZE - 1))
@example(bit=0)
@example(bit=8 * 4096 + 3)
@pytest.mark.no_cover
def test_a_flipped_bit_anywhere_is_told_or_is_padding(bit: int, folder: Path) -> None:
    content = bytearray(whole(folder))
    assert len(content) == SIZE
    content[bit // 8] ^= 1 << bit % 8
    assert look(folder / "flipped", bytes(content)) % 256 == told_at(folder)[bit // 8]


@settings(max_examples=60, deadline=None)
@given(sector=st.integers(0, SIZE // 512 - 1), kind=st.sampled_from(["zeros", "ones", "another", "noise"]))
@pytest.mark.no_cover
def test_a_sector_that_was_lost_or_came_from_elsewhere_is_told_or_is_padding(
    sector: int, kind: str, folder: Path
) -> None:
    content = bytearray(whole(folder))
    start = 512 * sector
    before = content[start : start + 512]
    other = 512 * ((sector + 8) % (SIZE // 512))
    noise = torch.randint(0, 256, (512,), dtype=torch.uint8).numpy().tobytes()
    content[start : start + 512] = {
        "zeros": bytes(512),
        "ones": b"\xff" * 512,
        "another": bytes(content[other : other + 512]),
        "noise": noise,
    }[kind]
    num_told = look(folder / "sector", bytes(content))
    assert (num_told != 0) == any(told_at(folder)[start + at] for at in range(512) if before[at] != content[start + at])


@settings(max_examples=60, deadline=None)
@given(nbytes=st.integers(0, SIZE - 1))
def test_a_file_cut_off_anywhere_is_told_when_it_is_opened_and_while_it_is_open(nbytes: int, folder: Path) -> None:
    assert look(folder / "cut", whole(folder)[:nbytes]) == -1
    path = folder / "cut"
    path.write_bytes(whole(folder))
    with Volume.open(path) as volume:
        with path.open("r+b") as file:
            file.truncate(nbytes)
        for name, count in NUM_WRITTEN.items():
            kind = volume[name].kind
            assert kind.start_bytes is not None
            assert kind.checks_bytes is not None
            for index in range(count):
                is_there = nbytes >= kind.checks_bytes + 8 * index + 8
                if is_there:
                    assert torch.equal(volume[name][index], records(name)[index])
                else:
                    with pytest.raises(StorageError, match=r"^kind '.' of |^records? .* is too short"):
                        volume[name][index]
