"""The elementwise operations in plain PyTorch, for any dtype up to float64.

    relu     max(x, 0)
    sigmoid  s = 1 / (1 + e^-x)
    silu     x s
    gelu     x P(x), P(x) = (1 + erf(x / sqrt 2)) / 2
    gelu_tanh  x (1 + tanh u) / 2, u = sqrt(2 / pi) (x + 0.044715 x^3); (1 + tanh u) / 2 is the sigmoid of 2 u

Sources: GELU arXiv 1606.08415, SiLU arXiv 1702.03118. NaN stays NaN; gelu and silu of -inf are NaN, as in PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

CUBIC = 0.044715
TWO_U = 2.0 * math.sqrt(2.0 / math.pi)  # 2 u = TWO_U (x + CUBIC x^3)
BEYOND = 100.0  # from here on sigmoid(2 u) is 0 or 1 in any dtype, while x^3 does not overflow


@dataclass(frozen=True, kw_only=True)
class Operation:
    """An activation.

    Attributes:
        name: the name in torch.ops.torchstorm.
        function: x -> y, PyTorch's function with its gradient.
        forward: (x, out) -> out, filled by PyTorch's operator.
        backward: (dy, x, out) -> out, filled by PyTorch's operator.
        second_derivative: function of x, in differentiable operations.
        of_y: whether `backward` accepts y instead of x. The next operation mostly saves y anyway.
    """

    name: str
    function: Callable[[Tensor], Tensor]
    forward: Callable[[Tensor, Tensor], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor], Tensor]
    second_derivative: Callable[[Tensor], Tensor]
    of_y: bool = False


def _normal(x: Tensor) -> Tensor:
    return torch.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)


def _gelu_second_derivative(x: Tensor) -> Tensor:
    return (2.0 - x * x) * _normal(x)


def _gelu_tanh_second_derivative(x: Tensor) -> Tensor:
    near = x.clamp(-BEYOND, BEYOND)
    s = torch.sigmoid(TWO_U * near * (1.0 + CUBIC * near * near))
    first, second = TWO_U * (1.0 + 3.0 * CUBIC * near * near), 6.0 * TWO_U * CUBIC * near  # derivatives of 2 u
    return s * (1.0 - s) * (2.0 * first + near * ((1.0 - 2.0 * s) * first * first + second))


def _silu_second_derivative(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1.0 - s) * (2.0 + x * (1.0 - 2.0 * s))


def _sigmoid_second_derivative(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1.0 - s) * (1.0 - 2.0 * s)


_aten = torch.ops.aten

OPERATIONS = (
    Operation(
        name="relu",
        function=torch.relu,
        forward=lambda x, out: torch.clamp_min(x, 0.0, out=out),
        backward=lambda dy, x, out: _aten.threshold_backward.grad_input(dy, x, 0.0, grad_input=out),
        second_derivative=torch.zeros_like,
        of_y=True,
    ),
    Operation(
        name="sigmoid",
        function=torch.sigmoid,
        forward=lambda x, out: torch.sigmoid(x, out=out),
        backward=lambda dy, x, out: _aten.sigmoid_backward.grad_input(dy, torch.sigmoid(x), grad_input=out),
        second_derivative=_sigmoid_second_derivative,
    ),
    Operation(
        name="gelu",
        function=F.gelu,
        forward=lambda x, out: _aten.gelu.out(x, out=out),
        backward=lambda dy, x, out: _aten.gelu_backward.grad_input(dy, x, grad_input=out),
        second_derivative=_gelu_second_derivative,
    ),
    Operation(
        name="gelu_tanh",
        function=partial(F.gelu, approximate="tanh"),
        forward=lambda x, out: _aten.gelu.out(x, approximate="tanh", out=out),
        backward=lambda dy, x, out: _aten.gelu_backward.grad_input(dy, x, approximate="tanh", grad_input=out),
        second_derivative=_gelu_tanh_second_derivative,
    ),
    Operation(
        name="silu",
        function=F.silu,
        forward=lambda x, out: _aten.silu.out(x, out=out),
        backward=lambda dy, x, out: _aten.silu_backward.grad_input(dy, x, grad_input=out),
        second_derivative=_silu_second_derivative,
    ),
)
BY_NAME = {operation.name: operation for operation in OPERATIONS}
