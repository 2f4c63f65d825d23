"""The chunkwise mLSTM in plain PyTorch, forward and backward, for sequences of equal length.

Within a chunk of L tokens all pairs are computed, as in attention. Earlier tokens contribute through one state. With
w_tj = e^{b_t - b_j + log i_j - m_t}, b the sum of log f within the chunk up to t, and [v, 1] instead of v, the
normalizer n is an additional column of the state, and its product with q an additional column of the numerator:

    num_t = sum over j <= t of w_tj (q_t . k_j) [v_j, 1] + e^{b_t + M - m_t} q_t [C, n]
    h_t   = num_t[:V] / max(|num_t[V]|, e^{-m_t})

M scales the state at the chunk's start, and m_t the row. h depends on neither of them. So each is just the maximum of
the values that it scales, and autograd can treat both as constants. A chunk without earlier tokens has M = -inf,
although m_0 = 0, so that tiny input gates do not underflow. The returned state is scaled by m_T of the recurrence
(`maximum.py`).

Float32 inputs are computed in float64: if one token dominates, a gate's gradient is a small difference of large terms,
which the recurrence, the reference of the tests, computes without rounding. fp16 and bf16 inputs are computed in
float32, and gates always in float64, since they are only 1/d of the data. Backward processes the chunks in reverse. It
gets one saved state per group of chunks, and recomputes the others and the outputs.

Shapes: B batch, H heads, S tokens, K = d_qk, V = d_v, L tokens of a chunk, G groups, W = V + 1 (V for gate="sigmoid").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from torchstorm.kernels.mlstm.maximum import final_maximum, prefix_sums
from torchstorm.kernels.mlstm.reference import Gate

FP16_MAX = torch.finfo(torch.float16).max
CHUNKS_PER_GROUP = 8


class Rows(NamedTuple):
    """Sequences of equal length, one per row: the inputs, logarithms of the gates in float64, and [C_0, n_0]."""

    q_BHSK: Tensor
    k_BHSK: Tensor
    v_BHSV: Tensor
    log_i_BHS: Tensor
    log_f_BHS: Tensor
    C0_BHKW: Tensor
    m0_BH: Tensor | None
    gate: Gate


class _Chunk(NamedTuple):
    """Tokens first to last - 1, their gates in float64, and the scales of the states before and after them."""

    first: int
    last: int
    log_i_BHL: Tensor
    b_BHL: Tensor
    M_BH: Tensor
    next_M_BH: Tensor


class _Tokens(NamedTuple):
    """A chunk's scaled q, its k and [v, 1], and the weights of tokens and of the old state in the new state."""

    q_BHLK: Tensor
    k_BHLK: Tensor
    v_BHLW: Tensor
    write_BHL1: Tensor
    keep_BH11: Tensor


class _Output(NamedTuple):
    """A chunk's rows: weights of its tokens and of the old state; the token weights times q . k; h and its divisor."""

    inside_BHLL: Tensor
    old_BHL1: Tensor
    mixed_BHLL: Tensor
    h_BHLV: Tensor
    den_BHL: Tensor
    row_m_BHL: Tensor


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in another dtype, clamped to fp16's range instead of infinity: a tiny |q.n| gives gradients of 1e7."""
    return x.clamp(-FP16_MAX, FP16_MAX).to(dtype) if dtype == torch.float16 else x.to(dtype)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32


