"""Benchmark cases of softmax, log_softmax, layer_norm and rms_norm: shapes, inputs and other implementations.

All are bound by memory, so the work is in bytes, each counted once: forward reads x and writes y, backward reads y (or
x) and its gradient and writes dx. Weights and statistics, less than 1 %, are not counted.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchstorm.bench.op_cases import Inputs, OpCase, Outputs, Sizes, Way, compiled
from torchstorm.kernels import layer_norm, log_softmax, rms_norm, softmax
from torchstorm.kernels.norms.function import NORMS
from torchstorm.kernels.norms.reference import layer_norm_reference, rms_norm_reference
from torchstorm.kernels.rows import holds
from torchstorm.kernels.softmax.function import SOFTMAX
from torchstorm.kernels.softmax.reference import log_softmax_reference, softmax_reference
from torchstorm.kernels.variants import available

_EPS = 1e-5
_TARGET_BYTES = 512 << 20
_TARGET_COLUMNS = tuple(1024 << i for i in range(7))
_SHAPES_SMALL: tuple[tuple[int, int], ...] = ((257, 1000), (64, 4096))
_INPUTS = {"layer_norm": ("x", "weight", "bias"), "rms_norm": ("x", "weight")}
_OURS: dict[str, Callable[..., Tensor]] = {
    "softmax": softmax,
    "log_softmax": log_softmax,
    "layer_norm": functools.partial(layer_norm, eps=_EPS),
    "rms_norm": functools.partial(rms_norm, eps=_EPS),
}
_REFERENCES: dict[str, Callable[..., Tensor]] = {
    "softmax": softmax_reference,
    "log_softmax": log_softmax_reference,
    "layer_norm": functools.partial(layer_norm_reference, eps=_EPS),
    "rms_norm": functools.partial(rms_norm_reference, eps=_EPS),
}


def norm_cases(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> tuple[OpCase, ...]:
    """All operations at the shapes "small", or "target" for a GPU: 512 MiB in rows of 1k to 64k elements; or at one."""
    shapes: tuple[tuple[int, ...], ...] = _SHAPES_SMALL
    if sizes == "target":
        shapes = tuple((_TARGET_BYTES // dtype.itemsize // N, N) for N in _TARGET_COLUMNS)
    elif isinstance(sizes, tuple):
        shapes = (sizes,)
    return tuple(
        _case(op, M, N, device, dtype)
        for op in _OURS
        for M, N in (shapes[::3] if op == "log_softmax" else shapes)  # almost the same as softmax
    )


def _case(op: str, M: int, N: int, device: torch.device, dtype: torch.dtype) -> OpCase:
    ladder = NORMS if op.endswith("norm") else SOFTMAX
    names = [each.name for each in available(ladder, device, dtype) if holds(each.name, N, dtype)]
    num_bytes = M * N * dtype.itemsize
    return OpCase(
        op=op,
        shape=f"{M}x{N}",
        dtype=dtype,
        make=functools.partial(_make, op, M, N, dtype),
        ours=functools.partial(_ours, op),
        variants=(*names, "auto"),
        reference=_way(_REFERENCES[op], op),
        peers=_peers(op, device),
        differentiable=_INPUTS.get(op, ("x",)),
        work={"forward": 2 * num_bytes, "backward": 3 * num_bytes},
        unit="B/s",
    )


def _make(op: str, M: int, N: int, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, device=device, dtype=dtype, generator=generator)

    made = {"x": normal(M, N), "d_y": normal(M, N)}
    return made | {name: 1 + normal(N) / 4 for name in _INPUTS.get(op, ("x",))[1:]}


def _ours(op: str, inputs: Inputs, variant: str) -> Outputs:
    return {"y": _OURS[op](*_given(op, inputs), variant=variant)}


def _given(op: str, inputs: Inputs) -> list[Tensor]:
    return [inputs[name] for name in _INPUTS.get(op, ("x",))]


def _way(function: Callable[..., Tensor], op: str) -> Way:
    def run(inputs: Inputs) -> Outputs:
        return {"y": function(*_given(op, inputs))}

    return run


def _peers(op: str, device: torch.device) -> dict[str, Way]:
    peers = {"torch.compile": _way(compiled(_REFERENCES[op]), op)}
    if device.type == "cuda" and op in _LIGER and importlib.util.find_spec("liger_kernel") is not None:
        peers["liger"] = _way(functools.partial(_liger, op), op)  # pragma: gpu
    return peers


# Not in place: Liger's RMSNorm would overwrite the gradient, which is also the input of other implementations.
_LIGER: dict[str, tuple[str, str, tuple[Any, ...]]] = {
    "softmax": ("liger_kernel.ops.softmax", "LigerSoftmaxFunction", ()),
    "layer_norm": ("liger_kernel.ops.layer_norm", "LigerLayerNormFunction", (_EPS,)),
    "rms_norm": ("liger_kernel.ops.rms_norm", "LigerRMSNormFunction", (_EPS, 0.0, "llama", False)),
}


def _liger(op: str, *tensors: Tensor) -> Tensor:  # pragma: gpu
    module, name, options = _LIGER[op]
    y: Tensor = getattr(importlib.import_module(module), name).apply(*tensors, *options)
    return y
