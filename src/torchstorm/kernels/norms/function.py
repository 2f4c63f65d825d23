"""LayerNorm and RMSNorm over the last dimension.

    LayerNorm: y = (x - mean) rstd w + b,    rstd = 1 / sqrt(var + eps)
    RMSNorm:   y = x rstd w,                 rstd = 1 / sqrt(mean of x^2 + eps)

and back, with x^ the normalized x and g = w dy, of which RMSNorm has no second mean:

    dx = rstd (g - x^ mean(g x^) - mean(g)),    dw = sum over rows of dy x^,    db = sum over rows of dy

Shapes: M rows, N features. Dtypes: fp32, fp16, bf16, fp64; statistics and sums in fp32 (fp64 for fp64). The variance is
that of what is left of x without its mean or a number near it, never E[x^2] - E[x]^2. Kept for backward: x, w, and mean
and rstd, 2 numbers a row (RMSNorm 1).

The floor is traffic: forward reads x and writes y, backward reads x and dy and writes dx, each once, 2 and 3 times M N
numbers; w, b and the statistics are little. In bf16 on an H200 (copies at 4.3 TB/s) 512 MiB take 0.25 ms and 0.37 ms.
What keeps kernels from it:
- Forward: bytes on their way. 4.3 TB/s times 0.7 us is 3 MB, 23 KB an SM, so an SM wants that much of rows under way
  while others are reduced: more than registers hold. So a row is read twice, the second time from L1, where two rows
  of 64 KB find room; and weights stay there. Beyond 64 KB that, too, is short: then the second time is from L2, or
  "cluster" reads once, into the shared memory of several SMs.
- Backward: dw and db need fp32 sums of N numbers that live as long as the program, beside x and dy: at 16k features
  64 KB each, of 256 KB of registers. Every program writes its sums once, (programs, N) numbers, and a second kernel
  adds them up in a fixed order. 132 programs and 16k features make 9 MB, 0.5 % of the traffic at 512 MiB.
- Where sums do not fit, kernels for dx and for dw read x and dy once each: 5 times M N in place of 3. "split" comes
  down to 3 again: it finds the second read in L2, by taking turns in one launch. "cluster" has room for the sums in
  the registers of up to 8 SMs, and for x and dy in their shared memory, and reads them once.

Sources: Ba et al. 2016, arXiv 1607.06450; Zhang & Sennrich 2019, arXiv 1910.07467; Welford 1962 and Chan et al. 1983
for variances put together of parts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from torchstorm.errors import ShapeError
from torchstorm.kernels import nvrtc
from torchstorm.kernels.directly import directly, is_pytorchs, is_small
from torchstorm.kernels.dtypes import UP_TO_FP32
from torchstorm.kernels.norms.op import norm_forward
from torchstorm.kernels.rows import check_rows
from torchstorm.kernels.variants import Ladder, Variant, choose

_TRITON = ("triton",)

NORMS: Ladder = (
    Variant(
        name="naive",
        taught="a norm is a few sums over a row; dw is sums over a column, with one program a column block",
        costs="forward reads x three times (RMSNorm twice), backward x and dy three times; few programs add up dw",
        dtypes=UP_TO_FP32,
        needs=_TRITON,
    ),
    Variant(
        name="online",
        taught="mean and variance in one pass, by Welford; the second pass comes from L2, when no more rows are under "
        "way than fit there; dw in two stages: sums over spans of rows, then over spans",
        costs="forward reads x once from memory, and once from L2; backward x and dy once more for dw; any length",
        dtypes=UP_TO_FP32,
        needs=_TRITON,
    ),
    Variant(
        name="fused",
        taught="a row of its own for each program, which forward reads again from L1, with room for more rows than "
        "registers have; the variance is that of distances from one number, or, where that is far off, from the mean",
        costs="forward reads x from memory once; backward holds x and dy in registers for dx, and reads both again for "
        "dw; rows of up to 64 KB",
        dtypes=UP_TO_FP32,
        needs=_TRITON,
    ),
    Variant(
        name="persistent",
        taught="programs that stay: weights are loaded once, and dw is summed up beside dx, with one read of x and dy",
        costs="reads everything once; (programs, N) numbers of partial sums; registers for rows and sums",
        dtypes=UP_TO_FP32,
        needs=_TRITON,
    ),
    Variant(
        name="split",
        taught="long rows, backward: parts of rows are summed up, and a few megabytes later taken again from L2, for "
        "dx and dw, by programs of the same launch that wait for nothing but those before them",
        costs="reads everything once from memory and once from L2; a counter of turns; forward is online's",
        dtypes=UP_TO_FP32,
        needs=_TRITON,
    ),
    Variant(
        name="cluster",
        taught="a row too long for one SM is spread over several: blocks of a cluster fetch a slice each, rows "
        "ahead, into shared memory, and send each other sums, while they finish the row before; dw lies in all their "
        "registers",
        costs="reads everything once; (clusters, N) numbers of partial sums; rows of whole 16 bytes, at most 256 KB; "
        "CUDA C++ for Hopper",
        dtypes=UP_TO_FP32,
        capability=(9, 0),
        needs=(*_TRITON, *nvrtc.NEEDS),
    ),
    Variant(
        name="torch",
        taught="what PyTorch has",
        costs="one kernel forward, for RMSNorm several; backward one for dx and two for dw",
        devices=("cpu", "cuda"),
    ),
    Variant(
        name="parallel",
        taught="on a CPU a row lies in the cache of its core: any number of passes read memory once; dw by spans' sums",
        costs="reads x once; fp16 and bf16 are converted to fp32 and back",
        devices=("cpu",),
        dtypes=UP_TO_FP32,
        needs=("numba",),
    ),
)


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5, variant: str = "auto"
) -> Tensor:
    """LayerNorm over the last dimension. Deterministic; gradients of gradients, too.

    Args:
        x: (..., N), in float32, float16, bfloat16 or float64. Any strides.
        weight, bias: (N,), in x's dtype or both in float32; None for ones and zeros.
        eps: added to the variance.
        variant: one of `variants("layer_norm")`, or "auto": the fastest here.

    Returns:
        (..., N) in x's dtype, contiguous. Rows with NaN or infinities are NaN, as in PyTorch.

    Raises:
        ShapeError: x has no last dimension or another dtype, or weight or bias do not fit.
        ConfigError: there is no such variant.
        DeviceError: the variant does not run on this device, or not in this dtype.
    """
    _check("layer_norm", x, weight, bias)
    if variant == "auto" and _is_pytorchs(x, weight, bias):
        return directly(F.layer_norm, x, x.shape[-1:], weight, bias, eps)
    chosen = choose("layer_norm", NORMS, variant, x, auto=lambda: "auto")
    y: Tensor = norm_forward(x, weight, bias, eps, True, _is_kept(x, weight, bias), chosen)[0]
    return y


def rms_norm(x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6, variant: str = "auto") -> Tensor:
    """RMSNorm over the last dimension. Deterministic; gradients of gradients, too.

    Args:
        x: (..., N), in float32, float16, bfloat16 or float64. Any strides.
        weight: (N,), in x's dtype or float32; None for ones.
        eps: added to the mean of squares.
        variant: one of `variants("rms_norm")`, or "auto": the fastest here.

    Returns:
        (..., N) in x's dtype, contiguous. In rows with infinities those are NaN and the rest 0, as in PyTorch.

    Raises:
        ShapeError: x has no last dimension or another dtype, or the weight does not fit.
        ConfigError: there is no such variant.
        DeviceError: the variant does not run on this device, or not in this dtype.
    """
    _check("rms_norm", x, weight, None)
    if variant == "auto" and _is_pytorchs(x, weight, None) and not (_is_kept(x, weight, None) and _keeps_much(x)):
        return directly(F.rms_norm, x, x.shape[-1:], weight, eps)
    chosen = choose("rms_norm", NORMS, variant, x, auto=lambda: "auto")
    y: Tensor = norm_forward(x, weight, None, eps, False, _is_kept(x, weight, None), chosen)[0]
    return y


def _is_pytorchs(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Where PyTorch's own takes the parameters as they are."""
    if (weight is not None and weight.dtype != x.dtype) or (bias is not None and bias.dtype != x.dtype):
        return False
    return x.numel() > 0 and is_pytorchs(x)


def _is_kept(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether there will be a backward."""
    if not torch.is_grad_enabled():
        return False
    return x.requires_grad or any(p is not None and p.requires_grad for p in (weight, bias))


def _keeps_much(x: Tensor) -> bool:
    """On a CPU PyTorch's RMSNorm is several operations, which keep four tensors of x's size.

    With its backward it takes 1.6 times as long as the operator, where x is not small.
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
                f"{name} is {p.dtype} and x {dtype}: {op} takes it in x's dtype, or float32 beside halves."
            )
        if p.device != device:
            raise ShapeError(f"{name} is on {p.device}, but x is on {device}: move it there.")
    if weight is not None and bias is not None and weight.dtype != bias.dtype:
        found = " and ".join(sorted((str(weight.dtype), str(bias.dtype))))
        raise ShapeError(f"weight and bias are {found}: {op} takes both in one dtype.")
