"""The PyTorch operator torch.ops.torchstorm.matmul, with any of our variants.

Its backward pass is two products by the same variant, so it is differentiable to any order. Batch sizes are equal here:
`function.py` has broadcast them with strides.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from torchstorm.errors import ConfigError, ShapeError
from torchstorm.kernels.operator import differentiable, fake, operator
from torchstorm.kernels.pytorch_fallback import without_autocast


@operator("matmul")
def matmul_op(a: Tensor, b: Tensor, variant: str) -> Tensor:
    """a (..., M, K) @ b (..., K, N): (..., M, N), contiguous."""
    if a.numel() == 0 or b.numel() == 0:
        return a.new_zeros((*a.shape[:-1], b.shape[-1]))
    with without_autocast(a):
        return (_on_gpu if a.is_cuda else _on_cpu)(a, b, variant)


@fake(matmul_op)
def _(a: Tensor, b: Tensor, variant: str) -> Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[-1]))


def _on_cpu(a: Tensor, b: Tensor, variant: str) -> Tensor:
    c: Tensor = import_module("torchstorm.kernels.matmul.loops_numba").matmul_cpu(variant, a, b)
    return c


def _on_gpu(a: Tensor, b: Tensor, variant: str) -> Tensor:  # pragma: gpu
    from torchstorm.kernels.matmul.launch_cuda import matmul_cuda, whole_chunks
    from torchstorm.kernels.matmul.wgmma import matmul_wgmma, why_not

    if max(*a.shape[-2:], b.shape[-1]) >= 1 << 31:
        raise ShapeError(
            f"a {tuple(a.shape)} @ b {tuple(b.shape)}: variant={variant!r} supports sizes to 2^31 - 1. Use 'cublas'."
        )
    if a.dtype == torch.float32 and variant == "tensor-cores" and torch.get_float32_matmul_precision() == "highest":
        raise ConfigError(
            "variant='tensor-cores' multiplies float32 as tf32, with 10 bits of fraction instead of 23, but "
            "torch.get_float32_matmul_precision() is 'highest'. torch.set_float32_matmul_precision('high') allows it; "
            "'coarsened' and 'cublas' use all bits."
        )
    if variant == "wgmma":
        if not why_not(a, b):
            return matmul_wgmma(a, b)
        variant = "tensor-cores"
    if variant == "cutlass" and not whole_chunks(a, b):
        variant = "tensor-cores"
    return matmul_cuda(variant, a, b)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, str], output: Tensor) -> None:
    a, b, ctx.variant = inputs
    needs_a, needs_b, *_ = ctx.needs_input_grad
    ctx.save_for_backward(a if needs_b else None, b if needs_a else None)


def _backward(ctx: Any, dc: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    a, b = ctx.saved_tensors
    da = None if b is None else matmul_op(dc, b.mT, ctx.variant)
    db = None if a is None else matmul_op(a.mT, dc, ctx.variant)
    return da, db, None


differentiable(matmul_op, _backward, setup_context=_keep)


@register_flop_formula(torch.ops.torchstorm.matmul)
def _flops(a: torch.Size, b: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * a.numel() * b[-1]
