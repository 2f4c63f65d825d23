"""Benchmark cases of matrix products: shapes, inputs, implementations and operations."""

from __future__ import annotations

from functools import partial

import torch

from torchstorm.bench.op_cases import Inputs, OpCase, Outputs, Sizes
from torchstorm.kernels.matmul import MATMUL, matmul
from torchstorm.kernels.variants import available

# Batches, M, N and K: squares from what fits a cache to what fills a GPU; tokens through a feed-forward layer and back;
# a shape that fits no tile; heads of an attention.
_SMALL = ((1, 256, 256, 256), (1, 257, 263, 269), (4, 128, 64, 128))
_TARGET = (
    (1, 1024, 1024, 1024),
    (1, 2048, 2048, 2048),
    (1, 4096, 4096, 4096),
    (1, 8192, 8192, 8192),
    (1, 16384, 16384, 4096),
    (1, 16384, 4096, 16384),
    (1, 4095, 4097, 4099),
    (64, 2048, 2048, 128),
)
# Rows of 1024 floats are 4096 bytes apart, where a plain loop finds few places in a cache; those of 1000 are not.
_TARGET_CPU = ((1, 1000, 1000, 1000), (1, 1024, 1024, 1024))
_SLOW = ("naive", "tiled")  # left out above this number of operations, since they would take seconds
_SLOW_FLOPS = 2.0 * 4096**3


def matmul_cases(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> tuple[OpCase, ...]:
    """The shapes "small", which take seconds on any device, or "target" for the device; or one, with or without B."""
    if isinstance(sizes, tuple):
        M, N, K = sizes[-3:]
        return (matmul_case(sizes[0] if len(sizes) > 3 else 1, M, N, K, device, dtype),)
    known = {"small": _SMALL, "target": _TARGET_CPU if device.type == "cpu" else _TARGET}
    return tuple(matmul_case(*shape, device, dtype) for shape in known[sizes])


def matmul_case(batch: int, M: int, N: int, K: int, device: torch.device, dtype: torch.dtype) -> OpCase:
    """A batch of products of (M, K) and (K, N)."""
    flops = 2.0 * batch * M * N * K
    tf32 = torch.get_float32_matmul_precision() != "highest"
    names = [
        variant.name
        for variant in available(MATMUL, device, dtype)
        if (variant.name != "tensor-cores" or dtype != torch.float32 or tf32)
        and (variant.name not in _SLOW or flops <= _SLOW_FLOPS)
    ]
    return OpCase(
        op="matmul",
        shape=f"{M}x{N}x{K}" if batch == 1 else f"{batch}x{M}x{N}x{K}",
        dtype=dtype,
        make=partial(_make, batch, M, N, K, dtype),
        ours=_ours,
        variants=(*names, "auto"),
        reference=_reference,
        peers={},
        differentiable=("a", "b"),
        work={"forward": flops, "backward": 2 * flops},
        unit="FLOP/s",
    )


def _make(batch: int, M: int, N: int, K: int, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    batches = (batch,) if batch > 1 else ()
    shapes = {"a": (M, K), "b": (K, N), "d_c": (M, N)}
    return {
        name: torch.randn((*batches, *shape), device=device, dtype=dtype, generator=generator)
        for name, shape in shapes.items()
    }


def _ours(inputs: Inputs, variant: str) -> Outputs:
    return {"c": matmul(inputs["a"], inputs["b"], variant=variant)}


def _reference(inputs: Inputs) -> Outputs:
    return {"c": torch.matmul(inputs["a"], inputs["b"])}
