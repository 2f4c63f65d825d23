"""Records from all over a kind, read at once: each to its own row, each held against its check."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchstorm.errors import ConfigError, CorruptionError, StorageError
from torchstorm.storage.direct import DirectFile
from torchstorm.storage.layout import Kind
from torchstorm.storage.volume import Volume


@settings(max_examples=50, deadline=None)
@given(
    size=st.integers(1, 3 * 4096),
    offsets=st.lists(st.integers(0, 20 * 4096), max_size=20),
    direct=st.booleans(),
)
def test_every_row_is_what_the_file_has_at_its_offset(
    size: int, offsets: list[int], direct: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("rows") / "file"
    plain = torch.randint(256, (24 * 4096,), dtype=torch.uint8).numpy().tobytes()
    path.write_bytes(plain)
    out = torch.zeros(len(offsets), size, dtype=torch.uint8)
    seen: dict[int, bytes] = {}
    file = DirectFile(path, block_bytes=4096, direct=direct)  # so that some rows take several blocks
    try:
        file.read_rows_async(out, offsets, on_row=lambda row, data: seen.update({row: bytes(data)})).wait()
    finally:
        file.close()
    expected = {row: plain[offset : offset + size] for row, offset in enumerate(offsets)}
    assert {row: out[row].numpy().tobytes() for row in range(len(offsets))} == expected
    assert seen == expected


def test_a_row_beyond_the_end_or_before_the_start_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(100))
    file = DirectFile(tmp_path / "file")
    with pytest.raises(StorageError, match="is too short"):
        file.read_rows_async(torch.empty(3, 10), [0, 10, 90]).wait()
    with pytest.raises(StorageError, match="offset -1"):
        file.read_rows_async(torch.empty(2, 1), [0, -1])
    file.close()


def make(path: Path, *, checks: bool = True) -> Volume:
    volume = Volume.create(path, {"x": Kind(dtype=torch.int64, shape=(3,), length=5000)}, checks=checks)
    volume["x"].write(0, torch.arange(5000).view(-1, 1).expand(-1, 3).contiguous())
    return volume


@pytest.mark.parametrize("numbers", [[], [7], [4999, 0, 17, 17], list(range(100, 200)), [0, 4999]])
@pytest.mark.parametrize("checks", [True, False])
def test_records_of_any_numbers_come_to_their_rows(numbers: list[int], checks: bool, tmp_path: Path) -> None:
    with make(tmp_path / "v", checks=checks) as volume:
        for verify in (True, False):
            out = torch.empty(len(numbers), 3, dtype=torch.int64)
            volume["x"].read_rows_async(numbers, out, verify=verify).wait()
            assert out[:, 0].tolist() == numbers


def test_the_record_that_was_changed_or_never_written_is_named(tmp_path: Path) -> None:
    with make(tmp_path / "v") as volume:
        start = volume["x"].kind.start_bytes
        assert start is not None
        with open(volume.path, "r+b") as file:
            file.seek(start + 24 * 4321)
            file.write(b"\xee")
        for numbers in ([4321, 0], [4320, 4321, 4322], [4321] * 3):  # checks read one by one, and together
            with pytest.raises(CorruptionError, match="record 4321 is not what was written"):
                volume["x"].read_rows_async(numbers, torch.empty(len(numbers), 3, dtype=torch.int64)).wait()
    with Volume.create(tmp_path / "w", {"x": Kind(dtype=torch.int64, length=9)}) as volume:
        volume["x"].write(0, torch.arange(4))
        with pytest.raises(CorruptionError, match="record 6 was never written"):
            volume["x"].read_rows_async([1, 6, 2], torch.empty(3, dtype=torch.int64)).wait()


def test_what_is_not_there_or_does_not_fit_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with make(tmp_path / "v") as volume:
        records = volume["x"]
        for numbers, out, said in (
            ([0, 5000], torch.empty(2, 3, dtype=torch.int64), "records 5000 to 5000"),
            ([0, -1], torch.empty(2, 3, dtype=torch.int64), "records -1 to -1"),
            ([0, 1], torch.empty(3, 3, dtype=torch.int64), "2 records need"),
            ([0, 1], torch.empty(2, 3), "float32"),
            ([0, 1], torch.empty(2, 6, dtype=torch.int64)[:, ::2], "contiguous"),
        ):
            with pytest.raises(ConfigError, match=said):
                records.read_rows_async(numbers, out)
