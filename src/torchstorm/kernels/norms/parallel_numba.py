"""LayerNorm and RMSNorm on CPU cores, with numba: the passes over a row read it from the core's cache.

Sums in float64. dw and db in two stages: sums over spans of rows, whose number does not depend on threads, then over
spans.
Compiled at the first use, which takes seconds.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

from torchstorm.kernels.rows import as_rows

# Allows reordered sums, for vector instructions; NaN and infinity are preserved.
_FAST = {"reassoc", "contract"}
_SPANS = 64


@numba.njit(parallel=True, fastmath=_FAST)
def _forward_rows(x_MN, w_N, b_N, eps, centred, y_MN, mean_M, rstd_M):
    M, N = x_MN.shape
    for r in numba.prange(M):
        mean = 0.0
        if centred:
            for n in range(N):
                mean += x_MN[r, n]
            mean /= N
        squares = 0.0
        for n in range(N):
            left = x_MN[r, n] - mean
            squares += left * left
        rstd = 1.0 / np.sqrt(squares / N + eps)
        for n in range(N):
            y_MN[r, n] = (x_MN[r, n] - mean) * rstd * w_N[n] + b_N[n]
        rstd_M[r] = rstd
        if centred:
            mean_M[r] = mean


@numba.njit(parallel=True, fastmath=_FAST)
def _backward_rows(dy_MN, x_MN, w_N, mean_M, rstd_M, centred, dx_MN, parts_w, parts_b):
    M, N = x_MN.shape
    spans = parts_w.shape[0]
    for span in numba.prange(spans):
        for n in range(N):
            parts_w[span, n] = 0.0
            parts_b[span, n] = 0.0
        for r in range(M * span // spans, M * (span + 1) // spans):
            rstd = np.float64(rstd_M[r])
            mean = np.float64(mean_M[r]) if centred else 0.0
            of_x_hat = 0.0
            of_one = 0.0
            for n in range(N):
                x_hat = (x_MN[r, n] - mean) * rstd
                g = np.float64(dy_MN[r, n]) * w_N[n]
                of_x_hat += g * x_hat
                of_one += g
                parts_w[span, n] += dy_MN[r, n] * x_hat
                parts_b[span, n] += dy_MN[r, n]
            of_x_hat /= N
            of_one = of_one / N if centred else 0.0
            for n in range(N):
                x_hat = (x_MN[r, n] - mean) * rstd
                dx_MN[r, n] = (dy_MN[r, n] * w_N[n] - x_hat * of_x_hat - of_one) * rstd


def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """y, mean and rstd of a non-empty x."""
    x_MN = _numbers(as_rows(x))
    M, N = x_MN.shape
    y = x.new_empty(x.shape, dtype=torch.float32)
    mean, rstd = (x.new_empty((m,), dtype=torch.float32) for m in (M if centred else 0, M))
    w, b = _vector(weight, x, 1.0), _vector(bias, x, 0.0)
    _forward_rows(x_MN, w, b, eps, centred, y.view(M, N).numpy(), mean.numpy(), rstd.numpy())
    return y.to(x.dtype), mean, rstd


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    centred: bool,
    needs_weight: bool,
    needs_bias: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight and dbias of a non-empty x."""
    dy_MN, x_MN = _numbers(as_rows(dy)), _numbers(as_rows(x))
    M, N = x_MN.shape
    dx = x.new_empty(x.shape, dtype=torch.float32)
    parts_w, parts_b = (torch.empty((min(M, _SPANS), N), dtype=torch.float64) for _ in range(2))
    given = dy_MN, x_MN, _vector(weight, x, 1.0), mean.numpy(), rstd.numpy(), centred
    _backward_rows(*given, dx.view(M, N).numpy(), parts_w.numpy(), parts_b.numpy())
    dw, db = (
        parts.sum(0).to(dtype) if needed else x.new_empty((0,), dtype=dtype)
        for parts, needed in ((parts_w, needs_weight), (parts_b, needs_bias))
    )
    return dx.to(x.dtype), dw, db


def _numbers(x: Tensor):
    """x as a contiguous fp32 numpy array, so that numba compiles for one type of array."""
    return x.float().contiguous().numpy()


def _vector(p: Tensor | None, x: Tensor, nothing: float):
    return np.full(x.shape[-1], nothing, dtype=np.float32) if p is None else _numbers(p)
