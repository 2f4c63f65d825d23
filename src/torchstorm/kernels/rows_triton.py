"""Functions shared by Triton kernels over rows or channels.

Imported only with a GPU or Triton's interpreter.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load(at, inside, OTHER: tl.constexpr, FULL: tl.constexpr, EVICT: tl.constexpr):
    """What is read, in fp32, OTHER where it is not inside. FULL: all is, and no choice is made for each number."""
    if FULL:
        x = tl.load(at, eviction_policy=EVICT)
    else:
        x = tl.load(at, mask=inside, other=OTHER, eviction_policy=EVICT)
    return x.to(tl.float32)


@triton.jit
def multiple(n, UNIT: tl.constexpr):
    """n, which is a multiple of UNIT, as the compiler is to know."""
    if UNIT > 1:
        n = n // UNIT * UNIT
    return n


@triton.jit
def middle(a, b, c):
    """Of three; any of them where one is NaN."""
    return tl.maximum(tl.minimum(a, b), tl.minimum(tl.maximum(a, b), c))
