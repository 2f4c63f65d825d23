"""Softmax and log-softmax over the last dimension, with a mask.

    y_n = e^(x_n - m) / s,    m = max_n x_n,    s = sum_n e^(x_n - m);    log-softmax: x_n - m - log s

Shapes: M rows, N columns. Dtypes: fp32, fp16, bf16, fp64; sums in fp32 (fp64 for fp64).
Saved for backward: y, since dx = y (dy - sum_n dy_n y_n) needs nothing else. Saving x with m and s would need the
exponentials again, and more memory: the operation after a softmax saves y anyway, the one before rarely saves x.

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

from torchstorm import nvrtc
from torchstorm.errors import ShapeError
from torchstorm.kernels.dtypes import UP_TO_FP32
from torchstorm.kernels.pytorch_fallback import call_pytorch, is_small, prefers_pytorch
from torchstorm.kernels.rows import check_rows
from torchstorm.kernels.softmax.op import softmax_forward
from torchstorm.kernels.softmax.reference import log_softmax_reference, softmax_reference
from torchstorm.kernels.variants import Ladder, Variant, choose

_TRITON = ("triton",)

SOFTMAX: Ladder = (
    Variant(
        name="naive",
        lesson="a softmax is a maximum, a sum and a division: three passes over a row, with loads as wide as possible",
        costs="reads x three times and writes y once; partly from L2, if a row stays there",
        dtypes=UP_TO_FP32,
        needs=_TRITON,
    ),
    Variant(
        name="online",
        lesson="maximum and sum in one pass: with a new maximum, the previous sum is rescaled; and the "
        "second pass reads from L2, if no more rows are in flight than fit there",
        costs="reads x twice, once from memory; two exponentials per element; rows of any length",
        dtypes=UP_TO_FP32,
        needs=_TRITON,
    ),
    Variant(
        name="fused",
        lesson="one row per program, which reads it again from L1 instead of keeping it: few registers, so "
        "that an SM processes many rows. Neighbouring elements share a maximum: few instructions",
        costs="reads x from memory once, writes y once; two exponentials per element; rows of at most 64 KB",
        dtypes=UP_TO_FP32,
        needs=_TRITON,
    ),
    Variant(
        name="persistent",
        lesson="persistent programs that loop over the rows, several at once, while the next ones are loaded",
        costs="as fused; shared memory for the rows in flight",
        dtypes=UP_TO_FP32,
        needs=_TRITON,
    ),
    Variant(
        name="cluster",
        lesson="a row too long for one SM is split over several: blocks of a cluster load a slice each, rows "
        "ahead, into shared memory, and exchange maxima and sums while they finish the previous row",
        costs="reads x once, writes y once; rows of whole 16 bytes, at most 256 KB; no mask; CUDA C++ for Hopper",
        dtypes=UP_TO_FP32,
        capability=(9, 0),
        needs=(*_TRITON, *nvrtc.NEEDS),
    ),
    Variant(
        name="torch",
        lesson="PyTorch's own kernel; a mask needs additional passes",
        costs="as fused without a mask; with one, two more passes",
        devices=("cpu", "cuda"),
    ),
    Variant(
        name="parallel",
        lesson="on a CPU a row stays in its core's cache: three passes read memory once; one thread per span of rows",
        costs="reads x once; fp16 and bf16 are converted to fp32 and back",
        devices=("cpu",),
        dtypes=UP_TO_FP32,
        needs=("numba",),
    ),
)


def softmax(x: Tensor, *, mask: Tensor | None = None, variant: str = "auto") -> Tensor:
    """Softmax over the last dimension. Deterministic, and differentiable twice.

    Args:
        x: scores (..., N), in float32, float16, bfloat16 or float64. Any strides.
        mask: bool, False for masked scores, with a shape that broadcasts to x's; None for no mask. A fully masked row
            gives zeros with zero gradient, while PyTorch gives NaN.
        variant: one of `variants("softmax")`, or "auto": the fastest here.

    Returns:
        (..., N) in x's dtype, contiguous; 0 for masked scores. Rows with NaN or +inf, or only -inf, are NaN, as in
        PyTorch. Gradients at masked scores are ignored, but must be finite.

    Raises:
        ShapeError: x has no last dimension or another dtype, or the mask does not fit.
        ConfigError: there is no such variant.
        DeviceError: the variant does not run on this device, or not in this dtype.
    """
    _check("softmax", x, mask)
    return _run("softmax", x, mask, variant)


def log_softmax(x: Tensor, *, mask: Tensor | None = None, variant: str = "auto") -> Tensor:
    """The logarithm of `softmax`, more accurate than log(softmax(x)). Deterministic, and differentiable twice.

    Args:
        x: scores (..., N), in float32, float16, bfloat16 or float64. Any strides.
        mask: bool, False for masked scores, with a shape that broadcasts to x's; None for no mask. Masked entries are
            -inf, also in a fully masked row. They have zero gradient, and gradients at them are ignored.
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
    if variant == "auto" and _prefers_pytorch(x, mask):
        return call_pytorch(log_softmax_reference if log else softmax_reference, x, mask).contiguous()
    chosen = choose(op, SOFTMAX, variant, x, auto=lambda: "auto")
    y: Tensor = softmax_forward(x, mask, log, chosen)
    return y


def _prefers_pytorch(x: Tensor, mask: Tensor | None) -> bool:
    """Whether "auto" uses PyTorch. With a mask, it saves two tensors and is 1.5 to 2 times slower if x is large."""
    if mask is None:
        return prefers_pytorch(x)
    return not x.is_cuda and (is_small(x) or not (x.requires_grad and torch.is_grad_enabled()))


def _check(op: str, x: Tensor, mask: Tensor | None) -> None:
    check_rows(op, x)
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise ShapeError(f"mask is {mask.dtype}, but {op} takes torch.bool, False for masked scores: pass mask.bool().")
    if mask.device != x.device:
        raise ShapeError(f"mask is on {mask.device}, but x is on {x.device}: move it there.")
    sizes = zip(reversed(mask.shape), reversed(x.shape), strict=False)
    if mask.dim() > x.dim() or any(m not in (1, n) for m, n in sizes):
        raise ShapeError(
            f"mask {tuple(mask.shape)} does not broadcast to x {tuple(x.shape)}: from the last dimension on, its sizes "
            "must be x's or 1."
        )
