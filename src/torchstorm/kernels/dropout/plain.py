"""Dropout by PyTorch's own operators, on any device: it writes the mask, and the words that it comes from."""

from __future__ import annotations

from torch import Tensor

from torchstorm.kernels.dropout.philox import keep
from torchstorm.kernels.dtypes import wide


def dropout(x: Tensor, seed: Tensor, y: Tensor, p: float, scale: float, variant: str) -> None:
    """Fills y from x."""
    x = x.to(wide(x.dtype))
    # A product, so that NaN and infinity that are dropped give NaN, as in PyTorch.
    y.copy_(x * (keep(seed, x.numel(), p).view(x.shape).to(x.dtype) * scale))
