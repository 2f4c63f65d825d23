"""Launches of the norms' kernels: tiles, grids, and the fastest variant for a row length."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchstorm.kernels.norms import backward_triton, forward_triton
from torchstorm.kernels.norms.split_triton import split_kernel
from torchstorm.kernels.row_clusters import launch_cuda as clusters
from torchstorm.kernels.rows import (
    READ_BYTES,
    Tile,
    as_rows,
    chained,
    check_columns,
    following,
    grid_of,
    holds,
    loop_tile,
    num_sms,
    num_walkers,
    power_of_two,
    tile_of,
    tile_options,
    unit_of,
)

_CHUNK_BYTES = 8 << 20
_COLUMN_TILE = Tile(block=128, rows=32, num_warps=8, per_sm=8)
_LEAST_BLOCK, _MOST_BLOCK = 2048, 8192  # columns per tile of "fused" forward
_TOTAL_TILE = Tile(block=16, rows=256, num_warps=8)  # for 1056 parts: 5 reads in sequence


@dataclass(frozen=True, kw_only=True)
class SplitTile:
    """How "split" divides (M, N).

    Attributes:
        chunk: rows that both phases process before the next ones, a multiple of `rows`.
        lag: number of chunks between the two phases.
        block: columns of a tile of phase 1, which has one row.
        rows, columns: size of a tile of phase 2.
        num_warps: warps per program.
        stages: tiles of phase 2 in flight.
    """

    chunk: int
    lag: int = 1
    block: int = 8192
    rows: int = 8
    columns: int = 256
    num_warps: int = 8
    stages: int = 1


def fastest(x: Tensor, *, centred: bool, backward: bool) -> str:
    """The variant that "auto" uses for the rows of x on a GPU."""
    N, dtype = x.shape[-1], x.dtype
    # Row lengths for which a Triton kernel is as fast.
    most_kib = (8 if centred else 2) if backward else 64
    if N * dtype.itemsize > most_kib << 10 and holds("cluster", N, dtype) and clusters.has_clusters(x):
        return "cluster"
    if backward and holds("persistent", N, dtype):
        return "persistent"
    if holds("fused", N, dtype):
        return "fused"
    return "naive" if backward else "online"


def forward_tile(variant: str, x_MN: Tensor, *, centred: bool) -> Tile:
    """How rows are divided among programs.

    Raises:
        ConfigError: the rows are too long for the variant.
    """
    N = check_columns(variant, x_MN)
    block = power_of_two(N)
    if variant == "naive":
        return Tile(block=min(block, 1024))
    if variant == "online":
        return loop_tile(x_MN, num_inputs=1)
    if variant == "fused":
        return _fused_tile(N, x_MN.dtype.itemsize, centred)
    rows = max(1, 1024 // max(block, 32))
    num_warps = max(1, min(16, rows * block // 512))
    return Tile(block=block, rows=rows, num_warps=num_warps, per_sm=max(1, 24 // num_warps), stages=3)


def _fused_tile(N: int, itemsize: int, centred: bool) -> Tile:
    """Tile of "fused" forward. A thread has at least 16 bytes of a tile. More registers need fewer warps."""
    row_bytes = power_of_two(N) * itemsize
    num_warps = row_bytes >> 11
    if not centred or itemsize == 4:
        num_warps = max(min(16, row_bytes >> 10), num_warps)
    block = tile_of(N, least=_LEAST_BLOCK, most=_MOST_BLOCK)
    if centred and itemsize == 4:
        block = min(block, max(_LEAST_BLOCK, num_warps * 128))
    return Tile(block=block, num_warps=max(1, min(num_warps, block * itemsize // (32 * READ_BYTES))))


def backward_tile(variant: str, x_MN: Tensor) -> Tile:
    """How rows are divided among programs, for dx.

    Raises:
        ConfigError: the rows are too long for the variant.
    """
    N = check_columns(variant, x_MN)
    block = power_of_two(N)
    if variant == "naive":
        return Tile(block=min(block, 1024))
    if variant == "online":
        return loop_tile(x_MN, num_inputs=2)
    if variant == "fused":
        return Tile(block=block, num_warps=max(1, min(32, block // 1024)))
    rows = 2 if block == 1024 else max(1, 1024 // max(block, 32))
    num_warps = max(2, min(16, rows * block // 512))
    stages = 2 if block * x_MN.dtype.itemsize > 16 << 10 else 3
    # Fewer programs than fit, if they already saturate the memory bandwidth.
    per_sm = {2: 6, 4: 3}.get(num_warps, max(1, 16 // num_warps))
    return Tile(block=block, rows=rows, num_warps=num_warps, per_sm=per_sm, stages=stages)


def split_tile(x_MN: Tensor) -> SplitTile:
    """How "split" divides rows: chunks of 8 MB of x and dy are a small part of L2 and still have few partial sums."""
    row_bytes = 2 * x_MN.shape[1] * x_MN.dtype.itemsize
    chunk = max(16, min(1024, power_of_two(_CHUNK_BYTES // row_bytes)))
    return SplitTile(chunk=chunk, block=min(8192, power_of_two(x_MN.shape[1])))


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    variant: str,
    tile: Tile | None = None,
    *,
    keep: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, mean and rstd of a non-empty x. mean and rstd are filled only if they are saved."""
    x_MN, y = as_rows(x), x.new_empty(x.shape)
    M, N = x_MN.shape
    variant = "online" if variant == "split" else variant
    mean, rstd = (x.new_empty((m,), dtype=torch.float32) for m in (M if centred else 0, M))
    if variant == "cluster":  # pragma: gpu
        check_columns(variant, x_MN)
        clusters.forward(_op(centred), x_MN, y, weight=weight, bias=bias, mean=mean, rstd=rstd, eps=eps)
        return y, mean, rstd
    tile = tile or forward_tile(variant, x_MN, centred=centred)
    kernel = getattr(forward_triton, f"{variant}_forward_kernel")
    options = tile_options(variant, tile)
    if variant == "fused":
        options |= {"TILES": -(-N // tile.block), "UNIT": unit_of(x_MN), "FULL": N % tile.block == 0}
    kernel[grid_of(x_MN, tile)](
        x_MN, _vector(weight), _vector(bias), y, *((mean, rstd) if keep else (None, None)), M, N, x_MN.stride(0), eps,
        CENTRED=centred, **options,
    )  # fmt: skip
    return y, mean, rstd


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    centred: bool,
    needs_weight: bool,
    needs_bias: bool,
    dtype: torch.dtype,
    variant: str,
    tile: Tile | SplitTile | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight and dbias of a non-empty x."""
    dy_MN, x_MN, dx = as_rows(dy), as_rows(x), x.new_empty(x.shape)
    given = dy_MN, x_MN, _vector(weight), dx, mean, rstd
    needed = needs_weight, needs_bias
    parts: Parts
    if variant == "cluster":  # pragma: gpu
        check_columns(variant, x_MN)
        parts = clusters.backward(_op(centred), *given[:2], dx, weight=weight, mean=mean, rstd=rstd, sums=needed)
    elif variant == "split":
        assert tile is None or isinstance(tile, SplitTile)
        parts = _split(*given, centred, needed, tile or split_tile(x_MN))
    else:
        assert tile is None or isinstance(tile, Tile)
        tile = tile or backward_tile(variant, x_MN)
        if variant == "persistent":
            parts = _persistent(*given, centred, needed, tile)
        else:
            kernel = getattr(backward_triton, f"{variant}_dx_kernel")
            kernel[grid_of(x_MN, tile)](
                *given, *x_MN.shape, dy_MN.stride(0), x_MN.stride(0), CENTRED=centred, **tile_options(variant, tile)
            )
            parts = _columns(*given, centred, needed, in_spans=variant != "naive")
    return dx, *_totals(*parts, x_MN, needed, dtype)


Parts = tuple[Tensor | None, Tensor | None]


def _persistent(
    dy_MN: Tensor,
    x_MN: Tensor,
    weight: Tensor | None,
    dx: Tensor,
    mean: Tensor,
    rstd: Tensor,
    centred: bool,
    needed: tuple[bool, bool],
    tile: Tile,
) -> Parts:
    parts = _new_parts(num_walkers(x_MN, tile), x_MN, needed)
    backward_triton.persistent_kernel[grid_of(x_MN, tile)](
        dy_MN, x_MN, weight, dx, mean, rstd, *parts, *x_MN.shape, dy_MN.stride(0), x_MN.stride(0), CENTRED=centred,
        ALL_STAYS=tile.rows * tile.block <= 512 * tile.num_warps,
        FULL=tile.block == x_MN.shape[1] and x_MN.shape[0] % tile.rows == 0, CHAINED=chained(x_MN),
        **tile_options("persistent", tile),
    )  # fmt: skip
    return parts


def _columns(
    dy_MN: Tensor,
    x_MN: Tensor,
    weight: Tensor | None,
    dx: Tensor,
    mean: Tensor,
    rstd: Tensor,
    centred: bool,
    needed: tuple[bool, bool],
    *,
    in_spans: bool,
) -> Parts:
    """The first stage of dw and db, as a separate kernel."""
    if not any(needed):
        return None, None
    (M, N), tile = x_MN.shape, _COLUMN_TILE
    num_tiles = -(-N // tile.block)
    spans = max(1, min(-(-M // tile.rows), num_sms(x_MN) * tile.per_sm // num_tiles)) if in_spans else 1
    parts = _new_parts(spans, x_MN, needed)
    backward_triton.columns_kernel[(num_tiles, spans)](
        dy_MN, x_MN, mean, rstd, *parts, M, N, dy_MN.stride(0), x_MN.stride(0), -(-M // spans), CENTRED=centred,
        BLOCK=tile.block, ROWS=tile.rows, num_warps=tile.num_warps,
    )  # fmt: skip
    return parts


def _split(
    dy_MN: Tensor,
    x_MN: Tensor,
    weight: Tensor | None,
    dx: Tensor,
    mean: Tensor,
    rstd: Tensor,
    centred: bool,
    needed: tuple[bool, bool],
    tile: SplitTile,
) -> Parts:
    M, N = x_MN.shape
    num_chunks, num_parts, column_tiles = -(-M // tile.chunk), -(-N // tile.block), -(-N // tile.columns)
    parts = _new_parts(num_chunks, x_MN, needed)
    sums = x_MN.new_empty((M, num_parts, 2), dtype=torch.float32)
    turns = x_MN.new_zeros((1 + num_chunks,), dtype=torch.int32)
    split_kernel[((num_chunks + tile.lag) * (tile.chunk * num_parts + column_tiles),)](
        dy_MN, x_MN, weight, dx, mean, rstd, sums, *parts, turns, M, N, dy_MN.stride(0), x_MN.stride(0),
        CENTRED=centred, CHUNK=tile.chunk, LAG=tile.lag, BLOCK=tile.block, ROWS=tile.rows, COLUMNS=tile.columns,
        PARTS=num_parts, PARTS_BLOCK=power_of_two(num_parts), COLUMN_TILES=column_tiles, STAGES=tile.stages,
        num_warps=tile.num_warps,
    )  # fmt: skip
    return parts


def _new_parts(num: int, x_MN: Tensor, needed: tuple[bool, bool]) -> Parts:
    """Uninitialized partial sums of dw and db (num, N); None if not required."""
    w, b = (x_MN.new_empty((num, x_MN.shape[1]), dtype=torch.float32) if each else None for each in needed)
    return w, b


def _totals(
    parts_w: Tensor | None, parts_b: Tensor | None, x_MN: Tensor, needed: tuple[bool, bool], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The second stage: dw and db; empty if not required."""
    N, tile = x_MN.shape[1], _TOTAL_TILE
    dw, db = (x_MN.new_empty((N if each else 0,), dtype=dtype) for each in needed)
    given = [(parts, total) for parts, total in ((parts_w, dw), (parts_b, db)) if parts is not None]
    if given:
        (first, to_first), (second, to_second) = given[0], given[1] if len(given) == 2 else (None, None)
        backward_triton.totals_kernel[(-(-N // tile.block), len(given))](
            first, second, to_first, to_second, first.shape[0], N, ROWS=tile.rows, BLOCK=tile.block,
            num_warps=tile.num_warps, **following(x_MN),
        )  # fmt: skip
    return dw, db


def _op(centred: bool) -> str:
    return "layer_norm" if centred else "rms_norm"


def _vector(p: Tensor | None) -> Tensor | None:
    return None if p is None else p.contiguous()
