"""The PyTorch operators torch.ops.torchstorm.norm_forward and norm_backward, for LayerNorm (centred) and RMSNorm.

"auto" is resolved inside the operator, where sizes are numbers, so torch.compile does not recompile for other sizes.
The backward operator is differentiable through PyTorch's own operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchstorm.kernels.dtypes import wide
from torchstorm.kernels.norms.reference import gradients, norm_gradients, statistics
from torchstorm.kernels.operator import differentiable, fake, operator
from torchstorm.kernels.pytorch_fallback import without_autocast
from torchstorm.kernels.second_order import own_views
from torchstorm.kernels.variants import has_triton_for


@operator("norm_forward")
def norm_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool, keep: bool, variant: str
) -> tuple[Tensor, Tensor, Tensor]:
    """y (..., N) in x's dtype; mean (M,) and rstd (M,) in fp32 or fp64 for backward, empty if not `keep`.

    The mean is also empty unless centred.
    """
    chosen = _resolve(variant, x, centred, backward=False)
    with without_autocast(x):
        if chosen == "torch" or not x.numel():
            y, mean, rstd = _torch_forward(x, weight, bias, eps, centred)
        elif chosen == "parallel":
            from torchstorm.kernels.norms import parallel_numba

            y, mean, rstd = parallel_numba.forward(x, weight, bias, eps, centred)
        else:
            from torchstorm.kernels.norms import launch_triton

            with torch.cuda.device_of(x):
                y, mean, rstd = launch_triton.forward(x, weight, bias, eps, centred, chosen, keep=keep)
    return (y, mean, rstd) if keep else (y, wide_empty(x, 0), wide_empty(x, 0))


@fake(norm_forward)
def _(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool, keep: bool, variant: str
) -> tuple[Tensor, Tensor, Tensor]:
    M = num_rows(x) if keep else 0
    return x.new_empty(x.shape), wide_empty(x, M if centred else 0), wide_empty(x, M)


@operator("norm_backward")
def norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    eps: float,
    centred: bool,
    needs_weight: bool,
    needs_bias: bool,
    dtype: torch.dtype,
    variant: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx (..., N) in x's dtype, dweight and dbias (N,) in `dtype`. Those not required are empty."""
    chosen = _resolve(variant, x, centred, backward=True)
    needs_weight = needs_weight and weight is not None
    with without_autocast(x):
        given = dy, x, weight, mean, rstd, centred, needs_weight, needs_bias, dtype
        if chosen == "torch" or not x.numel():
            return _torch_backward(*given)
        if chosen == "parallel":
            from torchstorm.kernels.norms import parallel_numba

            return parallel_numba.backward(*given)
        from torchstorm.kernels.norms import launch_triton

        with torch.cuda.device_of(x):
            return launch_triton.backward(*given, chosen)


@fake(norm_backward)
def _(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    eps: float,
    centred: bool,
    needs_weight: bool,
    needs_bias: bool,
    dtype: torch.dtype,
    variant: str,
) -> tuple[Tensor, Tensor, Tensor]:
    N = x.shape[-1]
    has_dweight = needs_weight and weight is not None
    dweight, dbias = (x.new_empty((N if needed else 0,), dtype=dtype) for needed in (has_dweight, needs_bias))
    return x.new_empty(x.shape), dweight, dbias


def num_rows(x: Tensor) -> int:
    """Number of rows: the product of all leading dimensions."""
    M = 1
    for size in x.shape[:-1]:
        M = M * size
    return M


def wide_empty(x: Tensor, size: int) -> Tensor:
    """An uninitialized vector in fp32, or fp64 for fp64."""
    return x.new_empty((size,), dtype=wide(x.dtype))


def _resolve(variant: str, x: Tensor, centred: bool, *, backward: bool) -> str:
    if variant != "auto":
        return variant
    if not has_triton_for(x):
        return "torch"
    from torchstorm.kernels.norms import launch_triton  # pragma: gpu

    return launch_triton.fastest(x, centred=centred, backward=backward)  # pragma: gpu


