"""The PyTorch operators torch.ops.torchstorm.linear_cross_entropy_forward and _backward.

For "mean" and "sum" the forward operator computes the gradients, and autograd saves them until backward multiplies them
with the loss's gradient. For "none" autograd saves the inputs and the rows' log-sum-exps, and there is a backward
operator. Shapes do not depend on data, so torch.compile sees single nodes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from torchstorm.errors import ShapeError, UnsupportedError
from torchstorm.kernels.dtypes import wide
from torchstorm.kernels.linear_cross_entropy import chunks
from torchstorm.kernels.linear_cross_entropy.chunks import Wanted
from torchstorm.kernels.linear_cross_entropy.rows_torch import Options
from torchstorm.kernels.operator import differentiable, fake, operator
from torchstorm.kernels.pytorch_fallback import without_autocast

_Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
_NUM_OPTIONS = 9  # number of the forward operator's arguments after the tensors


@operator("linear_cross_entropy_forward")
def linear_cross_entropy_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    reduction: str,
    wants_dx: bool,
    wants_dweight: bool,
    wants_dbias: bool,
    variant: str,
) -> _Outputs:
    """The loss of x (N, K); for backward lse (N), or dx, dweight, dbias and their factor; the others are empty."""
    if target.device.type == "cpu":
        _check_classes(target, weight.shape[0], ignore_index)
    options = Options(ignore_index=ignore_index, label_smoothing=label_smoothing, softcap=softcap)
    wanted = Wanted(wants_dx, wants_dweight, wants_dbias)
    now = Wanted(False, False, False) if reduction == "none" else wanted
    one = torch.ones((), dtype=wide(x.dtype), device=x.device)
    count = (target != ignore_index).sum().to(one.dtype)
    share = one if reduction == "sum" else 1 / count.clamp(min=1)
    # Gradients of a mean over many tokens underflow in float16, so they are divided by the number of tokens later.
    inner, outer = (one, share) if x.dtype == torch.float16 else (share, one)
    with without_autocast(x), torch.cuda.device_of(x):
        loss, lse, sums = chunks.forward(x, weight, bias, target, options, now, inner, variant)
    if reduction != "none":
        loss, lse = loss.sum() if reduction == "sum" else loss.sum() / count, lse.new_empty(0)
    elif not (any(wanted) and variant == "fused"):
        lse = lse.new_empty(0)
    return loss, lse, sums.dx, sums.dweight.to(_kept(x)), sums.dbias, outer


@fake(linear_cross_entropy_forward)
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    reduction: str,
    wants_dx: bool,
    wants_dweight: bool,
    wants_dbias: bool,
    variant: str,
) -> _Outputs:
    (N, K), V = x.shape, weight.shape[0]
    each, at_once = reduction == "none", reduction != "none"
    keeps_lse = each and variant == "fused" and (wants_dx or wants_dweight or wants_dbias)
    fp32 = wide(x.dtype)
    return (
        x.new_empty((N,) if each else (), dtype=fp32),
        x.new_empty((N,) if keeps_lse else (0,), dtype=fp32),
        x.new_empty((N, K) if wants_dx and at_once else (0,)),
        x.new_empty((V, K) if wants_dweight and at_once else (0,), dtype=_kept(x)),
        x.new_empty((V,) if wants_dbias and at_once else (0,), dtype=fp32),
        x.new_empty((), dtype=fp32),
    )


@operator("linear_cross_entropy_backward")
def linear_cross_entropy_backward(
    dloss: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    lse: Tensor,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    wants_dx: bool,
    wants_dweight: bool,
    wants_dbias: bool,
    variant: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight and dbias from the gradients of each row's loss (N). Those not required are empty."""
    options = Options(ignore_index=ignore_index, label_smoothing=label_smoothing, softcap=softcap)
    wanted = Wanted(wants_dx, wants_dweight, wants_dbias)
    with without_autocast(x), torch.cuda.device_of(x):
        sums = chunks.backward(dloss.contiguous(), x, weight, bias, target, lse, options, wanted, variant)
    return sums.dx, sums.dweight.to(weight.dtype), sums.dbias.to(x.dtype)


