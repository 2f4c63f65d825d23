"""The same training with and without a Session, compared to the last bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from torchstorm.offload.session import Session

Step = Callable[[torch.nn.Module, int], Any]


@dataclass
class Outcome:
    """What a training left behind."""

    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor | None]] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)


def train(
    make: Callable[[], torch.nn.Module],
    step: Step,
    session_of: Callable[[torch.nn.Module, torch.optim.Optimizer], Session] | None,
    *,
    num_steps: int = 4,
) -> tuple[Outcome, Session | None]:
    """Trains a fresh model; `step(model, index)` runs forward and backward and returns the loss."""
    torch.manual_seed(1)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = session_of(model, optimizer) if session_of else None
    outcome = Outcome()
    for index in range(num_steps):
        torch.manual_seed(100 + index)
        with session.step() if session else contextlib.nullcontext():
            loss = step(model, index)
        outcome.losses.append(torch.as_tensor(loss).detach().clone())
        outcome.gradients.append(
            {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        )
        optimizer.step()
        optimizer.zero_grad()
    outcome.state = {name: value.clone() for name, value in model.state_dict().items()}
    return outcome, session


def saved_bytes(make: Callable[[], torch.nn.Module], step: Step) -> int:
    """What an unlimited Session counts at its peak."""
    _, session = train(make, step, lambda model, optimizer: Session(model, unlimited=True), num_steps=1)
    assert session is not None
    return session.usage().ram_bytes


def assert_same(expected: Outcome, found: Outcome) -> None:
    """Losses, every gradient of every step, parameters and buffers: equal to the last bit."""
    for index, (one, other) in enumerate(zip(expected.losses, found.losses, strict=True)):
        assert torch.equal(one, other), f"loss of step {index}: {one} without a Session, {other} with one"
    for index, (ones, others) in enumerate(zip(expected.gradients, found.gradients, strict=True)):
        for name, one in ones.items():
            other = others[name]
            assert (one is None) == (other is None), f"step {index}: {name}.grad"
            assert one is None or torch.equal(one, other), f"step {index}: {name}.grad differs"
    for name, value in expected.state.items():
        assert torch.equal(value, found.state[name]), f"{name} differs at the end"


def assert_exact_within(
    make: Callable[[], torch.nn.Module],
    step: Step,
    spill: Path,
    *,
    share: float = 0.5,
    num_steps: int = 4,
    **options: Any,
) -> Session:
    """Trains with `share` of what the model saves, and with everything; returns the Session, closed."""
    budget = int(saved_bytes(make, step) * share)
    expected, _ = train(make, step, None, num_steps=num_steps)
    found, session = train(
        make,
        step,
        lambda model, optimizer: Session(model, ram=budget, disk=str(spill), optimizer=optimizer, **options),
        num_steps=num_steps,
    )
    assert session is not None
    assert_same(expected, found)
    report = session.report()
    assert report.highest is not None
    assert report.highest.ram_bytes <= budget, f"{report.highest.ram_bytes} over {budget}"
    assert report.highest.disk_bytes > 0, "nothing moved, so nothing was tested"
    session.close()
    return session
