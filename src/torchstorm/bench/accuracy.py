"""The allowed error of timed results.

The rule is that of the tests: at most twice the error of plain PyTorch in the same dtype. There is also an absolute
limit, for cases in which plain PyTorch is inaccurate, such as bf16 sums of many values.
"""

from __future__ import annotations

import torch
from torch import Tensor

_TIMES = 2.0
_SUM_UNITS = 4
_LIMIT = {torch.float64: 1e-10, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.1}


def error_of(out: Tensor, right: Tensor) -> float:
    """|out - right| / |right|; infinite if `out` is not finite."""
    if not bool(out.isfinite().all()):
        return float("inf")
    distance, size = float((out.double() - right).norm()), float(right.norm())
    return distance / size if size else distance


def allowed(yardsticks: list[Tensor], right: Tensor, dtype: torch.dtype) -> float:
    """Twice the largest error of the references, clamped to the floor and the limit."""
    errors = [error_of(x, right) for x in yardsticks]
    # A floor, since fp32 sums in another order differ by some units in the last place, and the reference may be exact.
    floor = max(torch.finfo(dtype).eps, _SUM_UNITS * torch.finfo(torch.float32).eps if dtype != torch.float64 else 0.0)
    return min(_LIMIT[dtype], max(floor, *(_TIMES * error for error in errors)))
