"""What a settled step takes is measured in one that runs as all later ones do."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from offload.rehearsed import Rehearsal
from torchstorm.offload.fast import Cpu
from torchstorm.offload.native.library import library
from torchstorm.offload.replan.measured import Measured
from torchstorm.offload.session import Session
from torchstorm.offload.step import clock as clocks
from torchstorm.offload.step import pace as pacing
from torchstorm.offload.step import step as steps
from torchstorm.offload.step.clock import Clock, Span, Took
from torchstorm.offload.step.pace import Pace
from torchstorm.offload.step.tracing import Recorder
from torchstorm.plan.forecast import Figures, Placement
from torchstorm.plan.machine import Machine
from torchstorm.plan.plan import Budget, Plan
from torchstorm.plan.trace import (
    ENTER,
    PACK,
    UNPACK,
    HostCost,
    Moment,
    Op,
    Parcel,
    SavedStorage,
    Trace,
    Value,
    make_parcels,
)


class Hand:
    """A clock that is set by hand."""

    now = 0.0

    def mark(self) -> float:
        return self.now


def trace_of(*seconds: float) -> Trace:
    signatures = [(ENTER, -1, 0), *((PACK if i < 3 else UNPACK, i % 3, 8) for i in range(len(seconds) - 1))]
    moments = tuple(
        Moment(kind=kind, storage=storage, nbytes=nbytes, compute_s=one, other_bytes=0, still_bytes=0)
        for (kind, storage, nbytes), one in zip(signatures, seconds, strict=True)
    )
    return Trace(device="cpu", moments=moments, storages=(), parcels=(), base_bytes=0, staging_bytes=0)


class ByHand(Cpu):
    """A device whose clock is set by hand."""

    def __init__(self, hand: Hand, *, is_beside_host: bool = False) -> None:
        self._hand = hand
        self.is_beside_host = is_beside_host

    def clock(self) -> Clock:
        return self._hand


@pytest.fixture
def clock() -> Hand:
    """The device's."""
    return Hand()


@pytest.fixture
def host_clock(monkeypatch: pytest.MonkeyPatch) -> Hand:
    """The host's, beside that of a GPU."""
    hand = Hand()
    monkeypatch.setattr(pacing.time, "perf_counter", hand.mark)
    return hand


def refined(pace: Pace, trace: Trace) -> Trace:
    return pace.refine(trace, plan_of(trace), Machine(name="bare"))


def plan_of(trace: Trace, *placements: Placement) -> Plan:
    figures = Figures(step_ms=0.0, vram_bytes=0, ram_bytes=0, disk_bytes=0)
    return Plan(trace=trace, budget=Budget(), placements=placements, forecast=figures, notes=())


def times(trace: Trace) -> list[float]:
    return [moment.compute_s for moment in trace.moments]


def test_between_two_marks_time_is_shared_out_as_it_was_known(clock: Hand) -> None:
    pace = Pace(ByHand(clock), Span(clock))
    clock.now = 4.0
    pace.stop()
    clock.now = 9.0  # waited for a copy
    pace.go_on(2)
    clock.now = 10.5
    pace.end(3)
    assert times(refined(pace, trace_of(3.0, 1.0, 1.0, 2.0))) == pytest.approx([3.0, 1.0, 0.5, 1.0])


def test_what_was_not_known_is_shared_out_evenly(clock: Hand) -> None:
    pace = Pace(ByHand(clock), Span(clock))
    clock.now = 6.0
    pace.end(2)
    assert times(refined(pace, trace_of(0.0, 0.0, 0.0))) == pytest.approx([2.0, 2.0, 2.0])


def test_several_stops_at_a_moment_count_as_one(clock: Hand) -> None:
    pace = Pace(ByHand(clock), Span(clock))
    for now in (1.0, 2.0):
        clock.now = now
        pace.stop()
        clock.now = now + 0.5
        pace.go_on(1)
    clock.now = 4.5
    pace.end(1)
    assert times(refined(pace, trace_of(7.0, 7.0))) == pytest.approx([1.0, 2.0])


def test_a_step_that_broke_off_says_nothing(clock: Hand) -> None:
    pace = Pace(ByHand(clock), Span(clock))
    clock.now = 6.0
    pace.end(1)
    trace = trace_of(1.0, 1.0, 1.0)
    assert refined(pace, trace) is trace


@pytest.mark.parametrize(
    ("host_s", "expected"),
    [
        pytest.param(5.0, [4.0, 0.5 + 5.0], id="the device waits for the host"),
        pytest.param(1.0, [4.0, 0.5], id="the host is ahead"),
    ],
)
def test_where_a_gpu_waits_for_the_host_alone_the_clock_goes_on(
    host_s: float, expected: list[float], clock: Hand, host_clock: Hand
) -> None:
    pace = Pace(ByHand(clock, is_beside_host=True), Span(clock))
    clock.now = 4.0
    pace.stop()
    clock.now, host_clock.now = 9.0, host_s
    pace.go_on(1)
    clock.now = 9.5
    pace.end(1)
    assert times(refined(pace, trace_of(1.0, 1.0))) == pytest.approx(expected)


