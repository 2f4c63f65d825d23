"""LayerNorm and RMSNorm over the last dimension.

    LayerNorm: y = (x - mean) rstd w + b,    rstd = 1 / sqrt(var + eps)
    RMSNorm:   y = x rstd w,                 rstd = 1 / sqrt(mean of x^2 + eps)

and backward, with x^ the normalized x and g = w dy (RMSNorm without the term mean(g)):

    dx = rstd (g - x^ mean(g x^) - mean(g)),    dw = sum over rows of dy x^,    db = sum over rows of dy

Shapes: M rows, N features. Dtypes: fp32, fp16, bf16, fp64; statistics and sums in fp32 (fp64 for fp64). The variance is
computed from differences to the mean or a value near it, never as E[x^2] - E[x]^2. Saved for backward: x, w, and mean
and rstd, 2 numbers per row (RMSNorm 1).

The lower bound is memory traffic: forward reads x and writes y, backward reads x and dy and writes dx, each once: 2 and
3 times M N elements. w, b and the statistics are small. In bf16 on an H200 (copies at 4.3 TB/s) 512 MiB take 0.25 ms
and 0.37 ms. What limits kernels:

- Forward: bytes in flight. 4.3 TB/s times 0.7 us is 3 MB, 23 KB per SM. An SM needs that many bytes of rows in flight
  while others are reduced, more than registers hold. So a row is read twice, the second time from L1, which has space
  for two rows of 64 KB and the weights. Longer rows are read from L2 the second time, or "cluster" reads them once,
  into the shared memory of several SMs.
- Backward: dw and db need N fp32 sums each for the lifetime of a program, besides x and dy: 64 KB each at 16k features,
  of 256 KB of registers. Each program writes its sums once, (programs, N) numbers, and a second kernel adds them in a
  fixed order. 132 programs and 16k features make 9 MB, 0.5 % of the traffic at 512 MiB.
- If the sums do not fit, separate kernels for dx and dw read x and dy once each: 5 times M N instead of 3. "split"
  needs only 3: both phases run in one launch, and the second one reads from L2. "cluster" keeps the sums in the
  registers of up to 8 SMs, and x and dy in their shared memory, and reads them once.

Sources: Ba et al. 2016, arXiv 1607.06450; Zhang & Sennrich 2019, arXiv 1910.07467; Welford 1962 and Chan et al. 1983
for combining variances of parts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from torchstorm import nvrtc
from torchstorm.errors import ShapeError
from torchstorm.kernels.dtypes import UP_TO_FP32
from torchstorm.kernels.norms.op import norm_forward
from torchstorm.kernels.pytorch_fallback import call_pytorch, is_small, prefers_pytorch
from torchstorm.kernels.rows import check_rows
from torchstorm.kernels.variants import Ladder, Variant, choose

_TRITON = ("triton",)

NORMS: Ladder = (
    Variant(
        name="naive",
        lesson="a norm is a few sums over a row; dw is sums over columns, with one program per block of columns",
        costs="forward reads x three times (RMSNorm twice), backward x and dy three times; few programs compute dw",
        dtypes=UP_TO_FP32,
        needs=_TRITON,
    ),
    Variant(
        name="online",
        lesson="mean and variance in one pass (Welford); the second pass reads from L2, if no more rows are in "
        "flight than fit there; dw in two stages: sums over spans of rows, then over spans",
        costs="forward reads x once from memory, and once from L2; backward x and dy once more for dw; any length",
        dtypes=UP_TO_FP32,
        needs=_TRITON,
    ),
    Variant(
        name="fused",
        lesson="one row per program, which forward reads again from L1, which holds more rows than "
        "registers; the variance is from differences to one value of the row, or, if that is far off, to the mean",
        costs="forward reads x from memory once; backward holds x and dy in registers for dx, and reads both again for "
        "dw; rows of up to 64 KB",
        dtypes=UP_TO_FP32,
        needs=_TRITON,
    ),
    Variant(
        name="persistent",
        lesson="persistent programs: weights are loaded once, and dw is computed together with dx from one read",
        costs="reads everything once; (programs, N) partial sums; registers for rows and sums",
        dtypes=UP_TO_FP32,
        needs=_TRITON,
    ),
    Variant(
        name="split",
        lesson="long rows, backward: sums over parts of rows, which a few megabytes later are read again from L2 for "
        "dx and dw, by programs of the same launch that wait only for earlier ones",
        costs="reads everything once from memory and once from L2; a work counter; forward is that of online",
        dtypes=UP_TO_FP32,
        needs=_TRITON,
    ),
    Variant(
        name="cluster",
        lesson="a row too long for one SM is split over several: blocks of a cluster load a slice each, rows "
        "ahead, into shared memory, and exchange sums while they finish the previous row; dw is in all their "
        "registers",
        costs="reads everything once; (clusters, N) partial sums; rows of whole 16 bytes, at most 256 KB; "
        "CUDA C++ for Hopper",
        dtypes=UP_TO_FP32,
        capability=(9, 0),
        needs=(*_TRITON, *nvrtc.NEEDS),
    ),
    Variant(
        name="torch",
        lesson="PyTorch's own kernels",
        costs="one kernel forward, for RMSNorm several; backward one for dx and two for dw",
        devices=("cpu", "cuda"),
    ),
    Variant(
        name="parallel",
        lesson="on a CPU a row stays in its core's cache: any number of passes read memory once; dw by spans",
        costs="reads x once; fp16 and bf16 are converted to fp32 and back",
        devices=("cpu",),
        dtypes=UP_TO_FP32,
        needs=("numba",),
    ),
)


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5, variant: str = "auto"
) -> Tensor:
    """LayerNorm over the last dimension. Deterministic, and differentiable twice.

    Args:
        x: (..., N), in float32, float16, bfloat16 or float64. Any strides.
        weight, bias: (N,), in x's dtype or both in float32; None for ones and zeros.
        eps: added to the variance.
        variant: one of `variants("layer_norm")`, or "auto": the fastest here.

    Returns:
        (..., N) in x's dtype, contiguous. Rows with NaN or infinities are NaN, as in PyTorch.

    Raises:
        ShapeError: x has no last dimension or another dtype, or weight or bias do not match.
        ConfigError: there is no such variant.
        DeviceError: the variant does not run on this device, or not in this dtype.
    """
    _check("layer_norm", x, weight, bias)
    if variant == "auto" and _prefers_pytorch(x, weight, bias):
        return call_pytorch(F.layer_norm, x, x.shape[-1:], weight, bias, eps)
    chosen = choose("layer_norm", NORMS, variant, x, auto=lambda: "auto")
    y: Tensor = norm_forward(x, weight, bias, eps, True, _is_kept(x, weight, bias), chosen)[0]
    return y


def rms_norm(x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6, variant: str = "auto") -> Tensor:
    """RMSNorm over the last dimension. Deterministic, and differentiable twice.

    Args:
        x: (..., N), in float32, float16, bfloat16 or float64. Any strides.
        weight: (N,), in x's dtype or float32; None for ones.
        eps: added to the mean of squares.
        variant: one of `variants("rms_norm")`, or "auto": the fastest here.

    Returns:
        (..., N) in x's dtype, contiguous. In rows with infinities those are NaN and the rest 0, as in PyTorch.

    Raises:
        ShapeError: x has no last dimension or another dtype, or the weight does not match.
        ConfigError: there is no such variant.
        DeviceError: the variant does not run on this device, or not in this dtype.
    """
    _check("rms_norm", x, weight, None)
    if variant == "auto" and _prefers_pytorch(x, weight, None) and not (_is_kept(x, weight, None) and _keeps_much(x)):
        return call_pytorch(F.rms_norm, x, x.shape[-1:], weight, eps)
    chosen = choose("rms_norm", NORMS, variant, x, auto=lambda: "auto")
    y: Tensor = norm_forward(x, weight, None, eps, False, _is_kept(x, weight, None), chosen)[0]
    return y


def _prefers_pytorch(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether "auto" uses PyTorch's function; it must accept the parameters without conversion."""
    if (weight is not None and weight.dtype != x.dtype) or (bias is not None and bias.dtype != x.dtype):
        return False
    return x.numel() > 0 and prefers_pytorch(x)


