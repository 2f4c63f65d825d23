"""PyTorch's own functions, called as they are, where "auto" chooses them: with their own gradients.

An operator around them would add 20 to 100 us of host time a call, which is most of what a small tensor takes. For the
same reason what is here and what calls it asks in the cheapest way: x.device.type takes as long as all of `directly`.
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


def directly(function: Callable[..., Tensor], x: Tensor, *others: Any) -> Tensor:
    """function(x, *others); autocast does not reach inside."""
    if not _is_autocast(x):
        return function(x, *others)
    with without_autocast(x):
        return function(x, *others)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """A context in which autocast rounds nothing on x's device: torch.autocast's own takes 3 us where there is none."""
    return torch.autocast(x.device.type, enabled=False) if _is_autocast(x) else nullcontext()


def _is_autocast(x: Tensor) -> bool:
    """Autocast knows no meta tensors."""
    return (x.is_cuda and torch.is_autocast_enabled("cuda")) or (x.is_cpu and torch.is_autocast_enabled("cpu"))


def is_pytorchs(*tensors: Tensor) -> bool:
    """Whether "auto" is PyTorch's own function: without a GPU or Triton, in float64, and for small tensors."""
    return not has_triton_for(tensors[0]) or is_small(*tensors)


def is_small(*tensors: Tensor) -> bool:
    """Whether the host takes longer to start kernels of ours for such tensors than those kernels could save.

    On a GPU ours take 50 to 100 us more of the host than PyTorch's. Reading 64 MiB and writing as much takes 31 us at
    4.3 TB/s, of which ours save a part. On a CPU what ours save is memory traffic, and up to 1 MiB stays in a core's
    cache.

    Never on a GPU while torch.compile traces, where a call costs nothing of that, and a choice by size would make
    programs anew; always on a CPU, where the compiler fuses what it can see.
    """
    is_cpu = tensors[0].is_cpu
    if torch.compiler.is_compiling():
        return is_cpu
    most_bytes = _SMALL_BYTES_CPU if is_cpu else _SMALL_BYTES_GPU
    for x in tensors:  # noqa: SIM110 -- a generator takes longer than all of this
        if x.nbytes > most_bytes:
            return False
    return True
