"""LayerNorm of the models: with the kernels of `torchstorm.kernels` if they are faster, else PyTorch's."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchstorm import kernels

LEAST_BYTES = 32 << 20
"""Size of x from which the kernels are used: their calls take about 50 us more host time."""


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
    """LayerNorm over the last dimension; weight and bias have x's dtype or float32. Compiled code uses PyTorch's."""
    if x.is_cuda and x.nbytes >= LEAST_BYTES and not torch.compiler.is_compiling():  # pragma: gpu
        return kernels.layer_norm(x, weight, bias, eps=eps)
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` over the last dimension, by `layer_norm`."""

    def forward(self, input: Tensor) -> Tensor:
        """Maps (..., C) to (..., C)."""
        return layer_norm(input, self.weight, self.bias, eps=self.eps)
