"""Launches of the softmax kernels: tiles, grids, and the fastest variant for a row length."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchstorm.errors import ConfigError
from torchstorm.kernels.row_clusters import launch_cuda as clusters
from torchstorm.kernels.rows import (
    READ_BYTES,
    Tile,
    as_rows,
    check_columns,
    grid_of,
    holds,
    loop_tile,
    power_of_two,
    tile_of,
    tile_options,
    unit_of,
)
from torchstorm.kernels.softmax import softmax_triton as kernels

_LEAST_BLOCK, _MOST_BLOCK = 1024, 8192  # columns per tile of "fused"


def fastest(x: Tensor, mask: Tensor | None) -> str:
    """The variant that "auto" uses for the rows of x on a GPU."""
    N, dtype = x.shape[-1], x.dtype
    if holds("fused", N, dtype):
        return "fused"
    return "cluster" if mask is None and holds("cluster", N, dtype) and clusters.has_clusters(x) else "online"


def forward_tile(variant: str, x_MN: Tensor) -> Tile:
    """How rows are divided among programs.

    Raises:
        ConfigError: the rows are too long for the variant.
    """
    return _tile(variant, x_MN, num_inputs=1)


def backward_tile(variant: str, dy_MN: Tensor) -> Tile:
    """How rows are divided among programs.

    Raises:
        ConfigError: the rows are too long for the variant.
    """
    return _tile(variant, dy_MN, num_inputs=2)


def _tile(variant: str, x_MN: Tensor, *, num_inputs: int) -> Tile:
    block = power_of_two(check_columns(variant, x_MN))
    if variant == "naive":
        return Tile(block=min(block, 1024))
    if variant == "online":
        tile = loop_tile(x_MN, num_inputs=num_inputs)
        # If rows are so long that few fit into L2, one program has as many bytes in flight as several of shorter rows.
        return tile if tile.per_sm > 2 else Tile(block=min(block, 16384), num_warps=32, per_sm=1)
    if variant == "fused":
        return _fused_tile(x_MN, num_inputs)
    rows = max(1, 1024 // max(block, 32))
    num_warps = max(1, min(16, rows * block // 1024))
    return Tile(block=block, rows=rows, num_warps=num_warps, per_sm=max(2, 32 // num_warps), stages=2)


def _fused_tile(x_MN: Tensor, num_inputs: int) -> Tile:
    """The tile of "fused". A thread has at least 8 bytes of it, or 16 if it reads element by element."""
    N, itemsize = x_MN.shape[1], x_MN.dtype.itemsize
    row_bytes = power_of_two(N) * itemsize
    block = tile_of(N, least=_LEAST_BLOCK, most=_MOST_BLOCK)
    num_warps = max(min(16, num_inputs * row_bytes >> 10), min(32, row_bytes >> 11))
    most_warps = block * itemsize // (32 * (8 if N * itemsize % READ_BYTES == 0 else 16))
    return Tile(block=block, num_warps=max(1, min(num_warps, most_warps)))


def _fused_options(x_MN: Tensor, seen: Tensor | None, tile: Tile) -> dict[str, Any]:
    N = x_MN.shape[1]
    return {"TILES": -(-N // tile.block), "UNIT": unit_of(x_MN), "FULL": seen is None and N % tile.block == 0}


def forward(x: Tensor, mask: Tensor | None, log: bool, variant: str, tile: Tile | None = None) -> Tensor:
    """y of a non-empty x."""
    x_MN, y = as_rows(x), x.new_empty(x.shape)
    if variant == "cluster":
        _check_cluster(x_MN, mask)
        clusters.forward(_op(log), x_MN, y)  # pragma: gpu
        return y  # pragma: gpu
    tile = tile or forward_tile(variant, x_MN)
    seen, where = _mask_rows(mask, x)
    M, N = x_MN.shape
    kernel = getattr(kernels, f"{variant}_forward_kernel")
    options = tile_options(variant, tile)
    if variant == "fused":
        options |= _fused_options(x_MN, seen, tile) | {"EACH": min(tile.block, READ_BYTES // x.element_size())}
    kernel[grid_of(x_MN, tile)](x_MN, seen, y, M, N, x_MN.stride(0), *where, LOG=log, **options)
    return y


def backward(dy: Tensor, y: Tensor, mask: Tensor | None, log: bool, variant: str, tile: Tile | None = None) -> Tensor:
    """dx from a non-empty, contiguous y."""
    dy_MN, dx = as_rows(dy), y.new_empty(y.shape)
    if variant == "cluster":
        _check_cluster(dy_MN, mask if log else None)
        clusters.backward(_op(log), dy_MN, as_rows(y), dx)  # pragma: gpu
        return dx  # pragma: gpu
    tile = tile or backward_tile(variant, dy_MN)
    seen, where = _mask_rows(mask if log else None, y)
    M, N = dy_MN.shape
    kernel = getattr(kernels, f"{variant}_backward_kernel")
    options = tile_options(variant, tile)
    if variant == "fused":
        options |= _fused_options(dy_MN, seen, tile)
    kernel[grid_of(dy_MN, tile)](dy_MN, y, seen, dx, M, N, dy_MN.stride(0), *where, LOG=log, **options)
    return dx


def _op(log: bool) -> str:
    return "log_softmax" if log else "softmax"


def _check_cluster(x_MN: Tensor, mask: Tensor | None) -> None:
    check_columns("cluster", x_MN)
    if mask is not None:
        raise ConfigError("variant='cluster' takes no mask: use variant='online', or 'auto'.")


def _mask_rows(mask: Tensor | None, x: Tensor) -> tuple[Tensor | None, tuple[int, ...]]:
    """The mask as bytes, and the layout of its rows: sizes of the middle and the inner dimension, and strides.

    Adjacent dimensions that are contiguous in the mask, or over which it is broadcast, are merged. A mask with more
    than three dimensions after that is expanded.
    """
    if mask is None:
        return None, (1, 1, 0, 0, 0, 0)
    seen = mask.view(torch.uint8).expand(x.shape)
    dims: list[tuple[int, int]] = []
    for size, stride in zip(seen.shape[:-1], seen.stride()[:-1], strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride:
            dims[-1] = dims[-1][0] * size, stride
        else:
            dims.append((size, stride))
    if len(dims) > 3:
        return seen.contiguous(), (1, 1, seen.shape[-1], 0, 0, 1)
    (_, outer), (middle_rows, middle), (inner_rows, inner) = [(1, 0)] * (3 - len(dims)) + dims
    return seen, (middle_rows, inner_rows, outer, middle, inner, seen.stride(-1))
