"""Checks the inputs of `mlstm` and `mlstm_step`. Errors name the sizes and a remedy."""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from torchstorm.errors import ConfigError, ShapeError
from torchstorm.kernels.dtypes import FLOATS
from torchstorm.kernels.mlstm.reference import Gate, MLSTMState


def check_gate(gate: str) -> None:
    if gate not in get_args(Gate):
        raise ConfigError(f"gate={gate!r}, but the input gate must be one of {', '.join(map(repr, get_args(Gate)))}.")


def check_together(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> None:
    """Checks that all have the same dtype and device. The gates can be float32, in which they are often computed."""
    if q.dtype not in FLOATS or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ShapeError(
            f"q is {q.dtype}, k {k.dtype}, v {v.dtype}: all must have the same dtype, float32, float16, bfloat16 or "
            "float64. Convert them with .to(dtype)."
        )
    if i.dtype != f.dtype or i.dtype not in (q.dtype, torch.float32):
        raise ShapeError(f"i is {i.dtype}, f {f.dtype}: both must be {q.dtype} as q is, or both torch.float32.")
    for name, x in (("k", k), ("v", v), ("i", i), ("f", f)):
        if x.device != q.device:
            raise ShapeError(f"{name} is on {x.device}, but q is on {q.device}: move them to one device.")
    if q.shape[-1] < 1 or v.shape[-1] < 1:
        raise ShapeError(f"q {tuple(q.shape)}, v {tuple(v.shape)}: d_qk and d_v must be at least 1.")


def check_state(state: MLSTMState, q: Tensor, v: Tensor, num_rows: int) -> None:
    """Checks the sizes of an initial state for `num_rows` sequences."""
    if len(state) != 3:
        raise ShapeError(f"The state has {len(state)} parts, but it must be (C, n, m), as in MLSTMState.")
    H, K, V = q.shape[1], q.shape[-1], v.shape[-1]
    C, n, m = state
    wanted = (num_rows, H, K, V), (num_rows, H, K), (num_rows, H)
    if C.shape != wanted[0] or n.shape != wanted[1] or m.shape != wanted[2]:
        raise ShapeError(
            f"The state has C {tuple(C.shape)}, n {tuple(n.shape)}, m {tuple(m.shape)}, but {num_rows} sequences with "
            f"{H} heads, d_qk={K} and d_v={V} need C {wanted[0]}, n {wanted[1]}, m {wanted[2]}."
        )
    for name, x in (("C", C), ("n", n), ("m", m)):
        if x.device != q.device or not x.is_floating_point():
            raise ShapeError(
                f"The state's {name} is {x.dtype} on {x.device}, but must be a floating tensor on {q.device} as q is."
            )
