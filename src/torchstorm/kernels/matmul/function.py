"""Matrix product: c = a @ b, with any variant of `ladder.py`.

Shapes: a (..., M, K), b (..., K, N), c (..., M, N); batches broadcast. Dtypes: fp32, fp16, bf16, and float64 in some
variants; sums in fp32, or float64 for float64. Operations: 2 M N K per pair. Memory traffic: reads a and b, writes c.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from torchstorm.errors import ShapeError
from torchstorm.kernels.dtypes import FLOATS
from torchstorm.kernels.matmul.ladder import MATMUL
from torchstorm.kernels.matmul.op import matmul_op
from torchstorm.kernels.matmul.wgmma import is_best_for
from torchstorm.kernels.pytorch_fallback import call_pytorch
from torchstorm.kernels.variants import choose

PYTORCHS = ("torch", "cublas")


def matmul_reference(a: Tensor, b: Tensor) -> Tensor:
    """The definition, in the dtype of its inputs: c_mn = sum over k of a_mk b_kn."""
    return (a.unsqueeze(-1) * b.unsqueeze(-3)).sum(-2)


def matmul(a: Tensor, b: Tensor, *, variant: str = "auto") -> Tensor:
    """a @ b as in torch.matmul, computed by a given variant. Deterministic; differentiable to any order.

    Args:
        a: (..., M, K), or (K), in float32, float16, bfloat16 or float64 (on a GPU float64 only with "cublas"). Any
            strides, without copies, except for an `a` with batch dimensions and one matrix b that requires a gradient.
        b: (..., K, N), or (K), of the same dtype. Batches of both broadcast.
        variant: one of `variants("matmul")` for this device, or "auto": PyTorch's function (cuBLAS on a GPU), or wgmma
            for large fp16 and bf16 matrices on Hopper.

    Returns:
        (..., M, N) in the same dtype; without the dimension M or N if `a` or `b` is (K).

    Raises:
        ShapeError: sizes, dtypes or devices do not match.
        ConfigError: the variant does not exist, or needs tf32 although PyTorch's settings forbid it.
        DeviceError: the variant does not support this device or dtype, or needs a package that is not installed.
        KernelError: the compiler or the driver of the GPU fails.
    """
    _check(a, b)
    chosen = choose("matmul", MATMUL, variant, a, auto=lambda: _auto(a, b))
    if chosen in PYTORCHS:
        return call_pytorch(torch.matmul, a, b)
    if a.dim() == 1:
        return matmul(a.unsqueeze(0), b, variant=chosen).squeeze(-2 if b.dim() > 1 else 0)
    if b.dim() == 1:
        return matmul(a, b.unsqueeze(1), variant=chosen).squeeze(-1)
    if a.dim() > 2 and b.dim() == 2 and (b.requires_grad or _rows_are_one_matrix(a)):
        # As one product, so that b's gradient is one sum over all rows instead of a sum of rounded sums.
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
            f"a is {a.dtype}, b {b.dtype}: both must have the same dtype, float32, float16, bfloat16 or float64. "
            "Convert them with .to(dtype)."
        )
    if a.device != b.device:
        raise ShapeError(f"a is on {a.device}, b on {b.device}: move them to one device.")
    if a.dim() == 0 or b.dim() == 0:
        raise ShapeError(f"{_shapes(a, b)}: both need at least one dimension. For scalars, use a * b.")
    K = b.shape[-2] if b.dim() > 1 else b.shape[0]
    if a.shape[-1] != K:
        raise ShapeError(
            f"{_shapes(a, b)}: a has rows of {a.shape[-1]}, but b has columns of {K}. For b (N, K), pass b.mT, "
            "which copies nothing."
        )
    if a.dim() > 2 and b.dim() > 2:
        for x, y in zip(reversed(a.shape[:-2]), reversed(b.shape[:-2]), strict=False):
            if x != y and x != 1 and y != 1:
                raise ShapeError(
                    f"{_shapes(a, b)}: batches of {x} and {y} do not broadcast; they must be equal, or one must be 1."
                )


def _shapes(a: Tensor, b: Tensor) -> str:
    return f"a {tuple(a.shape)} @ b {tuple(b.shape)}"


def _rows_are_one_matrix(a: Tensor) -> bool:
    """Whether all dimensions but the last can be merged without a copy."""
    steps = [(size, stride) for size, stride in zip(a.shape[:-1], a.stride()[:-1], strict=True) if size != 1]
    return all(stride == inner_size * inner for (_, stride), (inner_size, inner) in itertools.pairwise(steps))