def _is_kept(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether autograd will need a backward."""
    if not torch.is_grad_enabled():
        return False
    return x.requires_grad or any(p is not None and p.requires_grad for p in (weight, bias))


def _keeps_much(x: Tensor) -> bool:
    """Whether PyTorch's RMSNorm saves much memory for backward: on a CPU it is several operations with four tensors of
    x's size. With backward it takes 1.6 times as long as our operator, unless x is small.

    """
    return not x.is_cuda and not is_small(x)


def _check(op: str, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    check_rows(op, x)
    size, dtype, device = x.shape[-1:], x.dtype, x.device
    for name, p in (("weight", weight), ("bias", bias)):
        if p is None:
            continue
        if p.shape != size:
            raise ShapeError(f"{name} {tuple(p.shape)}: with x {tuple(x.shape)}, {op} takes it as ({x.shape[-1]},).")
        if p.dtype != dtype and (p.dtype != torch.float32 or dtype == torch.float64):
            raise ShapeError(
                f"{name} is {p.dtype} and x {dtype}: {op} takes it in x's dtype, or float32 with fp16 or bf16."
            )
        if p.device != device:
            raise ShapeError(f"{name} is on {p.device}, but x is on {device}: move it there.")
    if weight is not None and bias is not None and weight.dtype != bias.dtype:
        found = " and ".join(sorted((str(weight.dtype), str(bias.dtype))))
        raise ShapeError(f"weight and bias are {found}: {op} takes both in the same dtype.")
