"""The operations that `torchstorm bench` knows by name, and where their cases are made. Without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Op:
    """One command of the bench.

    Attributes:
        name: of the command, and of the record.
        title: for people.
        cases: "module:function", which is given sizes, a device and a dtype, and returns `OpCase`s. Sizes are "small",
            "target", or one shape.
        takes: what shapes are, as in "MxN".
        targets: types of devices that have shapes called "target".
    """

    name: str
    title: str
    cases: str
    takes: tuple[str, ...]
    targets: tuple[str, ...] = ("cuda",)


_MATMUL = "torchstorm.bench.matmul_cases:matmul_cases"
_ELEMENTWISE = "torchstorm.bench.elementwise_cases:elementwise_cases"
_NORMS = "torchstorm.bench.norm_cases:norm_cases"
_LINEAR = "torchstorm.bench.linear_cases"
_ALL = (
    Op(
        name="matmul",
        title="matrix products",
        cases=_MATMUL,
        takes=("MxNxK", "BxMxNxK"),
        targets=("cpu", "cuda"),
    ),
    Op(
        name="elementwise",
        title="elementwise operations, dropout and batch_norm_act",
        cases=_ELEMENTWISE,
        takes=("NxC", "NxCxL", "NxCxHxW"),
    ),
    Op(name="norms", title="softmax, log_softmax, layer_norm and rms_norm", cases=_NORMS, takes=("MxN",)),
    Op(name="linear", title="linear layers", cases=f"{_LINEAR}:linear_cases", takes=("MxKxN",)),
    Op(
        name="linear_cross_entropy",
        title="the last layer and its loss",
        cases=f"{_LINEAR}:linear_cross_entropy_cases",
        takes=("NxKxV",),
    ),
)
OPS = {op.name: op for op in _ALL}
"""By name."""
