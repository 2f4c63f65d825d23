"""The maximum m_T that scales an mLSTM's final state, and the gradient along it.

    m_T = max(m_0 + sum of all log f, max over j of (i_j + sum over t > j of log f_t))

The outputs h do not depend on it, but C_T = e^{-m_T} C~_T and n_T do. The gradient of m_T,
dm_T - <dC_T, C_T> - <dn_T, n_T>, goes to the term that is the maximum: to i_j and each later log f, or to m_0 and all
log f. Of equal terms the latest token gets it, as in the limit of forget gates just below 1.

Shapes: gates (B, H, S), m (B, H); packed, B = 1 for the gates and one row per sequence in m. Sums are in float64.
O(S), without synchronization, and without operations that PyTorch calls nondeterministic, such as cumsum on CUDA.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_BLOCK = 256


def final_maximum(log_i_BHS: Tensor, log_f_BHS: Tensor, m0_BH: Tensor | None) -> Tensor:
    """m_T (B, H) in float64, differentiable to any order; m_0 is 0 if None. Not for packed gates."""
    won_BH = _winner(log_i_BHS, log_f_BHS, m0_BH, None)
    after_BHS = torch.arange(log_f_BHS.shape[-1], device=won_BH.device) > won_BH[..., None]
    decay_BH = log_f_BHS.double().masked_fill(~after_BHS, 0.0).sum(-1)
    start_BH = torch.zeros_like(decay_BH) if m0_BH is None else m0_BH.double()
    if log_i_BHS.shape[-1] == 0:
        return start_BH + decay_BH
    won_i_BH = log_i_BHS.double().gather(-1, won_BH.clamp(min=0)[..., None])[..., 0]
    return torch.where(won_BH < 0, start_BH, won_i_BH) + decay_BH


def maximum_backward(
    dm_BH: Tensor, i_BHS: Tensor, f_BHS: Tensor, m0_BH: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the gates' pre-activations and of m_0 through m_T.

    Args:
        dm_BH: gradient of m_T (B, H); packed, (N, H).
        i_BHS, f_BHS: gate pre-activations (B, H, S) of the exponential form; packed, B = 1.
        m0_BH: m_0, shaped like dm; None for 0.
        cu_seqlens: offsets (N + 1) of packed sequences; None for B sequences of S tokens.

    Returns:
        (di, df, dm_0), in dm's dtype.
    """
    won_BH = _winner(i_BHS, F.logsigmoid(f_BHS.double()), m0_BH, cu_seqlens)
    token_S = torch.arange(i_BHS.shape[-1], device=i_BHS.device)
    if cu_seqlens is None:
        won_BHS, dm_BHS = won_BH[..., None], dm_BH[..., None]
    else:
        sequence_S = _sequence_of(token_S, cu_seqlens)
        won_BHS, dm_BHS = (x_NH.t()[None, :, sequence_S] for x_NH in (won_BH, dm_BH))
    di_BHS = torch.where(token_S == won_BHS, dm_BHS, 0.0)
    df_BHS = torch.where(token_S > won_BHS, dm_BHS, 0.0) * torch.sigmoid(-f_BHS.to(dm_BH.dtype))
    return di_BHS, df_BHS, torch.where(won_BH < 0, dm_BH, 0.0)


def _winner(log_i_BHS: Tensor, log_f_BHS: Tensor, m0_BH: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """Index (B, H) of the token with the maximum, counted from the start of the row; -1 for m_0."""
    with torch.no_grad():
        sums_BHS = prefix_sums(log_f_BHS.double())
        score_BHS = log_i_BHS.double() - sums_BHS  # the term of j, up to a constant per sequence
        token_S = torch.arange(score_BHS.shape[-1], device=score_BHS.device)
        if cu_seqlens is None:
            start_BH = score_BHS.new_zeros(score_BHS.shape[:2]) if m0_BH is None else m0_BH.double()
            best_BH = torch.cat([start_BH[..., None], score_BHS], -1).amax(-1)
            token_BHS = torch.where(score_BHS == best_BH[..., None], token_S, -1)
            return F.pad(token_BHS, (1, 0), value=-1).amax(-1)
        # A row of packed sequences, each with its own m_0 and the sum before its first token.
        before_HS = F.pad(sums_BHS[0], (1, 0))[:, cu_seqlens[:-1].long()]
        best_HN = -before_HS if m0_BH is None else m0_BH.double().t() - before_HS
        row_HS = _sequence_of(token_S, cu_seqlens).expand(score_BHS.shape[1], -1)
        best_HN = best_HN.scatter_reduce(1, row_HS, score_BHS[0], "amax")
        token_HS = torch.where(score_BHS[0] == best_HN.gather(1, row_HS), token_S, -1)
        return torch.full_like(best_HN, -1, dtype=torch.int64).scatter_reduce(1, row_HS, token_HS, "amax").t()


def _sequence_of(token_S: Tensor, cu_seqlens: Tensor) -> Tensor:
    found: Tensor = torch.bucketize(token_S, cu_seqlens[1:].long(), right=True)
    return found


def prefix_sums(x_BHS: Tensor) -> Tensor:
    """Inclusive prefix sums along the last dimension, as products with triangular matrices of ones."""
    size = x_BHS.shape[-1]
    if size <= _BLOCK:
        return x_BHS @ x_BHS.new_ones(size, size).triu()
    blocks = F.pad(x_BHS, (0, -size % _BLOCK)).unflatten(-1, (-1, _BLOCK))
    inside = blocks @ x_BHS.new_ones(_BLOCK, _BLOCK).triu()
    before = F.pad(prefix_sums(inside[..., -1])[..., :-1], (1, 0))
    sums: Tensor = (inside + before[..., None]).flatten(-2)[..., :size]
    return sums
