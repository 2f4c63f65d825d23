"""The quadratic mLSTM forward: all pairs of rows and earlier tokens, without states except the final one.

As in FlashAttention, a program loops over the keys for a tile of rows, and nothing of size S x S is stored. Unlike in a
softmax, the row maximum depends only on the gates, so a scan computes it beforehand (gates_triton), and the loop over
keys needs no rescaling. Multiply-adds: S^2 / 2 (d_qk V tiles + d_v) per head.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from torchstorm.kernels.mlstm.spans_triton import (
    dot_state,
    frame_before,
    rounded,
    sequence_span,
    slot_span,
    split,
    weight,
)


@triton.jit
def operand(x, TENSOR_CORES: tl.constexpr):
    """A tile as it enters a product: as it came, for tensor cores; in fp32, for the CUDA cores' multiply-add."""
    if not TENSOR_CORES:
        x = x.to(tl.float32)
    return x


_STRIDES = ["q_b", "q_h", "q_s", "k_b", "k_h", "k_s", "v_b", "v_h", "v_s", "h_b", "h_h", "h_s"]


@triton.jit(do_not_specialize=["S", "H", "scale", *_STRIDES])
def quadratic_outputs_kernel(q, k, v, u, m, floor, m0, start_C, start_n, h, den, cu, sequence_of_slot, q_b, q_h, q_s,
                             k_b, k_h, k_s, v_b, v_h, v_s, h_b, h_h, h_s, S, H, scale, DK: tl.constexpr,
                             DV: tl.constexpr, SIGMOID: tl.constexpr, HAS_START: tl.constexpr, HAS_STATE: tl.constexpr,
                             PACKED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
                             ALIGN: tl.constexpr, TENSOR_CORES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """h and den = q.n of BLOCK rows and BLOCK_V columns. Grid: slots * H * V tiles."""
    tiles_k: tl.constexpr = (DK + BLOCK_K - 1) // BLOCK_K
    tiles_v: tl.constexpr = (DV + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0).to(tl.int64)
    tile_v = (program % tiles_v).to(tl.int32)
    slot_head = program // tiles_v
    head = slot_head % H
    n, row, begin, length, start = slot_span(slot_head // H, cu, sequence_of_slot, S, BLOCK, PACKED)
    if start >= length:
        return
    q_row = q + (row * q_b + head * q_h) * ALIGN + begin * (q_s * ALIGN)
    k_row = k + (row * k_b + head * k_h) * ALIGN + begin * (k_s * ALIGN)
    v_row = v + (row * v_b + head * v_h) * ALIGN + begin * (v_s * ALIGN)
    h_row = h + (row * h_b + head * h_h) * ALIGN + begin * (h_s * ALIGN)
    gates = (row * H + head) * S + begin
    u += gates
    m += gates

    token = start + tl.arange(0, BLOCK)
    inside = token < length
    at = token.to(tl.int64)
    dim_v = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
    in_v = dim_v < DV
    frame = tl.load(m + token, mask=inside, other=0.0)
    frame_high, frame_low = split(frame)

    acc = tl.zeros((BLOCK, BLOCK_V), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    if HAS_STATE:
        n_head = n.to(tl.int64) * H + head
        for tile_k in range(0, tiles_k):
            dim_k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
            in_k = dim_k < DK
            q_tile = tl.load(q_row + at[:, None] * (q_s * ALIGN) + dim_k[None, :],
                             mask=inside[:, None] & in_k[None, :], other=0.0)  # fmt: skip
            C = tl.load(start_C + n_head * (DK * DV) + dim_k[:, None] * DV + dim_v[None, :],
                        mask=in_k[:, None] & in_v[None, :], other=0.0)  # fmt: skip
            acc = dot_state(q_tile, C, acc, PRECISION)
            if not SIGMOID:
                norm = tl.load(start_n + n_head * DK + dim_k, mask=in_k, other=0.0)
                total += tl.sum(q_tile.to(tl.float32) * norm[None, :], 1)
        before = weight(frame_before(m, m0, n_head, 0, HAS_START) - frame) * scale
        before = tl.where(inside, before, 0.0)
        acc *= before[:, None]
        total *= before

    size = tl.abs(total)
    total_carried = total
    for first in range(0, start + BLOCK, BLOCK):
        other = first + tl.arange(0, BLOCK)
        inside_other = other < length
        product = tl.zeros((BLOCK, BLOCK), tl.float32)
        for tile_k in range(0, tiles_k):
            dim_k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
            in_k = dim_k < DK
            q_tile = tl.load(q_row + at[:, None] * (q_s * ALIGN) + dim_k[None, :],
                             mask=inside[:, None] & in_k[None, :], other=0.0)  # fmt: skip
            k_t = tl.load(k_row + other.to(tl.int64)[None, :] * (k_s * ALIGN) + dim_k[:, None],
                          mask=in_k[:, None] & inside_other[None, :], other=0.0)  # fmt: skip
            product = tl.dot(operand(q_tile, TENSOR_CORES), operand(k_t, TENSOR_CORES), product,
                             input_precision=PRECISION)  # fmt: skip
        v_tile = tl.load(v_row + other.to(tl.int64)[:, None] * (v_s * ALIGN) + dim_v[None, :],
                         mask=inside_other[:, None] & in_v[None, :], other=0.0)  # fmt: skip
        v_tile = operand(v_tile, TENSOR_CORES)
        u_high, u_low = split(tl.load(u + other, mask=inside_other, other=0.0))
        exponent = (u_high[None, :] - frame_high[:, None]) + (u_low[None, :] - frame_low[:, None])
        # Rows past the end have a frame of 0, in which a weight can be infinite.
        seen = (token[:, None] >= other[None, :]) & inside[:, None]
        product = tl.where(seen, tl.exp2(exponent), 0.0) * (product * scale)
        carried = product.to(v_tile.dtype)
        if not SIGMOID:
            size += tl.sum(tl.abs(product), 1)
            total_carried += tl.sum(carried.to(tl.float32), 1)
            total += tl.sum(product, 1)
        acc = tl.dot(carried, v_tile, acc, input_precision=PRECISION)

    if not SIGMOID:
        # As in outputs_kernel: both err alike where one token outweighs the rest, but den is exact where it cancels.
        total = tl.where(tl.abs(total_carried) * 4 > size, total_carried, total)
        divisor = tl.maximum(tl.abs(total), tl.load(floor + gates + token, mask=inside, other=1.0))
        acc = tl.div_rn(acc, tl.broadcast_to(divisor[:, None], (BLOCK, BLOCK_V)))
        if tile_v == 0:
            tl.store(den + gates + token, total, mask=inside)
    tl.store(h_row + at[:, None] * (h_s * ALIGN) + dim_v[None, :], rounded(acc, h),
             mask=inside[:, None] & in_v[None, :])  # fmt: skip


@triton.jit(do_not_specialize=["S", "H", "scale", "x_b", "x_h", "x_s", "y_b", "y_h", "y_s"])
def outer_sums_kernel(x, y, u, m, m0, inverse, d_den, given_C, given_n, out_C, out_n, cu, x_b, x_h, x_s, y_b, y_h, y_s,
                      S, H, scale, DK: tl.constexpr, DV: tl.constexpr, SIGMOID: tl.constexpr, FORWARD: tl.constexpr,
                      HAS_STATE: tl.constexpr, HAS_START: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
                      BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, ALIGN: tl.constexpr,
                      PRECISION: tl.constexpr):  # fmt: skip
    """The given state carried from one end to the other, and what all tokens add. Grid: N * H * K tiles * V tiles.

    FORWARD: the last state, from the first; x is k and y is v. Else the gradient to the first state, from that to the
    last; x is q and y is dh. HAS_STATE: one is given. HAS_START: m0 is. Made once a sequence, it can afford fp32.
    """
    tiles_k: tl.constexpr = (DK + BLOCK_K - 1) // BLOCK_K
    tiles_v: tl.constexpr = (DV + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0).to(tl.int64)
    tile_v = (program % tiles_v).to(tl.int32)
    tile_k = (program // tiles_v % tiles_k).to(tl.int32)
    n_head = program // (tiles_v * tiles_k)
    head = n_head % H
    row, begin, length = sequence_span(n_head // H, cu, S, PACKED)
    x_row = x + (row * x_b + head * x_h) * ALIGN + begin * (x_s * ALIGN)
    y_row = y + (row * y_b + head * y_h) * ALIGN + begin * (y_s * ALIGN)
    gates = (row * H + head) * S + begin
    dim_k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    dim_v = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
    in_k = dim_k < DK
    in_v = dim_v < DV
    in_state = in_k[:, None] & in_v[None, :]
    at_state = n_head * (DK * DV) + dim_k[:, None] * DV + dim_v[None, :]

    frame_start = frame_before(m + gates, m0, n_head, 0, HAS_START)
    frame_end = tl.load(m + gates + length - 1, mask=length > 0, other=0.0)
    frame_end = tl.where(length > 0, frame_end, frame_start)
    C = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    norm = tl.zeros((BLOCK_K,), tl.float32)
    if HAS_STATE:
        decay = weight(frame_start - frame_end)
        C = tl.load(given_C + at_state, mask=in_state, other=0.0) * decay
        if not SIGMOID:
            norm = tl.load(given_n + n_head * DK + dim_k, mask=in_k, other=0.0) * decay
    for first in range(0, length, BLOCK):
        token = first + tl.arange(0, BLOCK)
        inside = token < length
        x_t = tl.load(x_row + token.to(tl.int64)[None, :] * (x_s * ALIGN) + dim_k[:, None],
                      mask=in_k[:, None] & inside[None, :], other=0.0)  # fmt: skip
        y_tile = tl.load(y_row + token.to(tl.int64)[:, None] * (y_s * ALIGN) + dim_v[None, :],
                         mask=inside[:, None] & in_v[None, :], other=0.0)  # fmt: skip
        if FORWARD:
            own = weight(tl.load(u + gates + token, mask=inside, other=0.0) - frame_end)
            weighed = x_t.to(tl.float32) * tl.where(inside, own, 0.0)[None, :]
            norm += tl.sum(weighed, 1)
        else:
            own = weight(frame_start - tl.load(m + gates + token, mask=inside, other=0.0)) * scale
            weighed = x_t.to(tl.float32) * tl.where(inside, own, 0.0)[None, :]
            if not SIGMOID:
                weighed *= tl.load(inverse + gates + token, mask=inside, other=0.0)[None, :]
                norm += tl.sum(weighed * tl.load(d_den + gates + token, mask=inside, other=0.0)[None, :], 1)
        C = tl.dot(weighed, y_tile.to(tl.float32), C, input_precision=PRECISION)
    tl.store(out_C + at_state, C, mask=in_state)
    if tile_v == 0 and not SIGMOID:
        tl.store(out_n + n_head * DK + dim_k, norm, mask=in_k)
