"""Batch normalization with an activation on CPU cores, with numba, parallel over channels. float32 or float64."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, type-arg"
from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from torchstorm.kernels.elementwise.parallel import BACKWARD, FORWARD


@njit(parallel=True, error_model="numpy")
def _statistics(x, mean, var):
    N, C, L = x.shape
    for c in prange(C):
        total = 0.0
        for n in range(N):
            for i in range(L):
                total += x[n, c, i]
        center = total / (N * L)
        total = 0.0
        for n in range(N):
            for i in range(L):
                total += (x[n, c, i] - center) ** 2
        mean[c] = center
        var[c] = total / (N * L)


@cache
def _normalise(activation: str) -> Any:
    act = FORWARD.get(activation)

    @njit(parallel=True, error_model="numpy")
    def forward(x, weight, bias, mean, rstd, y):
        N, C, L = x.shape
        for c in prange(C):
            for n in range(N):
                for i in range(L):
                    z = (x[n, c, i] - mean[c]) * rstd[c] * weight[c] + bias[c]
                    y[n, c, i] = z if act is None else act(z)

    return forward


@cache
def _backward(activation: str) -> Any:
    gradient = BACKWARD.get(activation)

    @njit(parallel=True, error_model="numpy")
    def backward(dy, x, weight, bias, mean, rstd, share, dx, d_weight, d_bias):
        N, C, L = x.shape
        for c in prange(C):
            sum_dz = sum_product = 0.0
            for n in range(N):
                for i in range(L):
                    normal = (x[n, c, i] - mean[c]) * rstd[c]
                    dz = dy[n, c, i] if gradient is None else gradient(dy[n, c, i], normal * weight[c] + bias[c])
                    dx[n, c, i] = dz
                    sum_dz += dz
                    sum_product += dz * normal
            for n in range(N):
                for i in range(L):
                    normal = (x[n, c, i] - mean[c]) * rstd[c]
                    dx[n, c, i] = (dx[n, c, i] - share * (sum_dz + normal * sum_product)) * rstd[c] * weight[c]
            d_weight[c] = sum_product
            d_bias[c] = sum_dz

    return backward


def statistics(x: Tensor, mean: Tensor, var: Tensor, rstd: Tensor, eps: float, variant: str) -> None:
    """Fills mean, biased variance and 1 / sqrt(variance + eps) of each channel."""
    _statistics(_rows(x), mean.numpy(), var.numpy())
    torch.rsqrt(var + eps, out=rstd)


def normalise(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor, activation: str, y: Tensor,
    variant: str,
) -> None:  # fmt: skip
    """Fills y with the activation of (x - mean) rstd weight + bias."""
    out = y if y.is_contiguous() else y.new_empty(y.shape)
    _normalise(activation)(_rows(x), *_affine(weight, bias, mean), mean.numpy(), rstd.numpy(), _rows(out))
    if out is not y:
        y.copy_(out)


def backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor, batch: bool,
    activation: str, dx: Tensor, d_weight: Tensor, d_bias: Tensor, variant: str,
) -> None:  # fmt: skip
    """Fills dx and the gradients of weight and bias; `batch`: mean and rstd are those of x."""
    out = dx if dx.is_contiguous() else dx.new_empty(dx.shape)
    share = x.shape[1] / x.numel() if batch else 0.0
    affine = _affine(weight, bias, mean)
    _backward(activation)(
        _rows(dy), _rows(x), *affine, mean.numpy(), rstd.numpy(), share, _rows(out), d_weight.numpy(), d_bias.numpy()
    )
    if out is not dx:
        dx.copy_(out)


def _rows(x: Tensor) -> np.ndarray:
    """(N, C, L), not copied where x is contiguous."""
    return x.detach().contiguous().view(*x.shape[:2], -1).numpy()


def _affine(weight: Tensor | None, bias: Tensor | None, mean: Tensor) -> tuple[np.ndarray, np.ndarray]:
    given = torch.ones_like(mean) if weight is None else weight, torch.zeros_like(mean) if bias is None else bias
    one, other = (x.detach().contiguous().numpy() for x in given)
    return one, other
