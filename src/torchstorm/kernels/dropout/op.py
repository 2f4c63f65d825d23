"""The PyTorch operator torch.ops.torchstorm.dropout. It is linear, so its gradient is itself with the same seed.

Saved for backward: the seed, 8 bytes.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from torchstorm.kernels.dropout.philox import scale_of
from torchstorm.kernels.operator import differentiable, fake, operator

_IMPLEMENTATIONS = {"torch": "torchstorm.kernels.dropout.plain", "parallel": "torchstorm.kernels.dropout.parallel"}
_BY_TRITON = "torchstorm.kernels.dropout.dropout_triton"


@operator("dropout")
def dropout_op(x: Tensor, seed: Tensor, p: float, variant: str) -> Tensor:
    """x / (1 - p) for kept elements, x times 0 for the others; contiguous."""
    x = x.contiguous()
    y = x.new_empty(x.shape)
    with torch.cuda.device_of(x):
        import_module(_IMPLEMENTATIONS.get(variant, _BY_TRITON)).dropout(x, seed, y, p, scale_of(p), variant)
    return y


@fake(dropout_op)
def _(x: Tensor, seed: Tensor, p: float, variant: str) -> Tensor:
    return x.new_empty(x.shape)


def _keep_seed(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, seed, ctx.p, ctx.variant = inputs
    ctx.save_for_backward(seed)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
    (seed,) = ctx.saved_tensors
    return dropout_op(dy, seed, ctx.p, ctx.variant), None, None, None


differentiable(dropout_op, _backward, setup_context=_keep_seed)
