"""The definition of LayerNorm and RMSNorm in plain PyTorch, in any dtype."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from torchstorm.kernels.dtypes import wide


def layer_norm_reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Over the last dimension, in x's dtype."""
    weight, bias = (None if p is None else p.to(x.dtype) for p in (weight, bias))
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def rms_norm_reference(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Over the last dimension, in x's dtype."""
    return F.rms_norm(x, x.shape[-1:], None if weight is None else weight.to(x.dtype), eps)


def statistics(x: Tensor, eps: float, *, centred: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(x - mean) rstd, mean and rstd (..., 1); without a mean, x rstd and zeros. Autograd sees every step.

    The mean of x - mean, which is not 0 by rounding, is subtracted, too, and so is the rounding error of that. So equal
    numbers give exactly 0, and an offset a thousand times the spread loses no digits.
    """
    if not centred:
        rstd = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        return x * rstd, torch.zeros_like(rstd), rstd
    first = x.mean(-1, keepdim=True)
    left = x - first
    rest = left.mean(-1, keepdim=True)
    left = left - rest
    rstd = (left.square().mean(-1, keepdim=True) + eps).rsqrt()
    return left * rstd, first + rest, rstd


def norm_gradients(
    dy: Tensor, x: Tensor, weight: Tensor | None, eps: float, *, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight and dbias in dtypes of at least fp32, differentiable by autograd."""
    dtype = wide(x.dtype)
    dy, x = dy.to(dtype), x.to(dtype)
    x_hat, _, rstd = statistics(x, eps, centred=centred)
    g = dy if weight is None else dy * weight.to(dtype)
    return gradients(dy, g, x_hat, rstd, centred=centred)


def gradients(dy: Tensor, g: Tensor, x_hat: Tensor, rstd: Tensor, *, centred: bool) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight and dbias from g = dy weight and the normalized x."""
    dx = g - x_hat * (g * x_hat).mean(-1, keepdim=True)
    if centred:
        dx = dx - g.mean(-1, keepdim=True)
    rows = tuple(range(x_hat.dim() - 1))
    return dx * rstd, (dy * x_hat).sum(rows), dy.sum(rows)
