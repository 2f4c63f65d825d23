"""The batch dimensions of two operands as kernels take them: merged to as few as strides allow, none copied."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

MOST_DIMENSIONS = 2


@dataclass(frozen=True, kw_only=True)
class Batches:
    """Pairs of matrices (outer, inner), with strides in elements; 0 where one matrix serves many.

    Attributes:
        sizes: (outer, inner), the inner index running fastest.
        a_strides, b_strides: of the same.
        a_offset, b_offset: of the first pair, from each operand's first element.
        first: the first pair's place among all pairs.
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
    """(size, a stride of each operand) of as few dimensions as name the same elements; those of size 1 are left out."""
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
    """Of a (..., M, K) and b (..., K, N), whose batch sizes are equal. One for each launch: more than two dimensions
    that cannot be merged are walked through from here."""
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
