"""The states of the mLSTM and their gradients: two loops over the chunks of a sequence.

A program keeps one (BLOCK_K, BLOCK_V) tile of C in fp32 registers, together with n, and loops over the chunks. It
writes the state at each chunk, which the parallel kernels read. Memory traffic of a loop: reads of k and v (or q and
dh) once per tile of the other dimension, mostly from L2; one state written per chunk, d_qk d_v / CHUNK numbers per
token.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from torchstorm.kernels.mlstm.spans_triton import (
    dot_weighed,
    first_slot,
    frame_before,
    sequence_span,
    slot_span,
    weight,
)

_STRIDES_K_V = ["k_b", "k_h", "k_s", "v_b", "v_h", "v_s"]
_STRIDES_Q_DH = ["q_b", "q_h", "q_s", "dh_b", "dh_h", "dh_s"]


@triton.jit(do_not_specialize=["S", "H", *_STRIDES_K_V])
def states_kernel(k, v, u, m, m0, start_C, start_n, chunk_C, chunk_n, end_C, end_n, cu, sequence_of_group,
                  k_b, k_h, k_s, v_b, v_h, v_s, S, H, DK: tl.constexpr, DV: tl.constexpr,
                  SIGMOID: tl.constexpr, BY_GROUP: tl.constexpr, STORE_END: tl.constexpr, HAS_STATE: tl.constexpr,
                  HAS_START: tl.constexpr, PACKED: tl.constexpr,
                  CHUNK: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
                  ALIGN: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """States at the start of every chunk, and at the end.

    Grid: (N * H, or group slots * H where BY_GROUP) * K tiles * V tiles. The walk begins at start_C, start_n
    (HAS_STATE: one a sequence, or one a group), else at zero. HAS_START: m0 was given.
    """
    tiles_k: tl.constexpr = (DK + BLOCK_K - 1) // BLOCK_K
    tiles_v: tl.constexpr = (DV + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0).to(tl.int64)
    tile_v = (program % tiles_v).to(tl.int32)
    tile_k = (program // tiles_v % tiles_k).to(tl.int32)
    walk_head = program // (tiles_v * tiles_k)
    head = walk_head % H
    if BY_GROUP:
        n, row, begin, length, first = slot_span(walk_head // H, cu, sequence_of_group, S, GROUP, PACKED)
        last = tl.minimum(first + GROUP, length)
    else:
        n = walk_head // H
        row, begin, length = sequence_span(n, cu, S, PACKED)
        first = 0
        last = length
    if first >= length and BY_GROUP:
        return
    chunk_slot = first_slot(n, begin, S, CHUNK, PACKED)

    dim_k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    dim_v = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
    in_k = dim_k < DK
    in_v = dim_v < DV
    in_state = in_k[:, None] & in_v[None, :]
    at_state = dim_k[:, None] * DV + dim_v[None, :]
    k_row = k + (row * k_b + head * k_h) * ALIGN + begin * (k_s * ALIGN)
    v_row = v + (row * v_b + head * v_h) * ALIGN + begin * (v_s * ALIGN)
    gates = (row * H + head) * S + begin
    u += gates
    m += gates

    C = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    norm = tl.zeros((BLOCK_K,), tl.float32)
    if HAS_STATE:
        C = tl.load(start_C + walk_head * (DK * DV) + at_state, mask=in_state, other=0.0).to(tl.float32)
        if not SIGMOID:
            norm = tl.load(start_n + walk_head * DK + dim_k, mask=in_k, other=0.0).to(tl.float32)
    # A chunk's end and decay are read one chunk ahead, so that no program waits for one number; and what a round
    # hands to the next is always made in it, or Triton does not pipeline the loop.
    frame = frame_before(m, m0, n * H + head, first, HAS_START)
    frame_end = tl.load(m + tl.minimum(first + CHUNK, length) - 1, mask=length > 0, other=0.0)
    decay = weight(frame - frame_end)
    for at in range(first, last, CHUNK):
        next_end = tl.load(m + tl.minimum(at + 2 * CHUNK, length) - 1)
        next_decay = weight(frame_end - next_end)
        state = (chunk_slot + at // CHUNK) * H + head
        tl.store(chunk_C + state * (DK * DV) + at_state, C.to(chunk_C.dtype.element_ty), mask=in_state)
        if tile_v == 0 and not SIGMOID:
            tl.store(chunk_n + state * DK + dim_k, norm, mask=in_k)
        token = at + tl.arange(0, CHUNK)
        inside = token < length
        k_t = tl.load(k_row + token.to(tl.int64)[None, :] * (k_s * ALIGN) + dim_k[:, None],
                      mask=in_k[:, None] & inside[None, :], other=0.0)  # fmt: skip
        v_tile = tl.load(v_row + token.to(tl.int64)[:, None] * (v_s * ALIGN) + dim_v[None, :],
                         mask=inside[:, None] & in_v[None, :], other=0.0)  # fmt: skip
        own = tl.where(inside, weight(tl.load(u + token, mask=inside, other=0.0) - frame_end), 0.0)
        weighed = k_t.to(tl.float32) * own[None, :]
        if not SIGMOID:
            norm = norm * decay + tl.sum(weighed, 1)
        C = tl.dot(weighed.to(v_tile.dtype), v_tile, C * decay, input_precision=PRECISION)
        frame_end = next_end
        decay = next_decay
    if STORE_END:
        tl.store(end_C + walk_head * (DK * DV) + at_state, C, mask=in_state)
        if tile_v == 0 and not SIGMOID:
            tl.store(end_n + walk_head * DK + dim_k, norm, mask=in_k)


@triton.jit(do_not_specialize=["S", "H", "scale", *_STRIDES_Q_DH])
def state_gradients_kernel(q, dh, inverse, d_den, m, m0, end_dC, end_dn, chunk_C, chunk_n, chunk_dC, chunk_dn,
                           start_dC, start_dn, passing, cu, q_b, q_h, q_s, dh_b, dh_h, dh_s, S, H, scale,
                           DK: tl.constexpr, DV: tl.constexpr, SIGMOID: tl.constexpr, HAS_END: tl.constexpr,
                           STORE_START: tl.constexpr, HAS_START: tl.constexpr, PACKED: tl.constexpr,
                           CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, ALIGN: tl.constexpr,
                           PRECISION: tl.constexpr):  # fmt: skip
    """Gradients to the state at the end of each chunk and at the start, from last to first. Grid: N * H * K * V tiles.

    inverse: 1 / max(|den|, floor), d_den: the gradient to den without that factor, fp32 (B, H, S), not for SIGMOID.
    passing: this tile's part of decay * <state, gradient to the next state>, one float64 a slot, head and tile. Where
    the final m comes from an early token, what it passes back to the gates cancels most of this: hence float64, and
    summed in it where states are fp32.
    """
    tiles_k: tl.constexpr = (DK + BLOCK_K - 1) // BLOCK_K
    tiles_v: tl.constexpr = (DV + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0).to(tl.int64)
    tile_v = (program % tiles_v).to(tl.int32)
    tile_k = (program // tiles_v % tiles_k).to(tl.int32)
    n_head = program // (tiles_v * tiles_k)
    head = n_head % H
    n = n_head // H
    row, begin, length = sequence_span(n, cu, S, PACKED)
    chunk_slot = first_slot(n, begin, S, CHUNK, PACKED)

    dim_k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    dim_v = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
    in_k = dim_k < DK
    in_v = dim_v < DV
    in_state = in_k[:, None] & in_v[None, :]
    at_state = dim_k[:, None] * DV + dim_v[None, :]
    q_row = q + (row * q_b + head * q_h) * ALIGN + begin * (q_s * ALIGN)
    dh_row = dh + (row * dh_b + head * dh_h) * ALIGN + begin * (dh_s * ALIGN)
    gates = (row * H + head) * S + begin
    m += gates

    dC = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    dn = tl.zeros((BLOCK_K,), tl.float32)
    if HAS_END:
        dC = tl.load(end_dC + n_head * (DK * DV) + at_state, mask=in_state, other=0.0).to(tl.float32)
        if not SIGMOID:
            dn = tl.load(end_dn + n_head * DK + dim_k, mask=in_k, other=0.0).to(tl.float32)
    num_chunks = tl.cdiv(length, CHUNK)
    frame_start = frame_before(m, m0, n_head, 0, HAS_START)
    # As in states_kernel: one chunk ahead.
    at = (num_chunks - 1) * CHUNK
    frame = tl.where(at > 0, tl.load(m + at - 1, mask=at > 0, other=0.0), frame_start)
    decay = weight(frame - tl.load(m + length - 1, mask=length > 0, other=0.0))
    for back in range(0, num_chunks):
        at = (num_chunks - 1 - back) * CHUNK
        before_it = at - CHUNK
        next_frame = tl.where(before_it > 0, tl.load(m + before_it - 1, mask=before_it > 0, other=0.0), frame_start)
        next_decay = weight(next_frame - frame)
        state = (chunk_slot + at // CHUNK) * H + head
        tl.store(chunk_dC + state * (DK * DV) + at_state, dC.to(chunk_dC.dtype.element_ty), mask=in_state)
        C = tl.load(chunk_C + state * (DK * DV) + at_state, mask=in_state, other=0.0)
        if C.dtype == tl.float32:
            part = tl.sum(tl.sum(C.to(tl.float64) * dC, 1), 0)
        else:
            part = tl.sum(tl.sum(C.to(tl.float32) * dC, 1), 0).to(tl.float64)
        if tile_v == 0 and not SIGMOID:
            tl.store(chunk_dn + state * DK + dim_k, dn, mask=in_k)
            part += tl.sum(tl.load(chunk_n + state * DK + dim_k, mask=in_k, other=0.0).to(tl.float64) * dn, 0)
        tl.store(passing + (state * tiles_k + tile_k) * tiles_v + tile_v, part * decay)
        token = at + tl.arange(0, CHUNK)
        inside = token < length
        q_t = tl.load(q_row + token.to(tl.int64)[None, :] * (q_s * ALIGN) + dim_k[:, None],
                      mask=in_k[:, None] & inside[None, :], other=0.0)  # fmt: skip
        dh_tile = tl.load(dh_row + token.to(tl.int64)[:, None] * (dh_s * ALIGN) + dim_v[None, :],
                          mask=inside[:, None] & in_v[None, :], other=0.0)  # fmt: skip
        before = weight(frame - tl.load(m + token, mask=inside, other=0.0))
        before = tl.where(inside, before * scale, 0.0)
        weighed = q_t.to(tl.float32) * before[None, :]
        if not SIGMOID:
            weighed *= tl.load(inverse + gates + token, mask=inside, other=0.0)[None, :]
            to_den = tl.load(d_den + gates + token, mask=inside, other=0.0)
            dn = dn * decay + tl.sum(weighed * to_den[None, :], 1)
        dC = dot_weighed(weighed, dh_tile, dC * decay, PRECISION)
        frame = next_frame
        decay = next_decay
    if STORE_START:
        tl.store(start_dC + n_head * (DK * DV) + at_state, dC, mask=in_state)
        if tile_v == 0 and not SIGMOID:
            tl.store(start_dn + n_head * DK + dim_k, dn, mask=in_k)
