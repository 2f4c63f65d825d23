"""The PyTorch operators torch.ops.torchstorm.mlstm_forward and mlstm_backward.

A variant is a module with functions `forward`, `backward` and `empty_saved`, with the same arguments and results as in
`chunkwise`. It is imported at its first use. Shapes do not depend on data, so torch.compile sees both as single nodes.

The backward operator is differentiable through `chunkwise.differentiable`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from torchstorm.kernels.dtypes import wide
from torchstorm.kernels.mlstm import chunkwise
from torchstorm.kernels.operator import differentiable, fake, operator
from torchstorm.kernels.pytorch_fallback import without_autocast
from torchstorm.kernels.second_order import own_views

IMPLEMENTATIONS = {
    "chunkwise": "torchstorm.kernels.mlstm.chunkwise",
    "triton-quadratic": "torchstorm.kernels.mlstm.quadratic_triton",
    "triton-quadratic-tensor-cores": "torchstorm.kernels.mlstm.quadratic_tensor_cores",
    "triton-chunkwise": "torchstorm.kernels.mlstm.chunkwise_triton",
}
# Numbers of the operators' arguments: q, k, v, i, f, C0, n0, m0, and the gradients of h, C, n, m.
_NUM_INPUTS = 8
_FLOP_CHUNK = 64  # tokens per chunk, for counting FLOPs
_NUM_OUTPUTS = 4


@operator("mlstm_forward")
def mlstm_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    C0: Tensor | None,
    n0: Tensor | None,
    m0: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk: int | None,
    gate: str,
    variant: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Outputs h (B, H, S, d_v), the final C, n, m, and den, row_m and states for backward."""
    with without_autocast(q):  # autocast would round the sums
        outputs = _implementation(variant).forward(q, k, v, i, f, C0, n0, m0, cu_seqlens, chunk, gate)
    h, C, n, m, den, row_m, states = (x.contiguous() for x in outputs)
    return h, C, n, m, den, row_m, states


@fake(mlstm_forward)
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    C0: Tensor | None,
    n0: Tensor | None,
    m0: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk: int | None,
    gate: str,
    variant: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    B, H, S, K = q.shape
    V = v.shape[-1]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = _wide_empty(q, (N, H, K, V)), _wide_empty(q, (N, H, K)), _wide_empty(q, (N, H))
    den, row_m, states = _implementation(variant).empty_saved(q, v, cu_seqlens, chunk, gate)
    return v.new_empty((B, H, S, V)), *state, den, row_m, states


