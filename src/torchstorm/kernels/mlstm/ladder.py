"""The development steps of the mLSTM's GPU kernels, in historical order.

Each step has its lesson and its cost, for one head of S tokens. The first four are intermediate steps, with a function
each. The others compute the whole mLSTM and are variants of `mlstm`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from torchstorm.errors import DeviceError, ShapeError
from torchstorm.kernels.mlstm.function import mlstm
from torchstorm.kernels.mlstm.reference import mlstm_quadratic, mlstm_recurrent


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One development step.

    Attributes:
        name: name of the function here, or of the variant of `mlstm`.
        lesson: the new idea.
        costs: time and memory.
        inputs: arguments of `function` and `reference`, in order: q, k, v, i, f of `mlstm`, and k_t for k.mT.
        function: the implementation for a GPU.
        reference: the definition in plain PyTorch, for any device and any dtype up to float64.
        has_backward: whether `function` is differentiable.
    """

    name: str
    lesson: str
    costs: str
    inputs: tuple[str, ...]
    function: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    has_backward: bool = False


def matmul_tiles(a: Tensor, b: Tensor) -> Tensor:
    """A product in tiles.

    Lesson: a tile that is read once is used for a whole tile of results, so memory is read d / tile times, not d times.
    Costs: M N K multiply-adds; as q k^T it stores an S x S matrix in memory.

    Args:
        a: (..., M, K), in float32, float16 or bfloat16; multiplied and added in fp32.
        b: (..., K, N), of the same dtype.

    Returns:
        a @ b (..., M, N), in a's dtype.

    Raises:
        ShapeError: the sizes or dtypes do not fit.
        DeviceError: a is not on a GPU.
    """
    if a.dim() < 2 or b.shape[:-1] != (*a.shape[:-2], a.shape[-1]):
        raise ShapeError(f"a {tuple(a.shape)} @ b {tuple(b.shape)}: b must be {(*a.shape[:-2], a.shape[-1], 'N')}.")
    return _on_gpu("matmul_tiles", a, b)


