"""Tensors as rows: what kernels that go along the last dimension need to know of where their rows lie."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchstorm.errors import ConfigError, ShapeError
from torchstorm.kernels.dtypes import FLOATS

MOST_ROW_BYTES = {"fused": 64 << 10, "persistent": 32 << 10, "cluster": 256 << 10}
"""Of variants that hold rows as wholes: in L1, registers, where "persistent" has sums beside them, or shared memory."""

READ_BYTES = 16
"""What a thread reads at once."""

COPY_BYTES = 16
"""Rows of "cluster" are multiples of it: bulk copies are."""

_SMS_ELSEWHERE = 4  # where there is no GPU, as in Triton's interpreter: few, so that loops over rows run
_L2_BYTES_ELSEWHERE = 40 << 20
_L2_SHARE = 0.7  # of it, for rows that are read a second time
_LOOP_BLOCK = 4096


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


def holds(variant: str, N: int, dtype: torch.dtype) -> bool:
    """Whether a variant takes rows of N numbers."""
    if variant == "cluster":
        row_bytes = N * dtype.itemsize
        return row_bytes % COPY_BYTES == 0 and row_bytes <= MOST_ROW_BYTES[variant]
    return power_of_two(N) * dtype.itemsize <= MOST_ROW_BYTES.get(variant, power_of_two(N) * dtype.itemsize)


def check_columns(variant: str, x_MN: Tensor) -> int:
    """N; raises ConfigError where such rows are too long for the variant."""
    N, dtype = x_MN.shape[1], x_MN.dtype
    if not holds(variant, N, dtype):
        if N * dtype.itemsize <= MOST_ROW_BYTES[variant]:
            raise ConfigError(
                f"variant={variant!r} takes rows of whole {COPY_BYTES} bytes, and these have {N} numbers of {dtype}: "
                "use variant='online', or 'auto'."
            )
        raise ConfigError(
            f"variant={variant!r} holds rows of up to {MOST_ROW_BYTES[variant] // dtype.itemsize} numbers of {dtype}, "
            f"and these have {N}: use variant='online', or 'auto'."
        )
    return N


def power_of_two(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << max(0, n - 1).bit_length()


def tile_of(N: int, *, least: int, most: int) -> int:
    """Columns of tiles that rows of N fill but for an eighth, where they are not the least; a power of two."""
    block = min(power_of_two(N), most)
    while block > least and -N % block > N // 8:
        block //= 2
    return block


def unit_of(x_MN: Tensor) -> int:
    """Numbers that rows' length and stride are multiples of: those of 16 bytes, which one read brings, or fewer."""
    M, N = x_MN.shape
    return math.gcd(N, x_MN.stride(0) if M > 1 else N, READ_BYTES // x_MN.dtype.itemsize)


def num_sms(x: Tensor) -> int:
    """Of x's GPU."""
    return _gpu(x.device).multi_processor_count if x.is_cuda else _SMS_ELSEWHERE


def chained(x: Tensor) -> bool:
    """Whether kernels on x's GPU may begin while the one before ends; see chain_triton.py."""
    return x.is_cuda and torch.version.cuda is not None and _gpu(x.device).major >= 9


def following(x: Tensor) -> dict[str, Any]:
    """Launch options of a kernel that waits for the one before it."""
    return {"CHAINED": True, "launch_pdl": True} if chained(x) else {"CHAINED": False}


@functools.cache
def _gpu(device: torch.device) -> Any:  # pragma: gpu
    """PyTorch finds the properties anew in microseconds, which is long for what is asked at every launch."""
    return torch.cuda.get_device_properties(device)


def l2_bytes(x: Tensor) -> int:
    """Of x's GPU."""
    return _gpu(x.device).L2_cache_size if x.is_cuda else _L2_BYTES_ELSEWHERE


def loop_tile(x_MN: Tensor, *, num_inputs: int) -> Tile:
    """Of programs that walk over rows and go over each twice: as many as find their row in L2 the second time."""
    N = x_MN.shape[1]
    in_flight = int(_L2_SHARE * l2_bytes(x_MN) / (N * x_MN.dtype.itemsize * num_inputs))
    block = min(power_of_two(N), _LOOP_BLOCK)
    return Tile(block=block, num_warps=8, per_sm=max(1, min(8, in_flight // num_sms(x_MN))))


def num_walkers(x_MN: Tensor, tile: Tile) -> int:
    """How many programs walk over the rows of x."""
    return min(-(-x_MN.shape[0] // tile.rows), num_sms(x_MN) * tile.per_sm)


def grid_of(x_MN: Tensor, tile: Tile) -> tuple[int]:
    """Programs that walk over the rows of x, or one for each."""
    return (num_walkers(x_MN, tile) if tile.per_sm else x_MN.shape[0],)


def tile_options(variant: str, tile: Tile) -> dict[str, Any]:
    """What a kernel is compiled for."""
    options: dict[str, Any] = {"BLOCK": tile.block, "num_warps": tile.num_warps}
    if variant == "persistent":
        options |= {"ROWS": tile.rows, "STAGES": tile.stages}
    return options
