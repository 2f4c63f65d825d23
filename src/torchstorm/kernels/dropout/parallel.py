"""Dropout on CPU cores, with numba. float16 and bfloat16 are converted to float32 and back."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import numpy as np
from numba import njit, prange
from torch import Tensor

from torchstorm.kernels.dropout.philox import MULTIPLIERS, NUMBERS, ROUNDS, STEPS, threshold_of
from torchstorm.kernels.dtypes import wide

_M0, _M1 = (np.uint64(m) for m in MULTIPLIERS)
_S0, _S1 = (np.uint64(s) for s in STEPS)
_WORD = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_TURN = np.uint64(16)
_LANES = 64  # calls that are made at once: the compiler makes vectors of them


@njit(parallel=True)
def _dropout(x, y, seed, threshold, kept, dropped):
    block = _LANES * NUMBERS
    for number in prange((x.size + block - 1) // block):
        words = np.empty((4, _LANES), np.uint64)
        for lane in range(_LANES):
            counter = np.uint64(number * _LANES + lane)
            x0, x1 = counter & _WORD, counter >> _HALF
            x2 = x3 = np.uint64(0)
            k0, k1 = seed & _WORD, seed >> _HALF
            for _ in range(ROUNDS):
                one, two = x0 * _M0, x2 * _M1
                x0, x1, x2, x3 = (two >> _HALF) ^ x1 ^ k0, two & _WORD, (one >> _HALF) ^ x3 ^ k1, one & _WORD
                k0, k1 = (k0 + _S0) & _WORD, (k1 + _S1) & _WORD
            words[0, lane] = x0
            words[1, lane] = x1
            words[2, lane] = x2
            words[3, lane] = x3
        for each in range(min(block, x.size - number * block)):
            word = words[each % NUMBERS // 2, each // NUMBERS]
            if each % 2:
                word = (word << _TURN) & _WORD | word >> _TURN
            place = number * block + each
            y[place] = x[place] * (kept if word >= threshold else dropped)


def dropout(x: Tensor, seed: Tensor, y: Tensor, p: float, scale: float, variant: str) -> None:
    """Fills y from x, both contiguous."""
    key = np.uint64(int(seed) & 0xFFFFFFFFFFFFFFFF)
    dtype = wide(x.dtype)
    out = y if y.dtype == dtype else y.new_empty(y.shape, dtype=dtype)
    numbers = x.detach().to(dtype).numpy().reshape(-1)
    factors = numbers.dtype.type(scale), numbers.dtype.type(0.0)
    _dropout(numbers, out.numpy().reshape(-1), key, np.uint64(threshold_of(p)), *factors)
    if out is not y:
        y.copy_(out)
