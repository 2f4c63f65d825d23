"""How tensors of one shape lie in memory: the fewest dimensions that walk all of them, in the first one's order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Walk:
    """Dimensions that all tensors have, the first tensor's largest stride first.

    Attributes:
        sizes: of the dimensions; never 1, so that a tensor of one number has none.
        strides: of each tensor over them, in numbers.
    """

    sizes: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]

    @property
    def is_flat(self) -> bool:
        """Whether all tensors are one row of numbers."""
        return not self.sizes or (len(self.sizes) == 1 and all(own == (1,) for own in self.strides))


def same_memory(tensors: Sequence[Tensor]) -> bool:
    """Whether all have the first one's shape and strides, so that, if it is dense, all are one row of numbers."""
    first = tensors[0]
    shape, strides = first.shape, first.stride()
    return all(x.shape == shape and x.stride() == strides for x in tensors[1:])


def walk(tensors: Sequence[Tensor]) -> Walk:
    """The dimensions of tensors of one shape; those that lie behind one another in all of them become one."""
    sizes = tensors[0].shape
    strides = [x.stride() for x in tensors]
    order = sorted((d for d in range(len(sizes)) if sizes[d] != 1), key=lambda d: (-strides[0][d], -strides[-1][d], d))
    merged: list[tuple[int, tuple[int, ...]]] = []
    for d in order:
        size, own = sizes[d], tuple(stride[d] for stride in strides)
        if merged and all(outer == inner * size for outer, inner in zip(merged[-1][1], own, strict=True)):
            merged[-1] = merged[-1][0] * size, own
        else:
            merged.append((size, own))
    return Walk(
        sizes=tuple(size for size, _ in merged),
        strides=tuple(tuple(own[k] for _, own in merged) for k in range(len(tensors))),
    )


def empty_result(a: Tensor, b: Tensor) -> Tensor:
    """Room for what a and b make together: in the memory order of the one that has the result's shape already."""
    shape = torch.broadcast_shapes(a.shape, b.shape)
    if a.shape == shape:
        return torch.empty_like(a)
    if b.shape == shape:
        return torch.empty_like(b)
    return a.new_empty(shape)
