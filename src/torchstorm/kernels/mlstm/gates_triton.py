"""The gates of the mLSTM: weights from pre-activations, and their gradients.

Forward: one program per sequence and head processes it in blocks, in float64 (see spans_triton). Memory traffic: reads
i, f; writes u, M and the floor e^-m, 20 bytes per token and head.
Backward: one program per chunk and head. The gradient of log f is not one running sum over the sequence, which would
subtract large numbers. It is assembled per chunk from the terms that pass over each token.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from torchstorm.kernels.mlstm.spans_triton import rounded, sequence_span, slot_span


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _log_sigmoid(x):
    return tl.minimum(x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["S", "H"])
def gates_kernel(i, f, m0, cu, u, m, floor, m_T, S, H, SIGMOID: tl.constexpr, HAS_START: tl.constexpr,
                 PACKED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """u and M (float64, units of ln 2), floor = e^-m (fp32), m at each sequence's end. Grid: N * H."""
    n_head = tl.program_id(0)
    n = n_head // H
    row, begin, length = sequence_span(n, cu, S, PACKED)
    base = (row * H + n_head % H) * S + begin
    log_f_sum = tl.full((), 0.0, tl.float64)
    frame = tl.full((), 0.0, tl.float64)
    if HAS_START:
        frame = tl.load(m0 + n_head).to(tl.float64)
    for start in range(0, length, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < length
        at = base + token
        log_f = _log_sigmoid(tl.load(f + at, mask=inside, other=0.0).to(tl.float64))
        log_f = tl.where(log_f < -1e6, -1e6, log_f)  # e^-1e6 is 0 already; -inf would make NaN of a difference
        log_f = tl.where(inside, log_f, 0.0)
        log_i = tl.load(i + at, mask=inside, other=0.0).to(tl.float64)
        total = log_f_sum + tl.cumsum(log_f, 0)
        log_f_sum += tl.sum(log_f, 0)
        if SIGMOID:
            log_i = _log_sigmoid(log_i)
        log_i = tl.where(log_i < -1e30, -1e30, log_i)
        own = log_i - total
        if SIGMOID:
            largest = -total
        else:
            seen = tl.where(inside, own, -1e300)
            largest = tl.maximum(frame, tl.associative_scan(seen, 0, _larger))
            frame = tl.maximum(frame, tl.max(seen, 0))
            # Above 0, so that a row with no weight at all is 0 / floor = 0.
            smallest = tl.maximum(tl.exp(-(total + largest)), 1e-37)
            tl.store(floor + at, smallest.to(tl.float32), mask=inside)
        tl.store(u + at, own * 1.4426950408889634, mask=inside)
        tl.store(m + at, largest * 1.4426950408889634, mask=inside)
    if SIGMOID:
        tl.store(m_T + n_head, 0.0)
    else:
        tl.store(m_T + n_head, (log_f_sum + frame).to(tl.float32))


@triton.jit(do_not_specialize=["S", "H", "num_tokens", "num_row_tiles", "num_q_tiles", "num_state_tiles"])
def gate_gradients_kernel(i, f, row_sum, column_sum, k_own, q_part, k_part, passing, own_i, own_f, cu,
                          sequence_of_slot, di, df, S, H, num_tokens, num_row_tiles, num_q_tiles,
                          num_state_tiles,
                          SIGMOID: tl.constexpr, HAS_OWN: tl.constexpr, PACKED: tl.constexpr,
                          CHUNK: tl.constexpr):  # fmt: skip
    """di and df of one chunk. Grid: slots * H.

    row_sum, column_sum: of the chunk's own gradients to D, without the diagonal; k_own: column sums with it. q_part:
    q . the part of dq that came from states before the chunk. row_sum and q_part are sheets of num_tokens to add up.
    k_part: k . the part of dk that came from states after it. passing: what goes from the state before to the state
    after, num_state_tiles parts a slot and head. own_i, own_f: gradients to i and f along m's own path, float64.
    """
    slot_head = tl.program_id(0).to(tl.int64)
    _, row, begin, length, start = slot_span(slot_head // H, cu, sequence_of_slot, S, CHUNK, PACKED)
    if start >= length:
        return
    token = start + tl.arange(0, CHUNK)
    inside = token < length
    at = (row * H + slot_head % H) * S + begin + token
    over = -tl.load(column_sum + at, mask=inside, other=0.0)
    sheet = row_sum + at
    for _ in range(0, num_row_tiles):
        over += tl.load(sheet, mask=inside, other=0.0)
        sheet += num_tokens
    d_log_f = tl.cumsum(over, 0, reverse=True)
    from_before = tl.zeros((CHUNK,), tl.float32)
    sheet = q_part + at
    for _ in range(0, num_q_tiles):
        from_before += tl.load(sheet, mask=inside, other=0.0)
        sheet += num_tokens
    d_log_f += tl.cumsum(from_before, 0, reverse=True)
    d_log_f += tl.cumsum(tl.load(k_part + at - 1, mask=inside & (token > start), other=0.0), 0)
    over_all = tl.full((), 0.0, tl.float64)
    for tile in range(0, num_state_tiles):
        over_all += tl.load(passing + slot_head * num_state_tiles + tile)
    d_f = (d_log_f.to(tl.float64) + over_all) * _sigmoid(-tl.load(f + at, mask=inside, other=0.0).to(tl.float64))
    d_i = (tl.load(k_own + at, mask=inside, other=0.0) + tl.load(k_part + at, mask=inside, other=0.0)).to(tl.float64)
    if SIGMOID:
        d_i *= _sigmoid(-tl.load(i + at, mask=inside, other=0.0).to(tl.float64))
    if HAS_OWN:
        d_f += tl.load(own_f + at, mask=inside, other=0.0)
        d_i += tl.load(own_i + at, mask=inside, other=0.0)
    tl.store(di + at, rounded(d_i.to(tl.float32), di), mask=inside)
    tl.store(df + at, rounded(d_f.to(tl.float32), df), mask=inside)
