"""Backward asks for saved tensors in another order than the plan has them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from torch import nn

from torchstorm.offload.session import Session

WIDTH, ROWS = 64, 256
AS_PLANNED, SWAPPED = (0, 1), (1, 0)
ORDERS = [AS_PLANNED] * 6 + [SWAPPED] * 3 + [AS_PLANNED]


class Pair(nn.Module):
    """Two networks that have nothing in common but their input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.both = nn.ModuleList(
            nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [one(x).square().mean() for one in self.both]


def gradients(
    model: Pair, step: Callable[[], AbstractContextManager[object]], order: tuple[int, int]
) -> list[torch.Tensor | None]:
    model.zero_grad()
    with step():
        losses = model(torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH))
        for which in order:
            losses[which].backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("share", [0.9, 0.35])
@pytest.mark.usefixtures("short_way")
def test_backward_of_two_losses_in_another_order_follows_no_plan_for_the_first_one_and_has_the_same_bits(
    tmp_path: Path, share: float
) -> None:
    expected = {order: gradients(Pair(), contextlib.nullcontext, order) for order in (AS_PLANNED, SWAPPED)}
    model = Pair()
    with Session(model, unlimited=True) as session:
        gradients(model, session.step, AS_PLANNED)
        budget = int(session.usage().ram_bytes * share)
    model = Pair()
    with Session(model, ram=budget, disk=f"{tmp_path}:1GiB") as session:
        planned = []
        for order in ORDERS:
            before = session.report().num_planned
            found = gradients(model, session.step, order)
            for one, other in zip(found, expected[order], strict=True):
                assert one is not None
                assert other is not None
                assert torch.equal(one, other)
            planned.append(session.report().num_planned - before)
            assert session.usage().ram_bytes <= budget
    assert planned[5] == 1, "the order of the plan"
    assert planned[6] == 0, "the other one, seen for the first time"
    assert planned[8] == 1, "that has a plan by now"
    assert planned[9] == 1, "the first one again, whose plan is still there"
