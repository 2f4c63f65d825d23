"""The mLSTM one token at a time, for generation: maps a state and a token to an output and the next state."""

from __future__ import annotations

from torch import Tensor

from torchstorm.errors import ShapeError
from torchstorm.kernels.dtypes import wide
from torchstorm.kernels.mlstm.checks import check_gate, check_state, check_together
from torchstorm.kernels.mlstm.reference import Gate, MLSTMState, advance, zero_state
from torchstorm.kernels.pytorch_fallback import without_autocast


def mlstm_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    state: MLSTMState | None = None,
    *,
    gate: Gate = "exp",
) -> tuple[Tensor, MLSTMState]:
    """Processes one token, as `mlstm` with a sequence of length 1, and continues from a state of `mlstm`.

    Args:
        q, k: query and key (B, H, d_qk), in float32, float16, bfloat16 or float64.
        v: value (B, H, d_v), of the same dtype.
        i, f: gate pre-activations (B, H), of the same dtype or float32.
        state: C (B, H, d_qk, d_v), n (B, H, d_qk), m (B, H), from `mlstm(..., return_state=True)` or the last step.
            None before the first token.
        gate: "exp" or "sigmoid", the input gate.

    Returns:
        (h (B, H, d_v) in v's dtype, the next state in float32, or float64 for float64 inputs), both new tensors.

    Raises:
        ShapeError: sizes, dtypes or devices do not match.
        ConfigError: the gate does not exist.
    """
    if q.dim() != 3 or v.dim() != 3 or k.shape != q.shape or v.shape[:2] != q.shape[:2]:
        raise ShapeError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: one token needs q, k (B, H, d_qk) and v "
            "(B, H, d_v). For sequences call mlstm."
        )
    if i.shape != q.shape[:2] or f.shape != q.shape[:2]:
        raise ShapeError(
            f"i {tuple(i.shape)}, f {tuple(f.shape)}: with q {tuple(q.shape)} both gates must be {tuple(q.shape[:2])}."
        )
    check_gate(gate)
    check_together(q, k, v, i, f)
    dtype = wide(q.dtype)
    if state is None:
        state = zero_state(q, v, dtype)
    else:
        check_state(state, q, v, q.shape[0])
        state = MLSTMState(*(x.to(dtype) for x in state))
    with without_autocast(q):
        h, after = advance(q.to(dtype), k.to(dtype), v.to(dtype), i.to(dtype), f.to(dtype), state, gate)
    return h.to(v.dtype), after
