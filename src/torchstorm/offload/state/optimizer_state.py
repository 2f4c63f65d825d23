"""How much memory an optimizer's state takes, and will take."""

from __future__ import annotations

import weakref

import torch


class OptimizerState:
    """The state of the optimizer that a Session was given, or of one that it does not know.

    The optimizer is held by a weak reference, so that one that the user has replaced frees its state.

    Args:
        model: what is trained.
        optimizer: the optimizer; None for one that is not known.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self._model = model
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)
        self._expected_bytes = None if optimizer is None else expected_state_bytes(optimizer)

    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer while it lives; None without one."""
        return None if self._optimizer is None else self._optimizer()

    def missing_bytes(self) -> int:
        """Bytes of state that do not exist yet and will.

        Those of an optimizer that is gone are those that it would have had. Those of one that is not known are two
        copies of what is trained.
        """
        if self._expected_bytes is None:
            return 2 * sum(parameter.nbytes for parameter in self._model.parameters() if parameter.requires_grad)
        optimizer = self.optimizer()
        if optimizer is None:
            return self._expected_bytes
        return 0 if optimizer.state else expected_state_bytes(optimizer)


def expected_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes its state will have: none for SGD without momentum, one copy with; for all others two (three: amsgrad)."""
    total = 0
    for group in optimizer.param_groups:
        nbytes = sum(parameter.nbytes for parameter in group["params"] if parameter.requires_grad)
        if isinstance(optimizer, torch.optim.SGD):
            total += nbytes if group.get("momentum") else 0
        else:
            total += nbytes * (3 if group.get("amsgrad") else 2)
    return total