def forward_rows(rows: Rows, L: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns h (B, H, S, V), the final [C, n] (B, H, K, W) and m (B, H), and one state per group (B, H, G, K, W)."""
    C_BHKW = rows.C0_BHKW
    h, states = [], []
    chunks = _chunks(rows, L)
    for number, chunk in enumerate(chunks):
        if number % CHUNKS_PER_GROUP == 0:
            states.append(C_BHKW)
        tokens = _tokens(rows, chunk)
        h.append(rounded(_output(rows.gate, chunk, tokens, C_BHKW).h_BHLV, rows.v_BHSV.dtype))
        C_BHKW = _state_after(tokens, C_BHKW)
    m_BH = C_BHKW.new_zeros(C_BHKW.shape[:2], dtype=torch.float64)
    if rows.gate == "exp":
        m_BH = final_maximum(rows.log_i_BHS, rows.log_f_BHS, rows.m0_BH)
    if not chunks:
        return rows.v_BHSV, C_BHKW, m_BH, C_BHKW[:, :, None][:, :, :0]
    return torch.cat(h, 2), _final_scale(chunks, m_BH) * C_BHKW, m_BH, torch.stack(states, 2)


def backward_rows(
    rows: Rows, states_BHGKW: Tensor, dh_BHSV: Tensor, dC_BHKW: Tensor, L: int
) -> tuple[Sequence[Tensor], Tensor, Tensor, Tensor]:
    """Gradients of the inputs from dh and the gradient of the final [C, n], with m_T as a constant.

    Returns:
        Gradients of (q, k, v, log i, log f), of [C_0, n_0] and of m_0, and <d[C_T, n_T], [C_T, n_T]> (B, H).
    """
    chunks = _chunks(rows, L)
    C_end = rows.C0_BHKW
    if chunks:
        m_BH = final_maximum(rows.log_i_BHS, rows.log_f_BHS, rows.m0_BH) if rows.gate == "exp" else chunks[0].M_BH
        dC_BHKW = _final_scale(chunks, m_BH).to(dC_BHKW.dtype) * dC_BHKW
    along_BH = None
    grads: list[Sequence[Tensor]] = []
    for group in reversed(range(0, len(chunks), CHUNKS_PER_GROUP)):
        members = [(chunk, _tokens(rows, chunk)) for chunk in chunks[group : group + CHUNKS_PER_GROUP]]
        before = [states_BHGKW[:, :, group // CHUNKS_PER_GROUP]]
        for _, tokens in members:
            before.append(_state_after(tokens, before[-1]))
        C_end = before.pop()
        along_BH = _product(C_end, dC_BHKW) if along_BH is None else along_BH
        for chunk, tokens in reversed(members):
            *grad, dC_BHKW = _chunk_backward(rows, chunk, tokens, before.pop(), dh_BHSV, dC_BHKW)
            grads.append(grad)
    dm0_BH = _product(rows.C0_BHKW, dC_BHKW)
    if along_BH is None:
        inputs = (rows.q_BHSK, rows.k_BHSK, rows.v_BHSV, rows.log_i_BHS, rows.log_f_BHS)
        return [torch.zeros_like(x) for x in inputs], dC_BHKW, dm0_BH, dm0_BH
    return [torch.cat(grad[::-1], 2) for grad in zip(*grads, strict=True)], dC_BHKW, dm0_BH, along_BH


def _chunks(rows: Rows, L: int) -> list[_Chunk]:
    B, H, S = rows.log_i_BHS.shape
    M_BH = rows.m0_BH
    if M_BH is None:
        M_BH = rows.log_i_BHS.new_full((B, H), 0.0 if rows.gate == "sigmoid" else -torch.inf)
    chunks = []
    for first in range(0, S, L):
        last = min(first + L, S)
        log_i_BHL, b_BHL = rows.log_i_BHS[..., first:last], prefix_sums(rows.log_f_BHS[..., first:last])
        next_M_BH = M_BH  # with sigmoid gates the weights are at most 1, and need no scale
        if rows.gate == "exp":
            highest_BH = (b_BHL[..., -1:] - b_BHL + log_i_BHL).amax(-1)
            next_M_BH = _finite(torch.maximum(b_BHL[..., -1] + M_BH, highest_BH)).detach()
        chunks.append(_Chunk(first, last, log_i_BHL, b_BHL, M_BH, next_M_BH))
        M_BH = next_M_BH
    return chunks


def _tokens(rows: Rows, chunk: _Chunk) -> _Tokens:
    here, wide = slice(chunk.first, chunk.last), rows.C0_BHKW.dtype
    q_BHLK = rows.q_BHSK[:, :, here].to(wide) * rows.q_BHSK.shape[-1] ** -0.5
    v_BHLW = rows.v_BHSV[:, :, here].to(wide)
    if rows.gate == "exp":
        v_BHLW = F.pad(v_BHLW, (0, 1), value=1.0)
    total_BH1, next_M_BH1 = chunk.b_BHL[..., -1:], chunk.next_M_BH[..., None]
    write_BHL = torch.exp(total_BH1 - chunk.b_BHL + chunk.log_i_BHL - next_M_BH1)
    keep_BH1 = torch.exp(total_BH1 + chunk.M_BH[..., None] - next_M_BH1)
    k_BHLK = rows.k_BHSK[:, :, here].to(wide)
    return _Tokens(q_BHLK, k_BHLK, v_BHLW, write_BHL.to(wide)[..., None], keep_BH1.to(wide)[..., None])


def _state_after(tokens: _Tokens, C_BHKW: Tensor) -> Tensor:
    return tokens.keep_BH11 * C_BHKW + (tokens.write_BHL1 * tokens.k_BHLK).mT @ tokens.v_BHLW


def _output(gate: Gate, chunk: _Chunk, tokens: _Tokens, C_BHKW: Tensor) -> _Output:
    wide, b_BHL = C_BHKW.dtype, chunk.b_BHL
    later = torch.ones(2 * b_BHL.shape[-1:], dtype=torch.bool, device=b_BHL.device).triu(1)
    D_BHLL = (b_BHL[..., :, None] - b_BHL[..., None, :] + chunk.log_i_BHL[..., None, :]).masked_fill(later, -torch.inf)
    old_BHL = b_BHL + chunk.M_BH[..., None]
    row_m_BHL = torch.zeros_like(old_BHL)
    if gate == "exp":
        row_m_BHL = _finite(torch.maximum(old_BHL, D_BHLL.amax(-1))).detach()
    inside_BHLL = torch.exp(D_BHLL - row_m_BHL[..., None]).to(wide)
    old_BHL1 = torch.exp(old_BHL - row_m_BHL).to(wide)[..., None]
    mixed_BHLL = inside_BHLL * (tokens.q_BHLK @ tokens.k_BHLK.mT)
    num_BHLW = mixed_BHLL @ tokens.v_BHLW + old_BHL1 * (tokens.q_BHLK @ C_BHKW)
    if gate == "sigmoid":
        return _Output(inside_BHLL, old_BHL1, mixed_BHLL, num_BHLW, num_BHLW[..., 0], row_m_BHL)
    den_BHL = num_BHLW[..., -1]
    h_BHLV = num_BHLW[..., :-1] / _normalizer(den_BHL, row_m_BHL)[..., None]
    return _Output(inside_BHLL, old_BHL1, mixed_BHLL, h_BHLV, den_BHL, row_m_BHL)


def _normalizer(den_BHL: Tensor, row_m_BHL: Tensor) -> Tensor:
    # e^{-m} can be infinite, so that h is 0. It can also be 0, which must not give 0 / 0 if q is 0.
    floor_BHL = torch.exp(-row_m_BHL).to(den_BHL.dtype).clamp(min=torch.finfo(den_BHL.dtype).tiny)
    return torch.maximum(den_BHL.abs(), floor_BHL)


def _chunk_backward(
    rows: Rows, chunk: _Chunk, tokens: _Tokens, C_BHKW: Tensor, dh_BHSV: Tensor, dC_BHKW: Tensor
) -> Sequence[Tensor]:
    """Gradients (q, k, v, log i, log f) of a chunk and of the state before it, from that of the state after it.

    log f_t gets the gradients of all values that it scales. With dD_sj the gradient of log w_sj, these are
      - pairs within the chunk, j < t <= s: a sum over s >= t of (row sums - column sums) of dD of the same tile;
      - rows s >= t that read the state before the chunk;
      - tokens j < t that are written into the state after it;
      - the share of the old state in the new state.
    The last three have no subtraction, and the first only within L tokens. A single sum of q . dq - k . dk over the
    whole sequence would suffer from cancellation.
    """
    q_BHLK, k_BHLK, v_BHLW, write_BHL1, keep_BH11 = tokens
    out = _output(rows.gate, chunk, tokens, C_BHKW)
    dnum_BHLW = dh_BHSV[:, :, chunk.first : chunk.last].to(C_BHKW.dtype)
    if rows.gate == "exp":
        normalizer_BHL = _normalizer(out.den_BHL, out.row_m_BHL)
        dden_BHL = -out.den_BHL.sign() * (dnum_BHLW * out.h_BHLV).sum(-1) / normalizer_BHL
        # If the divisor is the floor e^{-m}, the normalizer has no gradient.
        dden_BHL = torch.where(out.den_BHL.abs() > torch.exp(-out.row_m_BHL), dden_BHL, 0.0)
        dnum_BHLW = torch.cat([dnum_BHLW / normalizer_BHL[..., None], dden_BHL[..., None]], -1)

    dmixed_BHLL = dnum_BHLW @ v_BHLW.mT
    dscores_BHLL = out.inside_BHLL * dmixed_BHLL
    dq_old_BHLK = out.old_BHL1 * (dnum_BHLW @ C_BHKW.mT)
    dk_new_BHLK = write_BHL1 * (v_BHLW @ dC_BHKW.mT)
    dq_BHLK = (dscores_BHLL @ k_BHLK + dq_old_BHLK) * q_BHLK.shape[-1] ** -0.5
    dk_BHLK = dscores_BHLL.mT @ q_BHLK + dk_new_BHLK
    dv_BHLW = out.mixed_BHLL.mT @ dnum_BHLW + write_BHL1 * (k_BHLK @ dC_BHKW)

    dD_BHLL = out.mixed_BHLL * dmixed_BHLL
    of_row_BHL, of_column_BHL = (dD_BHLL.sum(dim, dtype=torch.float64) for dim in (-1, -2))
    read_BHL = (q_BHLK * dq_old_BHLK).sum(-1, dtype=torch.float64)
    written_BHL = (k_BHLK * dk_new_BHLK).sum(-1, dtype=torch.float64)
    lives_on_BH1 = _product(keep_BH11 * C_BHKW, dC_BHKW)[..., None]
    from_here_BHL = prefix_sums((of_row_BHL - of_column_BHL + read_BHL).flip(-1)).flip(-1)
    before_BHL = F.pad(prefix_sums(written_BHL)[..., :-1], (1, 0))
    return (
        rounded(dq_BHLK, rows.q_BHSK.dtype),
        rounded(dk_BHLK, rows.k_BHSK.dtype),
        rounded(dv_BHLW[..., : rows.v_BHSV.shape[-1]], rows.v_BHSV.dtype),
        of_column_BHL + written_BHL,
        from_here_BHL + before_BHL + lives_on_BH1,
        keep_BH11 * dC_BHKW + (out.old_BHL1 * q_BHLK).mT @ dnum_BHLW,
    )


def _product(C_BHKW: Tensor, dC_BHKW: Tensor) -> Tensor:
    """<C, dC> (B, H) in float64."""
    return (C_BHKW * dC_BHKW).sum((-2, -1), dtype=torch.float64)


def _final_scale(chunks: list[_Chunk], m_BH: Tensor) -> Tensor:
    """Factor (B, H, 1, 1) from the last chunk's scale to m_T's. Without a past, m_0 = 0 can be the maximum."""
    return torch.exp(chunks[-1].next_M_BH - m_BH)[..., None, None]


def _finite(M: Tensor) -> Tensor:
    """Replaces -inf, the scale if all gates are closed, since -inf - -inf would be NaN."""
    return torch.where(torch.isneginf(M), 0.0, M)
