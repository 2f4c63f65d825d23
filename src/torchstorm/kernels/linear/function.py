"""A linear layer with its activation, y = act(x W^T + b): bias, activation and their gradients in one pass each.

Shapes: M rows, K features in, N out. Dtypes: float32, float16, bfloat16, float64; sums, bias and activation in fp32.
Traffic beside the products: y written, and z = x W^T + b too where GELU or SiLU need it later; backward reads dy and z
and writes dz, with the bias's gradient in passing. Kept for backward: x, and z for GELU and SiLU, y for ReLU.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from torchstorm.errors import ConfigError, DeviceError, ShapeError
from torchstorm.kernels import nvrtc
from torchstorm.kernels.directly import directly, is_small
from torchstorm.kernels.dtypes import FLOATS, HALVES, UP_TO_FP32
from torchstorm.kernels.linear.op import linear_forward
from torchstorm.kernels.linear.plain import ACTIVATIONS, linear_reference
from torchstorm.kernels.linear.wgmma import is_best_for_a_layer
from torchstorm.kernels.variants import Variant, choose, has_triton_for, is_installed

Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
_BRIEF = 1 << 35  # M N K: 0.1 ms at 700 TFLOP/s
_ROW_MULTIPLE = 8  # halves of 16 bytes, where TMA's rows begin

LADDER = (
    Variant(
        name="naive",
        taught="The definition as kernels: a tile of the product a program, then the bias, then the activation. "
        "Backward: the gradient, and a program for every 128 columns that adds up the bias's.",
        costs="y is read and written twice more, and the products leave most of the tensor cores idle.",
        dtypes=UP_TO_FP32,
        needs=("triton",),
    ),
    Variant(
        name="fused",
        taught="Bias and activation belong where the sums are, in registers: y is written once, z beside it where "
        "backward needs it. Backward: the bias's sums in two stages, without atomics, so that the same bits come "
        "twice.",
        costs="A program's last lines wait for memory while its tensor cores do nothing.",
        needs=("triton",),
    ),
    Variant(
        name="fused",
        taught="On a CPU PyTorch's operators, as one node: what backward needs is kept once.",
        costs="As torch.",
        devices=("cpu", "meta"),
    ),
    Variant(
        name="persistent",
        taught="A program an SM, which loads the next tile while it stores the last; tiles come by TMA, and the "
        "epilogue in halves leaves shared memory to the product. Backward: the bias's sums from the registers that "
        "hold dz.",
        costs="Rows must begin at multiples of 16 bytes: K and N are multiples of 8, and an x that begins elsewhere is "
        "copied.",
        dtypes=HALVES,
        capability=(9, 0),
        needs=("triton",),
    ),
    Variant(
        name="mixed",
        taught="Weights in float32 for the optimizer, products in bfloat16: the weight is rounded on the way in, and "
        "its gradient comes out of the product's fp32 sums without being rounded at all.",
        costs="The weight read in fp32 and written in bf16, in each pass. As right as bfloat16 is.",
        dtypes=(torch.float32, torch.bfloat16),
        needs=("triton",),
    ),
    Variant(
        name="mixed",
        taught="The same on a CPU, by PyTorch's operators.",
        costs="The same.",
        devices=("cpu", "meta"),
        dtypes=(torch.float32, torch.bfloat16),
    ),
    Variant(
        name="cublaslt",
        taught="The fastest product is cuBLAS's, and one kernel from z to y costs no more than an epilogue that slows "
        "it: bias, ReLU and, in half precision where nothing is kept, tanh GELU in its epilogue, else that kernel. z "
        "is kept before the bias, which backward adds again, so that it is written once.",
        costs="z is read once more. Where bias and product cancel, z is rounded by the larger of them.",
        dtypes=UP_TO_FP32,
        needs=("triton",),
    ),
    Variant(
        name="wgmma",
        taught="The products by matmul's wgmma, whose idle warps meanwhile do the rest: activations of the tile "
        "before, dz of rows that backward multiplies later.",
        costs="z is read again, rounded, from the L2 cache. Rows of whole 16 bytes, or else it runs as fused.",
        dtypes=HALVES,
        capability=(9, 0),
        only_there=True,
        needs=("triton", *nvrtc.NEEDS),
    ),
    Variant(
        name="torch",
        taught="PyTorch's own operators under autograd: what the others must beat.",
        costs="z read and y written once more, dz read once more for the bias's gradient.",
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
    """act(x W^T + b). Deterministic; gradients of gradients too.

    Autocast does not reach inside. What it would do, with weights in float32, is variant="mixed", which "auto" takes
    for x in bfloat16 and a weight in float32.

    Args:
        x: (..., K), in float32, float16, bfloat16 or float64. Any strides.
        weight: (N, K), of the same dtype; as in nn.Linear. For variant="mixed" float32, and x that or bfloat16.
        bias: (N), of the weight's dtype, or None.
        activation: "relu", "gelu", "gelu_tanh" (GELU's tanh form), "silu", or None.
        variant: one of `variants("linear")`, or "auto": the fastest here.

    Returns:
        (..., N) in x's dtype.

    Raises:
        ShapeError: sizes, dtypes or devices do not fit; variant="persistent" also for K or N that is no multiple of 8.
        ConfigError: there is no such activation or variant.
        DeviceError: the variant does not run here.
    """
    if activation is not None and activation not in ACTIVATIONS:
        raise ConfigError(f"activation={activation!r}, but there are {', '.join(map(repr, ACTIVATIONS))} and None.")
    _check_sizes(x, weight, bias)
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    chosen = choose("linear", LADDER, variant, x, auto=lambda: _auto(x, weight, activation, keep))
    _check_dtypes(x, weight, bias, chosen)
    act = activation or ""
    if chosen == "torch":
        return directly(linear_reference, x, weight, bias, act)
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
    # Where z is kept, cuBLAS has no epilogue for it: forward both are as fast, backward persistent was faster.
    kept_too = keep and activation != "relu"
    return "persistent" if kept_too and _suits_tma(x, weight) else "cublaslt"


def _suits_tma(x: Tensor, weight: Tensor) -> bool:
    is_hopper = x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)
    return is_hopper and x.dtype in HALVES and not any(size % _ROW_MULTIPLE for size in weight.shape)


def _is_brief(x: Tensor, weight: Tensor) -> bool:
    """Whether the host takes longer to start our kernels than they run: a layer is no longer than its product."""
    return is_small(x, weight) and x.numel() * weight.shape[0] <= _BRIEF


def _check_sizes(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if x.dim() < 1 or weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ShapeError(
            f"x {tuple(x.shape)}, weight {tuple(weight.shape)}: linear takes x (..., K) and weight (N, K). Of (K, N), "
            "weight.mT makes (N, K)."
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
            f"{_dtypes(x, weight, bias)}: all must be of one dtype, float32, float16, bfloat16 or float64; or x in "
            "float32 or bfloat16 and the others in float32, for variant='mixed'."
        )
    if chosen == "fused" and x.dtype == torch.float64 and x.device.type == "cuda":  # pragma: gpu
        raise DeviceError(
            f"{_dtypes(x, weight, bias)} on {x.device}: variant='fused' takes float64 on a CPU only; use 'torch', or "
            "'auto'."
        )


def _dtypes(x: Tensor, weight: Tensor, bias: Tensor | None) -> str:
    return f"x {x.dtype}, weight {weight.dtype}" + ("" if bias is None else f", bias {bias.dtype}")
