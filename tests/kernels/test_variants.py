"""How a variant is chosen, as torch.compile sees it."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch import Tensor

from torchstorm.kernels.variants import Variant, is_installed


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
