"""The dtypes that operations take, and what their sums are in."""

from __future__ import annotations

import torch

HALVES = (torch.float16, torch.bfloat16)
UP_TO_FP32 = (torch.float32, *HALVES)
"""What kernels for a GPU take."""
FLOATS = (*UP_TO_FP32, torch.float64)


def wide(dtype: torch.dtype) -> torch.dtype:
    """What is added up in: fp32, float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32
