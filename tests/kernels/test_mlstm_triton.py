"""The mLSTM's Triton kernels against its definition in float64, in Triton's interpreter on the CPU.

Each case's error is at most twice the larger of two yardsticks: the recurrence and the quadratic form in PyTorch, in
the same dtype. Every buffer that a kernel does not fill is NaN.
"""

from __future__ import annotations

from typing import Any

import pytest

from kernels.interpreting import EXTREMES, interpreted

pytest.importorskip("triton")

FLOOR = 1e-6  # eight fp32 roundings
NORMAL = ((0.0, 1.0), (2.0, 1.0))


def _case(name: str, shape: tuple[int, ...], dtype: str = "float32", **options: Any) -> dict[str, Any]:
    usual = {"gate": "exp", "gates": NORMAL, "state": True, "cu": None, "chunk": 16, "tiles": None}
    rare = {"transposed": False, "nothing_before": False}
    return {"name": name, "shape": shape, "dtype": dtype, **usual, **rare, **options}


SMALL = {"group": 32, "chunk": 16, "chunk_backward": 16, "block": 16, "rows": 16}
CASES = [
    _case("without a state", (2, 1, 33, 16, 16), state=False),
    _case("one token", (2, 2, 1, 16, 16)),
    _case("two tokens", (1, 2, 2, 16, 16)),
    _case("groups, tiles, several heads", (1, 2, 50, 40, 24), tiles=SMALL),
    _case(
        "rows in a longer chunk", (1, 1, 110, 20, 16), tiles=SMALL | {"chunk": 64, "chunk_backward": 32, "group": 64}
    ),
    _case("the chunk of its own choice", (1, 1, 65, 16, 16), chunk=None),
    _case("sigmoid", (2, 1, 40, 24, 40), gate="sigmoid", tiles=SMALL),
    _case("sigmoid without a state", (1, 1, 20, 16, 16), gate="sigmoid", state=False),
    _case("packed", (1, 1, 70, 16, 16), cu=[0, 1, 1, 20, 69, 70], tiles=SMALL),
    _case("packed without a state", (1, 1, 50, 16, 16), cu=[0, 16, 50], state=False),
    _case("packed sigmoid", (1, 1, 60, 16, 16), cu=[0, 33, 60, 60], gate="sigmoid", tiles=SMALL),
    _case("rows of (B, S, H, d)", (2, 3, 18, 24, 16), transposed=True),
    _case("m of -inf at the start", (1, 2, 35, 16, 16), nothing_before=True),
    _case("d 1 and 3", (1, 1, 18, 1, 3)),
    _case("d 192 and 96", (1, 1, 18, 192, 96)),
    _case("d 512 and 16", (1, 1, 18, 512, 16)),
    _case("d 16 and 512", (1, 1, 18, 16, 512)),
    _case("bfloat16", (1, 1, 50, 32, 16), "bfloat16", tiles=SMALL),
    _case("float16", (1, 1, 50, 32, 16), "float16", tiles=SMALL),
    _case("bfloat16 packed sigmoid", (1, 1, 40, 16, 16), "bfloat16", cu=[0, 7, 40], gate="sigmoid"),
]
CASES += [
    _case(f"{name}, {dtype}", (1, 1, 24, 16, 16), dtype, gates=gates, tiles=SMALL)
    for name, gates in EXTREMES.items()
    for dtype in (("float32", "float16", "bfloat16") if name == "i from -30 to 30" else ("float32",))
]


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return interpreted("mlstm_interpreted.py", CASES)


def test_operator(results: dict[str, Any]) -> None:
    verdicts = results["operator"]["verdicts"]
    assert len(verdicts) == 3
    assert {verdict for found in verdicts.values() for verdict in found.values()} == {"SUCCESS"}


@pytest.mark.parametrize("name", [case["name"] for case in CASES])
def test_no_worse_than_pytorch(results: dict[str, Any], name: str) -> None:
    result = results[name]
    for tensor, error in result["errors"].items():
        # One number's error is one draw, and a yardstick may be lucky in it: then the dtype's own rounding is allowed.
        alone = result["epsilon"] if result["sizes"][tensor] <= 2 else 0.0
        allowed = 2 * result["yardsticks"][tensor] + FLOOR + alone
        assert error <= allowed, f"{tensor}: {error:.2e}, allowed {allowed:.2e}"
