"""How a variant is chosen, as torch.compile sees it."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch import Tensor

from torchstorm.errors import DeviceError
from torchstorm.kernels.variants import Variant, choose, is_installed


def test_dynamo_reads_the_choice_of_a_gpu_s_variant_without_a_warning_or_a_break(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hopper = Variant(name="hopper", lesson="", costs="", capability=(9, 0), needs=("torch",))
    device = torch.device("cuda", 0)
    torch.compiler.reset()
    for capability, expected in (((9, 0), 1.0), ((8, 0), 0.0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, here=capability: here)

        def compute(x: Tensor) -> Tensor:
            return x if hopper.why_not(device, x.dtype) or not is_installed("torch") else x + 1

        compiled = torch.compile(compute, backend="eager", fullgraph=True)
        assert compiled(torch.zeros(1)).item() == expected
        torch.compiler.reset()


def test_a_module_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_installed("torch")
    assert not is_installed("no_such_package.no_such_module")
    monkeypatch.setattr(
        import_module("torchstorm.kernels.variants"), "find_spec", lambda module: pytest.fail(f"{module} again")
    )
    assert is_installed("torch")
    assert not is_installed("no_such_package.no_such_module")


def test_whether_a_variant_runs_is_asked_once_for_each_device_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.dtype] = []

    def why_not(self: Variant, device: torch.device, dtype: torch.dtype) -> str:
        asked.append(dtype)
        return "it does not" if dtype == torch.float64 else ""

    monkeypatch.setattr(Variant, "why_not", why_not)
    ladder = (Variant(name="one", lesson="", costs="", devices=("cpu",)),)
    for dtype in (torch.float32, torch.float32, torch.float16):
        assert choose("test_asked", ladder, "one", torch.zeros(1, dtype=dtype), auto=lambda: "one") == "one"
    assert asked == [torch.float32, torch.float16]
    for _ in range(2):
        with pytest.raises(DeviceError, match="it does not"):
            choose("test_asked", ladder, "one", torch.zeros(1, dtype=torch.float64), auto=lambda: "one")
