"""Fingerprints see every bit; relative errors are those of all tensors together."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchstorm.bench.bits import differences, fingerprints, relative_error
from torchstorm.offload.recompute.fingerprint import fingerprint

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


@pytest.mark.no_cover
@settings(max_examples=200, deadline=None)
@given(
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    numel=st.sampled_from([2, 9, 64, 513, 5 * 2048 + 11]),
    places=st.sets(st.integers(0, 10**6), min_size=1, max_size=4),
)
def test_numbers_that_change_their_signs_are_seen_however_many_they_are(
    dtype: torch.dtype, numel: int, places: set[int]
) -> None:
    one = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(dtype)
    other = one.clone()
    for place in {place % numel for place in places}:
        other[place] *= -1
    assert fingerprints({"x": one}) != fingerprints({"x": other})
    assert fingerprints({"x": one}) != fingerprints({"x": -one})
    zeros = torch.zeros(numel, dtype=dtype)
    assert fingerprints({"x": zeros}) != fingerprints({"x": -zeros})


@settings(max_examples=100, deadline=None)
@given(numel=st.integers(2, 3000), pair=st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)))
def test_a_number_and_its_negative_that_change_places_are_seen(numel: int, pair: tuple[int, int]) -> None:
    first, second = (place % numel for place in pair)
    one = torch.zeros(numel, dtype=torch.float64)
    one[first], one[second] = 3.0, -3.0
    other = one.clone()
    other[first], other[second] = one[second].clone(), one[first].clone()
    assert (fingerprints({"x": one}) != fingerprints({"x": other})) == (first != second)


@pytest.mark.parametrize("offset", range(16))
@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 511, 512, 4096, 5000])
def test_bytes_have_a_fingerprint_wherever_they_begin(offset: int, nbytes: int) -> None:
    row = torch.arange(offset + nbytes).to(torch.uint8)[offset:]
    assert torch.equal(fingerprint(row), fingerprint(row.clone()))
    for place in {0, nbytes // 2, nbytes - 1} & set(range(nbytes)):
        other = row.clone()
        other[place] += 1
        assert not torch.equal(fingerprint(row), fingerprint(other))


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
