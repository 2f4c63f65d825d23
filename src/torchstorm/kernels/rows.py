"""Tensors as rows: what kernels that go along the last dimension need to know of where their rows lie."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchstorm.errors import ShapeError

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_SMS_ELSEWHERE = 4  # where there is no GPU, as in Triton's interpreter: few, so that loops over rows run
_L2_BYTES_ELSEWHERE = 40 << 20


@dataclass(frozen=True, kw_only=True)
class Tile:
    """How a kernel divides (M, N) among programs.

    Attributes:
        block: columns taken at once, a power of two.
        rows: rows taken at once.
        num_warps: of a program.
        per_sm: programs on each SM, for kernels whose programs walk over the rows; 0 where each takes its own.
        stages: tiles that are on their way at once in a program that walks.
    """

    block: int
    rows: int = 1
    num_warps: int = 4
    per_sm: int = 0
    stages: int = 1


def check_rows(op: str, x: Tensor) -> None:
    """Raises ShapeError unless x has a last dimension and a floating dtype that kernels know."""
    if x.dim() == 0:
        raise ShapeError(f"x {tuple(x.shape)}: {op} goes over the last dimension, and x has none. x[None] has one.")
    if x.dtype not in FLOATS:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
        raise ShapeError(f"x is {x.dtype}, but {op} takes {names}: x.float() has one of them.")


def as_rows(x: Tensor) -> Tensor:
    """(..., N) as (M, N) with contiguous columns: a view where strides allow it. x is not empty."""
    rows_MN = x.reshape(-1, x.shape[-1])
    return rows_MN if rows_MN.stride(1) == 1 else rows_MN.contiguous()


def power_of_two(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << max(0, n - 1).bit_length()


def num_sms(x: Tensor) -> int:
    """Of x's GPU."""
    if x.is_cuda:  # pragma: gpu
        return int(torch.cuda.get_device_properties(x.device).multi_processor_count)
    return _SMS_ELSEWHERE


def l2_bytes(x: Tensor) -> int:
    """Of x's GPU."""
    if x.is_cuda:  # pragma: gpu
        return int(torch.cuda.get_device_properties(x.device).L2_cache_size)
    return _L2_BYTES_ELSEWHERE


def num_walkers(x_MN: Tensor, tile: Tile) -> int:
    """How many programs walk over the rows of x."""
    return min(-(-x_MN.shape[0] // tile.rows), num_sms(x_MN) * tile.per_sm)
