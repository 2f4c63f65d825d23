"""LayerNorm as the models have it: by the kernels of `torchstorm.kernels` where they gain time, else PyTorch's."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchstorm import kernels

LEAST_BYTES = 32 << 20
"""Of x, from which on the kernels are taken: calling them costs the host some 50 us more."""


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
    """LayerNorm over the last dimension, weight and bias of x's dtype or float32. Compilers fuse PyTorch's own."""
    if x.is_cuda and x.nbytes >= LEAST_BYTES and not torch.compiler.is_compiling():  # pragma: gpu
        return kernels.layer_norm(x, weight, bias, eps=eps)
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` over the last dimension, by `layer_norm`."""

    def forward(self, input: Tensor) -> Tensor:
        """Maps (..., C) to (..., C)."""
        return layer_norm(input, self.weight, self.bias, eps=self.eps)
