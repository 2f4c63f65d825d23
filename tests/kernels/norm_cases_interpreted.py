"""The cases of norm_interpreted.py: one process runs them all, for whichever test asks first."""

from __future__ import annotations

import functools
from typing import Any

from kernels.interpreting import interpreted
from torchstorm.kernels import variants

TRITON = [name for name in variants("layer_norm") if name not in ("cluster", "torch", "parallel")]


def _case(op: str, variant: str, shape: tuple[int, ...], dtype: str = "float32", **options: Any) -> dict[str, Any]:
    usual = {"mask": None, "params": "all", "transposed": False, "extremes": False, "far": 0}
    chosen = usual | options
    told = ", ".join(f"{name} {value}" for name, value in options.items())
    name = f"{op} {variant} {'x'.join(map(str, shape))} {dtype} {told}".strip()
    return {"name": name, "op": op, "variant": variant, "shape": shape, "dtype": dtype, **chosen}


def cases(*ops: str) -> list[dict[str, Any]]:
    """Those of some operations."""
    return [case for case in _CASES if case["op"] in ops]


@functools.cache
def failures() -> dict[str, str]:
    """What is wrong with each case, by its name; "" where it is right."""
    found = interpreted("norm_interpreted.py", _CASES)
    return {name: result["failure"] for name, result in found.items()}


_CASES = []
for _variant in TRITON:
    if _variant != "split":
        _CASES += [
            _case("softmax", _variant, (2, 8, 21), mask=(8, 21)),
            _case("softmax", _variant, (3, 21), "float16"),
            _case("softmax", _variant, (9, 20), extremes=True),
            _case("log_softmax", _variant, (2, 8, 21), mask=(2, 1, 21), transposed=True),
            _case("log_softmax", _variant, (9, 20), extremes=True),
            _case("layer_norm", _variant, (9, 20), extremes=True),
            _case("rms_norm", _variant, (9, 20), extremes=True),
        ]
    _CASES += [
        _case("layer_norm", _variant, (3, 2, 37), transposed=True),
        _case("layer_norm", _variant, (5, 32), "float16", params="weight"),
        _case("rms_norm", _variant, (5, 21)),
        _case("rms_norm", _variant, (3, 1), params="no"),
        _case("layer_norm", _variant, (3, 64)),
        _case("rms_norm", _variant, (3, 64), "float16"),
    ]
for _op in ("layer_norm", "rms_norm"):  # in several tiles
    _CASES += [
        _case(_op, "fused", (9, 40), extremes=True),
        _case(_op, "fused", (5, 40), far=1000),
        _case(_op, "fused", (5, 64), "float16", far=1000),
    ]
# In several tiles, of which the last is full, or not. Of few rows one number decides the error, and which way it is
# rounded depends on the CPU.
for _op in ("softmax", "log_softmax"):
    _CASES += [
        _case(_op, "fused", (16, 48)),
        _case(_op, "fused", (5, 40), "bfloat16", transposed=True),
        _case(_op, "fused", (9, 44), extremes=True),
        _case(_op, "fused", (16, 47), mask=(16, 47)),
    ]
# The sum of squares of distances from it is beyond fp32; that of those from the mean is not.
_CASES += [_case("layer_norm", "fused", (5, 40), dtype, far=5e18) for dtype in ("float32", "bfloat16")]
