"""The operators read what is in the file, eagerly and compiled."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchstorm.errors import ConfigError, StorageError
from torchstorm.offload.recompute.operators import operator
from torchstorm.offload.session import Session
from torchstorm.storage import ops

CPU = torch.device("cpu")
BYTES = torch.randint(0, 256, (40_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("ops") / "bytes"
    file.write_bytes(BYTES.numpy().tobytes())
    return str(file)


@settings(max_examples=80, deadline=None)
@given(
    offset=st.integers(0, 26_000),
    shape=st.lists(st.integers(0, 12), max_size=3),
    dtype=st.sampled_from([torch.uint8, torch.int16, torch.bfloat16, torch.int32, torch.float64]),
)
def test_a_tensor_is_the_files_bytes_at_any_offset(
    path: str, offset: int, shape: list[int], dtype: torch.dtype
) -> None:
    found = torch.ops.torchstorm.read_tensor(path, offset, shape, dtype, CPU)
    assert (list(found.shape), found.dtype) == (shape, dtype)
    expected = BYTES[offset : offset + found.nbytes]
    assert found.flatten().view(torch.uint8).tolist() == expected.tolist()
    into = torch.zeros(*shape[::-1], dtype=dtype).permute(*range(len(shape))[::-1]) if shape else torch.zeros(1)[0]
    into = into.to(dtype)
    torch.ops.torchstorm.read_into_tensor(into, path, offset)
    assert into.contiguous().flatten().view(torch.uint8).tolist() == expected.tolist()


def test_both_pass_opcheck(path: str) -> None:
    torch.library.opcheck(ops.read_tensor, (path, 3, [4, 5], torch.int32, CPU))
    torch.library.opcheck(ops.read_into_tensor, (torch.zeros(4, 5), path, 3))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.no_cover
def test_compiled_they_stay_in_the_graph(path: str) -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def add(x: torch.Tensor, offset: int) -> torch.Tensor:
        read = torch.ops.torchstorm.read_tensor(path, offset, [8], torch.int32, CPU)
        other = torch.empty_like(x)
        torch.ops.torchstorm.read_into_tensor(other, path, offset)
        return x + read + other

    x = torch.arange(8, dtype=torch.int32)
    for offset in (0, 7):
        words = BYTES[offset : offset + 32].clone().view(torch.int32)
        assert torch.equal(add(x, offset), x + 2 * words)


def test_what_cannot_be_read_is_told_and_the_tensor_stays(path: str, tmp_path: Path) -> None:
    tensor = torch.full((8,), 7, dtype=torch.uint8)
    with pytest.raises(StorageError, match="is too short"):
        torch.ops.torchstorm.read_into_tensor(tensor, path, 39_996)
    assert tensor.tolist() == [7] * 8
    with pytest.raises(StorageError, match="cannot be opened: No such file"):
        torch.ops.torchstorm.read_tensor(str(tmp_path / "nowhere"), 0, [1], torch.uint8, CPU)
    with pytest.raises(ConfigError, match="negative"):
        torch.ops.torchstorm.read_tensor(path, -1, [1], torch.uint8, CPU)
    with pytest.raises(ConfigError, match="negative"):
        torch.ops.torchstorm.read_into_tensor(tensor, path, -1)


def test_a_path_that_comes_to_mean_another_file_is_read_anew(tmp_path: Path) -> None:
    file = tmp_path / "a"
    for value in (1, 2):
        (tmp_path / "new").write_bytes(bytes([value]) * 8)
        (tmp_path / "new").replace(file)
        assert torch.ops.torchstorm.read_tensor(str(file), 0, [8], torch.uint8, CPU).tolist() == [value] * 8


def test_many_files_do_not_all_stay_open(tmp_path: Path) -> None:
    def num_open() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before = num_open()
    for index in range(60):
        (tmp_path / str(index)).write_bytes(bytes([index]) * 4)
        found = torch.ops.torchstorm.read_tensor(str(tmp_path / str(index)), 0, [4], torch.uint8, CPU)
        assert found.tolist() == [index] * 4
    assert num_open() <= before + 2 * 16


def test_a_step_that_reads_a_file_is_not_recomputed_by_reading_it_again(tmp_path: Path) -> None:
    """The file may have changed by then."""
    file = tmp_path / "noise"
    model = torch.nn.ParameterList([torch.rand(1)])
    with Session(model, ram="96KiB") as session:
        for turn in range(4):
            noise = torch.randn(4096)
            file.write_bytes(noise.numpy().tobytes())
            model.zero_grad()
            with session.step():
                read = torch.ops.torchstorm.read_tensor(str(file), 0, [4096], torch.float32, CPU)
                x = torch.tanh(torch.tanh(read * model[0]))
                file.write_bytes(bytes(4 * 4096))
                x.sum().backward()
            expected = model[0].detach().clone().requires_grad_()
            torch.tanh(torch.tanh(noise * expected)).sum().backward()
            assert torch.equal(model[0].grad, expected.grad), turn
    assert not operator(torch.ops.torchstorm.read_tensor.default).repeatable
