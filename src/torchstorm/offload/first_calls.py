"""Makes a process's first large exp, sqrt and the like on a CPU as exact as the later ones.

PyTorch computes them by MKL, each thread its part. MKL chooses the code of such a function at its first call, and in
version 2024.2 two threads that make this call at once may race: one of them then computes its part by code of low
accuracy, once, with errors of up to thousands of units in the last place (pytorch/pytorch issue 188792). A call with a
single element runs in one thread, and settles the choice.
"""

from __future__ import annotations

import functools

import torch

NAMES = (
    *("acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp", "log", "log10", "log2", "sin", "sqrt", "tan"),
    *("tanh", "trunc"),
)
"""Functions that PyTorch computes by MKL's vector mathematics (aten/src/ATen/cpu/vml.h)."""


@functools.cache
def settle() -> None:
    """Calls each of `NAMES` with one float32 and one float64 element on the CPU, the first time in a process."""
    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for name in NAMES:
            getattr(torch, name)(one)
