"""How one kernel walks through the tensors of pointwise operations: in the order of the results' memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchstorm.offload.recompute import pointwise

_MOST_DIMS = 4
_MOST_ELEMENTS = 1 << 31
WIDTH = 8
"""Elements that a thread may compute at once."""


@dataclass(frozen=True)
class Look:
    """A dense tensor's size, strides and dtype."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @staticmethod
    def of(tensor: torch.Tensor) -> Look | None:
        """None for a tensor that is not dense, or no plain one."""
        look = Look(tensor.dtype, tuple(tensor.shape), tensor.stride())
        is_plain = type(tensor) is torch.Tensor and tensor.storage_offset() == 0
        is_dense = tensor.untyped_storage().nbytes() == tensor.nbytes and math.prod(look.size) > 1
        return look if is_plain and is_dense and look.dtype in pointwise.C_TYPES else None


@dataclass(frozen=True)
class Geometry:
    """How a kernel walks through tensors: the results' elements in the order of their memory.

    Attributes:
        num: elements.
        sizes: of the dimensions that are left when those that lie behind one another in all tensors are one.
        steps: each input's distances along these.
        width: elements that a thread computes.
    """

    num: int
    sizes: tuple[int, ...]
    steps: tuple[tuple[int, ...], ...]
    width: int

    @staticmethod
    def of(result: Look, looks: Sequence[Look], offsets: Sequence[int]) -> Geometry | None:
        """None where there are too many dimensions or elements.

        Args:
            result: of all results.
            looks: of the inputs, as in `Example`.
            offsets: bytes before their first elements.
        """
        order = sorted((d for d in range(len(result.size)) if result.size[d] > 1), key=lambda d: -result.stride[d])
        sizes = [result.size[dim] for dim in order]
        columns = [[result.stride[dim], *(look.stride[dim] for look in looks)] for dim in order]
        merged: list[tuple[int, list[int]]] = []
        for size, column in zip(sizes, columns, strict=True):
            if merged and all(last == step * size for last, step in zip(merged[-1][1], column, strict=True)):
                merged[-1] = merged[-1][0] * size, column
            else:
                merged.append((size, column))
        if not merged:
            return None
        farthest = [sum((size - 1) * column[at] for size, column in merged) for at in range(len(looks) + 1)]
        if len(merged) > _MOST_DIMS or max(farthest) >= _MOST_ELEMENTS or merged[-1][1][0] != 1:
            return None
        steps = [tuple(column[at + 1] for _, column in merged) for at in range(len(looks))]
        is_wide = merged[-1][0] % WIDTH == 0 and all(
            step[-1] in (0, 1)
            and (step[-1] == 0 or not any(one % WIDTH for one in step[:-1]))
            and offset % (look.dtype.itemsize * WIDTH) == 0
            for step, look, offset in zip(steps, looks, offsets, strict=True)
        )
        width = WIDTH if is_wide else 1
        return Geometry(math.prod(result.size), tuple(size for size, _ in merged), tuple(steps), width)


def aligned(size: Sequence[int], stride: Sequence[int], to: tuple[int, ...]) -> tuple[int, ...] | None:
    """A tensor's strides by the dimensions of a larger one, 0 where it is repeated; None where it does not fit."""
    missing = len(to) - len(size)
    if missing < 0 or any(one not in (1, other) for one, other in zip(size, to[missing:], strict=True)):
        return None
    return (0,) * missing + tuple(0 if one == 1 else step for one, step in zip(size, stride, strict=True))
