"""Cases of `linear_cross_entropy`: shapes, inputs, peers and work."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional as F

from torchstorm.bench.op_cases import Inputs, OpCase, Outputs, Way
from torchstorm.kernels import linear_cross_entropy
from torchstorm.kernels.ladders import variants

_LOSS_SHAPES = {"small": ((512, 64, 1000),), "target": ((32768, 4096, 131072), (8192, 768, 50257))}


def linear_cross_entropy_cases(sizes: str, device: torch.device, dtype: torch.dtype) -> tuple[OpCase, ...]:
    """Tokens x K x V, the mean over tokens of which every eighth is ignored; "small" runs anywhere in seconds."""
    return tuple(_loss_case(shape, device, dtype) for shape in _LOSS_SHAPES[sizes])


def _loss_case(shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype) -> OpCase:
    N, K, V = shape

    def make(device: torch.device, seed: int) -> Inputs:
        generator = torch.Generator(device).manual_seed(seed)
        target = torch.randint(0, V, (N,), device=device, generator=generator)
        target[::8] = -100
        return {
            "x": normal((N, K), 1.0, device, dtype, generator),
            "weight": normal((V, K), K**-0.5, device, dtype, generator),
            "target": target,
            "d_loss": torch.ones((), device=device, dtype=torch.float32),
        }

    def ours(inputs: Inputs, variant: str) -> Outputs:
        return {"loss": linear_cross_entropy(inputs["x"], inputs["weight"], inputs["target"], variant=variant)}

    product = 2.0 * N * K * V
    names = variants("linear_cross_entropy")
    return OpCase(
        op="linear_cross_entropy",
        shape=f"{N}x{K}x{V}",
        dtype=dtype,
        make=make,
        ours=ours,
        variants=(*(name for name in names if name != "fused" or device.type == "cuda"), "auto"),
        reference=_plain_loss,
        peers=_loss_peers(),
        differentiable=("x", "weight"),
        work={"forward": product, "backward": 2 * product},
        unit="FLOP/s",
    )


def _plain_loss(inputs: Inputs) -> Outputs:
    return {"loss": F.cross_entropy(F.linear(inputs["x"], inputs["weight"]), inputs["target"])}


def _loss_peers() -> Mapping[str, Way]:
    peers: dict[str, Way] = {"torch.compile": torch.compile(_plain_loss, dynamic=False)}
    if find_spec("liger_kernel") is not None:  # pragma: no cover - a peer that need not be there
        function = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
        apply: Callable[..., tuple[Tensor, ...]] = function.LigerFusedLinearCrossEntropyFunction.apply
        peers["liger"] = lambda inputs: {"loss": apply(inputs["x"], inputs["weight"], inputs["target"])[0]}
    return peers


def normal(
    shape: tuple[int, ...], scale: float, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    """Random numbers of mean 0, drawn in the dtype, so that no copy in float32 stands beside them."""
    return torch.empty(shape, device=device, dtype=dtype).normal_(0.0, scale, generator=generator)
