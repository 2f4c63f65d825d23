"""The chunkwise mLSTM in plain PyTorch, on any device: linear in S, with a hand-written backward (`chunks.py`).

Packed sequences are processed one after the other, so each is bit-identical to a separate call.

Shapes: B batch, H heads, S tokens, K = d_qk, V = d_v, N packed sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from torchstorm.kernels.dtypes import wide
from torchstorm.kernels.mlstm.chunks import CHUNKS_PER_GROUP, Rows, backward_rows, compute_dtype, forward_rows, rounded
from torchstorm.kernels.mlstm.maximum import maximum_backward
from torchstorm.kernels.mlstm.reference import Gate, packed_offsets

DEFAULT_CHUNK = 64


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
    """Computes the outputs, the final state, and the tensors saved for `backward`.

    Args:
        q_BHSK, k_BHSK, v_BHSV, i_BHS, f_BHS: inputs with equal dtypes; the gates can have another. Packed: B = 1.
        C0, n0, m0: the initial state (B, H, ...); packed: N instead of B. None for zeros; n0 and m0 also for sigmoid.
        cu_seqlens: offsets (N + 1) of packed sequences, or None.
        chunk: tokens per chunk; None for 64.
        gate: "exp" or "sigmoid".

    Returns:
        h like v; the final C, n, m in float32 (float64); den and row_m, which are empty here; the saved states.
    """
    L = chunk or DEFAULT_CHUNK
    inputs = q_BHSK, k_BHSK, v_BHSV, i_BHS, f_BHS, C0, n0, m0
    parts = [forward_rows(rows, L) for _, _, rows in _sequences(*inputs, cu_seqlens, gate)]
    h_BHSV, C_NHKW, m_NH, states = (
        torch.cat(part, dim=dim) for part, dim in zip(zip(*parts, strict=True), (2, 0, 0, 2), strict=True)
    )
    states = F.pad(states, (0, 0, 0, 0, 0, _num_groups(q_BHSK.shape[2], cu_seqlens, L) - states.shape[2]))
    C_NHKW, m_NH = C_NHKW.to(wide(q_BHSK.dtype)), m_NH.to(wide(q_BHSK.dtype))
    C, n = (C_NHKW, torch.zeros_like(C_NHKW[..., 0])) if gate == "sigmoid" else _apart(C_NHKW)
    return h_BHSV, C, n, m_NH, *_nothing(q_BHSK), states


def empty_saved(
    q_BHSK: Tensor, v_BHSV: Tensor, cu_seqlens: Tensor | None, chunk: int | None, gate: Gate
) -> tuple[Tensor, Tensor, Tensor]:
    """Empty tensors with the shapes of den, row_m and states from `forward`, which do not depend on data."""
    B, H, S, K = q_BHSK.shape
    size = (B, H, _num_groups(S, cu_seqlens, chunk or DEFAULT_CHUNK), K, v_BHSV.shape[-1] + (gate == "exp"))
    return *_nothing(q_BHSK), q_BHSK.new_empty(size, dtype=compute_dtype(q_BHSK.dtype))


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
    den: Tensor,
    row_m: Tensor,
    states: Tensor,
    C: Tensor,
    n: Tensor,
    m: Tensor,
    chunk: int | None,
    gate: Gate,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of all inputs from the gradients of the outputs and of the final state (None for zeros).

    Args: the gradients dh, dC, dn, dm, the arguments of `forward`, and its results.

    Returns:
        (dq, dk, dv, di, df, dC0, dn0, dm0), each in its input's dtype; those of the initial state also if none was
        given. For the sigmoid gate dn0 and dm0 are zeros.
    """
    L = chunk or DEFAULT_CHUNK
    dC_NHKW = torch.zeros_like(C) if dC is None else dC
    if gate == "exp":
        dC_NHKW = torch.cat([dC_NHKW, (torch.zeros_like(n) if dn is None else dn)[..., None]], -1)
    dC_NHKW = dC_NHKW.to(states.dtype)
    inputs = q_BHSK, k_BHSK, v_BHSV, i_BHS, f_BHS, C0, n0, m0
    parts = []
    group = 0
    for tokens, sequences, rows in _sequences(*inputs, cu_seqlens, gate):
        groups = slice(group, group + _num_groups(rows.q_BHSK.shape[2], None, L))
        group = groups.stop
        grads, *rest = backward_rows(rows, states[:, :, groups], dh_BHSV[:, :, tokens], dC_NHKW[sequences], L)
        parts.append((*grads, *rest))
    dq, dk, dv, dlog_i, dlog_f, dC0_NHKW, dm0_NH, along_NH = (
        torch.cat(part, dim=dim) for part, dim in zip(zip(*parts, strict=True), (2, 2, 2, 2, 2, 0, 0, 0), strict=True)
    )
    dC0_NHKW = dC0_NHKW.to(wide(q_BHSK.dtype))
    df_BHS = dlog_f * torch.sigmoid(-f_BHS.double())
    if gate == "sigmoid":
        di_BHS, dC0, dn0, dm0_NH = dlog_i * torch.sigmoid(-i_BHS.double()), dC0_NHKW, n.new_zeros(n.shape), m.double()
    else:
        # C_T = e^{-m_T} C~_T, and the code above treats m_T as a constant.
        dm_NH = (0.0 if dm is None else dm.double()) - along_NH
        along_i, along_f, along_m0 = maximum_backward(dm_NH, i_BHS, f_BHS, m0, cu_seqlens)
        di_BHS, df_BHS, dm0_NH = dlog_i + along_i, df_BHS + along_f, dm0_NH + along_m0
        dC0, dn0 = _apart(dC0_NHKW)
    return (
        dq,
        dk,
        dv,
        rounded(di_BHS, i_BHS.dtype),
        rounded(df_BHS, f_BHS.dtype),
        dC0,
        dn0,
        dm0_NH.to(wide(q_BHSK.dtype)),
    )


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
    """(h, C, n, m) of `forward`, differentiable to any order by autograd, which saves all intermediate tensors."""
    return forward(q_BHSK, k_BHSK, v_BHSV, i_BHS, f_BHS, C0, n0, m0, cu_seqlens, chunk, gate)[:4]


