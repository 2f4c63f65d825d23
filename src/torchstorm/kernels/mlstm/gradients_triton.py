"""The gradients of the mLSTM's inputs from the states and their gradients; one program per chunk or tile.

In one chunk, with rows t, columns j <= t and weights w_tj = e^(u_j - M_t), per row N = max(|den|, floor):
    S_tj = q_t.k_j scaled;  G_tj = w_tj (dh_t.v_j + d_den_t) / N_t;  dD_tj = G_tj S_tj
    dq_t = sum_j G_tj k_j + from the state before;  dk_j = sum_t G_tj q_t + from the gradient to the state after
    dv_j = sum_t w_tj S_tj / N_t dh_t + likewise
Matrix products use dh unscaled, and 1 / N is a factor of the fp32 weights, since dh / N could overflow in fp16.
dk and dv are computed from the transposed tile itself, not from a transposed accumulator.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from torchstorm.kernels.mlstm.spans_triton import (
    dot_state,
    dot_weighed,
    frame_before,
    rounded,
    slot_span,
    split,
    weight,
)


@triton.jit(do_not_specialize=["S", "H", "h_b", "h_h", "h_s", "dh_b", "dh_h", "dh_s"])
def denominator_kernel(h, dh, den, floor, inverse, d_den, h_b, h_h, h_s, dh_b, dh_h, dh_s, S, H, DV: tl.constexpr,
                       ROWS: tl.constexpr, BLOCK_V: tl.constexpr, ALIGN: tl.constexpr):  # fmt: skip
    """inverse = 1 / N and d_den = -sign(den) dh.h where |den| is the larger. Grid: B * H * row tiles."""
    tiles = tl.cdiv(S, ROWS)
    program = tl.program_id(0).to(tl.int64)
    row = program // tiles // H
    head = program // tiles % H
    token = (program % tiles).to(tl.int32) * ROWS + tl.arange(0, ROWS)
    inside = token < S
    h_row = h + (row * h_b + head * h_h) * ALIGN
    dh_row = dh + (row * dh_b + head * dh_h) * ALIGN
    product = tl.zeros((ROWS,), tl.float32)
    for first in range(0, DV, BLOCK_V):
        dim = first + tl.arange(0, BLOCK_V)
        seen = inside[:, None] & (dim < DV)[None, :]
        h_tile = tl.load(h_row + token.to(tl.int64)[:, None] * (h_s * ALIGN) + dim[None, :], mask=seen, other=0.0)
        dh_tile = tl.load(dh_row + token.to(tl.int64)[:, None] * (dh_s * ALIGN) + dim[None, :], mask=seen, other=0.0)
        product += tl.sum(h_tile.to(tl.float32) * dh_tile.to(tl.float32), 1)
    at = (row * H + head) * S + token
    total = tl.load(den + at, mask=inside, other=1.0)
    least = tl.load(floor + at, mask=inside, other=1.0)
    to_den = tl.where(total > 0, -product, product)
    tl.store(inverse + at, tl.div_rn(1.0, tl.maximum(tl.abs(total), least)), mask=inside)
    tl.store(d_den + at, tl.where(tl.abs(total) > least, to_den, 0.0), mask=inside)


_STRIDES_Q = ["q_b", "q_h", "q_s", "k_b", "k_h", "k_s", "v_b", "v_h", "v_s", "dh_b", "dh_h", "dh_s",
              "dq_b", "dq_h", "dq_s"]  # fmt: skip


@triton.jit(do_not_specialize=["S", "H", "scale", "num_tokens", *_STRIDES_Q])
def q_gradients_kernel(q, k, v, dh, u, m, m0, inverse, d_den, chunk_C, chunk_n, dq, q_part, cu, sequence_of_slot,
                       q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, dh_b, dh_h, dh_s, dq_b, dq_h, dq_s, S, H, scale,
                       num_tokens, DK: tl.constexpr, DV: tl.constexpr, SIGMOID: tl.constexpr,
                       HAS_START: tl.constexpr, PACKED: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
                       BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, ALIGN: tl.constexpr,
                       PRECISION: tl.constexpr):  # fmt: skip
    """dq, and q . the part of dq from the state before, one sheet of num_tokens a K tile.

    Grid: slots * H * tiles of ROWS rows * K tiles.
    """
    tiles_k: tl.constexpr = (DK + BLOCK_K - 1) // BLOCK_K
    tiles_v: tl.constexpr = (DV + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0).to(tl.int64)
    tile_k = (program % tiles_k).to(tl.int32)
    tile_row = (program // tiles_k % (CHUNK // ROWS)).to(tl.int32)
    slot_head = program // (tiles_k * (CHUNK // ROWS))
    head = slot_head % H
    n, row, begin, length, start = slot_span(slot_head // H, cu, sequence_of_slot, S, CHUNK, PACKED)
    if start + tile_row * ROWS >= length:
        return
    q_row = q + (row * q_b + head * q_h) * ALIGN + begin * (q_s * ALIGN)
    k_row = k + (row * k_b + head * k_h) * ALIGN + begin * (k_s * ALIGN)
    v_row = v + (row * v_b + head * v_h) * ALIGN + begin * (v_s * ALIGN)
    dh_row = dh + (row * dh_b + head * dh_h) * ALIGN + begin * (dh_s * ALIGN)
    dq_row = dq + (row * dq_b + head * dq_h) * ALIGN + begin * (dq_s * ALIGN)
    gates = (row * H + head) * S + begin
    C_row = chunk_C + slot_head * (DK * DV)

    token = start + tile_row * ROWS + tl.arange(0, ROWS)
    inside = token < length
    other = start + tl.arange(0, CHUNK)
    other_inside = other < length
    dim_k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    in_k = dim_k < DK
    in_q = inside[:, None] & in_k[None, :]

    product = tl.zeros((ROWS, CHUNK), tl.float32)
    acc = tl.zeros((ROWS, BLOCK_K), tl.float32)
    for tile_v in range(0, tiles_v):
        dim_v = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
        in_v = dim_v < DV
        dh_tile = tl.load(dh_row + token.to(tl.int64)[:, None] * (dh_s * ALIGN) + dim_v[None, :],
                          mask=inside[:, None] & in_v[None, :], other=0.0)  # fmt: skip
        v_t = tl.load(v_row + other.to(tl.int64)[None, :] * (v_s * ALIGN) + dim_v[:, None],
                      mask=in_v[:, None] & other_inside[None, :], other=0.0)  # fmt: skip
        C_t = tl.load(C_row + dim_k[None, :] * DV + dim_v[:, None], mask=in_v[:, None] & in_k[None, :], other=0.0)
        product = tl.dot(dh_tile, v_t, product, input_precision=PRECISION)
        acc = dot_state(dh_tile, C_t, acc, PRECISION)

    frame = tl.load(m + gates + token, mask=inside, other=0.0)
    frame_high, frame_low = split(frame)
    u_high, u_low = split(tl.load(u + gates + other, mask=other_inside, other=0.0))
    before = weight(frame_before(m + gates, m0, n * H + head, start, HAS_START) - frame) * scale
    before = tl.where(inside, before, 0.0)
    if not SIGMOID:
        own = tl.load(inverse + gates + token, mask=inside, other=0.0)
        to_den = tl.load(d_den + gates + token, mask=inside, other=0.0)
        product = (product + to_den[:, None]) * own[:, None]
        norm = tl.load(chunk_n + slot_head * DK + dim_k, mask=in_k, other=0.0)
        acc = (acc + to_den[:, None] * norm[None, :]) * own[:, None]
    acc *= before[:, None]
    q_tile = tl.load(q_row + token.to(tl.int64)[:, None] * (q_s * ALIGN) + dim_k[None, :], mask=in_q, other=0.0)
    tl.store(q_part + tile_k.to(tl.int64) * num_tokens + gates + token, tl.sum(q_tile.to(tl.float32) * acc, 1),
             mask=inside)  # fmt: skip
    exponent = (u_high[None, :] - frame_high[:, None]) + (u_low[None, :] - frame_low[:, None])
    seen = (token[:, None] >= other[None, :]) & inside[:, None]
    product = tl.where(seen, tl.exp2(exponent), 0.0) * (product * scale)
    k_tile = tl.load(k_row + other.to(tl.int64)[:, None] * (k_s * ALIGN) + dim_k[None, :],
                     mask=other_inside[:, None] & in_k[None, :], other=0.0)  # fmt: skip
    acc = dot_weighed(product, k_tile, acc, PRECISION)
    tl.store(dq_row + token.to(tl.int64)[:, None] * (dq_s * ALIGN) + dim_k[None, :], rounded(acc, dq),
             mask=in_q)  # fmt: skip


_STRIDES_K_V = ["q_b", "q_h", "q_s", "k_b", "k_h", "k_s", "v_b", "v_h", "v_s", "dh_b", "dh_h", "dh_s",
                "dk_b", "dk_h", "dk_s", "dv_b", "dv_h", "dv_s"]  # fmt: skip


@triton.jit(do_not_specialize=["S", "H", "scale", "num_tokens", *_STRIDES_K_V])
def k_v_gradients_kernel(q, k, v, dh, u, m, inverse, d_den, chunk_dC, chunk_dn, dk, dv, row_sum, column_sum, k_own,
                         k_part, cu, sequence_of_slot, q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, dh_b, dh_h, dh_s,
                         dk_b, dk_h, dk_s, dv_b, dv_h, dv_s, S, H, scale, num_tokens, DK: tl.constexpr,
                         DV: tl.constexpr, SIGMOID: tl.constexpr, PACKED: tl.constexpr, CHUNK: tl.constexpr,
                         ROWS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, ALIGN: tl.constexpr,
                         PRECISION: tl.constexpr):  # fmt: skip
    """dk, dv, sums of dD, and k . the part of dk from the state after.

    Grid: slots * H * tiles of ROWS of k's tokens. row_sum, a sheet of num_tokens a tile, and column_sum: without the
    diagonal, of one fp32 product, so that what they share cancels to its last bits.
    k_own: column sums with the diagonal, which is k . the part of dk from this chunk.
    """
    tiles_k: tl.constexpr = (DK + BLOCK_K - 1) // BLOCK_K
    tiles_v: tl.constexpr = (DV + BLOCK_V - 1) // BLOCK_V
    SINGLE: tl.constexpr = tiles_k == 1 and tiles_v == 1
    program = tl.program_id(0).to(tl.int64)
    tile_row = (program % (CHUNK // ROWS)).to(tl.int32)
    slot_head = program // (CHUNK // ROWS)
    head = slot_head % H
    _, row, begin, length, start = slot_span(slot_head // H, cu, sequence_of_slot, S, CHUNK, PACKED)
    if start >= length:
        return
    q_row = q + (row * q_b + head * q_h) * ALIGN + begin * (q_s * ALIGN)
    k_row = k + (row * k_b + head * k_h) * ALIGN + begin * (k_s * ALIGN)
    v_row = v + (row * v_b + head * v_h) * ALIGN + begin * (v_s * ALIGN)
    dh_row = dh + (row * dh_b + head * dh_h) * ALIGN + begin * (dh_s * ALIGN)
    dk_row = dk + (row * dk_b + head * dk_h) * ALIGN + begin * (dk_s * ALIGN)
    dv_row = dv + (row * dv_b + head * dv_h) * ALIGN + begin * (dv_s * ALIGN)
    gates = (row * H + head) * S + begin
    dC_row = chunk_dC + slot_head * (DK * DV)

    token = start + tile_row * ROWS + tl.arange(0, ROWS)
    inside = token < length
    at = token.to(tl.int64)
    other = start + tl.arange(0, CHUNK)
    other_inside = other < length
    other_at = other.to(tl.int64)

    # Transposed: k's tokens down, q's across.
    product = tl.zeros((ROWS, CHUNK), tl.float32)
    d_product = tl.zeros((ROWS, CHUNK), tl.float32)
    if SINGLE:
        # Every tile is read once, and all of them before the first is needed.
        dim_k = tl.arange(0, BLOCK_K)
        dim_v = tl.arange(0, BLOCK_V)
        in_k = dim_k < DK
        in_v = dim_v < DV
        k_tile = tl.load(k_row + at[:, None] * (k_s * ALIGN) + dim_k[None, :], mask=inside[:, None] & in_k[None, :],
                         other=0.0)  # fmt: skip
        q_tile = tl.load(q_row + other_at[:, None] * (q_s * ALIGN) + dim_k[None, :],
                         mask=other_inside[:, None] & in_k[None, :], other=0.0)  # fmt: skip
        v_tile = tl.load(v_row + at[:, None] * (v_s * ALIGN) + dim_v[None, :], mask=inside[:, None] & in_v[None, :],
                         other=0.0)  # fmt: skip
        dh_tile = tl.load(dh_row + other_at[:, None] * (dh_s * ALIGN) + dim_v[None, :],
                          mask=other_inside[:, None] & in_v[None, :], other=0.0)  # fmt: skip
        dC = tl.load(dC_row + dim_k[:, None] * DV + dim_v[None, :], mask=in_k[:, None] & in_v[None, :], other=0.0)
        product = tl.dot(k_tile, tl.trans(q_tile), product, input_precision=PRECISION)
        d_product = tl.dot(v_tile, tl.trans(dh_tile), d_product, input_precision=PRECISION)
    for tile_k in range(0, 0 if SINGLE else tiles_k):
        dim_k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
        in_k = dim_k < DK
        k_tile = tl.load(k_row + at[:, None] * (k_s * ALIGN) + dim_k[None, :], mask=inside[:, None] & in_k[None, :],
                         other=0.0)  # fmt: skip
        q_t = tl.load(q_row + other_at[None, :] * (q_s * ALIGN) + dim_k[:, None],
                      mask=in_k[:, None] & other_inside[None, :], other=0.0)  # fmt: skip
        product = tl.dot(k_tile, q_t, product, input_precision=PRECISION)
    for tile_v in range(0, 0 if SINGLE else tiles_v):
        dim_v = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
        in_v = dim_v < DV
        v_tile = tl.load(v_row + at[:, None] * (v_s * ALIGN) + dim_v[None, :], mask=inside[:, None] & in_v[None, :],
                         other=0.0)  # fmt: skip
        dh_t = tl.load(dh_row + other_at[None, :] * (dh_s * ALIGN) + dim_v[:, None],
                       mask=in_v[:, None] & other_inside[None, :], other=0.0)  # fmt: skip
        d_product = tl.dot(v_tile, dh_t, d_product, input_precision=PRECISION)

    own_u = tl.load(u + gates + token, mask=inside, other=0.0)
    u_high, u_low = split(own_u)
    frame_high, frame_low = split(tl.load(m + gates + other, mask=other_inside, other=0.0))
    exponent = (u_high[:, None] - frame_high[None, :]) + (u_low[:, None] - frame_low[None, :])
    seen = (token[:, None] <= other[None, :]) & other_inside[None, :]
    weights = tl.where(seen, tl.exp2(exponent), 0.0) * scale
    product *= weights
    if SIGMOID:
        row_column = product * d_product
        d_product *= weights
    else:
        inverse_row = tl.load(inverse + gates + other, mask=other_inside, other=0.0)
        to_den = tl.load(d_den + gates + other, mask=other_inside, other=0.0)
        d_product = (d_product + to_den[None, :]) * inverse_row[None, :]
        row_column = product * d_product
        product *= inverse_row[None, :]
        d_product *= weights
    tl.store(k_own + gates + token, tl.sum(row_column, 1), mask=inside)
    row_column = tl.where(token[:, None] != other[None, :], row_column, 0.0)
    tl.store(row_sum + tile_row.to(tl.int64) * num_tokens + gates + other, tl.sum(row_column, 0), mask=other_inside)
    tl.store(column_sum + gates + token, tl.sum(row_column, 1), mask=inside)
    after = weight(own_u - tl.load(m + gates + tl.minimum(start + CHUNK, length) - 1))
    after = tl.where(inside, after, 0.0)

    for tile_v in range(0, tiles_v):
        dim_v = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
        in_v = dim_v < DV
        in_tile = inside[:, None] & in_v[None, :]
        acc = tl.zeros((ROWS, BLOCK_V), tl.float32)
        if SINGLE:
            acc = dot_state(k_tile, dC, acc, PRECISION)
        for tile_k in range(0, 0 if SINGLE else tiles_k):
            dim_k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
            in_k = dim_k < DK
            k_tile = tl.load(k_row + at[:, None] * (k_s * ALIGN) + dim_k[None, :],
                             mask=inside[:, None] & in_k[None, :], other=0.0)  # fmt: skip
            dC = tl.load(dC_row + dim_k[:, None] * DV + dim_v[None, :], mask=in_k[:, None] & in_v[None, :], other=0.0)
            acc = dot_state(k_tile, dC, acc, PRECISION)
        acc *= after[:, None]
        if not SINGLE:
            dh_tile = tl.load(dh_row + other_at[:, None] * (dh_s * ALIGN) + dim_v[None, :],
                              mask=other_inside[:, None] & in_v[None, :], other=0.0)  # fmt: skip
        acc = dot_weighed(product, dh_tile, acc, PRECISION)
        tl.store(dv_row + at[:, None] * (dv_s * ALIGN) + dim_v[None, :], rounded(acc, dv), mask=in_tile)

    part = tl.zeros((ROWS,), tl.float32)
    for tile_k in range(0, tiles_k):
        dim_k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
        in_k = dim_k < DK
        in_tile = inside[:, None] & in_k[None, :]
        acc = tl.zeros((ROWS, BLOCK_K), tl.float32)
        if SINGLE:
            acc = dot_state(v_tile, tl.trans(dC), acc, PRECISION)
        for tile_v in range(0, 0 if SINGLE else tiles_v):
            dim_v = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
            in_v = dim_v < DV
            v_tile = tl.load(v_row + at[:, None] * (v_s * ALIGN) + dim_v[None, :],
                             mask=inside[:, None] & in_v[None, :], other=0.0)  # fmt: skip
            dC_t = tl.load(dC_row + dim_k[None, :] * DV + dim_v[:, None], mask=in_v[:, None] & in_k[None, :],
                           other=0.0)  # fmt: skip
            acc = dot_state(v_tile, dC_t, acc, PRECISION)
        if not SIGMOID:
            acc += tl.load(chunk_dn + slot_head * DK + dim_k, mask=in_k, other=0.0)[None, :]
        acc *= after[:, None]
        if not SINGLE:
            k_tile = tl.load(k_row + at[:, None] * (k_s * ALIGN) + dim_k[None, :], mask=in_tile, other=0.0)
            q_tile = tl.load(q_row + other_at[:, None] * (q_s * ALIGN) + dim_k[None, :],
                             mask=other_inside[:, None] & in_k[None, :], other=0.0)  # fmt: skip
        part += tl.sum(k_tile.to(tl.float32) * acc, 1)
        acc = dot_weighed(d_product, q_tile, acc, PRECISION)
        tl.store(dk_row + at[:, None] * (dk_s * ALIGN) + dim_k[None, :], rounded(acc, dk), mask=in_tile)
    tl.store(k_part + gates + token, part, mask=inside)
