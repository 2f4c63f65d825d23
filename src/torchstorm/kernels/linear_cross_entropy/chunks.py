"""The last layer and its loss over chunks of tokens: what is held at once, and in what order it is computed.

Forward, a chunk of n tokens at a time:  logits = x_c W^T (+ b), by cuBLAS into one buffer that all chunks share;
losses from it, and the logits turned into their gradients where they stand; dx_c = dlogits W;  dW += dlogits^T x_c.
With that, the gradients of a mean or a sum are done when forward ends, up to the one number that backward brings. They
could be computed in backward instead, from the row's log-sum-exp: that keeps next to nothing in between, but makes the
logits twice, four products in place of three, which is a third more time for the dearest layer there is. So that is
done only where every row has a gradient of its own (reduction="none"), and nothing of it where no gradient is wanted.

Tokens that do not count (`ignore_index`) have no loss and no gradient, so nothing is computed for them: those that do
count are gathered first, where there are several chunks. On a GPU the host has to wait for their number; that is worth
it where the products take milliseconds, and cannot be had while a CUDA graph is captured.

Tokens are cut, the vocabulary is not: a row's softmax needs all its logits before any gradient, so that pieces of it
would have to be made twice. 8 chunks, of 1024 to 4096 rows on a GPU: with fewer rows its products lose speed, and dW,
read and written once a chunk, would cost more than the product that makes it. Where some tokens do not count, chunks
are fewer, not smaller: of 4096 rows and K = 4096 dx has 3.9 tiles for every SM of an H200, of 3584 rows 3.4, in the
time of 4.

cuBLAS takes slow kernels where a row is not a multiple of 16 bytes, whatever stride it has: GPT-2's 50257 classes cost
four times what 50264 do. Then the products work on copies of W, b and x with zeros at the end. The logits that come of
them count for nothing, and their gradients are 0.

How products are added up: dW between chunks in fp32 for float32 and float16, which has no range for such sums, and in
bf16 for bfloat16 where W is large and there are at most 16 chunks: up to 16 roundings to 8 bits, which is less than the
rounding of the logits costs; with more than 16 in fp32 again. dx of halves comes out of its product in fp32. Where a
product has few tiles and long sums, as dx and a small dW have, cuBLAS splits the sums, and adds up their parts in the
dtype of the result: in bf16 the error of dx was 8e-3 at 50257 classes, that of a sum in 16 to 24 parts, in place of
2.5e-3.

Memory beside the inputs at 32768 tokens, K = 4096, V = 131072, bf16: 4096 x V logits 1 GiB, dW 1 GiB, dx and the tokens
that count 0.25 GiB each; in backward twice dW and dx, 2.5 GiB as well, the most there is. PyTorch's
F.cross_entropy(F.linear(...)) has at once the logarithms of all probabilities, their gradients and those of the logits,
8 GiB each: 24 GiB; in fp32 twice that.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from torchstorm.kernels.dtypes import HALVES, wide
from torchstorm.kernels.linear_cross_entropy.rows_torch import Options

NUM_CHUNKS = 8
ROWS = {"cpu": (128, 1024), "cuda": (1024, 4096)}
"""The fewest and the most of a chunk."""
ROWS_STEP = 128
"""What they are a multiple of, as tiles of products are."""
LEAST_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
"""Logits so small are not cut: it would save nothing, and cost launches."""
ROW_BYTES = {"cpu": 1, "cuda": 16}
"""What rows must be a multiple of, for products at full speed."""
LEAST_OPERATIONS = {"cpu": 0, "cuda": 1 << 39}
"""Of the logits' product, for tokens that do not count to be left out: on an H200 that is a millisecond."""
SPLIT_NUMEL = 1 << 24
"""Products with fewer results than that may be split along their sums; 1024 tiles of 128 x 128 keep any GPU busy."""
_ROWS_WITHOUT_GRADIENTS = 2048
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


class Gradients(NamedTuple):
    """dx (N, K) in x's dtype, dweight (V, K) and dbias (V), perhaps in a wider one; those not wanted are empty."""

    dx: Tensor
    dweight: Tensor
    dbias: Tensor


