"""Tiles, parts and grids of the Triton kernels of batch normalization."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchstorm.kernels.batch_norm.batch_norm_triton import (
    gradient_sums_kernel,
    merge_statistics_kernel,
    merge_sums_kernel,
    normalise_kernel,
    statistics_kernel,
    x_gradient_kernel,
)
from torchstorm.kernels.elementwise.operations_triton import (
    BACKWARD,
    FORWARD,
    HALF_BACKWARD,
    HALF_FORWARD,
    identity,
)
from torchstorm.kernels.rows import chained, following, num_sms, power_of_two

TILE_BYTES = 4096  # per tensor, for programs with one tile
CHANNELS_LAST_BYTES = 16384  # the same for channels-last tensors; half as many in backward, which has two inputs
_ODD_BYTES = 4096  # the same for rows that cannot be read 16 bytes at once, where each element has an address
_NUM_WARPS = 4
WALK_BYTES = 8192  # per tensor, for programs that loop over tiles with two fp32 sums per element
WALK_STAGES = {"statistics": 4, "gradients": 3}  # tiles in flight
WALK_PROGRAMS = 3  # per multiprocessor; the fastest even if registers allow only two at a time
WALK_WIDEST = 1024  # channels per tile of channels-last tensors
_WIDEST = 64  # of other kernels; with more, threads would have to exchange parameters
_LEAST_USED = 0.95  # smallest used share of a tile that is longer than necessary
_MOST_PARTS = 256  # largest number of parts that one program can merge
_MERGED = 4096  # numbers per merging program


@dataclass(frozen=True, kw_only=True)
class _View:
    """x as (N, C, L), split into tiles.

    Attributes:
        of_memory: x, copied if it is neither contiguous nor channels-last.
        strides: strides of N, C, L.
        channel_blocks: number of tiles over C.
        num_tiles: number of tiles over N and L.
    """

    of_memory: Tensor
    N: int
    C: int
    L: int
    strides: tuple[int, int, int]
    BLOCK_L: int
    BLOCK_C: int

    @property
    def tile(self) -> dict[str, Any]:
        aligned = self.strides[2] == 1 and self.L % 16 == 0
        return {"ALIGNED": aligned, "BLOCK_L": self.BLOCK_L, "BLOCK_C": self.BLOCK_C, "num_warps": _NUM_WARPS}

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.N, self.C, self.L

    @property
    def channel_blocks(self) -> int:
        return -(-self.C // self.BLOCK_C)

    @property
    def num_tiles(self) -> int:
        return self.N * -(-self.L // self.BLOCK_L)

    def parts(self, variant: str) -> int:
        """Number of programs per channel block."""
        if variant == "naive":
            return 1
        programs = WALK_PROGRAMS * num_sms(self.of_memory)
        return max(1, min(self.num_tiles, _MOST_PARTS, programs // self.channel_blocks))


def _view(x: Tensor, tile_bytes: int, channels_last_bytes: int, widest: int = _WIDEST) -> _View:
    N, C = x.shape[:2]
    L = x.numel() // (N * C)
    if L == 1 or x.movedim(1, -1).is_contiguous():
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
        BLOCK_C = min(widest, power_of_two(C))
        if C % 16:
            channels_last_bytes = min(channels_last_bytes, _ODD_BYTES)
        BLOCK_L = channels_last_bytes // x.element_size() // BLOCK_C
        return _View(of_memory=x, N=1, C=C, L=N * L, strides=(0, 1, C), BLOCK_L=BLOCK_L, BLOCK_C=BLOCK_C)
    block = tile_bytes // x.element_size()
    BLOCK_L = _length(L, block)
    BLOCK_C = min(block // BLOCK_L, power_of_two(C))
    strides = C * L, L, 1
    return _View(of_memory=x.contiguous(), N=N, C=C, L=L, strides=strides, BLOCK_L=BLOCK_L, BLOCK_C=BLOCK_C)


def _length(L: int, most: int) -> int:
    """Length of a tile over L: the longest up to `most` that is almost fully used, or the best used of four."""
    lengths = [length for length in (most >> k for k in range(4)) if length <= power_of_two(L)] or [power_of_two(L)]
    used = {length: L / (-(-L // length) * length) for length in lengths}
    return max(lengths, key=lambda length: min(used[length], _LEAST_USED))


def statistics(x: Tensor, mean: Tensor, var: Tensor, rstd: Tensor, eps: float, variant: str) -> None:
    """Fills mean, biased variance and 1 / sqrt(variance + eps) for each channel."""
    view = _view(x, WALK_BYTES, WALK_BYTES, WALK_WIDEST)
    parts = view.parts(variant)
    num = mean.new_empty((parts,))
    means, spreads = (mean.new_empty((parts, view.C), dtype=torch.float64) for _ in range(2))
    statistics_kernel[(view.channel_blocks * parts,)](
        view.of_memory, num, means, spreads, *view.sizes, view.num_tiles, parts, *view.strides,
        STAGES=WALK_STAGES["statistics"], CHAINED=chained(x), **view.tile,
    )  # fmt: skip
    grid, tile = _merging(view.C)
    merge_statistics_kernel[grid](num, means, spreads, mean, var, rstd, eps, view.C, parts, **tile, **following(x))


def normalise(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor, activation: str, y: Tensor,
    variant: str,
) -> None:  # fmt: skip
    """Fills y with the activation of (x - mean) rstd weight + bias."""
    view = _view(x, TILE_BYTES, CHANNELS_LAST_BYTES)
    out = y if y.stride() == view.of_memory.stride() else torch.empty_like(view.of_memory)
    named = HALF_FORWARD if x.dtype != torch.float32 else FORWARD
    normalise_kernel[(view.channel_blocks * view.num_tiles,)](
        view.of_memory, out, weight, bias, mean, rstd, *view.sizes, *view.strides,
        ACT=named[activation] if activation else identity, **view.tile, **following(x),
    )  # fmt: skip
    if out is not y:
        y.copy_(out)


def backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor, batch: bool,
    activation: str, dx: Tensor, d_weight: Tensor, d_bias: Tensor, variant: str,
) -> None:  # fmt: skip
    """Fills dx and the gradients of weight and bias. `batch`: mean and rstd are statistics of x."""
    view = _view(x, TILE_BYTES, CHANNELS_LAST_BYTES // 2)
    x = view.of_memory
    walk = _view(x, WALK_BYTES, WALK_BYTES, WALK_WIDEST)
    parts = walk.parts(variant)
    dy = dy if dy.stride() == x.stride() else torch.empty_like(x).copy_(dy)
    out = dx if dx.stride() == x.stride() else torch.empty_like(x)
    gradient = (HALF_BACKWARD if x.dtype != torch.float32 else BACKWARD)[activation] if activation else identity
    chosen = {"ACT": bool(activation), "GRADIENT": gradient}
    part_dz, part_product = mean.new_empty((parts, view.C)), mean.new_empty((parts, view.C))
    gradient_sums_kernel[(walk.channel_blocks * parts,)](
        dy, x, weight, bias, mean, rstd, part_dz, part_product, *walk.sizes, walk.num_tiles, parts, *walk.strides,
        STAGES=WALK_STAGES["gradients"], CHAINED=chained(x), **chosen, **walk.tile,
    )  # fmt: skip
    grid, tile = _merging(view.C)
    merge_sums_kernel[grid](part_dz, part_product, d_bias, d_weight, view.C, parts, **tile, **following(x))
    x_gradient_kernel[(view.channel_blocks * view.num_tiles,)](
        dy, x, out, weight, bias, mean, rstd, d_bias, d_weight, *view.sizes, 1.0 / (view.N * view.L), *view.strides,
        BATCH=batch, **chosen, **view.tile, **following(x),
    )  # fmt: skip
    if out is not dx:
        dx.copy_(out)


def _merging(C: int) -> tuple[tuple[int], dict[str, int]]:
    """Grid and tile of the kernels that merge parts."""
    BLOCK_C = min(_MERGED // _MOST_PARTS, power_of_two(C))
    return (-(-C // BLOCK_C),), {"PARTS": _MOST_PARTS, "BLOCK_C": BLOCK_C, "num_warps": _NUM_WARPS}
