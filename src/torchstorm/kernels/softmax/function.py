"""Softmax and log-softmax over the last dimension, with a mask.

    y_n = e^(x_n - m) / s,    m = max_n x_n,    s = sum_n e^(x_n - m);    log-softmax: x_n - m - log s

Shapes: M rows, N columns. Dtypes: fp32, fp16, bf16, fp64; sums in fp32 (fp64 for fp64).
Kept for backward: y, as dx = y (dy - sum_n dy_n y_n) needs nothing else. x with m and s would do as well, but costs the
exponentials again, and more memory: what follows a softmax keeps y anyway, what comes before it seldom keeps x.

The floor is traffic: forward reads x and writes y, backward reads y and dy and writes dx, each once, 2 and 3 times
M N numbers. In bf16 on an H200 (copies at 4.3 TB/s) 512 MiB take 0.25 ms and 0.37 ms. An SM makes 16 exponentials a
clock, so one an element takes 0.07 ms of all 132 SMs, and has time for 26 instructions an element: enough for two
exponentials, but only where they overlap with the loads of other rows. So an SM wants many rows at a time, and few
registers for each. "fused" reads a row again from L1 rather than keep it: two rows of 64 KB fit there. Longer
rows come again from L2: 132 SMs with two rows of 64k bf16 each keep 34 MB there, and an H200 has 50 MB. Even so L2 does
not give them back as fast as memory would: 58 % of a copy. "cluster" spreads such rows over the shared memory of
several SMs, and reads them once: 90 %.

Source: Milakov & Gimelshein 2018, arXiv 1805.02867 (maximum and sum in one pass).
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchstorm.errors import ShapeError
from torchstorm.kernels import nvrtc
from torchstorm.kernels.directly import directly, is_pytorchs, is_small
from torchstorm.kernels.dtypes import UP_TO_FP32
from torchstorm.kernels.rows import check_rows
from torchstorm.kernels.softmax.op import softmax_forward
from torchstorm.kernels.softmax.reference import log_softmax_reference, softmax_reference
from torchstorm.kernels.variants import Ladder, Variant, choose

_TRITON = ("triton",)

SOFTMAX: Ladder = (
    Variant(
        name="naive",
        taught="a softmax is a maximum, a sum and a division: three passes over a row, each as wide as it can load",
        costs="reads x three times and writes y once; a row that stays in L2 makes that less bad than it sounds",
        dtypes=UP_TO_FP32,
        needs=_TRITON,
    ),
    Variant(
        name="online",
        taught="maximum and sum in one pass: when a larger number turns up, the sum so far is scaled down; and the "
        "second pass comes from L2, when no more rows are under way than fit there",
        costs="reads x twice, once from memory; two exponentials an element; rows of any length",
        dtypes=UP_TO_FP32,
        needs=_TRITON,
    ),
    Variant(
        name="fused",
        taught="a row of its own for each program, which reads it again from L1 rather than keep it: few registers, so "
        "that an SM works at many rows. Numbers side by side share a maximum: few instructions",
        costs="reads x from memory once, writes y once; two exponentials an element; rows of 64 KB at most",
        dtypes=UP_TO_FP32,
        needs=_TRITON,
    ),
    Variant(
        name="persistent",
        taught="programs that stay and walk over the rows, several at once, with the next ones already on their way",
        costs="as fused; shared memory for the rows on their way",
        dtypes=UP_TO_FP32,
        needs=_TRITON,
    ),
    Variant(
        name="cluster",
        taught="a row too long for one SM is spread over several: blocks of a cluster fetch a slice each, rows "
        "ahead, into shared memory, and send each other maxima and sums, while they finish the row before",
        costs="reads x once, writes y once; rows of whole 16 bytes, at most 256 KB; no mask; CUDA C++ for Hopper",
        dtypes=UP_TO_FP32,
        capability=(9, 0),
        needs=(*_TRITON, *nvrtc.NEEDS),
    ),
    Variant(
        name="torch",
        taught="what PyTorch has; a mask costs passes of its own",
        costs="as fused without a mask; with one, two more passes",
        devices=("cpu", "cuda"),
    ),
    Variant(
        name="parallel",
        taught="on a CPU a row lies in the cache of its core: three passes read memory once; one thread a span of rows",
        costs="reads x once; fp16 and bf16 are converted to fp32 and back",
        devices=("cpu",),
        dtypes=UP_TO_FP32,
        needs=("numba",),
    ),
)


def softmax(x: Tensor, *, mask: Tensor | None = None, variant: str = "auto") -> Tensor:
    """Softmax over the last dimension. Deterministic; gradients of gradients, too.

    Args:
        x: scores (..., N), in float32, float16, bfloat16 or float64. Any strides.
        mask: bool, True where a score may be seen, of a shape that broadcasts to x's; None for all. A row in which
            nothing is seen gives zeros with zero gradient, where PyTorch gives NaN.
        variant: one of `variants("softmax")`, or "auto": the fastest here.

    Returns:
        (..., N) in x's dtype, contiguous; 0 where the mask hides. Rows with NaN or +inf are NaN, as are rows of -inf
        alone, as in PyTorch. A gradient at a hidden score must be finite; it counts for nothing.

    Raises:
        ShapeError: x has no last dimension or another dtype, or the mask does not fit.
        ConfigError: there is no such variant.
        DeviceError: the variant does not run on this device, or not in this dtype.
    """
    _check("softmax", x, mask)
    return _run("softmax", x, mask, variant)


def log_softmax(x: Tensor, *, mask: Tensor | None = None, variant: str = "auto") -> Tensor:
    """The logarithm of `softmax`, more exact than log(softmax(x)). Deterministic; gradients of gradients, too.

    Args:
        x: scores (..., N), in float32, float16, bfloat16 or float64. Any strides.
        mask: bool, True where a score may be seen, of a shape that broadcasts to x's; None for all. Hidden entries are
            -inf, in a row without any other all of them; they have no gradient, and none of theirs counts.
        variant: one of `variants("log_softmax")`, or "auto": the fastest here.

    Returns:
        (..., N) in x's dtype, contiguous. Rows with NaN or +inf are NaN, as in PyTorch.

    Raises:
        ShapeError: x has no last dimension or another dtype, or the mask does not fit.
        ConfigError: there is no such variant.
        DeviceError: the variant does not run on this device, or not in this dtype.
    """
    _check("log_softmax", x, mask)
    return _run("log_softmax", x, mask, variant)


def _run(op: str, x: Tensor, mask: Tensor | None, variant: str) -> Tensor:
    log = op == "log_softmax"
    if variant == "auto" and _is_pytorchs(x, mask):
        return directly(log_softmax_reference if log else softmax_reference, x, mask).contiguous()
    chosen = choose(op, SOFTMAX, variant, x, auto=lambda: "auto")
    y: Tensor = softmax_forward(x, mask, log, chosen)
    return y


def _is_pytorchs(x: Tensor, mask: Tensor | None) -> bool:
    """With a mask PyTorch keeps two tensors of x's size for backward; large ones take it 1.5 to 2 times as long."""
    if mask is None:
        return is_pytorchs(x)
    return not x.is_cuda and (is_small(x) or not (x.requires_grad and torch.is_grad_enabled()))


def _check(op: str, x: Tensor, mask: Tensor | None) -> None:
    check_rows(op, x)
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise ShapeError(f"mask is {mask.dtype}, but {op} takes torch.bool, True where x may be seen: mask.bool().")
    if mask.device != x.device:
        raise ShapeError(f"mask is on {mask.device}, but x is on {x.device}: move it there.")
    sizes = zip(reversed(mask.shape), reversed(x.shape), strict=False)
    if mask.dim() > x.dim() or any(m not in (1, n) for m, n in sizes):
        raise ShapeError(
            f"mask {tuple(mask.shape)} does not broadcast to x {tuple(x.shape)}: from the last dimension on, its sizes "
            "are x's or 1."
        )
