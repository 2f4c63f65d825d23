"""Knows which tensors the user gave to the model: those are counted, and never moved."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from torchstorm.offload.saved import SavedTensors


class NoteInputs:
    """The hook that tells which tensors the user gave to the model; in a copy of the model it does nothing."""

    def __init__(self, saved: SavedTensors | None = None) -> None:
        self._saved = weakref.ref(saved) if saved is not None else None

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        saved = self._saved() if self._saved is not None else None
        if saved is not None:
            saved.add_inputs([leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)])

    def __reduce__(self) -> tuple[type[NoteInputs], tuple[()]]:
        return NoteInputs, ()
