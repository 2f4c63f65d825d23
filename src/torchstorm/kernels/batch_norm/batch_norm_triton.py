"""Triton kernels of batch normalization with an activation.

x is a view (N, C, L) with any strides: contiguous (N, C, ...) directly, channels-last and (N, C) as (1, C, N * L). A
tile covers a range of L and a range of C for one index of N. Tiles are numbered over L and, faster, over N. A program
processes a block of channels and every P-th tile (P programs per block), and writes partial results ("parts"). The
`merge` kernels combine the parts in a fixed order. The following kernels process the tiles in reverse order, since the
last ones are still in the cache.

Sums are kept for each element of a tile, so threads exchange nothing in the loop, and are merged at the end: Chan et
al., "Updating Formulae and a Pairwise Algorithm", 1979. They are sums of differences from a shift value, and of their
squares. Sums of squares of x itself would lose all digits if the mean is large, and so would differences from an
outlier. So the shift is the median of three values of the channel, from the program's first, middle and last tile.
Arithmetic in fp32; elements and parts are merged in fp64.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from torchstorm.kernels.chain_triton import next_may_begin, wait_for_previous
from torchstorm.kernels.rows_triton import middle


@triton.jit
def _places(channel, c_stride, l_stride, BLOCK_L: tl.constexpr):
    """Offsets within a tile (BLOCK_L, BLOCK_C)."""
    return (tl.arange(0, BLOCK_L).to(tl.int64) * l_stride)[:, None] + (channel * c_stride)[None, :]


@triton.jit
def _tile(tile, channel, N, C, L, n_stride, l_stride, ALIGNED: tl.constexpr, BLOCK_L: tl.constexpr):
    """The offset of a tile, which of it is there, and (BLOCK_L,) which of L are.

    Where one of L is not there, it is not there in further tiles of the same program either: L's last tiles are last.
    ALIGNED: L is a multiple of 16, which lets neighbouring ones be read 16 bytes at once.
    """
    if ALIGNED:
        L = L // 16 * 16
    start = (tile // N).to(tl.int64) * BLOCK_L
    l_inside = tl.arange(0, BLOCK_L) < tl.minimum(L - start, BLOCK_L).to(tl.int32)
    return (tile % N).to(tl.int64) * n_stride + start * l_stride, l_inside[:, None] & (channel < C)[None, :], l_inside


@triton.jit
def _channels(C, BLOCK_C: tl.constexpr, BACKWARDS: tl.constexpr):
    """A program's channels, and which part or tile it is. Grid: channel blocks * parts."""
    blocks = tl.cdiv(C, BLOCK_C)
    program = tl.program_id(0)
    if BACKWARDS:
        program = tl.num_programs(0) - 1 - program
    return (program % blocks).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C), program // blocks


@triton.jit
def _of_channel(per_channel, channel, C, default: tl.constexpr):
    if per_channel is None:
        return tl.full(channel.shape, default, tl.float32)
    else:
        return tl.load(per_channel + channel, mask=channel < C, other=0.0).to(tl.float32)


