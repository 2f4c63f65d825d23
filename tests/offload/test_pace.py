"""What a settled step takes is measured in one that runs as all later ones do."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from torchstorm.offload.session import Session
from torchstorm.offload.step import pace as pacing
from torchstorm.offload.step import step as steps
from torchstorm.offload.step.pace import Pace
from torchstorm.offload.step.tracing import Recorder
from torchstorm.plan.forecast import Figures
from torchstorm.plan.plan import Budget, Plan
from torchstorm.plan.trace import ENTER, PACK, UNPACK, Moment, Trace


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
    return Trace(
        device="cpu", moments=moments, storages=(), parcels=(), base_bytes=0, staging_bytes=0, ops=(), values=()
    )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Hand:
    hand = Hand()
    monkeypatch.setattr(pacing, "CpuClock", lambda: hand)
    return hand


def refined(pace: Pace, trace: Trace) -> Trace:
    figures = Figures(step_ms=0.0, vram_bytes=0, ram_bytes=0, disk_bytes=0)
    return pace.refine(trace, Plan(trace=trace, budget=Budget(), placements=(), forecast=figures, notes=()))


def times(trace: Trace) -> list[float]:
    return [moment.compute_s for moment in trace.moments]


def test_between_two_marks_time_is_shared_out_as_it_was_known(clock: Hand) -> None:
    pace = Pace(torch.device("cpu"), 0.0)
    clock.now = 4.0
    pace.stop()
    clock.now = 9.0  # waited for a copy
    pace.go_on(2)
    clock.now = 10.5
    pace.end(3)
    assert times(refined(pace, trace_of(3.0, 1.0, 1.0, 2.0))) == pytest.approx([3.0, 1.0, 0.5, 1.0])


def test_what_was_not_known_is_shared_out_evenly(clock: Hand) -> None:
    pace = Pace(torch.device("cpu"), 0.0)
    clock.now = 6.0
    pace.end(2)
    assert times(refined(pace, trace_of(0.0, 0.0, 0.0))) == pytest.approx([2.0, 2.0, 2.0])


def test_several_stops_at_a_moment_count_as_one(clock: Hand) -> None:
    pace = Pace(torch.device("cpu"), 0.0)
    for now in (1.0, 2.0):
        clock.now = now
        pace.stop()
        clock.now = now + 0.5
        pace.go_on(1)
    clock.now = 4.5
    pace.end(1)
    assert times(refined(pace, trace_of(7.0, 7.0))) == pytest.approx([1.0, 2.0])


def test_a_step_that_broke_off_says_nothing(clock: Hand) -> None:
    pace = Pace(torch.device("cpu"), 0.0)
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
    host_s: float, expected: list[float], clock: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Hand()
    monkeypatch.setattr(pacing, "StreamClock", lambda _: clock)
    monkeypatch.setattr(pacing.time, "perf_counter", host.mark)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    pace = Pace(torch.device("cuda"), 0.0)
    clock.now = 4.0
    pace.stop()
    clock.now, host.now = 9.0, host_s
    pace.go_on(1)
    clock.now = 9.5
    pace.end(1)
    assert times(refined(pace, trace_of(1.0, 1.0))) == pytest.approx(expected)


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
