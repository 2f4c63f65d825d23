"""`solve` on random steps: what it promises is checked by a simulation that shares nothing with it."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from plan import naive
from plan.naive import all_away_bytes, all_kept_bytes
from plan.traces import is_parcel_valid, machines, trace_of, traces
from torchstorm.errors import BudgetError, PlanError
from torchstorm.plan import search
from torchstorm.plan.forecast import DISK, KEEP, RAM, Placement
from torchstorm.plan.machine import Machine
from torchstorm.plan.plan import Budget, Plan
from torchstorm.plan.recompute import RECOMPUTE
from torchstorm.plan.solve import shift_base, solve
from torchstorm.plan.trace import Op, SavedStorage, Trace, Value

AMPLE = 1 << 40
MACHINE = Machine(
    name="test", d2h_bytes_per_s=1e8, h2d_bytes_per_s=1e8, disk_write_bytes_per_s=5e7, disk_read_bytes_per_s=5e7
)
quick = settings(max_examples=30, deadline=None)


def fast_name(trace: Trace) -> str:
    return "ram" if trace.device == "cpu" else "vram"


def budget_of(trace: Trace, fast_bytes: int, *, ram: int = AMPLE, disk: int = AMPLE) -> Budget:
    if trace.device == "cpu":
        return Budget(ram=fast_bytes, disk=disk)
    return Budget(vram=fast_bytes, ram=ram, disk=disk)


def solve_or_error(
    trace: Trace,
    machine: Machine,
    budget: Budget,
    *,
    spare: Budget | None = None,
    own_bytes: Callable[[int], int] | None = None,
) -> Plan | BudgetError:
    try:
        return solve(trace, machine, budget, spare=spare, own_bytes=own_bytes)
    except BudgetError as error:
        return error


@st.composite
def feasible(draw: st.DrawFn, *, padding: bool = True) -> tuple[Trace, Budget]:
    """A step, and a budget somewhere between moving everything and a little more than keeping everything."""
    trace = draw(traces(padding=padding))
    low, high = all_away_bytes(trace), all_kept_bytes(trace)
    limit = draw(st.integers(low, max(low, high) + 4096))
    disk = draw(st.sampled_from([0, AMPLE])) if trace.device == "cuda" else AMPLE
    return trace, budget_of(trace, limit, disk=disk)


def assert_keeps_to(plan: Plan, budget: Budget, spare: Budget | None = None) -> None:
    spare = spare or Budget()
    trace = plan.trace
    fast = max(naive.fast_bytes(trace, plan.placements))
    ram, disk = (max(naive.slow_bytes(trace, plan.placements, tier)) for tier in ("ram", "disk"))
    if trace.device == "cpu":
        assert ram == 0, "on a CPU the next tier is the disk"
        found = Budget(ram=fast, disk=disk)
    else:
        found = Budget(vram=fast, ram=ram, disk=disk)
    forecast = plan.forecast
    rings = spare.ram if trace.device == "cuda" else 0
    assert (forecast.vram_bytes, forecast.ram_bytes, forecast.disk_bytes) == (found.vram, found.ram + rings, found.disk)
    assert found.vram + spare.vram <= budget.vram
    assert found.ram + spare.ram <= budget.ram
    assert found.disk + spare.disk <= budget.disk


@quick
@given(trace=traces())
def test_the_traces_of_these_tests_are_ones_that_a_recorder_makes(trace: Trace) -> None:
    assert all(is_parcel_valid(parcel) for parcel in trace.parcels)
    assert sum(parcel.num_storages for parcel in trace.parcels) == sum(s.parcel >= 0 for s in trace.storages)
    for storage in trace.storages:
        assert storage.made < min(storage.needed, storage.freed) <= max(storage.needed, storage.freed)
        assert storage.freed <= trace.num_moments
        assert trace.device == "cuda" or storage.owned == storage.made


@settings(max_examples=80, deadline=None)
@given(case=feasible(), machine=machines())
@pytest.mark.no_cover
def test_the_forecast_keeps_to_the_budget_and_is_what_the_placements_come_to(
    case: tuple[Trace, Budget], machine: Machine
) -> None:
    trace, budget = case
    plan = solve(trace, machine, budget)
    assert_keeps_to(plan, budget)
    assert plan.forecast.step_ms == pytest.approx(naive.step_s(trace, plan.placements, machine) * 1e3)
    assert plan.forecast.step_ms >= trace.compute_s * 1e3 * (1 - 1e-9)
    assert (plan.trace, plan.budget) == (trace, budget)


@quick
@given(case=feasible(), machine=machines())
def test_placements_follow_the_order_of_moments(case: tuple[Trace, Budget], machine: Machine) -> None:
    trace, budget = case
    plan = solve(trace, machine, budget)
    assert len(plan.placements) == len(trace.parcels)
    for parcel, placement in zip(trace.parcels, plan.placements, strict=True):
        if placement.tier == "keep":
            assert placement == Placement(tier="keep")
        elif placement.tier == "recompute":
            assert parcel.sealed == placement.drop < placement.fetch <= parcel.needed
            assert parcel.num_storages == 1
        else:
            assert parcel.sealed < placement.drop <= placement.fetch <= parcel.needed
            assert placement.tier in ("ram", "disk")
    moved = sorted(number for number, place in enumerate(plan.placements) if place.tier in ("ram", "disk"))
    assert sorted(itertools.chain(*plan.drops.values())) == sorted(itertools.chain(*plan.fetches.values())) == moved
    for schedule, field in ((plan.drops, "drop"), (plan.fetches, "fetch")):
        for moment, numbers in schedule.items():
            assert {getattr(plan.placements[number], field) for number in numbers} == {moment}


@quick
@given(trace=traces(padding=False, with_ops=False), machine=machines())
@pytest.mark.no_cover
def test_below_what_moving_everything_takes_there_is_no_plan(trace: Trace, machine: Machine) -> None:
    """Moving everything takes least where each travels alone and nobody else still holds it when it is needed."""
    assume(all(parcel.num_storages == 1 and parcel.owned <= parcel.needed for parcel in trace.parcels))
    least = all_away_bytes(trace)
    assert_keeps_to(solve(trace, machine, budget_of(trace, least)), budget_of(trace, least))
    if least > 0:
        with pytest.raises(BudgetError, match=r"needs .* at once") as caught:
            solve(trace, machine, budget_of(trace, least - 1))
        error = caught.value
        assert (error.tier, error.budget_bytes) == (fast_name(trace), least - 1)
        assert error.smallest_bytes == error.needed_bytes == least
        assert f"{fast_name(trace)}={least} " in str(error)
        assert error.block in {storage.block for storage in trace.storages} | {""}


@quick
@given(trace=traces(), machine=machines(), below=st.integers(1, 5000))
def test_the_smallest_budget_named_works_and_a_byte_less_does_not(trace: Trace, machine: Machine, below: int) -> None:
    found = solve_or_error(trace, machine, budget_of(trace, max(0, all_away_bytes(trace) - below)))
    if isinstance(found, Plan):
        return
    smallest = found.smallest_bytes
    assert smallest is not None
    assert_keeps_to(solve(trace, machine, budget_of(trace, smallest)), budget_of(trace, smallest))
    with pytest.raises(BudgetError):
        solve(trace, machine, budget_of(trace, smallest - 1))


@quick
@given(trace=traces(), machine=machines(), spare=st.integers(0, 10_000), disk=st.sampled_from([0, AMPLE]))
def test_everything_is_kept_where_it_fits(trace: Trace, machine: Machine, spare: int, disk: int) -> None:
    budget = budget_of(trace, all_kept_bytes(trace) + spare, disk=disk)
    plan = solve(trace, machine, budget)
    assert {placement.tier for placement in plan.placements} <= {"keep"}
    assert plan.forecast.step_ms == pytest.approx(trace.compute_s * 1e3)
    assert_keeps_to(plan, budget)


@pytest.mark.no_cover
@settings(max_examples=50, deadline=None)
@given(case=feasible(), machine=machines(), more=st.integers(1, 100_000))
def test_more_memory_is_never_slower(case: tuple[Trace, Budget], machine: Machine, more: int) -> None:
    trace, budget = case
    name = fast_name(trace)
    larger = replace(budget, **{name: getattr(budget, name) + more})
    plan = solve(trace, machine, larger)
    assert_keeps_to(plan, larger)
    assert plan.forecast.step_ms <= solve(trace, machine, budget).forecast.step_ms * (1 + 1e-9)


@pytest.mark.no_cover
@quick
@given(
    trace=traces(device="cuda", max_storages=8),
    machine=machines(),
    share=st.floats(0, 1),
    more=st.integers(1, 100_000),
)
def test_more_room_below_is_never_slower(trace: Trace, machine: Machine, share: float, more: int) -> None:
    limit = all_away_bytes(trace)
    ram = int(max(naive.slow_bytes(trace, naive.away(trace, "ram"), "ram")) * share)
    less = solve(trace, machine, Budget(vram=limit, ram=ram, disk=AMPLE))
    plan = solve(trace, machine, Budget(vram=limit, ram=ram + more, disk=AMPLE))
    assert plan.forecast.step_ms <= less.forecast.step_ms * (1 + 1e-9)


@quick
@given(trace=traces(max_storages=8), machine=machines(), share=st.floats(0, 1), slow=st.sampled_from(["ram", "disk"]))
def test_a_handful_of_parcels_is_placed_as_well_as_can_be(
    trace: Trace, machine: Machine, share: float, slow: str
) -> None:
    slow = "disk" if trace.device == "cpu" else slow
    assume(naive.num_placements(trace, 1) <= 4000)
    low, high = sorted((all_away_bytes(trace), all_kept_bytes(trace)))
    limit = int(low + share * (high - low))
    best_s = naive.best_s(trace, machine, limit, ("keep", "recompute", slow))
    found = solve_or_error(trace, machine, replace(budget_of(trace, limit, ram=0, disk=0), **{slow: AMPLE}))
    if isinstance(found, BudgetError):
        assert best_s == math.inf
        return
    assert best_s * (1 - 1e-9) <= found.forecast.step_ms / 1e3 <= best_s * 1.01


@quick
@given(trace=traces(device="cuda", max_storages=6), machine=machines(), share=st.floats(0, 1), room=st.floats(0, 1))
def test_a_handful_is_spread_over_both_slower_tiers_as_well_as_can_be(
    trace: Trace, machine: Machine, share: float, room: float
) -> None:
    assume(naive.num_placements(trace, 2) <= 4000)
    low, high = sorted((all_away_bytes(trace), all_kept_bytes(trace)))
    limit = int(low + share * (high - low))
    ram = int(room * max(naive.slow_bytes(trace, naive.away(trace, "ram"), "ram")))
    best_s = min(
        (
            naive.step_s(trace, placements, machine, again)
            for placements, again in naive.every_placement(trace, ("keep", "recompute", "ram", "disk"))
            if max(naive.fast_bytes(trace, placements, again)) <= limit
            and max(naive.slow_bytes(trace, placements, "ram")) <= ram
        ),
        default=math.inf,
    )
    found = solve_or_error(trace, machine, Budget(vram=limit, ram=ram, disk=AMPLE))
    if isinstance(found, BudgetError):
        assert best_s == math.inf
        return
    assert best_s * (1 - 1e-9) <= found.forecast.step_ms / 1e3 <= best_s * 1.01


@quick
@given(trace=traces(with_ops=True), machine=machines())
def test_without_a_slower_tier_what_can_be_computed_again_makes_room(trace: Trace, machine: Machine) -> None:
    found = solve_or_error(trace, machine, budget_of(trace, 0, ram=0, disk=0))
    if isinstance(found, Plan):
        return
    smallest = found.smallest_bytes
    assert smallest is not None
    assert smallest <= all_kept_bytes(trace)
    budget = budget_of(trace, smallest, ram=0, disk=0)
    plan = solve(trace, machine, budget)
    assert_keeps_to(plan, budget)
    assert {placement.tier for placement in plan.placements} <= {"keep", "recompute"}
    if smallest < all_kept_bytes(trace):
        assert plan.recomputes
    with pytest.raises(BudgetError):
        solve(trace, machine, budget_of(trace, smallest - 1, ram=0, disk=0))


@pytest.mark.no_cover
@quick
@given(case=feasible(), machine=machines())
def test_the_same_question_has_the_same_answer(case: tuple[Trace, Budget], machine: Machine) -> None:
    trace, budget = case
    assert solve(trace, machine, budget) == solve(trace, machine, budget)


@pytest.mark.no_cover
@quick
@given(case=feasible(), machine=machines(), data=st.data())
def test_whatever_a_search_begins_with_a_plan_keeps_to_the_budget(
    case: tuple[Trace, Budget], machine: Machine, data: st.DataObject
) -> None:
    trace, budget = case
    tiers, num = st.sampled_from([KEEP, RECOMPUTE, RAM, DISK]), len(trace.parcels)
    start = data.draw(st.lists(tiers, min_size=num, max_size=num))
    fixed = data.draw(st.dictionaries(st.integers(0, num - 1), st.sampled_from([KEEP, RAM]), max_size=2)) if num else {}
    with patch.object(search, "_EXHAUSTIVE", 0):  # else all choices are tried, since there are few
        plan = solve(trace, machine, budget, time_limit_s=0.0, start=start, fixed=fixed)
        again = solve(trace, machine, budget, time_limit_s=0.0, start=plan.tiers)
    assert_keeps_to(plan, budget)
    assert again.forecast.step_ms <= plan.forecast.step_ms * 1.001


@quick
@given(trace=traces(), machine=machines(), share=st.floats(0, 1))
def test_what_a_slower_tier_lacks_is_named_and_enough(trace: Trace, machine: Machine, share: float) -> None:
    limit = int(all_away_bytes(trace) + share * max(0, all_kept_bytes(trace) - all_away_bytes(trace)))
    slow = "disk" if trace.device == "cpu" else "ram"
    other = {} if trace.device == "cpu" else {"disk": 0}
    found = solve_or_error(trace, machine, budget_of(trace, limit, **{slow: 1}, **other))
    if isinstance(found, Plan):
        assert {placement.tier for placement in found.placements} <= {"keep", "recompute"}
        return
    assert (found.tier, found.budget_bytes) == (slow, 1)
    needed = found.smallest_bytes
    assert needed == found.needed_bytes
    assert needed is not None
    assert f"Give {slow}={needed} " in str(found)
    budget = budget_of(trace, limit, **{slow: needed}, **other)
    assert_keeps_to(solve(trace, machine, budget), budget)
    with pytest.raises(BudgetError, match=f"{slow}="):
        solve(trace, machine, budget_of(trace, limit, **{slow: needed - 1}, **other))


@pytest.mark.no_cover
@quick
@given(trace=traces(device="cuda"), machine=machines(), ram_share=st.floats(0, 1.2))
def test_a_gpu_uses_the_disk_only_for_what_ram_has_no_room_for(
    trace: Trace, machine: Machine, ram_share: float
) -> None:
    limit = all_away_bytes(trace)
    everything = max(naive.slow_bytes(trace, naive.away(trace, "ram"), "ram"))
    budget = Budget(vram=limit, ram=int(everything * ram_share), disk=AMPLE)
    plan = solve(trace, machine, budget)
    assert_keeps_to(plan, budget)
    if budget.ram >= everything:
        assert "disk" not in {placement.tier for placement in plan.placements}
    elif budget.ram and "disk" in {placement.tier for placement in plan.placements}:
        # The last one sent to disk had to go: with it in RAM there would be too much.
        in_ram = [replace(p, tier="ram") if p.tier == "disk" else p for p in plan.placements]
        assert max(naive.slow_bytes(trace, in_ram, "ram")) > budget.ram
    if not budget.ram:
        assert "ram" not in {placement.tier for placement in plan.placements}


@pytest.mark.no_cover
@quick
@given(trace=traces(device="cuda"), machine=machines())
def test_both_slow_tiers_too_small_names_the_disk(trace: Trace, machine: Machine) -> None:
    assume(all_away_bytes(trace) < all_kept_bytes(trace))
    found = solve_or_error(trace, machine, Budget(vram=all_away_bytes(trace), ram=1, disk=1))
    if isinstance(found, Plan):
        assert_keeps_to(found, found.budget)
        return
    assert found.tier == "disk"
    assert found.smallest_bytes is not None
    budget = Budget(vram=all_away_bytes(trace), ram=1, disk=found.smallest_bytes)
    assert_keeps_to(solve(trace, machine, budget), budget)


@quick
@given(trace=traces(with_ops=False), machine=machines())
def test_without_a_slower_tier_everything_stays_or_it_says_what_would_do(trace: Trace, machine: Machine) -> None:
    kept = all_kept_bytes(trace)
    nowhere = budget_of(trace, kept, ram=0, disk=0)
    assert solve(trace, machine, nowhere).moved_bytes("disk") == 0
    if kept:
        with pytest.raises(BudgetError, match="Smallest feasible without a tier to move to") as caught:
            solve(trace, machine, budget_of(trace, kept - 1, ram=0, disk=0))
        assert caught.value.smallest_bytes == kept
        target = 'disk="DIR:SIZE"' if trace.device == "cpu" else "ram= or disk="
        named = re.search(rf"with {target}: {fast_name(trace)}=([0-9]+) \(", str(caught.value))
        assert named is not None
        least = int(named[1])
        assert least <= kept
        assert_keeps_to(solve(trace, machine, budget_of(trace, least)), budget_of(trace, least))
        with pytest.raises(BudgetError):
            solve(trace, machine, budget_of(trace, least - 1))


def spares(trace: Trace, fast: int, ram: int, disk: int) -> Budget:
    return Budget(ram=fast, disk=disk) if trace.device == "cpu" else Budget(vram=fast, ram=ram, disk=disk)


def plus(first: Budget, second: Budget) -> Budget:
    return Budget(vram=first.vram + second.vram, ram=first.ram + second.ram, disk=first.disk + second.disk)


few_bytes = st.integers(0, 100_000)


@quick
@given(case=feasible(), machine=machines(), fast=few_bytes, ram=few_bytes, disk=few_bytes)
@pytest.mark.no_cover
def test_spare_is_room_that_nothing_planned_gets(
    case: tuple[Trace, Budget], machine: Machine, fast: int, ram: int, disk: int
) -> None:
    """With so much more budget, the same plan: the forecast tells of spare only where it is taken, in RAM on CUDA."""
    trace, budget = case
    spare = spares(trace, fast, ram, disk if budget.disk else 0)
    plain = solve(trace, machine, budget)
    plan = solve(trace, machine, plus(budget, spare), spare=spare)
    assert_keeps_to(plan, plus(budget, spare), spare)
    assert (plan.budget, plan.placements) == (plus(budget, spare), plain.placements)
    rings = spare.ram if trace.device == "cuda" else 0
    assert plan.forecast == replace(plain.forecast, ram_bytes=plain.forecast.ram_bytes + rings)
    assert solve(trace, machine, budget, spare=Budget()) == plain


@quick
@given(trace=traces(), machine=machines(), below=st.integers(1, 5000), spare_bytes=st.integers(1, 100_000))
def test_the_smallest_budget_named_has_the_spare_in_it(
    trace: Trace, machine: Machine, below: int, spare_bytes: int
) -> None:
    spare = spares(trace, spare_bytes, 7, 9)
    found = solve_or_error(trace, machine, budget_of(trace, max(0, all_away_bytes(trace) - below)), spare=spare)
    without = solve_or_error(trace, machine, budget_of(trace, 0))
    if isinstance(found, Plan):
        return
    assert found.tier == fast_name(trace)
    smallest = found.smallest_bytes
    assert smallest is not None
    assert isinstance(without, Plan) == (smallest == spare_bytes)
    if isinstance(without, BudgetError):
        assert smallest == (without.smallest_bytes or 0) + spare_bytes
    assert f"{fast_name(trace)}={smallest} (" in str(found)
    assert_keeps_to(solve(trace, machine, budget_of(trace, smallest), spare=spare), budget_of(trace, smallest), spare)
    with pytest.raises(BudgetError):
        solve(trace, machine, budget_of(trace, smallest - 1), spare=spare)


@quick
@given(trace=traces(with_ops=False), machine=machines(), spare_bytes=st.integers(1, 100_000))
def test_without_a_slower_tier_both_budgets_named_have_the_spare_in_them(
    trace: Trace, machine: Machine, spare_bytes: int
) -> None:
    spare = spares(trace, spare_bytes, 0, 0)
    enough = all_kept_bytes(trace) + spare_bytes
    nowhere = budget_of(trace, enough, ram=0, disk=0)
    assert_keeps_to(solve(trace, machine, nowhere, spare=spare), nowhere, spare)
    with pytest.raises(BudgetError, match="Smallest feasible without a tier to move to") as caught:
        solve(trace, machine, budget_of(trace, enough - 1, ram=0, disk=0), spare=spare)
    assert caught.value.smallest_bytes == enough
    named = re.search(r"; with .*=([0-9]+) \(", str(caught.value))
    assert named is not None
    least = budget_of(trace, int(named[1]))
    assert_keeps_to(solve(trace, machine, least, spare=spare), least, spare)
    with pytest.raises(BudgetError):
        solve(trace, machine, budget_of(trace, int(named[1]) - 1), spare=spare)


@quick
@given(trace=traces(), machine=machines(), spare_bytes=st.integers(1, 100_000))
@pytest.mark.no_cover
def test_what_a_slower_tier_lacks_has_the_spare_in_it(trace: Trace, machine: Machine, spare_bytes: int) -> None:
    limit = all_away_bytes(trace)
    slow = "disk" if trace.device == "cpu" else "ram"
    other = {} if trace.device == "cpu" else {"disk": 0}
    spare = Budget(**{slow: spare_bytes})
    found = solve_or_error(trace, machine, budget_of(trace, limit, **{slow: 1}, **other), spare=spare)
    if isinstance(found, Plan):
        assert spare_bytes == 1
        assert {placement.tier for placement in found.placements} <= {"keep", "recompute"}
        return
    needed = found.smallest_bytes
    assert found.tier == slow
    assert needed is not None
    budget = budget_of(trace, limit, **{slow: needed}, **other)
    plan = solve(trace, machine, budget, spare=spare)
    assert_keeps_to(plan, budget, spare)
    assert max(naive.slow_bytes(trace, plan.placements, slow)) + spare_bytes == needed
    with pytest.raises(BudgetError, match=f"{slow}="):
        solve(trace, machine, budget_of(trace, limit, **{slow: needed - 1}, **other), spare=spare)


@pytest.mark.no_cover
@quick
@given(trace=traces(device="cuda"), machine=machines(), spare_bytes=st.integers(1, 100_000), share=st.floats(0, 1.2))
def test_what_the_spare_leaves_of_ram_is_what_the_disk_relieves(
    trace: Trace, machine: Machine, spare_bytes: int, share: float
) -> None:
    limit = all_away_bytes(trace)
    everything = max(naive.slow_bytes(trace, naive.away(trace, "ram"), "ram"))
    budget = Budget(vram=limit, ram=spare_bytes + int(everything * share), disk=AMPLE)
    spare = Budget(ram=spare_bytes)
    plan = solve(trace, machine, budget, spare=spare)
    assert_keeps_to(plan, budget, spare)
    if budget.ram - spare_bytes >= everything:
        assert "disk" not in {placement.tier for placement in plan.placements}


@pytest.mark.no_cover
@quick
@given(
    trace=traces(device="cpu"),
    machine=machines(),
    below=st.integers(1, 5000),
    spare_bytes=few_bytes,
    share=st.sampled_from([3, 20, 64]),
    least=st.sampled_from([0, 8192]),
)
def test_the_smallest_budget_named_has_room_for_what_a_session_with_it_takes(
    trace: Trace, machine: Machine, below: int, spare_bytes: int, share: int, least: int
) -> None:
    """A larger budget gets larger buffers, which count: the one that is named has room for its own."""

    def own_bytes(budget: int) -> int:
        return max(budget // share // 4096 * 4096, least)

    def with_buffers(fast: int) -> Trace:
        return replace(trace, staging_bytes=own_bytes(fast))

    spare = Budget(ram=spare_bytes)
    limit = max(0, all_away_bytes(replace(trace, staging_bytes=0)) - below)
    for disk in (AMPLE, 0):
        budget = Budget(ram=limit, disk=disk)
        error = solve_or_error(with_buffers(limit), machine, budget, spare=spare, own_bytes=own_bytes)
        if isinstance(error, Plan):
            continue
        named = re.search(r"ram=([0-9]+) \([^)]*\)\.$", str(error))
        assert named is not None
        smallest = int(named[1])
        assert error.tier == "ram"
        assert not disk or smallest == error.smallest_bytes
        enough = Budget(ram=smallest, disk=AMPLE)
        plan = solve(with_buffers(smallest), machine, enough, spare=spare, own_bytes=own_bytes)
        assert_keeps_to(plan, enough, spare)
        short = Budget(ram=smallest - 1, disk=AMPLE)
        with pytest.raises(BudgetError):
            solve(with_buffers(smallest - 1), machine, short, spare=spare, own_bytes=own_bytes)


@quick
@given(trace=traces(device="cuda"), delta=st.integers(-60_000, 60_000))
def test_a_shifted_base_is_in_every_interval_and_never_below_nothing(trace: Trace, delta: int) -> None:
    shifted = shift_base(trace, delta)
    assert [m.other_bytes for m in shifted.moments] == [max(0, m.other_bytes + delta) for m in trace.moments]
    assert [m.still_bytes for m in shifted.moments] == [max(0, m.still_bytes + delta) for m in trace.moments]
    assert shifted.base_bytes == trace.base_bytes + delta
    assert [m.signature for m in shifted.moments] == [m.signature for m in trace.moments]
    assert (shifted.storages, shifted.parcels) == (trace.storages, trace.parcels)


def storage(nbytes: int, made: int, needed: int, freed: int, parcel: int, block: str = "") -> SavedStorage:
    return SavedStorage(nbytes=nbytes, made=made, owned=made, needed=needed, freed=freed, parcel=parcel, block=block)


def test_what_is_needed_last_leaves_first() -> None:
    #               moment:  1    2    3    4    5    6
    trace = trace_of(
        "p0 p1 p2 u2 u1 u0",
        [storage(100, 1, 6, 7, 0), storage(100, 2, 5, 6, 1), storage(100, 3, 4, 5, 2)],
        seconds=[1.0] * 7,
    )
    # At most 300 at once, in interval 3. With 200 one must be away then, and the first is needed last.
    fast = replace(MACHINE, disk_write_bytes_per_s=1e9, disk_read_bytes_per_s=1e9)
    plan = solve(trace, fast, Budget(ram=200, disk=10_000))
    assert [placement.tier for placement in plan.placements] == ["disk", "keep", "keep"]
    assert plan.forecast.ram_bytes == 200
    assert plan.forecast.disk_bytes == 4096
    assert plan.forecast.step_ms == pytest.approx(7000)


def test_what_is_never_needed_but_let_go_early_does_not_travel_for_nothing() -> None:
    """Storage 0 is gone before the worst moment; moving it frees nothing there."""
    #               moment:  1    2    3    4    5    6
    trace = trace_of(
        "p0 p1 p2 p3 u2 u1",
        [storage(100, 1, 7, 3, 0), storage(100, 2, 6, 7, 1), storage(100, 3, 5, 6, 2), storage(50, 4, 7, 7, 3)],
        seconds=[1.0] * 7,
    )
    fast = replace(MACHINE, disk_write_bytes_per_s=1e9, disk_read_bytes_per_s=1e9)
    plan = solve(trace, fast, Budget(ram=200, disk=10_000))
    assert plan.placements[0] == Placement(tier="keep")


def test_a_block_that_needs_too_much_is_named() -> None:
    trace = trace_of(
        "p0 p1 u1 u0",
        [storage(100, 1, 4, 5, 0, "h.0.mlp"), storage(5000, 2, 3, 4, 1, "h.1.attn")],
        seconds=[1.0] * 5,
        staging_bytes=20,
    )
    with pytest.raises(BudgetError) as caught:
        solve(trace, MACHINE, Budget(ram=4000, disk=10_000))
    assert str(caught.value) == (
        "ram=3.91 KiB, but block 'h.1.attn' alone needs 4.90 KiB at once. Smallest feasible: ram=5020 (4.90 KiB)."
    )
    assert caught.value.block == "h.1.attn"


def test_where_nothing_was_saved_the_code_around_the_model_is_named() -> None:
    trace = trace_of("", [], seconds=[1.0], device="cuda", other_bytes=3000)
    with pytest.raises(BudgetError, match=r"but the code around the model needs 2\.93 KiB at once") as caught:
        solve(trace, MACHINE, Budget(vram=2000, ram=10_000))
    assert caught.value.block == ""
    assert solve(trace, MACHINE, Budget(vram=3000)).forecast.vram_bytes == 3000


def test_the_entry_is_named_after_the_block_that_follows() -> None:
    trace = trace_of("p0 u0", [storage(10, 1, 2, 3, 0, "h.0")], seconds=[0.1] * 3, device="cuda")
    entry = replace(trace.moments[0], other_bytes=5000)
    trace = replace(trace, moments=(entry, *trace.moments[1:]))
    with pytest.raises(BudgetError, match=r"block 'h.0' alone needs 4.88 KiB"):
        solve(trace, MACHINE, Budget(vram=4000, ram=100))


SPEEDS = ("d2h_bytes_per_s", "h2d_bytes_per_s", "disk_write_bytes_per_s", "disk_read_bytes_per_s")


@pytest.mark.parametrize("missing", SPEEDS)
@pytest.mark.parametrize(
    ("device", "budget", "used"),
    [
        ("cpu", Budget(ram=150), set()),
        ("cpu", Budget(ram=150, disk=10_000), {"disk"}),
        ("cuda", Budget(vram=150), set()),
        ("cuda", Budget(vram=150, ram=10_000), {"ram"}),
        ("cuda", Budget(vram=150, ram=10_000, disk=10_000), {"ram", "disk"}),
        ("cuda", Budget(vram=150, disk=10_000), {"ram", "disk"}),  # what goes to the disk crosses the link, too
    ],
)
def test_a_tier_of_no_speed_is_named(device: str, budget: Budget, used: set[str], missing: str) -> None:
    trace = trace_of(
        "p0 p1 u1 u0", [storage(100, 1, 4, 5, 0), storage(100, 2, 3, 4, 1)], seconds=[1.0] * 5, device=device
    )
    machine = replace(MACHINE, **{missing: 0.0})
    tier = "disk" if "disk" in missing else "ram"
    if tier in used:
        with pytest.raises(PlanError, match=rf"machine 'test' has no speed for {tier}, .*, or leave (\w+)=") as caught:
            solve(trace, machine, budget)
        # The way out names a tier that the user has named.
        named = str(caught.value).rsplit("leave ", 1)[1].split("=", 1)[0]
        assert getattr(budget, named) > 0
    elif used:
        assert_keeps_to(solve(trace, machine, budget), budget)
    else:
        with pytest.raises(BudgetError, match="without a tier to move to"):
            solve(trace, machine, budget)


def test_a_machine_of_no_speed_at_all_is_not_a_division_by_zero() -> None:
    trace = trace_of("p0 p1 u1 u0", [storage(100, 1, 4, 5, 0), storage(100, 2, 3, 4, 1)], seconds=[1.0] * 5)
    with pytest.raises(PlanError, match=r"disk=9\.77 KiB was given, but machine 'bare' has no speed for disk"):
        solve(trace, Machine(name="bare"), Budget(ram=150, disk=10_000))
    budget = Budget(ram=200)
    assert_keeps_to(solve(trace, Machine(name="bare"), budget), budget)


@pytest.mark.parametrize("with_disk", [True, False])
def test_what_backward_does_not_need_moves_where_it_can(with_disk: bool) -> None:
    """Planned to be computed again, it keeps what it is made of, which forecasts do not count."""
    storages = [replace(storage(100, 1, 3, 4, 0), value=0), replace(storage(100, 2, 4, 4, 1), value=1)]
    trace = replace(
        trace_of("p0 p1 u0", storages, seconds=[1.0] * 4),
        ops=(Op(name="mul", compute_s=0.0, scratch_bytes=0, inputs=(0,), outputs=(1,)),),
        values=(Value(nbytes=100, op=-1, storage=0), Value(nbytes=100, op=0, storage=1)),
    )
    machine = replace(MACHINE, disk_delay_s_per_byte=0.1)  # so that to compute it again would cost less
    plan = solve(trace, machine, Budget(ram=150, disk=10_000 if with_disk else 0))
    assert plan.placements[1].tier == ("disk" if with_disk else "recompute")
