"""What a plan costs beside compute is told apart by parcel, and adds up to the forecast."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from plan import naive
from plan.traces import machines, trace_of, traces
from torchstorm.plan.forecast import Placement, forecast_s, host_s
from torchstorm.plan.machine import Machine
from torchstorm.plan.plan import Budget
from torchstorm.plan.recompute import replays
from torchstorm.plan.solve import solve
from torchstorm.plan.trace import SavedStorage, Trace
from torchstorm.plan.waits import recompute_seconds, waiting_seconds


@pytest.mark.no_cover
@settings(max_examples=200, deadline=None)
@given(trace=traces(), machine=machines())
def test_compute_recompute_waiting_and_the_work_of_the_host_are_the_forecast(trace: Trace, machine: Machine) -> None:
    enough = naive.all_away_bytes(trace)
    plan = solve(trace, machine, Budget(vram=enough, ram=max(enough, 1 << 30), disk=1 << 40))
    waits = waiting_seconds(trace, plan.placements, machine)
    again = recompute_seconds(trace, plan.placements)
    assert all(seconds >= 0 for seconds in (*waits, *again))
    moved = [one for one, to in zip(trace.parcels, plan.placements, strict=True) if to.tier in ("ram", "disk")]
    played = (replays(trace, plan.placements) or {}).values()
    num_moved, moved_bytes = sum(one.num_storages for one in moved), sum(one.nbytes for one in moved)
    work_s = host_s(trace, machine, played, num_moved=num_moved, moved_bytes=moved_bytes)
    total = trace.compute_s + sum(waits) + sum(again) + work_s
    assert total == pytest.approx(forecast_s(trace, plan.placements, machine), rel=1e-9, abs=1e-12)


def test_the_parcel_that_is_waited_for_is_named() -> None:
    storage = [
        SavedStorage(nbytes=4096, made=1, owned=1, needed=4, freed=5, parcel=0, block="a"),
        SavedStorage(nbytes=4096, made=2, owned=2, needed=3, freed=4, parcel=1, block="b"),
    ]
    trace = trace_of("p0 p1 u1 u0", storage, seconds=[1.0, 1.0, 1.0, 1.0, 1.0], device="cuda")
    machine = Machine(name="slow", d2h_bytes_per_s=4096 / 3, h2d_bytes_per_s=4096 / 2)
    placements = [Placement(tier="ram", drop=2, fetch=3), Placement(tier="keep")]
    # Out from second 1 to 4, so that the drop at 2 waits 2 s; back within 2 s from 5 on, needed at 6.
    assert waiting_seconds(trace, placements, machine) == [3.0, 0.0]
    assert forecast_s(trace, placements, machine) == 8.0
