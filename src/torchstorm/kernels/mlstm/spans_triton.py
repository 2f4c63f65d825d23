"""Functions shared by all Triton kernels of the mLSTM: the tokens of a program, and weights.

A sequence is a row of the batch, or a range [cu[n], cu[n+1]) of one packed row. It is split into spans of SPAN tokens
(chunks, or groups of chunks), and each span has a slot. Sequence n's first slot is n * cdiv(S, SPAN), or for packed
sequences cu[n] // SPAN + n. That leaves enough slots for its spans, so the host can bound the number of slots by
S // SPAN + N without reading cu. Some slots have no span; their start is at or after the sequence's end.

All gates of a sequence have a common reference. With F the running sum of log f: u = i - F and M = max(m_0, running max
of u), so m = F + M, the weight of token j at row t is e^(u_j - M_t), and that of a state before token s is
e^(M_{s-1} - M_t). F grows with the sequence, so u and M are float64, in units of ln 2. A tile of weights computes their
difference from two fp32 parts, accurately enough, with three additions besides one exponential.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sequence_span(n, cu, S, PACKED: tl.constexpr):
    """Sequence n: its row in the batch, first token there, and number of tokens."""
    if PACKED:
        begin = tl.load(cu + n).to(tl.int64)
        length = (tl.load(cu + n + 1).to(tl.int64) - begin).to(tl.int32)
        row = n * 0
    else:
        begin = n.to(tl.int64) * 0
        length = S
        row = n
    return row.to(tl.int64), begin, length


@triton.jit
def first_slot(n, begin, S, SPAN: tl.constexpr, PACKED: tl.constexpr):
    """The slot of sequence n's first span."""
    if PACKED:
        slot = begin // SPAN + n
    else:
        slot = n.to(tl.int64) * tl.cdiv(S, SPAN)
    return slot


@triton.jit
def slot_span(slot, cu, sequence_of_slot, S, SPAN: tl.constexpr, PACKED: tl.constexpr):
    """A slot's span: its sequence, that sequence's row, first token and length, and the span's start in it."""
    if PACKED:
        n = tl.load(sequence_of_slot + slot)
    else:
        n = slot // tl.cdiv(S, SPAN)
    row, begin, length = sequence_span(n, cu, S, PACKED)
    start = ((slot - first_slot(n, begin, S, SPAN, PACKED)) * SPAN).to(tl.int32)
    return n, row, begin, length, start


@triton.jit
def frame_before(m, m0, n_head, start, HAS_START: tl.constexpr):
    """M just before token `start`, as float64 in units of ln 2; `m` points at the sequence's first token."""
    if HAS_START:
        frame = tl.load(m0 + n_head).to(tl.float64) * 1.4426950408889634
    else:
        frame = tl.full((), 0.0, tl.float64)
    if start > 0:
        frame = tl.load(m + start - 1)
    return frame


@triton.jit
def weight(difference):
    """2^difference as fp32, of a float64 difference that is at most 0, to the last bits where it is far below, too."""
    high, low = split(tl.maximum(difference, -1e30))
    return tl.exp2(high) * (1.0 + low * 0.6931471805599453)


@triton.jit
def split(x):
    """A float64 as the sum of two fp32."""
    high = x.to(tl.float32)
    return high, (x - high.to(tl.float64)).to(tl.float32)


@triton.jit
def dot_state(x, state, acc, PRECISION: tl.constexpr):
    """acc + x @ state, in the type that the state is kept in: fp32 for fp16 x, whose range a state may leave."""
    return tl.dot(x.to(state.dtype), state, acc, input_precision=PRECISION)


@triton.jit
def dot_weighed(weighed, tile, acc, PRECISION: tl.constexpr):
    """acc + weighed @ tile for fp32 weights of any size: rounded to its type, but kept in fp32 where that is fp16."""
    if tile.dtype == tl.float16:
        acc = tl.dot(weighed, tile.to(tl.float32), acc, input_precision=PRECISION)
    else:
        acc = tl.dot(weighed.to(tile.dtype), tile, acc, input_precision=PRECISION)
    return acc


@triton.jit
def rounded(x, pointer):
    """fp32 x in the type that pointer points at; past fp16's range its largest number, not infinity."""
    if pointer.dtype.element_ty == tl.float16:
        x = tl.clamp(x, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
    return x.to(pointer.dtype.element_ty)