@fake(linear_cross_entropy_backward)
def _(
    dloss: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    lse: Tensor,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    wants_dx: bool,
    wants_dweight: bool,
    wants_dbias: bool,
    variant: str,
) -> tuple[Tensor, Tensor, Tensor]:
    (N, K), V = x.shape, weight.shape[0]
    return (
        x.new_empty((N, K) if wants_dx else (0,)),
        x.new_empty((V, K) if wants_dweight else (0,)),
        x.new_empty((V,) if wants_dbias else (0,)),
    )


def _kept(x: Tensor) -> torch.dtype:
    """dtype of dweight until backward: before the division by the number of tokens it overflows in float16."""
    return torch.float32 if x.dtype == torch.float16 else x.dtype


def _check_classes(target: Tensor, V: int, ignore_index: int) -> None:
    wrong = ((target < 0) | (target >= V)) & (target != ignore_index)
    if wrong.any():
        at = int(wrong.nonzero()[0])
        raise ShapeError(
            f"target {at} of {target.shape[0]} is {int(target[at])}, but weight has {V} rows: a target must be 0 to "
            f"{V - 1}, or ignore_index={ignore_index}."
        )


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: _Outputs) -> None:
    x, weight, bias, target, *options = inputs
    _, lse, dx, dweight, dbias, outer = output
    ctx.reduction, ctx.wanted, ctx.variant = options[3], Wanted(*options[4:7]), options[7]
    ctx.options = options[:3]
    ctx.x_dtype, ctx.weight_dtype = x.dtype, weight.dtype
    if ctx.reduction == "none":
        ctx.save_for_backward(x, weight, bias, target, lse)
    else:
        ctx.save_for_backward(dx, dweight, dbias, outer)
    ctx.mark_non_differentiable(lse, dx, dweight, dbias, outer)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dloss: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise UnsupportedError(
            "linear_cross_entropy has no second derivatives, which create_graph=True requires, since its logits are "
            "not saved. variant='naive' has them, and needs memory for all logits."
        )
    if dloss is None:
        return (None,) * (_NUM_OPTIONS + 3)
    if ctx.reduction == "none":
        grads = linear_cross_entropy_backward(dloss, *ctx.saved_tensors, *ctx.options, *ctx.wanted, ctx.variant)
    else:
        *kept, outer = ctx.saved_tensors
        scale = dloss * outer
        dtypes = ctx.x_dtype, ctx.weight_dtype, ctx.x_dtype
        grads = tuple((grad * scale).to(dtype) for grad, dtype in zip(kept, dtypes, strict=True))
    return *(grad if wanted else None for grad, wanted in zip(grads, ctx.wanted, strict=True)), *[None] * _NUM_OPTIONS


differentiable(linear_cross_entropy_forward, _backward, setup_context=_keep_for_backward)


@register_flop_formula(torch.ops.torchstorm.linear_cross_entropy_forward)
def _forward_flops(
    x: torch.Size, weight: torch.Size, bias: Any, target: Any, i: Any, s: Any, c: Any, reduction: str,
    wants_dx: bool, wants_dweight: bool, *_: Any, **__: Any,
) -> int:  # fmt: skip
    """FLOPs of the matrix products."""
    products = 1 if reduction == "none" else 1 + wants_dx + wants_dweight
    return 2 * x[0] * x[1] * weight[0] * products


@register_flop_formula(torch.ops.torchstorm.linear_cross_entropy_backward)
def _backward_flops(
    dloss: Any, x: torch.Size, weight: torch.Size, bias: Any, target: Any, lse: Any, i: Any, s: Any, c: Any,
    wants_dx: bool, wants_dweight: bool, *_: Any, **__: Any,
) -> int:  # fmt: skip
    """FLOPs of the matrix products, with the recomputed logits."""
    return 2 * x[0] * x[1] * weight[0] * (1 + wants_dx + wants_dweight)
