"""A model's own loss function, compiled: of logits over a vocabulary eager mode makes several copies in float32.

Models of transformers call `self.loss_function`, which can be set. Compiled, it is a kernel or two that read the logits
as they are, and backward needs nothing else of their size. Before that the end of the forward, where the logits and
their copies lie beside all that is saved, often decided how little of it could stay.

As in all that is compiled, there is no double backward through it. It saves the logits, where eager mode saves what was
made of them: they must stay as they are until backward. Whoever wants the loss uncompiled sets `model.loss_function`
after `storm.compile()`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

from torchstorm.offload import torch_private as private
from torchstorm.offload.compiled.call import Captured
from torchstorm.offload.compiled.kind import new_function
from torchstorm.offload.recompute.watched import unwatched

_WORTH_BYTES = 2**24  # of an argument: the loss of smaller ones takes little time and memory, and stays as it is
_PLACE = "_loss_function"  # where models of transformers keep one that was set
_MOST_COMPILED = 6  # calls that may compile: for a size, for all, for another number of samples, and so on
_ABSENT = object()


class CompiledLoss:
    """Stands where a module has its loss function, until `undo`. A copy of the module gets that function itself.

    Args:
        module: which has it.
        captured: takes note of what is compiled in calls.

    Attributes:
        failure: why it is not compiled after all; "" where it is.
    """

    def __init__(self, module: nn.Module, captured: Captured) -> None:
        self._module, self._captured = module, captured
        before: Any = vars(module).get(_PLACE, _ABSENT)
        self._before: Any = before._before if isinstance(before, CompiledLoss) else before
        if isinstance(before, CompiledLoss):
            before.undo()
        self._function: Any = module.loss_function
        self.failure = ""
        self._num_compiled = 0  # calls that have compiled
        self._compiled = torch.compile(new_function(_call, "loss"))
        setattr(module, _PLACE, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_large = any(
            isinstance(one, torch.Tensor) and one.nbytes >= _WORTH_BYTES for one in tree_leaves((args, kwargs))
        )
        if not is_large or self.failure or not torch.is_grad_enabled() or forward_ad._current_level >= 0:
            return self._function(*args, **kwargs)
        before, breaks_before = private.num_compiled(), private.num_breaks()
        try:
            with unwatched():
                return self._compiled(self._function, args, kwargs)
        except private.compiler_failures() as error:
            cause = getattr(error, "inner_exception", error)
            if isinstance(cause, torch.OutOfMemoryError):
                raise cause from error
            loss = self._function(*args, **kwargs)  # which raises, if what is wrong is what it was given
            self.failure = f"{type(cause).__name__}: {cause}".splitlines()[0]
            return loss
        finally:
            self._captured.num_graphs += private.num_compiled() - before
            self._num_compiled += private.num_compiled() != before
            if private.num_breaks() != breaks_before:
                self.failure = self.failure or "a part of it cannot be compiled"
            elif self._num_compiled >= _MOST_COMPILED:
                self.failure = self.failure or f"{_MOST_COMPILED} of its calls had to be compiled"

    def undo(self) -> None:
        """The module has its own loss function again, if no other was set meanwhile."""
        if vars(self._module).get(_PLACE) is not self:
            return
        if self._before is _ABSENT:
            delattr(self._module, _PLACE)
        else:
            setattr(self._module, _PLACE, self._before)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any]]:
        return operator.itemgetter(0), ((self._function,),)  # which is read without torchstorm, too


def compiled_losses(model: nn.Module, captured: Captured) -> list[CompiledLoss]:
    """The loss functions of a model and its parts, compiled from now on."""
    return [CompiledLoss(module, captured) for module in model.modules() if _has_loss(module)]


def _has_loss(module: nn.Module) -> bool:
    """Whether a module computes a loss by a function that can be set. Other parts of a model have the attribute, too,
    but no kind of loss."""
    if not isinstance(getattr(type(module), "loss_function", None), property) or _PLACE in module._modules:
        return False
    if _PLACE in vars(module):
        return callable(vars(module)[_PLACE])  # a class of the user's may name something else so
    return getattr(module, "loss_type", None) is not None


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)
