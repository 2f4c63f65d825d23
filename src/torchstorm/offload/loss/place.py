"""Where a model of transformers has its loss function: an attribute, which the model calls and which can be set."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

from torch import nn

WORTH_BYTES = 2**24
"""Of an argument: the loss of smaller ones takes little time and memory, and stays as it is."""

_PLACE = "_loss_function"  # where a module keeps one that was set; without it, there is one for the model's kind
_ABSENT = object()


class StandIn:
    """What stands in for a module's loss function, from `place` until `undo`. A copy of the module gets the function.

    Args:
        module: which has it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before: Any = _ABSENT
        self._found: Any = _ABSENT

    @property
    def is_placed(self) -> bool:
        """Whether it stands there now."""
        return vars(self._module).get(_PLACE) is self

    def place(self) -> None:
        """Calls of the module's loss function come here from now on, and no longer to what stood in for it before."""
        before = vars(self._module).get(_PLACE, _ABSENT)
        if isinstance(before, StandIn):
            before.undo()
            before = vars(self._module).get(_PLACE, _ABSENT)
        self._before, self._found = before, _ABSENT
        vars(self._module)[_PLACE] = self

    @property
    def function(self) -> Any:
        """What it stands in for. Asked for only when it is called: transformers warns of models whose kind of loss it
        does not know."""
        if self._found is _ABSENT:
            was_placed = self.is_placed
            self.undo()
            try:
                self._found = self._module.loss_function
            finally:
                if was_placed:
                    vars(self._module)[_PLACE] = self
        return self._found

    def undo(self) -> None:
        """The module has its own loss function again, if no other was set meanwhile."""
        if not self.is_placed:
            return
        if self._before is _ABSENT:
            del vars(self._module)[_PLACE]
        else:
            vars(self._module)[_PLACE] = self._before

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any]]:
        return operator.itemgetter(0), ((self.function,),)  # which is read without torchstorm, too


def function_set(module: nn.Module) -> Any:
    """The loss function that was set in a module; None for none."""
    return vars(module).get(_PLACE)


def with_losses(model: nn.Module) -> list[nn.Module]:
    """The modules of a model, itself among them, that compute a loss by a function that can be set."""
    return [module for module in model.modules() if _has_loss(module)]


def _has_loss(module: nn.Module) -> bool:
    """Other parts of a model have the attribute, too, but no kind of loss, and are given no labels."""
    if not isinstance(getattr(type(module), "loss_function", None), property) or _PLACE in module._modules:
        return False
    if _PLACE in vars(module):
        return callable(vars(module)[_PLACE])  # a class of the user's may name something else so
    return getattr(module, "loss_type", None) is not None or "labels" in inspect.signature(module.forward).parameters
