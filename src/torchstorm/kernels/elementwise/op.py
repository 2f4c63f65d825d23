"""The PyTorch operators torch.ops.torchstorm.relu, sigmoid, gelu, gelu_tanh, silu, add, mul and their gradients.

`_register` defines all activations, each from an entry of `operations.OPERATIONS`. An implementation is a module that
fills the results: `plain` with PyTorch, `parallel` with numba, `launch_triton` on a GPU. It is imported at its first
use.

Saved for backward: x for an activation (y for ReLU), nothing for `add`, and for `mul` the factors that the required
gradients need.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from torchstorm.kernels.dtypes import wide
from torchstorm.kernels.elementwise.layout import empty_result
from torchstorm.kernels.elementwise.operations import OPERATIONS, Operation
from torchstorm.kernels.operator import differentiable, fake, operator

_IMPLEMENTATIONS = {
    "torch": "torchstorm.kernels.elementwise.plain",
    "parallel": "torchstorm.kernels.elementwise.parallel",
}
_BY_TRITON = "torchstorm.kernels.elementwise.launch_triton"


def _implementation(variant: str) -> Any:
    return import_module(_IMPLEMENTATIONS.get(variant, _BY_TRITON))


def _register(operation: Operation) -> tuple[Any, Any]:
    """The operators of an activation and of its gradient, which is differentiable to any order."""

    @operator(operation.name)
    def forward(x: Tensor, variant: str) -> Tensor:
        y = torch.empty_like(x)
        with torch.cuda.device_of(x):
            _implementation(variant).unary(operation.name, x, y, variant)
        return y

    @operator(f"{operation.name}_backward")
    def backward(dy: Tensor, x: Tensor, variant: str) -> Tensor:
        dx = torch.empty_like(x)
        with torch.cuda.device_of(x):
            _implementation(variant).unary_backward(operation.name, dy, x, dx, variant)
        return dx

    @fake(forward)
    def _(x: Tensor, variant: str) -> Tensor:
        return torch.empty_like(x)

    @fake(backward)
    def _(dy: Tensor, x: Tensor, variant: str) -> Tensor:
        return torch.empty_like(x)

    def keep_one(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.variant = inputs
        ctx.save_for_backward(output if operation.of_y else x)

    def to_x(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return backward(dy, x, ctx.variant), None

    def keep_dy_and_x(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        dy, x, ctx.variant = inputs
        ctx.save_for_backward(dy, x)

    def to_dy_and_x(ctx: Any, ddx: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        dy, x = ctx.saved_tensors
        to_dy = backward(ddx, x, ctx.variant) if ctx.needs_input_grad[0] else None
        to_x = None
        if ctx.needs_input_grad[1]:
            to_x = (ddx * (dy * operation.second_derivative(x.to(wide(x.dtype))))).to(x.dtype)
        return to_dy, to_x, None

    differentiable(forward, to_x, setup_context=keep_one)
    differentiable(backward, to_dy_and_x, setup_context=keep_dy_and_x)
    return forward, backward


FORWARD: dict[str, Any] = {}
BACKWARD: dict[str, Any] = {}
for _operation in OPERATIONS:
    FORWARD[_operation.name], BACKWARD[_operation.name] = _register(_operation)


@operator("product_sum")
def product_sum(a: Tensor, b: Tensor | None, size: Sequence[int], variant: str) -> Tensor:
    """a, or a * b with b broadcast to a, summed to the shape `size`."""
    out = a.new_empty(size)
    with torch.cuda.device_of(a):
        _implementation(variant).product_sum(a, b, out)
    return out


@fake(product_sum)
def _(a: Tensor, b: Tensor | None, size: Sequence[int], variant: str) -> Tensor:
    return a.new_empty(size)


def _keep_factors(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, _, ctx.variant = inputs
    ctx.shape = a.shape
    ctx.save_for_backward(a if b is not None else None, b)


def _spread(ctx: Any, d_sum: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    a, b = ctx.saved_tensors
    whole = d_sum.expand(ctx.shape)
    if b is None:
        return whole, None, None, None
    to_a = mul_op(whole, b, ctx.variant) if ctx.needs_input_grad[0] else None
    to_b = product_sum(whole, a, b.shape, ctx.variant) if ctx.needs_input_grad[1] else None
    return to_a, to_b, None, None


differentiable(product_sum, _spread, setup_context=_keep_factors)


@operator("add")
def add_op(a: Tensor, b: Tensor, variant: str) -> Tensor:
    """a + b with broadcasting."""
    y = empty_result(a, b)
    with torch.cuda.device_of(y):
        _implementation(variant).binary("add", a, b, y, variant)
    return y


@operator("mul")
def mul_op(a: Tensor, b: Tensor, variant: str) -> Tensor:
    """a * b with broadcasting."""
    y = empty_result(a, b)
    with torch.cuda.device_of(y):
        _implementation(variant).binary("mul", a, b, y, variant)
    return y


@operator("mul_backward")
def mul_backward(dy: Tensor, a: Tensor, b: Tensor, variant: str) -> tuple[Tensor, Tensor]:
    """Both gradients of a * b. dy has a's shape, and b broadcasts to it."""
    da, db = torch.empty_like(a), torch.empty_like(b)
    with torch.cuda.device_of(a):
        _implementation(variant).mul_backward(dy, a, b, da, db, variant)
    return da, db


