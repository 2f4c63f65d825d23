"""Elementwise operations as functions: add, mul, relu, sigmoid, gelu, silu.

All of them are bound by memory: y = f(x) reads x and writes y, and no kernel is faster than a copy. A kernel is fast if
it keeps enough memory requests in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from torchstorm.errors import ConfigError, ShapeError
from torchstorm.kernels.dtypes import FLOATS, UP_TO_FP32
from torchstorm.kernels.elementwise.op import FORWARD, add_op, mul_op
from torchstorm.kernels.elementwise.operations import BY_NAME
from torchstorm.kernels.pytorch_fallback import call_pytorch, prefers_pytorch
from torchstorm.kernels.variants import Ladder, Variant, choose

VARIANTS: Ladder = (
    Variant(
        name="torch",
        lesson="the definition: PyTorch's own kernels, one operation at a time",
        costs="each operation reads and writes the whole tensor; already near a copy's speed on a GPU",
        devices=("cpu", "cuda"),
        dtypes=FLOATS,
    ),
    Variant(
        name="parallel",
        lesson="a loop over all CPU cores, into which numba compiles the operation",
        costs="reads and writes once; a second to compile each operation at its first call",
        devices=("cpu",),
        dtypes=(torch.float32, torch.float64),
        needs=("numba",),
    ),
    Variant(
        name="naive",
        lesson="a thread per element: neighbouring threads read neighbouring addresses, which become one access",
        costs="reads and writes once, but 2 or 4 bytes per thread: too few in flight to keep memory busy",
        dtypes=UP_TO_FP32,
        needs=("triton",),
    ),
    Variant(
        name="vectorised",
        lesson="16 bytes per access and several accesses in flight per thread hide the memory latency",
        costs="reads and writes once; near a copy's speed from some megabytes on",
        dtypes=UP_TO_FP32,
        needs=("triton",),
    ),
    Variant(
        name="persistent",
        lesson="as many programs as the GPU holds, each looping with the grid as stride: no program start per block",
        costs="as vectorised; its last iteration leaves a part of the GPU idle, and program starts cost little anyway",
        dtypes=UP_TO_FP32,
        needs=("triton",),
    ),
)


def add(a: Tensor, b: Tensor, *, variant: str = "auto") -> Tensor:
    """a + b with PyTorch's broadcasting. Gradients are summed over broadcast dimensions, always in the same order.

    Args:
        a, b: equal dtypes (float32, float16, bfloat16 or float64) and devices, any strides. Computed in fp32.
        variant: one of `variants("add")`, or "auto": the fastest here.

    Returns:
        A tensor with the broadcast shape and the inputs' dtype, in the memory order of an input with that shape.

    Raises:
        ShapeError: the shapes do not broadcast, or the dtypes or devices differ.
        ConfigError: there is no such variant.
        DeviceError: the variant does not run on this device or in this dtype.
    """
    _check_pair("add", a, b)
    return _run(add_op, torch.add, "add", variant, a, b)


def mul(a: Tensor, b: Tensor, *, variant: str = "auto") -> Tensor:
    """a * b with PyTorch's broadcasting; otherwise as `add`."""
    _check_pair("mul", a, b)
    return _run(mul_op, torch.mul, "mul", variant, a, b)


def relu(x: Tensor, *, variant: str = "auto") -> Tensor:
    """max(x, 0); NaN stays NaN.

    Args:
        x: float32, float16, bfloat16 or float64, any shape and strides; computed in fp32. Backward saves y for relu and
            x for the others. For sigmoid it saves y if "auto" is PyTorch's function (on a CPU, and for small tensors).
        variant: one of `variants("relu")`, or "auto": the fastest here.

    Returns:
        A tensor with x's shape and dtype, and with its strides if x is dense.

    Raises:
        ShapeError: x is not floating point.
        ConfigError: there is no such variant.
        DeviceError: the variant does not run on this device or in this dtype.
    """
    return _activation("relu", x, variant)


def sigmoid(x: Tensor, *, variant: str = "auto") -> Tensor:
    """1 / (1 + e^-x); otherwise as `relu`."""
    return _activation("sigmoid", x, variant)


def silu(x: Tensor, *, variant: str = "auto") -> Tensor:
    """x sigmoid(x), arXiv 1702.03118; otherwise as `relu`."""
    return _activation("silu", x, variant)


def gelu(x: Tensor, approximate: Literal["none", "tanh"] = "none", *, variant: str = "auto") -> Tensor:
    """x times the normal distribution function of x, arXiv 1606.08415, or its tanh approximation; otherwise as `relu`.

    Raises:
        ConfigError: `approximate` is neither "none" nor "tanh", or the variant does not exist.
    """
    if approximate not in ("none", "tanh"):
        raise ConfigError(f"approximate={approximate!r}, but it must be 'none' or 'tanh'.")
    return _activation("gelu" if approximate == "none" else "gelu_tanh", x, variant)


def check_dtype(op: str, name: str, x: Tensor) -> None:
    """Raises ShapeError unless x is floating point."""
    if x.dtype not in FLOATS:
        raise ShapeError(f"{name} of {op} is {x.dtype}: it must be float32, float16, bfloat16 or float64.")


def _activation(name: str, x: Tensor, variant: str) -> Tensor:
    check_dtype(name, "x", x)
    return _run(FORWARD[name], BY_NAME[name].function, name, variant, x)


def _run(operator: Any, pytorch_function: Callable[..., Tensor], name: str, variant: str, *inputs: Tensor) -> Tensor:
    if variant == "auto" and prefers_pytorch(*inputs):
        return call_pytorch(pytorch_function, *inputs)
    chosen = choose(name.removesuffix("_tanh"), VARIANTS, variant, inputs[0], auto=lambda: "vectorised")
    y: Tensor = operator(*inputs, chosen)
    return y


def _check_pair(op: str, a: Tensor, b: Tensor) -> None:
    check_dtype(op, "a", a)
    if a.dtype != b.dtype:
        check_dtype(op, "b", b)
        raise ShapeError(
            f"{op} of a in {a.dtype} and b in {b.dtype}: both must have the same dtype. Convert one with .to()."
        )
    if a.device != b.device:
        raise ShapeError(f"{op} of a on {a.device} and b on {b.device}: both must be on the same device.")
    if a.shape == b.shape or a.shape[-b.dim() :] == b.shape:
        return
    for d, (one, other) in enumerate(zip(reversed(a.shape), reversed(b.shape), strict=False), start=1):
        if one != other and one != 1 and other != 1:
            raise ShapeError(
                f"{op} of a {tuple(a.shape)} and b {tuple(b.shape)}: they do not broadcast, since dimension -{d} has "
                f"{one} and {other}."
            )
