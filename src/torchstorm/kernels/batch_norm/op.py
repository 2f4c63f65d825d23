"""The PyTorch operators torch.ops.torchstorm.batch_norm_act and its gradient.

They change nothing in place: they return the batch's mean and variance, with which `function` updates the running
statistics. Saved for backward: x, weight, bias, and mean and rstd of each channel. The input of the activation is
recomputed. The gradient is differentiable through the definition.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from torchstorm.kernels.batch_norm.plain import reference
from torchstorm.kernels.dtypes import wide
from torchstorm.kernels.operator import differentiable, fake, operator
from torchstorm.kernels.second_order import own_views

_IMPLEMENTATIONS = {
    "torch": "torchstorm.kernels.batch_norm.plain",
    "parallel": "torchstorm.kernels.batch_norm.parallel",
}
_BY_TRITON = "torchstorm.kernels.batch_norm.launch_triton"


def _implementation(variant: str) -> Any:
    return import_module(_IMPLEMENTATIONS.get(variant, _BY_TRITON))


def _per_channel(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[1],), dtype=wide(x.dtype))


@operator("batch_norm_act")
def batch_norm_act_op(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    given_mean: Tensor | None,
    given_var: Tensor | None,
    eps: float,
    activation: str,
    variant: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns y, and mean, rstd and biased variance of each channel: the given ones, else those of the batch."""
    implementation = _implementation(variant)
    y = torch.empty_like(x)
    mean, var, rstd = (_per_channel(x) for _ in range(3))
    if given_mean is None and x.numel():
        with torch.cuda.device_of(x):
            implementation.statistics(x, mean, var, rstd, eps, variant)
    else:
        for own, given in ((mean, given_mean), (var, given_var)):
            if given is None:
                own.zero_()
            else:
                own.copy_(given)
        torch.rsqrt(var + eps, out=rstd)
    if x.numel():
        with torch.cuda.device_of(x):
            implementation.normalise(x, weight, bias, mean, rstd, activation, y, variant)
    return y, mean, rstd, var


@fake(batch_norm_act_op)
def _(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    given_mean: Tensor | None,
    given_var: Tensor | None,
    eps: float,
    activation: str,
    variant: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.empty_like(x), _per_channel(x), _per_channel(x), _per_channel(x)


@operator("batch_norm_act_backward")
def batch_norm_act_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    batch: bool,
    eps: float,
    activation: str,
    variant: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias, the last two in the statistics' dtype. `batch`: mean and rstd are x's."""
    dx, d_weight, d_bias = torch.empty_like(x), _per_channel(x), _per_channel(x)
    if x.numel():
        with torch.cuda.device_of(x):
            _implementation(variant).backward(
                dy, x, weight, bias, mean, rstd, batch, activation, dx, d_weight, d_bias, variant
            )
    else:
        d_weight.zero_()
        d_bias.zero_()
    return dx, d_weight, d_bias


@fake(batch_norm_act_backward)
def _(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    batch: bool,
    eps: float,
    activation: str,
    variant: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), _per_channel(x), _per_channel(x)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, given_mean, _, ctx.eps, ctx.activation, ctx.variant = inputs
    _, mean, rstd, var = output
    ctx.batch = given_mean is None
    ctx.save_for_backward(x, weight, bias, mean, rstd)
    ctx.mark_non_differentiable(mean, rstd, var)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    x, weight, bias, mean, rstd = ctx.saved_tensors
    if dy is None:
        return (None,) * 8
    dx, d_weight, d_bias = batch_norm_act_backward(
        dy, x, weight, bias, mean, rstd, ctx.batch, ctx.eps, ctx.activation, ctx.variant
    )
    to_weight = None if weight is None else d_weight.to(weight.dtype)
    to_bias = None if bias is None else d_bias.to(bias.dtype)
    return dx, to_weight, to_bias, *(None,) * 5


def _keep_for_second_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    dy, x, weight, bias, mean, rstd, ctx.batch, ctx.eps, ctx.activation, _ = inputs
    ctx.save_for_backward(dy, x, weight, bias, mean, rstd)
    ctx.set_materialize_grads(False)


def _second_backward(ctx: Any, *grads_of_grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """Differentiates the definition's gradient; mean and rstd of a batch are functions of x there."""
    *tensors, mean, rstd = ctx.saved_tensors
    further = torch.is_grad_enabled()
    with torch.enable_grad():
        own = own_views(tensors)
        as_wide: list[Any] = [None if each is None else each.to(mean.dtype) for each in own]
        dy, x, weight, bias = as_wide
        y = reference(x, weight, bias, None if ctx.batch else (mean, rstd), ctx.eps, ctx.activation)
        inputs = [x, weight, bias]
        given = [each for each in inputs if each is not None]
        first = iter(torch.autograd.grad(y, given, dy, create_graph=True, materialize_grads=True))
        reached = [
            (grad, further_grad.to(grad.dtype))
            for grad, further_grad in (
                (next(first), each) for each, present in zip(grads_of_grads, inputs, strict=True) if present is not None
            )
            if further_grad is not None and grad.requires_grad
        ]
        second = iter(
            torch.autograd.grad(
                [grad for grad, _ in reached],
                [each for each in own if each is not None],
                [further_grad for _, further_grad in reached],
                create_graph=further,
                materialize_grads=True,
            )
        )
    return *(None if each is None else next(second) for each in own), *(None,) * 6


differentiable(batch_norm_act_op, _backward, setup_context=_keep)
differentiable(batch_norm_act_backward, _second_backward, setup_context=_keep_for_second_backward)
