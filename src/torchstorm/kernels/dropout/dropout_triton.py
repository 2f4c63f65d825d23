"""Dropout by Triton: random bits are made where they are used, and never written.

Traffic: x read, y written. Philox's rounds take eight instructions each for four words. A GPU has time for about 27 a
number while it reads and writes bf16, so all four words must be used; ten rounds were too many (71 % of a copy).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torchstorm.kernels.dropout.philox import BITS, GROUP, LANES, ROUNDS, threshold_of

_SHIFT = tl.constexpr(32 - BITS)
_LANES = tl.constexpr(LANES)
_ROUNDS = tl.constexpr(ROUNDS)


@triton.jit
def philox(counter, key):
    """Four words (uint32) of 64-bit counters, from a 64-bit key; the counter's upper two words are 0."""
    x0 = counter.to(tl.uint32)
    x1 = (counter >> 32).to(tl.uint32)
    x2 = tl.zeros_like(x0)
    x3 = tl.zeros_like(x0)
    k0 = key.to(tl.uint32)
    k1 = (key >> 32).to(tl.uint32)
    for _ in tl.static_range(_ROUNDS):
        one = x0.to(tl.uint64) * 0xD2511F53
        two = x2.to(tl.uint64) * 0xCD9E8D57
        x0 = (two >> 32).to(tl.uint32) ^ x1 ^ k0
        x1 = two.to(tl.uint32)
        x2 = (one >> 32).to(tl.uint32) ^ x3 ^ k1
        x3 = one.to(tl.uint32)
        k0 += tl.full((), 0x9E3779B9, tl.uint32)
        k1 += tl.full((), 0xBB67AE85, tl.uint32)
    return x0, x1, x2, x3


@triton.jit
def _drop(x, y, word, at, end, threshold, scale):
    inside = at < end
    # A product, so that NaN and infinity that are dropped give NaN, as in PyTorch.
    factor = tl.where((word >> _SHIFT).to(tl.int32) >= threshold, scale, 0.0)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * factor
    tl.store(y + at, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _one_by_one(x, y, key, at, end, threshold, scale):
    lane = at // (4 * _LANES) * _LANES + at % _LANES
    which = (at // _LANES) % 4
    w0, w1, w2, w3 = philox(lane.to(tl.uint64), key)
    word = tl.where(which < 2, tl.where(which == 0, w0, w1), tl.where(which == 2, w2, w3))
    _drop(x, y, word, at, end, threshold, scale)


@triton.jit(do_not_specialize=["num", "threshold"])
def grouped_kernel(x, y, seed, num, threshold, scale):
    """Four numbers a call: one program a group, which is four rows of neighbours. Grid: groups.

    As in `flat_kernel`, groups end at a multiple of 16 numbers, and the first program does the few after it.
    """
    key = tl.load(seed).to(tl.uint64)
    num = num.to(tl.int64)
    end = num // 16 * 16
    group = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, _LANES)
    w0, w1, w2, w3 = philox((group * _LANES + lane).to(tl.uint64), key)
    at = group * (4 * _LANES) + lane
    _drop(x, y, w0, at, end, threshold, scale)
    _drop(x, y, w1, at + _LANES, end, threshold, scale)
    _drop(x, y, w2, at + 2 * _LANES, end, threshold, scale)
    _drop(x, y, w3, at + 3 * _LANES, end, threshold, scale)
    if (group == 0) & (end < num):
        _one_by_one(x, y, key, end + tl.arange(0, 16), num, threshold, scale)


@triton.jit(do_not_specialize=["num", "threshold"])
def naive_kernel(x, y, seed, num, threshold, scale, BLOCK: tl.constexpr):
    """One number a thread, which keeps one of the four words that it makes. Grid: blocks."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    _one_by_one(x, y, tl.load(seed).to(tl.uint64), at, num, threshold, scale)


NUM_WARPS = 4


def dropout(x: Tensor, seed: Tensor, y: Tensor, p: float, scale: float, variant: str) -> None:
    """Fills y from x, both contiguous."""
    num = x.numel()
    if num == 0:
        return
    given = x, y, seed, num, threshold_of(p), scale
    if variant == "naive":
        naive_kernel[(-(-num // 128),)](*given, BLOCK=128, num_warps=4)
    else:
        grouped_kernel[(-(-num // GROUP),)](*given, num_warps=NUM_WARPS)
