"""The mLSTM chunk by chunk in plain PyTorch, with its backward pass by hand: linear in S, for any device.

Within a chunk of L tokens every pair meets, as in attention; what came before reaches it through one state. With
w_tj = e^{b_t - b_j + log i_j - m_t}, b the sum of log f within the chunk up to t, and [v, 1] in place of v, so that the
normalizer n is one more column of the state and its product with q one more column of the numerator:

    num_t = sum over j <= t of w_tj (q_t . k_j) [v_j, 1] + e^{b_t + M - m_t} q_t [C, n]
    h_t   = num_t[:V] / max(|num_t[V]|, e^{-m_t})

M scales the state at the chunk's start, m_t the row; h depends on neither, so each is a maximum over what it scales and
no more, and autograd may take both as constants. A chunk without any past has M = -inf, whatever m_0 = 0 says, so that
tiny input gates lose nothing. The state handed back is scaled by the recurrence's own m_T (`maximum.py`).

Gates are added up in float64 (they are 1/d of the bytes), everything else is in float32, or float64 for float64 inputs.
Backward walks the chunks in reverse; forward keeps one state per group of chunks for it, and it computes those between
again. The forget gate's gradient is never a difference of sums over the whole sequence: see `_chunk_backward`.

Shapes: B batch, H heads, S tokens, K = d_qk, V = d_v, L tokens of a chunk, W = V + 1 (V for the sigmoid gate), N packed
sequences, which are taken one by one and so give the same bits as when each comes alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from torchstorm.kernels.mlstm.maximum import final_maximum, maximum_backward
from torchstorm.kernels.mlstm.reference import Gate, packed_offsets

DEFAULT_CHUNK = 64
_CHUNKS_PER_GROUP = 8


class _Rows(NamedTuple):
    """Sequences of one length, one per row: what `forward` takes, the gates as logarithms in float64."""

    q_BHSK: Tensor
    k_BHSK: Tensor
    v_BHSV: Tensor
    log_i_BHS: Tensor
    log_f_BHS: Tensor
    C0_BHKW: Tensor
    m0_BH: Tensor | None


class _Chunk(NamedTuple):
    """Tokens first to last - 1, their gates in float64, and what scales the states before and after them."""

    first: int
    last: int
    log_i_BHL: Tensor
    b_BHL: Tensor
    M_BH: Tensor
    next_M_BH: Tensor


class _Saved(NamedTuple):
    """What `forward` kept of some rows."""

    h_BHSV: Tensor
    den_BHS: Tensor
    row_m_BHS: Tensor
    states_BHGKW: Tensor


def forward(
    q_BHSK: Tensor,
    k_BHSK: Tensor,
    v_BHSV: Tensor,
    i_BHS: Tensor,
    f_BHS: Tensor,
    C0: Tensor | None,
    n0: Tensor | None,
    m0: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk: int | None,
    gate: Gate,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Computes the outputs, the final state, and what `backward` wants to have kept.

    Args:
        q_BHSK, k_BHSK, v_BHSV, i_BHS, f_BHS: inputs of one dtype; the gates may be in another. Packed, B = 1.
        C0, n0, m0: the initial state (B, H, ...); packed, N in place of B. None for zeros; n0, m0 for the sigmoid gate.
        cu_seqlens: offsets (N + 1) of packed sequences, or None.
        chunk: tokens of a chunk; None for 64.
        gate: "exp" or "sigmoid".

    Returns:
        h like v; the final C, n, m in float32 (float64); den and row_m (B, H, S), for the sigmoid gate zeros; states.
    """
    L = chunk or DEFAULT_CHUNK
    wide = _wide(q_BHSK)
    parts = []
    for tokens, sequences in _sequences(q_BHSK, cu_seqlens):
        rows = _rows(q_BHSK, k_BHSK, v_BHSV, i_BHS, f_BHS, C0, n0, m0, tokens, sequences, gate)
        parts.append(_forward_rows(rows, L, gate))
    h_BHSV, C, n, m, den_BHS, row_m_BHS, states = (
        torch.cat(part, dim=dim) for part, dim in zip(zip(*parts, strict=True), (2, 0, 0, 0, 2, 2, 2), strict=True)
    )
    states = F.pad(states, (0, 0, 0, 0, 0, _num_groups(q_BHSK.shape[2], cu_seqlens, L) - states.shape[2]))
    return h_BHSV.to(v_BHSV.dtype), C, n, m, den_BHS.to(wide), row_m_BHS.to(wide), states


