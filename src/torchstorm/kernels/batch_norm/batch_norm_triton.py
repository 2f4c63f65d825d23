"""Triton kernels of batch normalisation with an activation.

x is seen as (N, C, L) with any strides: contiguous (N, C, ...) as it is, channels-last and (N, C) as (1, C, N * L). A
tile is some of L by some of C in one of N; tiles are counted over N and L. A program takes some channels and every
so-manieth tile, and leaves what it found as one part of these channels; `merge` kernels put parts together, in order.
Means and spreads are merged as of Chan et al., "Updating Formulae and a Pairwise Algorithm", 1979: no sum of squares,
which would lose all digits where the mean is large. For the same reason means are of distances from a channel's first
value, until the last. Arithmetic in fp32.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile(tile, channel, C, L, tiles_of_l, n_stride, c_stride, l_stride, ALIGNED: tl.constexpr, BLOCK_L: tl.constexpr):
    """Offsets of a tile (BLOCK_L, BLOCK_C), which of it is there, and how many of L are.

    ALIGNED: L is a multiple of 16, which lets neighbouring ones be read 16 bytes at once.
    """
    if ALIGNED:
        L = L // 16 * 16
    n = tile // tiles_of_l
    start = (tile % tiles_of_l) * BLOCK_L
    at_l = start + tl.arange(0, BLOCK_L)
    at = n * n_stride + (at_l * l_stride)[:, None] + (channel * c_stride)[None, :]
    return at, (at_l < L)[:, None] & (channel < C)[None, :], tl.minimum(L - start, BLOCK_L)


@triton.jit
def _channels(C, BLOCK_C: tl.constexpr):
    """A program's channels, and which part it is. Grid: channel blocks * parts."""
    blocks = tl.cdiv(C, BLOCK_C)
    program = tl.program_id(0).to(tl.int64)
    return (program % blocks) * BLOCK_C + tl.arange(0, BLOCK_C), program // blocks


@triton.jit
def _of_channel(per_channel, channel, C, default: tl.constexpr):
    if per_channel is None:
        return tl.full(channel.shape, default, tl.float32)
    else:
        return tl.load(per_channel + channel, mask=channel < C, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["L", "num_tiles", "tiles_of_l", "parts"])
def statistics_kernel(x, part_num, part_mean, part_spread, C, L, num_tiles, tiles_of_l, parts, n_stride, c_stride,
                      l_stride, ALIGNED: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr):  # fmt: skip
    """Of each part (parts, C): how many values, their mean from the first, and the sum of squares from it."""
    channel, part = _channels(C, BLOCK_C)
    first = tl.load(x + channel * c_stride, mask=channel < C, other=0.0).to(tl.float32)
    num = 0.0
    mean = tl.zeros((BLOCK_C,), tl.float32)
    spread = tl.zeros((BLOCK_C,), tl.float32)
    tile = part
    while tile < num_tiles:
        at, inside, here = _tile(tile, channel, C, L, tiles_of_l, n_stride, c_stride, l_stride, ALIGNED, BLOCK_L)
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.where(inside, value - first[None, :], 0.0)
        here = here.to(tl.float32)
        own_mean = tl.sum(value, 0) / here
        away = tl.where(inside, value - own_mean[None, :], 0.0)
        delta = own_mean - mean
        share = here / (num + here)
        mean += delta * share
        spread += tl.sum(away * away, 0) + delta * delta * (num * share)
        num += here
        tile += parts
    at = part * C + channel
    tl.store(part_num + part, num)
    tl.store(part_mean + at, mean, mask=channel < C)
    tl.store(part_spread + at, spread, mask=channel < C)


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


@triton.jit(do_not_specialize=["L", "tiles_of_l"])
def normalise_kernel(x, y, weight, bias, mean, rstd, C, L, tiles_of_l, n_stride, c_stride, l_stride, ACT: tl.constexpr,
                     ALIGNED: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr):  # fmt: skip
    """y. Grid: channel blocks * tiles."""
    channel, tile = _channels(C, BLOCK_C)
    at, inside, _ = _tile(tile, channel, C, L, tiles_of_l, n_stride, c_stride, l_stride, ALIGNED, BLOCK_L)
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


@triton.jit(do_not_specialize=["L", "num_tiles", "tiles_of_l", "parts"])
def gradient_sums_kernel(dy, x, weight, bias, mean, rstd, part_dz, part_product, C, L, num_tiles, tiles_of_l, parts,
                         n_stride, c_stride, l_stride, ACT: tl.constexpr, GRADIENT: tl.constexpr, ALIGNED: tl.constexpr,
                         BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr):  # fmt: skip
    """Of each part (parts, C): the sums of dz, and of dz times x normalised."""
    channel, part = _channels(C, BLOCK_C)
    sum_dz = tl.zeros((BLOCK_C,), tl.float32)
    sum_product = tl.zeros((BLOCK_C,), tl.float32)
    tile = part
    while tile < num_tiles:
        at, inside, _ = _tile(tile, channel, C, L, tiles_of_l, n_stride, c_stride, l_stride, ALIGNED, BLOCK_L)
        dz, normal = _gradient(dy, x, at, inside, weight, bias, mean, rstd, channel, C, ACT, GRADIENT)
        sum_dz += tl.sum(dz, 0)
        sum_product += tl.sum(dz * normal, 0)
        tile += parts
    at = part * C + channel
    tl.store(part_dz + at, sum_dz, mask=channel < C)
    tl.store(part_product + at, sum_product, mask=channel < C)


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


@triton.jit(do_not_specialize=["L", "tiles_of_l", "inverse"])
def x_gradient_kernel(dy, x, dx, weight, bias, mean, rstd, sum_dz, sum_product, C, L, tiles_of_l, inverse, n_stride,
                      c_stride, l_stride, ACT: tl.constexpr, GRADIENT: tl.constexpr, BATCH: tl.constexpr,
                      ALIGNED: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr):  # fmt: skip
    """dx; inverse: 1 over a channel's number of values. Grid: channel blocks * tiles."""
    channel, tile = _channels(C, BLOCK_C)
    at, inside, _ = _tile(tile, channel, C, L, tiles_of_l, n_stride, c_stride, l_stride, ALIGNED, BLOCK_L)
    dz, normal = _gradient(dy, x, at, inside, weight, bias, mean, rstd, channel, C, ACT, GRADIENT)
    if BATCH:
        dz -= (_of_channel(sum_dz, channel, C, 0.0) * inverse)[None, :]
        dz -= normal * (_of_channel(sum_product, channel, C, 0.0) * inverse)[None, :]
    scale = _of_channel(rstd, channel, C, 1.0) * _of_channel(weight, channel, C, 1.0)
    tl.store(dx + at, (dz * scale[None, :]).to(dx.dtype.element_ty), mask=inside)
