"""The layer by cuBLAS, with its epilogues where they fit, and by a product and one kernel where not; and its gradients.

What fits: a bias; a bias and ReLU; a bias and GELU's tanh form in fp16 and bf16 where z is not kept, as PyTorch's
operator for it gives no z, and as its tanh is good for 20 bits, in fp32 an error of 2e-6 where PyTorch's own GELU has
7e-8. Where z is kept it is the plain product, and bias and activation are one kernel on the way to y: backward's kernel
adds the bias again, which is N numbers, where z with its bias would be M x N more to write.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchstorm.kernels.dtypes import HALVES
from torchstorm.kernels.linear import pointwise_triton as pointwise
from torchstorm.kernels.linear.plain import keeps


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """y, and x W^T without the bias where z is kept."""
    w_KN = weight.t()
    if bias is not None:
        if not activation:
            return torch.addmm(bias, x, w_KN), None
        if activation == "relu" or (activation == "gelu_tanh" and not keep and x.dtype in HALVES):
            # On a GPU this GELU is the tanh form.
            return torch.ops.aten._addmm_activation(bias, x, w_KN, use_gelu=activation != "relu"), None
    z = torch.mm(x, w_KN)
    if not activation and bias is None:
        return z, None
    keep = keep and keeps(activation) == "z"
    y = pointwise.activate(z, bias, activation, torch.empty_like(z) if keep else z)
    return y, z if keep else None


def dz_and_dbias(
    dy: Tensor, kept: Tensor, bias: Tensor | None, activation: str, rung: str, wants_dbias: bool
) -> tuple[Tensor, Tensor | None]:
    """dy act'(kept + bias), and its sums over rows, in fp32, by a rung of the backward ladder.

    "naive": the gradient, then a program for every 128 columns which walks down all rows. "atomic-free": programs for
    every 128 rows too, whose sums a second stage adds in a fixed order. "warp-reduced": those sums by the kernel that
    has dz in registers, so that it is not read again.
    """
    dy = dy.contiguous()
    if activation:
        in_passing = wants_dbias and rung == "warp-reduced"
        dz, sums = pointwise.gradient(dy, kept, bias, activation, sums=in_passing)
    else:
        dz, sums = dy, None
    if not wants_dbias:
        return dz, None
    if sums is None:
        sums = dz if rung == "naive" else pointwise.column_sums(dz, pointwise.SUM_ROWS)
    return dz, pointwise.column_sums(sums, sums.shape[0])[0]


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:  # pragma: gpu
    """a b in a dtype that may be wider than theirs: the products' sums are in fp32 anyway."""
    return torch.mm(a, b) if dtype == a.dtype else torch.mm(a, b, out_dtype=dtype)
