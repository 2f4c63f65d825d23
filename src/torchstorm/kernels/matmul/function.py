"""Matrix product: c = a @ b, by any variant of the ladder in `ladder.py`.

Shapes: a (..., M, K), b (..., K, N), c (..., M, N); batches broadcast. Dtypes: fp32, fp16, bf16, and float64 where it
says so; sums in fp32, or float64 for float64. Work: 2 M N K operations a pair. Traffic: reads a and b, writes c.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from torchstorm.errors import ShapeError
from torchstorm.kernels.directly import directly
from torchstorm.kernels.dtypes import FLOATS
from torchstorm.kernels.matmul.ladder import MATMUL
from torchstorm.kernels.matmul.op import matmul_op
from torchstorm.kernels.matmul.wgmma import is_best_for
from torchstorm.kernels.variants import choose

PYTORCHS = ("torch", "cublas")


def matmul_reference(a: Tensor, b: Tensor) -> Tensor:
    """The definition, in whatever dtype it is given: c_mn = sum over k of a_mk b_kn."""
    return (a.unsqueeze(-1) * b.unsqueeze(-3)).sum(-2)


def matmul(a: Tensor, b: Tensor, *, variant: str = "auto") -> Tensor:
    """a @ b as torch.matmul has it, by the variant that is named. Deterministic; gradients of any order.

    Args:
        a: (..., M, K), or (K), in float32, float16, bfloat16 or float64 (the latter on a GPU by "cublas" alone). Any
            strides; nothing is copied for them, but for a 3-D or larger `a` whose rows meet one matrix b with gradient.
        b: (..., K, N), or (K), of the same dtype. Batches of both broadcast.
        variant: one of `variants("matmul")` that runs on this device, or "auto": PyTorch's own, cuBLAS on a GPU, but
            wgmma for large matrices of halves on Hopper.

    Returns:
        (..., M, N) in the same dtype, without the dimension that a (K) has not.

    Raises:
        ShapeError: sizes, dtypes or devices do not fit.
        ConfigError: there is no such variant, or it would round float32 to tf32 where PyTorch is told not to.
        DeviceError: the variant does not run on this device, in this dtype, or without something that is not installed.
        KernelError: a GPU's compiler or driver refuses.
    """
    _check(a, b)
    chosen = choose("matmul", MATMUL, variant, a, auto=lambda: _auto(a, b))
    if chosen in PYTORCHS:
        return directly(torch.matmul, a, b)
    if a.dim() == 1:
        return matmul(a.unsqueeze(0), b, variant=chosen).squeeze(-2 if b.dim() > 1 else 0)
    if b.dim() == 1:
        return matmul(a, b.unsqueeze(1), variant=chosen).squeeze(-1)
    if a.dim() > 2 and b.dim() == 2 and (b.requires_grad or _rows_are_one_matrix(a)):
        # As one product: b's gradient is then one sum over all rows, and not a sum of rounded ones.
        c: Tensor = matmul_op(a.flatten(0, -2), b, chosen)
        return c.view(*a.shape[:-1], b.shape[-1])
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    c = matmul_op(a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:]), chosen)
    return c


def _auto(a: Tensor, b: Tensor) -> str:
    if not a.is_cuda:
        return "torch"
    return "wgmma" if a.dim() == b.dim() == 2 and is_best_for(a, b) else "cublas"  # pragma: gpu


def _check(a: Tensor, b: Tensor) -> None:
    if a.dtype not in FLOATS or b.dtype != a.dtype:
        raise ShapeError(
            f"a is {a.dtype}, b {b.dtype}: both must be of one dtype, float32, float16, bfloat16 or float64. Convert "
            "them with .to(dtype)."
        )
    if a.device != b.device:
        raise ShapeError(f"a is on {a.device}, b on {b.device}: move them to one device.")
    if a.dim() == 0 or b.dim() == 0:
        raise ShapeError(f"{_shapes(a, b)}: both need at least one dimension. For numbers, a * b.")
    K = b.shape[-2] if b.dim() > 1 else b.shape[0]
    if a.shape[-1] != K:
        raise ShapeError(
            f"{_shapes(a, b)}: a has rows of {a.shape[-1]}, but b has columns of {K}. Of (N, K), b.mT makes (K, N), "
            "for free."
        )
    if a.dim() > 2 and b.dim() > 2:
        for x, y in zip(reversed(a.shape[:-2]), reversed(b.shape[:-2]), strict=False):
            if x != y and x != 1 and y != 1:
                raise ShapeError(
                    f"{_shapes(a, b)}: batches of {x} and {y} cannot be broadcast; they must be equal, or one be 1."
                )


def _shapes(a: Tensor, b: Tensor) -> str:
    return f"a {tuple(a.shape)} @ b {tuple(b.shape)}"


def _rows_are_one_matrix(a: Tensor) -> bool:
    """Whether all dimensions but the last can be seen as one."""
    steps = [(size, stride) for size, stride in zip(a.shape[:-1], a.stride()[:-1], strict=True) if size != 1]
    return all(stride == inner_size * inner for (_, stride), (inner_size, inner) in itertools.pairwise(steps))