def _torch_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    M, N = num_rows(x), x.shape[-1]
    if not x.numel():
        return x.new_empty(x.shape), wide_empty(x, M if centred else 0).fill_(0), wide_empty(x, M).fill_(0)
    if not centred:
        x_hat, _, rstd = statistics(x.to(wide(x.dtype)), eps, centred=False)
        y = x_hat if weight is None else x_hat * weight
        return y.to(x.dtype).contiguous(), wide_empty(x, 0), rstd.reshape(M)
    # On a CPU PyTorch rounds means to fp16 or bf16, and on a GPU it does not support an fp32 weight with such an x.
    inner = _inner_dtype(x, weight, bias)
    weight, bias = (None if p is None else p.to(inner) for p in (weight, bias))
    y, mean, rstd = torch.native_layer_norm(x.to(inner), [N], weight, bias, eps)
    return y.to(x.dtype).contiguous(), mean.reshape(M), rstd.reshape(M)


def _torch_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    centred: bool,
    needs_weight: bool,
    needs_bias: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    N = x.shape[-1]
    if not x.numel():
        dweight, dbias = (x.new_zeros((N if needed else 0,), dtype=dtype) for needed in (needs_weight, needs_bias))
        return x.new_empty(x.shape), dweight, dbias
    if centred and weight is not None:
        inner = _inner_dtype(x, weight, None)
        like_rows = (*x.shape[:-1], 1)
        dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
            dy.to(inner), x.to(inner), [N], mean.reshape(like_rows), rstd.reshape(like_rows), weight.to(inner),
            weight.to(inner), [True, needs_weight, needs_bias],
        )  # fmt: skip
    else:
        dy_MN, x_MN = (t.reshape(-1, N).to(wide(x.dtype)) for t in (dy, x))
        left = x_MN - mean[:, None] if centred else x_MN
        g = dy_MN if weight is None else dy_MN * weight
        dx, dweight, dbias = gradients(dy_MN, g, left * rstd[:, None], rstd[:, None], centred=centred)
    dweight = dweight.to(dtype) if needs_weight else x.new_empty((0,), dtype=dtype)
    dbias = dbias.to(dtype) if needs_bias else x.new_empty((0,), dtype=dtype)
    return dx.reshape(x.shape).to(x.dtype).contiguous(), dweight, dbias


def _inner_dtype(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> torch.dtype:
    alike = x.is_cuda and all(p is None or p.dtype == x.dtype for p in (weight, bias))
    return x.dtype if alike else wide(x.dtype)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, ctx.eps, ctx.centred, _, ctx.variant = inputs
    _, mean, rstd = output
    ctx.save_for_backward(x, weight, mean, rstd)
    params = [p for p in (weight, bias) if p is not None]
    ctx.dtype = params[0].dtype if params else x.dtype
    ctx.mark_non_differentiable(mean, rstd)


def _backward(ctx: Any, dy: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight, mean, rstd = ctx.saved_tensors
    _, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    options = ctx.eps, ctx.centred, needs_weight, needs_bias, ctx.dtype, ctx.variant
    dx, dweight, dbias = norm_backward(dy, x, weight, mean, rstd, *options)
    return dx, dweight if needs_weight else None, dbias if needs_bias else None, *[None] * 4


def _keep_for_second_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    dy, x, weight, _, _, ctx.eps, ctx.centred, ctx.needs_weight, ctx.needs_bias, *_ = inputs
    ctx.save_for_backward(dy, x, weight)
    ctx.set_materialize_grads(False)


def _second_backward(
    ctx: Any, ddx: Tensor | None, ddweight: Tensor | None, ddbias: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Differentiates `norm_backward`, with statistics computed under autograd."""
    tensors = ctx.saved_tensors
    further = torch.is_grad_enabled()
    with torch.enable_grad(), without_autocast(tensors[0]):
        own = own_views(tensors)
        dy, x, weight = own
        first = norm_gradients(dy, x, weight, ctx.eps, centred=ctx.centred)
        has_weight = ctx.needs_weight and weight is not None
        given = ddx, ddweight if has_weight else None, ddbias if ctx.needs_bias else None
        wanted = [(x, dx.to(x.dtype)) for x, dx in zip(first, given, strict=True) if dx is not None]
        found = iter(
            torch.autograd.grad(
                [x for x, _ in wanted],
                [t for t in own if t is not None],
                [dx for _, dx in wanted],
                create_graph=further,
                materialize_grads=True,
            )
        )
    return *(None if t is None else next(found) for t in own), *[None] * 8


differentiable(norm_forward, _backward, setup_context=_keep_for_backward)
differentiable(norm_backward, _second_backward, setup_context=_keep_for_second_backward)