def test_what_copies_have_taken_from_the_cores_is_no_time_of_the_model(clock: Hand) -> None:
    pace = Pace(ByHand(clock), Span(clock))
    clock.now = 8.0
    pace.end(3)
    trace = with_parcel(trace_of(1.0, 1.0, 1.0, 1.0), nbytes=100)
    shared = Machine(name="shared", disk_delay_s_per_byte=0.02)
    moved = plan_of(trace, Placement(tier="disk", drop=2, fetch=3))
    assert times(pace.refine(trace, moved, shared)) == pytest.approx([1.5, 1.5, 1.5, 1.5])
    assert times(pace.refine(trace, plan_of(trace, Placement(tier="keep")), shared)) == pytest.approx([2.0] * 4)


def with_parcel(trace: Trace, *, nbytes: int) -> Trace:
    saved = SavedStorage(nbytes=nbytes, made=1, owned=1, needed=3, freed=4, parcel=0, block="")
    return replace(trace, storages=(saved,), parcels=make_parcels((saved,), [nbytes]))


@pytest.mark.usefixtures("short_way")
@pytest.mark.parametrize("stalled", [0, 4, 1], ids=["", "once stood still", "stood still before the first mark"])
@pytest.mark.parametrize(
    ("device_s", "copies_s", "idle_s", "forward_s"),
    [
        # Ten tensors move in three parcels, which takes the host 120 us each.
        pytest.param(1e-3, 0.0, 0.0, 10e-3 - 10 * 120e-6, id="the device waits"),
        pytest.param(2e-3, 0.0, 20e-3 - (10e-3 - 10 * 120e-6), 20e-3, id="the host does"),
        pytest.param(1e-3, 1e-3, 10e-3 - (10e-3 - 10 * 120e-6), 10e-3, id="both do, for copies"),
    ],
)
def test_what_a_plan_takes_the_host_of_a_gpu_counts_where_the_device_waits_for_it(
    device_s: float, copies_s: float, idle_s: float, forward_s: float, stalled: int, clock: Hand, host_clock: Hand
) -> None:
    span, clock.now = Span(clock), clock.now + 1e-9
    pace = Pace(ByHand(clock, is_beside_host=True), span)  # by a mark of its own, a little after the step's entry
    for moment in range(1, 11):  # the host is on its way for 1 ms before each moment of forward
        stall_s = 0.09 * (moment == stalled)  # as where a library chooses kernels for sizes that are new
        host_clock.now += 1e-3 + stall_s
        clock.now += device_s + stall_s
        pace.stop()
        clock.now += copies_s
        pace.go_on(moment)
    clock.now += 5e-3
    pace.end(11)
    kinds = [(ENTER, -1), *((PACK, at) for at in range(9)), (UNPACK, 8), (UNPACK, 7)]
    moments = tuple(
        Moment(kind=kind, storage=storage, nbytes=8 * (at + 1), compute_s=device_s, other_bytes=0)
        for at, (kind, storage) in enumerate(kinds)
    )
    parcels = tuple(
        Parcel(nbytes=8, made=1, owned=1, sealed=1, needed=10, freed=11, num_storages=num, block="")
        for num in (1, 4, 5)
    )
    trace = replace(trace_of(0.0), device="cuda", moments=moments, parcels=parcels)
    plan = plan_of(trace, *[Placement(tier="ram", drop=2, fetch=3)] * 3)
    found = pace.refine(trace, plan, Machine(name="bare"))
    record_s = 35e-6 if library() is None else 20e-6
    assert found.host == HostCost(record_s=record_s, move_s=120e-6, idle_s=pytest.approx(idle_s), fuses=True)
    assert sum(times(found)[:10]) == pytest.approx(forward_s)
    assert sum(times(found)[10:]) == pytest.approx(5e-3)


def test_a_stall_is_what_is_far_beyond_the_usual_time_of_as_many_moments_and_few_tell_nothing() -> None:
    usual = [1e-3] * 10
    assert pacing._stalls([*usual, 60e-3], [1] * 11) == pytest.approx([0.0] * 10 + [59e-3])
    assert pacing._stalls([*usual, 60e-3], [*[1] * 10, 55]) == [0.0] * 11, "it has as many moments"
    assert pacing._stalls([*usual, 160e-3], [*[1] * 10, 55]) == pytest.approx([0.0] * 10 + [105e-3])
    assert pacing._stalls([1e-3, 1e-3, 60e-3], [1, 1, 1]) == [0.0] * 3
    assert pacing._stalls([], []) == []


