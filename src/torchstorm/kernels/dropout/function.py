"""Dropout without a stored mask: it is a function of a seed and the element's index, and is recomputed in backward."""

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
        lesson="a counter-based generator has no state: the bits of any element can be computed anywhere, any time",
        costs="at least 32 bytes of integers per element in memory",
        devices=("cpu", "cuda"),
        dtypes=FLOATS,
    ),
    Variant(
        name="parallel",
        lesson="bits are generated where they are used, on all CPU cores: only x and y are in memory",
        costs="reads and writes once; about 15 integer operations per element; halves are converted to fp32 and back",
        devices=("cpu",),
        dtypes=FLOATS,
        needs=("numba",),
    ),
    Variant(
        name="naive",
        lesson="the same with a thread per element",
        costs="generates four words and uses half of one: about 100 instructions per element, too many",
        dtypes=UP_TO_FP32,
        needs=("triton",),
    ),
    Variant(
        name="vectorised",
        lesson="each of a call's four words serves two elements, in the thread that has these elements",
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
    """Sets each element to 0 with probability p and divides the others by 1 - p.

    The mask depends only on the seed and each element's row-major index: it is the same on CPU and GPU, and for every
    variant, dtype and memory layout. Backward saves only the seed (8 bytes) and recomputes the mask.

    Args:
        x: float32, float16, bfloat16 or float64, any shape; copied if it is not contiguous. Computed in fp32.
        p: from 0 to 1, rounded to a multiple of 2^-32, also for the scale.
        seed: int64 seed of the mask, a number or a tensor on x's device; None draws one from torch's generator.
        training: False returns x.
        variant: one of `variants("dropout")`, or "auto": the fastest here.

    Returns:
        A contiguous tensor with x's shape and dtype.

    Raises:
        ShapeError: x is not floating point, or the seed is not a single int64 on x's device.
        ConfigError: p is not from 0 to 1, the seed does not fit into 64 bits, or the variant does not exist.
        DeviceError: the variant does not support this device or dtype.
    """
    check_dtype("dropout", "x", x)
    if not 0.0 <= p <= 1.0:
        raise ConfigError(f"p={p}, but it is a probability and must be between 0 and 1.")
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
        raise ConfigError(f"seed={seed}, but a seed has 64 bits: it must be between -2^63 and 2^63 - 1.")
    return torch.full((), seed, dtype=torch.int64, device=x.device)


def _fastest(x: Tensor) -> str:
    """The fastest variant. PyTorch's own function is none of them, since it saves a mask."""
    if x.is_cpu and is_installed("numba"):
        return "parallel"
    return "vectorised" if has_triton_for(x) else "torch"
