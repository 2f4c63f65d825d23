"""Matrix products on a CPU, compiled by numba: three loops, blocks for the cache, and blocks on all cores.

Each takes a (B, M, K) and b (B, K, N) of any strides and fills c (B, M, N). Half precision is computed in float32
copies. Sums over k: in float64 by the plain loop; by the others in the inputs' dtype, four at a time and by blocks of k
whose sums are then added, so that errors grow with a block's length and the number of blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numba
import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from torchstorm.kernels.dtypes import wide
from torchstorm.kernels.matmul.batches import batches_of

BLOCK_M, BLOCK_N, BLOCK_K = 128, 256, 256
_MOST_THREADS: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
_FASTMATH = {"contract"}  # a multiplication and an addition may be one instruction; nothing else changes


def naive(a: Any, b: Any, c: Any) -> None:
    """Three loops."""
    for batch in range(c.shape[0]):
        for i in range(c.shape[1]):
            for j in range(c.shape[2]):
                total = 0.0
                for k in range(a.shape[2]):
                    total += a[batch, i, k] * b[batch, k, j]
                c[batch, i, j] = total


def blocked(a: Any, b: Any, c: Any) -> None:
    """A block of b, copied without gaps, meets all rows of a before the next one is fetched."""
    M, N, K = c.shape[1], c.shape[2], a.shape[2]
    block = np.zeros((BLOCK_K, BLOCK_N), c.dtype)
    a_row = np.zeros(BLOCK_K, c.dtype)
    row = np.zeros(BLOCK_N, c.dtype)
    for batch in range(c.shape[0]):
        for k0 in range(0, K, BLOCK_K):
            depth = min(BLOCK_K, K - k0)
            if depth < BLOCK_K:  # zeros where the matrices have ended: k goes by four
                block[:] = 0
                a_row[:] = 0
            for n0 in range(0, N, BLOCK_N):
                width = min(BLOCK_N, N - n0)
                for k in range(depth):
                    for n in range(width):
                        block[k, n] = b[batch, k0 + k, n0 + n]
                for m in range(M):
                    for k in range(depth):
                        a_row[k] = a[batch, m, k0 + k]
                    row[:] = 0
                    for k in range(0, depth, 4):
                        x0, x1, x2, x3 = a_row[k], a_row[k + 1], a_row[k + 2], a_row[k + 3]
                        b0, b1, b2, b3 = block[k], block[k + 1], block[k + 2], block[k + 3]
                        for n in range(BLOCK_N):
                            row[n] += x0 * b0[n] + x1 * b1[n] + x2 * b2[n] + x3 * b3[n]
                    for n in range(width):
                        c[batch, m, n0 + n] = row[n] if k0 == 0 else c[batch, m, n0 + n] + row[n]


def parallel(a: Any, b: Any, c: Any) -> None:
    """Blocks of results in any order, each by one thread, so that the same bits come out whatever their number."""
    tiles_m, tiles_n = (c.shape[1] + BLOCK_M - 1) // BLOCK_M, (c.shape[2] + BLOCK_N - 1) // BLOCK_N
    for task in prange(c.shape[0] * tiles_m * tiles_n):
        batch, tile = task // (tiles_m * tiles_n), task % (tiles_m * tiles_n)
        _block_of_results(a, b, c, batch, tile // tiles_n * BLOCK_M, tile % tiles_n * BLOCK_N)


@njit(nogil=True, fastmath=_FASTMATH)
def _block_of_results(a: Any, b: Any, c: Any, batch: int, m0: int, n0: int) -> None:
    height, width = min(BLOCK_M, c.shape[1] - m0), min(BLOCK_N, c.shape[2] - n0)
    # Zeros where the matrices have ended: the innermost block is always whole.
    a_block = np.zeros((BLOCK_M, BLOCK_K), c.dtype)
    b_block = np.zeros((BLOCK_K, BLOCK_N), c.dtype)
    sums = np.empty((BLOCK_M, BLOCK_N), c.dtype)
    for k0 in range(0, a.shape[2], BLOCK_K):
        depth = min(BLOCK_K, a.shape[2] - k0)
        if depth < BLOCK_K:
            a_block[:] = 0
            b_block[:] = 0
        for m in range(height):
            for k in range(depth):
                a_block[m, k] = a[batch, m0 + m, k0 + k]
        for k in range(depth):
            for n in range(width):
                b_block[k, n] = b[batch, k0 + k, n0 + n]
        sums[:] = 0
        for m in range(0, height, 4):
            for k in range(0, depth, 4):
                _four_rows(a_block[m : m + 4, k : k + 4], b_block[k : k + 4], sums[m : m + 4])
        for m in range(height):
            for n in range(width):
                c[batch, m0 + m, n0 + n] = sums[m, n] if k0 == 0 else c[batch, m0 + m, n0 + n] + sums[m, n]


@njit(nogil=True, fastmath=_FASTMATH, inline="always")
def _four_rows(a: Any, b: Any, sums: Any) -> None:
    """sums (4, BLOCK_N) += a (4, 4) b (4, BLOCK_N), with a in registers."""
    a00, a01, a02, a03 = a[0, 0], a[0, 1], a[0, 2], a[0, 3]
    a10, a11, a12, a13 = a[1, 0], a[1, 1], a[1, 2], a[1, 3]
    a20, a21, a22, a23 = a[2, 0], a[2, 1], a[2, 2], a[2, 3]
    a30, a31, a32, a33 = a[3, 0], a[3, 1], a[3, 2], a[3, 3]
    b0, b1, b2, b3 = b[0], b[1], b[2], b[3]
    sums0, sums1, sums2, sums3 = sums[0], sums[1], sums[2], sums[3]
    for n in range(BLOCK_N):
        x0, x1, x2, x3 = b0[n], b1[n], b2[n], b3[n]
        sums0[n] += a00 * x0 + a01 * x1 + a02 * x2 + a03 * x3
        sums1[n] += a10 * x0 + a11 * x1 + a12 * x2 + a13 * x3
        sums2[n] += a20 * x0 + a21 * x1 + a22 * x2 + a23 * x3
        sums3[n] += a30 * x0 + a31 * x1 + a32 * x2 + a33 * x3


_LOOPS: dict[str, Callable[[Any, Any, Any], None]] = {"naive": naive, "blocked": blocked, "parallel": parallel}


def matmul_cpu(name: str, a: Tensor, b: Tensor) -> Tensor:
    """a (..., M, K) @ b (..., K, N), of the same batch sizes, by a function of this file."""
    c = a.new_empty((*a.shape[:-1], b.shape[-1]))
    dtype = wide(a.dtype)
    a, b = a.detach().to(dtype), b.detach().to(dtype)
    result = c if c.dtype == dtype else c.new_empty(c.shape, dtype=dtype)
    loops = _compiled(name, dtype)
    for arrays in _in_three_dimensions(a, b, result):
        if name == "parallel":
            before = numba.get_num_threads()
            numba.set_num_threads(min(torch.get_num_threads(), _MOST_THREADS))
            try:
                loops(*arrays)
            finally:
                numba.set_num_threads(before)
        else:
            loops(*arrays)
    return c if result is c else c.copy_(result)


def _in_three_dimensions(a: Tensor, b: Tensor, c: Tensor) -> Iterator[list[Any]]:
    """Views of both operands and of the result with one batch dimension, as many as strides ask for."""
    c = c.view(-1, *c.shape[-2:])
    for batches in batches_of(a, b):
        (outer, inner), (a_outer, a_inner), (b_outer, b_inner) = batches.sizes, batches.a_strides, batches.b_strides
        for index in range(outer):
            a_at = a.storage_offset() + batches.a_offset + index * a_outer
            b_at = b.storage_offset() + batches.b_offset + index * b_outer
            first = batches.first + index * inner
            yield [
                a.as_strided((inner, *a.shape[-2:]), (a_inner, *a.stride()[-2:]), a_at).numpy(),
                b.as_strided((inner, *b.shape[-2:]), (b_inner, *b.stride()[-2:]), b_at).numpy(),
                c[first : first + inner].numpy(),
            ]


@functools.cache
def _compiled(name: str, dtype: torch.dtype) -> Callable[[Any, Any, Any], None]:
    """For operands of any strides, at the first call: a second or two."""
    element = "float64" if dtype == torch.float64 else "float32"
    signature = f"void({element}[:, :, :], {element}[:, :, :], {element}[:, :, ::1])"
    compiled: Callable[[Any, Any, Any], None] = njit(
        [signature], nogil=True, fastmath=_FASTMATH, parallel=name == "parallel"
    )(_LOOPS[name])
    return compiled
