"""Numbers that a forecast knows although its tensors have none: positions, masks and lengths.

Models ask such small whole-number tensors what to do (whether a mask is all ones, how long a sequence is). As long as
they follow from shapes and constants alone, their values are computed on the host beside the shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

_MOST_ELEMENTS = 2**20


class KnownNumbers:
    """Values of meta tensors, by the address of their storage."""

    def __init__(self) -> None:
        self._values: dict[int, torch.Tensor] = {}  # (elements of the storage,) on the host

    def forget(self, address: int) -> None:
        """The storage is gone."""
        self._values.pop(address, None)

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A tensor's values as a view on the host, None where they are not known."""
        if not tensor.is_meta:
            return tensor
        values = self._values.get(tensor.untyped_storage()._cdata)
        if values is None or values.dtype != tensor.dtype:
            return None
        return values.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def learn(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Notes the values of a meta tensor whose storage is its own."""
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        if tensor.dtype.is_floating_point or tensor.is_complex() or not 0 < size <= _MOST_ELEMENTS:
            return
        flat = torch.zeros(size, dtype=tensor.dtype)
        flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).copy_(values)
        self._values[tensor.untyped_storage()._cdata] = flat

    def follow(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: Sequence[torch.Tensor],
        new: Sequence[torch.Tensor],
        written: Sequence[torch.Tensor],
    ) -> None:
        """Does to the values what an operation did to the shapes.

        Args:
            func, args, kwargs: the operation.
            inputs: all tensors among its arguments.
            new: the tensors that it made, each with a storage of its own.
            written: those of its arguments that it changed.
        """
        if not written and not (len(new) == 1 and not new[0].dtype.is_floating_point):
            return
        if not any(self._values.get(tensor.untyped_storage()._cdata) is not None for tensor in written) and written:
            return
        found = self.compute(func, args, kwargs, inputs) if not new or new[0].numel() <= _MOST_ELEMENTS else None
        if found is None:
            for tensor in written:
                self.forget(tensor.untyped_storage()._cdata)
        elif new and isinstance(found, torch.Tensor):
            self.learn(new[0], found)

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: Sequence[torch.Tensor]) -> Any:
        """Runs an operation on the host, on the values of its arguments; None where one of them is not known."""
        if any(self.of(tensor) is None for tensor in inputs) or torch.Tag.nondeterministic_seeded in func.tags:
            return None
        args, kwargs = tree_map_only(torch.Tensor, self.of, (args, kwargs))
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return func(*args, **kwargs)
