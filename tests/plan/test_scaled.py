"""What follows from sizes: numbers that obey a law are foreseen exactly, or not at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchstorm.plan.packing import Buffers, Packing
from torchstorm.plan.scaled import Law, UnknownLawError

sizes = st.tuples(st.integers(1, 64), st.integers(9, 4096))


@given(
    seen=st.lists(sizes, min_size=2, max_size=4, unique=True),
    now=sizes,
    powers=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    constant=st.integers(0, 4096),
)
def test_a_product_of_powers_of_sizes_is_foreseen_or_not_told(
    seen: list[tuple[int, int]], now: tuple[int, int], powers: tuple[int, int], constant: int
) -> None:
    def number(each: tuple[int, int]) -> int:
        return constant * each[0] ** powers[0] * each[1] ** powers[1]

    try:
        found = Law(seen, now).numbers([number(each)] for each in seen)
    except UnknownLawError:
        return
    assert found == (number(now),)


@given(
    lengths=st.lists(st.integers(9, 4096), min_size=2, max_size=4, unique=True),
    now=st.integers(9, 4096),
    more=st.integers(-8, 8),
    constant=st.integers(1, 4096),
)
def test_a_few_more_than_a_size_are_foreseen(lengths: list[int], now: int, more: int, constant: int) -> None:
    law = Law([(length,) for length in lengths], (now,))
    assert law.numbers([constant * (length + more)] for length in lengths) == (constant * (now + more),)


@given(
    seen=st.lists(sizes, min_size=3, max_size=4, unique=True),
    now=sizes,
    more=st.integers(-8, 8),
    power=st.integers(0, 2),
)
def test_a_few_more_than_one_of_two_sizes_are_foreseen_or_not_told(
    seen: list[tuple[int, int]], now: tuple[int, int], more: int, power: int
) -> None:
    def number(each: tuple[int, int]) -> int:
        return 4 * each[0] ** power * (each[1] + more)

    try:
        found = Law(seen, now).numbers([number(each)] for each in seen)
    except UnknownLawError:
        return
    assert found == (number(now),)


def test_chunks_are_not_foreseen_from_two_lengths() -> None:
    with pytest.raises(UnknownLawError):
        Law([(24,), (32,)], (48,)).numbers([[16], [25]])  # (length / 8 + 1) ** 2, and a line through both


def test_a_size_that_never_changed_tells_nothing() -> None:
    with pytest.raises(UnknownLawError):
        Law([(2, 24), (2, 32)], (4, 24))


def test_sizes_that_change_together_are_one() -> None:
    assert Law([(2, 24, 24), (2, 32, 32)], (2, 48, 48)).numbers([[24 * 24], [32 * 32]]) == (48 * 48,)


def test_small_storages_share_buffers_until_those_are_full_or_used() -> None:
    buffers = Buffers(
        least_moved_bytes=0, small_bytes=100, shared_bytes=200, least_left_bytes=10, padded=lambda nbytes: nbytes + 1
    )
    packing = Packing(buffers)
    assert [packing.parcel_for(nbytes) for nbytes in (90, 100, 90, 90, 99, 3, 5)] == [0, 1, 0, 2, 2, 3, 3]
    assert packing.parcel_bytes == [182, 100, 191, 10]
    packing.close()
    assert packing.parcel_for(1) == 4