@triton.jit
def _value(x, tile, HALVES: tl.constexpr, channel, N, C, L, n_stride, c_stride, l_stride, BLOCK_L: tl.constexpr):
    """A tile's value of each channel: its first, or so many halves of the way to its last."""
    l_start = (tile // N).to(tl.int64) * BLOCK_L
    l_at = l_start + (tl.minimum(L - l_start, BLOCK_L) - 1) * HALVES // 2
    at = (tile % N).to(tl.int64) * n_stride + l_at * l_stride + channel * c_stride
    return tl.load(x + at, mask=channel < C, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["L", "num_tiles", "parts"])
def statistics_kernel(x, part_num, part_mean, part_spread, N, C, L, num_tiles, parts, n_stride, c_stride, l_stride,
                      ALIGNED: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
                      CHAINED: tl.constexpr):  # fmt: skip
    """Of each part (parts, C): how many values, and in fp64 their mean and the sum of squares from it."""
    next_may_begin(CHAINED)
    channel, part = _channels(C, BLOCK_C, False)
    places = _places(channel, c_stride, l_stride, BLOCK_L)
    steps = tl.cdiv(num_tiles - part, parts)
    start = middle(
        _value(x, part, 0, channel, N, C, L, n_stride, c_stride, l_stride, BLOCK_L),
        _value(x, part + steps // 2 * parts, 1, channel, N, C, L, n_stride, c_stride, l_stride, BLOCK_L),
        _value(x, part + (steps - 1) * parts, 2, channel, N, C, L, n_stride, c_stride, l_stride, BLOCK_L),
    )  # fmt: skip
    total = tl.zeros((BLOCK_L, BLOCK_C), tl.float32)
    squares = tl.zeros((BLOCK_L, BLOCK_C), tl.float32)
    # Tiles that end beyond L come last, and all lack the same places.
    whole = tl.minimum(L // BLOCK_L * N, num_tiles)
    whole_steps = tl.cdiv(tl.maximum(whole - part, 0), parts)
    for tile in tl.range(part, whole, parts, num_stages=STAGES):
        base, _, _ = _tile(tile, channel, N, C, L, n_stride, l_stride, ALIGNED, BLOCK_L)
        away = tl.load(x + base + places, mask=(channel < C)[None, :], other=0.0).to(tl.float32) - start[None, :]
        total += away
        squares += away * away
    num = tl.zeros((BLOCK_L,), tl.float32) + whole_steps
    for tile in tl.range(part + whole_steps * parts, num_tiles, parts, num_stages=STAGES):
        base, inside, l_inside = _tile(tile, channel, N, C, L, n_stride, l_stride, ALIGNED, BLOCK_L)
        away = tl.load(x + base + places, mask=inside, other=0.0).to(tl.float32) - start[None, :]
        away = tl.where(l_inside[:, None], away, 0.0)
        total += away
        squares += away * away
        num += tl.where(l_inside, 1.0, 0.0)
    own = total * tl.div_rn(1.0, tl.maximum(num, 1.0))[:, None]
    spread = squares - total * own
    total_num = tl.sum(num, 0)
    mean = tl.sum(total.to(tl.float64), 0) / total_num
    away = own.to(tl.float64) - mean[None, :]
    spread = spread.to(tl.float64) + away * away * num[:, None]
    at = part * C + channel
    tl.store(part_num + part, total_num)
    tl.store(part_mean + at, start + mean, mask=channel < C)
    tl.store(part_spread + at, tl.sum(spread, 0), mask=channel < C)


@triton.jit(do_not_specialize=["parts"])
def merge_statistics_kernel(part_num, part_mean, part_spread, mean, var, rstd, eps, C, parts, PARTS: tl.constexpr,
                            BLOCK_C: tl.constexpr, CHAINED: tl.constexpr):  # fmt: skip
    """Mean, biased variance and rstd (C,) of all parts. Grid: channel blocks."""
    wait_for_previous(CHAINED)
    next_may_begin(CHAINED)
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    part = tl.arange(0, PARTS)
    inside = (part < parts)[:, None] & (channel < C)[None, :]
    at = part[:, None] * C + channel[None, :]
    num = tl.load(part_num + part, mask=part < parts, other=0.0)
    means = tl.load(part_mean + at, mask=inside, other=0.0)
    spreads = tl.load(part_spread + at, mask=inside, other=0.0)
    total = tl.sum(num, 0)
    common = tl.sum(means * num[:, None], 0) / total
    away = means - common[None, :]
    variance = (tl.sum(spreads + away * away * num[:, None], 0) / total).to(tl.float32)
    variance = tl.maximum(variance, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(mean + channel, common.to(tl.float32), mask=channel < C)
    tl.store(var + channel, variance, mask=channel < C)
    tl.store(rstd + channel, tl.div_rn(1.0, tl.sqrt_rn(variance + eps)), mask=channel < C)


@triton.jit(do_not_specialize=["L"])
def normalise_kernel(x, y, weight, bias, mean, rstd, N, C, L, n_stride, c_stride, l_stride, ACT: tl.constexpr,
                     ALIGNED: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr,
                     CHAINED: tl.constexpr):  # fmt: skip
    """y. Grid: channel blocks * tiles."""
    wait_for_previous(CHAINED)
    channel, tile = _channels(C, BLOCK_C, True)
    base, inside, _ = _tile(tile, channel, N, C, L, n_stride, l_stride, ALIGNED, BLOCK_L)
    at = base + _places(channel, c_stride, l_stride, BLOCK_L)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    scale = _of_channel(rstd, channel, C, 1.0) * _of_channel(weight, channel, C, 1.0)
    value = (value - _of_channel(mean, channel, C, 0.0)[None, :]) * scale[None, :]
    value += _of_channel(bias, channel, C, 0.0)[None, :]
    tl.store(y + at, ACT(value).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _gradient(dy, x, at, inside, weight, bias, mean, rstd, channel, C, ACT: tl.constexpr, GRADIENT: tl.constexpr):
    """The gradient of what the activation was given, and x normalised; 0 outside."""
    normal = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    dz = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    normal = (normal - _of_channel(mean, channel, C, 0.0)[None, :]) * _of_channel(rstd, channel, C, 1.0)[None, :]
    normal = tl.where(inside, normal, 0.0)
    if ACT:
        z = normal * _of_channel(weight, channel, C, 1.0)[None, :] + _of_channel(bias, channel, C, 0.0)[None, :]
        dz = tl.where(inside, GRADIENT(dz, z), 0.0)
    return dz, normal


@triton.jit(do_not_specialize=["L", "num_tiles", "parts"])
def gradient_sums_kernel(dy, x, weight, bias, mean, rstd, part_dz, part_product, N, C, L, num_tiles, parts, n_stride,
                         c_stride, l_stride, ACT: tl.constexpr, GRADIENT: tl.constexpr, ALIGNED: tl.constexpr,
                         BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
                         CHAINED: tl.constexpr):  # fmt: skip
    """Of each part (parts, C): the sums of dz, and of dz times x normalised."""
    next_may_begin(CHAINED)
    channel, part = _channels(C, BLOCK_C, False)
    sum_dz = tl.zeros((BLOCK_L, BLOCK_C), tl.float32)
    sum_product = tl.zeros((BLOCK_L, BLOCK_C), tl.float32)
    places = _places(channel, c_stride, l_stride, BLOCK_L)
    for tile in tl.range(part, num_tiles, parts, num_stages=STAGES):
        base, inside, _ = _tile(tile, channel, N, C, L, n_stride, l_stride, ALIGNED, BLOCK_L)
        dz, normal = _gradient(dy + base, x + base, places, inside, weight, bias, mean, rstd, channel, C, ACT, GRADIENT)
        sum_dz += dz
        sum_product += dz * normal
    at = part * C + channel
    tl.store(part_dz + at, tl.sum(sum_dz, 0), mask=channel < C)
    tl.store(part_product + at, tl.sum(sum_product, 0), mask=channel < C)


@triton.jit(do_not_specialize=["parts"])
def merge_sums_kernel(part_dz, part_product, sum_dz, sum_product, C, parts, PARTS: tl.constexpr,
                      BLOCK_C: tl.constexpr, CHAINED: tl.constexpr):  # fmt: skip
    """The sums (C,) of all parts. Grid: channel blocks."""
    wait_for_previous(CHAINED)
    next_may_begin(CHAINED)
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    part = tl.arange(0, PARTS)
    inside = (part < parts)[:, None] & (channel < C)[None, :]
    at = part[:, None] * C + channel[None, :]
    tl.store(sum_dz + channel, tl.sum(tl.load(part_dz + at, mask=inside, other=0.0), 0), mask=channel < C)
    tl.store(sum_product + channel, tl.sum(tl.load(part_product + at, mask=inside, other=0.0), 0), mask=channel < C)


@triton.jit(do_not_specialize=["L", "inverse"])
def x_gradient_kernel(dy, x, dx, weight, bias, mean, rstd, sum_dz, sum_product, N, C, L, inverse, n_stride, c_stride,
                      l_stride, ACT: tl.constexpr, GRADIENT: tl.constexpr, BATCH: tl.constexpr,
                      ALIGNED: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr,
                      CHAINED: tl.constexpr):  # fmt: skip
    """dx; inverse: 1 over a channel's number of values. Grid: channel blocks * tiles."""
    wait_for_previous(CHAINED)
    channel, tile = _channels(C, BLOCK_C, True)
    base, inside, _ = _tile(tile, channel, N, C, L, n_stride, l_stride, ALIGNED, BLOCK_L)
    at = base + _places(channel, c_stride, l_stride, BLOCK_L)
    dz, normal = _gradient(dy, x, at, inside, weight, bias, mean, rstd, channel, C, ACT, GRADIENT)
    # What a channel's values have in common is multiplied first.
    scale = _of_channel(rstd, channel, C, 1.0) * _of_channel(weight, channel, C, 1.0)
    gradient = dz * scale[None, :]
    if BATCH:
        of_one = _of_channel(sum_dz, channel, C, 0.0) * inverse * scale
        of_normal = _of_channel(sum_product, channel, C, 0.0) * inverse * scale
        gradient -= normal * of_normal[None, :] + of_one[None, :]
    tl.store(dx + at, gradient.to(dx.dtype.element_ty), mask=inside)
