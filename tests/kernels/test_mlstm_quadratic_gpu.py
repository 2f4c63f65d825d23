"""The mLSTM's quadratic Triton kernels and its ladder on a GPU: by the one tolerance rule, the same bits twice."""

from __future__ import annotations

import pytest
import torch

from close import assert_close
from kernels.mlstm_on_gpu import assert_right, nan_wherever_nothing_is_written
from kernels.mlstm_runs import GATES, conditioned, draw
from torchstorm.errors import ShapeError
from torchstorm.kernels import mlstm, mlstm_ladder

pytestmark = pytest.mark.gpu
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SUMS = (torch.bfloat16, torch.float32)  # in float16 they are as in bfloat16: test_head_sizes and test_packed have it
SIZES = [(16, 16), (40, 96), (64, 64), (128, 256), (192, 96), (256, 512), (512, 256)]
VARIANTS = ("triton-quadratic", "triton-quadratic-tensor-cores")


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    nan_wherever_nothing_is_written(monkeypatch)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("d", "dtype"),
    [(d, dtype) for d in SIZES for dtype in SUMS] + [(d, torch.float16) for d in ((64, 64), (128, 256))],
)
def test_head_sizes(d: tuple[int, int], dtype: torch.dtype, variant: str) -> None:
    assert_right(variant, conditioned(draw(2, 2, 200, *d, dtype=dtype, device="cuda")))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", SUMS)
@pytest.mark.parametrize("S", [1, 2, 63, 64, 65, 1000])
def test_lengths(S: int, dtype: torch.dtype, variant: str) -> None:
    # Many heads, as in test_mlstm_gpu.py.
    assert_right(variant, conditioned(draw(1, 32 if S <= 65 else 16, S, 64, 128, dtype=dtype, device="cuda")))


@pytest.mark.parametrize("variant", VARIANTS)
def test_long(variant: str) -> None:
    assert_right(
        variant, draw(1, 1, 8192, 64, 64, dtype=torch.bfloat16, device="cuda", state=False), through_state=False
    )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", SUMS)
@pytest.mark.parametrize("gates", GATES)
def test_gates(gates: str, dtype: torch.dtype, variant: str) -> None:
    assert_right(variant, draw(1, 4, 300, 64, 64, dtype=dtype, gates=gates, device="cuda"))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", ["exp", "sigmoid"])
def test_packed(gate: str, dtype: torch.dtype, variant: str) -> None:
    assert_right(variant, draw(1, 2, 500, 64, 64, dtype=dtype, lengths=[1, 0, 129, 370], device="cuda"), gate=gate)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 2, 65, 40, 72), (1, 4, 1000, 128, 256)])
def test_rungs(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = draw(*shape, dtype=dtype, device="cuda", state=False)
    named = {**dict(zip("qkvif", inputs[:5], strict=True)), "k_t": inputs.k.mT}
    for rung in mlstm_ladder():
        given = [named[name] for name in rung.inputs]
        out = rung.function(*given)
        assert torch.equal(out, rung.function(*given)), f"{rung.name} differs from run to run"
        assert_close(out, rung.reference(*(x.double() for x in given)), rung.reference(*given), name=rung.name)


def test_float64_is_refused() -> None:
    inputs = draw(1, 1, 8, 16, 16, dtype=torch.float64, device="cuda", state=False)
    with pytest.raises(ShapeError, match="float64"):
        mlstm(*inputs[:5], variant="triton-quadratic")
