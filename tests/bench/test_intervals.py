"""Busy and overlap: arithmetic of intervals."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchstorm.bench.intervals import length, overlap, union

END = 40
intervals = st.lists(
    st.tuples(st.integers(0, END), st.integers(0, END)).map(lambda pair: (min(pair), max(pair))), max_size=12
)


def ticks(spans: list[tuple[int, int]]) -> set[int]:
    """The whole units of time that some interval covers."""
    return {tick for start, stop in spans for tick in range(start, stop)}


@settings(max_examples=300, deadline=None)
@given(copies=intervals, kernels=intervals)
@pytest.mark.no_cover
def test_overlap_is_the_share_of_copied_ticks_with_a_kernel(
    copies: list[tuple[int, int]], kernels: list[tuple[int, int]]
) -> None:
    copied, busy = ticks(copies), ticks(kernels)
    found = overlap(copies, kernels)
    if not copied:
        assert found is None
    else:
        assert found == pytest.approx(len(copied & busy) / len(copied))


@settings(max_examples=200, deadline=None)
@given(spans=intervals)
def test_a_union_is_sorted_apart_and_covers_the_same(spans: list[tuple[int, int]]) -> None:
    merged = union(spans)
    assert all(stop < start for (_, stop), (start, _) in itertools.pairwise(merged))
    assert ticks([(int(start), int(stop)) for start, stop in merged]) == ticks(spans)
    assert length(spans) == len(ticks(spans))


def test_overlap_by_hand() -> None:
    # Copies cover 0..10 and 20..30; kernels 5..8, 9..22 and 29..40: 3 + 1 + 2 + 1 of 20.
    assert overlap([(20, 30), (0, 10), (2, 4)], [(9, 22), (5, 8), (29, 40)]) == pytest.approx(7 / 20)
    assert overlap([], [(0, 1)]) is None
    assert overlap([(3, 3)], [(0, 9)]) is None
    assert overlap([(0, 1)], []) == 0.0
