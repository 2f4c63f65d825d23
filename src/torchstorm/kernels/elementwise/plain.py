"""The elementwise operations from PyTorch's own operators."""

from __future__ import annotations

import torch
from torch import Tensor

from torchstorm.kernels.dtypes import wide
from torchstorm.kernels.elementwise.operations import BY_NAME


def unary(name: str, x: Tensor, y: Tensor, variant: str) -> None:
    """Fills y."""
    BY_NAME[name].forward(x, y)


def unary_backward(name: str, dy: Tensor, x: Tensor, dx: Tensor, variant: str) -> None:
    """Fills dx."""
    BY_NAME[name].backward(dy, x, dx)


def binary(name: str, a: Tensor, b: Tensor, y: Tensor, variant: str) -> None:
    """Fills y, which has the broadcast shape of a and b."""
    torch.add(a, b, out=y) if name == "add" else torch.mul(a, b, out=y)


def mul_backward(dy: Tensor, a: Tensor, b: Tensor, da: Tensor, db: Tensor, variant: str) -> None:
    """Fills da and db. b's shape may broadcast to a's."""
    torch.mul(dy, b, out=da)
    if a.shape == b.shape:
        torch.mul(dy, a, out=db)
    else:
        product_sum(dy, a, db)


def product_sum(a: Tensor, b: Tensor | None, out: Tensor) -> None:
    """Fills out with a, or a * b, summed in fp32 over the dimensions that out lacks or in which it has size 1."""
    a = a.to(wide(a.dtype))
    out.copy_((a if b is None else a * b).sum_to_size(out.shape))
