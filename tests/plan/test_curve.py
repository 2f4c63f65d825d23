"""The frontier of a step, and what keeping everything and checkpointing cost beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plan.traces import blocks_trace, trace_of
from torchstorm.plan.curve import checkpoint_point, curve, unlimited_point
from torchstorm.plan.machine import Machine
from torchstorm.plan.plan import Budget
from torchstorm.plan.trace import SavedStorage

MIB = 2**20
SLOW = Machine(name="slow", d2h_bytes_per_s=5e8, h2d_bytes_per_s=5e8)


@pytest.mark.no_cover
def test_more_budget_is_never_slower_and_ends_where_everything_is_kept() -> None:
    found = curve(blocks_trace(6, 4), SLOW, Budget(ram=2**34), num_points=8)
    assert found.tier == "vram"
    assert found.machine == "slow"
    times = [point.step_ms for point in found.points]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1] == pytest.approx(found.unlimited.step_ms)
    assert all(point.peak_bytes <= point.budget_bytes for point in found.points)
    assert found.points[-1].budget_bytes == found.unlimited.peak_bytes
    assert found.to_dict()["points"][0]["way"] == "plan"


def test_a_step_that_saves_nothing_that_may_move_has_one_point() -> None:
    storage = SavedStorage(nbytes=100, made=1, owned=1, needed=2, freed=3, parcel=-1, block="")
    trace = trace_of("p0 u0", [storage], seconds=[1.0, 1.0, 1.0])
    found = curve(trace, SLOW, Budget(disk=0))
    assert [(point.budget_bytes, point.step_ms) for point in found.points] == [(100, 3000.0)]
    assert found.tier == "ram"
    assert found.checkpoint is None


def test_checkpointing_keeps_what_each_block_saved_first_and_runs_its_forward_again() -> None:
    trace = blocks_trace(3, 4, compute_s=1e-3)
    trace = replace(trace, moments=tuple(replace(moment, other_bytes=0) for moment in trace.moments))
    unlimited, found = unlimited_point(trace), checkpoint_point(trace)
    assert found is not None
    # A block saves 1 + 2 + 3 + 4 MiB; the first MiB of each stays, and one block's rest is there at a time.
    assert unlimited.peak_bytes == 3 * 10 * MIB
    assert found.peak_bytes == 3 * MIB + 9 * MIB
    # From its first save to its last a block runs 3 ms, three blocks 9.
    assert found.step_ms - unlimited.step_ms == pytest.approx(9.0)


def test_checkpointing_holds_what_the_forward_held_for_its_own_use() -> None:
    trace = blocks_trace(3, 4)
    bare = replace(trace, moments=tuple(replace(moment, other_bytes=0) for moment in trace.moments))
    busy = replace(bare, moments=tuple(replace(moment, other_bytes=5 * MIB) for moment in bare.moments))
    first, second = checkpoint_point(bare), checkpoint_point(busy)
    assert first is not None
    assert second is not None
    assert second.peak_bytes == first.peak_bytes + 5 * MIB
