"""The memory that is reserved for an optimizer's state."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from torchstorm.offload.state.optimizer_state import OptimizerState

MODEL = nn.Linear(8, 8, bias=False)
NBYTES = 8 * 8 * 4


@pytest.mark.parametrize(
    ("options", "copies"),
    [({"lr": 0.1}, 0), ({"lr": 0.1, "momentum": 0.9}, 1)],
)
def test_the_state_that_sgd_will_have_is_known_also_when_it_is_gone(options: dict[str, float], copies: int) -> None:
    optimizer = torch.optim.SGD(MODEL.parameters(), **options)
    state = OptimizerState(MODEL, optimizer)
    assert state.optimizer() is optimizer
    assert state.missing_bytes() == copies * NBYTES
    del optimizer
    gc.collect()
    assert state.optimizer() is None
    assert state.missing_bytes() == copies * NBYTES


def test_without_an_optimizer_two_copies_of_what_is_trained_are_reserved() -> None:
    assert OptimizerState(MODEL, None).missing_bytes() == 2 * NBYTES


def test_state_that_exists_is_not_missing_and_an_optimizer_is_not_kept_alive() -> None:
    optimizer = torch.optim.AdamW(MODEL.parameters())
    state = OptimizerState(MODEL, optimizer)
    assert state.missing_bytes() == 2 * NBYTES
    MODEL(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    assert state.missing_bytes() == 0
    seen = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert seen() is None
