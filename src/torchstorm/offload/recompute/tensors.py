"""What the operations of a step are given and return."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that operations on a device draw from unless they are given one."""
    if device.type == "cuda":  # pragma: gpu
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


def has_bytes(tensor: torch.Tensor) -> bool:
    """Whether a tensor is no more than plain numbers in a storage."""
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
        return False
    return not (tensor.is_nested or tensor.is_quantized or tensor._is_zerotensor())


def tensors_of(out: Any) -> list[torch.Tensor]:
    """The tensors that an operation returned, in order."""
    if isinstance(out, torch.Tensor):
        return [out]
    found: list[torch.Tensor] = []
    if isinstance(out, list | tuple):
        collect(out, found)
    return found


def collect(items: Iterable[Any], found: list[torch.Tensor]) -> None:
    """Appends the tensors among the items, and in lists and tuples among them."""
    for item in items:
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, list | tuple):
            collect(item, found)


def is_among(address: int, items: Any) -> bool:
    """Whether the storage at an address is that of a tensor among what an operation was given."""
    return any(one.untyped_storage()._cdata == address for one in tensors_of(items))


def plain_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
    """The tensors among what an operation is given; None where one is more than numbers in a storage."""
    found: list[torch.Tensor] = []
    collect(args, found)
    if kwargs:
        collect(kwargs.values(), found)
    for tensor in found:
        if not has_bytes(tensor):
            return None
    return found


def covers_all(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements are all there is in its storage."""
    dense = tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))
    return dense and tensor.nbytes == tensor.untyped_storage().nbytes()
