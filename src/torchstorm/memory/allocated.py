"""What PyTorch's allocator has handed out on a GPU.

`torch.cuda.memory_allocated` makes a sorted list of all statistics first, which takes the host many times as long.
"""

from __future__ import annotations

import torch


def allocated_bytes(device: torch.device) -> int:  # pragma: gpu
    """Bytes of tensors on a GPU, as `torch.cuda.memory_allocated`."""
    return _statistics(device)["current"]


def peak_allocated_bytes(device: torch.device) -> int:  # pragma: gpu
    """The most since peaks were reset, as `torch.cuda.max_memory_allocated`."""
    return _statistics(device)["peak"]


def _statistics(device: torch.device) -> dict[str, int]:  # pragma: gpu
    every = torch.cuda.memory_stats_as_nested_dict(device)
    found: dict[str, int] = every["allocated_bytes"]["all"] if every else {"current": 0, "peak": 0}
    return found
