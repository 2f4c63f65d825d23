"""How much memory an optimizer's state takes, and will take."""

from __future__ import annotations

import torch


def missing_state_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> int:  # pragma: gpu
    """Bytes of state that does not exist yet and will; without an optimizer to ask, two copies of what is trained."""
    if optimizer is None:
        return 2 * sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    return 0 if optimizer.state else expected_state_bytes(optimizer)


def expected_state_bytes(optimizer: torch.optim.Optimizer) -> int:  # pragma: gpu
    """Bytes its state will have: none for SGD without momentum, one copy with; for all others two (three: amsgrad)."""
    total = 0
    for group in optimizer.param_groups:
        nbytes = sum(parameter.nbytes for parameter in group["params"] if parameter.requires_grad)
        if isinstance(optimizer, torch.optim.SGD):
            total += nbytes if group.get("momentum") else 0
        else:
            total += nbytes * (3 if group.get("amsgrad") else 2)
    return total
