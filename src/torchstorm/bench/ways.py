"""Ways of training blocks within less memory that others offer, each as a context around forward and backward."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import create_selective_checkpoint_contexts

UNLIMITED, CHECKPOINT, SELECTIVE, SESSION = "unlimited", "checkpoint", "selective", "session"
COMPILE, COMPILE_CHECKPOINT, SESSION_COMPILED = "compile", "compile-checkpoint", "session-compiled"
COMPILE_BUDGET, TRL, SAVE_ON_CPU = "compile-budget", "trl", "save_on_cpu"
COMPILED = (COMPILE, COMPILE_CHECKPOINT, SESSION_COMPILED, COMPILE_BUDGET)
WAYS = (UNLIMITED, CHECKPOINT, SELECTIVE, SESSION, *COMPILED, TRL, SAVE_ON_CPU)
"""In the order in which they run: if a run is cut, what is missing is what others give."""

ON_A_CPU = (UNLIMITED, CHECKPOINT, SELECTIVE, SESSION)
"""What runs on a CPU unless more is asked for: compiling takes long there."""

MEMORY_BUDGETS = (0.5, 0.2, 0.0)
"""Of torch.compile, as shares of what a compiled block saves of itself."""

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
Checkpointing = Callable[[Contexts | None], AbstractContextManager[Any]]
"""Inside, a model computes its blocks again; with such contexts it keeps some of what they compute."""

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)

NO_TRL = "trl is not installed"


def keep_everything() -> AbstractContextManager[Any]:
    """No way at all."""
    return contextlib.nullcontext()


def save_to_ram(device: torch.device) -> AbstractContextManager[Any]:
    """PyTorch's own hooks: every saved tensor to host memory, waiting for each copy."""
    return save_on_cpu(pin_memory=device.type == "cuda")


def selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """PyTorch's selective checkpointing as its documentation sets it up: products and attention stay, the rest not."""
    kept = [getattr(torch.ops.aten, name).default for name in (*_PRODUCTS, *_ATTENTION)]
    contexts: tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
    contexts = create_selective_checkpoint_contexts(kept)
    return contexts


@contextlib.contextmanager
def offloading_by_trl(model: torch.nn.Module) -> Iterator[Callable[[], AbstractContextManager[Any]]]:
    """TRL's activation offloading as its trainers set it up: all but what the model's head saves."""
    from accelerate import PartialState  # type: ignore[import-not-found]
    from trl.models.activation_offloading import get_act_offloading_ctx_manager  # type: ignore[import-not-found]

    def hooks() -> list[dict[int, Any]]:
        return [
            each
            for module in model.modules()
            for each in (module._forward_hooks, module._forward_pre_hooks, module._forward_hooks_always_called)
        ]

    PartialState()  # TRL's logger will not warn without it
    before = [set(each) for each in hooks()]
    try:
        context = get_act_offloading_ctx_manager(model, warn_if_no_head=False)
        yield lambda: context
    finally:
        for each, kept in zip(hooks(), before, strict=True):
            for key in set(each) - kept:
                del each[key]


def has_trl() -> bool:
    """Whether TRL is installed."""
    return importlib.util.find_spec("trl") is not None


@contextlib.contextmanager
def compiled(
    blocks: Iterable[torch.nn.Module], memory_budget: float | None = None, *, same_random: bool = False
) -> Iterator[None]:
    """Every block through torch.compile by itself inside; uncompiled and forgotten afterwards.

    Args:
        blocks: of the model.
        memory_budget: `torch._functorch.config.activation_memory_budget`; None leaves it at its default.
        same_random: whether random numbers are those of eager blocks, which takes longer.
    """
    from torch._functorch import config
    from torch._inductor import config as inductor

    blocks = list(blocks)
    torch._dynamo.reset()
    budget: dict[str, Any] = {} if memory_budget is None else {"activation_memory_budget": memory_budget}
    # Each block may be compiled for itself; beyond torch's own limit the rest would silently run eagerly.
    limit = max(torch._dynamo.config.recompile_limit, 2 * len(blocks))
    try:
        with (
            config.patch(**budget),
            inductor.patch(fallback_random=same_random),
            torch._dynamo.config.patch(recompile_limit=limit),
        ):
            for block in blocks:
                block.compile()
            yield
    finally:
        for block in blocks:
            block._compiled_call_impl = None
        torch._dynamo.reset()
