"""What the suite for every tier does not ask of device memory."""

from __future__ import annotations

import pytest
import torch

from torchstorm.errors import BudgetError
from torchstorm.memory.device import DeviceTier
from torchstorm.memory.tier import TierSpec


def make_tier(capacity_bytes: int) -> DeviceTier:
    return DeviceTier(TierSpec(name="vram", capacity_bytes=capacity_bytes))


def data(nbytes: int) -> torch.Tensor:
    return torch.arange(nbytes).to(torch.uint8)


def test_a_put_is_a_copy_and_a_get_is_another() -> None:
    tier = make_tier(1000)
    source = data(300)
    handle = tier.put(source, label="h.0")
    source.zero_()
    out = torch.zeros(300, dtype=torch.uint8)
    copy = tier.get(handle, out)
    assert copy.done()
    assert torch.equal(out, data(300))
    out.zero_()
    tier.get(handle, out).wait()
    assert torch.equal(out, data(300))
    assert (handle.nbytes, handle.label, handle.written.done()) == (300, "h.0", True)
    tier.close()
    tier.close()


def test_the_budget_holds_to_the_byte_and_the_peak_is_kept() -> None:
    tier = make_tier(500)
    first = tier.put(data(300))
    with pytest.raises(BudgetError) as caught:
        tier.put(data(201))
    assert str(caught.value) == (
        "vram=500 B, but a saved tensor needs 201 B more with 300 B in use. Give vram= at least 501 B, or a larger "
        "budget on a faster tier."
    )
    assert (caught.value.tier, caught.value.budget_bytes, caught.value.needed_bytes) == ("vram", 500, 501)
    tier.put(data(200))
    assert tier.used_bytes == tier.peak_bytes == 500
    tier.free(first)
    assert (tier.used_bytes, tier.peak_bytes) == (200, 500)
    tier.reset_peak()
    assert tier.peak_bytes == 200


def test_freed_twice_is_freed_once_and_its_memory_is_gone() -> None:
    tier = make_tier(500)
    handle = tier.put(data(300))
    tier.free(handle)
    tier.free(handle)
    assert (tier.used_bytes, handle.data) == (0, None)
    assert handle.nbytes == 300


def test_a_copy_that_the_device_has_no_memory_for_takes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    tier = make_tier(500)
    source = data(300)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", refuse)
        with pytest.raises(torch.OutOfMemoryError):
            tier.put(source)
    assert tier.used_bytes == 0
    assert tier.put(data(500)).nbytes == 500


@pytest.mark.gpu
def test_a_gpu_tier_keeps_its_copy_on_the_gpu() -> None:
    source = data(4096).cuda()
    tier = make_tier(4096)
    handle = tier.put(source)
    source.zero_()
    assert handle.data is not None
    assert handle.data.is_cuda
    out = torch.zeros(4096, dtype=torch.uint8, device="cuda")
    tier.get(handle, out).wait()
    assert torch.equal(out.cpu(), data(4096))
