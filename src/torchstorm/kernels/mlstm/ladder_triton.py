"""The first development steps of the mLSTM's kernels in Triton, each reduced to its new idea.

A tiled product; two products without the intermediate matrix; the same with a causal mask; the same with gates and the
normalizer. Forward only, on CUDA cores: tiles are converted to fp32 and multiplied there.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from torchstorm.kernels.mlstm.launch_triton import rows, strides_of
from torchstorm.kernels.mlstm.maximum import prefix_sums
from torchstorm.kernels.mlstm.spans_triton import rounded, split
from torchstorm.kernels.mlstm.tiles import tile_size

_BLOCK = 32
_LOG2_E = 1.4426950408889634


@triton.jit(do_not_specialize=["M", "N", "K", "a_b", "a_m", "a_k", "b_b", "b_k", "b_n"])
def matmul_tiles_kernel(a, b, c, a_b, a_m, a_k, b_b, b_k, b_n, M, N, K, BLOCK: tl.constexpr):
    """One BLOCK x BLOCK tile of c = a @ b. Grid: batch * row tiles * column tiles."""
    tiles_n = tl.cdiv(N, BLOCK)
    tiles = tl.cdiv(M, BLOCK) * tiles_n
    program = tl.program_id(0).to(tl.int64)
    batch = program // tiles
    row = (program % tiles // tiles_n * BLOCK + tl.arange(0, BLOCK))[:, None]
    column = (program % tiles_n * BLOCK + tl.arange(0, BLOCK))[None, :]
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for first in range(0, K, BLOCK):
        inner = first + tl.arange(0, BLOCK)
        left = tl.load(a + batch * a_b + row * a_m + inner[None, :] * a_k, mask=(row < M) & (inner < K)[None, :],
                       other=0.0)  # fmt: skip
        right = tl.load(b + batch * b_b + inner[:, None] * b_k + column * b_n,
                        mask=(inner < K)[:, None] & (column < N), other=0.0)  # fmt: skip
        acc = tl.dot(left.to(tl.float32), right.to(tl.float32), acc, input_precision="ieee")
    tl.store(c + (batch * M + row) * N + column, rounded(acc, c), mask=(row < M) & (column < N))


_STRIDES = ["q_b", "q_h", "q_s", "k_b", "k_h", "k_s", "v_b", "v_h", "v_s", "h_b", "h_h", "h_s"]


@triton.jit(do_not_specialize=["S", "H", "scale", *_STRIDES])
def pairs_kernel(q, k, v, u, log_f, h, q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, h_b, h_h, h_s, S, H, scale,
                 DK: tl.constexpr, DV: tl.constexpr, CAUSAL: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
                 BLOCK_V: tl.constexpr, ALIGN: tl.constexpr):  # fmt: skip
    """BLOCK rows and BLOCK_V columns of h = (weights * q k^T) v, all tokens or (CAUSAL) those up to the row's own.

    Grid: B * H * row tiles * V tiles. GATED: u = i - F and log_f = F, both float64 in units of ln 2.
    """
    tiles_v: tl.constexpr = (DV + BLOCK_V - 1) // BLOCK_V
    tiles_s = tl.cdiv(S, BLOCK)
    program = tl.program_id(0).to(tl.int64)
    dim_v = (program % tiles_v).to(tl.int32) * BLOCK_V + tl.arange(0, BLOCK_V)
    start = (program // tiles_v % tiles_s).to(tl.int32) * BLOCK
    head = program // (tiles_v * tiles_s) % H
    batch = program // (tiles_v * tiles_s) // H
    q_row = q + (batch * q_b + head * q_h) * ALIGN
    k_row = k + (batch * k_b + head * k_h) * ALIGN
    v_row = v + (batch * v_b + head * v_h) * ALIGN
    h_row = h + (batch * h_b + head * h_h) * ALIGN
    gates = (batch * H + head) * S
    token = start + tl.arange(0, BLOCK)
    inside = token < S
    at = token.to(tl.int64)
    in_v = dim_v < DV

    acc = tl.zeros((BLOCK, BLOCK_V), tl.float32)
    den = tl.zeros((BLOCK,), tl.float32)
    largest = tl.zeros((BLOCK,), tl.float32)
    if GATED:
        own = tl.load(log_f + gates + token, mask=inside, other=0.0)
        own_high, own_low = split(own)
        largest = own.to(tl.float32)  # m_0 = 0, brought to here
    stop = S
    if CAUSAL:
        stop = start + BLOCK
    for first in range(0, stop, BLOCK):
        other = first + tl.arange(0, BLOCK)
        inside_other = other < S
        product = tl.zeros((BLOCK, BLOCK), tl.float32)
        for dim in range(0, DK, BLOCK):
            dim_k = dim + tl.arange(0, BLOCK)
            in_k = dim_k < DK
            q_tile = tl.load(q_row + at[:, None] * (q_s * ALIGN) + dim_k[None, :],
                             mask=inside[:, None] & in_k[None, :], other=0.0)  # fmt: skip
            k_t = tl.load(k_row + other.to(tl.int64)[None, :] * (k_s * ALIGN) + dim_k[:, None],
                          mask=in_k[:, None] & inside_other[None, :], other=0.0)  # fmt: skip
            product = tl.dot(q_tile.to(tl.float32), k_t.to(tl.float32), product, input_precision="ieee")
        product *= scale
        seen = inside_other[None, :]
        if CAUSAL:
            seen = seen & (token[:, None] >= other[None, :])
        if GATED:
            u_high, u_low = split(tl.load(u + gates + other, mask=inside_other, other=0.0))
            weights = (own_high[:, None] + u_high[None, :]) + (own_low[:, None] + u_low[None, :])
            weights = tl.where(seen, weights, float("-inf"))
            # A larger maximum: what was summed so far is brought to it.
            new_largest = tl.maximum(largest, tl.max(weights, 1))
            shrink = tl.exp2(largest - new_largest)
            largest = new_largest
            product *= tl.exp2(weights - largest[:, None])
            acc *= shrink[:, None]
            den = den * shrink + tl.sum(product, 1)
        else:
            product = tl.where(seen, product, 0.0)
        v_tile = tl.load(v_row + other.to(tl.int64)[:, None] * (v_s * ALIGN) + dim_v[None, :],
                         mask=inside_other[:, None] & in_v[None, :], other=0.0)  # fmt: skip
        acc = tl.dot(product, v_tile.to(tl.float32), acc, input_precision="ieee")
    if GATED:
        # e^-m may be infinite, and h is then 0; but it is never 0, so that 0 is not divided by 0.
        floor = tl.maximum(tl.exp2(-largest), 1e-37)
        acc /= tl.maximum(tl.abs(den), floor)[:, None]
    tl.store(h_row + at[:, None] * (h_s * ALIGN) + dim_v[None, :], rounded(acc, h),
             mask=inside[:, None] & in_v[None, :])  # fmt: skip


def matmul_tiles(a: Tensor, b: Tensor) -> Tensor:
    """a (..., M, K) @ b (..., K, N), in a's dtype."""
    *batch, M, K = a.shape
    N = b.shape[-1]
    left, right = a.reshape(-1, M, K), b.reshape(-1, K, N)
    out = a.new_empty((left.shape[0], M, N))
    grid = left.shape[0] * -(-M // _BLOCK) * -(-N // _BLOCK)
    if grid:
        with torch.cuda.device_of(a):
            matmul_tiles_kernel[(grid,)](
                left, right, out, *left.stride(), *right.stride(), M, N, K, BLOCK=_BLOCK, num_stages=1
            )
    return out.reshape(*batch, M, N)


def qk_v(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(q k^T) v of q, k (B, H, S, d_qk), q scaled by d_qk^-0.5, and v (B, H, S, d_v), in v's dtype."""
    return _pairs(q, k, v, None, None, causal=False)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`qk_v` with a causal mask."""
    return _pairs(q, k, v, None, None, causal=True)


def gated(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> Tensor:
    """The mLSTM's outputs, with gates i, f (B, H, S) and the normalizer, from an empty state."""
    log_f = prefix_sums(F.logsigmoid(f.double()).clamp(min=-1e6))
    return _pairs(q, k, v, (i.double() - log_f) * _LOG2_E, log_f * _LOG2_E, causal=True)


def _pairs(q: Tensor, k: Tensor, v: Tensor, u: Tensor | None, log_f: Tensor | None, *, causal: bool) -> Tensor:
    q, k, v = rows(q), rows(k), rows(v)
    B, H, S, DK = q.shape
    DV = v.shape[-1]
    h = v.new_empty(v.shape)
    block_v = min(64, tile_size(DV))
    grid = B * H * -(-S // _BLOCK) * -(-DV // block_v)
    if grid:
        align, strides = strides_of(q, k, v, h)
        with torch.cuda.device_of(q):
            pairs_kernel[(grid,)](
                q, k, v, u, log_f, h, *strides, S, H, DK**-0.5, DK=DK, DV=DV, CAUSAL=causal, GATED=u is not None,
                BLOCK=_BLOCK, BLOCK_V=block_v, ALIGN=align, num_stages=1,
            )  # fmt: skip
    return h