@operator("mlstm_backward")
def mlstm_backward(
    dh: Tensor,
    dC: Tensor | None,
    dn: Tensor | None,
    dm: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    C0: Tensor | None,
    n0: Tensor | None,
    m0: Tensor | None,
    cu_seqlens: Tensor | None,
    h: Tensor,
    den: Tensor,
    row_m: Tensor,
    states: Tensor,
    C: Tensor,
    n: Tensor,
    m: Tensor,
    chunk: int | None,
    gate: str,
    variant: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, i, f, C0, n0, m0. Those of a missing initial state are empty."""
    with without_autocast(q):
        grads = _implementation(variant).backward(
            *(dh, dC, dn, dm, q, k, v, i, f, C0, n0, m0, cu_seqlens, h, den, row_m, states, C, n, m, chunk, gate)
        )
    dq, dk, dv, di, df, dC0, dn0, dm0 = (
        _wide_empty(q, (0,)) if x is None else grad.contiguous()
        for x, grad in zip((q, k, v, i, f, C0, n0, m0), grads, strict=True)
    )
    return dq, dk, dv, di, df, dC0, dn0, dm0


@fake(mlstm_backward)
def _(
    dh: Tensor,
    dC: Tensor | None,
    dn: Tensor | None,
    dm: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    C0: Tensor | None,
    n0: Tensor | None,
    m0: Tensor | None,
    cu_seqlens: Tensor | None,
    h: Tensor,
    den: Tensor,
    row_m: Tensor,
    states: Tensor,
    C: Tensor,
    n: Tensor,
    m: Tensor,
    chunk: int | None,
    gate: str,
    variant: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, di, df, dC0, dn0, dm0 = (
        _wide_empty(q, (0,)) if x is None else x.new_empty(x.shape) for x in (q, k, v, i, f, C0, n0, m0)
    )
    return dq, dk, dv, di, df, dC0, dn0, dm0


def _implementation(variant: str) -> Any:
    return import_module(IMPLEMENTATIONS[variant])


def _wide_empty(like: Tensor, size: tuple[int, ...]) -> Tensor:
    return like.new_empty(size, dtype=wide(like.dtype))


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, chunk, gate, variant = inputs
    h, C, n, m, den, row_m, states = output
    ctx.save_for_backward(*tensors, h, den, row_m, states, C, n, m)
    ctx.options = chunk, gate, variant
    ctx.mark_non_differentiable(den, row_m, states)
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, dh: Tensor | None, dC: Tensor | None, dn: Tensor | None, dm: Tensor | None, *_: Tensor | None
) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    if dh is None:
        h = saved[_NUM_INPUTS + 1]
        dh = torch.zeros_like(h)
    grads = mlstm_backward(dh, dC, dn, dm, *saved, *ctx.options)
    given = (None if x is None else grad for x, grad in zip(saved[:_NUM_INPUTS], grads, strict=True))
    return *given, None, None, None, None


def _keep_for_second_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    # The four gradients, the inputs and cu_seqlens. The results of forward are recomputed from these.
    ctx.save_for_backward(*inputs[: _NUM_OUTPUTS + _NUM_INPUTS + 1])
    ctx.chunk, ctx.gate = inputs[-3:-1]
    ctx.num_others = len(inputs) - _NUM_OUTPUTS - _NUM_INPUTS
    ctx.set_materialize_grads(False)


def _second_backward(ctx: Any, *grads_of_grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """Differentiates `mlstm_backward` through a forward pass under autograd."""
    *tensors, cu_seqlens = ctx.saved_tensors
    further = torch.is_grad_enabled()
    with torch.enable_grad():
        own = own_views(tensors)
        grads, inputs = own[:_NUM_OUTPUTS], own[_NUM_OUTPUTS:]
        q, k, v, i, f, C0, n0, m0 = inputs
        outputs = chunkwise.differentiable(q, k, v, i, f, C0, n0, m0, cu_seqlens, ctx.chunk, ctx.gate)
        reached = [(x, dx) for x, dx in zip(outputs, grads, strict=True) if dx is not None and x.requires_grad]
        first = torch.autograd.grad(
            [x for x, _ in reached],
            [x for x in inputs if x is not None],
            [dx for _, dx in reached],
            create_graph=True,
            materialize_grads=True,
        )
        given = [grad for x, grad in zip(inputs, grads_of_grads, strict=True) if x is not None]
        wanted = [(x, dx) for x, dx in zip(first, given, strict=True) if dx is not None]
        second = iter(
            torch.autograd.grad(
                [x for x, _ in wanted],
                [x for x in own if x is not None],
                [dx for _, dx in wanted],
                create_graph=further,
                materialize_grads=True,
            )
        )
    return *(None if x is None else next(second) for x in own), *[None] * ctx.num_others


differentiable(mlstm_forward, _backward, setup_context=_keep_for_backward)
differentiable(mlstm_backward, _second_backward, setup_context=_keep_for_second_backward)


@register_flop_formula(torch.ops.torchstorm.mlstm_forward)
def _forward_flops(q: torch.Size, k: torch.Size, v: torch.Size, *_: Any, **__: Any) -> int:
    """FLOPs of the matrix products, chunkwise: pairs within a chunk, and the state's update and use."""
    return _flops(q, v, pairs=(1, 1), states=2)


@register_flop_formula(torch.ops.torchstorm.mlstm_backward)
def _backward_flops(
    dh: Any, dC: Any, dn: Any, dm: Any, q: torch.Size, k: torch.Size, v: torch.Size, *_: Any, **__: Any
) -> int:
    """FLOPs of the recomputed states, their gradients, and those of q, k and v."""
    return _flops(q, v, pairs=(3, 2), states=5)


def _flops(q: torch.Size, v: torch.Size, *, pairs: tuple[int, int], states: int) -> int:
    """FLOPs of products over d_qk and d_v for a chunk's pairs, half of which are masked, and with whole states."""
    B, H, S, K = q
    V = v[-1]
    return B * H * S * (_FLOP_CHUNK * (pairs[0] * K + pairs[1] * V) + 2 * states * K * V)
