"""The output layer and its loss in chunks of tokens: memory use and order of the computation.

Forward, for each chunk of n tokens:  logits = x_c W^T (+ b), by cuBLAS into one buffer that all chunks share; the
losses; the logits are overwritten with their gradients;  dx_c = dlogits W;  dW += dlogits^T x_c.

So the gradients of a mean or a sum are complete at the end of forward, except for one factor that backward gets. They
could be computed in backward instead, from each row's log-sum-exp. That would save almost nothing between the passes,
but compute the logits twice: four products instead of three, a third more time for the most expensive layer. It is done
only if every row has its own gradient (reduction="none"). Without required gradients, forward computes only the losses.

Ignored tokens (`ignore_index`) have no loss and no gradient, so nothing is computed for them: with several chunks, the
other tokens are gathered first. On a GPU the host has to wait for their number. That is worth it if the products take
milliseconds, and is not possible during capture of a CUDA graph.

The tokens are split, but not the vocabulary: a row's softmax needs all its logits before any gradient, so parts of the
vocabulary would be computed twice. There are 8 chunks, of 1024 to 4096 rows on a GPU. With fewer rows the products are
slower, and reading and writing dW once per chunk would take longer than its product. With ignored tokens there are
fewer chunks, not smaller ones: with 4096 rows and K = 4096, dx has 3.9 tiles per SM of an H200; with 3584 rows 3.4, in
the time of 4.

cuBLAS uses slow kernels if a row is not a multiple of 16 bytes, whatever its stride: GPT-2's 50257 classes take four
times as long as 50264. Then the products use copies of W, b and x that are padded with zeros. The additional logits are
ignored, and their gradients are 0.

Accumulation: dW is summed over chunks in fp32 for float32 and for float16, whose range is too small. For bfloat16 it is
summed in bf16 if W is large and there are at most 16 chunks; these up to 16 roundings to 8 bits have a smaller error
than the rounding of the logits. With more chunks it is summed in fp32. For fp16 and bf16, dx is computed in fp32. If a
product has few tiles and long sums, as dx and a small dW, cuBLAS splits the sums and adds the parts in the dtype of the
result: in bf16 the error of dx was 8e-3 at 50257 classes, as for a sum in 16 to 24 parts, instead of 2.5e-3.

Memory besides the inputs for 32768 tokens, K = 4096, V = 131072, bf16: 1 GiB for 4096 x V logits, 1 GiB for dW, 0.25
GiB each for dx and the gathered tokens. Backward has dW and dx twice, 2.5 GiB as well, which is the peak. PyTorch's
F.cross_entropy(F.linear(...)) holds the log-probabilities, their gradients and the gradients of the logits at once, 8
GiB each: 24 GiB; in fp32 twice that.
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
"""Smallest and largest number of rows per chunk."""
ROWS_STEP = 128
"""Rows per chunk are a multiple of this, the tile size of products."""
LEAST_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
"""Logits up to this size are not split: that would save no memory, and cost launches."""
ROW_BYTES = {"cpu": 1, "cuda": 16}
"""Rows must be a multiple of this many bytes for products at full speed."""
LEAST_OPERATIONS = {"cpu": 0, "cuda": 1 << 39}
"""Operations of the logits' product from which ignored tokens are left out: a millisecond on an H200."""
SPLIT_NUMEL = 1 << 24
"""cuBLAS may split the sums of products with fewer results; 1024 tiles of 128 x 128 keep any GPU busy."""
_ROWS_WITHOUT_GRADIENTS = 2048
_MOST_ROUNDINGS = 16
_ALIGN = 64  # elements; alignment of each row of logits

SOFTMAX = {
    "chunked": "torchstorm.kernels.linear_cross_entropy.rows_torch",
    "fused": "torchstorm.kernels.linear_cross_entropy.rows_triton",
}


class Wanted(NamedTuple):
    """Which gradients are required."""

    dx: bool
    dweight: bool
    dbias: bool


