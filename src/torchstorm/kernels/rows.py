"""Tensors as rows, for kernels over the last dimension: strides, alignment, tiles and grids."""

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
"""Largest row of the variants that hold whole rows, in L1, registers ("persistent" with its sums) or shared memory."""

READ_BYTES = 16
"""Bytes that a thread reads at once."""

COPY_BYTES = 16
"""Rows of "cluster" must be multiples of this, as bulk copies require."""

_SMS_ELSEWHERE = 4  # without a GPU, as in Triton's interpreter: few, so that loops over rows are exercised
_L2_BYTES_ELSEWHERE = 40 << 20
_L2_SHARE = 0.7  # share of L2 for rows that are read a second time
_LOOP_BLOCK = 4096


@dataclass(frozen=True, kw_only=True)
class Tile:
    """How a kernel divides (M, N) among programs.

    Attributes:
        block: columns per tile, a power of two.
        rows: rows per tile.
        num_warps: warps per program.
        per_sm: programs per SM, for kernels that loop over rows; 0 for one program per tile of rows.
        stages: tiles in flight, for kernels that loop over rows.
    """

    block: int
    rows: int = 1
    num_warps: int = 4
    per_sm: int = 0
    stages: int = 1


def check_rows(op: str, x: Tensor) -> None:
    """Raises ShapeError unless x has a last dimension and a supported floating dtype."""
    if x.dim() == 0:
        raise ShapeError(f"x {tuple(x.shape)}: {op} needs a last dimension, and x has none. Pass x[None].")
    if x.dtype not in FLOATS:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
        raise ShapeError(f"x is {x.dtype}, but {op} takes {names}: pass x.float().")


def as_rows(x: Tensor) -> Tensor:
    """(..., N) as (M, N) with contiguous columns; a view if strides allow it. x must not be empty."""
    rows_MN = x.reshape(-1, x.shape[-1])
    return rows_MN if rows_MN.stride(1) == 1 else rows_MN.contiguous()


def holds(variant: str, N: int, dtype: torch.dtype) -> bool:
    """Whether a variant supports rows of N elements."""
    if variant == "cluster":
        row_bytes = N * dtype.itemsize
        return row_bytes % COPY_BYTES == 0 and row_bytes <= MOST_ROW_BYTES[variant]
    return power_of_two(N) * dtype.itemsize <= MOST_ROW_BYTES.get(variant, power_of_two(N) * dtype.itemsize)


def check_columns(variant: str, x_MN: Tensor) -> int:
    """Returns N. Raises ConfigError if the variant does not support such rows."""
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
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def tile_of(N: int, *, least: int, most: int) -> int:
    """Columns per tile, a power of two, so that at most an eighth is unused unless it is the smallest tile."""
    block = min(power_of_two(N), most)
    while block > least and -N % block > N // 8:
        block //= 2
    return block


def unit_of(x_MN: Tensor) -> int:
    """Largest power of two, up to the elements of 16 bytes (one read), that divides the rows' length and stride."""
    M, N = x_MN.shape
    return math.gcd(N, x_MN.stride(0) if M > 1 else N, READ_BYTES // x_MN.dtype.itemsize)


def num_sms(x: Tensor) -> int:
    """Of x's GPU."""
    return _gpu(x.device).multi_processor_count if x.is_cuda else _SMS_ELSEWHERE


def chained(x: Tensor) -> bool:
    """Whether x's GPU supports programmatic dependent launch; see chain_triton.py."""
    return x.is_cuda and torch.version.cuda is not None and _gpu(x.device).major >= 9


def following(x: Tensor) -> dict[str, Any]:
    """Launch options of a kernel that waits for the one before it."""
    return {"CHAINED": True, "launch_pdl": True} if chained(x) else {"CHAINED": False}


@functools.cache
def _gpu(device: torch.device) -> Any:  # pragma: gpu
    """The device properties, cached: PyTorch's query takes microseconds, which is long for each launch."""
    return torch.cuda.get_device_properties(device)


def l2_bytes(x: Tensor) -> int:
    """Of x's GPU."""
    return _gpu(x.device).L2_cache_size if x.is_cuda else _L2_BYTES_ELSEWHERE


def loop_tile(x_MN: Tensor, *, num_inputs: int) -> Tile:
    """The tile of programs that loop over rows and read each twice: as many programs as have their rows in L2."""
    N = x_MN.shape[1]
    in_flight = int(_L2_SHARE * l2_bytes(x_MN) / (N * x_MN.dtype.itemsize * num_inputs))
    block = min(power_of_two(N), _LOOP_BLOCK)
    return Tile(block=block, num_warps=8, per_sm=max(1, min(8, in_flight // num_sms(x_MN))))


def num_walkers(x_MN: Tensor, tile: Tile) -> int:
    """Number of programs that loop over the rows of x."""
    return min(-(-x_MN.shape[0] // tile.rows), num_sms(x_MN) * tile.per_sm)


def grid_of(x_MN: Tensor, tile: Tile) -> tuple[int]:
    """The grid: programs that loop over the rows of x, or one per row."""
    return (num_walkers(x_MN, tile) if tile.per_sm else x_MN.shape[0],)


def tile_options(variant: str, tile: Tile) -> dict[str, Any]:
    """The compile-time options of a kernel."""
    options: dict[str, Any] = {"BLOCK": tile.block, "num_warps": tile.num_warps}
    if variant == "persistent":
        options |= {"ROWS": tile.rows, "STAGES": tile.stages}
    return options
