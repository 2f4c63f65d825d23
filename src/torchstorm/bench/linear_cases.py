"""Benchmark cases of `linear` and `linear_cross_entropy`: shapes, inputs, other implementations and work."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from torchstorm.bench.op_cases import Inputs, OpCase, Outputs, Sizes, Way, compiled
from torchstorm.kernels import linear, linear_cross_entropy
from torchstorm.kernels.linear import LADDER as LINEAR
from torchstorm.kernels.linear.function import Activation
from torchstorm.kernels.linear_cross_entropy import LADDER as LINEAR_CROSS_ENTROPY
from torchstorm.kernels.variants import Ladder, available

_LINEAR_SHAPES: dict[str, tuple[tuple[int, int, int, Activation], ...]] = {
    "small": ((256, 128, 192, "gelu"), (255, 100, 77, "relu")),
    "target": ((16384, 4096, 16384, "gelu"), (16384, 4096, 16384, "gelu_tanh"), (8192, 4096, 4096, "silu")),
}
# Tokens, K, V, and n for every n-th token ignored; 0 for none.
_LOSS_SHAPES = {
    "small": ((512, 64, 1000, 8),),
    "target": ((32768, 4096, 131072, 8), (8192, 768, 50257, 8), (32768, 4096, 131072, 0)),
}
_TRUE_ROWS = 2048
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


def linear_cases(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> tuple[OpCase, ...]:
    """M x K x N with bias and activation, with z saved; one shape has gelu. "small" runs on any device in seconds."""
    if isinstance(sizes, tuple):
        M, K, N = sizes
        return (_linear_case(M, K, N, "gelu", device, dtype),)
    return tuple(_linear_case(*shape, device, dtype) for shape in _LINEAR_SHAPES[sizes])


def _linear_case(M: int, K: int, N: int, activation: Activation, device: torch.device, dtype: torch.dtype) -> OpCase:
    def make(device: torch.device, seed: int) -> Inputs:
        generator = torch.Generator(device).manual_seed(seed)
        shapes = {"x": ((M, K), 1.0), "weight": ((N, K), K**-0.5), "bias": ((N,), 1.0), "d_y": ((M, N), 1.0)}
        return {name: normal(*shape, device, dtype, generator) for name, shape in shapes.items()}

    def ours(inputs: Inputs, variant: str) -> Outputs:
        x, weight, bias = (inputs[name] for name in ("x", "weight", "bias"))
        if variant == "mixed":  # its weights are fp32; their conversion is included, about 3 % at the target shapes
            weight, bias = weight.float(), bias.float()
        return {"y": linear(x, weight, bias, activation=activation, variant=variant)}

    def plain(inputs: Inputs) -> Outputs:
        z = F.linear(inputs["x"], inputs["weight"], inputs["bias"])
        return {"y": _ACTIVATIONS[activation](z)}

    return OpCase(
        op="linear",
        shape=f"{M}x{K}x{N} {activation}",
        dtype=dtype,
        make=make,
        ours=ours,
        variants=_here(LINEAR, device, dtype),
        reference=plain,
        peers={"torch.compile": compiled(plain)},
        differentiable=("x", "weight", "bias"),
        work={"forward": 2.0 * M * K * N, "backward": 4.0 * M * K * N},
        unit="FLOP/s",
    )


def linear_cross_entropy_cases(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> tuple[OpCase, ...]:
    """Tokens x K x V, the mean over all tokens or all but every eighth; of one shape over all. "small" runs on any
    device in seconds."""
    if isinstance(sizes, tuple):
        N, K, V = sizes
        return (_loss_case((N, K, V, 0), device, dtype),)
    return tuple(_loss_case(shape, device, dtype) for shape in _LOSS_SHAPES[sizes])


def _loss_case(shape: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype) -> OpCase:
    N, K, V, ignored = shape

    def make(device: torch.device, seed: int) -> Inputs:
        generator = torch.Generator(device).manual_seed(seed)
        target = torch.randint(0, V, (N,), device=device, generator=generator)
        if ignored:
            target[::ignored] = -100
        return {
            "x": normal((N, K), 1.0, device, dtype, generator),
            "weight": normal((V, K), K**-0.5, device, dtype, generator),
            "target": target,
            "d_loss": torch.ones((), device=device, dtype=torch.float32),
        }

    def ours(inputs: Inputs, variant: str) -> Outputs:
        return {"loss": linear_cross_entropy(inputs["x"], inputs["weight"], inputs["target"], variant=variant)}

    product = 2.0 * (N - (-(-N // ignored) if ignored else 0)) * K * V  # without ignored tokens
    return OpCase(
        op="linear_cross_entropy",
        shape=f"{N}x{K}x{V}" + ("" if ignored else " all count"),
        dtype=dtype,
        make=make,
        ours=ours,
        variants=_here(LINEAR_CROSS_ENTROPY, device, dtype),
        reference=_plain_loss,
        peers=_loss_peers(),
        differentiable=("x", "weight"),
        work={"forward": product, "both": 3 * product},  # ours computes gradients in forward
        unit="FLOP/s",
        truth=_true_loss,
    )


def _plain_loss(inputs: Inputs) -> Outputs:
    return {"loss": F.cross_entropy(F.linear(inputs["x"], inputs["weight"]), inputs["target"])}


def _true_loss(inputs: Inputs) -> Outputs:
    """The reference for float64, in chunks of tokens in forward and backward, since all logits would not fit."""

    def loss_of(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight), target, reduction="sum")

    x, weight, target = inputs["x"], inputs["weight"], inputs["target"]
    rows = zip(x.split(_TRUE_ROWS), target.split(_TRUE_ROWS), strict=True)
    sums = [checkpoint(loss_of, x_c, weight, target_c, use_reentrant=False) for x_c, target_c in rows]
    return {"loss": torch.stack(sums).sum() / (target != -100).sum()}


def _loss_peers() -> Mapping[str, Way]:
    peers: dict[str, Way] = {"torch.compile": compiled(_plain_loss)}
    if find_spec("liger_kernel") is not None:  # pragma: no cover - a peer that need not be there
        function = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
        apply: Callable[..., tuple[Tensor, ...]] = function.LigerFusedLinearCrossEntropyFunction.apply
        peers["liger"] = lambda inputs: {"loss": apply(inputs["x"], inputs["weight"], inputs["target"])[0]}
    return peers


def _here(ladder: Ladder, device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
    """Variants with the accuracy of the dtype: "mixed" has that of bfloat16."""
    names = [variant.name for variant in available(ladder, device, dtype)]
    return (*(name for name in names if name != "mixed" or dtype == torch.bfloat16), "auto")


def normal(
    shape: tuple[int, ...], scale: float, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    """Random numbers with mean 0, generated in the dtype, without a float32 copy."""
    return torch.empty(shape, device=device, dtype=dtype).normal_(0.0, scale, generator=generator)
