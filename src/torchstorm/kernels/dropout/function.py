"""Dropout whose mask is never kept: it follows from a seed and a number's place, and is made again for backward."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from torchstorm.errors import ConfigError, ShapeError
from torchstorm.kernels.dropout.op import dropout_op
from torchstorm.kernels.dtypes import FLOATS, UP_TO_FP32
from torchstorm.kernels.elementwise.function import check_dtype
from torchstorm.kernels.variants import Ladder, Variant, choose, has_triton_for, is_installed

VARIANTS: Ladder = (
    Variant(
        name="torch",
        taught="a counter and a key make random bits: no state, so that any number's bits can be made anywhere, again",
        costs="32 bytes and more of integers for each number, in memory",
        devices=("cpu", "cuda"),
        dtypes=FLOATS,
    ),
    Variant(
        name="parallel",
        taught="bits are made where they are used, on all of a CPU's cores: nothing but x and y is in memory",
        costs="reads and writes once; some 15 integer operations a number; halves are converted to fp32 and back",
        devices=("cpu",),
        dtypes=FLOATS,
        needs=("numba",),
    ),
    Variant(
        name="naive",
        taught="the same with a thread for each number",
        costs="makes four words and takes half of one: some 100 instructions a number, more than a GPU has time for",
        dtypes=UP_TO_FP32,
        needs=("triton",),
    ),
    Variant(
        name="vectorised",
        taught="all four words of a call serve two numbers each, and are made where their numbers are already",
        costs="reads and writes once; near a copy's speed",
        dtypes=UP_TO_FP32,
        needs=("triton",),
    ),
)


def dropout(
    x: Tensor,
    p: float = 0.5,
    *,
    seed: int | Tensor | None = None,
    training: bool = True,
    variant: str = "auto",
) -> Tensor:
    """Sets each number to 0 with probability p and divides the others by 1 - p.

    The mask follows from the seed and each number's place in row-major order alone: it is the same on CPU and GPU, in
    every variant, dtype and memory layout. Backward keeps the seed, 8 bytes, and makes the mask again.

    Args:
        x: float32, float16, bfloat16 or float64, any shape; not contiguous, it is copied. Computed in fp32.
        p: from 0 to 1, taken to 2^-32; the scale is that of the p taken.
        seed: of the mask, one int64 number, or such a tensor on x's device; None to draw one from torch's generator.
        training: False returns x.
        variant: one of `variants("dropout")`, or "auto": the fastest here.

    Returns:
        Of x's shape and dtype, contiguous.

    Raises:
        ShapeError: x is not floating point, or the seed is not one int64 on x's device.
        ConfigError: p is not from 0 to 1, the seed does not fit into 64 bits, or there is no such variant.
        DeviceError: the variant does not run on this device or in this dtype.
    """
    check_dtype("dropout", "x", x)
    if not 0.0 <= p <= 1.0:
        raise ConfigError(f"p={p}: the probability that dropout sets a number to 0 lies between 0 and 1.")
    chosen = choose("dropout", VARIANTS, variant, x, auto=partial(_fastest, x))
    if not training:
        return x
    y: Tensor = dropout_op(x, _seed(seed, x), float(p), chosen)
    return y


def _seed(seed: int | Tensor | None, x: Tensor) -> Tensor:
    if seed is None:
        return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=x.device)
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != x.device:
            raise ShapeError(
                f"seed is {seed.dtype} {tuple(seed.shape)} on {seed.device}: it must be one int64 on {x.device}, as x."
            )
        return seed
    if not -(2**63) <= seed < 2**63:
        raise ConfigError(f"seed={seed}, but a seed has 64 bits: it lies between -2^63 and 2^63 - 1.")
    return torch.full((), seed, dtype=torch.int64, device=x.device)


def _fastest(x: Tensor) -> str:
    """Always an operator: PyTorch's own would keep a mask."""
    if x.is_cpu and is_installed("numba"):
        return "parallel"
    return "vectorised" if has_triton_for(x) else "torch"
