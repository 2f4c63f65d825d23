"""What calls of compiled blocks go through, and what a model that was compiled otherwise is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from torchstorm.errors import UnsupportedError
from torchstorm.offload import torch_private as private
from torchstorm.offload.recompute.watched import unwatched


@dataclass
class Captured:
    """What Dynamo has made of the calls that a Session compiles.

    Attributes:
        num_graphs: that it has captured there.
        has_breaks: whether anything ran uncompiled within blocks.
    """

    num_graphs: int = 0
    has_breaks: bool = False


class BlockCall:
    """What a block's call goes through. A copy of the model does not take it along.

    Args:
        name: of the block.
        module: the block.
        call: runs it, with the name and the module first, and then its arguments and keyword arguments.
        captured: takes note of what is compiled in it.
        on_enter: told the name when the block is called.
        on_leave: told that it has returned or raised.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        call: Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any]], Any],
        captured: Captured,
        *,
        on_enter: Callable[[str], object],
        on_leave: Callable[[], object],
    ) -> None:
        self._name, self._module, self._call, self._captured = name, module, call, captured
        self._on_enter, self._on_leave = on_enter, on_leave

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        captured = self._captured
        self._on_enter(self._name)
        num_before, breaks_before = private.num_compiled(), private.num_breaks()
        try:
            with unwatched():  # if steps are watched by it; else all operations are seen
                return self._call(self._name, self._module, args, kwargs)
        finally:
            captured.num_graphs += private.num_compiled() - num_before
            captured.has_breaks |= private.num_breaks() != breaks_before
            self._on_leave()


def is_ours(module: nn.Module) -> bool:
    """Whether a module is a block that a Session has compiled."""
    return isinstance(private.get_call(module), BlockCall)


def refuse_compiled_whole(model: nn.Module) -> None:
    """Raises where nothing can be planned within a model.

    Raises:
        UnsupportedError: the model was compiled as a whole.
    """
    if private.is_compiled(model) and not is_ours(model):
        inner = getattr(model, "_orig_mod", model)
        raise UnsupportedError(
            f"This {type(inner).__name__} was compiled as a whole, so its backward asks for every saved tensor at once "
            "and no budget below all of them can be kept. Give the Session the model as it was before torch.compile, "
            "and compile it block by block with storm.compile(model)."
        )
