"""Batch normalization with an activation from PyTorch's own operators, in fp32 or float64."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from torchstorm.kernels.dtypes import wide
from torchstorm.kernels.elementwise.operations import BY_NAME


def _wide(x: Tensor) -> Tensor:
    return x.to(wide(x.dtype))


def _dims(x: Tensor) -> list[int]:
    return [d for d in range(x.dim()) if d != 1]


def _over_channels(per_channel: Tensor, x: Tensor) -> Tensor:
    return per_channel.view(-1, *[1] * (x.dim() - 2))


def statistics(x: Tensor, mean: Tensor, var: Tensor, rstd: Tensor, eps: float, variant: str) -> None:
    """Fills mean, biased variance and 1 / sqrt(variance + eps) of each channel.

    It uses several passes instead of torch.var_mean, whose running mean on a GPU rounds at every step: for
    channels-last tensors its means had 2.3 times the error of F.batch_norm's. By rounding, x - mean has a mean that is
    not 0; it is added to the mean.
    """
    x, dims = _wide(x), _dims(x)
    first = x.mean(dims)
    left = x - _over_channels(first, x)
    rest = left.mean(dims)
    torch.add(first, rest, out=mean)
    torch.sub(left.square_().mean(dims), rest.square(), out=var).clamp_(min=0.0)
    torch.rsqrt(var + eps, out=rstd)


def normalise(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor, activation: str, y: Tensor,
    variant: str,
) -> None:  # fmt: skip
    """Fills y with the activation of (x - mean) rstd weight + bias."""
    z = _scaled(_normal(x, mean, rstd), weight, bias)
    y.copy_(BY_NAME[activation].forward(z, torch.empty_like(z)) if activation else z)


def backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor, batch: bool,
    activation: str, dx: Tensor, d_weight: Tensor, d_bias: Tensor, variant: str,
) -> None:  # fmt: skip
    """Fills dx and the gradients of weight and bias; `batch`: mean and rstd are those of x."""
    normal, dz = _normal(x, mean, rstd), _wide(dy)
    if activation:
        dz = BY_NAME[activation].backward(dz, z := _scaled(normal, weight, bias), torch.empty_like(z))
    sum_dz, sum_product = dz.sum(_dims(x)), (dz * normal).sum(_dims(x))
    d_bias.copy_(sum_dz)
    d_weight.copy_(sum_product)
    if batch:
        num = x.numel() // x.shape[1]
        dz = dz - _over_channels(sum_dz / num, x) - normal * _over_channels(sum_product / num, x)
    scale = rstd if weight is None else rstd * weight
    dx.copy_(dz * _over_channels(scale, x))


def _normal(x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    return (_wide(x) - _over_channels(mean, x)) * _over_channels(rstd, x)


def _scaled(normal: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        normal = normal * _over_channels(weight, normal)
    return normal if bias is None else normal + _over_channels(bias, normal)


def reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: tuple[Tensor, Tensor] | None, eps: float,
    activation: str,
) -> Tensor:  # fmt: skip
    """The definition under autograd, with the given mean and rstd or the batch's; all in one dtype."""
    if statistics is None:
        var, mean = torch.var_mean(x, _dims(x), correction=0)
        statistics = mean, (var + eps).rsqrt()
    z = _scaled(_normal(x, *statistics), weight, bias)
    named: dict[str, Callable[[Tensor], Tensor]] = {"": lambda z: z, "relu": F.relu, "silu": F.silu, "gelu": F.gelu}
    return named[activation](z)
