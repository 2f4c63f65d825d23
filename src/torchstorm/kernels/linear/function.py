"""A linear layer with activation, y = act(x W^T + b): bias, activation and their gradients in one pass each.

Shapes: M rows, K features in, N out. Dtypes: float32, float16, bfloat16, float64; sums, bias and activation in fp32.
Memory traffic besides the products: forward writes y, and for GELU and SiLU also z = x W^T + b. Backward reads dy and z
and writes dz, and computes the bias's gradient in the same pass. Saved for backward: x; z for GELU and SiLU, y for
ReLU.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from torchstorm import nvrtc
from torchstorm.errors import ConfigError, DeviceError, ShapeError
from torchstorm.kernels.dtypes import FLOATS, HALVES, UP_TO_FP32
from torchstorm.kernels.linear.op import linear_forward
from torchstorm.kernels.linear.plain import ACTIVATIONS, linear_reference
from torchstorm.kernels.linear.wgmma import is_best_for_a_layer
from torchstorm.kernels.pytorch_fallback import call_pytorch, is_small
from torchstorm.kernels.variants import Variant, choose, has_triton_for, is_installed

Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
_BRIEF = 1 << 35  # M N K: 0.1 ms at 700 TFLOP/s
_ROW_MULTIPLE = 8  # halves of 16 bytes, where TMA's rows begin

LADDER = (
    Variant(
        name="naive",
        lesson="The definition as kernels: a program per tile of the product, then the bias, then the activation. "
        "Backward: the gradient, and a program per 128 columns that sums the bias's gradient.",
        costs="y is read and written two more times, and the products leave most tensor cores idle.",
        dtypes=UP_TO_FP32,
        needs=("triton",),
    ),
    Variant(
        name="fused",
        lesson="Bias and activation are applied to the sums in registers: y is written once, and also z if "
        "backward needs it. Backward: the bias's sums in two stages without atomics, so that they are "
        "deterministic.",
        costs="The tensor cores are idle while a program's epilogue waits for memory.",
        needs=("triton",),
    ),
    Variant(
        name="fused",
        lesson="On a CPU PyTorch's operators in one node, which saves backward's inputs only once.",
        costs="As torch.",
        devices=("cpu", "meta"),
    ),
    Variant(
        name="persistent",
        lesson="One program per SM, which loads the next tile while it stores the last. Tiles are loaded by TMA. The "
        "epilogue in two halves leaves shared memory to the product. Backward: the bias's sums from the registers that "
        "hold dz.",
        costs="Rows must start at multiples of 16 bytes: K and N must be multiples of 8, and an unaligned x is copied.",
        dtypes=HALVES,
        capability=(9, 0),
        needs=("triton",),
    ),
    Variant(
        name="mixed",
        lesson="Weights in float32 for the optimizer, products in bfloat16: the weight is rounded when it is read, and "
        "its gradient is the product's fp32 sums, without rounding.",
        costs="Each pass reads the weight in fp32 and writes it in bf16. The accuracy is that of bfloat16.",
        dtypes=(torch.float32, torch.bfloat16),
        needs=("triton",),
    ),
    Variant(
        name="mixed",
        lesson="The same on a CPU with PyTorch's operators.",
        costs="The same.",
        devices=("cpu", "meta"),
        dtypes=(torch.float32, torch.bfloat16),
    ),
    Variant(
        name="cublaslt",
        lesson="cuBLAS has the fastest product, and one kernel from z to y takes no longer than an epilogue that slows "
        "it down. cuBLAS's epilogue for bias, ReLU and, in half precision without saving z, tanh GELU; else that "
        "kernel. z is saved without the bias, which backward adds again, so z is written once.",
        costs="z is read once more. If bias and product cancel, z has the rounding error of the larger one.",
        dtypes=UP_TO_FP32,
        needs=("triton",),
    ),
    Variant(
        name="wgmma",
        lesson="The products by matmul's wgmma, whose idle warps do the rest meanwhile: activations of the previous "
        "tile, and dz of rows that backward multiplies later.",
        costs="z is read again, rounded, from the L2 cache. If rows are not multiples of 16 bytes, it runs as fused.",
        dtypes=HALVES,
        capability=(9, 0),
        only_there=True,
        needs=("triton", *nvrtc.NEEDS),
    ),
    Variant(
        name="torch",
        lesson="PyTorch's own operators under autograd: the baseline.",
        costs="Reads z and writes y once more; reads dz once more for the bias's gradient.",
        devices=("cpu", "cuda", "meta"),
    ),
)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation | None = None,
    variant: str = "auto",
) -> Tensor:
    """act(x W^T + b). Deterministic, and differentiable twice.

    Autocast has no effect here. Its equivalent for weights in float32 is variant="mixed", which "auto" uses for x in
    bfloat16 and a weight in float32.

    Args:
        x: (..., K), in float32, float16, bfloat16 or float64. Any strides.
        weight: (N, K), of the same dtype; as in nn.Linear. With variant="mixed" float32, and x float32 or bfloat16.
        bias: (N), of the weight's dtype, or None.
        activation: "relu", "gelu", "gelu_tanh" (GELU's tanh form), "silu", or None.
        variant: one of `variants("linear")`, or "auto": the fastest here.

    Returns:
        (..., N) in x's dtype.

    Raises:
        ShapeError: sizes, dtypes or devices do not match; with variant="persistent", K or N is not a multiple of 8.
        ConfigError: the activation or the variant does not exist.
        DeviceError: the variant does not support this device.
    """
    if activation is not None and activation not in ACTIVATIONS:
        raise ConfigError(f"activation={activation!r}, but there are {', '.join(map(repr, ACTIVATIONS))} and None.")
    _check_sizes(x, weight, bias)
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    chosen = choose("linear", LADDER, variant, x, auto=lambda: _auto(x, weight, activation, keep))
    _check_dtypes(x, weight, bias, chosen)
    act = activation or ""
    if chosen == "torch":
        return call_pytorch(linear_reference, x, weight, bias, act)
    rows = x[None] if x.dim() == 1 else x.flatten(0, -2)
    if chosen == "mixed":
        rows = rows.to(torch.bfloat16)
    outputs = linear_forward(rows, weight, bias, act, keep, chosen)
    y: Tensor = outputs[0]
    return y.view(*x.shape[:-1], weight.shape[0]).to(x.dtype)


def _auto(x: Tensor, weight: Tensor, activation: Activation | None, keep: bool) -> str:
    if x.dtype == torch.bfloat16 and weight.dtype == torch.float32 and (not x.is_cuda or is_installed("triton")):
        return "mixed"
    if activation is None or not has_triton_for(x) or _is_brief(x, weight):
        return "torch"
    if is_best_for_a_layer(x, weight):  # pragma: gpu
        return "wgmma"
    # If z is saved, cuBLAS has no epilogue: both are equally fast in forward, and persistent was faster in backward.
    kept_too = keep and activation != "relu"
    return "persistent" if kept_too and _suits_tma(x, weight) else "cublaslt"


def _suits_tma(x: Tensor, weight: Tensor) -> bool:
    is_hopper = x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)
    return is_hopper and x.dtype in HALVES and not any(size % _ROW_MULTIPLE for size in weight.shape)


def _is_brief(x: Tensor, weight: Tensor) -> bool:
    """Whether launching our kernels takes longer than their run time, estimated from the product."""
    return is_small(x, weight) and x.numel() * weight.shape[0] <= _BRIEF


def _check_sizes(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if x.dim() < 1 or weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ShapeError(
            f"x {tuple(x.shape)}, weight {tuple(weight.shape)}: linear takes x (..., K) and weight (N, K). For (K, N), "
            "pass weight.mT."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ShapeError(
            f"bias {tuple(bias.shape)}: with weight {tuple(weight.shape)} it must be ({weight.shape[0]},)."
        )
    if weight.device != x.device or (bias is not None and bias.device != x.device):
        given = {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias})
        found = ", ".join(f"{name} on {t.device}" for name, t in given.items())
        raise ShapeError(f"{found}: move them to one device.")


def _check_dtypes(x: Tensor, weight: Tensor, bias: Tensor | None, chosen: str) -> None:
    wanted = torch.float32 if chosen == "mixed" else x.dtype
    if x.dtype not in FLOATS or weight.dtype != wanted or (bias is not None and bias.dtype != wanted):
        raise ShapeError(
            f"{_dtypes(x, weight, bias)}: all must have the same dtype, float32, float16, bfloat16 or float64; or x "
            "float32 or bfloat16 and the others float32, for variant='mixed'."
        )
    if chosen == "fused" and x.dtype == torch.float64 and x.device.type == "cuda":  # pragma: gpu
        raise DeviceError(
            f"{_dtypes(x, weight, bias)} on {x.device}: variant='fused' takes float64 on a CPU only; use 'torch', or "
            "'auto'."
        )


def _dtypes(x: Tensor, weight: Tensor, bias: Tensor | None) -> str:
    return f"x {x.dtype}, weight {weight.dtype}" + ("" if bias is None else f", bias {bias.dtype}")
