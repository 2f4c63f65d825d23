"""Merges the dimensions of tensors with equal shapes to as few as possible, in the first one's memory order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Walk:
    """The merged dimensions, with the first tensor's largest stride first.

    Attributes:
        sizes: sizes of the dimensions, without those of size 1.
        strides: strides of each tensor over them, in elements.
    """

    sizes: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]

    @property
    def is_flat(self) -> bool:
        """Whether all tensors are one contiguous dimension."""
        return not self.sizes or (len(self.sizes) == 1 and all(own == (1,) for own in self.strides))


def same_memory(tensors: Sequence[Tensor]) -> bool:
    """Whether all have the first one's shape and strides. If it is dense, all are one contiguous dimension."""
    first = tensors[0]
    shape, strides = first.shape, first.stride()
    return all(x.shape == shape and x.stride() == strides for x in tensors[1:])


def walk(tensors: Sequence[Tensor]) -> Walk:
    """The merged dimensions of tensors with equal shapes: those that are contiguous in all of them become one."""
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
    """An empty tensor for an operation on a and b, in the memory order of the one with the result's shape."""
    shape = torch.broadcast_shapes(a.shape, b.shape)
    if a.shape == shape:
        return torch.empty_like(a)
    if b.shape == shape:
        return torch.empty_like(b)
    return a.new_empty(shape)
