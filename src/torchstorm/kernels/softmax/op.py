"""The PyTorch operators torch.ops.torchstorm.softmax_forward and softmax_backward, for softmax and log-softmax.

"auto" is resolved inside the operator, where sizes are numbers, so torch.compile does not recompile for other sizes.
The backward operator is differentiable through PyTorch's own operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchstorm.kernels.operator import differentiable, fake, operator
from torchstorm.kernels.pytorch_fallback import without_autocast
from torchstorm.kernels.second_order import own_views
from torchstorm.kernels.softmax.reference import log_softmax_reference, softmax_gradient, softmax_reference
from torchstorm.kernels.variants import has_triton_for


@operator("softmax_forward")
def softmax_forward(x: Tensor, mask: Tensor | None, log: bool, variant: str) -> Tensor:
    """y (..., N), contiguous."""
    chosen = _resolve(variant, x, mask)
    if chosen == "torch" or not x.numel():
        with without_autocast(x):
            y = (log_softmax_reference if log else softmax_reference)(x, mask)
        return y.contiguous()
    if chosen == "parallel":
        from torchstorm.kernels.softmax import parallel_numba

        return parallel_numba.forward(x, mask, log)
    from torchstorm.kernels.softmax import launch_triton

    with torch.cuda.device_of(x):
        return launch_triton.forward(x, mask, log, chosen)


@fake(softmax_forward)
def _(x: Tensor, mask: Tensor | None, log: bool, variant: str) -> Tensor:
    return x.new_empty(x.shape)


@operator("softmax_backward")
def softmax_backward(dy: Tensor, y: Tensor, mask: Tensor | None, log: bool, variant: str) -> Tensor:
    """dx (..., N), contiguous. The mask is used only for log-softmax."""
    chosen = _resolve(variant, y, mask if log else None)
    if chosen == "torch" or not y.numel():
        return _torch_gradient(dy, y, mask, log)
    if chosen == "parallel":
        from torchstorm.kernels.softmax import parallel_numba

        return parallel_numba.backward(dy, y, mask, log)
    from torchstorm.kernels.softmax import launch_triton

    with torch.cuda.device_of(y):
        return launch_triton.backward(dy, y, mask, log, chosen)


@fake(softmax_backward)
def _(dy: Tensor, y: Tensor, mask: Tensor | None, log: bool, variant: str) -> Tensor:
    return y.new_empty(y.shape)


def _torch_gradient(dy: Tensor, y: Tensor, mask: Tensor | None, log: bool) -> Tensor:
    """dx with PyTorch's operators, as autograd computes it."""
    if not log:
        return torch._softmax_backward_data(dy, y, -1, y.dtype).contiguous()
    if mask is None:
        return torch._log_softmax_backward_data(dy, y, -1, y.dtype).contiguous()
    hidden = ~mask
    dx = torch._log_softmax_backward_data(dy.masked_fill(hidden, 0.0), y, -1, y.dtype)
    return dx.masked_fill_(hidden, 0.0).contiguous()


def _resolve(variant: str, x: Tensor, mask: Tensor | None) -> str:
    if variant != "auto":
        return variant
    if not has_triton_for(x):
        return "torch"
    from torchstorm.kernels.softmax import launch_triton  # pragma: gpu

    return launch_triton.fastest(x, mask)  # pragma: gpu


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, mask, ctx.log, ctx.variant = inputs
    ctx.save_for_backward(output, mask if ctx.log else None)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    y, mask = ctx.saved_tensors
    return softmax_backward(dy, y, mask, ctx.log, ctx.variant), None, None, None


def _keep_for_second_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    dy, y, mask, ctx.log, _ = inputs
    ctx.save_for_backward(dy, y, mask)


def _second_backward(ctx: Any, ddx: Tensor) -> tuple[Tensor | None, ...]:
    dy, y, mask = ctx.saved_tensors
    further = torch.is_grad_enabled()
    with torch.enable_grad(), without_autocast(dy):
        dy, y = own_views((dy, y))
        dx = softmax_gradient(dy, y, mask, ctx.log)
        d_dy, d_y = torch.autograd.grad(dx, (dy, y), ddx.to(dx.dtype), create_graph=further)
    return d_dy, d_y, None, None, None


differentiable(softmax_forward, _backward, setup_context=_keep_for_backward)
differentiable(softmax_backward, _second_backward, setup_context=_keep_for_second_backward)
