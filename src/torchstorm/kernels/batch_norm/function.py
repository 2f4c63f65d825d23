"""Batch normalization with the following activation, in one pass over memory.

    y = act((x - mean) rstd weight + bias),    rstd = 1 / sqrt(var + eps),    for each of C channels

Source: arXiv 1502.03167. Memory traffic in training: forward reads x twice and writes y; backward reads dy and x twice
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from torchstorm.errors import ConfigError, ShapeError
from torchstorm.kernels.batch_norm.op import batch_norm_act_op
from torchstorm.kernels.dtypes import FLOATS, UP_TO_FP32, wide
from torchstorm.kernels.elementwise.function import check_dtype
from torchstorm.kernels.elementwise.operations import BY_NAME
from torchstorm.kernels.pytorch_fallback import call_pytorch, prefers_pytorch
from torchstorm.kernels.variants import Ladder, Variant, choose, has_triton_for

Activation = Literal["relu", "silu", "gelu"]
ACTIVATIONS = ("relu", "silu", "gelu")

VARIANTS: Ladder = (
    Variant(
        name="torch",
        lesson="the definition, operation by operation, in fp32",
        costs="each operation reads and writes the whole tensor",
        devices=("cpu", "cuda"),
        dtypes=FLOATS,
    ),
    Variant(
        name="parallel",
        lesson="channels are independent: each core processes some of them, with the activation in the same loop",
        costs="reads x twice, from a core's cache if a channel fits; seconds to compile at the first call",
        devices=("cpu",),
        dtypes=(torch.float32, torch.float64),
        needs=("numba",),
    ),
    Variant(
        name="naive",
        lesson="the same on a GPU: one program per channel or per few neighbouring channels",
        costs="reads x twice; with few channels most of the GPU is idle",
        dtypes=UP_TO_FP32,
        needs=("triton",),
    ),
    Variant(
        name="two-stage",
        lesson="a channel is split into parts; means and variances of parts can be merged, in a fixed order",
        costs="reads x twice, the second time in reverse, and writes y once; a few numbers per part",
        dtypes=UP_TO_FP32,
        needs=("triton",),
    ),
)


def batch_norm_act(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    *,
    training: bool,
    momentum: float = 0.1,
    eps: float = 1e-5,
    activation: Activation | None = "relu",
    variant: str = "auto",
) -> Tensor:
    """Normalizes each channel and applies the activation. With `training`, updates the running statistics in place.

    Args:
        x: (N, C, ...) in float32, float16, bfloat16 or float64; computed in fp32. Contiguous and channels-last tensors
            are used directly; others are copied.
        weight, bias: (C,) in x's dtype or float32, or None.
        running_mean, running_var: (C,), used without `training`, and updated with it as in
            `torch.nn.functional.batch_norm` (with the unbiased variance). None always uses the batch's statistics.
        momentum: weight of the new value in the running statistics.
        eps: added to the variance.
        activation: "relu", "silu", "gelu" or None.
        variant: one of `variants("batch_norm_act")`, or "auto": the fastest here.

    Returns:
        A tensor with x's shape, dtype and memory format.

    Raises:
        ShapeError: sizes, dtypes or devices do not match, or in training a channel has only one value.
        ConfigError: the activation or the variant does not exist.
        DeviceError: the variant does not support this device or dtype.
    """
    _check(x, weight, bias, running_mean, running_var, training)
    if activation is not None and activation not in ACTIVATIONS:
        names = ", ".join(map(repr, ACTIVATIONS))
        raise ConfigError(f"activation={activation!r}, but batch_norm_act has {names} and None.")
    of_batch = training or running_mean is None
    num = x.numel() // max(x.shape[1], 1)
    if of_batch and num == 1:
        raise ShapeError(
            f"x {tuple(x.shape)} has one value per channel, so no variance: training needs more, or use training=False."
        )
    if variant == "auto" and _prefers_pytorch(x, weight, bias, running_mean, running_var, activation):
        return call_pytorch(
            _pytorch_batch_norm, x, weight, bias, running_mean, running_var, of_batch, momentum, eps, activation
        )
    chosen = choose("batch_norm_act", VARIANTS, variant, x, auto=lambda: "two-stage" if has_triton_for(x) else "torch")
    given = (None, None) if of_batch else (running_mean, running_var)
    y: Tensor
    y, mean, _, var = batch_norm_act_op(x, weight, bias, *given, eps, activation or "", chosen)
    if training and running_mean is not None and running_var is not None and x.numel():
        with torch.no_grad():
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_((var * (num / (num - 1))).to(running_var.dtype), momentum)
    return y


def _check(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
) -> None:
    check_dtype("batch_norm_act", "x", x)
    if x.dim() < 2:
        raise ShapeError(f"x of batch_norm_act is {tuple(x.shape)}: it must be (N, C, ...).")
    if (running_mean is None) != (running_var is None):
        raise ShapeError("running_mean and running_var of batch_norm_act go together: give both, or None for both.")
    size, dtypes, device = x.shape[1:2], (x.dtype, wide(x.dtype)), x.device
    named = ("weight", weight), ("bias", bias), ("running_mean", running_mean), ("running_var", running_var)
    for name, each in named:
        if each is None:
            continue
        if each.shape != size:
            raise ShapeError(f"{name} is {tuple(each.shape)}: with x {tuple(x.shape)} it must be ({x.shape[1]},).")
        if each.dtype not in dtypes:
            raise ShapeError(f"{name} is {each.dtype}, but x is {x.dtype}: {name} must be {dtypes[0]} or {dtypes[1]}.")
        if each.device != device:
            raise ShapeError(f"{name} is on {each.device}, but x is on {device}: both must be on one device.")


def _prefers_pytorch(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    activation: Activation | None,
) -> bool:
    """Whether PyTorch's function accepts the parameters, and on a GPU saves no more memory for backward than ours.

    For ReLU it saves y, which the next operation mostly saves anyway; for SiLU and GELU it saves their input.
    """
    dtypes = {p.dtype for p in (weight, bias, running_mean, running_var) if p is not None}
    if len(dtypes) > 1 or x.numel() == 0 or not prefers_pytorch(x):
        return False
    return not x.is_cuda or activation in (None, "relu")


def _pytorch_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    of_batch: bool,
    momentum: float,
    eps: float,
    activation: Activation | None,
) -> Tensor:
    z = F.batch_norm(x, running_mean, running_var, weight, bias, of_batch, momentum, eps)
    return z if activation is None else BY_NAME[activation].function(z)
