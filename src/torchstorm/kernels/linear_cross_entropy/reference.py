"""The definition of `linear_cross_entropy`, with all logits in memory."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from torchstorm.kernels.dtypes import wide

Reduction = Literal["mean", "sum", "none"]


def linear_cross_entropy_reference(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    softcap: float | None = None,
) -> Tensor:
    """The loss of logits x W^T + b, softmax in float32 (float64 for float64), under PyTorch's autograd.

    x (..., K), weight (V, K), bias (V), target (...). Holds the logits in x's dtype and in float32, their softmax and
    their gradients.
    """
    logits = F.linear(x, weight, bias).flatten(0, -2)
    logits = logits.to(wide(x.dtype))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(
        logits, target.flatten(), ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )
    return loss.view(target.shape) if reduction == "none" else loss
