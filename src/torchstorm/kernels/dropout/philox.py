"""Philox4x32-7 in PyTorch: random bits as a function of a seed and an element's index, on any device.

Each call maps a counter to four words of 32 bits. Each word serves two elements, directly and rotated by 16 bits:

    index = counter * NUMBERS + 2 * word + rotated,    key = seed

Both are uniform, so each element is dropped with probability p up to 2^-32. They differ in their upper 16 bits, which
decide unless they equal the threshold's upper bits. So two elements of one word have a correlation of at most 2^-14, or
2^-32 / p if p or 1 - p is below 2^-16; all others are independent. The NUMBERS elements of a call are neighbours (16
bytes of fp16), so a GPU thread that holds them exchanges nothing with others.

Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011. By its Table 2, seven rounds are the
fewest that pass BigCrush; ten rounds have a margin.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORDS = 4
NUMBERS = 2 * WORDS
"""Number of elements per call."""
ROUNDS = 7
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
STEPS = 0x9E3779B9, 0xBB67AE85  # added to the key in each round
_WORD = 0xFFFFFFFF


def philox(counter: Tensor, seed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words for each counter, as int64 from 0 to 2^32 - 1.

    Args:
        counter: int64, the two lower words of the counter; the upper ones are 0.
        seed: a single int64, the key.
    """
    x0, x1 = counter & _WORD, (counter >> 32) & _WORD
    x2 = x3 = torch.zeros_like(counter)
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(ROUNDS):
        one, two = x0 * MULTIPLIERS[0], x2 * MULTIPLIERS[1]  # 64-bit products; int64 wraps around
        x0, x1, x2, x3 = (two >> 32) & _WORD ^ x1 ^ k0, two & _WORD, (one >> 32) & _WORD ^ x3 ^ k1, one & _WORD
        k0, k1 = (k0 + STEPS[0]) & _WORD, (k1 + STEPS[1]) & _WORD
    return x0, x1, x2, x3


def threshold_of(p: float) -> int:
    """An element is dropped if its word is below this: p in units of 2^-32, at most 2^32 - 1."""
    return min(round(p * (_WORD + 1)), _WORD)


def scale_of(p: float) -> float:
    """Factor of kept elements: 1 over their probability according to `threshold_of`; 0 for p = 1."""
    return 0.0 if p == 1.0 else (_WORD + 1) / (_WORD + 1 - threshold_of(p))


def keep(seed: Tensor, num: int, p: float) -> Tensor:
    """Whether each of `num` elements is kept: bool (num,) on the seed's device."""
    counter = torch.arange(-(-num // NUMBERS), device=seed.device)
    words = torch.stack(philox(counter, seed), -1)
    turned = (words << 16) & _WORD | words >> 16
    return torch.stack((words, turned), -1).view(-1)[:num] >= threshold_of(p)
