"""Philox4x32-7 in PyTorch: random bits from a seed and a number's place alone, on any device.

Each call turns a counter into four words of 32 bits, of which each serves two numbers, as it is and turned by 16 bits:

    place = counter * NUMBERS + 2 * word + turned,    key = seed

Both are uniform, so that each number is dropped with its probability to 2^-32. They differ in which 16 bits come first,
and those decide unless they equal the threshold's: two numbers of one word are correlated by 2^-14 at most, or
2^-32 / p where p or 1 - p is below 2^-16; any others not at all. Neighbours are one call's, so that a GPU's
thread that holds NUMBERS neighbours, 16 bytes in halves, exchanges nothing with others.

Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011, whose Table 2 has seven rounds as the
fewest that pass BigCrush; ten are for those who want a margin.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORDS = 4
NUMBERS = 2 * WORDS
"""That one call decides on."""
ROUNDS = 7
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
STEPS = 0x9E3779B9, 0xBB67AE85  # of the key, from round to round
_WORD = 0xFFFFFFFF


def philox(counter: Tensor, seed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words for each counter, as int64 from 0 to 2^32 - 1.

    Args:
        counter: int64, the counter's two lower words; the upper ones are 0.
        seed: int64, one number, the key.
    """
    x0, x1 = counter & _WORD, (counter >> 32) & _WORD
    x2 = x3 = torch.zeros_like(counter)
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(ROUNDS):
        one, two = x0 * MULTIPLIERS[0], x2 * MULTIPLIERS[1]  # as 64 bits; int64 wraps around
        x0, x1, x2, x3 = (two >> 32) & _WORD ^ x1 ^ k0, two & _WORD, (one >> 32) & _WORD ^ x3 ^ k1, one & _WORD
        k0, k1 = (k0 + STEPS[0]) & _WORD, (k1 + STEPS[1]) & _WORD
    return x0, x1, x2, x3


def threshold_of(p: float) -> int:
    """A number is kept unless its word is below this: p in units of 2^-32, and never 2^32, which is no word."""
    return min(round(p * (_WORD + 1)), _WORD)


def scale_of(p: float) -> float:
    """What is kept is multiplied by this: 1 over the probability of that, as `threshold_of` has it; 0 for p = 1."""
    return 0.0 if p == 1.0 else (_WORD + 1) / (_WORD + 1 - threshold_of(p))


def keep(seed: Tensor, num: int, p: float) -> Tensor:
    """Whether each of `num` numbers is kept, as bool (num,) on the seed's device."""
    counter = torch.arange(-(-num // NUMBERS), device=seed.device)
    words = torch.stack(philox(counter, seed), -1)
    turned = (words << 16) & _WORD | words >> 16
    return torch.stack((words, turned), -1).view(-1)[:num] >= threshold_of(p)