def _apart(C_NHKW: Tensor) -> tuple[Tensor, Tensor]:
    # Copies, since the results of an operator must not share memory.
    C_NHKV, n_NHK = (
        part.clone(memory_format=torch.contiguous_format) for part in C_NHKW.split([C_NHKW.shape[-1] - 1, 1], -1)
    )
    return C_NHKV, n_NHK[..., 0]


def _nothing(q_BHSK: Tensor) -> tuple[Tensor, Tensor]:
    return q_BHSK.new_empty((0,), dtype=wide(q_BHSK.dtype)), q_BHSK.new_empty((0,), dtype=wide(q_BHSK.dtype))


def _num_groups(num_tokens: int, cu_seqlens: Tensor | None, L: int) -> int:
    """Number of groups of chunks, each with a saved state; for packed sequences an upper bound for any lengths."""
    tokens = L * CHUNKS_PER_GROUP
    if cu_seqlens is None:
        return (num_tokens + tokens - 1) // tokens
    return num_tokens // tokens + cu_seqlens.shape[0] - 1


def _sequences(
    q_BHSK: Tensor,
    k_BHSK: Tensor,
    v_BHSV: Tensor,
    i_BHS: Tensor,
    f_BHS: Tensor,
    C0: Tensor | None,
    n0: Tensor | None,
    m0: Tensor | None,
    cu_seqlens: Tensor | None,
    gate: Gate,
) -> Iterator[tuple[slice, slice, Rows]]:
    """The parts that are computed together, with their tokens and rows of the state: all, or each packed sequence."""
    B, H, S, K = q_BHSK.shape
    wide = compute_dtype(q_BHSK.dtype)
    pieces = [(slice(0, S), slice(0, B))]
    if cu_seqlens is not None:
        offsets = packed_offsets(cu_seqlens, S)
        pieces = [(slice(first, last), slice(n, n + 1)) for n, (first, last) in enumerate(pairwise(offsets))]
    for tokens, sequences in pieces:
        i_here, f_here = i_BHS[:, :, tokens].double(), f_BHS[:, :, tokens].double()
        if C0 is None:
            C0_BHKW = q_BHSK.new_zeros((B, H, K, v_BHSV.shape[-1] + (gate == "exp")), dtype=wide)
        elif n0 is None:
            C0_BHKW = C0[sequences].to(wide)
        else:
            C0_BHKW = torch.cat([C0[sequences], n0[sequences, ..., None]], -1).to(wide)
        yield (
            tokens,
            sequences,
            Rows(
                q_BHSK[:, :, tokens],
                k_BHSK[:, :, tokens],
                v_BHSV[:, :, tokens],
                F.logsigmoid(i_here) if gate == "sigmoid" else i_here,
                F.logsigmoid(f_here),
                C0_BHKW,
                None if m0 is None else m0[sequences].double(),
                gate,
            ),
        )
