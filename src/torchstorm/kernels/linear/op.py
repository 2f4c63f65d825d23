"""The PyTorch operators torch.ops.torchstorm.linear_forward and linear_backward.

Saved for backward: x, the weight, with an activation the bias, and y for ReLU, z for GELU and SiLU. The backward
operator is differentiable through PyTorch's own operators, from x, weight and bias alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from torchstorm.kernels.linear import plain
from torchstorm.kernels.linear.plain import keeps
from torchstorm.kernels.operator import differentiable, fake, operator
from torchstorm.kernels.pytorch_fallback import without_autocast
from torchstorm.kernels.second_order import own_views

BACKWARD_RUNGS = {
    "naive": "naive", "fused": "atomic-free", "persistent": "warp-reduced", "mixed": "warp-reduced",
    "cublaslt": "warp-reduced",
}  # fmt: skip
"""The algorithm for dz and dbias of each variant; "wgmma" has its own."""
_WITHOUT_BIAS = ("mixed", "cublaslt")  # variants that save z without the bias


@operator("linear_forward")
def linear_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, keep: bool, variant: str
) -> tuple[Tensor, Tensor]:
    """y (M, N) from x (M, K) and weight (N, K), and z if it is saved, else an empty tensor."""
    with without_autocast(x), torch.cuda.device_of(x):
        if _by_pytorch(x, weight):
            y, z = plain.forward(x, weight, bias, activation, keep)
        else:  # pragma: gpu
            # The kernels need a contiguous bias.
            bias = None if bias is None else bias.to(x.dtype).contiguous()
            y, z = _on_gpu(x, weight.to(x.dtype), bias, activation, keep, variant)
    return y, x.new_empty(0) if z is None else z


def _by_pytorch(x: Tensor, weight: Tensor) -> bool:
    return x.device.type == "cpu" or not (x.numel() and weight.numel())


def _on_gpu(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, keep: bool, variant: str
) -> tuple[Tensor, Tensor | None]:  # pragma: gpu
    # Triton's modules are imported on use, since Triton is optional.
    if variant in ("naive", "fused"):
        from torchstorm.kernels.linear import gemm_triton

        by = gemm_triton.naive_forward if variant == "naive" else gemm_triton.fused_forward
        return by(x, weight, bias, activation, keep)
    if variant == "persistent":
        from torchstorm.kernels.linear import persistent_triton

        return persistent_triton.forward(x, weight, bias, activation, keep)
    if variant == "wgmma":
        from torchstorm.kernels.linear import wgmma

        return wgmma.forward(x, weight, bias, activation, keep)
    from torchstorm.kernels.linear import blas

    return blas.forward(x, weight, bias, activation, keep)


@fake(linear_forward)
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, keep: bool, variant: str
) -> tuple[Tensor, Tensor]:
    size = x.shape[0], weight.shape[0]
    return x.new_empty(size), x.new_empty(size if keep and keeps(activation) == "z" else (0,))


@operator("linear_backward")
def linear_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    kept: Tensor,
    activation: str,
    wants_dx: bool,
    wants_dweight: bool,
    wants_dbias: bool,
    variant: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight and dbias; those not required are empty. kept is y or z, see `keeps`."""
    wants = wants_dx, wants_dweight, wants_dbias
    with without_autocast(x), torch.cuda.device_of(x):
        if _by_pytorch(x, weight):
            dz = plain.activation_gradient(dy, kept, activation)
            dx = plain.product(dz, weight.to(x.dtype), x.dtype) if wants_dx else None
            dweight = plain.product(dz.t(), x, weight.dtype) if wants_dweight else None
            dbias = plain.column_sums(dz, weight.dtype) if wants_dbias else None
        elif variant == "wgmma":  # pragma: gpu
            from torchstorm.kernels.linear import wgmma

            dx, dweight, dbias = wgmma.backward(dy, x, weight, kept, activation, wants)
        else:  # pragma: gpu
            from torchstorm.kernels.linear import blas

            lacking = bias if keeps(activation) == "z" and variant in _WITHOUT_BIAS else None
            lacking = None if lacking is None else lacking.contiguous()
            dz, dbias = blas.dz_and_dbias(dy, kept, lacking, activation, BACKWARD_RUNGS[variant], wants_dbias)
            dx = blas.product(dz, weight.to(x.dtype), x.dtype) if wants_dx else None
            dweight = blas.product(dz.t(), x, weight.dtype) if wants_dweight else None
    return (
        x.new_empty(0) if dx is None else dx,
        weight.new_empty(0) if dweight is None else dweight,
        weight.new_empty(0) if dbias is None else dbias.to(weight.dtype),
    )


@fake(linear_backward)
def _(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    kept: Tensor,
    activation: str,
    wants_dx: bool,
    wants_dweight: bool,
    wants_dbias: bool,
    variant: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape if wants_dx else (0,)),
        weight.new_empty(weight.shape if wants_dweight else (0,)),
        weight.new_empty((weight.shape[0],) if wants_dbias else (0,)),
    )


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, activation, _, variant = inputs
    y, z = output
    kept = y if keeps(activation) == "y" else z
    ctx.save_for_backward(x, weight, bias if activation else None, kept)
    ctx.activation, ctx.variant = activation, variant
    ctx.mark_non_differentiable(z)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 6
    wants = ctx.needs_input_grad[:3]
    grads = linear_backward(dy, *ctx.saved_tensors, ctx.activation, *wants, ctx.variant)
    return *(grad if wanted else None for grad, wanted in zip(grads, wants, strict=True)), None, None, None


def _keep_for_second_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    # The tensor saved by forward is a function of the inputs, and is recomputed.
    ctx.save_for_backward(*inputs[:4])
    ctx.activation = inputs[5]
    ctx.set_materialize_grads(False)


def _second_backward(ctx: Any, *grads_of_grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """Differentiates `linear_backward` through PyTorch's operators."""
    further = torch.is_grad_enabled()
    with torch.enable_grad():
        own = own_views(ctx.saved_tensors)
        dy, x, weight, bias = own
        first = plain.differentiable(dy, x, weight, bias, ctx.activation)
        wanted = [(t, dt) for t, dt in zip(first, grads_of_grads, strict=True) if dt is not None]
        inputs = [t for t in own if t is not None]
        second = iter(
            torch.autograd.grad(
                [t for t, _ in wanted],
                inputs,
                [dt for _, dt in wanted],
                create_graph=further,
                allow_unused=True,
            )
        )
    return *(None if t is None else next(second) for t in own), *[None] * 6


differentiable(linear_forward, _backward, setup_context=_keep_for_backward)
differentiable(linear_backward, _second_backward, setup_context=_keep_for_second_backward)


@register_flop_formula(torch.ops.torchstorm.linear_forward)
def _forward_flops(x: torch.Size, weight: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * x[0] * x[1] * weight[0]


@register_flop_formula(torch.ops.torchstorm.linear_backward)
def _backward_flops(
    dy: Any, x: torch.Size, weight: torch.Size, bias: Any, kept: Any, activation: str, wants_dx: bool,
    wants_dweight: bool, *_: Any, **__: Any,
) -> int:  # fmt: skip
    return 2 * x[0] * x[1] * weight[0] * (wants_dx + wants_dweight)
