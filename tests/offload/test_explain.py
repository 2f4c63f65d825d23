"""What steps took explains why something else was forecast."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchstorm.offload.replan.explain import explained, is_too_slow, slowed, with_settled_forward
from torchstorm.offload.step.clock import Took
from torchstorm.plan.forecast import Figures, Placement, forecast_s
from torchstorm.plan.machine import Machine
from torchstorm.plan.plan import Budget, Plan
from torchstorm.plan.trace import ENTER, PACK, UNPACK, HostCost, Moment, Op, SavedStorage, Trace, Value, make_parcels

MACHINE = Machine(name="bare", d2h_bytes_per_s=100.0, h2d_bytes_per_s=100.0)
FREE = HostCost()
KEPT, MOVED = Placement(tier="keep"), Placement(tier="ram", drop=3, fetch=3)


def step(forward_s: float = 0.5, *, host: HostCost = FREE, has_ops: bool = True) -> Trace:
    """Two storages are saved and used again; an operation takes 0.4 s, an interval of the forward as given, and one of
    backward 1 s."""
    signatures = [(ENTER, -1), (PACK, 0), (PACK, 1), (UNPACK, 1), (UNPACK, 0)]
    moments = tuple(
        Moment(kind=kind, storage=at, nbytes=80, other_bytes=0, compute_s=1.0 if kind == UNPACK else forward_s)
        for kind, at in signatures
    )
    storages = tuple(
        SavedStorage(nbytes=80, made=at + 1, owned=at + 1, needed=4 - at, freed=5 - at, parcel=at, block="", value=at)
        for at in range(2)
    )
    ops = tuple(Op(name="mm", compute_s=0.4, scratch_bytes=0, inputs=(), outputs=(at,)) for at in range(2))
    trace = Trace(
        device="cuda",
        moments=moments,
        storages=storages,
        parcels=make_parcels(storages, [80, 80]),
        base_bytes=0,
        staging_bytes=0,
        ops=ops,
        values=tuple(Value(nbytes=80, op=at, storage=at) for at in range(2)),
        host=host,
    )
    if has_ops:
        return trace
    return replace(trace, ops=(), values=(), storages=tuple(replace(one, value=-1) for one in storages))


def plan_of(trace: Trace, first: Placement = KEPT) -> Plan:
    figures = Figures(step_ms=0.0, vram_bytes=0, ram_bytes=0, disk_bytes=0)
    return Plan(trace=trace, budget=Budget(), placements=(first, KEPT), forecast=figures, notes=())


def seconds(trace: Trace) -> list[float]:
    return [one.compute_s for one in trace.moments]


def test_a_forward_takes_what_its_operations_do_and_the_host_has_the_rest_to_spare() -> None:
    trace = with_settled_forward(step(), plan_of(step()), [Took(3.0, 0.9, 0.3), Took(3.0, 0.8, 0.5)])
    assert seconds(trace) == pytest.approx([0.4, 0.4, 0.0, 1.0, 1.0])
    assert trace.host.idle_s == pytest.approx(0.8 - 0.3)  # the fastest step tells


def test_what_the_plan_takes_the_host_is_no_part_of_what_it_takes_without() -> None:
    host = HostCost(move_s=0.2)
    trace = with_settled_forward(step(host=host), plan_of(step(), MOVED), [Took(3.0, 0.9, 0.6, 0.0)])
    assert trace.host == replace(host, idle_s=pytest.approx(0.8 - (0.6 - 0.2)))


def test_a_forward_is_no_longer_than_it_was_seen_to_be_and_no_shorter_than_the_host() -> None:
    shorter = with_settled_forward(step(), plan_of(step()), [Took(3.0, 0.4, 0.1)])
    assert seconds(shorter)[:3] == pytest.approx([0.2, 0.2, 0.0])
    late = with_settled_forward(step(), plan_of(step()), [Took(3.0, 1.7, 1.6)])
    assert seconds(late)[:3] == pytest.approx([0.8, 0.8, 0.0])
    assert late.host.idle_s == 0.0


def test_what_a_forward_has_waited_for_copies_is_none_of_its_own() -> None:
    trace = with_settled_forward(step(), plan_of(step()), [Took(3.0, 0.9, 0.1, 0.3), Took(3.0, 0.8, 0.1)])
    assert seconds(trace)[:3] == pytest.approx([0.3, 0.3, 0.0])


def test_a_forward_that_may_have_waited_for_copies_tells_nothing_where_nobody_noted_for_how_long() -> None:
    trace = step()
    assert with_settled_forward(trace, plan_of(trace, MOVED), [Took(3.0, 0.9, 0.1)]) is trace
    known = with_settled_forward(trace, plan_of(trace, MOVED), [Took(3.0, 0.9, 0.1, 0.5), Took(3.0, 0.8, 0.1)])
    assert seconds(known)[:3] == pytest.approx([0.2, 0.2, 0.0])


def test_steps_show_that_a_forward_is_shorter_than_plans_were_made_for() -> None:
    plan = plan_of(step())
    trace = with_settled_forward(step(), plan, [Took(3.0, 0.8, 0.1)])
    assert not is_too_slow(trace, plan, [Took(3.0, 0.78, 0.1)])
    slow = with_settled_forward(step(), plan_of(step()), [Took(3.0, 1.7, 1.6)])
    assert is_too_slow(slow, plan, [Took(3.0, 1.0, 0.1, 0.1)])
    assert not is_too_slow(slow, plan, [])


def test_without_operations_a_forward_takes_what_it_took_in_the_proportions_that_were_known() -> None:
    trace = step(has_ops=False)
    assert seconds(with_settled_forward(trace, plan_of(trace), [Took(3.0, 0.9, 0.3)]))[:3] == pytest.approx([0.3] * 3)


def test_on_a_cpu_the_host_is_the_device() -> None:
    trace = replace(step(), device="cpu")
    assert with_settled_forward(trace, plan_of(trace), [Took(3.0, 0.9, 0.9)]) is trace


def test_steps_whose_forward_is_not_known_say_nothing() -> None:
    trace = step()
    assert with_settled_forward(trace, plan_of(trace), [Took(3.0)]) is trace


def test_a_late_host_is_not_taken_for_a_slow_link() -> None:
    trace = step(forward_s=0.2)  # of which too little is known: 0.6 s of forward, where the host needs 1.6
    plan = plan_of(trace, MOVED)
    found, share = explained(trace, plan, [Took(3.6, 1.6, 1.6, 0.0)], 3.6, MACHINE, 1.0)
    assert share == 1.0
    assert forecast_s(found, plan.placements, MACHINE) == pytest.approx(3.6)
    unknown, share = explained(trace, plan, [Took(3.6)], 3.6, MACHINE, 1.0)
    assert share < 1.0 or seconds(unknown) != seconds(trace)


def test_nothing_takes_longer_than_steps_have_shown_however_little_they_were_faster() -> None:
    trace = step(forward_s=0.4)
    plan = plan_of(trace)
    expected_s = forecast_s(trace, plan.placements, MACHINE)
    for took_s in (0.99 * expected_s, 0.5 * expected_s):
        found, share = explained(trace, plan, [Took(took_s)] * 3, took_s, MACHINE, 1.0)
        assert share == 1.0
        assert forecast_s(found, plan.placements, MACHINE) == pytest.approx(took_s)
    found, _ = explained(trace, plan, [Took(1.01 * expected_s)] * 3, 1.01 * expected_s, MACHINE, 1.0)
    assert found is trace  # a step that takes a little longer was disturbed


def test_what_neither_the_host_nor_copies_explain_makes_everything_slower() -> None:
    trace = replace(step(forward_s=0.4), blocks_s=(("h.0", 0.3),))
    found, share = explained(trace, plan_of(trace), [Took(6.4)] * 3, 6.4, MACHINE, 1.0)
    assert share == 1.0
    assert seconds(found) == pytest.approx([0.8, 0.8, 0.8, 2.0, 2.0])
    assert [op.compute_s for op in found.ops] == pytest.approx([0.8, 0.8])
    assert found.blocks_s == (("h.0", pytest.approx(0.6)),)


def test_copies_that_were_thought_to_be_slower_than_they_are_are_so_no_longer() -> None:
    trace = step(forward_s=0.4)
    plan = plan_of(trace, MOVED)
    expected_s = forecast_s(trace, plan.placements, MACHINE)
    assert forecast_s(trace, plan.placements, slowed(MACHINE, 0.3)) > 1.2 * expected_s
    found, share = explained(trace, plan, [Took(expected_s)] * 3, expected_s, MACHINE, 0.3)
    assert found is trace
    assert forecast_s(trace, plan.placements, slowed(MACHINE, share)) == pytest.approx(expected_s)
    faster, share = explained(trace, plan, [Took(0.5 * expected_s)] * 3, 0.5 * expected_s, MACHINE, 0.3)
    assert share == 1.0
    assert seconds(faster) == pytest.approx([0.5 * one for one in seconds(trace)])
