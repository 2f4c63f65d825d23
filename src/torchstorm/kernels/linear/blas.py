"""The linear layer with cuBLAS: with its epilogues if possible, otherwise a product and one kernel; and the gradients.

Possible epilogues: a bias; a bias and ReLU; a bias and tanh GELU in fp16 and bf16 if z is not saved. PyTorch's operator
for the latter does not return z, and its tanh has 20 bits: in fp32 an error of 2e-6, compared with 7e-8 of PyTorch's
GELU. If z is saved, it is the product without bias, and one kernel computes y from it. Backward's kernel adds the bias
again and reads N values; saving z with its bias would write M x N more.
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
    """y, and x W^T without the bias if z is saved."""
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
    """dy act'(kept + bias), and its sums over rows in fp32, by a variant of backward.

    "naive": the gradient, then a program per 128 columns that loops over all rows. "atomic-free": also a program per
    128 rows, whose sums a second stage adds in a fixed order. "warp-reduced": the kernel that has dz in registers
    computes these sums, so dz is not read again.
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
    """a @ b in a dtype that can be wider than theirs, since products are summed in fp32 anyway."""
    return torch.mm(a, b) if dtype == a.dtype else torch.mm(a, b, out_dtype=dtype)
