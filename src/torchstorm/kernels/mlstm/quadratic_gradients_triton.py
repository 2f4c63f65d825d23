"""The gradients of the quadratic mLSTM, as in FlashAttention-2: tiles of weights are recomputed, not stored.

One kernel loops over earlier tokens for each tile of rows to compute dq. Another loops over later rows for each tile of
tokens to compute dk and dv. Every gradient has one owner, so there are no atomics. G and dD are as in gradients_triton.
Multiply-adds per head: S^2 / 2 (d_v + d_qk) for dq, S^2 / 2 (2 d_qk + 2 d_v) for dk and dv, if one tile holds d.

The gradient of log f at t is the sum of dD over all rows s >= t and columns j < t, a different part of the triangle for
each t. For a t in block b it is a sum of parts, without subtractions: rows of b with earlier blocks, columns of b with
later blocks, whole tiles of later rows and earlier columns, and b's own tile, the only one that needs row sums minus
column sums. `between` holds sums of whole tiles, S^2 / BLOCK^2 numbers per head.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from torchstorm.kernels.mlstm.quadratic_outputs_triton import operand
from torchstorm.kernels.mlstm.spans_triton import (
    dot_state,
    dot_weighed,
    first_slot,
    frame_before,
    rounded,
    slot_span,
    split,
    weight,
)

_STRIDES_Q = ["q_b", "q_h", "q_s", "k_b", "k_h", "k_s", "v_b", "v_h", "v_s", "dh_b", "dh_h", "dh_s",
              "dq_b", "dq_h", "dq_s"]  # fmt: skip


@triton.jit(do_not_specialize=["S", "H", "scale", "num_tokens", *_STRIDES_Q])
def quadratic_q_gradients_kernel(q, k, v, dh, u, m, m0, inverse, d_den, start_C, start_n, dq, q_part, start_part, cu,
                                 sequence_of_slot, q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, dh_b, dh_h, dh_s,
                                 dq_b, dq_h, dq_s, S, H, scale, num_tokens, DK: tl.constexpr, DV: tl.constexpr,
                                 SIGMOID: tl.constexpr, HAS_START: tl.constexpr, HAS_STATE: tl.constexpr,
                                 PACKED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
                                 BLOCK_V: tl.constexpr, ALIGN: tl.constexpr, TENSOR_CORES: tl.constexpr,
                                 PRECISION: tl.constexpr):  # fmt: skip
    """dq of BLOCK rows and BLOCK_K columns. Grid: slots * H * K tiles.

    q_part: q . the part of dq from before the rows' own block; start_part: from the state at the start alone. Each is
    one sheet of num_tokens a K tile.
    """
    tiles_k: tl.constexpr = (DK + BLOCK_K - 1) // BLOCK_K
    tiles_v: tl.constexpr = (DV + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0).to(tl.int64)
    tile_k = (program % tiles_k).to(tl.int32)
    slot_head = program // tiles_k
    head = slot_head % H
    n, row, begin, length, start = slot_span(slot_head // H, cu, sequence_of_slot, S, BLOCK, PACKED)
    if start >= length:
        return
    q_row = q + (row * q_b + head * q_h) * ALIGN + begin * (q_s * ALIGN)
    k_row = k + (row * k_b + head * k_h) * ALIGN + begin * (k_s * ALIGN)
    v_row = v + (row * v_b + head * v_h) * ALIGN + begin * (v_s * ALIGN)
    dh_row = dh + (row * dh_b + head * dh_h) * ALIGN + begin * (dh_s * ALIGN)
    dq_row = dq + (row * dq_b + head * dq_h) * ALIGN + begin * (dq_s * ALIGN)
    gates = (row * H + head) * S + begin
    sheet = tile_k.to(tl.int64) * num_tokens + gates

    token = start + tl.arange(0, BLOCK)
    inside = token < length
    at = token.to(tl.int64)
    dim_k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    in_k = dim_k < DK
    in_q = inside[:, None] & in_k[None, :]
    frame = tl.load(m + gates + token, mask=inside, other=0.0)
    frame_high, frame_low = split(frame)
    own = tl.zeros((BLOCK,), tl.float32)
    to_den = tl.zeros((BLOCK,), tl.float32)
    if not SIGMOID:
        own = tl.load(inverse + gates + token, mask=inside, other=0.0)
        to_den = tl.load(d_den + gates + token, mask=inside, other=0.0)
    q_tile = tl.load(q_row + at[:, None] * (q_s * ALIGN) + dim_k[None, :], mask=in_q, other=0.0).to(tl.float32)

    acc = tl.zeros((BLOCK, BLOCK_K), tl.float32)
    if HAS_STATE:
        n_head = n.to(tl.int64) * H + head
        for tile_v in range(0, tiles_v):
            dim_v = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
            in_v = dim_v < DV
            dh_tile = tl.load(dh_row + at[:, None] * (dh_s * ALIGN) + dim_v[None, :],
                              mask=inside[:, None] & in_v[None, :], other=0.0)  # fmt: skip
            C_t = tl.load(start_C + n_head * (DK * DV) + dim_k[None, :] * DV + dim_v[:, None],
                          mask=in_v[:, None] & in_k[None, :], other=0.0)  # fmt: skip
            acc = dot_state(dh_tile, C_t, acc, PRECISION)
        if not SIGMOID:
            norm = tl.load(start_n + n_head * DK + dim_k, mask=in_k, other=0.0)
            acc = (acc + to_den[:, None] * norm[None, :]) * own[:, None]
        before = weight(frame_before(m + gates, m0, n_head, 0, HAS_START) - frame) * scale
        acc *= tl.where(inside, before, 0.0)[:, None]
        tl.store(start_part + sheet + token, tl.sum(q_tile * acc, 1), mask=inside)

    # Earlier blocks, and last the rows' own.
    earlier = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, start + BLOCK, BLOCK):
        earlier = tl.where(first == start, tl.sum(q_tile * acc, 1), earlier)
        other = first + tl.arange(0, BLOCK)
        inside_other = other < length
        product = tl.zeros((BLOCK, BLOCK), tl.float32)
        for tile_v in range(0, tiles_v):
            dim_v = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
            in_v = dim_v < DV
            dh_tile = tl.load(dh_row + at[:, None] * (dh_s * ALIGN) + dim_v[None, :],
                              mask=inside[:, None] & in_v[None, :], other=0.0)  # fmt: skip
            v_t = tl.load(v_row + other.to(tl.int64)[None, :] * (v_s * ALIGN) + dim_v[:, None],
                          mask=in_v[:, None] & inside_other[None, :], other=0.0)  # fmt: skip
            product = tl.dot(operand(dh_tile, TENSOR_CORES), operand(v_t, TENSOR_CORES), product,
                             input_precision=PRECISION)  # fmt: skip
        if not SIGMOID:
            product = (product + to_den[:, None]) * own[:, None]
        u_high, u_low = split(tl.load(u + gates + other, mask=inside_other, other=0.0))
        exponent = (u_high[None, :] - frame_high[:, None]) + (u_low[None, :] - frame_low[:, None])
        seen = (token[:, None] >= other[None, :]) & inside[:, None]
        product = tl.where(seen, tl.exp2(exponent), 0.0) * (product * scale)
        k_tile = tl.load(k_row + other.to(tl.int64)[:, None] * (k_s * ALIGN) + dim_k[None, :],
                         mask=inside_other[:, None] & in_k[None, :], other=0.0)  # fmt: skip
        acc = dot_weighed(product, operand(k_tile, TENSOR_CORES), acc, PRECISION)
    tl.store(q_part + sheet + token, earlier, mask=inside)
    tl.store(dq_row + at[:, None] * (dq_s * ALIGN) + dim_k[None, :], rounded(acc, dq), mask=in_q)


@triton.jit
def _tile(q_row, k_row, v_row, dh_row, u_high, u_low, m, inverse, d_den, column, row, length, q_s, k_s, v_s, dh_s,
          scale, DK: tl.constexpr, DV: tl.constexpr, SIGMOID: tl.constexpr, BLOCK: tl.constexpr, INNER: tl.constexpr,
          TENSOR_CORES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """One tile of rows across and columns down: w S / N, which carries dh to dv; G, which carries q to dk; and dD."""
    in_column = column < length
    in_row = row < length
    at_column = column.to(tl.int64)
    at_row = row.to(tl.int64)
    product = tl.zeros((BLOCK, BLOCK), tl.float32)
    for first in range(0, DK, INNER):
        dim = first + tl.arange(0, INNER)
        in_dim = dim < DK
        k_tile = tl.load(k_row + at_column[:, None] * k_s + dim[None, :], mask=in_column[:, None] & in_dim[None, :],
                         other=0.0)  # fmt: skip
        q_t = tl.load(q_row + at_row[None, :] * q_s + dim[:, None], mask=in_dim[:, None] & in_row[None, :], other=0.0)
        product = tl.dot(operand(k_tile, TENSOR_CORES), operand(q_t, TENSOR_CORES), product,
                         input_precision=PRECISION)  # fmt: skip
    d_product = tl.zeros((BLOCK, BLOCK), tl.float32)
    for first in range(0, DV, INNER):
        dim = first + tl.arange(0, INNER)
        in_dim = dim < DV
        v_tile = tl.load(v_row + at_column[:, None] * v_s + dim[None, :], mask=in_column[:, None] & in_dim[None, :],
                         other=0.0)  # fmt: skip
        dh_t = tl.load(dh_row + at_row[None, :] * dh_s + dim[:, None], mask=in_dim[:, None] & in_row[None, :],
                       other=0.0)  # fmt: skip
        d_product = tl.dot(operand(v_tile, TENSOR_CORES), operand(dh_t, TENSOR_CORES), d_product,
                           input_precision=PRECISION)  # fmt: skip
    frame_high, frame_low = split(tl.load(m + row, mask=in_row, other=0.0))
    exponent = (u_high[:, None] - frame_high[None, :]) + (u_low[:, None] - frame_low[None, :])
    seen = (column[:, None] <= row[None, :]) & in_row[None, :]
    weights = tl.where(seen, tl.exp2(exponent), 0.0) * scale
    product *= weights
    if not SIGMOID:
        own = tl.load(inverse + row, mask=in_row, other=0.0)
        d_product = (d_product + tl.load(d_den + row, mask=in_row, other=0.0)[None, :]) * own[None, :]
    d_weights = product * d_product
    if not SIGMOID:
        product *= own[None, :]
    return product, d_product * weights, d_weights


_STRIDES_K_V = ["q_b", "q_h", "q_s", "k_b", "k_h", "k_s", "v_b", "v_h", "v_s", "dh_b", "dh_h", "dh_s",
                "dk_b", "dk_h", "dk_s", "dv_b", "dv_h", "dv_s"]  # fmt: skip


@triton.jit(do_not_specialize=["S", "H", "scale", "num_tokens", "num_blocks", *_STRIDES_K_V])
def quadratic_k_v_gradients_kernel(q, k, v, dh, u, m, inverse, d_den, end_dC, end_dn, dk, dv, row_sum, column_sum,
                                   k_own, k_part, end_part, between, cu, sequence_of_slot, q_b, q_h, q_s, k_b, k_h,
                                   k_s, v_b, v_h, v_s, dh_b, dh_h, dh_s, dk_b, dk_h, dk_s, dv_b, dv_h, dv_s, S, H,
                                   scale, num_tokens, num_blocks, DK: tl.constexpr, DV: tl.constexpr,
                                   SIGMOID: tl.constexpr, HAS_END: tl.constexpr, PACKED: tl.constexpr,
                                   BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
                                   INNER: tl.constexpr, TILES: tl.constexpr, ALIGN: tl.constexpr,
                                   TENSOR_CORES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """dk and dv of BLOCK tokens, BLOCK_K and BLOCK_V columns of them, and sums of dD. Grid: slots * H * TILES.

    row_sum, column_sum: of the own tile without its diagonal; k_own: column sums with it. k_part: column sums of later
    blocks. end_part: k . the part of dk from the state at the end, one sheet of num_tokens a tile. between: for each
    own block and later block, the sum over all tiles still later; num_blocks float64 a slot and head.
    """
    program = tl.program_id(0).to(tl.int64)
    tile = (program % TILES).to(tl.int32)
    slot_head = program // TILES
    head = slot_head % H
    n, row, begin, length, start = slot_span(slot_head // H, cu, sequence_of_slot, S, BLOCK, PACKED)
    if start >= length:
        return
    q_row = q + (row * q_b + head * q_h) * ALIGN + begin * (q_s * ALIGN)
    k_row = k + (row * k_b + head * k_h) * ALIGN + begin * (k_s * ALIGN)
    v_row = v + (row * v_b + head * v_h) * ALIGN + begin * (v_s * ALIGN)
    dh_row = dh + (row * dh_b + head * dh_h) * ALIGN + begin * (dh_s * ALIGN)
    dk_row = dk + (row * dk_b + head * dk_h) * ALIGN + begin * (dk_s * ALIGN)
    dv_row = dv + (row * dv_b + head * dv_h) * ALIGN + begin * (dv_s * ALIGN)
    gates = (row * H + head) * S + begin
    m += gates
    inverse += gates
    d_den += gates
    between += slot_head * num_blocks

    token = start + tl.arange(0, BLOCK)
    inside = token < length
    at = token.to(tl.int64)
    dim_k = tile * BLOCK_K + tl.arange(0, BLOCK_K)
    dim_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    in_k = dim_k < DK
    in_v = dim_v < DV
    own_u = tl.load(u + gates + token, mask=inside, other=0.0)
    u_high, u_low = split(own_u)

    acc_k = tl.zeros((BLOCK, BLOCK_K), tl.float32)
    acc_v = tl.zeros((BLOCK, BLOCK_V), tl.float32)
    if HAS_END:
        dC_row = end_dC + (n.to(tl.int64) * H + head) * (DK * DV)
        for first in range(0, DV, INNER):
            dim = first + tl.arange(0, INNER)
            in_dim = dim < DV
            v_tile = tl.load(v_row + at[:, None] * (v_s * ALIGN) + dim[None, :],
                             mask=inside[:, None] & in_dim[None, :], other=0.0)  # fmt: skip
            dC_t = tl.load(dC_row + dim_k[None, :] * DV + dim[:, None], mask=in_dim[:, None] & in_k[None, :],
                           other=0.0)  # fmt: skip
            acc_k = dot_state(v_tile, dC_t, acc_k, PRECISION)
        for first in range(0, DK, INNER):
            dim = first + tl.arange(0, INNER)
            in_dim = dim < DK
            k_tile = tl.load(k_row + at[:, None] * (k_s * ALIGN) + dim[None, :],
                             mask=inside[:, None] & in_dim[None, :], other=0.0)  # fmt: skip
            dC = tl.load(dC_row + dim[:, None] * DV + dim_v[None, :], mask=in_dim[:, None] & in_v[None, :], other=0.0)
            acc_v = dot_state(k_tile, dC, acc_v, PRECISION)
        if not SIGMOID:
            acc_k += tl.load(end_dn + (n.to(tl.int64) * H + head) * DK + dim_k, mask=in_k, other=0.0)[None, :]
        after = tl.where(inside, weight(own_u - tl.load(m + length - 1)), 0.0)
        acc_k *= after[:, None]
        acc_v *= after[:, None]
        k_tile = tl.load(k_row + at[:, None] * (k_s * ALIGN) + dim_k[None, :], mask=inside[:, None] & in_k[None, :],
                         other=0.0)  # fmt: skip
        tl.store(end_part + tile.to(tl.int64) * num_tokens + gates + token, tl.sum(k_tile.to(tl.float32) * acc_k, 1),
                 mask=inside)  # fmt: skip

    columns = tl.zeros((BLOCK,), tl.float32)
    later = tl.full((), 0.0, tl.float64)
    last = tl.cdiv(length, BLOCK) - 1
    for back in tl.range(0, last - start // BLOCK + 1, disable_licm=True):
        block = last - back
        other = block * BLOCK + tl.arange(0, BLOCK)
        in_other = other < length
        carries_dh, carries_q, d_weights = _tile(
            q_row, k_row, v_row, dh_row, u_high, u_low, m, inverse, d_den, token, other, length, q_s * ALIGN,
            k_s * ALIGN, v_s * ALIGN, dh_s * ALIGN, scale, DK, DV, SIGMOID, BLOCK, INNER, TENSOR_CORES, PRECISION,
        )  # fmt: skip
        dh_tile = tl.load(dh_row + other.to(tl.int64)[:, None] * (dh_s * ALIGN) + dim_v[None, :],
                          mask=in_other[:, None] & in_v[None, :], other=0.0)  # fmt: skip
        acc_v = dot_weighed(carries_dh, operand(dh_tile, TENSOR_CORES), acc_v, PRECISION)
        q_tile = tl.load(q_row + other.to(tl.int64)[:, None] * (q_s * ALIGN) + dim_k[None, :],
                         mask=in_other[:, None] & in_k[None, :], other=0.0)  # fmt: skip
        acc_k = dot_weighed(carries_q, operand(q_tile, TENSOR_CORES), acc_k, PRECISION)
        # What follows is the same for every tile, so that one of them stores it. The own block comes last.
        sums = tl.sum(d_weights, 1)
        if block * BLOCK == start:
            tl.store(k_own + gates + token, sums, mask=inside & (tile == 0))
            d_weights = tl.where(token[:, None] != other[None, :], d_weights, 0.0)
            tl.store(row_sum + gates + token, tl.sum(d_weights, 0), mask=inside & (tile == 0))
            tl.store(column_sum + gates + token, tl.sum(d_weights, 1), mask=inside & (tile == 0))
        else:
            tl.store(between + block, later, mask=tile == 0)
            columns += sums
            later += tl.sum(sums, 0).to(tl.float64)
    tl.store(k_part + gates + token, columns, mask=inside & (tile == 0))
    tl.store(dk_row + at[:, None] * (dk_s * ALIGN) + dim_k[None, :], rounded(acc_k, dk),
             mask=inside[:, None] & in_k[None, :])  # fmt: skip
    tl.store(dv_row + at[:, None] * (dv_s * ALIGN) + dim_v[None, :], rounded(acc_v, dv),
             mask=inside[:, None] & in_v[None, :])  # fmt: skip


@triton.jit(do_not_specialize=["S", "H", "num_blocks"])
def passing_kernel(between, start_part, end_part, across, passing, cu, sequence_of_slot, S, H, num_blocks,
                   HAS_STATE: tl.constexpr, HAS_END: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
                   STEP: tl.constexpr):  # fmt: skip
    """What of dD passes over a whole block, in float64: later rows with earlier columns. Grid: slots * H.

    The state at the start is a column before all, the one at the end a row after all: start_part, end_part (B, H, S)
    are their sums with each token, and across (N, H) that of both with each other.
    """
    slot_head = tl.program_id(0).to(tl.int64)
    head = slot_head % H
    n, row, begin, length, start = slot_span(slot_head // H, cu, sequence_of_slot, S, BLOCK, PACKED)
    if start >= length:
        return
    own = start // BLOCK
    gates = (row * H + head) * S + begin
    slot = first_slot(n.to(tl.int64), begin, S, BLOCK, PACKED)
    total = tl.full((), 0.0, tl.float64)
    for first in range(0, own, STEP):
        block = first + tl.arange(0, STEP)
        at = ((slot + block) * H + head) * num_blocks + own
        total += tl.sum(tl.load(between + at, mask=block < own, other=0.0), 0)
    if HAS_STATE:
        for first in range(start + BLOCK, length, STEP):
            token = first + tl.arange(0, STEP)
            total += tl.sum(tl.load(start_part + gates + token, mask=token < length, other=0.0).to(tl.float64), 0)
    if HAS_END:
        for first in range(0, start, STEP):
            token = first + tl.arange(0, STEP)
            total += tl.sum(tl.load(end_part + gates + token, mask=token < start, other=0.0).to(tl.float64), 0)
    if HAS_STATE and HAS_END:
        total += tl.load(across + n.to(tl.int64) * H + head)
    tl.store(passing + slot_head, total)
