"""What a measured step's operations take a GPU, however late its host is with them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchstorm.offload.fast import Cpu
from torchstorm.offload.step import tracing
from torchstorm.offload.step.clock import Clock, Span
from torchstorm.offload.step.tracing import Recorder
from torchstorm.plan.trace import PACK

AHEAD_S = tracing._AHEAD_S


class Late(Cpu):
    """A device whose work is queued by a host; by its clock a mark is reached when all that is before it is done."""

    is_beside_host = True

    def __init__(self) -> None:
        self.host_s = self.free_s = 0.0

    def clock(self) -> Clock:
        return self

    def mark(self) -> float:
        return max(self.free_s, self.host_s)

    def keep_busy(self, seconds: float) -> None:
        self.free_s = self.mark() + seconds

    def is_idle(self) -> bool:
        return self.free_s <= self.host_s

    def synchronize(self) -> None:
        self.host_s = self.mark()

    def is_reached(self, mark: object) -> bool:
        assert isinstance(mark, float)
        return mark <= self.host_s


def measured(device: Late, steps: list[tuple[float, float, float]], *, reads: bool = False) -> list[float]:
    """Runs a step whose every interval takes the host and the device so long, and the hook after it the host, and
    returns what each interval is said to take. The host reads the result of each, if it does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracing, "is_reached", device.is_reached)
        recorder = Recorder(device, Span(device), base_bytes=0, staging_bytes=0)
        recorder.arrive()
        for number, (host_s, device_s, hook_s) in enumerate(steps):
            recorder.name(PACK, number, 8)
            device.host_s += hook_s
            recorder.lie_still(())
            recorder.leave(())
            device.host_s += host_s
            device.keep_busy(device_s)
            if reads:
                device.synchronize()
            recorder.arrive()
        return [moment.compute_s for moment in recorder._moments()[1:]]  # before what is unusual is smoothed


MS = st.integers(0, 2000).map(lambda us: us / 1e6)


@settings(deadline=None)
@given(st.lists(st.tuples(MS, st.integers(0, 20_000).map(lambda us: us / 1e6), MS), max_size=60))
def test_an_interval_takes_what_the_device_takes_for_it_and_the_step_no_longer_than_host_and_device(
    steps: list[tuple[float, float, float]],
) -> None:
    device = Late()
    assert measured(device, steps) == pytest.approx([device_s for _, device_s, _ in steps])
    both_s = sum(host_s + device_s + hook_s for host_s, device_s, hook_s in steps)
    assert device.free_s <= both_s + 2 * AHEAD_S


def test_a_host_that_is_late_for_longer_than_the_device_is_told_to_wait_is_noticed() -> None:
    found = measured(Late(), [(1e-3, 1e-4, 1e-4), (AHEAD_S + 5e-3, 1e-4, 1e-4), (1e-3, 1e-4, 1e-4)])
    assert found[1] > 1e-3


def test_a_host_that_waits_for_the_device_all_the_time_is_not_made_to_wait_each_time() -> None:
    alone, measuring, steps = Late(), Late(), [(1e-3, 1e-3, 1e-4)] * 1000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracing, "_MOST_IDLE", -1)
        measured(alone, steps, reads=True)
    measured(measuring, steps, reads=True)
    assert alone.host_s < measuring.host_s < alone.host_s + 0.4