@fake(add_op)
@fake(mul_op)
def _(a: Tensor, b: Tensor, variant: str) -> Tensor:
    return empty_result(a, b)


@fake(mul_backward)
def _(dy: Tensor, a: Tensor, b: Tensor, variant: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(a), torch.empty_like(b)


def _keep_shapes(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, ctx.variant = inputs
    ctx.shapes = a.shape, b.shape


def _to_terms(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    wanted = zip(ctx.shapes, ctx.needs_input_grad[:2], strict=True)
    return *(_summed(dy, None, shape, ctx.variant) if needed else None for shape, needed in wanted), None


def _keep_both(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, ctx.variant = inputs
    ctx.shapes = a.shape, b.shape
    needs_a, needs_b = ctx.needs_input_grad[:2]
    ctx.save_for_backward(a if needs_b else None, b if needs_a else None)


def _to_factors(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    a, b = ctx.saved_tensors
    needs_a, needs_b = ctx.needs_input_grad[:2]
    if needs_a and needs_b and dy.shape in ctx.shapes:
        if dy.shape == ctx.shapes[0]:
            return *mul_backward(dy, a, b, ctx.variant), None
        db, da = mul_backward(dy, b, a, ctx.variant)
        return da, db, None
    to_a = _summed(dy, b, ctx.shapes[0], ctx.variant) if needs_a else None
    to_b = _summed(dy, a, ctx.shapes[1], ctx.variant) if needs_b else None
    return to_a, to_b, None


def _summed(dy: Tensor, factor: Tensor | None, shape: torch.Size, variant: str) -> Tensor:
    """dy, or dy times a factor, summed to a shape."""
    if dy.shape == shape:
        return dy if factor is None else mul_op(dy, factor, variant)
    return product_sum(dy, factor, shape, variant)  # type: ignore[no-any-return]


def _keep_all(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.variant = inputs
    ctx.save_for_backward(*tensors)


def _to_all(ctx: Any, dda: Tensor, ddb: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    """Gradients of dy b and dy a together."""
    dy, a, b = ctx.saved_tensors
    return dda * b + ddb * a, ddb * dy, (dda * dy).sum_to_size(b.shape), None


differentiable(add_op, _to_terms, setup_context=_keep_shapes)
differentiable(mul_op, _to_factors, setup_context=_keep_both)
differentiable(mul_backward, _to_all, setup_context=_keep_all)
