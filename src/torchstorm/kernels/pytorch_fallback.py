"""Calls PyTorch's own functions without an operator around them, with their own gradients, if "auto" chooses them.

An operator would add tens of microseconds of host time per call, which is most of the time for a small tensor. For the
same reason the checks here and in the callers are the fastest ones: x.device.type takes as long as all of
`call_pytorch`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from torchstorm.kernels.variants import has_triton_for

_SMALL_BYTES_CPU = 1 << 20
_SMALL_BYTES_GPU = 64 << 20


def call_pytorch(function: Callable[..., Tensor], x: Tensor, *others: Any) -> Tensor:
    """Returns function(x, *others), computed without autocast."""
    if not _is_autocast(x):
        return function(x, *others)
    with without_autocast(x):
        return function(x, *others)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Disables autocast for x's device. Does nothing if it is off, since torch.autocast takes 3 us even then."""
    return torch.autocast(x.device.type, enabled=False) if _is_autocast(x) else nullcontext()


def _is_autocast(x: Tensor) -> bool:
    """Whether autocast is on for x's device. It does not support meta tensors."""
    return (x.is_cuda and torch.is_autocast_enabled("cuda")) or (x.is_cpu and torch.is_autocast_enabled("cpu"))


def prefers_pytorch(*tensors: Tensor) -> bool:
    """Whether "auto" uses PyTorch's own function: without a GPU or Triton, in float64, and for small tensors."""
    return not has_triton_for(tensors[0]) or is_small(*tensors)


def is_small(*tensors: Tensor) -> bool:
    """Whether launching our kernels takes more host time for these tensors than the kernels could save.

    On a GPU our operators needed 50 to 100 us more host time than PyTorch's before docs/decisions/0049. Reading and
    writing 64 MiB takes 31 us at 4.3 TB/s, of which our kernels save a part. On a CPU our kernels save memory traffic,
    but up to 1 MiB stays in a core's cache.

    While torch.compile traces: never on a GPU, where a call has no such host time, and a choice by size would cause
    recompilation; always on a CPU, where the compiler can fuse PyTorch's own functions.
    """
    is_cpu = tensors[0].is_cpu
    if torch.compiler.is_compiling():
        return is_cpu
    most_bytes = _SMALL_BYTES_CPU if is_cpu else _SMALL_BYTES_GPU
    for x in tensors:  # noqa: SIM110 -- a generator takes longer than all of this
        if x.nbytes > most_bytes:
            return False
    return True
