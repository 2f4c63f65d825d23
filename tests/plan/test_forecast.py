"""Bytes per interval and seconds per step, against cases worked out by hand and against a naive simulation."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan import naive
from plan.traces import machines, trace_of, traces
from torchstorm.plan.forecast import (
    Placement,
    channel_speed,
    fast_profile,
    forecast_s,
    held_before_profile,
    hops,
    other_profile,
    tier_peak,
)
from torchstorm.plan.machine import Machine
from torchstorm.plan.recompute import can_recompute
from torchstorm.plan.trace import HostCost, Op, SavedStorage, Trace, Value

KEEP = Placement(tier="keep")
# 10 bytes a second to the disk, 20 from it; 40 off the GPU, 80 back to it.
SLOW = Machine(
    name="slow",
    d2h_bytes_per_s=40.0,
    h2d_bytes_per_s=80.0,
    disk_write_bytes_per_s=10.0,
    disk_read_bytes_per_s=20.0,
)


def storage(nbytes: int, made: int, needed: int, freed: int, parcel: int, *, owned: int | None = None) -> SavedStorage:
    return SavedStorage(
        nbytes=nbytes,
        made=made,
        owned=made if owned is None else owned,
        needed=needed,
        freed=freed,
        parcel=parcel,
        block="",
    )


def two(device: str = "cpu", seconds: tuple[float, ...] = (1.0, 2.0, 3.0, 4.0, 5.0)) -> Trace:
    """Entry, p0 (100 bytes), p1 (60 bytes), u1, u0."""
    return trace_of("p0 p1 u1 u0", [storage(100, 1, 4, 5, 0), storage(60, 2, 3, 4, 1)], seconds=seconds, device=device)


def random_placements(trace: Trace, rng: random.Random) -> list[Placement]:
    """Any valid ones, good or bad. What no backward needs is never fetched."""
    able = can_recompute(trace)
    slower = ["disk"] if trace.device == "cpu" else ["ram", "disk"]
    tiers = [rng.choice(["keep", *slower, *(["recompute"] if can else [])]) for can in able]
    again: dict[int, naive.Again] | None = None
    while again is None:
        try:
            again = naive.computed_again(trace, [Placement(tier=tier) for tier in tiers])
        except naive.Impossible:
            tiers[rng.choice([number for number, tier in enumerate(tiers) if tier == "recompute"])] = "keep"
    found = []
    for number, (parcel, tier) in enumerate(zip(trace.parcels, tiers, strict=True)):
        if tier == "keep":
            found.append(KEEP)
            continue
        if tier == "recompute":
            made = [moment for moment, one in again.items() if number in one.made]
            found.append(Placement(tier=tier, drop=parcel.sealed, fetch=(made or [trace.num_moments])[0]))
            continue
        reads = [moment for moment, one in again.items() if number in one.sources and moment > parcel.sealed]
        needed = min([parcel.needed, *reads])
        drop = rng.randint(parcel.sealed + 1, needed)
        fetch = needed if needed == trace.num_moments else rng.randint(drop, needed)
        found.append(Placement(tier=tier, drop=drop, fetch=fetch))
    return found


@settings(max_examples=120, deadline=None)
@given(trace=traces(), machine=machines(), rng=st.randoms(use_true_random=False))
def test_any_placements_come_to_what_the_naive_simulation_says(
    trace: Trace, machine: Machine, rng: random.Random
) -> None:
    placements = random_placements(trace, rng)
    assert fast_profile(trace, placements).tolist() == naive.fast_bytes(trace, placements)
    again = naive.computed_again(trace, placements)
    assert held_before_profile(trace, placements).tolist() == naive.held_before(trace, placements, again)
    for tier in ("ram", "disk"):
        assert tier_peak(trace, placements, tier) == max(naive.slow_bytes(trace, placements, tier))
    assert forecast_s(trace, placements, machine) == pytest.approx(naive.step_s(trace, placements, machine))
    assert forecast_s(trace, placements, machine) >= trace.compute_s * (1 - 1e-9)
    speeds = {name: 1e15 for name in vars(machine) if name.endswith("per_s")}
    faster, alone = replace(machine, disk_delay_s_per_byte=0.0, **speeds), replace(trace, host=HostCost())
    again_s = sum(one.seconds for one in again.values())
    assert forecast_s(alone, placements, faster) == pytest.approx(trace.compute_s + again_s, abs=1e-6)


def test_what_copies_take_from_the_cores_that_compute_counts_for_every_byte_that_moves() -> None:
    shared = replace(SLOW, disk_delay_s_per_byte=0.25)
    placements = [Placement(tier="disk", drop=4, fetch=4), KEEP]
    assert forecast_s(two(), placements, shared) == forecast_s(two(), placements, SLOW) + 0.25 * two().parcels[0].nbytes
    assert forecast_s(two(), [KEEP, KEEP], shared) == 15.0


@pytest.mark.parametrize(("idle_s", "longer_s"), [(0.0, 3.0), (2.0, 1.0), (9.0, 0.3)])
def test_what_a_plan_takes_the_host_of_a_gpu_counts_in_part_where_that_has_time_to_spare(
    idle_s: float, longer_s: float
) -> None:
    trace = two("cuda")
    placements = [Placement(tier="ram", drop=4, fetch=4), KEEP]
    link = replace(SLOW, d2h_bytes_per_s=1e9, h2d_bytes_per_s=1e9)
    busy = replace(trace, host=HostCost(move_s=3.0, idle_s=idle_s))
    assert forecast_s(busy, placements, link) == pytest.approx(forecast_s(trace, placements, link) + longer_s)


def test_what_is_kept_costs_its_compute_only() -> None:
    assert forecast_s(two(), [KEEP, KEEP], SLOW) == 15.0
    assert forecast_s(two(), [KEEP, KEEP], Machine(name="no tier at all")) == 15.0


def test_a_copy_out_and_back_hides_behind_compute() -> None:
    # 0: 1 s. p0 at 1 s: 100 bytes out take 10 s, until 11 s. 1: until 3 s. p1 at 3 s. 2: until 6 s. u1 at 6 s.
    # 3: until 10 s. u0 at 10 s: dropped and fetched here, so it waits for the copy out (11 s), then 5 s back: 16 s.
    # 4: until 21 s.
    assert forecast_s(two(), [Placement(tier="disk", drop=4, fetch=4), KEEP], SLOW) == 21.0
    # With u0 at 30 s and the fetch at u1, all is hidden: u1 at 6 s, but the copy out ends at 11 s, so the drop at u1
    # waits until 11 s; back from 11 s to 16 s; 3: 24 s, until 35 s; u0 has no wait; 4: until 40 s.
    trace = two(seconds=(1.0, 2.0, 3.0, 24.0, 5.0))
    assert forecast_s(trace, [Placement(tier="disk", drop=3, fetch=3), KEEP], SLOW) == 40.0


def test_a_drop_waits_for_the_copy_out() -> None:
    # p0 at 1 s, out until 11 s. p1 would be at 3 s; the drop there waits until 11 s. 2: until 14 s. u1; 3: until 18 s.
    # u0: fetched at 18 s, back at 23 s. 4: until 28 s.
    assert forecast_s(two(), [Placement(tier="disk", drop=2, fetch=4), KEEP], SLOW) == 28.0
    # The same with the fetch at u1, 14 s: back at 19 s, one second late for u0 at 18 s. Until 24 s.
    assert forecast_s(two(), [Placement(tier="disk", drop=2, fetch=3), KEEP], SLOW) == 24.0


def test_copies_in_one_direction_queue_and_both_directions_do_not() -> None:
    # p0 at 1 s: out 1..11 s. p1 at 3 s: out 11..17 s. 2: until 6 s. u1: drop of 0 and 1: waits until 17 s. Parcel 1
    # (60 bytes) comes back 17..20 s, wait; 3: until 24 s. u0: fetched at 24 s, back at 29 s. 4: until 34 s.
    placements = [Placement(tier="disk", drop=3, fetch=4), Placement(tier="disk", drop=3, fetch=3)]
    assert forecast_s(two(), placements, SLOW) == 34.0
    # Fetched together at u1: what is needed there goes first, so 1 is back 17..20 s, 0 20..25 s. 3: until 24 s; u0
    # waits until 25 s. 4: until 30 s.
    placements = [Placement(tier="disk", drop=3, fetch=3), Placement(tier="disk", drop=3, fetch=3)]
    assert forecast_s(two(), placements, SLOW) == 30.0


def test_of_two_fetches_at_one_moment_the_one_needed_first_goes_first() -> None:
    # Both copies out end long before u2 at 100 s, where both are fetched: 1 (60 bytes) until 103 s, when u1 is waited
    # for; 0 (100 bytes) until 108 s, when u0 is.
    trace = trace_of(
        "p0 p1 p2 u2 u1 u0",
        [storage(100, 1, 6, 7, 0), storage(60, 2, 5, 6, 1), storage(8, 3, 4, 5, -1)],
        seconds=[0.0, 0.0, 0.0, 100.0, 0.0, 0.0, 0.0],
    )
    placements = [Placement(tier="disk", drop=4, fetch=4), Placement(tier="disk", drop=4, fetch=4)]
    assert forecast_s(trace, placements, SLOW) == 108.0
    trace = replace(trace, moments=(*trace.moments[:5], replace(trace.moments[5], compute_s=4.0), trace.moments[6]))
    assert forecast_s(trace, placements, SLOW) == 108.0
    trace = replace(trace, moments=(*trace.moments[:5], replace(trace.moments[5], compute_s=6.0), trace.moments[6]))
    assert forecast_s(trace, placements, SLOW) == 109.0


def recomputing(device: str) -> Trace:
    """Storage 0 (100 bytes), 1 (60 bytes) made of it in 0.5 s with 50 bytes of scratch, 2 (40 bytes) made of what
    nobody saved (7 bytes), which is made of 1 in 2 s. Needed in the order 2, 1, 0."""
    trace = trace_of(
        "p0 p1 p2 u2 u1 u0",
        [storage(100, 1, 6, 7, 0), storage(60, 2, 5, 6, 1), storage(40, 3, 4, 5, 2)],
        seconds=[1.0] * 7,
        device=device,
        other_bytes=1000 if device == "cuda" else 0,
    )
    ops = (
        Op(name="norm", compute_s=0.5, scratch_bytes=50 if device == "cuda" else 0, inputs=(0,), outputs=(1,)),
        Op(name="matmul", compute_s=2.0, scratch_bytes=0, inputs=(1,), outputs=(2,)),
        Op(name="add", compute_s=0.25, scratch_bytes=0, inputs=(2,), outputs=(3,)),
    )
    values = (
        Value(nbytes=100, op=-1, storage=0),
        Value(nbytes=60, op=0, storage=1),
        Value(nbytes=7, op=1, storage=-1),
        Value(nbytes=40, op=2, storage=2),
    )
    storages = tuple(replace(one, value=value) for one, value in zip(trace.storages, (0, 1, 3), strict=True))
    moments = tuple(replace(moment, still_bytes=moment.other_bytes) for moment in trace.moments)
    return replace(trace, moments=moments, storages=storages, ops=ops, values=values)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_computed_again_worked_out_by_hand(device: str) -> None:
    trace = recomputing(device)
    others = 1000 if device == "cuda" else 0
    # 2 alone: at u2 the matmul and the add run on 1. On a GPU 7 bytes lie there meanwhile.
    alone = [KEEP, KEEP, Placement(tier="recompute", drop=3, fetch=4)]
    assert forecast_s(trace, alone, SLOW) == 7 + 2.25
    held = [0, 100, 160, 160, 200, 160, 100]
    on_top = [0, 0, 0, 0, 7 if others else 0, 0, 0]
    expected = [others + one + more for one, more in zip(held, on_top, strict=True)]
    assert fast_profile(trace, alone).tolist() == expected
    # 1 as well: at u2 it is made on the way, and stays. While it is made, 110 bytes are there; then 67, then 107.
    both = [KEEP, *(Placement(tier="recompute", drop=drop, fetch=4) for drop in (2, 3))]
    assert forecast_s(trace, both, SLOW) == 7 + 2.75
    held = [0, 100, 100, 100, 200, 160, 100]
    on_top = [0, 0, 0, 0, 10 if others else 0, 0, 0]
    expected = [others + one + more for one, more in zip(held, on_top, strict=True)]
    assert fast_profile(trace, both).tolist() == expected


def test_what_is_read_to_compute_again_is_fetched_on_demand_and_waited_for() -> None:
    # On a CPU: 0 leaves 1..11 s. u2 is at 4 s: the drop waits until 11 s; 0 is read there, 5 s back: 16 s; then 2.75 s
    # of computing. Three intervals of 1 s more.
    trace = recomputing("cpu")
    placements = [
        Placement(tier="disk", drop=4, fetch=4),
        Placement(tier="recompute", drop=2, fetch=4),
        Placement(tier="recompute", drop=3, fetch=4),
    ]
    assert forecast_s(trace, placements, SLOW) == 16 + 2.75 + 3
    # One that is dropped only later is still there.
    placements = [Placement(tier="disk", drop=5, fetch=6), *placements[1:]]
    # u2 at 4 s, computed until 6.75 s, u1 at 7.75 s waits until 11 s; u0 at 12 s waits until 17 s; 18 s.
    assert forecast_s(trace, placements, SLOW) == 18.0


def test_a_gpu_reaches_its_disk_through_ram() -> None:
    # p0 at 1 s: link 2.5 s, until 3.5 s; the drop at p1 (3 s) waits. 2: until 6.5 s, 3: until 10.5 s. u0: fetched,
    # 1.25 s back, 11.75 s. 4: until 16.75 s.
    assert forecast_s(two("cuda"), [Placement(tier="ram", drop=2, fetch=4), KEEP], SLOW) == 16.75
    # To disk: link until 3.5 s, disk until 13.5 s; the drop at p1 waits for it. 2: 16.5 s, 3: 20.5 s. u0: from disk
    # 5 s, 25.5 s, over the link 1.25 s, 26.75 s. 4: 31.75 s.
    assert forecast_s(two("cuda"), [Placement(tier="disk", drop=2, fetch=4), KEEP], SLOW) == 31.75
    assert hops("cuda", "disk") == ("ram", "disk")
    assert hops("cuda", "ram") == ("ram",)
    assert hops("cpu", "disk") == ("disk",)
    assert [channel_speed(SLOW, tier, way) for tier in ("ram", "disk") for way in ("out", "back")] == [40, 80, 10, 20]


def test_what_no_backward_needs_never_comes_back() -> None:
    # p0 at 1 s: out 1..11 s; dropped at p1, which waits until 11 s; nothing is fetched. 2: 14 s, 3: 18 s.
    trace = trace_of("p0 p1 u1", [storage(100, 1, 4, 4, 0), storage(60, 2, 3, 4, 1)], seconds=[1.0, 2.0, 3.0, 4.0])
    placements = [Placement(tier="disk", drop=2, fetch=4), KEEP]
    assert forecast_s(trace, placements, SLOW) == 18.0
    assert fast_profile(trace, placements).tolist() == [0, 100, 60, 60]
    assert tier_peak(trace, placements, "disk") == 4096
    assert tier_peak(trace, placements, "ram") == 0


def test_bytes_by_interval_worked_out_by_hand() -> None:
    # On a GPU: 7 bytes of others everywhere and 5 of staging. Storage 0 is autograd's alone from interval 2 on.
    trace = trace_of(
        "p0 p1 u1 u0",
        [storage(100, 1, 4, 5, 0, owned=2), storage(60, 2, 3, 4, -1)],
        seconds=[1.0] * 5,
        device="cuda",
        other_bytes=7,
        staging_bytes=5,
    )
    assert other_profile(trace).tolist() == [12] * 5
    assert fast_profile(trace, [KEEP]).tolist() == [12, 12, 172, 172, 112]
    assert fast_profile(trace, [Placement(tier="ram", drop=2, fetch=4)]).tolist() == [12, 12, 72, 72, 112]
    assert fast_profile(trace, [Placement(tier="ram", drop=3, fetch=4)]).tolist() == [12, 12, 172, 72, 112]
    assert fast_profile(trace, [Placement(tier="ram", drop=3, fetch=3)]).tolist() == [12, 12, 172, 172, 112]


def test_a_shared_parcel_takes_its_buffer_from_its_first_storage_on() -> None:
    # Two storages of 100 bytes in one buffer of 1024.
    storages = [storage(100, 1, 4, 5, 0, owned=3), storage(100, 2, 3, 4, 0)]
    trace = trace_of("p0 p1 u1 u0", storages, seconds=[1.0] * 5, device="cuda", parcel_bytes=[1024])
    (parcel,) = trace.parcels
    assert (parcel.made, parcel.owned, parcel.sealed, parcel.needed, parcel.freed) == (1, 1, 2, 3, 5)
    assert parcel.num_storages == 2
    assert fast_profile(trace, [KEEP]).tolist() == [0, 0, 100, 200, 100]
    assert fast_profile(trace, [Placement(tier="ram", drop=3, fetch=3)]).tolist() == [0, 1024, 1024, 1024, 1024]