class Gradients(NamedTuple):
    """dx (N, K) in x's dtype; dweight (V, K) and dbias (V) in the same or a wider one. Those not required are empty."""

    dx: Tensor
    dweight: Tensor
    dbias: Tensor


def chunk_rows(num_tokens: int, V: int, like: Tensor, *, gradients: bool) -> int:
    """Number of tokens per chunk, for logits with the dtype and device of `like`."""
    kind = _kind(like)
    least, most = ROWS[kind]
    share = -(-num_tokens // NUM_CHUNKS)
    rows = min(
        most if gradients else min(most, _ROWS_WITHOUT_GRADIENTS), max(least, -(-share // ROWS_STEP) * ROWS_STEP)
    )
    return max(1, min(num_tokens, max(rows, LEAST_BYTES[kind] // (V * like.element_size()))))


def few_logits(x: Tensor, weight: Tensor) -> bool:
    """Whether the logits of x (..., K) are so small that chunks would not save memory."""
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
    """Losses (N) and log-sum-exps (N) in fp32, and scale * gradients of the sum of losses; scale is a scalar.

    Ignored tokens have 0 for both.
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
    """Gradients from the gradients of each row's loss (N). The logits are recomputed."""
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
    """The products of the layer: logits chunk by chunk, and accumulated gradients.

    Attributes:
        x, weight, bias: operands of the products, without ignored tokens, and with rows padded with zeros.
        target: targets of these tokens.
        counted: indices of these tokens; None for all.
        V: number of classes, without padding.
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
        # Without tokens, no first chunk fills it.
        make = x.new_empty if n else x.new_zeros
        in_place = x.dtype == torch.bfloat16 and V * K >= SPLIT_NUMEL and -(-n // self.rows) <= _MOST_ROUNDINGS
        self._dweight = make((V, K) if wanted.dweight else (0,), dtype=x.dtype if in_place else wide(x.dtype))
        self._dbias = x.new_zeros((V,) if wanted.dbias else (0,), dtype=wide(x.dtype))

    def run(self, softmax: Callable[[Tensor, slice], None], variant: str) -> None:
        """Computes each chunk's logits, lets `softmax` overwrite them with gradients, and accumulates dx, dW and db.

        All chunks share one buffer, whose rows are aligned for the kernel.
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
        """The gradients of the original, unpadded arguments."""
        dx, dweight = self._dx, self._dweight
        if self.wanted.dx:
            dx = self.of_all(dx[:, : self.K].contiguous())
        if self.wanted.dweight:
            dweight = dweight[: self.V, : self.K].contiguous()
        return Gradients(dx, dweight, self._dbias[: self.V])

    def of_all(self, counted: Tensor) -> Tensor:
        """Scatters a tensor of the counted tokens to all tokens, with zeros for ignored ones."""
        if self.counted is None:
            return counted
        found = counted.new_zeros((self.N, *counted.shape[1:]))
        found[self.counted] = counted
        return found


def _counted(x: Tensor, target: Tensor, V: int, ignore_index: int, gradients: bool) -> Tensor | None:
    """Indices of the tokens that are not ignored; None for all, or if gathering them is not worth it."""
    (N, K), kind = x.shape, _kind(x)
    if chunk_rows(N, V, x, gradients=gradients) >= N or LEAST_OPERATIONS[kind] > 2 * N * K * V:
        return None
    if kind == "cuda" and torch.cuda.is_current_stream_capturing():  # pragma: gpu
        return None
    found = (target != ignore_index).nonzero()[:, 0]
    return found if found.shape[0] < N else None


def _missing(size: int, like: Tensor) -> int:
    """Number of elements to pad a row of `size` for fast products."""
    return -size % max(1, ROW_BYTES[_kind(like)] // like.element_size())


def _product(a: Tensor, b: Tensor, out: Tensor, *, first: bool) -> None:
    """out = a @ b for the first chunk, then out += a @ b; out has a's dtype or a wider one."""
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
