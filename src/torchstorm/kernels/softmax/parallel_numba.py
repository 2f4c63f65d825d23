"""Softmax and log-softmax on CPU cores, with numba: the three passes over a row read it from the core's cache.

Sums in float64. Compiled at the first use, which takes seconds.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

from torchstorm.kernels.rows import as_rows

# Allows reordered sums, for vector instructions; NaN and infinity are preserved.
_FAST = {"reassoc", "contract"}


@numba.njit(parallel=True, fastmath=_FAST)
def _forward_rows(x_MN, seen_MN, is_masked, log, y_MN):
    M, N = x_MN.shape
    for r in numba.prange(M):
        m = np.float32(-np.inf)
        for n in range(N):
            if (not is_masked or seen_MN[r, n]) and x_MN[r, n] > m:
                m = x_MN[r, n]
        total = 0.0
        for n in range(N):
            is_hidden = is_masked and not seen_MN[r, n]
            e = np.float32(0.0) if is_hidden else np.exp(x_MN[r, n] - m)
            y_MN[r, n] = e
            total += e
        if log:
            log_total = np.log(total)
            for n in range(N):
                y_MN[r, n] = np.float64(x_MN[r, n]) - m - log_total
        else:
            scale = np.float32(1.0) / np.float32(total)
            for n in range(N):
                y_MN[r, n] *= scale
        if is_masked:
            for n in range(N):
                if not seen_MN[r, n]:
                    y_MN[r, n] = -np.inf if log else 0.0


@numba.njit(parallel=True, fastmath=_FAST)
def _backward_rows(dy_MN, y_MN, seen_MN, is_masked, log, dx_MN):
    M, N = y_MN.shape
    for r in numba.prange(M):
        total = 0.0
        for n in range(N):
            if log:
                total += dy_MN[r, n] if not is_masked or seen_MN[r, n] else np.float32(0.0)
            else:
                total += np.float64(dy_MN[r, n]) * y_MN[r, n]
        for n in range(N):
            if not log:
                dx_MN[r, n] = y_MN[r, n] * (dy_MN[r, n] - total)
            elif not is_masked or seen_MN[r, n]:
                dx_MN[r, n] = dy_MN[r, n] - np.exp(y_MN[r, n]) * total
            else:
                dx_MN[r, n] = 0.0


def forward(x: Tensor, mask: Tensor | None, log: bool) -> Tensor:
    """y of a non-empty x."""
    y = x.new_empty(x.shape, dtype=torch.float32)
    _forward_rows(_numbers(x), _seen(mask, x), mask is not None, log, _numbers(y))
    return y.to(x.dtype)


def backward(dy: Tensor, y: Tensor, mask: Tensor | None, log: bool) -> Tensor:
    """dx from a non-empty y."""
    dx = y.new_empty(y.shape, dtype=torch.float32)
    is_masked = log and mask is not None
    _backward_rows(_numbers(dy), _numbers(y), _seen(mask if log else None, y), is_masked, log, _numbers(dx))
    return dx.to(y.dtype)


def _numbers(x: Tensor):
    """x as a contiguous fp32 numpy array (M, N), so that numba compiles for one type of array."""
    return as_rows(x.float()).contiguous().numpy()


def _seen(mask: Tensor | None, x: Tensor):
    if mask is None:
        return np.ones((1, 1), dtype=np.bool_)
    return mask.expand(x.shape).reshape(-1, x.shape[-1]).contiguous().numpy()
