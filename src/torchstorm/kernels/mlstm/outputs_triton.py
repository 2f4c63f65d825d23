"""The outputs of the mLSTM from the states at the chunks' starts; one program per tile of ROWS x BLOCK_V.

Within the chunk the algorithm is that of attention, with the gates instead of a softmax. The row maximum M is known
beforehand, so no rescaling is needed. Weights are multiplied with q.k in fp32, before the product is rounded for the
second matrix product. Multiply-adds per token: d_qk d_v for the state, d_qk CHUNK for q.k in each V tile, d_v CHUNK for
the sum over v.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from torchstorm.kernels.mlstm.spans_triton import dot_state, frame_before, rounded, slot_span, split, weight

_STRIDES = ["q_b", "q_h", "q_s", "k_b", "k_h", "k_s", "v_b", "v_h", "v_s", "h_b", "h_h", "h_s"]


@triton.jit(do_not_specialize=["S", "H", "scale", *_STRIDES])
def outputs_kernel(q, k, v, u, m, floor, m0, chunk_C, chunk_n, h, den, cu, sequence_of_slot, q_b, q_h, q_s,
                   k_b, k_h, k_s, v_b, v_h, v_s, h_b, h_h, h_s, S, H, scale, DK: tl.constexpr, DV: tl.constexpr,
                   SIGMOID: tl.constexpr, HAS_START: tl.constexpr, PACKED: tl.constexpr, CHUNK: tl.constexpr,
                   ROWS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, ALIGN: tl.constexpr,
                   PRECISION: tl.constexpr):  # fmt: skip
    """h and den = q.n. Grid: slots * H * row tiles in a chunk * V tiles."""
    tiles_k: tl.constexpr = (DK + BLOCK_K - 1) // BLOCK_K
    tiles_v: tl.constexpr = (DV + BLOCK_V - 1) // BLOCK_V
    tiles_rows: tl.constexpr = CHUNK // ROWS
    program = tl.program_id(0).to(tl.int64)
    tile_v = (program % tiles_v).to(tl.int32)
    tile_row = (program // tiles_v % tiles_rows).to(tl.int32)
    slot_head = program // (tiles_v * tiles_rows)
    head = slot_head % H
    n, row, begin, length, chunk_start = slot_span(slot_head // H, cu, sequence_of_slot, S, CHUNK, PACKED)
    start = chunk_start + tile_row * ROWS
    if start >= length:
        return
    q_row = q + (row * q_b + head * q_h) * ALIGN + begin * (q_s * ALIGN)
    k_row = k + (row * k_b + head * k_h) * ALIGN + begin * (k_s * ALIGN)
    v_row = v + (row * v_b + head * v_h) * ALIGN + begin * (v_s * ALIGN)
    h_row = h + (row * h_b + head * h_h) * ALIGN + begin * (h_s * ALIGN)
    gates = (row * H + head) * S + begin
    u += gates
    m += gates
    C_row = chunk_C + slot_head * (DK * DV)
    n_row = chunk_n + slot_head * DK

    token = start + tl.arange(0, ROWS)
    inside = token < length
    dim_v = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
    in_v = dim_v < DV
    frame = tl.load(m + token, mask=inside, other=0.0)
    frame_high, frame_low = split(frame)
    u_high, u_low = split(tl.load(u + token, mask=inside, other=0.0))

    # What came before the chunk, and q.k with the rows' own tokens.
    acc = tl.zeros((ROWS, BLOCK_V), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    product = tl.zeros((ROWS, ROWS), tl.float32)
    for tile_k in range(0, tiles_k):
        dim_k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
        in_k = dim_k < DK
        q_tile = tl.load(q_row + token.to(tl.int64)[:, None] * (q_s * ALIGN) + dim_k[None, :],
                         mask=inside[:, None] & in_k[None, :], other=0.0)  # fmt: skip
        k_t = tl.load(k_row + token.to(tl.int64)[None, :] * (k_s * ALIGN) + dim_k[:, None],
                      mask=in_k[:, None] & inside[None, :], other=0.0)  # fmt: skip
        C = tl.load(C_row + dim_k[:, None] * DV + dim_v[None, :], mask=in_k[:, None] & in_v[None, :], other=0.0)
        product = tl.dot(q_tile, k_t, product, input_precision=PRECISION)
        acc = dot_state(q_tile, C, acc, PRECISION)
        if not SIGMOID:
            norm = tl.load(n_row + dim_k, mask=in_k, other=0.0)
            total += tl.sum(q_tile.to(tl.float32) * norm[None, :], 1)
    before = weight(frame_before(m, m0, n * H + head, chunk_start, HAS_START) - frame) * scale
    before = tl.where(inside, before, 0.0)
    acc *= before[:, None]
    total *= before
    v_tile = tl.load(v_row + token.to(tl.int64)[:, None] * (v_s * ALIGN) + dim_v[None, :],
                     mask=inside[:, None] & in_v[None, :], other=0.0)  # fmt: skip
    exponent = (u_high[None, :] - frame_high[:, None]) + (u_low[None, :] - frame_low[:, None])
    seen = (token[:, None] >= token[None, :]) & inside[:, None]
    product = tl.where(seen, tl.exp2(exponent), 0.0) * (product * scale)
    carried = product.to(v_tile.dtype)
    if not SIGMOID:
        size = tl.abs(total) + tl.sum(tl.abs(product), 1)
        total_carried = total + tl.sum(carried.to(tl.float32), 1)
        total += tl.sum(product, 1)
    acc = tl.dot(carried, v_tile, acc, input_precision=PRECISION)

    # The chunk's tokens before these rows: all of them inside and seen.
    for other_start in range(chunk_start, start, ROWS):
        other = other_start + tl.arange(0, ROWS)
        product = tl.zeros((ROWS, ROWS), tl.float32)
        for tile_k in range(0, tiles_k):
            dim_k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
            in_k = dim_k < DK
            q_tile = tl.load(q_row + token.to(tl.int64)[:, None] * (q_s * ALIGN) + dim_k[None, :],
                             mask=inside[:, None] & in_k[None, :], other=0.0)  # fmt: skip
            k_t = tl.load(k_row + other.to(tl.int64)[None, :] * (k_s * ALIGN) + dim_k[:, None],
                          mask=in_k[:, None], other=0.0)  # fmt: skip
            product = tl.dot(q_tile, k_t, product, input_precision=PRECISION)
        v_tile = tl.load(v_row + other.to(tl.int64)[:, None] * (v_s * ALIGN) + dim_v[None, :],
                         mask=in_v[None, :], other=0.0)  # fmt: skip
        u_high, u_low = split(tl.load(u + other))
        exponent = (u_high[None, :] - frame_high[:, None]) + (u_low[None, :] - frame_low[:, None])
        # Rows past the end have a frame of 0, in which a weight can be infinite.
        product = tl.where(inside[:, None], tl.exp2(exponent), 0.0) * (product * scale)
        carried = product.to(v_tile.dtype)
        if not SIGMOID:
            size += tl.sum(tl.abs(product), 1)
            total_carried += tl.sum(carried.to(tl.float32), 1)
            total += tl.sum(product, 1)
        acc = tl.dot(carried, v_tile, acc, input_precision=PRECISION)

    if not SIGMOID:
        # den from the rounded weights that the numerator has, so that both err alike where one token outweighs the rest
        # and backward's dh.v - dh.h cancels; but exact where much of den cancels and it is small.
        total = tl.where(tl.abs(total_carried) * 4 > size, total_carried, total)
        divisor = tl.maximum(tl.abs(total), tl.load(floor + gates + token, mask=inside, other=1.0))
        if h.dtype.element_ty == tl.float32:
            acc = tl.div_rn(acc, tl.broadcast_to(divisor[:, None], (ROWS, BLOCK_V)))
        else:
            acc *= (1.0 / divisor)[:, None]
        if tile_v == 0:
            tl.store(den + gates + token, total, mask=inside)
    tl.store(h_row + token.to(tl.int64)[:, None] * (h_s * ALIGN) + dim_v[None, :], rounded(acc, h),
             mask=inside[:, None] & in_v[None, :])  # fmt: skip
