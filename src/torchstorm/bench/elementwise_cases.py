"""Benchmark cases of elementwise operations, dropout and batch_norm_act: shapes, inputs and other implementations.

All are bound by memory, so the work is in bytes, each counted once: an activation's forward reads x and writes y, its
backward reads dy and x and writes dx. The second read of x in batch_norm_act, and of dy and x in its backward, is not
counted.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from torchstorm import kernels
from torchstorm.bench.op_cases import Inputs, OpCase, Outputs, Pass, Sizes, compiled
from torchstorm.kernels.batch_norm.function import VARIANTS as _BATCH_NORM
from torchstorm.kernels.dropout.function import VARIANTS as _DROPOUT
from torchstorm.kernels.dropout.philox import keep, scale_of
from torchstorm.kernels.elementwise.function import VARIANTS as _ELEMENTWISE
from torchstorm.kernels.variants import Ladder, available

_P = 0.1
_TARGET_BYTES = 512 << 20
_COLUMNS = (1024, 8192, 65536)
_IMAGES = ((64, 64, 112, 112), (256, 256, 28, 28), (65536, 1024))
_SMALL, _SMALL_IMAGES = ((64, 1000), (7, 4099)), ((8, 6, 14, 14), (500, 48))


@dataclass(frozen=True, kw_only=True)
class _Operation:
    """One operation of the benchmark.

    Attributes:
        ours: of its inputs and `variant=`.
        reference: of the same inputs.
        ladder: its variants.
        inputs: names, x first; those that are not of x's shape are in `sizes`.
        sizes: of an input from x's shape.
        tensors: of x's size, that a pass reads or writes.
    """

    ours: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    ladder: Ladder = _ELEMENTWISE
    inputs: tuple[str, ...] = ("x",)
    sizes: Mapping[str, Callable[[tuple[int, ...]], tuple[int, ...]]]
    tensors: tuple[int, int] = (2, 3)


def _dropped(x: Tensor, seed: Tensor) -> Tensor:
    return x * (keep(seed, x.numel(), _P).view(x.shape).to(x.dtype) * scale_of(_P))


def _norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.relu(F.batch_norm(x, None, None, weight, bias, training=True))


def _own_norm(x: Tensor, weight: Tensor, bias: Tensor, *, variant: str) -> Tensor:
    return kernels.batch_norm_act(x, weight, bias, None, None, training=True, activation="relu", variant=variant)


def _own_dropout(x: Tensor, seed: Tensor, *, variant: str) -> Tensor:
    return kernels.dropout(x, _P, seed=seed, variant=variant)


def _channels(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[1:2]


OPERATIONS: dict[str, _Operation] = {
    "add": _Operation(
        ours=kernels.add, reference=torch.add, inputs=("x", "bias"), sizes={"bias": lambda shape: shape[1:]},
        tensors=(2, 1),
    ),
    "mul": _Operation(
        ours=kernels.mul, reference=torch.mul, inputs=("x", "factor"), sizes={"factor": lambda shape: shape},
        tensors=(3, 5),
    ),
    "relu": _Operation(ours=kernels.relu, reference=F.relu, sizes={}),
    "sigmoid": _Operation(ours=kernels.sigmoid, reference=torch.sigmoid, sizes={}),
    "silu": _Operation(ours=kernels.silu, reference=F.silu, sizes={}),
    "gelu": _Operation(ours=kernels.gelu, reference=F.gelu, sizes={}),
    "gelu tanh": _Operation(
        ours=functools.partial(kernels.gelu, approximate="tanh"),
        reference=functools.partial(F.gelu, approximate="tanh"), sizes={},
    ),
    "dropout": _Operation(
        ours=_own_dropout, reference=_dropped, ladder=_DROPOUT, inputs=("x", "seed"), sizes={"seed": lambda shape: ()},
        tensors=(2, 2),
    ),
    "batch_norm_act": _Operation(
        ours=_own_norm, reference=_norm, ladder=_BATCH_NORM, inputs=("x", "weight", "bias"),
        sizes={"weight": _channels, "bias": _channels},
    ),
}  # fmt: skip


def elementwise_cases(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> tuple[OpCase, ...]:
    """All operations at the shapes "small", or "target": 512 MiB in rows of 1k to 64k elements, and images; or one."""
    target = tuple((_TARGET_BYTES // dtype.itemsize // N, N) for N in _COLUMNS)
    known = {"small": (_SMALL, _SMALL_IMAGES), "target": (target, _IMAGES)}
    rows, images = ((sizes,), (sizes,)) if isinstance(sizes, tuple) else known[sizes]
    return tuple(
        _case(name, shape, device, dtype)
        for name in OPERATIONS
        for shape in (images if name == "batch_norm_act" else rows)
    )


def _case(name: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> OpCase:
    operation = OPERATIONS[name]
    num_bytes = math.prod(shape) * dtype.itemsize
    forward, backward = operation.tensors
    work: dict[Pass, float] = {"forward": forward * num_bytes, "backward": backward * num_bytes}
    op, *form = name.split()
    by_compiler = compiled(operation.reference)
    return OpCase(
        op=op,
        shape=", ".join(["x".join(map(str, shape)), *form]),
        dtype=dtype,
        make=functools.partial(_make, name, shape, dtype),
        ours=functools.partial(_ours, name),
        variants=(*(each.name for each in available(operation.ladder, device, dtype)), "auto"),
        reference=functools.partial(_plain, name),
        peers={"torch.compile": lambda inputs: {"y": by_compiler(*_given(name, inputs))}},
        differentiable=tuple(each for each in operation.inputs if each != "seed"),
        work=work,
        unit="B/s",
    )


def _make(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)

    def normal(size: tuple[int, ...]) -> Tensor:
        return torch.randn(size, device=device, dtype=dtype, generator=generator)

    made = {"x": normal(shape)}
    for each, size in OPERATIONS[name].sizes.items():
        made[each] = torch.tensor(seed, device=device) if each == "seed" else normal(size(shape))
    return made | {"d_y": normal(shape)}


def _given(name: str, inputs: Inputs) -> list[Tensor]:
    return [inputs[each] for each in OPERATIONS[name].inputs]


def _ours(name: str, inputs: Inputs, variant: str) -> Outputs:
    return {"y": OPERATIONS[name].ours(*_given(name, inputs), variant=variant)}


def _plain(name: str, inputs: Inputs) -> Outputs:
    return {"y": OPERATIONS[name].reference(*_given(name, inputs))}