def with_recomputing(*, gap_s: float, seconds: float) -> tuple[Trace, Plan]:
    """Ten storages, each computed again by its own operation, which is said to take `gap_s` longer than it does."""
    num = 10
    kinds = [(ENTER, -1), *((PACK, at) for at in range(num)), *((UNPACK, at) for at in reversed(range(num)))]
    moments = tuple(Moment(kind=kind, storage=at, nbytes=8, compute_s=1.0, other_bytes=0) for kind, at in kinds)
    storages = tuple(
        SavedStorage(
            nbytes=8,
            made=at + 1,
            owned=at + 1,
            needed=2 * num - at,
            freed=2 * num + 1 - at,
            parcel=at,
            block="",
            value=at,
        )
        for at in range(num)
    )
    trace = replace(
        trace_of(0.0),
        device="cuda",
        moments=moments,
        storages=storages,
        parcels=make_parcels(storages, [8] * num),
        ops=tuple(
            Op(name="mm", compute_s=seconds + gap_s, scratch_bytes=0, inputs=(), outputs=(at,), number=at)
            for at in range(num)
        ),
        values=tuple(Value(nbytes=8, op=at, storage=at) for at in range(num)),
    )
    return trace, plan_of(trace, *[Placement(tier="recompute")] * num)


@pytest.mark.parametrize(
    ("gap_s", "host_s", "expected"),
    [
        pytest.param(2.0, 0.1, 5.0, id="the host is ahead in backward"),
        pytest.param(2.0, 5.0, 7.0, id="it is late there, too"),
        pytest.param(-1.0, 0.1, 4.0, id="they take longer there"),
        pytest.param(45.0, 0.1, 25.0, id="more than half is never taken off"),
    ],
)
def test_operations_that_run_again_show_how_long_the_device_waited_within_their_marks(
    gap_s: float, host_s: float, expected: float, clock: Hand, host_clock: Hand
) -> None:
    trace, plan = with_recomputing(gap_s=gap_s, seconds=5.0)
    pace = Pace(ByHand(clock, is_beside_host=True), Span(clock))
    for moment in range(11, 21):
        clock.now, host_clock.now = clock.now + 1.0, host_clock.now + 0.1
        pace.stop()
        clock.now, host_clock.now = clock.now + 5.0, host_clock.now + host_s
        pace.go_on(moment)
    pace.end(20)
    found = pace.refine(trace, plan, Machine(name="bare"))
    assert [op.compute_s for op in found.ops] == pytest.approx([expected] * 10)


def test_operations_of_a_forward_take_no_longer_together_than_it_was_seen_to_take(
    clock: Hand, host_clock: Hand
) -> None:
    trace, _ = with_recomputing(gap_s=2.0, seconds=3.0)
    plan = plan_of(trace, *[Placement(tier="keep")] * 10)
    pace = Pace(ByHand(clock, is_beside_host=True), Span(clock))
    for moment in range(1, 21):
        clock.now, host_clock.now = clock.now + 4.0, host_clock.now + 4.0  # the device may have waited for the host
        pace.stop()
        pace.go_on(moment)
    pace.end(20)
    found = pace.refine(trace, plan, Machine(name="bare"))
    assert sum(times(found)[: found.turn]) == pytest.approx(4.0 * found.turn)


@pytest.mark.parametrize(
    ("took_s", "host_s", "expected"),
    [
        pytest.param(4.4, 0.1, 4.4, id="its clock is slower under load"),
        pytest.param(8.0, 0.1, 5.0, id="by no more than a quarter"),
        pytest.param(3.0, 0.1, 4.0, id="they overlap"),
        pytest.param(4.4, 4.4, 4.0, id="it may have waited for the host"),
    ],
)
def test_operations_take_a_gpu_that_is_always_at_work_as_much_longer_as_its_forward_has_shown(
    took_s: float, host_s: float, expected: float, clock: Hand, host_clock: Hand
) -> None:
    trace, _ = with_recomputing(gap_s=0.0, seconds=4.0)
    trace = replace(trace, blocks_s=(("a compiled block that saves nothing", 1e-9),))
    plan = plan_of(trace, *[Placement(tier="keep")] * 10)
    pace = Pace(ByHand(clock, is_beside_host=True), Span(clock))
    for moment in range(1, 21):
        if moment != 11:  # nothing lies between what forward saves last and backward
            clock.now, host_clock.now = clock.now + took_s, host_clock.now + host_s
        pace.stop()
        pace.go_on(moment)
    pace.end(20)
    found = pace.refine(trace, plan, Machine(name="bare"))
    assert [op.compute_s for op in found.ops] == pytest.approx([expected] * 10)
    assert found.blocks_s == (("a compiled block that saves nothing", pytest.approx(expected / 4.0 * 1e-9)),)


