"""What identifies a model and its batch: a plan of another one would move the wrong tensors."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable

import torch
from torch.nn.parameter import is_lazy

from torchstorm.plan.plan import Workload


def workload_of(model: torch.nn.Module, inputs: Iterable[torch.Tensor] = ()) -> Workload:
    """What identifies a model, and the tensors that it is given.

    Args:
        model: any nn.Module.
        inputs: the tensors among the arguments of its forward, in order.
    """
    digest = hashlib.sha256()
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in sorted(named):
            digest.update(f"{kind} {name} {shape_of(tensor)}\n".encode())
    return Workload(
        model=type(model).__name__,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        shapes_sha256=digest.hexdigest(),
        inputs=tuple(shape_of(tensor) for tensor in inputs),
    )


def state_of(parameters: list[torch.nn.Parameter]) -> int | None:
    """What tells a model's parameters from those after some were added, replaced or frozen, or their type was changed;
    None where a lazy module has not seen its first batch."""
    if any(map(is_lazy, parameters)):
        return None
    return hash(tuple([(parameter.requires_grad, parameter.dtype, parameter.numel()) for parameter in parameters]))


def shape_of(tensor: torch.Tensor) -> str:
    """A tensor's shape and type, as in "4x128 int64"."""
    sizes = "x".join(map(str, tensor.shape)) or "scalar"
    return f"{sizes} {str(tensor.dtype).removeprefix('torch.')}"


@functools.lru_cache(maxsize=256)
def sizes_of(shapes: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The dimensions and types of tensors, and all their sizes in a row.

    Args:
        shapes: as `shape_of` writes them.
    """
    kinds: list[str] = []
    sizes: list[int] = []
    for text in shapes:
        shape, _, dtype = text.partition(" ")
        found = [] if shape == "scalar" else list(map(int, shape.split("x")))
        sizes += found
        kinds.append(f"{len(found)} {dtype}")
    return tuple(kinds), tuple(sizes)
