"""The Triton kernels of linear_cross_entropy and linear against float64, in Triton's interpreter on the CPU.

Each error is at most twice that of PyTorch in the same dtype. Every buffer that a kernel does not fill is NaN.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from kernels.interpreting import interpreted

pytest.importorskip("triton")

FLOOR = 1e-6  # eight fp32 roundings


def _loss(name: str, shape: tuple[int, int, int], dtype: str = "float32", **options: Any) -> dict[str, Any]:
    usual = {"bias": False, "ignored": 7, "reduction": "mean", "softcap": None, "smoothing": 0.0, "spread": 3.0}
    return {"name": name, "run": "cross_entropy", "shape": shape, "dtype": dtype, **usual, **options}


def _layer(variant: str, activation: str, shape: tuple[int, int, int], **options: Any) -> dict[str, Any]:
    usual = {"dtype": "float32", "bias": True, "transposed": False, "activation": activation, "variant": variant}
    name = f"{variant}, {activation or 'none'}, {shape}, {', '.join(map(str, options.values()))}"
    return {"name": name, "run": "layer", "shape": shape, **usual, **options}


CASES = [
    _loss("loss: one block", (9, 16, 33)),
    _loss("loss: several blocks", (5, 8, 5003)),
    _loss("loss: several chunks", (300, 8, 37), reduction="sum", bias=True),
    _loss("loss: one class", (4, 3, 1)),
    _loss("loss: one class, capped, smoothed", (4, 3, 1), softcap=5.0, smoothing=0.1, bias=True),
    _loss("loss: one class, none, smoothed", (4, 3, 1), reduction="none", smoothing=0.1, bias=True),
    _loss("loss: none", (20, 8, 70), reduction="none", bias=True),
    _loss("loss: none, capped, smoothed", (20, 8, 70), reduction="none", softcap=2.0, smoothing=0.2),
    _loss("loss: capped, smoothed", (20, 8, 70), softcap=2.0, smoothing=0.2),
    _loss("loss: float16", (20, 16, 501), "float16"),
    _loss("loss: float16, none, capped", (20, 16, 501), "float16", reduction="none", softcap=30.0),
    _loss("loss: bfloat16", (20, 16, 501), "bfloat16", smoothing=0.1),
    {"name": "extremes", "run": "extremes"},
    *(_layer("fused", activation, (70, 40, 90)) for activation in ("", "relu", "gelu", "gelu_tanh", "silu")),
    *(_layer("naive", activation, (65, 33, 70), transposed=True) for activation in ("", "gelu")),
    *(_layer("cublaslt", activation, (150, 16, 520)) for activation in ("relu", "gelu", "gelu_tanh", "silu")),
    _layer("fused", "gelu_tanh", (130, 70, 300), dtype="float16", transposed=True),
    _layer("fused", "silu", (1, 1, 1), bias=False),
    _layer("naive", "relu", (140, 64, 64), dtype="float16"),
    _layer("persistent", "gelu", (150, 72, 264), dtype="float16"),
    _layer("persistent", "relu", (130, 64, 256), dtype="float16", bias=False),
    _layer("persistent", "silu", (40, 64, 96), dtype="float16", transposed=True),
    _layer("cublaslt", "gelu", (40, 64, 96), dtype="bfloat16", transposed=True),
]


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return interpreted("linear_interpreted.py", CASES)


@pytest.mark.parametrize("name", [case["name"] for case in CASES if "dtype" in case])
def test_no_worse_than_pytorch(results: dict[str, Any], name: str) -> None:
    result = results[name]
    for tensor, error in result["errors"].items():
        allowed = max(2 * result["yardsticks"][tensor] + FLOOR, result["epsilon"])
        assert error <= allowed, f"{tensor}: {error:.2e}, allowed {allowed:.2e}"


def test_infinities_and_nan_pass_as_in_pytorch_and_targets_that_are_no_class_are_nan(results: dict[str, Any]) -> None:
    found = results["extremes"]
    for ours, theirs in zip(found["loss"], found["their_loss"], strict=True):
        assert ours == theirs or (math.isnan(ours) and math.isnan(theirs)) or math.isclose(ours, theirs, rel_tol=1e-6)
    for row, their_row in zip(found["gradient"], found["their_gradient"], strict=True):
        assert [math.isnan(x) for x in row] == [math.isnan(x) for x in their_row]
        assert all(abs(x - y) < 1e-6 for x, y in zip(row, their_row, strict=True) if not math.isnan(x))
    assert all(math.isnan(x) for row in found["wrong"] for x in row)
