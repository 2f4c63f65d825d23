"""The ladder of the mLSTM's GPU kernels, in the order in which such kernels were understood.

Each rung says what it taught and what it costs, for one head of S tokens. The first four are steps on the way, with a
function each; the others compute the whole mLSTM and are variants of `mlstm`.
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
    """One step of the ladder.

    Attributes:
        name: of the function here, or of the variant of `mlstm`.
        taught: what was new.
        costs: time and memory.
        inputs: what `function` and `reference` take, in order: of q, k, v, i, f as `mlstm` takes them, and k_t, which
            is k.mT.
        function: computes it on a GPU.
        reference: the definition in plain PyTorch, any dtype up to float64, anywhere.
        has_backward: whether gradients go through `function`.
    """

    name: str
    taught: str
    costs: str
    inputs: tuple[str, ...]
    function: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    has_backward: bool = False


def matmul_tiles(a: Tensor, b: Tensor) -> Tensor:
    """A product in tiles.

    Taught: a tile that is read once serves a whole tile of results, so that memory is read d / tile times, not d times.
    Costs: M N K multiply-adds; as q k^T it leaves an S x S matrix in memory.

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

    Taught: a second product can take its tiles from the first while they are there; S x S is never written.
    Costs: S^2 (d_qk + d_v) multiply-adds, the first part once for every 64 columns of v; memory S d.

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
    """`qk_v`, where a token meets only those up to itself.

    Taught: a tile that no row sees need not be visited: half of them.
    Costs: half of `qk_v`. Takes, returns and raises what that does.
    """
    _check(q, k, v)
    return _on_gpu("causal", q, k, v)


def gated(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> Tensor:
    """The mLSTM's outputs from an empty state, with the exponential gate and the normaliser; no gradients.

    Taught: the gates are a weight for each pair, made from two numbers a token where it is needed; a running maximum
    keeps it in range, as in FlashAttention; and F, the sum of log f, needs more digits than fp32 has.
    Costs: `causal`, one exponential a pair, and float64 sums of S gates.

    Args:
        q, k, v: as for `qk_v`.
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
            f"i {tuple(i.shape)}, f {tuple(f.shape)}: with q {tuple(q.shape)} both are {tuple(q.shape[:3])}."
        )
    return _on_gpu("gated", q, k, v, i, f)


def mlstm_ladder() -> tuple[Rung, ...]:
    """Every rung, from a product in tiles to the chunkwise mLSTM on tensor cores."""
    return (*_STEPS, *_WHOLE)


def _on_gpu(name: str, first: Tensor, *others: Tensor) -> Tensor:
    for x in (first, *others):
        if x.device != first.device or x.device.type != "cuda":
            raise DeviceError(f"{name} runs on one GPU, but its inputs are on {first.device} and {x.device}.")
    if first.dtype not in (torch.float32, torch.float16, torch.bfloat16) or others[0].dtype != first.dtype:
        raise ShapeError(f"{name} takes float32, float16 or bfloat16, all alike, not {first.dtype}, {others[0].dtype}.")
    kernels: Any = import_module("torchstorm.kernels.mlstm.ladder_triton")  # pragma: gpu
    found: Tensor = getattr(kernels, name)(first, *others)  # pragma: gpu
    return found  # pragma: gpu


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.dim() != 4 or v.dim() != 4 or k.shape != q.shape or v.shape[:3] != q.shape[:3] or v.dtype != q.dtype:
        raise ShapeError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, {v.dtype}: q and k are (B, H, S, d_qk), v is "
            f"(B, H, S, d_v), in {q.dtype} as q is."
        )


def _pairs_reference(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    scores = (q * q.shape[-1] ** -0.5) @ k.mT
    out: Tensor = (scores.tril() if causal else scores) @ v
    return out


def _said(function: Any, word: str) -> str:
    """What the docstring says after "Taught:" or "Costs:", on one line."""
    after = " ".join(str(function.__doc__).partition(f"{word}:")[2].split())
    for stop in (" Costs:", " Args:", " Takes,"):
        after = after.partition(stop)[0]
    return after.rstrip(".")


def _step(function: Callable[..., Tensor], inputs: tuple[str, ...], reference: Callable[..., Tensor]) -> Rung:
    return Rung(
        name=str(getattr(function, "__name__", "")),
        taught=_said(function, "Taught"),
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
        taught="backward makes the tiles again from inputs and one number a row, as FlashAttention-2 does; every "
        "gradient has one owner, so nothing is atomic; the maximum comes from the gates alone, so a scan has it first",
        costs="S^2 / 2 (d_qk + d_v) multiply-adds forward, 2.5 times that backward; memory S d and one number a token",
        inputs=_ALL,
        function=partial(mlstm, variant="triton-quadratic"),
        reference=partial(_outputs, mlstm_quadratic),
        has_backward=True,
    ),
    Rung(
        name="triton-quadratic-tensor-cores",
        taught="the same kernels with half tiles as operands: weights multiply in fp32 and are rounded once, before "
        "the second product; den sums the rounded ones",
        costs="the same multiply-adds, where a GPU has most of them; still S^2",
        inputs=_ALL,
        function=partial(mlstm, variant="triton-quadratic-tensor-cores"),
        reference=partial(_outputs, mlstm_quadratic),
        has_backward=True,
    ),
    Rung(
        name="triton-chunkwise",
        taught="a state of d_qk d_v numbers stands for all tokens before a chunk, so that pairs meet in chunks only; "
        "few states are kept for backward, the others are made again",
        costs="S (2 d_qk d_v + chunk (d_qk + d_v) / 2) multiply-adds forward, linear in S; one state a chunk meanwhile",
        inputs=_ALL,
        function=partial(mlstm, variant="triton-chunkwise"),
        reference=partial(_outputs, mlstm_recurrent),
        has_backward=True,
    ),
)
