"""Dropout in Triton: random bits are generated where they are used, and never stored.

Memory traffic: reads x, writes y. While it reads and writes bf16, a GPU has time for about 27 instructions per element,
or half as many integer instructions, which run at half rate on Hopper. `vectorised` takes 13. A thread reads all its
elements before it generates bits, and uses all words of a Philox call itself. When the words of a call belonged to
distant elements, Triton exchanged them between threads through shared memory, which reached 80 % of a copy's speed.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torchstorm.kernels.dropout.philox import NUMBERS, ROUNDS, threshold_of

_NUMBERS = tl.constexpr(NUMBERS)
_ROUNDS = tl.constexpr(ROUNDS)


@triton.jit
def philox(x0, x1, k0, k1):
    """Four words (uint32) of counters whose lower words are x0 and x1, and the upper ones 0; k0 and k1 are the key."""
    x2 = tl.zeros_like(x0)
    x3 = tl.zeros_like(x0)
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
def _turned(word):
    return (word << 16) | (word >> 16)


@triton.jit
def _write(y, at, value, word, inside, threshold, scale):
    # A product, so that NaN and infinity that are dropped give NaN, as in PyTorch.
    factor = tl.where(word >= threshold.to(tl.uint32), scale, 0.0)
    tl.store(y + at, (value * factor).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _calls(x, y, seed, first, end, threshold, scale, CALLS: tl.constexpr):
    """The numbers of the counters from `first` on, of which there are CALLS, a power of two that `first` is a multiple
    of."""
    at = first * _NUMBERS + tl.arange(0, CALLS * _NUMBERS)
    inside = at < end
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    key = tl.load(seed).to(tl.uint64)
    lower = first.to(tl.uint32) + tl.arange(0, CALLS).to(tl.uint32)
    upper = tl.zeros_like(lower) + (first >> 32).to(tl.uint32)
    w0, w1, w2, w3 = philox(lower, upper, key.to(tl.uint32), (key >> 32).to(tl.uint32))
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    word = tl.join(words, _turned(words)).reshape(CALLS * _NUMBERS)
    _write(y, at, value, word, inside, threshold, scale)


@triton.jit(do_not_specialize=["num", "threshold"])
def calls_kernel(x, y, seed, num, threshold, scale, CALLS: tl.constexpr):
    """CALLS calls of Philox a program, for NUMBERS numbers each. Grid: blocks.

    As in `flat_kernel`, blocks end at a multiple of 16 numbers, and the first program does the few after it.
    """
    num = num.to(tl.int64)
    end = num // 16 * 16
    program = tl.program_id(0).to(tl.int64)
    _calls(x, y, seed, program * CALLS, end, threshold, scale, CALLS)
    if (program == 0) & (end < num):
        _calls(x, y, seed, end // _NUMBERS, num, threshold, scale, 16 // _NUMBERS)


@triton.jit(do_not_specialize=["num", "threshold"])
def naive_kernel(x, y, seed, num, threshold, scale, BLOCK: tl.constexpr):
    """One number a thread, which keeps half of one of the four words that it makes. Grid: blocks."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    key = tl.load(seed).to(tl.uint64)
    counter = at // _NUMBERS
    w0, w1, w2, w3 = philox(
        counter.to(tl.uint32), (counter >> 32).to(tl.uint32), key.to(tl.uint32), (key >> 32).to(tl.uint32)
    )
    which = at % _NUMBERS
    word = tl.where(which < 4, tl.where(which < 2, w0, w1), tl.where(which < 6, w2, w3))
    _write(y, at, value, tl.where(which % 2 == 0, word, _turned(word)), inside, threshold, scale)


LANE_BYTES = 32  # bytes of x per thread of "vectorised"
NUM_WARPS = 4


def dropout(x: Tensor, seed: Tensor, y: Tensor, p: float, scale: float, variant: str) -> None:
    """Fills y from x, both contiguous."""
    num = x.numel()
    if num == 0:
        return
    threshold = threshold_of(p)
    as_int32 = (
        threshold - (1 << 32) if threshold >> 31 else threshold
    )  # the same type for every p, so that one kernel is compiled
    given = x, y, seed, num, as_int32, scale
    if variant == "naive":
        naive_kernel[(-(-num // 128),)](*given, BLOCK=128, num_warps=4)
    else:
        block = 32 * NUM_WARPS * LANE_BYTES // x.element_size()
        calls_kernel[(-(-num // block),)](*given, CALLS=block // NUMBERS, num_warps=NUM_WARPS)
