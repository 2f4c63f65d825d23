"""Dropout by PyTorch's own operators, on any device: it writes the mask, and the words that it comes from."""

from __future__ import annotations

import torch
from torch import Tensor

from torchstorm.kernels.dropout.philox import keep


def dropout(x: Tensor, seed: Tensor, y: Tensor, p: float, scale: float, variant: str) -> None:
    """Fills y from x."""
    wide = x if x.dtype == torch.float64 else x.float()
    # A product, so that NaN and infinity that are dropped give NaN, as in PyTorch.
    y.copy_(wide * (keep(seed, x.numel(), p).view(x.shape).to(wide.dtype) * scale))
