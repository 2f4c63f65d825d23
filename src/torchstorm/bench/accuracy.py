"""How far a result may be from the truth, where it is timed.

The rule is that of the tests: at most twice the error of the same computed plainly, by PyTorch, in the same dtype; and
never more than a limit, so that nothing passes because plain PyTorch is lost, as it is with bf16 sums of many numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

_TIMES = 2.0
_SUM_UNITS = 4
_LIMIT = {torch.float64: 1e-10, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.1}


def error_of(out: Tensor, right: Tensor) -> float:
    """|out - right| / |right|; infinite where `out` is not finite."""
    if not bool(out.isfinite().all()):
        return float("inf")
    distance, size = float((out.double() - right).norm()), float(right.norm())
    return distance / size if size else distance


def allowed(yardsticks: list[Tensor], right: Tensor, dtype: torch.dtype) -> float:
    """Twice the largest error of the yardsticks, at least the floor and at most the limit."""
    errors = [error_of(x, right) for x in yardsticks]
    # Sums in fp32 come out some units apart by their order alone, and the yardstick's may happen to be exact.
    floor = max(torch.finfo(dtype).eps, _SUM_UNITS * torch.finfo(torch.float32).eps if dtype != torch.float64 else 0.0)
    return min(_LIMIT[dtype], max(floor, *(_TIMES * error for error in errors)))
