"""Knows which tensors are the user's: the model's own, and those that the user gave to it, never move."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from torchstorm.offload.native.library import library
from torchstorm.offload.replan.workload import shape_of, state_of
from torchstorm.offload.step.hooks import SavedTensors
from torchstorm.offload.torch_private import asks_for_function_modes

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


_HELD = operator.attrgetter("_parameters", "_buffers", "_modules")


class ModelTensors:
    """A model's parameters and buffers, each once.

    Every step begins with them, so what was found once is only compared.

    Args:
        model: any nn.Module.
        check: makes sure that a Session can work with its parameters.

    Attributes:
        parameters, buffers: as of the last `read`.
        numbers: of the parameters, by `id`.
        asks_for_modes: whether a module of it computes in another way where a function mode is active.
        state: what tells steps of the model from those after its parameters were replaced or frozen, or their type was
            changed; None where a lazy module has not seen its first batch.
        fixed: addresses of the storages of both.
    """

    def __init__(self, model: torch.nn.Module, check: Callable[[list[torch.nn.Parameter]], None]) -> None:
        self._model = model
        self._check = check
        self._seen: int | None = None  # see `Library.look`
        self.state: int | None = None
        self.fixed: set[int] = set()
        self._modules: list[torch.nn.Module] = []
        self._held: list[dict[str, Any]] = []  # in which these hold their tensors and modules
        self._items: list[Any] = []  # in these
        self.parameters: list[torch.nn.Parameter] = []
        self.buffers: list[torch.Tensor] = []
        self.numbers: set[int] = set()
        self.asks_for_modes = False

    def read(self) -> None:
        """Looks at the model, which may have been changed since.

        Raises:
            TorchstormError: of the check.
        """
        found = library()
        are_held = found.holds if found is not None else holds
        if not self._held or not are_held(self._modules, self._held, self._items):
            self._find()
        seen = found.look(self.parameters, self.buffers) if found is not None else None
        if seen is None or seen != self._seen:
            self._seen = None
            self._check(self.parameters)
            self.state, self.fixed = state_of(self.parameters), _storages_of([*self.parameters, *self.buffers])
            self._seen = seen

    def _find(self) -> None:
        self._modules = modules = list(self._model.modules())
        self._held = list(chain.from_iterable(map(_HELD, modules)))
        self._items = list(chain.from_iterable(map(dict.values, self._held)))
        self.parameters = list(_each_once(one._parameters for one in modules))
        self.buffers = list(_each_once(one._buffers for one in modules))
        self.numbers = set(map(id, self.parameters))
        self.asks_for_modes = any(map(asks_for_function_modes, {type(one) for one in modules}))


def holds(modules: list[torch.nn.Module], held: list[dict[str, Any]], items: list[Any]) -> bool:
    """Whether modules still hold their tensors and modules in these dictionaries, and in them these."""
    now = list(chain.from_iterable(map(_HELD, modules)))
    if len(now) != len(held) or not all(map(operator.is_, now, held)):
        return False
    found = list(chain.from_iterable(map(dict.values, now)))
    return len(found) == len(items) and all(map(operator.is_, found, items))


def _each_once(held: Iterable[dict[str, Any]]) -> Iterable[Any]:
    tensors = chain.from_iterable(map(dict.values, held))
    return {id(one): one for one in tensors if one is not None}.values()


def _storages_of(tensors: Iterable[torch.Tensor]) -> set[int]:
    """The addresses of the storages of a model's parameters and buffers."""
    return {tensor.untyped_storage()._cdata for tensor in tensors if type(tensor) in _PLAIN}


class NoteInputs:
    """The hook that tells which tensors the user gave to the model; in a copy of the model it does nothing.

    Attributes:
        shapes: of the tensors in the step's first call, as a plan's workload has them; None before it.
        num_samples: dim 0 of the first that has one; 0 where there is none.
        num_calls: how often the model was called.

    Args:
        saved: hears of the tensors; None in a copy of the model.
        begin: called once the shapes of the first call are known, if gradients are wanted of it.
    """

    def __init__(self, saved: SavedTensors | None = None, begin: Callable[[], None] | None = None) -> None:
        self.shapes: tuple[str, ...] | None = None
        self.num_samples = 0
        self.num_calls = 0
        self._saved = weakref.ref(saved) if saved is not None else None
        self._begin = begin or _nothing

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return  # compiled with a function of the user's: what it does would be, too
        saved = self._saved() if self._saved is not None else None
        if saved is None:
            return
        with torch._C.DisableTorchFunction():  # no mode counts what is done here
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            saved.add_inputs(tensors)
            self.num_calls += 1
            if self.shapes is None:
                self.shapes = tuple(map(shape_of, tensors))
                self.num_samples = next((tensor.shape[0] for tensor in tensors if tensor.dim()), 0)
                begin, self._begin = self._begin, _nothing  # once, and without a cycle of references after that
                if torch.is_grad_enabled():  # else nothing is saved of this call, whatever its sizes
                    begin()

    def __reduce__(self) -> tuple[type[NoteInputs], tuple[()]]:
        return NoteInputs, ()


def _nothing() -> None:
    pass
