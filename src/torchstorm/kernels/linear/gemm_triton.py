"""z = x W^T in Triton, x (M, K), W (N, K): the simplest kernel, and one with bias and activation in its epilogue.

Both have a program per tile of the output, which loops over K with fp32 sums in registers. float32 is multiplied
without tf32 ("ieee"), as in PyTorch by default.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchstorm.kernels.linear import activations_triton as activations
from torchstorm.kernels.linear import pointwise_triton as pointwise
from torchstorm.kernels.linear.plain import keeps


class Tile(NamedTuple):
    """Tile and launch options of the fused kernel."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group: int = 8


TILES = {"large": Tile(128, 256, 64, 8, 3), "small": Tile(64, 64, 64, 4, 3), "float32": Tile(64, 64, 32, 4, 3)}
_NAIVE = Tile(64, 64, 32, 4, 1)


@triton.jit(do_not_specialize=["M"])
def naive_kernel(
    x_ptr, w_ptr, z_ptr, M, N, K, stride_xm, stride_xk, stride_wn, stride_wk, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x_at = row[:, None] * stride_xm + k[None, :] * stride_xk
        w_at = column[None, :] * stride_wn + k[:, None] * stride_wk
        x = tl.load(x_ptr + x_at, mask=(row < M)[:, None] & (k < K)[None, :], other=0.0)
        w = tl.load(w_ptr + w_at, mask=(column < N)[None, :] & (k < K)[:, None], other=0.0)
        total = tl.dot(x, w, total, input_precision="ieee")
    at = row[:, None] * N + column[None, :]
    tl.store(z_ptr + at, total.to(z_ptr.dtype.element_ty), mask=(row < M)[:, None] & (column < N)[None, :])


@triton.jit
def tile_position(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Row and column of a tile: GROUP rows of tiles at a time, so that those at work at once share x and W in L2."""
    per_group = GROUP * tiles_n
    first = tile // per_group * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    return first + tile % per_group % height, tile % per_group // height


@triton.jit
def _finish(total, bias_ptr, y_ptr, z_ptr, first, column, rows, N, ACTIVATION: tl.constexpr):
    """Bias, activation and stores of part of a tile, of which so many rows are there."""
    row, column = tl.arange(0, total.shape[0]), column + tl.arange(0, total.shape[1])
    if bias_ptr is not None:
        total += tl.load(bias_ptr + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    at = row[:, None] * N + column[None, :]
    mask = (row < rows)[:, None] & (column < N)[None, :]
    if z_ptr is not None:
        tl.store(z_ptr + first + at, total.to(z_ptr.dtype.element_ty), mask=mask)
    y = activations.activate(total, ACTIVATION, y_ptr.dtype.element_ty != tl.float32)
    tl.store(y_ptr + first + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def fused_kernel(
    x_ptr, w_ptr, bias_ptr, y_ptr, z_ptr, M, N, K, stride_x, stride_w, ACTIVATION: tl.constexpr, WHOLE_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = tile_position(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP)
    # Where a tile begins is one 64-bit number; within it 32 bits do, in half the registers. Rows past the end are the
    # last one once more, and not stored: no masks on the way.
    row, column, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    rows, columns = M - tile_m * BLOCK_M, N - tile_n * BLOCK_N
    x_at = tl.minimum(row, rows - 1)[:, None] * stride_x + k[None, :]
    w_at = tl.minimum(column, columns - 1)[None, :] * stride_w + k[:, None]
    x_ptr += tile_m.to(tl.int64) * BLOCK_M * stride_x
    w_ptr += tile_n.to(tl.int64) * BLOCK_N * stride_w
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        if WHOLE_K:
            x, w = tl.load(x_ptr + x_at), tl.load(w_ptr + w_at)
        else:
            x = tl.load(x_ptr + x_at, mask=(k < K - start)[None, :], other=0.0)
            w = tl.load(w_ptr + w_at, mask=(k < K - start)[:, None], other=0.0)
        total = tl.dot(x, w, total, input_precision="ieee")
        x_ptr += BLOCK_K
        w_ptr += BLOCK_K
    # In halves: the activation of a whole tile does not fit in registers beside it.
    HALF: tl.constexpr = BLOCK_N // 2
    left, right = tl.split(tl.permute(tl.reshape(total, [BLOCK_M, 2, HALF]), [0, 2, 1]))
    first = tile_m.to(tl.int64) * BLOCK_M * N
    _finish(left, bias_ptr, y_ptr, z_ptr, first, tile_n * BLOCK_N, rows, N, ACTIVATION)
    _finish(right, bias_ptr, y_ptr, z_ptr, first, tile_n * BLOCK_N + HALF, rows, N, ACTIVATION)


def naive_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """y, and z if it is saved: one kernel for the product, one for the bias, one for the activation."""
    (M, K), N = x.shape, weight.shape[0]
    # If z were rounded before the bias is added, a z near 0 could change its sign, and so ReLU's gradient.
    z = x.new_empty((M, N), dtype=x.dtype if bias is None else torch.float32)
    naive_kernel[(triton.cdiv(M, _NAIVE.block_m), triton.cdiv(N, _NAIVE.block_n))](
        x, weight, z, M, N, K, *x.stride(), *weight.stride(), BLOCK_M=_NAIVE.block_m, BLOCK_N=_NAIVE.block_n,
        BLOCK_K=_NAIVE.block_k, num_warps=_NAIVE.num_warps, num_stages=_NAIVE.num_stages,
    )  # fmt: skip
    if bias is not None:
        z = pointwise.activate(z, bias, "", x.new_empty((M, N)))
    if not activation:
        return z, None
    keep = keep and keeps(activation) == "z"
    y = pointwise.activate(z, None, activation, torch.empty_like(z) if keep else z)
    return y, z if keep else None


def fused_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, keep: bool, tile: Tile | None = None
) -> tuple[Tensor, Tensor | None]:
    """y, and z if it is saved, both from the sums in registers."""
    (M, K), N = x.shape, weight.shape[0]
    x, weight = (t if t.stride(1) == 1 else t.contiguous() for t in (x, weight))
    if tile is None:
        size = "float32" if x.dtype == torch.float32 else "large" if min(M, N) > 64 else "small"
        tile = TILES[size]
    y = x.new_empty((M, N))
    z = x.new_empty((M, N)) if keep and keeps(activation) == "z" else None
    fused_kernel[(triton.cdiv(M, tile.block_m) * triton.cdiv(N, tile.block_n),)](
        x, weight, bias, y, z, M, N, K, x.stride(0), weight.stride(0), ACTIVATION=activation,
        WHOLE_K=K % tile.block_k == 0, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        GROUP=tile.group, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return y, z
