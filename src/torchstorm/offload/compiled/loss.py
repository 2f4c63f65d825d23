"""A model's own loss function, compiled: of logits over a vocabulary eager mode makes several copies in float32.

Models of transformers call `self.loss_function`, which can be set. Compiled, it is a kernel or two that read the logits
as they are, and backward needs nothing else of their size. Before that the end of the forward, where the logits and
their copies lie beside all that is saved, often decided how little of it could stay.

As in all that is compiled, there is no double backward through it. It saves the logits, where eager mode saves what was
made of them: they must stay as they are until backward. Whoever wants the loss uncompiled sets `model.loss_function`
after `storm.compile()`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

from torchstorm.offload import torch_private as private
from torchstorm.offload.compiled.call import Captured
from torchstorm.offload.compiled.kind import new_function
from torchstorm.offload.loss.place import WORTH_BYTES, StandIn, with_losses
from torchstorm.offload.recompute.watched import unwatched

_MOST_COMPILED = 6  # calls that may compile: for a size, for all, for another number of samples, and so on


class CompiledLoss(StandIn):
    """Stands where a module has its loss function, until `undo`.

    Args:
        module: which has it.
        captured: takes note of what is compiled in calls.

    Attributes:
        failure: why it is not compiled after all; "" where it is.
    """

    def __init__(self, module: nn.Module, captured: Captured) -> None:
        super().__init__(module)
        self._captured = captured
        self.failure = ""
        self._num_compiled = 0  # calls that have compiled
        self._compiled = torch.compile(new_function(_call, "loss"))
        self.place()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_large = any(
            isinstance(one, torch.Tensor) and one.nbytes >= WORTH_BYTES for one in tree_leaves((args, kwargs))
        )
        if not is_large or self.failure or not torch.is_grad_enabled() or forward_ad._current_level >= 0:
            return self.function(*args, **kwargs)
        before, breaks_before = private.num_compiled(), private.num_breaks()
        try:
            with unwatched():
                return self._compiled(self.function, args, kwargs)
        except private.compiler_failures() as error:
            cause = getattr(error, "inner_exception", error)
            if isinstance(cause, torch.OutOfMemoryError):
                raise cause from error
            loss = self.function(*args, **kwargs)  # which raises, if what is wrong is what it was given
            self.failure = f"{type(cause).__name__}: {cause}".splitlines()[0]
            return loss
        finally:
            self._captured.num_graphs += private.num_compiled() - before
            self._num_compiled += private.num_compiled() != before
            if private.num_breaks() != breaks_before:
                self.failure = self.failure or "a part of it cannot be compiled"
            elif self._num_compiled >= _MOST_COMPILED:
                self.failure = self.failure or f"{_MOST_COMPILED} of its calls had to be compiled"


def compiled_losses(model: nn.Module, captured: Captured) -> list[CompiledLoss]:
    """The loss functions of a model and its parts, compiled from now on."""
    return [CompiledLoss(module, captured) for module in with_losses(model)]


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)
