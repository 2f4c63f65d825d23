"""Knows which tensors are the user's: the model's own, and those that the user gave to it, never move."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from torchstorm.offload.replan.workload import shape_of
from torchstorm.offload.step.hooks import SavedTensors
from torchstorm.offload.torch_private import asks_for_function_modes

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def tensors_in(model: torch.nn.Module) -> tuple[list[torch.nn.Parameter], list[torch.Tensor], bool]:
    """A model's parameters and buffers, each once, and whether one of its modules computes in another way where a
    function mode is active. Every step begins with it, so it makes no names, as PyTorch's own `parameters()` and
    `buffers()` do."""
    parameters: dict[int, torch.nn.Parameter] = {}
    buffers: dict[int, torch.Tensor] = {}
    kinds: set[type[torch.nn.Module]] = set()
    seen: set[torch.nn.Module | None] = {None}
    modules: list[torch.nn.Module | None] = [model]
    while modules:
        module = modules.pop()
        if module in seen or module is None:
            continue
        seen.add(module)
        kinds.add(type(module))
        if module._parameters:
            for parameter in module._parameters.values():
                if parameter is not None:
                    parameters[id(parameter)] = parameter
        if module._buffers:
            for buffer in module._buffers.values():
                if buffer is not None:
                    buffers[id(buffer)] = buffer
        if module._modules:
            modules += module._modules.values()
    return list(parameters.values()), list(buffers.values()), any(map(asks_for_function_modes, kinds))


def storages_of(tensors: Iterable[torch.Tensor]) -> set[int]:
    """The addresses of the storages of a model's parameters and buffers."""
    return {tensor.untyped_storage()._cdata for tensor in tensors if type(tensor) in _PLAIN}


class NoteInputs:
    """The hook that tells which tensors the user gave to the model; in a copy of the model it does nothing.

    Attributes:
        shapes: of the tensors in the step's first call, as a plan's subject has them; None before it.
        num_samples: dim 0 of the first that has one; 0 where there is none.
    """

    def __init__(self, saved: SavedTensors | None = None) -> None:
        self.shapes: tuple[str, ...] | None = None
        self.num_samples = 0
        self._saved = weakref.ref(saved) if saved is not None else None

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return  # compiled with a function of the user's: what it does would be, too
        saved = self._saved() if self._saved is not None else None
        if saved is None:
            return
        with torch._C.DisableTorchFunction():  # no mode counts what is done here
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            saved.add_inputs(tensors)
            if self.shapes is None:
                self.shapes = tuple(map(shape_of, tensors))
                self.num_samples = next((tensor.shape[0] for tensor in tensors if tensor.dim()), 0)

    def __reduce__(self) -> tuple[type[NoteInputs], tuple[()]]:
        return NoteInputs, ()
