"""On a GPU a dropout is a single operation, which a settled step records as a whole with its random state."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from offload.forced import at_random, force_recompute, recorded_as_a_whole
from torchstorm.offload.recompute.operators import single
from torchstorm.offload.session import Session

pytestmark = pytest.mark.gpu

WIDTH, ROWS, NUM_BLOCKS = 256, 4096, 4


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(NUM_BLOCKS))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + F.dropout(layer(norm(x)).tanh() * 0.5, p=0.3).sin()
            x = F.dropout(x, 0.1, self.training)
        return x


def take_step(model: nn.Module, index: int) -> list[torch.Tensor]:
    torch.manual_seed(index)
    loss = model(torch.randn(ROWS, WIDTH, device="cuda")).square().mean()
    loss.backward()
    found = [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)]
    model.zero_grad()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_what_drops_is_computed_again_from_the_state_that_it_drew_from(
    share: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_recompute(monkeypatch, at_random(random.Random(0), share))
    recorded = recorded_as_a_whole(monkeypatch)
    torch.manual_seed(0)
    model = Drops().cuda()
    torch.set_default_dtype(dtype)
    try:
        model.to(dtype)
        with Session(model, vram="1GiB", ram="1GiB", check=True) as session:
            for index in range(8):
                expected = take_step(model, index)
                drawn = torch.cuda.get_rng_state()
                with session.step():
                    found = take_step(model, index)
                assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True)), index
                assert torch.equal(drawn, torch.cuda.get_rng_state())
            plan = session.plan()
            assert plan is not None
            assert plan.recomputes
            assert session.report().num_planned >= 4
    finally:
        torch.set_default_dtype(torch.float32)
    assert {"aten.native_dropout.default", "aten.native_layer_norm.default"} <= set(recorded)


def test_a_dropout_that_is_another_operation_is_not_taken_for_it() -> None:
    x = torch.ones(8, device="cuda", requires_grad=True)
    assert single(F.dropout, (x, 0.5), {}) is not None
    assert single(F.dropout, (x,), {"training": True}) is not None
    others: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        *(((x, p), {}) for p in (0.0, 1.0)),
        *(((x,), {name: value}) for name, value in (("training", False), ("inplace", True))),
        ((x.cpu(), 0.5), {}),
        ((x[:0], 0.5), {}),
    ]
    for args, kwargs in others:
        assert single(F.dropout, args, kwargs) is None
