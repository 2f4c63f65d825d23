"""The dtypes that operations support, and the dtypes of their sums."""

from __future__ import annotations

import torch

HALVES = (torch.float16, torch.bfloat16)
UP_TO_FP32 = (torch.float32, *HALVES)
"""Dtypes that GPU kernels support."""
FLOATS = (*UP_TO_FP32, torch.float64)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: fp32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32