def qk_v(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(q k^T) v, q scaled by d_qk^-0.5.

    Lesson: a second product can use tiles of the first one directly; S x S is never stored.
    Costs: S^2 (d_qk + d_v) multiply-adds, the first part once per 64 columns of v; memory S d.

    Args:
        q, k: (B, H, S, d_qk), in float32, float16 or bfloat16; multiplied and added in fp32.
        v: (B, H, S, d_v), of the same dtype.

    Returns:
        (B, H, S, d_v), in v's dtype.

    Raises:
        ShapeError: the sizes or dtypes do not fit.
        DeviceError: q is not on a GPU.
    """
    _check(q, k, v)
    return _on_gpu("qk_v", q, k, v)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`qk_v` with a causal mask.

    Lesson: tiles that are fully masked, half of them, can be skipped.
    Costs: half of `qk_v`. Arguments, result and errors as in `qk_v`.
    """
    _check(q, k, v)
    return _on_gpu("causal", q, k, v)


def gated(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> Tensor:
    """The mLSTM's outputs from an empty state, with the exponential gate and the normalizer; not differentiable.

    Lesson: the gates give each pair a weight, computed on the fly from two numbers per token; a running maximum keeps
    it in range, as in FlashAttention; and F, the sum of log f, needs more digits than fp32 has.
    Costs: `causal`, one exponential per pair, and float64 sums of S gates.

    Args:
        q, k, v: as in `qk_v`.
        i, f: gate pre-activations (B, H, S).

    Returns:
        (B, H, S, d_v), in v's dtype.

    Raises:
        ShapeError: the sizes or dtypes do not fit.
        DeviceError: q is not on a GPU.
    """
    _check(q, k, v)
    if i.shape != q.shape[:3] or f.shape != q.shape[:3]:
        raise ShapeError(
            f"i {tuple(i.shape)}, f {tuple(f.shape)}: with q {tuple(q.shape)} both must be {tuple(q.shape[:3])}."
        )
    return _on_gpu("gated", q, k, v, i, f)


def mlstm_ladder() -> tuple[Rung, ...]:
    """All steps, from a tiled product to the chunkwise mLSTM on tensor cores."""
    return (*_STEPS, *_WHOLE)


def _on_gpu(name: str, first: Tensor, *others: Tensor) -> Tensor:
    for x in (first, *others):
        if x.device != first.device or x.device.type != "cuda":
            raise DeviceError(f"{name} runs on one GPU, but its inputs are on {first.device} and {x.device}.")
    if first.dtype not in (torch.float32, torch.float16, torch.bfloat16) or others[0].dtype != first.dtype:
        raise ShapeError(f"{name} takes one dtype of float32, float16, bfloat16, not {first.dtype}, {others[0].dtype}.")
    kernels: Any = import_module("torchstorm.kernels.mlstm.ladder_triton")  # pragma: gpu
    found: Tensor = getattr(kernels, name)(first, *others)  # pragma: gpu
    return found  # pragma: gpu


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.dim() != 4 or v.dim() != 4 or k.shape != q.shape or v.shape[:3] != q.shape[:3] or v.dtype != q.dtype:
        raise ShapeError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, {v.dtype}: q and k must be (B, H, S, d_qk), "
            f"and v (B, H, S, d_v), in {q.dtype} as q is."
        )


def _pairs_reference(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    scores = (q * q.shape[-1] ** -0.5) @ k.mT
    out: Tensor = (scores.tril() if causal else scores) @ v
    return out


def _said(function: Any, word: str) -> str:
    """The docstring's text after "Lesson:" or "Costs:", on one line."""
    after = " ".join(str(function.__doc__).partition(f"{word}:")[2].split())
    for stop in (" Costs:", " Args:", " Takes,"):
        after = after.partition(stop)[0]
    return after.rstrip(".")


def _step(function: Callable[..., Tensor], inputs: tuple[str, ...], reference: Callable[..., Tensor]) -> Rung:
    return Rung(
        name=str(getattr(function, "__name__", "")),
        lesson=_said(function, "Lesson"),
        costs=_said(function, "Costs"),
        inputs=inputs,
        function=function,
        reference=reference,
    )


def _outputs(compute: Callable[..., tuple[Tensor, Any]], *inputs: Tensor) -> Tensor:
    return compute(*inputs)[0]


_ALL = ("q", "k", "v", "i", "f")
_STEPS = (
    _step(matmul_tiles, ("q", "k_t"), torch.matmul),
    _step(qk_v, _ALL[:3], partial(_pairs_reference, causal=False)),
    _step(causal, _ALL[:3], partial(_pairs_reference, causal=True)),
    _step(gated, _ALL, partial(_outputs, mlstm_quadratic)),
)
_WHOLE = (
    Rung(
        name="triton-quadratic",
        lesson="backward recomputes the tiles from the inputs and one number per row, as FlashAttention-2 does; each "
        "gradient has one owner, so no atomics; the maximum depends only on the gates, so a scan computes it first",
        costs="S^2 / 2 (d_qk + d_v) multiply-adds forward, 2.5 times that backward; memory S d and a number per token",
        inputs=_ALL,
        function=partial(mlstm, variant="triton-quadratic"),
        reference=partial(_outputs, mlstm_quadratic),
        has_backward=True,
    ),
    Rung(
        name="triton-quadratic-tensor-cores",
        lesson="the same kernels with fp16 or bf16 operands: weights are applied in fp32 and rounded once, before "
        "the second product; den is the sum of the rounded ones",
        costs="the same multiply-adds, on the GPU's fastest units; still S^2",
        inputs=_ALL,
        function=partial(mlstm, variant="triton-quadratic-tensor-cores"),
        reference=partial(_outputs, mlstm_quadratic),
        has_backward=True,
    ),
    Rung(
        name="triton-chunkwise",
        lesson="a state of d_qk d_v numbers replaces all tokens before a chunk: pairs are computed only within chunks; "
        "few states are saved for backward, the others are recomputed",
        costs="S (2 d_qk d_v + chunk (d_qk + d_v) / 2) multiply-adds forward, linear in S; a state per chunk",
        inputs=_ALL,
        function=partial(mlstm, variant="triton-chunkwise"),
        reference=partial(_outputs, mlstm_recurrent),
        has_backward=True,
    ),
)
