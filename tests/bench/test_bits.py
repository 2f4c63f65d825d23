"""Fingerprints see every bit; relative errors are those of all tensors together."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchstorm.bench.bits import differences, fingerprints, relative_error

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int8, torch.bool]


@settings(max_examples=100, deadline=None)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    numel=st.integers(1, 70),
    where=st.integers(0, 10**6),
    bit=st.integers(0, 15),
)
def test_one_flipped_bit_is_seen(dtype: torch.dtype, numel: int, where: int, bit: int) -> None:
    one = torch.randn(numel).to(dtype)
    other = one.clone()
    words = other.view(torch.int16)
    words[where % words.numel()] ^= -(2**15) if bit == 15 else 2**bit
    assert differences(fingerprints({"x": one}), fingerprints({"x": one.clone()})) == []
    assert differences(fingerprints({"x": one}), fingerprints({"x": other})) == ["x"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type_has_a_fingerprint_of_its_places(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).to(dtype).reshape(2, 3)
    tensor[0, 0] = 1
    swapped = tensor.clone()
    swapped[0, 1], swapped[1, 0] = tensor[1, 0].clone(), tensor[0, 1].clone()
    assert fingerprints({"x": tensor.t()}) == fingerprints({"x": tensor.t().contiguous()})
    if not torch.equal(tensor, swapped):
        assert fingerprints({"x": tensor}) != fingerprints({"x": swapped})


def test_rows_and_words_that_changed_places_are_told_apart() -> None:
    tensor = torch.randn(5 * 2048 + 11)
    rows = torch.cat([tensor[2048:4096], tensor[:2048], tensor[4096:]])
    words = tensor.flip(0)
    prints = [fingerprints({"x": one})["x"] for one in (tensor, rows, words)]
    assert len(set(prints)) == 3


def test_a_negative_zero_is_another_one() -> None:
    assert fingerprints({"x": torch.tensor([0.0, 1.0])}) != fingerprints({"x": torch.tensor([-0.0, 1.0])})


def test_what_is_missing_differs() -> None:
    found = fingerprints({"a": torch.ones(2), "b": None, "c": torch.ones(())})
    assert found["b"] is None
    assert differences(found, dict(found)) == []
    assert differences(found, {**found, "a": None}) == ["a"]
    assert differences(found, {"a": found["a"], "c": found["c"]}) == ["b"]
    assert differences({}, found) == ["a", "b", "c"]
    assert fingerprints({"b": None}) == {"b": None}


def test_a_relative_error_is_of_all_tensors_together() -> None:
    expected = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])}
    assert relative_error(expected, dict(expected)) == 0
    assert relative_error(expected, {"a": torch.tensor([3.0, 0.5]), "b": torch.tensor([4.0])}) == pytest.approx(0.1)
    assert relative_error(expected, {"a": expected["a"], "b": None}) == math.inf
    assert relative_error(expected, {"a": expected["a"]}) == math.inf
    zeros = {"a": torch.zeros(2)}
    assert relative_error(zeros, zeros) == 0
    assert relative_error(zeros, {"a": torch.ones(2)}) == math.inf