def empty_states(q_BHSK: Tensor, v_BHSV: Tensor, cu_seqlens: Tensor | None, chunk: int | None, gate: Gate) -> Tensor:
    """A tensor shaped like the states that `forward` keeps, without looking at any data."""
    B, H, S, K = q_BHSK.shape
    size = (B, H, _num_groups(S, cu_seqlens, chunk or DEFAULT_CHUNK), K, v_BHSV.shape[-1] + (gate == "exp"))
    return q_BHSK.new_empty(size, dtype=_wide(q_BHSK))


def backward(
    dh_BHSV: Tensor,
    dC: Tensor | None,
    dn: Tensor | None,
    dm: Tensor | None,
    q_BHSK: Tensor,
    k_BHSK: Tensor,
    v_BHSV: Tensor,
    i_BHS: Tensor,
    f_BHS: Tensor,
    C0: Tensor | None,
    n0: Tensor | None,
    m0: Tensor | None,
    cu_seqlens: Tensor | None,
    h_BHSV: Tensor,
    den_BHS: Tensor,
    row_m_BHS: Tensor,
    states: Tensor,
    C: Tensor,
    n: Tensor,
    m: Tensor,
    chunk: int | None,
    gate: Gate,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Takes the gradients of the outputs and of the final state (None for zeros) back to all inputs.

    Args: those of `forward`, what it returned, and the gradients dh, dC, dn, dm.

    Returns:
        (dq, dk, dv, di, df, dC0, dn0, dm0), each in its input's dtype; those of the initial state also where none was
        given. For the sigmoid gate dn0 and dm0 are zeros.
    """
    L = chunk or DEFAULT_CHUNK
    wide = _wide(q_BHSK)
    dC = torch.zeros_like(C) if dC is None else dC.to(wide)
    dn = torch.zeros_like(n) if dn is None else dn.to(wide)
    dm = torch.zeros_like(m) if dm is None else dm.to(wide)
    parts = []
    first_group = 0
    for tokens, sequences in _sequences(q_BHSK, cu_seqlens):
        rows = _rows(q_BHSK, k_BHSK, v_BHSV, i_BHS, f_BHS, C0, n0, m0, tokens, sequences, gate)
        last_group = first_group + _num_groups(rows.q_BHSK.shape[2], None, L)
        saved = _Saved(
            h_BHSV[:, :, tokens], den_BHS[:, :, tokens], row_m_BHS[:, :, tokens], states[:, :, first_group:last_group]
        )
        first_group = last_group
        dC_BHKW = dC[sequences] if gate == "sigmoid" else torch.cat([dC[sequences], dn[sequences, ..., None]], -1)
        parts.append(_backward_rows(rows, saved, dh_BHSV[:, :, tokens], dC_BHKW, m[sequences], L, gate))
    dq, dk, dv, dlog_i, dlog_f, dC0_BHKW, dm0 = (
        torch.cat(part, dim=dim) for part, dim in zip(zip(*parts, strict=True), (2, 2, 2, 2, 2, 0, 0), strict=True)
    )
    df_BHS = dlog_f * torch.sigmoid(-f_BHS.double())
    if gate == "sigmoid":
        di_BHS = dlog_i * torch.sigmoid(-i_BHS.double())
        dn0, dm0, dC0 = torch.zeros_like(n), torch.zeros_like(m), dC0_BHKW
    else:
        # C_T = e^{-m_T} C~_T, and the sums above took m_T for a constant.
        dm_BH = dm.double() - (dC.double() * C).sum((-2, -1)) - (dn.double() * n).sum(-1)
        along_i, along_f, along_m0 = maximum_backward(dm_BH, i_BHS, f_BHS, m0, cu_seqlens)
        di_BHS, df_BHS, dm0 = dlog_i + along_i, df_BHS + along_f, (dm0 + along_m0).to(wide)
        dC0, dn0 = dC0_BHKW[..., :-1].contiguous(), dC0_BHKW[..., -1].contiguous()
    return dq, dk, dv, di_BHS.to(i_BHS.dtype), df_BHS.to(f_BHS.dtype), dC0, dn0, dm0


def differentiable(
    q_BHSK: Tensor,
    k_BHSK: Tensor,
    v_BHSV: Tensor,
    i_BHS: Tensor,
    f_BHS: Tensor,
    C0: Tensor | None,
    n0: Tensor | None,
    m0: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk: int | None,
    gate: Gate,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`forward`'s (h, C, n, m), through which autograd goes as often as wanted. Keeps everything for it."""
    return forward(q_BHSK, k_BHSK, v_BHSV, i_BHS, f_BHS, C0, n0, m0, cu_seqlens, chunk, gate)[:4]


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _num_groups(num_tokens: int, cu_seqlens: Tensor | None, L: int) -> int:
    """Groups of chunks, with a state each; for packed sequences an upper bound, whatever their lengths."""
    tokens = L * _CHUNKS_PER_GROUP
    if cu_seqlens is None:
        return (num_tokens + tokens - 1) // tokens
    return num_tokens // tokens + cu_seqlens.shape[0] - 1


def _sequences(q_BHSK: Tensor, cu_seqlens: Tensor | None) -> Iterator[tuple[slice, slice]]:
    """(tokens, rows of the state) of what is computed together: everything, or one packed sequence after the other."""
    if cu_seqlens is None:
        yield slice(None), slice(None)
        return
    for n, (first, last) in enumerate(pairwise(packed_offsets(cu_seqlens, q_BHSK.shape[2]))):
        yield slice(first, last), slice(n, n + 1)


def _rows(
    q_BHSK: Tensor,
    k_BHSK: Tensor,
    v_BHSV: Tensor,
    i_BHS: Tensor,
    f_BHS: Tensor,
    C0: Tensor | None,
    n0: Tensor | None,
    m0: Tensor | None,
    tokens: slice,
    sequences: slice,
    gate: Gate,
) -> _Rows:
    q_BHSK, k_BHSK, v_BHSV = q_BHSK[:, :, tokens], k_BHSK[:, :, tokens], v_BHSV[:, :, tokens]
    i_BHS, f_BHS = i_BHS[:, :, tokens].double(), f_BHS[:, :, tokens].double()
    log_i_BHS = F.logsigmoid(i_BHS) if gate == "sigmoid" else i_BHS
    if C0 is None:
        B, H, _, K = q_BHSK.shape
        C0_BHKW = q_BHSK.new_zeros((B, H, K, v_BHSV.shape[-1] + (gate == "exp")), dtype=_wide(q_BHSK))
    elif gate == "sigmoid" or n0 is None:
        C0_BHKW = C0[sequences].to(_wide(q_BHSK))
    else:
        C0_BHKW = torch.cat([C0[sequences], n0[sequences, ..., None]], -1).to(_wide(q_BHSK))
    m0_BH = None if m0 is None or gate == "sigmoid" else m0[sequences].double()
    return _Rows(q_BHSK, k_BHSK, v_BHSV, log_i_BHS, F.logsigmoid(f_BHS), C0_BHKW, m0_BH)


def _chunks(rows: _Rows, L: int, gate: Gate) -> list[_Chunk]:
    chunks: list[_Chunk] = []
    B, H, S = rows.log_i_BHS.shape
    M_BH = (
        rows.log_i_BHS.new_full((B, H), 0.0 if gate == "sigmoid" else -torch.inf) if rows.m0_BH is None else rows.m0_BH
    )
    for first in range(0, S, L):
        last = min(first + L, S)
        log_i_BHL, b_BHL = rows.log_i_BHS[..., first:last], rows.log_f_BHS[..., first:last].cumsum(-1)
        if gate == "sigmoid":
            next_M_BH = M_BH
        else:
            highest_BH = (b_BHL[..., -1:] - b_BHL + log_i_BHL).amax(-1)
            next_M_BH = _finite(torch.maximum(b_BHL[..., -1] + M_BH, highest_BH)).detach()
        chunks.append(_Chunk(first, last, log_i_BHL, b_BHL, M_BH, next_M_BH))
        M_BH = next_M_BH
    return chunks


def _tokens(rows: _Rows, chunk: _Chunk, gate: Gate) -> tuple[Tensor, Tensor, Tensor]:
    """The chunk's scaled q, its k, and its v with the column of ones."""
    here, wide = slice(chunk.first, chunk.last), _wide(rows.q_BHSK)
    q_BHLK = rows.q_BHSK[:, :, here].to(wide) * rows.q_BHSK.shape[-1] ** -0.5
    v_BHLW = rows.v_BHSV[:, :, here].to(wide)
    return q_BHLK, rows.k_BHSK[:, :, here].to(wide), v_BHLW if gate == "sigmoid" else F.pad(v_BHLW, (0, 1), value=1.0)


def _row_weights(
    chunk: _Chunk, wide: torch.dtype, gate: Gate, row_m_BHL: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """What each row gives to each token of its chunk (B, H, L, L) and to the state before it, and the row's m."""
    b_BHL, L = chunk.b_BHL, chunk.b_BHL.shape[-1]
    later = torch.ones(L, L, dtype=torch.bool, device=b_BHL.device).triu(1)
    D_BHLL = (b_BHL[..., :, None] - b_BHL[..., None, :] + chunk.log_i_BHL[..., None, :]).masked_fill(later, -torch.inf)
    old_BHL = b_BHL + chunk.M_BH[..., None]
    if row_m_BHL is None:
        highest_BHL = torch.zeros_like(old_BHL) if gate == "sigmoid" else torch.maximum(old_BHL, D_BHLL.amax(-1))
        row_m_BHL = _finite(highest_BHL).detach().to(wide)
    return (
        torch.exp(D_BHLL - row_m_BHL[..., None]).to(wide),
        torch.exp(old_BHL - row_m_BHL).to(wide)[..., None],
        row_m_BHL,
    )


def _state_weights(chunk: _Chunk, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """What the state after the chunk has of each token (B, H, L, 1) and of the state before (B, H, 1, 1)."""
    total_BH1 = chunk.b_BHL[..., -1:]
    write_BHL = torch.exp(total_BH1 - chunk.b_BHL + chunk.log_i_BHL - chunk.next_M_BH[..., None])
    keep_BH1 = torch.exp(total_BH1 + chunk.M_BH[..., None] - chunk.next_M_BH[..., None])
    return write_BHL.to(wide)[..., None], keep_BH1.to(wide)[..., None]


def _forward_rows(rows: _Rows, L: int, gate: Gate) -> Sequence[Tensor]:
    wide, C_BHKW = _wide(rows.q_BHSK), rows.C0_BHKW
    h, den, row_m, states = [], [], [], []
    chunks = _chunks(rows, L, gate)
    for number, chunk in enumerate(chunks):
        if number % _CHUNKS_PER_GROUP == 0:
            states.append(C_BHKW)
        q_BHLK, k_BHLK, v_BHLW = _tokens(rows, chunk, gate)
        inside_BHLL, old_BHL1, row_m_BHL = _row_weights(chunk, wide, gate)
        num_BHLW = (inside_BHLL * (q_BHLK @ k_BHLK.mT)) @ v_BHLW + old_BHL1 * (q_BHLK @ C_BHKW)
        if gate == "exp":
            den.append(num_BHLW[..., -1])
            num_BHLW = num_BHLW[..., :-1] / _normalizer(num_BHLW[..., -1], row_m_BHL)[..., None]
        h.append(num_BHLW)
        row_m.append(row_m_BHL)
        write_BHL1, keep_BH11 = _state_weights(chunk, wide)
        C_BHKW = keep_BH11 * C_BHKW + (write_BHL1 * k_BHLK).mT @ v_BHLW
    m_BH = rows.log_i_BHS.new_zeros(C_BHKW.shape[:2])
    if gate == "exp":
        m_BH = final_maximum(rows.log_i_BHS, rows.log_f_BHS, rows.m0_BH)
        C_BHKW = _final_scale(rows, chunks, m_BH.to(wide)) * C_BHKW
    C_BHKV, n_BHK = (
        (C_BHKW, torch.zeros_like(C_BHKW[..., 0])) if gate == "sigmoid" else (C_BHKW[..., :-1], C_BHKW[..., -1])
    )
    if not chunks:
        none_BHS = torch.zeros_like(rows.log_i_BHS, dtype=wide)
        return rows.v_BHSV.to(wide), C_BHKV, n_BHK, m_BH.to(wide), none_BHS, none_BHS, C_BHKW[:, :, None][:, :, :0]
    row_m_BHS = torch.cat(row_m, -1)
    den_BHS = torch.cat(den, -1) if den else torch.zeros_like(row_m_BHS)
    return torch.cat(h, 2), C_BHKV, n_BHK, m_BH.to(wide), den_BHS, row_m_BHS, torch.stack(states, 2)


def _backward_rows(
    rows: _Rows, saved: _Saved, dh_BHSV: Tensor, dC_BHKW: Tensor, m_BH: Tensor, L: int, gate: Gate
) -> Sequence[Tensor]:
    """Gradients (q, k, v, log i, log f, [C0, n0], m0) of some rows, without what goes along m_T."""
    wide = _wide(rows.q_BHSK)
    chunks = _chunks(rows, L, gate)
    if gate == "exp":
        dC_BHKW = _final_scale(rows, chunks, m_BH) * dC_BHKW
    grads: list[Sequence[Tensor]] = []
    for group in reversed(range(0, len(chunks), _CHUNKS_PER_GROUP)):
        members = chunks[group : group + _CHUNKS_PER_GROUP]
        C = [saved.states_BHGKW[:, :, group // _CHUNKS_PER_GROUP]]
        for chunk in members[:-1]:
            _, k_BHLK, v_BHLW = _tokens(rows, chunk, gate)
            write_BHL1, keep_BH11 = _state_weights(chunk, wide)
            C.append(keep_BH11 * C[-1] + (write_BHL1 * k_BHLK).mT @ v_BHLW)
        for chunk in reversed(members):
            *grad, dC_BHKW = _chunk_backward(rows, saved, chunk, dh_BHSV, C.pop(), dC_BHKW, gate)
            grads.append(grad)
    dm0_BH = (dC_BHKW.double() * rows.C0_BHKW).sum((-2, -1))
    if not grads:
        sequences = (rows.q_BHSK, rows.k_BHSK, rows.v_BHSV, rows.log_i_BHS, rows.log_f_BHS)
        return *(torch.zeros_like(x) for x in sequences), dC_BHKW, dm0_BH
    return *(torch.cat(grad[::-1], 2) for grad in zip(*grads, strict=True)), dC_BHKW, dm0_BH


def _chunk_backward(
    rows: _Rows, saved: _Saved, chunk: _Chunk, dh_BHSV: Tensor, C_BHKW: Tensor, dC_BHKW: Tensor, gate: Gate
) -> Sequence[Tensor]:
    """Gradients (q, k, v, log i, log f) of a chunk, and of the state before it, given that of the state after it.

    log f_t gets the gradients of all that it scales. That is, with dD_sj the gradient of log w_sj,
      - pairs within the chunk, j < t <= s: a sum over s >= t of (row sums - column sums) of dD, one and the same tile;
      - rows s >= t that read the state before the chunk;
      - tokens j < t that are written into the state after it;
      - the state before, as far as it lives on in the state after.
    None of the last three subtracts, and the first does within L tokens only. One such sum over the whole sequence, of
    q . dq - k . dk, would cancel over all of it.
    """
    here, wide = slice(chunk.first, chunk.last), _wide(rows.q_BHSK)
    q_BHLK, k_BHLK, v_BHLW = _tokens(rows, chunk, gate)
    row_m_BHL = saved.row_m_BHS[..., here]
    inside_BHLL, old_BHL1, _ = _row_weights(chunk, wide, gate, row_m_BHL)
    write_BHL1, keep_BH11 = _state_weights(chunk, wide)
    dnum_BHLW = dh_BHSV[:, :, here].to(wide)
    if gate == "exp":
        den_BHL = saved.den_BHS[..., here]
        normalizer_BHL = _normalizer(den_BHL, row_m_BHL)
        dh_h_BHL = (dnum_BHLW * saved.h_BHSV[:, :, here]).sum(-1)
        # Where the floor e^{-m} is what divides, the normalizer has no gradient.
        divides_BHL = den_BHL.abs() > torch.exp(-row_m_BHL)
        dden_BHL = torch.where(divides_BHL, -den_BHL.sign() * dh_h_BHL / normalizer_BHL, 0.0)
        dnum_BHLW = torch.cat([dnum_BHLW / normalizer_BHL[..., None], dden_BHL[..., None]], -1)

    mixed_BHLL = inside_BHLL * (q_BHLK @ k_BHLK.mT)
    dmixed_BHLL = dnum_BHLW @ v_BHLW.mT
    dscores_BHLL = inside_BHLL * dmixed_BHLL
    dq_old_BHLK = old_BHL1 * (dnum_BHLW @ C_BHKW.mT)
    dk_new_BHLK = write_BHL1 * (v_BHLW @ dC_BHKW.mT)
    dq_BHLK = (dscores_BHLL @ k_BHLK + dq_old_BHLK) * q_BHLK.shape[-1] ** -0.5
    dk_BHLK = dscores_BHLL.mT @ q_BHLK + dk_new_BHLK
    dv_BHLW = mixed_BHLL.mT @ dnum_BHLW + write_BHL1 * (k_BHLK @ dC_BHKW)

    dD_BHLL = mixed_BHLL * dmixed_BHLL
    of_row_BHL, of_column_BHL = (dD_BHLL.sum(dim, dtype=torch.float64) for dim in (-1, -2))
    read_BHL = (q_BHLK * dq_old_BHLK).sum(-1, dtype=torch.float64)
    written_BHL = (k_BHLK * dk_new_BHLK).sum(-1, dtype=torch.float64)
    lives_on_BH1 = (keep_BH11 * C_BHKW * dC_BHKW).sum((-2, -1), dtype=torch.float64)[..., None]
    from_here_BHL = (of_row_BHL - of_column_BHL + read_BHL).flip(-1).cumsum(-1).flip(-1)
    before_BHL = F.pad(written_BHL.cumsum(-1)[..., :-1], (1, 0))
    dlog_f_BHL = from_here_BHL + before_BHL + lives_on_BH1
    return (
        dq_BHLK.to(rows.q_BHSK.dtype),
        dk_BHLK.to(rows.k_BHSK.dtype),
        dv_BHLW[..., : rows.v_BHSV.shape[-1]].to(rows.v_BHSV.dtype),
        of_column_BHL + written_BHL,
        dlog_f_BHL,
        keep_BH11 * dC_BHKW + (old_BHL1 * q_BHLK).mT @ dnum_BHLW,
    )


def _normalizer(den_BHL: Tensor, row_m_BHL: Tensor) -> Tensor:
    # e^{-m} may be infinite, and h is then 0; it may also vanish, and must not divide 0 by 0 where q is 0.
    floor_BHL = torch.exp(-row_m_BHL).clamp(min=torch.finfo(den_BHL.dtype).tiny)
    return torch.maximum(den_BHL.abs(), floor_BHL)


def _final_scale(rows: _Rows, chunks: list[_Chunk], m_BH: Tensor) -> Tensor:
    """From the last chunk's scale to m_T's, (B, H, 1, 1). Without any past, m_0 = 0 may be above all there was."""
    if not chunks:
        return torch.ones_like(m_BH)[..., None, None]
    return torch.exp(chunks[-1].next_M_BH - m_BH.double()).to(m_BH.dtype)[..., None, None]


def _finite(M: Tensor) -> Tensor:
    """Where all gates are shut there is nothing to scale, and -inf - -inf would be NaN."""
    return torch.where(torch.isneginf(M), 0.0, M)
