"""Ways of training blocks within less memory that others offer, each as a context around forward and backward."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu

UNLIMITED, CHECKPOINT, SESSION = "unlimited", "checkpoint", "session"
COMPILE, SESSION_COMPILED, COMPILE_BUDGET = "compile", "session-compiled", "compile-budget"
TRL, SAVE_ON_CPU = "trl", "save_on_cpu"
WAYS = (UNLIMITED, CHECKPOINT, SESSION, COMPILE, SESSION_COMPILED, COMPILE_BUDGET, TRL, SAVE_ON_CPU)
"""In the order in which they run: if a run is cut, what is missing is what others give."""

ON_A_CPU = (UNLIMITED, CHECKPOINT, SESSION)
"""What runs on a CPU unless more is asked for: compiling takes long there."""

NO_TRL = "trl is not installed"


def keep_everything() -> AbstractContextManager[Any]:
    """No way at all."""
    return contextlib.nullcontext()


def save_to_ram(device: torch.device) -> AbstractContextManager[Any]:
    """PyTorch's own hooks: every saved tensor to host memory, waiting for each copy."""
    return save_on_cpu(pin_memory=device.type == "cuda")


def offload_by_trl() -> AbstractContextManager[Any]:  # pragma: gpu
    """TRL's activation offloading."""
    from accelerate import PartialState  # type: ignore[import-not-found]
    from trl.models.activation_offloading import OffloadActivations  # type: ignore[import-not-found]

    PartialState()  # TRL's logger will not warn without it
    context: AbstractContextManager[Any] = OffloadActivations()
    return context


def has_trl() -> bool:
    """Whether TRL is installed."""
    return importlib.util.find_spec("trl") is not None


@contextlib.contextmanager
def compiled(blocks: Iterable[torch.nn.Module], memory_budget: float | None = None) -> Iterator[None]:
    """Every block through torch.compile by itself inside; uncompiled and forgotten afterwards.

    Args:
        blocks: of the model.
        memory_budget: `torch._functorch.config.activation_memory_budget`; None leaves it at its default.
    """
    from torch._functorch import config

    blocks = list(blocks)
    torch._dynamo.reset()
    budget = contextlib.nullcontext() if memory_budget is None else config.patch(activation_memory_budget=memory_budget)
    try:
        with budget:
            for block in blocks:
                block.compile()
            yield
    finally:
        for block in blocks:
            block._compiled_call_impl = None
        torch._dynamo.reset()
