"""Merges the batch dimensions of two operands to as few as their strides allow, without copies."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

MOST_DIMENSIONS = 2


@dataclass(frozen=True, kw_only=True)
class Batches:
    """Pairs of matrices indexed by (outer, inner), with strides in elements; 0 for a broadcast matrix.

    Attributes:
        sizes: (outer, inner); the inner index is the fastest.
        a_strides, b_strides: strides of (outer, inner).
        a_offset, b_offset: offset of the first pair from each operand's first element.
        first: index of the first pair among all pairs.
    """

    sizes: tuple[int, int]
    a_strides: tuple[int, int]
    b_strides: tuple[int, int]
    a_offset: int
    b_offset: int
    first: int

    @property
    def count(self) -> int:
        return self.sizes[0] * self.sizes[1]


def merged(sizes: tuple[int, ...], *strides: tuple[int, ...]) -> list[tuple[int, ...]]:
    """(size, stride of each operand) of the fewest equivalent dimensions, without those of size 1."""
    found: list[tuple[int, ...]] = []
    for size, *steps in zip(sizes, *strides, strict=True):
        if size == 1:
            continue
        if found and all(outer == size * step for outer, step in zip(found[-1][1:], steps, strict=True)):
            found[-1] = (found[-1][0] * size, *steps)
        else:
            found.append((size, *steps))
    return found


def batches_of(a: Tensor, b: Tensor) -> Iterator[Batches]:
    """The batches of a (..., M, K) and b (..., K, N), whose batch sizes are equal. Yields one per launch. More than two
    dimensions that cannot be merged need several launches."""
    dims = merged(tuple(a.shape[:-2]), a.stride()[:-2], b.stride()[:-2])
    walked, kept = dims[:-MOST_DIMENSIONS], dims[-MOST_DIMENSIONS:]
    kept = [(1, 0, 0)] * (MOST_DIMENSIONS - len(kept)) + kept
    sizes, a_strides, b_strides = ((outer, inner) for outer, inner in zip(*kept, strict=True))
    for number, index in enumerate(itertools.product(*(range(size) for size, *_ in walked))):
        yield Batches(
            sizes=sizes,
            a_strides=a_strides,
            b_strides=b_strides,
            a_offset=sum(i * step for i, (_, step, _) in zip(index, walked, strict=True)),
            b_offset=sum(i * step for i, (_, _, step) in zip(index, walked, strict=True)),
            first=number * sizes[0] * sizes[1],
        )