def test_what_a_step_has_waited_is_read_once_and_without_streams_that_are_not_through(
    clock: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clocks, "is_reached", lambda mark: mark != 0.9)
    span = Span(clock)
    waits = span.note_waits()
    waits += [(0.1, 0.3), (0.4, 0.9), (0.5, 0.6)]
    clock.now = 1.0
    span.turned()
    waits += [(1.1, 1.2)]  # in backward
    clock.now = 3.0
    span.end()
    took = span.took()
    assert took[:2] == (3.0, 1.0)
    assert took.waited_s == pytest.approx(0.3)
    assert not span.waits
    assert span.took() is took


def run_steps(gpu: Rehearsal, storm: Session, model: nn.Module, number: int) -> Plan:
    for _ in range(number):
        with gpu.meter, storm.step():
            model(torch.ones(256, 64)).sum().backward()
        model.zero_grad()
    plan = storm.plan()
    assert plan is not None
    return plan


@pytest.mark.parametrize(
    ("forward_s", "are_of_another_kind"), [(1e-4, False), (10.0, False), (0.0, False), (1e-4, True)]
)
def test_a_timed_forward_is_no_longer_than_the_steps_before_it_have_shown(
    forward_s: float, are_of_another_kind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Rehearsal(monkeypatch, link_bytes_per_s=1e9)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)))

    refined: list[Trace] = []
    refine = Pace.refine

    def noted(self: Pace, *args: Any, **options: Any) -> Trace:
        refined.append(refine(self, *args, **options))
        return refined[-1]

    monkeypatch.setattr(Pace, "refine", noted)
    with gpu.session(model, 2**20) as storm:
        run_steps(gpu, storm, model, 3)
        assert not refined
        took = Took(step_s=1.0, forward_s=forward_s + 0.5 if forward_s else 0.0, host_s=forward_s, waited_s=0.5)
        monkeypatch.setattr(Measured, "new_times", lambda _: [took])
        plans = storm._shared.plans
        assert plans.in_force is not None
        if are_of_another_kind:
            plans.in_force = replace(plans.in_force)
        found = run_steps(gpu, storm, model, 1).trace
    (timed,) = refined
    tell = forward_s and not are_of_another_kind
    expected_s = min(timed.forward_s, forward_s if tell else timed.forward_s)
    assert found.forward_s == pytest.approx(expected_s)
    assert sum(times(found)[found.turn :]) == pytest.approx(sum(times(timed)[timed.turn :]))


def test_operations_of_a_gpu_are_timed_by_the_step_whose_host_is_ahead_and_by_none_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, num_timed = Rehearsal(monkeypatch, link_bytes_per_s=1e6), list[tuple[str, int]]()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Tanh()) for _ in range(6)))
    for kind in Recorder, Pace:
        refine = kind.refine

        def noted(self: Any, *args: Any, refine: Any = refine, **options: Any) -> Trace:
            num_timed.append((type(self).__name__, len(self.calls)))
            found: Trace = refine(self, *args, **options)
            return found

        monkeypatch.setattr(kind, "refine", noted)
    with gpu.session(model, 700 * 2**10) as storm:
        plan = run_steps(gpu, storm, model, 5)
    assert plan.recomputes
    (first, num_ops), then = num_timed
    assert first == "Recorder"
    assert num_ops >= 18
    assert then == ("Pace", 0)


class Slow(nn.Module):
    """Each layer takes the host a while."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            time.sleep(0.004)
            x = layer(x).tanh()
        return x


@pytest.mark.parametrize("share", [1.0, 0.6])
def test_the_second_step_is_timed_on_the_short_way(
    share: float, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []
    for kind in (Recorder, Pace):
        monkeypatch.setattr(steps, kind.__name__, noted(kind, measured))
    model = Slow()
    with Session(model, ram=int(share * 6 * 2 * 512 * 32 * 4), disk=str(tmp_path)) as session:
        for _ in range(5):
            with session.step():
                model(torch.randn(512, 32)).square().mean().backward()
        planned = session._shared.plans.in_force
        assert planned is not None
        assert planned.plan is not None
        # The first step's times are made wrong, so that those of the plan are known to be the second's.
        assert 0.024 < sum(times(planned.trace)) < 0.2
    assert measured == ["Recorder", "Pace"]


def noted(kind: Any, measured: list[str]) -> Any:
    class Noted(kind):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            measured.append(kind.__name__)

        def trace(self) -> Trace:
            found: Trace = super().trace()
            return replace(found, moments=tuple(replace(one, compute_s=9.0) for one in found.moments))

    return Noted
