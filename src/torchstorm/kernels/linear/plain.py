"""The linear layer in plain PyTorch: the definition, the CPU implementation, and second derivatives."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """act(x W^T + b) under PyTorch's autograd; an activation of "" is none."""
    return activate(F.linear(x, weight, bias), activation)


def activate(z: Tensor, activation: str) -> Tensor:
    if activation == "relu":
        return F.relu(z)
    if activation == "silu":
        return F.silu(z)
    return F.gelu(z, approximate="tanh" if activation == "gelu_tanh" else "none") if activation else z


def activation_gradient(dy: Tensor, kept: Tensor, activation: str) -> Tensor:
    """dy act'(z), from z; from y or z for ReLU."""
    if not activation:
        return dy
    dz: Tensor
    if activation == "relu":
        dz = torch.ops.aten.threshold_backward(dy, kept, 0)
    elif activation == "silu" and (dy.requires_grad or kept.requires_grad):
        share = kept.sigmoid()  # PyTorch's operator is not differentiable
        dz = dy * share * (1 + kept * (1 - share))
    elif activation == "silu":
        dz = torch.ops.aten.silu_backward(dy, kept)
    else:
        dz = torch.ops.aten.gelu_backward(dy, kept, approximate="tanh" if activation == "gelu_tanh" else "none")
    return dz


def keeps(activation: str) -> str:
    """What backward needs besides the inputs: "y", "z" or "" (nothing)."""
    return "y" if activation == "relu" else "z" if activation else ""


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """y (M, N), and z if it is saved."""
    z = F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    if activation == "relu":
        return z.relu_(), None
    return activate(z, activation), z if keep and activation else None


def column_sums(dz: Tensor, dtype: torch.dtype) -> Tensor:
    """The bias's gradient, in a dtype that can be wider than dz's."""
    return dz.sum(0, dtype=dtype)


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b in a dtype that can be wider than theirs."""
    return torch.mm(a.to(dtype), b.to(dtype))


def differentiable(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight and dbias computed by PyTorch from the inputs alone, for second derivatives."""
    dtype = x.dtype
    w = weight.to(dtype)
    z = F.linear(x, w, None if bias is None else bias.to(dtype)) if activation else dy
    dz = activation_gradient(dy, z, activation)
    return dz @ w, (dz.mT @ x).to(weight.dtype), dz.sum(0).to(weight.dtype)
