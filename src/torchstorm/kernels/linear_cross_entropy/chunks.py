"""The last layer and its loss over chunks of tokens: what is held at once, and in what order it is computed.

Forward, a chunk of n tokens at a time:  logits = x_c W^T (+ b), by cuBLAS into one buffer that all chunks share;
losses from it, and the logits turned into their gradients where they stand; dx_c = dlogits W;  dW += dlogits^T x_c.
With that, the gradients of a mean or a sum are done when forward ends, up to the one number that backward brings. They
could be computed in backward instead, from the row's log-sum-exp: that keeps next to nothing in between, but makes the
logits twice, four products in place of three, which is a third more time for the dearest layer there is. So that is
done only where every row has a gradient of its own (reduction="none"), and nothing of it where no gradient is wanted.

Tokens are cut, the vocabulary is not: a row's softmax needs all its logits before any gradient, so that pieces of it
would have to be made twice. 8 chunks, of 1024 to 4096 rows on a GPU: with fewer rows its products lose speed, and dW,
read and written once a chunk, would cost more than the product that makes it.

dW is added up in the products' own fp32 accumulators. Between chunks it is kept in fp32 for float32 and float16, which
has no range for such sums, and in bf16 for bfloat16 where there are at most 16 chunks: up to 16 roundings to 8 bits,
which is less than the rounding of the logits costs; with more than 16 in fp32 again.

Memory beside the inputs at 32768 tokens, K = 4096, V = 131072, bf16: 4096 x V logits 1 GiB, dW 1 GiB, dx 0.25 GiB; in
backward twice dW and dx, 2.5 GiB, the most there is. PyTorch's F.cross_entropy(F.linear(...)) has at once the
logarithms of all probabilities, their gradients and those of the logits, 8 GiB each: 24 GiB; in fp32 twice that.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchstorm.kernels.dtypes import wide
from torchstorm.kernels.linear_cross_entropy.rows_torch import Options

NUM_CHUNKS = 8
ROWS = {"cpu": (128, 1024), "cuda": (1024, 4096)}
"""The fewest and the most of a chunk."""
LEAST_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
"""Logits so small are not cut: it would save nothing, and cost launches."""
_ROWS_WITHOUT_GRADIENTS = 1024
_MOST_ROUNDINGS = 16
_ALIGN = 64  # elements, that every row of logits begins at a multiple of

SOFTMAX = {
    "chunked": "torchstorm.kernels.linear_cross_entropy.rows_torch",
    "fused": "torchstorm.kernels.linear_cross_entropy.rows_triton",
}


class Wanted(NamedTuple):
    """Which gradients are."""

    dx: bool
    dweight: bool
    dbias: bool


def chunk_rows(num_tokens: int, V: int, like: Tensor, *, gradients: bool) -> int:
    """Tokens of a chunk, for logits as `like`."""
    kind = "cuda" if like.device.type == "cuda" else "cpu"
    least, most = ROWS[kind]
    share = -(-num_tokens // NUM_CHUNKS)
    rows = min(most if gradients else _ROWS_WITHOUT_GRADIENTS, max(least, -(-share // 128) * 128))
    return max(1, min(num_tokens, max(rows, LEAST_BYTES[kind] // (V * like.element_size()))))


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    options: Options,
    wanted: Wanted,
    scale: Tensor,
    variant: str,
) -> tuple[Tensor, Tensor, _Gradients]:
    """Losses (N) and log-sum-exps (N), in fp32, and scale * gradients of the losses' sum; scale is one number."""
    loss, lse = (x.new_empty(x.shape[0], dtype=wide(x.dtype)) for _ in range(2))
    sums = _Gradients(x, weight, wanted)
    softmax = _softmax(variant)
    for rows, logits in _chunks(x, weight, bias, sums.rows, variant):
        softmax.losses(logits, target[rows], options, loss[rows], lse[rows], scale if any(wanted) else None)
        sums.add(rows, logits)
    return loss, lse, sums


def backward(
    dloss: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    lse: Tensor,
    options: Options,
    wanted: Wanted,
    variant: str,
) -> _Gradients:
    """Gradients, from those of every row's loss (N): the logits are made again."""
    sums = _Gradients(x, weight, wanted)
    softmax = _softmax(variant)
    for rows, logits in _chunks(x, weight, bias, sums.rows, variant):
        softmax.gradients(logits, target[rows], options, lse[rows] if lse.numel() else lse, dloss[rows])
        sums.add(rows, logits)
    return sums


class _Gradients:
    """dx (N, K), dweight (V, K) and dbias (V), added up chunk by chunk; those not wanted are empty."""

    def __init__(self, x: Tensor, weight: Tensor, wanted: Wanted) -> None:
        (N, K), V = x.shape, weight.shape[0]
        self.x, self.weight, self.wanted = x, weight, wanted
        self.rows = chunk_rows(N, V, x, gradients=any(wanted))
        in_place = x.dtype == torch.bfloat16 and -(-N // self.rows) <= _MOST_ROUNDINGS
        kept = x.dtype if in_place else wide(x.dtype)
        self.dx = x.new_empty((N, K) if wanted.dx else (0,))
        # Without tokens there is no first chunk to fill it.
        make = x.new_empty if N else x.new_zeros
        self.dweight = make((V, K) if wanted.dweight else (0,), dtype=kept)
        self.dbias = x.new_zeros((V,) if wanted.dbias else (0,), dtype=wide(x.dtype))

    def add(self, rows: slice, dlogits: Tensor) -> None:
        if self.wanted.dx:
            torch.mm(dlogits, self.weight, out=self.dx[rows])
        if self.wanted.dweight:
            _product(dlogits.t(), self.x[rows], self.dweight, first=rows.start == 0)
        if self.wanted.dbias:
            self.dbias += dlogits.sum(0, dtype=self.dbias.dtype)


def _product(a: Tensor, b: Tensor, out: Tensor, *, first: bool) -> None:
    """out = a b for the first, then out += a b; out in a's dtype, or wider."""
    if out.dtype == a.dtype:
        out.addmm_(a, b, beta=0 if first else 1)
    elif a.device.type == "cuda":  # pragma: gpu
        if first:
            torch.mm(a, b, out_dtype=out.dtype, out=out)
        else:
            torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    elif first:
        out.copy_(torch.mm(a, b))
    else:
        out.add_(torch.mm(a, b))


def _chunks(
    x: Tensor, weight: Tensor, bias: Tensor | None, num_rows: int, variant: str
) -> Iterator[tuple[slice, Tensor]]:
    """Every chunk's rows and logits, all in one buffer; for the kernel, whose rows are read whole, it is aligned."""
    N, V = x.shape[0], weight.shape[0]
    buffer = x.new_empty((num_rows, -(-V // _ALIGN) * _ALIGN if variant == "fused" else V))
    for start in range(0, N, num_rows):
        rows = slice(start, min(start + num_rows, N))
        logits = buffer[: rows.stop - start, :V]
        if bias is None:
            torch.mm(x[rows], weight.t(), out=logits)
        else:
            torch.addmm(bias, x[rows], weight.t(), out=logits)
        yield rows, logits


def _softmax(variant: str) -> Any:
    return import_module(SOFTMAX[variant])
