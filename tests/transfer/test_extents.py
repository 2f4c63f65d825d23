"""Extents beside a model that marks every unit of the space as free or taken."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from torchstorm.transfer.extents import Extents

UNIT = 64


def holes(taken: list[bool]) -> list[tuple[int, int]]:
    """Runs of free units: (start, length)."""
    found = []
    for index, busy in enumerate([*taken, True]):
        if busy:
            continue
        if index == 0 or taken[index - 1]:
            found.append((index, 0))
        found[-1] = (found[-1][0], found[-1][1] + 1)
    return found


@settings(max_examples=200, deadline=None)
@given(
    capacity=st.integers(0, 40 * UNIT),
    calls=st.lists(st.tuples(st.booleans(), st.integers(0, 1000), st.integers(1, 9 * UNIT)), max_size=60),
)
def test_any_calls_do_what_a_map_of_units_says(capacity: int, calls: list[tuple[bool, int, int]]) -> None:
    extents = Extents(capacity, alignment_bytes=UNIT)
    taken = [False] * (capacity // UNIT)
    assert extents.capacity_bytes == len(taken) * UNIT
    held: list[tuple[int, int]] = []
    for allocate, which, nbytes in calls:
        units = -(-nbytes // UNIT)
        if allocate:
            start = extents.allocate(nbytes)
            fitting = [hole for hole in holes(taken) if hole[1] >= units]
            assert (start is None) == (not fitting), "it fits exactly where some hole is large enough"
            if start is not None:
                assert start % UNIT == 0
                first = start // UNIT
                assert first in [begin for begin, _ in fitting]
                assert dict(fitting)[first] == min(length for _, length in fitting), "the best fit"
                assert not any(taken[first : first + units])
                taken[first : first + units] = [True] * units
                held.append((start, nbytes))
        elif held:
            start, nbytes = held.pop(which % len(held))
            extents.free(start, nbytes)
            first = start // UNIT
            units = -(-nbytes // UNIT)
            taken[first : first + units] = [False] * units
        assert extents.used_bytes == sum(taken) * UNIT
        assert extents.largest_free_bytes() == max((length for _, length in holes(taken)), default=0) * UNIT
    for start, nbytes in held:
        extents.free(start, nbytes)
    assert extents.used_bytes == 0
    assert extents.largest_free_bytes() == extents.capacity_bytes, "all of it has joined again"


@settings(max_examples=100, deadline=None)
@given(calls=st.lists(st.tuples(st.booleans(), st.integers(0, 1000), st.sampled_from([0, 0, 1, 5000])), max_size=40))
def test_extents_of_nothing_disturb_nothing(calls: list[tuple[bool, int, int]]) -> None:
    extents = Extents(16 * 4096)
    held: list[tuple[int, int]] = []
    for allocate, which, nbytes in calls:
        if allocate:
            start = extents.allocate(nbytes)
            if start is not None:
                held.append((start, nbytes))
        elif held:
            extents.free(*held.pop(which % len(held)))
        areas = sorted((start, start + extents.rounded(nbytes)) for start, nbytes in held if nbytes)
        assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(areas))
        assert extents.used_bytes == sum(stop - start for start, stop in areas)
    for extent in held:
        extents.free(*extent)
    assert extents.largest_free_bytes() == extents.capacity_bytes == 16 * 4096


def test_sizes_are_rounded_up_to_the_alignment() -> None:
    extents = Extents(3 * 4096 + 4095)
    assert extents.capacity_bytes == 3 * 4096
    assert [extents.rounded(nbytes) for nbytes in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]
    assert extents.allocate(1) == 0
    assert extents.used_bytes == 4096
    assert extents.allocate(8193) is None
    assert extents.allocate(8192) == 4096
    assert extents.allocate(1) is None
    assert extents.largest_free_bytes() == 0


def test_a_freed_extent_joins_both_neighbours() -> None:
    extents = Extents(4 * 10, alignment_bytes=10)
    starts = [extents.allocate(10) for _ in range(4)]
    assert starts == [0, 10, 20, 30]
    extents.free(0, 10)
    extents.free(20, 10)
    assert extents.largest_free_bytes() == 10
    extents.free(10, 10)
    assert extents.largest_free_bytes() == 30
    assert extents.allocate(30) == 0


def test_no_space_at_all() -> None:
    extents = Extents(100)
    assert extents.capacity_bytes == 0
    assert extents.allocate(1) is None
    assert extents.largest_free_bytes() == 0
