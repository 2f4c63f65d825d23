"""The mLSTM by definition: the recurrence, and the quadratic (parallel) form, in plain PyTorch.

Both compute in the dtype of their inputs: float64 gives reference results, and lower precision the error to expect of
that dtype. Both are differentiable to any order.

    m_t = max(log f_t + m_{t-1}, log i_t)
    C_t = e^{log f_t + m_{t-1} - m_t} C_{t-1} + e^{log i_t - m_t} k_t v_t^T,    n_t likewise with k_t
    h_t = q_t^T C_t / max(|q_t . n_t|, e^{-m_t}),    q scaled by d_qk^-0.5

with log f = logsigmoid(f) and, for gate="exp", log i = i. For gate="sigmoid", log i = logsigmoid(i), h = q^T C, and n
and m stay 0.

Shapes: B batch, H heads, S tokens, K = d_qk, V = d_v. Source: Beck et al. 2024 (arXiv 2405.04517); the sigmoid form:
Beck et al. 2025 (arXiv 2503.14376).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from torchstorm.errors import ShapeError

Gate = Literal["exp", "sigmoid"]


class MLSTMState(NamedTuple):
    """The state of an mLSTM: C (B, H, d_qk, d_v), n (B, H, d_qk) and m (B, H).

    The unscaled state is e^m C and e^m n. Packed sequences: one row each instead of B. With gate="sigmoid", n = m = 0.
    """

    C: Tensor
    n: Tensor
    m: Tensor


def zero_state(q_BHSK: Tensor, v_BHSV: Tensor, dtype: torch.dtype) -> MLSTMState:
    """The state before the first token."""
    B, H, K, V = q_BHSK.shape[0], q_BHSK.shape[1], q_BHSK.shape[-1], v_BHSV.shape[-1]
    C, n, m = (torch.zeros(size, dtype=dtype, device=q_BHSK.device) for size in ((B, H, K, V), (B, H, K), (B, H)))
    return MLSTMState(C, n, m)


def advance(
    q_BHK: Tensor, k_BHK: Tensor, v_BHV: Tensor, i_BH: Tensor, f_BH: Tensor, state: MLSTMState, gate: Gate
) -> tuple[Tensor, MLSTMState]:
    """One step of the recurrence, all in one dtype. Returns (h (B, H, V), the next state)."""
    q_BHK = q_BHK * q_BHK.shape[-1] ** -0.5
    log_f_BH = F.logsigmoid(f_BH)
    if gate == "sigmoid":
        C_BHKV = _scaled(log_f_BH.exp(), state.C) + _scaled(torch.sigmoid(i_BH), _outer(k_BHK, v_BHV))
        return _apply(q_BHK, C_BHKV), MLSTMState(C_BHKV, torch.zeros_like(state.n), torch.zeros_like(state.m))
    m_BH = torch.maximum(log_f_BH + state.m, i_BH)
    keep_BH, write_BH = torch.exp(log_f_BH + state.m - m_BH), torch.exp(i_BH - m_BH)
    C_BHKV = _scaled(keep_BH, state.C) + _scaled(write_BH, _outer(k_BHK, v_BHV))
    n_BHK = keep_BH[..., None] * state.n + write_BH[..., None] * k_BHK
    normalizer_BH = _normalizer((q_BHK * n_BHK).sum(-1), m_BH)
    return _apply(q_BHK, C_BHKV) / normalizer_BH[..., None], MLSTMState(C_BHKV, n_BHK, m_BH)


def mlstm_recurrent(
    q_BHSK: Tensor,
    k_BHSK: Tensor,
    v_BHSV: Tensor,
    i_BHS: Tensor,
    f_BHS: Tensor,
    initial_state: MLSTMState | None = None,
    *,
    gate: Gate = "exp",
) -> tuple[Tensor, MLSTMState]:
    """The recurrence, token by token.

    Args:
        q_BHSK, k_BHSK, v_BHSV: queries, keys (B, H, S, d_qk) and values (B, H, S, d_v).
        i_BHS, f_BHS: gate pre-activations (B, H, S).
        initial_state: C, n, m before the first token; None for zeros.
        gate: "exp" or "sigmoid", the input gate.

    Returns:
        (h (B, H, S, d_v), the final state), computed in the dtype of q throughout.
    """
    state = _start(initial_state, q_BHSK, v_BHSV, gate)
    h_BHV = []
    for q_BHK, k_BHK, v_BHV, i_BH, f_BH in zip(
        q_BHSK.unbind(2), k_BHSK.unbind(2), v_BHSV.unbind(2), i_BHS.unbind(2), f_BHS.unbind(2), strict=True
    ):
        h, state = advance(q_BHK, k_BHK, v_BHV, i_BH, f_BH, state, gate)
        h_BHV.append(h)
    return (torch.stack(h_BHV, dim=2) if h_BHV else torch.zeros_like(v_BHSV)), state


def mlstm_quadratic(
    q_BHSK: Tensor,
    k_BHSK: Tensor,
    v_BHSV: Tensor,
    i_BHS: Tensor,
    f_BHS: Tensor,
    initial_state: MLSTMState | None = None,
    *,
    gate: Gate = "exp",
) -> tuple[Tensor, MLSTMState]:
    """The parallel form: all pairs of tokens at once, O(S^2). Arguments and results as in `mlstm_recurrent`."""
    S, K = q_BHSK.shape[2:]
    state = _start(initial_state, q_BHSK, v_BHSV, gate)
    if S == 0:
        return torch.zeros_like(v_BHSV), state
    q_BHSK = q_BHSK * K**-0.5
    log_i_BHS = F.logsigmoid(i_BHS) if gate == "sigmoid" else i_BHS
    F_BHS = F.logsigmoid(f_BHS).cumsum(-1)
    later = torch.ones(S, S, dtype=torch.bool, device=q_BHSK.device).triu(1)
    D_BHSS = (F_BHS[..., :, None] - F_BHS[..., None, :] + log_i_BHS[..., None, :]).masked_fill(later, -torch.inf)
    if gate == "sigmoid":
        weight_BHSS, old_BHS = D_BHSS.exp(), F_BHS.exp()
        h_BHSV = (weight_BHSS * (q_BHSK @ k_BHSK.mT)) @ v_BHSV + old_BHS[..., None] * (q_BHSK @ state.C)
        C_BHKV = _scaled(old_BHS[..., -1], state.C) + (weight_BHSS[..., -1, :, None] * k_BHSK).mT @ v_BHSV
        return h_BHSV, MLSTMState(C_BHKV, torch.zeros_like(state.n), torch.zeros_like(state.m))
    m_BHS = torch.maximum(F_BHS + state.m[..., None], D_BHSS.amax(-1))
    weight_BHSS = torch.exp(D_BHSS - m_BHS[..., None])
    old_BHS = torch.exp(F_BHS + state.m[..., None] - m_BHS)
    mixed_BHSS = weight_BHSS * (q_BHSK @ k_BHSK.mT)
    num_BHSV = mixed_BHSS @ v_BHSV + old_BHS[..., None] * (q_BHSK @ state.C)
    den_BHS = mixed_BHSS.sum(-1) + old_BHS * (q_BHSK @ state.n[..., None])[..., 0]
    h_BHSV = num_BHSV / _normalizer(den_BHS, m_BHS)[..., None]
    last_BHSK = weight_BHSS[..., -1, :, None] * k_BHSK
    C_BHKV = _scaled(old_BHS[..., -1], state.C) + last_BHSK.mT @ v_BHSV
    n_BHK = old_BHS[..., -1, None] * state.n + last_BHSK.sum(-2)
    return h_BHSV, MLSTMState(C_BHKV, n_BHK, m_BHS[..., -1])


def mlstm_reference(
    q_BHSK: Tensor,
    k_BHSK: Tensor,
    v_BHSV: Tensor,
    i_BHS: Tensor,
    f_BHS: Tensor,
    initial_state: MLSTMState | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    gate: Gate = "exp",
    form: Literal["recurrent", "quadratic"] = "recurrent",
) -> tuple[Tensor, MLSTMState]:
    """`mlstm_recurrent` or `mlstm_quadratic`, also for packed sequences: B = 1, offsets (N + 1), states with N rows."""
    compute = mlstm_recurrent if form == "recurrent" else mlstm_quadratic
    if cu_seqlens is None:
        return compute(q_BHSK, k_BHSK, v_BHSV, i_BHS, f_BHS, initial_state, gate=gate)
    h, states = [], []
    for n, (first, last) in enumerate(pairwise(packed_offsets(cu_seqlens, q_BHSK.shape[2]))):
        start = None if initial_state is None else MLSTMState(*(x[n : n + 1] for x in initial_state))
        q, k, v, i, f = (x[:, :, first:last] for x in (q_BHSK, k_BHSK, v_BHSV, i_BHS, f_BHS))
        h_BHSV, state = compute(q, k, v, i, f, start, gate=gate)
        h.append(h_BHSV)
        states.append(state)
    return torch.cat(h, 2), MLSTMState(*(torch.cat(rows) for rows in zip(*states, strict=True)))


def packed_offsets(cu_seqlens: Tensor, num_tokens: int) -> list[int]:
    """The offsets as a list. Raises ShapeError unless they increase from 0 to `num_tokens`."""
    offsets: list[int] = cu_seqlens.tolist()
    if offsets[0] != 0 or offsets[-1] != num_tokens or any(a > b for a, b in pairwise(offsets)):
        raise ShapeError(
            f"cu_seqlens={offsets if len(offsets) <= 8 else [*offsets[:7], '...', offsets[-1]]} of {num_tokens} packed "
            f"tokens: it must start at 0, never decrease, and end at {num_tokens}."
        )
    return offsets


def _start(initial_state: MLSTMState | None, q_BHSK: Tensor, v_BHSV: Tensor, gate: Gate) -> MLSTMState:
    zeros = zero_state(q_BHSK, v_BHSV, q_BHSK.dtype)
    if initial_state is None:
        return zeros
    C, n, m = (x.to(q_BHSK.dtype) for x in initial_state)
    return MLSTMState(C, n, m) if gate == "exp" else MLSTMState(C, zeros.n, zeros.m)


def _scaled(gate_BH: Tensor, C_BHKV: Tensor) -> Tensor:
    return gate_BH[..., None, None] * C_BHKV


def _normalizer(den: Tensor, m: Tensor) -> Tensor:
    # Avoids 0 / 0 if e^{-m} underflows.
    return torch.maximum(den.abs(), torch.exp(-m).clamp(min=torch.finfo(den.dtype).tiny))


def _outer(k_BHK: Tensor, v_BHV: Tensor) -> Tensor:
    return k_BHK[..., :, None] * v_BHV[..., None, :]


def _apply(q_BHK: Tensor, C_BHKV: Tensor) -> Tensor:
    return (q_BHK[..., None, :] @ C_BHKV)[..., 0, :]
