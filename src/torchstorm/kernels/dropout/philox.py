"""Philox4x32-7 in PyTorch: random bits from a seed and a number's place alone, on any device.

Each call turns a counter into four words of 32 bits. The numbers of a tensor, counted in row-major order, take them so:

    place = group * GROUP + word * LANES + lane,    counter = group * LANES + lane,    key = seed

so that a GPU's program that holds LANES neighbours needs no exchange between threads to give each word to the right
number. Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011, whose Table 2 has seven rounds as
the fewest that pass BigCrush; ten are for those who want a margin.
"""

from __future__ import annotations

import torch
from torch import Tensor

LANES = 1024
WORDS = 4
GROUP = WORDS * LANES
ROUNDS = 7
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
STEPS = 0x9E3779B9, 0xBB67AE85  # of the key, from round to round
_WORD = 0xFFFFFFFF
BITS = 31  # of a word that decide


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
    """A word's upper BITS bits must not be below this for its number to be kept."""
    return min(round(p * (1 << BITS)), (1 << BITS) - 1)


def keep(seed: Tensor, num: int, p: float) -> Tensor:
    """Whether each of `num` numbers is kept, as bool (num,) on the seed's device."""
    groups = -(-num // GROUP)
    counter = torch.arange(groups * LANES, device=seed.device)
    words = torch.stack(philox(counter, seed)).view(WORDS, groups, LANES).transpose(0, 1)
    return (words.reshape(-1)[:num] >> (32 - BITS)) >= threshold_of(p)
