import time

import pytest
import torch

from torchstorm.memory.simulated import SimulatedTier
from torchstorm.memory.tier import TierSpec

SPEC = TierSpec(name="ram", capacity_bytes=10_000, write_bytes_per_s=1000, read_bytes_per_s=2000, latency_s=0.5)


def zeros(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def test_each_direction_carries_one_copy_after_another() -> None:
    tier = SimulatedTier(SPEC)
    first, second = tier.put(zeros(1000)), tier.put(zeros(500))
    assert (first.written.start_s, first.written.end_s) == (0, 1.5)
    assert (second.written.start_s, second.written.end_s) == (1.5, 2.5)
    back = tier.get(first, zeros(1000))
    assert (back.start_s, back.end_s) == (1.5, 2.5)  # after its put, beside the other one's
    again = tier.get(first, zeros(1000))
    assert (again.start_s, again.end_s) == (2.5, 3.5)
    assert tier.now_s == 0
    first.written.wait()
    assert tier.now_s == 1.5
    assert first.written.done()
    assert not second.written.done()
    tier.advance(1.0)
    assert second.written.done()
    assert back.done()
    back.wait()
    assert tier.now_s == 2.5
    tier.advance(10)
    late = tier.get(second, zeros(500))
    assert (late.start_s, late.end_s) == (12.5, 13.25)


def test_bytes_move_no_sooner_than_their_time() -> None:
    tier = SimulatedTier(SPEC)
    source = zeros(100)
    handle = tier.put(source)
    source.fill_(1)  # too early, and it shows
    handle.written.wait()
    source.fill_(2)
    out = torch.full_like(source, 9)
    copy = tier.get(handle, out)
    assert out.unique().tolist() == [9]  # not waited for
    copy.wait()
    assert out.unique().tolist() == [1]


def test_what_takes_no_time_has_ended() -> None:
    tier = SimulatedTier(TierSpec(name="ram", capacity_bytes=100))
    handle = tier.put(zeros(100))
    assert handle.written.done()
    tier.free(handle)
    assert handle.data is None


def test_bytes_of_a_freed_storage_go_with_the_last_copy() -> None:
    tier = SimulatedTier(SPEC)
    handle = tier.put(zeros(1000))
    copy = tier.get(handle, zeros(1000))
    tier.free(handle)
    handle.written.wait()
    assert handle.data is not None
    copy.wait()
    assert handle.data is None


def test_sleep_takes_real_time() -> None:
    spec = TierSpec(name="ram", capacity_bytes=10_000, write_bytes_per_s=2e4, read_bytes_per_s=2e4)
    tier = SimulatedTier(spec, sleep=True)
    begin = time.monotonic()
    handle = tier.put(zeros(5000))
    copy = tier.get(handle, zeros(5000))
    assert not handle.written.done()
    copy.wait()
    assert 0.5 <= time.monotonic() - begin < 5
    tier.advance(0.01)
    assert tier.now_s >= 0.51
    tier.close()


@pytest.mark.parametrize("sleep", [False, True])
def test_closing_an_idle_tier(sleep: bool) -> None:
    SimulatedTier(SPEC, sleep=sleep).close()
