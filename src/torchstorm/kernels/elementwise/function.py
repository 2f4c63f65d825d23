"""Elementwise operations as functions: add, mul, relu, sigmoid, gelu, silu.

All of them move bytes and hardly compute: y = f(x) reads x and writes y, and no kernel is faster than a copy. What a
kernel can learn is how to ask memory for enough at a time.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from torch import Tensor

from torchstorm.errors import ConfigError, ShapeError
from torchstorm.kernels.dtypes import FLOATS, UP_TO_FP32
from torchstorm.kernels.elementwise.op import FORWARD, add_op, mul_op
from torchstorm.kernels.variants import Ladder, Variant, choose, has_triton_for

VARIANTS: Ladder = (
    Variant(
        name="torch",
        taught="the definition: PyTorch's own kernels, one operation at a time",
        costs="each operation reads and writes all of it; already near a copy's speed on a GPU",
        devices=("cpu", "cuda"),
        dtypes=FLOATS,
    ),
    Variant(
        name="parallel",
        taught="a loop is shared among a CPU's cores, by numba, which compiles the operation into it",
        costs="reads and writes once; a second to compile each operation when it is first used",
        devices=("cpu",),
        dtypes=(torch.float32, torch.float64),
        needs=("numba",),
    ),
    Variant(
        name="naive",
        taught="a thread for each number: neighbours in a warp read neighbours in memory, which becomes one access",
        costs="reads and writes once, but 2 or 4 bytes a thread: too few on their way to keep memory busy",
        dtypes=UP_TO_FP32,
        needs=("triton",),
    ),
    Variant(
        name="vectorised",
        taught="16 bytes an access and several accesses under way in each thread hide the way to memory",
        costs="reads and writes once; near a copy's speed from some megabytes on",
        dtypes=UP_TO_FP32,
        needs=("triton",),
    ),
    Variant(
        name="persistent",
        taught="as many programs as the GPU holds, each going on by the whole grid: no program to start for each block",
        costs="as vectorised; its last round leaves some of the GPU idle, and starting programs costs little anyway",
        dtypes=UP_TO_FP32,
        needs=("triton",),
    ),
)


def add(a: Tensor, b: Tensor, *, variant: str = "auto") -> Tensor:
    """a + b, broadcast as PyTorch does; gradients are summed back over what was broadcast, always in the same order.

    Args:
        a, b: of one dtype, float32, float16, bfloat16 or float64, and on one device. Any strides; computed in fp32.
        variant: one of `variants("add")`, or "auto": the fastest here.

    Returns:
        Of the broadcast shape and the inputs' dtype, in the memory order of an input that has that shape.

    Raises:
        ShapeError: shapes that do not broadcast, or dtypes or devices that differ.
        ConfigError: there is no such variant.
        DeviceError: the variant does not run on this device or in this dtype.
    """
    _check_pair("add", a, b)
    return _run(add_op, "add", variant, a, b)


def mul(a: Tensor, b: Tensor, *, variant: str = "auto") -> Tensor:
    """a b, broadcast as PyTorch does; otherwise as `add`."""
    _check_pair("mul", a, b)
    return _run(mul_op, "mul", variant, a, b)


def relu(x: Tensor, *, variant: str = "auto") -> Tensor:
    """max(x, 0); NaN stays NaN.

    Args:
        x: float32, float16, bfloat16 or float64, any shape and strides; computed in fp32. Backward keeps x.
        variant: one of `variants("relu")`, or "auto": the fastest here.

    Returns:
        Of x's shape and dtype, and its strides where x is dense.

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
    """x times the normal distribution up to x, arXiv 1606.08415, or its approximation by tanh; otherwise as `relu`.

    Raises:
        ConfigError: `approximate` is neither "none" nor "tanh", or there is no such variant.
    """
    if approximate not in ("none", "tanh"):
        raise ConfigError(f"approximate={approximate!r}, but gelu has 'none' and 'tanh'.")
    return _activation("gelu" if approximate == "none" else "gelu_tanh", x, variant)


def check_dtype(op: str, name: str, x: Tensor) -> None:
    """Raises ShapeError where x is not floating point."""
    if x.dtype not in FLOATS:
        raise ShapeError(f"{name} of {op} is {x.dtype}: it must be float32, float16, bfloat16 or float64.")


def fastest(x: Tensor) -> str:
    """What "auto" stands for."""
    return "vectorised" if has_triton_for(x) else "torch"


def _activation(name: str, x: Tensor, variant: str) -> Tensor:
    check_dtype(name, "x", x)
    return _run(FORWARD[name], name, variant, x)


def _run(operator: object, name: str, variant: str, *inputs: Tensor) -> Tensor:
    x = inputs[0]
    chosen = choose(name.removesuffix("_tanh"), VARIANTS, variant, x, auto=partial(fastest, x))
    y: Tensor = operator(*inputs, chosen)  # type: ignore[operator]
    return y


def _check_pair(op: str, a: Tensor, b: Tensor) -> None:
    for name, x in (("a", a), ("b", b)):
        check_dtype(op, name, x)
    if a.dtype != b.dtype:
        raise ShapeError(
            f"{op} of a in {a.dtype} and b in {b.dtype}: both must have one dtype. Convert one with .to()."
        )
    if a.device != b.device:
        raise ShapeError(f"{op} of a on {a.device} and b on {b.device}: both must be on one device.")
    for d in range(1, min(a.dim(), b.dim()) + 1):
        if a.shape[-d] != b.shape[-d] and 1 not in (a.shape[-d], b.shape[-d]):
            raise ShapeError(
                f"{op} of a {tuple(a.shape)} and b {tuple(b.shape)}: they do not broadcast, since dimension -{d} has "
                f"{a.shape[-d]} and {b.shape[-d]}."
            )
