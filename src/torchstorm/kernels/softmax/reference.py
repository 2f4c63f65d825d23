"""The definition of softmax and log-softmax with a mask, in plain PyTorch, in any dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from torchstorm.kernels.dtypes import wide


def softmax_reference(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Over the last dimension; 0 where the mask is False."""
    if mask is None:
        return x.softmax(-1)
    hidden = ~mask
    return x.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0.0)


def log_softmax_reference(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Over the last dimension; -inf where the mask is False."""
    if mask is None:
        return x.log_softmax(-1)
    hidden = ~mask
    return x.masked_fill(hidden, -torch.inf).log_softmax(-1).masked_fill(hidden, -torch.inf)


def softmax_gradient(dy: Tensor, y: Tensor, mask: Tensor | None, log: bool) -> Tensor:
    """dx from softmax's or log-softmax's output y; in fp32 for fp16 and bf16. Differentiable by autograd."""
    dtype = wide(y.dtype)
    dy, y = dy.to(dtype), y.to(dtype)
    if not log:
        return y * (dy - (dy * y).sum(-1, keepdim=True))
    seen = dy if mask is None else dy.masked_fill(~mask, 0.0)
    dx = seen - y.exp() * seen.sum(-1, keepdim=True)
    return dx if mask is None else dx.masked_fill(~mask, 0.0)
