"""Triton kernels of batch normalisation with an activation.

x is seen as (N, C, L) with any strides: contiguous (N, C, ...) as it is, channels-last and (N, C) as (1, C, N * L). A
tile is some of L by some of C in one of N; tiles are counted over L and, faster, over N. A program takes some channels
and every so-manieth tile, and leaves what it found as one part of these channels; `merge` kernels put parts together,
in order. What comes after goes over the tiles backwards: the last ones are still in the cache.

Means and spreads are kept for each place of a tile (Welford, 1962), and merged in the end as of Chan et al., "Updating
Formulae and a Pairwise Algorithm", 1979: no sum of squares, which would lose all digits where the mean is large, and
nothing passed between threads on the way. For the same reason means are of distances from a channel's first value,
until the last. Arithmetic in fp32.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from torchstorm.kernels.elementwise.operations_triton import reciprocal


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


@triton.jit(do_not_specialize=["L", "num_tiles", "parts"])
def statistics_kernel(x, part_num, part_mean, part_spread, N, C, L, num_tiles, parts, n_stride, c_stride, l_stride,
                      ALIGNED: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr,
                      STAGES: tl.constexpr):  # fmt: skip
    """Of each part (parts, C): how many values, their mean from the first, and the sum of squares from it."""
    channel, part = _channels(C, BLOCK_C, False)
    first = tl.load(x + channel * c_stride, mask=channel < C, other=0.0).to(tl.float32)
    steps = 0.0
    mean = tl.zeros((BLOCK_L, BLOCK_C), tl.float32)
    spread = tl.zeros((BLOCK_L, BLOCK_C), tl.float32)
    places = _places(channel, c_stride, l_stride, BLOCK_L)
    for tile in tl.range(part, num_tiles, parts, num_stages=STAGES):
        base, inside, l_inside = _tile(tile, channel, N, C, L, n_stride, l_stride, ALIGNED, BLOCK_L)
        value = tl.load(x + base + places, mask=inside, other=0.0).to(tl.float32) - first[None, :]
        steps += 1.0
        away = tl.where(l_inside[:, None], value - mean, 0.0)
        mean += away * reciprocal(steps)
        spread += away * (value - mean)
    # Tiles that end beyond L all lack the same places: a place was in all of the program's tiles, or in the whole ones.
    whole = tl.minimum(L // BLOCK_L * N, num_tiles)
    last = num_tiles - 1 - (num_tiles - 1 - part) % parts
    _, _, l_inside = _tile(last, channel, N, C, L, n_stride, l_stride, ALIGNED, BLOCK_L)
    num = tl.where(l_inside, steps, tl.cdiv(tl.maximum(whole - part, 0), parts).to(tl.float32))
    total = tl.sum(num, 0)
    own_mean = tl.sum(mean * num[:, None], 0) / total
    away = mean - own_mean[None, :]
    at = part * C + channel
    tl.store(part_num + part, total)
    tl.store(part_mean + at, own_mean, mask=channel < C)
    tl.store(part_spread + at, tl.sum(spread + away * away * num[:, None], 0), mask=channel < C)


@triton.jit(do_not_specialize=["parts"])
def merge_statistics_kernel(x, part_num, part_mean, part_spread, mean, var, C, parts, c_stride, PARTS: tl.constexpr,
                            BLOCK_C: tl.constexpr):  # fmt: skip
    """Mean and biased variance (C,) of all parts. Grid: channel blocks."""
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    first = tl.load(x + channel.to(tl.int64) * c_stride, mask=channel < C, other=0.0).to(tl.float32)
    part = tl.arange(0, PARTS)
    inside = (part < parts)[:, None] & (channel < C)[None, :]
    at = part[:, None] * C + channel[None, :]
    num = tl.load(part_num + part, mask=part < parts, other=0.0)
    means = tl.load(part_mean + at, mask=inside, other=0.0)
    spreads = tl.load(part_spread + at, mask=inside, other=0.0)
    total = tl.sum(num, 0)
    shift = tl.sum(means * num[:, None], 0) / total
    away = means - shift[None, :]
    tl.store(mean + channel, first + shift, mask=channel < C)
    tl.store(var + channel, tl.sum(spreads + away * away * num[:, None], 0) / total, mask=channel < C)


@triton.jit(do_not_specialize=["L"])
def normalise_kernel(x, y, weight, bias, mean, rstd, N, C, L, n_stride, c_stride, l_stride, ACT: tl.constexpr,
                     ALIGNED: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr):  # fmt: skip
    """y. Grid: channel blocks * tiles."""
    channel, tile = _channels(C, BLOCK_C, True)
    base, inside, _ = _tile(tile, channel, N, C, L, n_stride, l_stride, ALIGNED, BLOCK_L)
    at = base + _places(channel, c_stride, l_stride, BLOCK_L)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value = (value - _of_channel(mean, channel, C, 0.0)[None, :]) * _of_channel(rstd, channel, C, 1.0)[None, :]
    value = value * _of_channel(weight, channel, C, 1.0)[None, :] + _of_channel(bias, channel, C, 0.0)[None, :]
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
                         BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Of each part (parts, C): the sums of dz, and of dz times x normalised."""
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
                      BLOCK_C: tl.constexpr):  # fmt: skip
    """The sums (C,) of all parts. Grid: channel blocks."""
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    part = tl.arange(0, PARTS)
    inside = (part < parts)[:, None] & (channel < C)[None, :]
    at = part[:, None] * C + channel[None, :]
    tl.store(sum_dz + channel, tl.sum(tl.load(part_dz + at, mask=inside, other=0.0), 0), mask=channel < C)
    tl.store(sum_product + channel, tl.sum(tl.load(part_product + at, mask=inside, other=0.0), 0), mask=channel < C)


@triton.jit(do_not_specialize=["L", "inverse"])
def x_gradient_kernel(dy, x, dx, weight, bias, mean, rstd, sum_dz, sum_product, N, C, L, inverse, n_stride, c_stride,
                      l_stride, ACT: tl.constexpr, GRADIENT: tl.constexpr, BATCH: tl.constexpr,
                      ALIGNED: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr):  # fmt: skip
    """dx; inverse: 1 over a channel's number of values. Grid: channel blocks * tiles."""
    channel, tile = _channels(C, BLOCK_C, True)
    base, inside, _ = _tile(tile, channel, N, C, L, n_stride, l_stride, ALIGNED, BLOCK_L)
    at = base + _places(channel, c_stride, l_stride, BLOCK_L)
    dz, normal = _gradient(dy, x, at, inside, weight, bias, mean, rstd, channel, C, ACT, GRADIENT)
    if BATCH:
        dz -= (_of_channel(sum_dz, channel, C, 0.0) * inverse)[None, :]
        dz -= normal * (_of_channel(sum_product, channel, C, 0.0) * inverse)[None, :]
    scale = _of_channel(rstd, channel, C, 1.0) * _of_channel(weight, channel, C, 1.0)
    tl.store(dx + at, (dz * scale[None, :]).to(dx.dtype.element_ty), mask=inside)
