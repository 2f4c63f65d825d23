"""The mLSTM, the matrix-memory recurrence of the xLSTM, as a function.

    C_t = f_t C_{t-1} + i_t k_t v_t^T,    n_t = f_t n_{t-1} + i_t k_t,    h_t = q_t^T C_t / max(|q_t . n_t|, 1)

with f_t = sigmoid(f) and i_t = exp(i), stabilized by m_t = max(log f_t + m_{t-1}, i); or i_t = sigmoid(i), without
n, m and the division. `reference.py` has the exact definition.

Variants in historical order: "recurrent", token by token, and "quadratic", all pairs at once, both PyTorch with
autograd; "chunkwise", linear in S, PyTorch with a hand-written backward. Triton kernels for a GPU: "triton-quadratic",
all pairs in tiles, and "triton-quadratic-tensor-cores", the same on tensor cores; "triton-chunkwise". `ladder.py`
describes each of them.
Source: arXiv 2405.04517 and 2503.14376.
"""

from __future__ import annotations

from typing import Literal, cast, overload

import torch
from torch import Tensor

from torchstorm.errors import ConfigError, DeviceError, ShapeError
from torchstorm.kernels.dtypes import wide
from torchstorm.kernels.mlstm.checks import check_gate, check_state, check_together
from torchstorm.kernels.mlstm.op import IMPLEMENTATIONS, mlstm_forward
from torchstorm.kernels.mlstm.reference import Gate, MLSTMState, mlstm_reference
from torchstorm.kernels.pytorch_fallback import without_autocast
from torchstorm.kernels.variants import has_triton_for

VARIANTS = ("recurrent", "quadratic", *IMPLEMENTATIONS)


@overload
def mlstm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    initial_state: MLSTMState | None = None,
    return_state: Literal[False] = False,
    cu_seqlens: Tensor | None = None,
    chunk: int | None = None,
    variant: str = "auto",
    gate: Gate = "exp",
) -> Tensor: ...
@overload
def mlstm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    initial_state: MLSTMState | None = None,
    return_state: Literal[True],
    cu_seqlens: Tensor | None = None,
    chunk: int | None = None,
    variant: str = "auto",
    gate: Gate = "exp",
) -> tuple[Tensor, MLSTMState]: ...
def mlstm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    initial_state: MLSTMState | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk: int | None = None,
    variant: str = "auto",
    gate: Gate = "exp",
) -> Tensor | tuple[Tensor, MLSTMState]:
    """Runs an mLSTM over B sequences, or over packed ones. Deterministic; differentiable in all inputs and the state.

    Args:
        q, k: queries (scaled by d_qk^-0.5 internally) and keys (B, H, S, d_qk), float32, float16, bfloat16 or float64.
        v: values (B, H, S, d_v), of the same dtype. Any strides.
        i, f: gate pre-activations (B, H, S), finite, of the same dtype or float32.
        initial_state: C (B, H, d_qk, d_v), n (B, H, d_qk), m (B, H) before the first token; None for zeros. With
            gate="sigmoid" only C is used.
        return_state: also returns the state after the last token, for a later call of `mlstm` or `mlstm_step`.
        cu_seqlens: offsets (N + 1), int32 or int64, from 0 to S, of N packed sequences; B must be 1, and states have N
            rows instead of B. On a GPU their values are not checked, since that would synchronize.
        chunk: tokens per chunk; None for the variant's default.
        variant: one of `variants("mlstm")`, or "auto": the fastest here.
        gate: "exp" or "sigmoid", the input gate.

    Returns:
        h (B, H, S, d_v) in v's dtype; with `return_state` (h, state), the state in float32, float64 for float64 inputs.

    Raises:
        ShapeError: sizes, dtypes or devices do not match.
        ConfigError: the variant or gate does not exist, or the variant does not support this chunk size.
        DeviceError: the variant does not support this device.
    """
    num_rows = _check_sizes(q, k, v, i, f, cu_seqlens)
    check_gate(gate)
    check_together(q, k, v, i, f)
    chosen = _choose(variant, chunk, q)
    dtype = wide(q.dtype)
    if initial_state is not None:
        check_state(initial_state, q, v, num_rows)
        initial_state = MLSTMState(*(x.to(dtype) for x in initial_state))
    if chosen in IMPLEMENTATIONS:
        C0, n0, m0 = initial_state or (None, None, None)
        if gate == "sigmoid":
            n0 = m0 = None
        h, C, n, m, *_ = mlstm_forward(q, k, v, i, f, C0, n0, m0, cu_seqlens, chunk, gate, chosen)
        state = MLSTMState(C, n, m)
    else:
        form = cast("Literal['recurrent', 'quadratic']", chosen)
        q, k, i, f = q.to(dtype), k.to(dtype), i.to(dtype), f.to(dtype)
        with without_autocast(q):
            given = q, k, v.to(dtype), i, f, initial_state
            h, state = mlstm_reference(*given, cu_seqlens=cu_seqlens, gate=gate, form=form)
        h = h.to(v.dtype)
    return (h, state) if return_state else h


def _check_sizes(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, cu_seqlens: Tensor | None) -> int:
    """Returns the number of rows of a state."""
    if q.dim() != 4 or v.dim() != 4 or k.shape != q.shape or v.shape[:3] != q.shape[:3]:
        raise ShapeError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: an mLSTM takes q, k (B, H, S, d_qk) and v "
            "(B, H, S, d_v). For x (B, S, H, d), pass x.transpose(1, 2)."
        )
    if i.shape != q.shape[:3] or f.shape != q.shape[:3]:
        raise ShapeError(
            f"i {tuple(i.shape)}, f {tuple(f.shape)}: with q {tuple(q.shape)} both gates must be {tuple(q.shape[:3])}."
        )
    if cu_seqlens is None:
        return q.shape[0]
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ShapeError(
            f"cu_seqlens is {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}: it must be int32 or int64 with N + 1 offsets "
            "for N sequences, at least one."
        )
    if q.shape[0] != 1:
        raise ShapeError(f"cu_seqlens packs sequences into one row, but q {tuple(q.shape)} has B={q.shape[0]}, not 1.")
    if cu_seqlens.device != q.device:
        raise ShapeError(f"cu_seqlens is on {cu_seqlens.device}, but q is on {q.device}: move it there.")
    return cu_seqlens.shape[0] - 1


def _choose(variant: str, chunk: int | None, q: Tensor) -> str:
    if variant == "auto":
        variant = "triton-chunkwise" if has_triton_for(q) else "chunkwise"
    if variant not in VARIANTS:
        raise ConfigError(f"variant={variant!r}, but mlstm has {', '.join(map(repr, VARIANTS))} and 'auto'.")
    if variant.startswith("triton") and q.device.type != "cuda":
        raise DeviceError(
            f"variant={variant!r} runs on a GPU, but q is on {q.device}: use variant='chunkwise', or 'auto'."
        )
    if chunk is not None and (variant not in IMPLEMENTATIONS or "quadratic" in variant):
        raise ConfigError(f"chunk={chunk}, but variant={variant!r} has no chunks: leave it out, or use 'chunkwise'.")
    if chunk is not None and chunk < 1:
        raise ConfigError(f"chunk={chunk}, but it must be at least 1, or None for the variant's default.")
    return variant
