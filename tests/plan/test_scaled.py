"""What follows from sizes: numbers that obey a law are foreseen exactly, or not at all."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plan.traces import trace_of
from torchstorm.plan.packing import Buffers, Packing
from torchstorm.plan.scaled import Known, Law, UnknownLawError, scaled
from torchstorm.plan.trace import HostCost, SavedStorage, Trace

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


GIB = 2**30


def on_a_gpu(tokens: int, *, other_gib: int, idle_s: float = 0.0, base_gib: int = 0) -> Known:
    """A step on a GPU that saves one storage; its forward takes 2 ms for 8 tokens."""
    storage = SavedStorage(nbytes=GIB * tokens, made=1, owned=1, needed=2, freed=3, parcel=0, block="")
    trace = trace_of("p0 u0", [storage], seconds=[tokens / 8e3, tokens / 8e3, tokens / 2e3], device="cuda")
    moments = tuple(replace(one, other_bytes=(other_gib + base_gib) * GIB) for one in trace.moments)
    host = HostCost(record_s=1e-5, move_s=1e-4, idle_s=idle_s)
    blocks_s = (("h.0", tokens / 16e3),)
    return Known((tokens,), replace(trace, moments=moments, base_bytes=base_gib * GIB, host=host, blocks_s=blocks_s))


def told(known: list[Known], tokens: int) -> Trace:
    buffers = Buffers(
        least_moved_bytes=0, small_bytes=100, shared_bytes=200, least_left_bytes=10, padded=lambda nbytes: nbytes
    )
    found = scaled(known, (tokens,), buffers)
    assert found is not None
    assert found.saved_bytes == tokens * GIB
    assert found.blocks_s == (("h.0", pytest.approx(tokens / 16e3)),)
    return found


@pytest.mark.parametrize(
    ("tokens", "other_gib"),
    [(24, 54), (16, 30), (14, 24), (12, 18), (10, 12), (8, 6), (4, 6)],
    ids=["larger", "largest", "between", "middle", "between the others", "smallest", "smaller"],
)
def test_what_the_model_takes_is_drawn_out_of_the_nearest_two_and_never_below_the_smallest(
    tokens: int, other_gib: int
) -> None:
    known = [on_a_gpu(8, other_gib=6, base_gib=3), on_a_gpu(16, other_gib=30), on_a_gpu(12, other_gib=18, base_gib=1)]
    assert {one.other_bytes for one in told(known, tokens).moments} == {other_gib * GIB}


@pytest.mark.parametrize(("tokens", "other_gib"), [(24, 6), (16, 6), (12, 8), (8, 10), (4, 10)])
def test_a_larger_step_takes_no_less_where_a_smaller_one_has_compiled_something(tokens: int, other_gib: int) -> None:
    known = [on_a_gpu(8, other_gib=10), on_a_gpu(16, other_gib=6)]
    assert {one.other_bytes for one in told(known, tokens).moments} == {other_gib * GIB}


@pytest.mark.parametrize(
    ("tokens", "idle_s", "forward_ms", "left_ms"),
    [(16, 3e-3, 4.0, 3.0), (8, 3e-3, 2.0, 1.0), (4, 3e-3, 1.0, 0.0), (2, 3e-3, 1.0, 0.0), (8, 0.0, 4.0, 0.0)],
    ids=["as seen", "half", "just in time", "late", "late as it was"],
)
def test_a_smaller_step_takes_the_host_of_a_gpu_as_long(
    tokens: int, idle_s: float, forward_ms: float, left_ms: float
) -> None:
    trace = told([on_a_gpu(16, other_gib=1, idle_s=idle_s), on_a_gpu(1, other_gib=1)], tokens)
    assert sum(one.compute_s for one in trace.moments[: trace.turn]) == pytest.approx(forward_ms / 1e3)
    assert trace.host.idle_s == pytest.approx(left_ms / 1e3)
    assert trace.moments[trace.turn].compute_s == pytest.approx(tokens / 2e3)
