"""Says which module is running, so that a block can be named in plans and errors."""

from __future__ import annotations

from typing import Any

import torch

from torchstorm.offload import torch_private as private


class Naming:
    """While started, keeps the stack of running modules' dotted names in `blocks`.

    Args:
        model: whose modules have names.
        blocks: the stack, innermost last.
    """

    def __init__(self, model: torch.nn.Module, blocks: list[str]) -> None:
        self._hooks: list[Any] = []
        if any(private.is_compiled(module) for module in model.modules()):
            return  # the hooks would be compiled too, and their names lost
        names = {module: name for name, module in model.named_modules()}

        def enter(module: torch.nn.Module, args: object) -> None:
            if torch.compiler.is_compiling():
                return
            blocks.append(names.get(module, blocks[-1] if blocks else ""))

        def leave(module: torch.nn.Module, args: object, output: object) -> None:
            if blocks and not torch.compiler.is_compiling():
                blocks.pop()

        self._hooks = [
            torch.nn.modules.module.register_module_forward_pre_hook(enter),
            torch.nn.modules.module.register_module_forward_hook(leave, always_call=True),
        ]

    def stop(self) -> None:
        """Takes the hooks away."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
