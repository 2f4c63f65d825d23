"""The mLSTM's quadratic Triton kernels, and the ladder up to them, against float64, in Triton's interpreter on the CPU.

The rule is that of test_mlstm_triton.py. Every buffer that a kernel does not fill is NaN. The first rungs do without
bf16: the interpreter cuts what a GPU rounds, which alone is twice the error of a product in PyTorch.
"""

from __future__ import annotations

from typing import Any

import pytest

from kernels.interpreting import EXTREMES, interpreted

pytest.importorskip("triton")

FLOOR = 1e-6  # eight fp32 roundings
NORMAL = ((0.0, 1.0), (2.0, 1.0))
TILES = {"group": 16, "chunk": 16, "chunk_backward": 16, "block": 16, "rows": 16}


def _case(name: str, shape: tuple[int, ...], dtype: str = "float32", **options: Any) -> dict[str, Any]:
    usual = {"gate": "exp", "gates": NORMAL, "state": True, "cu": None, "chunk": None, "tiles": TILES}
    usual |= {"nothing_before": False, "transposed": False, "tensor_cores": True}
    return {"name": name, "shape": shape, "dtype": dtype, **usual, **options}


CASES = [
    _case("without a state", (2, 1, 33, 16, 16), state=False),
    _case("one token", (2, 2, 1, 16, 16)),
    _case("four blocks, tiles, several heads", (1, 2, 50, 40, 24)),
    _case("tiles of their own choice", (1, 1, 70, 40, 80), tiles=None, tensor_cores=False),
    _case("from a state with m of -inf", (1, 1, 20, 16, 16), nothing_before=True),
    _case("sigmoid", (2, 1, 40, 24, 40), gate="sigmoid"),
    _case("sigmoid without a state", (1, 1, 20, 16, 16), gate="sigmoid", state=False),
    _case("packed", (1, 2, 70, 16, 16), cu=[0, 1, 1, 20, 69, 70]),
    _case("packed without a state", (1, 1, 50, 16, 16), cu=[0, 16, 50], state=False),
    _case("packed sigmoid", (1, 1, 60, 16, 16), cu=[0, 33, 60, 60], gate="sigmoid"),
    _case("rows of (B, S, H, d)", (2, 3, 18, 24, 16), transposed=True),
    _case("bfloat16", (1, 1, 50, 32, 16), "bfloat16"),
    _case("bfloat16 on CUDA cores", (1, 1, 50, 32, 16), "bfloat16", tensor_cores=False),
    _case("float16", (1, 1, 50, 32, 16), "float16"),
    _case("float16 on CUDA cores", (1, 1, 50, 16, 16), "float16", tensor_cores=False),
]
CASES += [
    _case(f"{name}, {dtype}", (1, 1, 36, 16, 16), dtype, gates=gates)
    for name, gates in EXTREMES.items()
    for dtype in (("float32", "float16", "bfloat16") if name == "i from -30 to 30" else ("float32",))
]
CASES += [
    _case(f"{rung}, {dtype}", (2, 2, 70, 40, 144), dtype, rung=rung, transposed=dtype == "float16")
    for rung in ("matmul_tiles", "qk_v", "causal", "gated")
    for dtype in ("float32", "float16")
]
CASES += [_case(f"gated, {name}", (1, 2, 40, 16, 16), rung="gated", gates=gates) for name, gates in EXTREMES.items()]


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return interpreted("mlstm_quadratic_interpreted.py", CASES)


@pytest.mark.parametrize("name", [case["name"] for case in CASES])
def test_no_worse_than_pytorch(results: dict[str, Any], name: str) -> None:
    result = results[name]
    for tensor, error in result["errors"].items():
        allowed = 2 * result["yardsticks"][tensor] + FLOOR
        assert error <= allowed, f"{tensor}: {error:.2e}, allowed {allowed:.2e}"
