"""The output layer of a language model and its loss: cross-entropy of logits x W^T + b, without all logits in memory.

Shapes: N tokens, of hidden size K, and V classes. Dtypes: float32, float16, bfloat16, float64; softmax and loss in
float32. For N = 32768 and V = 131072 the logits are 8 GiB in bf16, and PyTorch holds three such tensors at once; here
only one chunk of tokens is held at a time. `chunks.py` explains the algorithm and its memory.
Source: gradients computed together with the logits, as in Liger Kernel, arXiv 2410.10989, and efficient_cross_entropy,
which it names as its own source; the softmax's sum and maximum in one pass, arXiv 1805.02867.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchstorm.errors import ConfigError, ShapeError
from torchstorm.kernels.dtypes import FLOATS, UP_TO_FP32
from torchstorm.kernels.linear_cross_entropy import chunks
from torchstorm.kernels.linear_cross_entropy.op import linear_cross_entropy_forward
from torchstorm.kernels.linear_cross_entropy.reference import Reduction, linear_cross_entropy_reference
from torchstorm.kernels.pytorch_fallback import without_autocast
from torchstorm.kernels.variants import Variant, choose, has_triton_for

LADDER = (
    Variant(
        name="naive",
        lesson="The definition: all logits, softmax over them, and autograd.",
        costs="Several tensors of N x V elements, also in fp32. The only variant with second derivatives.",
        devices=("cpu", "cuda"),
    ),
    Variant(
        name="chunked",
        lesson="A row's loss needs no other row: chunks of tokens, with gradients computed together with the logits, "
        "need at most an eighth of the memory, and still three products.",
        costs="The softmax is a dozen operators per chunk, with about ten times the necessary memory traffic.",
        devices=("cpu", "cuda", "meta"),
    ),
    Variant(
        name="fused",
        lesson="The softmax as one kernel: it reads a row twice, the second time in reverse and partly from L2, and "
        "writes the gradient over it once.",
        costs="Three products, one read and write of dW per chunk, and a buffer for one chunk's logits. On a GPU the "
        "host waits for the number of tokens that are not ignored, if there are many, and skips ignored ones.",
        dtypes=UP_TO_FP32,
        needs=("triton",),
    ),
)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    softcap: float | None = None,
    variant: str = "auto",
) -> Tensor:
    """F.cross_entropy(F.linear(x, weight, bias), target), of many logits only a part at a time. Deterministic.

    With "mean" and "sum", the forward pass computes the gradients of x, weight and bias. Call it under torch.no_grad()
    if they are not required, and not within torch.utils.checkpoint, which would compute them twice. None of that, and
    nothing said here of ignored tokens' time, holds for variant="naive": PyTorch's operators on all logits at once,
    which "auto" uses for up to 32 MiB of logits on a CPU, but in float16.

    Args:
        x: (..., K), in float32, float16, bfloat16 or float64. Any strides.
        weight: (V, K), of the same dtype; as in nn.Linear.
        target: (...), int64, each in [0, V), or `ignore_index`. Ignored tokens take no time. On a GPU the values are
            not checked; a row with an invalid target has NaN as loss and gradient.
        bias: (V), or None.
        ignore_index: target of tokens without loss and gradient.
        label_smoothing: share of each target, in [0, 1], that is distributed over all classes.
        reduction: "mean" over tokens that are not ignored (NaN if all are), "sum", or "none".
        softcap: c > 0 replaces logits by c tanh(logits / c); None for no softcap.
        variant: one of `variants("linear_cross_entropy")`, or "auto": the fastest here.

    Returns:
        The loss in float32, or float64 for float64: a scalar, or (...) for "none".

    Raises:
        ShapeError: sizes, dtypes or devices do not match; or, on a CPU, a target is invalid ("naive": IndexError).
        ConfigError: an option is out of range, or the variant does not exist.
        DeviceError: the variant does not support this device.
        UnsupportedError: backward was called with create_graph=True, which only variant="naive" supports.
    """
    _check(x, weight, target, bias)
    _check_options(label_smoothing, reduction, softcap)
    chosen = choose("linear_cross_entropy", LADDER, variant, x, auto=lambda: _auto(x, weight))
    if chosen == "naive":
        with without_autocast(x):
            return linear_cross_entropy_reference(
                x, weight, target, bias=bias, ignore_index=ignore_index, label_smoothing=label_smoothing,
                reduction=reduction, softcap=softcap,
            )  # fmt: skip
    wants = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (x, weight, bias)]
    outputs = linear_cross_entropy_forward(
        x[None] if x.dim() == 1 else x.flatten(0, -2), weight, bias, target.reshape(-1), ignore_index,
        float(label_smoothing), None if softcap is None else float(softcap), reduction, *wants, chosen,
    )  # fmt: skip
    loss: Tensor = outputs[0]
    return loss.view(target.shape) if reduction == "none" else loss


def _auto(x: Tensor, weight: Tensor) -> str:
    if has_triton_for(x):
        return "fused"
    # On a CPU, chunks are up to twice as fast from about 32 MiB of logits on, and below as fast as PyTorch's operators
    # or a little slower. In float16 the gradients of a mean over many tokens would underflow in PyTorch's operators.
    if x.device.type == "cpu" and x.dtype != torch.float16 and chunks.few_logits(x, weight):
        return "naive"
    return "chunked"


def _check(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> None:
    if x.dim() < 1 or weight.dim() != 2 or weight.shape[1] != x.shape[-1] or not weight.shape[0]:
        raise ShapeError(
            f"x {tuple(x.shape)}, weight {tuple(weight.shape)}: linear_cross_entropy takes x (..., K) and weight "
            "(V, K) with V at least 1. For (K, V), pass weight.mT."
        )
    if target.shape != x.shape[:-1] or target.dtype != torch.int64:
        raise ShapeError(
            f"target is {target.dtype} {tuple(target.shape)}: with x {tuple(x.shape)} it must be torch.int64 "
            f"{tuple(x.shape[:-1])}, a class for every token."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ShapeError(
            f"bias {tuple(bias.shape)}: with weight {tuple(weight.shape)} it must be ({weight.shape[0]},)."
        )
    floats = {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias})
    if x.dtype not in FLOATS or any(t.dtype != x.dtype for t in floats.values()):
        found = ", ".join(f"{name} {t.dtype}" for name, t in floats.items())
        raise ShapeError(
            f"{found}: all must have the same dtype, float32, float16, bfloat16 or float64. For float32 master "
            "weights, pass weight.to(x.dtype), which is differentiable."
        )
    if any(t.device != x.device for t in (*floats.values(), target)):
        found = ", ".join(f"{name} on {t.device}" for name, t in (*floats.items(), ("target", target)))
        raise ShapeError(f"{found}: move them to one device.")


def _check_options(label_smoothing: float, reduction: str, softcap: float | None) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ConfigError(f"reduction={reduction!r}, but it must be 'mean', 'sum' or 'none'.")
    if not 0 <= label_smoothing <= 1:
        raise ConfigError(f"label_smoothing={label_smoothing}, but it must be from 0 to 1.")
    if softcap is not None and not softcap > 0:
        raise ConfigError(f"softcap={softcap}, but it must be above 0, or None.")
