"""Makes two backward passes of a compiled block give the same bits, so that what still differs is the block's variants.

Attention's backward kernels add up the queries' gradient in the order in which thread blocks end. Flash attention and
memory-efficient attention have a deterministic way, which they take where PyTorch's deterministic algorithms are on and
do not only warn. To turn these on for everything is no choice: cuBLAS's products would raise, unless
CUBLAS_WORKSPACE_CONFIG was set when the process made its first one. cuDNN's attention has no such way in PyTorch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def is_strict() -> bool:
    """Whether operations that have no deterministic way raise."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


@contextmanager
def deterministically(*, enabled: bool = True, warn_only: bool = False) -> Iterator[None]:
    """PyTorch's deterministic algorithms inside; afterwards what was there before.

    Args:
        enabled: whether they are on at all.
        warn_only: whether operations that have no deterministic way only warn.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def allow_products(device: torch.device) -> None:
    """Has PyTorch run matrix products on a GPU where deterministic algorithms are on. Products of a user who has set
    CUBLAS_WORKSPACE_CONFIG are left as they are.

    PyTorch asks once, at the process's first product, whether CUBLAS_WORKSPACE_CONFIG is set: so this is called before.
    While it stays set, PyTorch 2.11 parses it in every product, for 30 to 180 us of the host's time. It gives cuBLAS a
    workspace of its own for each stream with and without it, and that is what makes products repeat their bits.
    """
    if device.type != "cuda" or _WORKSPACE in os.environ:
        return
    os.environ[_WORKSPACE] = ":4096:8"  # pragma: gpu
    try:  # pragma: gpu
        one = torch.ones(1, 1, device=device)
        torch.mm(one, one)
    finally:  # pragma: gpu
        del os.environ[_WORKSPACE]


class Repeatable(TorchDispatchMode):
    """For backward: what was compiled runs as it is, and PyTorch's own operations take their deterministic way.

    Deterministic algorithms are on within each operation alone: a compiled backward refuses to run where they are on
    and were off in its forward.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name == "aten::_scaled_dot_product_cudnn_attention_backward":
            grad_out, query, key, value, out, *_ = args
            bias, is_causal = args[8], args[14]
            return _gradients(grad_out, query, key, value, out, bias, is_causal=is_causal, **(kwargs or {}))
        with deterministically(warn_only="attention" not in name):
            return func(*args, **(kwargs or {}))


def _gradients(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    is_causal: bool,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of softmax(scale QKᵀ + bias)V with respect to Q, K and V, as if nothing was dropped out (Dao et al., 2022).

    One head of one sample at a time, for the matrix of its scores to be small.

    Args:
        grad_out, query, out: (batch, heads, queries, head size); the output's last size is the value's.
        key, value: (batch, heads or a number that divides it, keys, head size).
        bias: added to the scores, of a shape that broadcasts to (batch, heads, queries, keys).
        is_causal: whether a query sees no later key.
        scale: of the scores; None for 1 / sqrt(head size).
    """
    grads = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    num_samples, num_heads, num_queries, _ = query.shape
    hidden = torch.ones(num_queries, key.shape[-2], dtype=torch.bool, device=query.device).triu(1)
    if bias is not None:
        bias = bias.expand(num_samples, num_heads, *hidden.shape)
    for sample in range(num_samples):
        for head in range(num_heads):
            one, shared = (sample, head), (sample, head * key.shape[1] // num_heads)
            q, k, v, grad = query[one], key[shared], value[shared], grad_out[one]
            scores = (q @ k.T).float() * scale
            if bias is not None:
                scores += bias[one]
            if is_causal:
                scores.masked_fill_(hidden, -math.inf)
            shares = scores.softmax(-1)
            through = (grad @ v.T).float() - (grad.float() * out[one]).sum(-1, keepdim=True)
            grad_scores = (shares * through * scale).to(q.dtype)
            grads[0][one] += grad_scores @ k
            grads[1][shared] += grad_scores.T @ q
            grads[2][shared] += shares.to(q.dtype).T @ grad
    return grads
