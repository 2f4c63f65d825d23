"""Dropout from PyTorch's own operators, on any device. It stores the mask and the random words."""

from __future__ import annotations

from torch import Tensor

from torchstorm.kernels.dropout.philox import keep
from torchstorm.kernels.dtypes import wide


def dropout(x: Tensor, seed: Tensor, y: Tensor, p: float, scale: float, variant: str) -> None:
    """Fills y from x."""
    x = x.to(wide(x.dtype))
    # A product, so that a dropped NaN or infinity gives NaN, as in PyTorch.
    y.copy_(x * (keep(seed, x.numel(), p).view(x.shape).to(x.dtype) * scale))
