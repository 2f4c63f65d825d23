"""The elementwise operations on CPU cores, with numba: one loop, compiled for each operation at its first use.

Tensors are float32 or float64. Inputs with another memory layout than the result are copied first.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, type-arg"
from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from torchstorm.kernels.elementwise.layout import same_memory
from torchstorm.kernels.elementwise.operations import BEYOND, CUBIC, TWO_U
from torchstorm.kernels.elementwise.plain import product_sum

__all__ = ["binary", "mul_backward", "product_sum", "unary", "unary_backward"]

_NUMPY: dict[str, Any] = {"error_model": "numpy", "nogil": True}  # 1 / 0 is infinity, without an error


@njit(**_NUMPY)
def _relu(x):
    return 0.0 if x < 0.0 else x


@njit(**_NUMPY)
def _relu_gradient(dy, x):
    return 0.0 if x <= 0.0 else dy


@njit(**_NUMPY)
def _sigmoid(x):
    return 1.0 / (1.0 + math.exp(-x))


@njit(**_NUMPY)
def _sigmoid_gradient(dy, x):
    s = _sigmoid(x)
    return dy * s * (1.0 - s)


@njit(**_NUMPY)
def _silu(x):
    return x / (1.0 + math.exp(-x))


@njit(**_NUMPY)
def _silu_gradient(dy, x):
    s = _sigmoid(x)
    return dy * s * (1.0 + x * (1.0 - s))


@njit(**_NUMPY)
def _gelu(x):
    return 0.5 * x * (1.0 + math.erf(x * math.sqrt(0.5)))


@njit(**_NUMPY)
def _gelu_gradient(dy, x):
    share = 0.5 * (1.0 + math.erf(x * math.sqrt(0.5)))
    return dy * (share + x * math.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi))


@njit(**_NUMPY)
def _gelu_tanh(x):
    near = min(max(x, -BEYOND), BEYOND)
    return x * _sigmoid(TWO_U * near * (1.0 + CUBIC * near * near))


@njit(**_NUMPY)
def _gelu_tanh_gradient(dy, x):
    near = min(max(x, -BEYOND), BEYOND)
    s = _sigmoid(TWO_U * near * (1.0 + CUBIC * near * near))
    return dy * (s + x * (s * (1.0 - s)) * (TWO_U * (1.0 + 3.0 * CUBIC * near * near)))


@njit(**_NUMPY)
def _add(a, b):
    return a + b


@njit(**_NUMPY)
def _mul(a, b):
    return a * b


FORWARD = {"relu": _relu, "sigmoid": _sigmoid, "gelu": _gelu, "gelu_tanh": _gelu_tanh, "silu": _silu}
BACKWARD = {
    "relu": _relu_gradient,
    "sigmoid": _sigmoid_gradient,
    "gelu": _gelu_gradient,
    "gelu_tanh": _gelu_tanh_gradient,
    "silu": _silu_gradient,
}
_BINARY = {"add": _add, "mul": _mul}


@cache
def _loop(operation: Any, num_inputs: int) -> Any:
    """A loop over elements that applies an operation with one or two inputs."""

    @njit(parallel=True, **_NUMPY)
    def of_one(a, y):
        for i in prange(y.size):
            y[i] = operation(a[i])

    @njit(parallel=True, **_NUMPY)
    def of_two(a, b, y):
        for i in prange(y.size):
            y[i] = operation(a[i], b[i])

    return of_one if num_inputs == 1 else of_two


def _row_of(x: Tensor) -> np.ndarray:
    """A dense tensor as a 1-D array in memory order, not copied."""
    return x.detach().as_strided((x.numel(),), (1,)).numpy()


def _apply(operation: Any, inputs: Sequence[Tensor], y: Tensor) -> None:
    """Fills y, which is dense and has the inputs' shape."""
    lying = [x if same_memory([y, x]) else torch.empty_like(y).copy_(x) for x in inputs]
    _loop(operation, len(lying))(*(_row_of(x) for x in lying), _row_of(y))


def unary(name: str, x: Tensor, y: Tensor, variant: str) -> None:
    """Fills y."""
    _apply(FORWARD[name], (x,), y)


def unary_backward(name: str, dy: Tensor, x: Tensor, dx: Tensor, variant: str) -> None:
    """Fills dx."""
    _apply(BACKWARD[name], (dy, x), dx)


def binary(name: str, a: Tensor, b: Tensor, y: Tensor, variant: str) -> None:
    """Fills y, which has the broadcast shape of a and b."""
    _apply(_BINARY[name], (a.expand(y.shape), b.expand(y.shape)), y)


def mul_backward(dy: Tensor, a: Tensor, b: Tensor, da: Tensor, db: Tensor, variant: str) -> None:
    """Fills da and db. b's shape may broadcast to a's."""
    _apply(_mul, (dy, b.expand(dy.shape)), da)
    if a.shape == b.shape:
        _apply(_mul, (dy, a), db)
    else:
        product_sum(dy, a, db)
