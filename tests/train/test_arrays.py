"""train/arrays.py: .npy files read in pieces, to the byte, or refused with the reason."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchstorm.errors import DataError
from torchstorm.storage.layout import DTYPES
from torchstorm.train.arrays import ArrayFile

DTYPE_NAMES = sorted(name for name in DTYPES if name != "bfloat16" and not name.startswith("float8"))  # numpy's, too


def saved(path: Path, array: Any) -> Path:
    np.save(path, array)
    return path


def read(path: Path, most: int) -> np.ndarray[Any, Any]:
    return torch.cat(list(ArrayFile.of(path).pieces(most))).numpy()


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("order", ["<", ">"])
def test_every_dtype_comes_back_in_either_byte_order(tmp_path: Path, dtype: str, order: str) -> None:
    numbers = np.random.default_rng(0).integers(0, 256, (11, 3 * np.dtype(dtype).itemsize), dtype=np.uint8)
    native = (numbers % 2).astype(np.bool_) if dtype == "bool" else numbers.view(dtype)
    path = saved(tmp_path / "a.npy", native.astype(native.dtype.newbyteorder(order)))
    assert ArrayFile.of(path).record_dtype == DTYPES[dtype]
    assert read(path, 4).tobytes() == native.tobytes()


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple),
    most=st.integers(1, 7),
    order=st.sampled_from("CF"),
    swapped=st.booleans(),
)
def test_any_shape_comes_back_in_either_order_and_pieces_of_any_size(
    tmp_path_factory: pytest.TempPathFactory, shape: tuple[int, ...], most: int, order: Any, swapped: bool
) -> None:
    array = np.arange(np.prod(shape), dtype=">i4" if swapped else "<i4").reshape(shape)
    path = saved(tmp_path_factory.mktemp("npy") / "a.npy", np.asarray(array, order=order))
    pieces = list(ArrayFile.of(path).pieces(most))
    assert {len(piece) for piece in pieces[:-1]} <= {most}
    assert all(piece.shape[1:] == shape[1:] for piece in pieces)
    assert np.array_equal(torch.cat(pieces).numpy(), array)


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.float32(3), r"a.npy is a single number .* save array\[None\]"),
        (np.zeros((0, 3)), r"empty array of shape \(0, 3\): leave it out"),
        (np.zeros((4, 0)), r"empty array of shape \(4, 0\)"),
        (np.array(["storm", "é"]), r"dtype <U5, but records support uint8, .*: pack texts as text files"),
        (np.array([b"a"]), r"dtype \|S1, but .* save array.view\('uint8'\)"),
        (
            np.zeros(2, dtype=[("x", "i4"), ("é", "f4")]),
            r"dtype \[\('x', '<i4'\).* save each field as a separate array",
        ),
        (np.array([{}, 3], dtype=object), r"dtype object, but .*: save an array of numbers"),
        (np.zeros(2, dtype="datetime64[s]"), r"dtype datetime64\[s\], but .* save array.view\('int64'\)"),
        (np.zeros(2, dtype=np.longdouble), r"dtype float128, but .*: save it as one of these"),
    ],
)
def test_what_has_no_records_is_refused_with_the_way_out(tmp_path: Path, array: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        ArrayFile.of(saved(tmp_path / "a.npy", array))


def test_what_is_no_npy_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    for content in (b"", b"just text", b"\x93NUMPY\x01\x00\x10\x00{}"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"a.npy is not a .npy file: .* Write it with np.save"):
            ArrayFile.of(path)
    with open(path, "wb") as file:
        np.savez(file, a=np.zeros(3))
    with pytest.raises(DataError, match=r"is not a .npy file: the magic string is not correct"):
        ArrayFile.of(path)
    with pytest.raises(DataError, match=r"b.npy cannot be read: No such file"):
        ArrayFile.of(tmp_path / "b.npy")


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_file_that_is_cut_off_is_refused_at_its_head_and_told_while_it_is_read(tmp_path: Path, order: Any) -> None:
    path = saved(tmp_path / "a.npy", np.ones((1000, 7), dtype=np.int64, order=order))
    pieces = ArrayFile.of(path).pieces(100)
    next(pieces)
    os.truncate(path, 40_000)
    said = "ends at byte 40000, but its array of 1000 records of 56 bytes would end at 56128: it is truncated"
    with pytest.raises(DataError, match=said):
        list(pieces)
    with pytest.raises(DataError, match=said):
        ArrayFile.of(path)


def test_a_file_that_has_gone_is_reported(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.npy", np.ones(3))
    file = ArrayFile.of(path)
    path.unlink()
    with pytest.raises(DataError, match=r"a.npy cannot be read: No such file"):
        list(file.pieces(2))