def chunk_rows(num_tokens: int, V: int, like: Tensor, *, gradients: bool) -> int:
    """Tokens of a chunk, for logits as `like`."""
    kind = _kind(like)
    least, most = ROWS[kind]
    share = -(-num_tokens // NUM_CHUNKS)
    rows = min(
        most if gradients else min(most, _ROWS_WITHOUT_GRADIENTS), max(least, -(-share // ROWS_STEP) * ROWS_STEP)
    )
    return max(1, min(num_tokens, max(rows, LEAST_BYTES[kind] // (V * like.element_size()))))


def few_logits(x: Tensor, weight: Tensor) -> bool:
    """Whether the logits of x (..., K) are so few that chunks of them would gain nothing."""
    num_logits = x.numel() // max(1, x.shape[-1]) * weight.shape[0]
    return num_logits * x.element_size() <= NUM_CHUNKS * LEAST_BYTES[_kind(x)]


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    options: Options,
    wanted: Wanted,
    scale: Tensor,
    variant: str,
) -> tuple[Tensor, Tensor, Gradients]:
    """Losses (N) and log-sum-exps (N), in fp32, and scale * gradients of the losses' sum; scale is one number.

    Tokens that do not count have 0 for both.
    """
    layer = _Layer(x, weight, bias, target, options, wanted)
    loss, lse = (x.new_empty(layer.x.shape[0], dtype=wide(x.dtype)) for _ in range(2))
    softmax, given = _softmax(variant), scale if any(wanted) else None

    def losses(logits: Tensor, rows: slice) -> None:
        softmax.losses(logits, layer.V, layer.target[rows], options, loss[rows], lse[rows], given)

    layer.run(losses, variant)
    return layer.of_all(loss), layer.of_all(lse), layer.gradients()


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
) -> Gradients:
    """Gradients, from those of every row's loss (N): the logits are made again."""
    layer = _Layer(x, weight, bias, target, options, wanted)
    if layer.counted is not None:
        dloss, lse = dloss[layer.counted], lse[layer.counted] if lse.numel() else lse
    softmax = _softmax(variant)

    def gradients(logits: Tensor, rows: slice) -> None:
        given = lse[rows] if lse.numel() else lse
        softmax.gradients(logits, layer.V, layer.target[rows], options, given, dloss[rows])

    layer.run(gradients, variant)
    return layer.gradients()


class _Layer:
    """The products: logits of one chunk after the other, and gradients that are added up on the way.

    Attributes:
        x, weight, bias: as the products take them: without tokens that do not count, and with zeros at the end of rows.
        target: of these tokens.
        counted: which they are; None for all.
        V: classes, of which the logits may have more.
    """

    def __init__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, options: Options, wanted: Wanted
    ) -> None:
        (self.N, self.K), self.V = x.shape, weight.shape[0]
        self.wanted = wanted
        self.counted = _counted(x, target, self.V, options.ignore_index, any(wanted))
        if self.counted is not None:
            x, target = x[self.counted], target[self.counted]
        more_K, more_V = (_missing(size, x) for size in (self.K, self.V))
        self.x = F.pad(x, (0, more_K)) if more_K else x
        self.weight = F.pad(weight, (0, more_K, 0, more_V)) if more_K or more_V else weight
        self.bias = F.pad(bias, (0, more_V)) if bias is not None and more_V else bias
        self.target = target
        n, V, K = x.shape[0], *self.weight.shape
        self.rows = max(1, min(n, chunk_rows(self.N, V, x, gradients=any(wanted))))
        self._dx = x.new_empty((n, K) if wanted.dx else (0,))
        # Without tokens there is no first chunk to fill it.
        make = x.new_empty if n else x.new_zeros
        in_place = x.dtype == torch.bfloat16 and V * K >= SPLIT_NUMEL and -(-n // self.rows) <= _MOST_ROUNDINGS
        self._dweight = make((V, K) if wanted.dweight else (0,), dtype=x.dtype if in_place else wide(x.dtype))
        self._dbias = x.new_zeros((V,) if wanted.dbias else (0,), dtype=wide(x.dtype))

    def run(self, softmax: Callable[[Tensor, slice], None], variant: str) -> None:
        """Makes every chunk's logits, has `softmax` turn them into gradients, and adds up what comes of those.

        All chunks share one buffer; the kernel reads rows of it as wholes, so it is aligned for that.
        """
        n, V = self.x.shape[0], self.weight.shape[0]
        buffer = self.x.new_empty((self.rows, -(-V // _ALIGN) * _ALIGN if variant == "fused" else V))
        for start in range(0, n, self.rows):
            rows = slice(start, min(start + self.rows, n))
            logits = buffer[: rows.stop - start, :V]
            if self.bias is None:
                torch.mm(self.x[rows], self.weight.t(), out=logits)
            else:
                torch.addmm(self.bias, self.x[rows], self.weight.t(), out=logits)
            softmax(logits, rows)
            self._add(logits, rows)

    def _add(self, dlogits: Tensor, rows: slice) -> None:
        if self.wanted.dx:
            if dlogits.is_cuda and dlogits.dtype in HALVES:  # pragma: gpu
                self._dx[rows] = torch.mm(dlogits, self.weight, out_dtype=torch.float32)
            else:
                torch.mm(dlogits, self.weight, out=self._dx[rows])
        if self.wanted.dweight:
            _product(dlogits.t(), self.x[rows], self._dweight, first=rows.start == 0)
        if self.wanted.dbias:
            self._dbias += dlogits.sum(0, dtype=self._dbias.dtype)

    def gradients(self) -> Gradients:
        """Those of the layer's own arguments."""
        dx, dweight = self._dx, self._dweight
        if self.wanted.dx:
            dx = self.of_all(dx[:, : self.K].contiguous())
        if self.wanted.dweight:
            dweight = dweight[: self.V, : self.K].contiguous()
        return Gradients(dx, dweight, self._dbias[: self.V])

    def of_all(self, counted: Tensor) -> Tensor:
        """What there is of tokens that count, with zeros for the others."""
        if self.counted is None:
            return counted
        found = counted.new_zeros((self.N, *counted.shape[1:]))
        found[self.counted] = counted
        return found


def _counted(x: Tensor, target: Tensor, V: int, ignore_index: int, gradients: bool) -> Tensor | None:
    """Indices of the tokens that count; None for all, and where it is not worth asking."""
    (N, K), kind = x.shape, _kind(x)
    if chunk_rows(N, V, x, gradients=gradients) >= N or LEAST_OPERATIONS[kind] > 2 * N * K * V:
        return None
    if kind == "cuda" and torch.cuda.is_current_stream_capturing():  # pragma: gpu
        return None
    found = (target != ignore_index).nonzero()[:, 0]
    return found if found.shape[0] < N else None


def _missing(size: int, like: Tensor) -> int:
    """Elements that a row of `size` lacks to be a multiple of what products want."""
    return -size % max(1, ROW_BYTES[_kind(like)] // like.element_size())


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


def _kind(like: Tensor) -> str:
    return "cuda" if like.device.type == "cuda" else "cpu"


def _softmax(variant: str) -> Any:
    return import_module(SOFTMAX[variant])
