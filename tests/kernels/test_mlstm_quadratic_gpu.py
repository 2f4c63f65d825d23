"""The mLSTM's quadratic Triton kernels and its ladder on a GPU: by the one tolerance rule, the same bits twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from close import assert_all_close, assert_close
from kernels.mlstm_runs import GATES, Inputs, draw, results, truth, yardsticks
from torchstorm.errors import ShapeError
from torchstorm.kernels import mlstm, mlstm_ladder

pytestmark = pytest.mark.gpu
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
VARIANTS = ("triton-quadratic", "triton-quadratic-tensor-cores")


@pytest.fixture(autouse=True)
def _nan_wherever_nothing_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    new_empty = Tensor.new_empty

    def poisoned(self: Tensor, *size: Any, **options: Any) -> Tensor:
        made = new_empty(self, *size, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(Tensor, "new_empty", poisoned)


def _by(variant: str) -> Callable[..., Any]:
    return lambda q, k, v, i, f, state, cu_seqlens, gate: mlstm(
        q, k, v, i, f, initial_state=state, return_state=True, cu_seqlens=cu_seqlens, gate=gate, variant=variant
    )


def _check(variant: str, inputs: Inputs, *, gate: str = "exp", through_state: bool = True) -> None:
    """Against float64, with both forms in PyTorch in the same dtype as yardsticks; and the same bits twice."""
    options: dict[str, Any] = {"gate": gate, "through_state": through_state}
    found = results(_by(variant), inputs, **options)
    again = results(_by(variant), inputs, **options)
    for name, x in found.items():
        assert torch.equal(x, again[name]), f"{name} differs from run to run"
    if inputs.q.shape[2] <= 1024:
        right, forms = truth(inputs, **options), ("recurrent", "quadratic")
    else:
        right, forms = results(_by("chunkwise"), inputs.to(torch.float64), **options), ("quadratic",)
    assert_all_close(found, right, *yardsticks(inputs, **options, forms=forms))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [(16, 16), (40, 96), (64, 64), (128, 256), (192, 96), (256, 512), (512, 256)])
def test_head_sizes(d: tuple[int, int], dtype: torch.dtype, variant: str) -> None:
    _check(variant, draw(2, 2, 200, *d, dtype=dtype, device="cuda"))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("S", [1, 2, 63, 64, 65, 1000])
def test_lengths(S: int, dtype: torch.dtype, variant: str) -> None:
    _check(variant, draw(1, 3, S, 64, 128, dtype=dtype, device="cuda"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_long(variant: str) -> None:
    _check(variant, draw(1, 1, 8192, 64, 64, dtype=torch.bfloat16, device="cuda", state=False), through_state=False)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gates", GATES)
def test_gates(gates: str, dtype: torch.dtype, variant: str) -> None:
    _check(variant, draw(1, 4, 300, 64, 64, dtype=dtype, gates=gates, device="cuda"))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", ["exp", "sigmoid"])
def test_packed(gate: str, dtype: torch.dtype, variant: str) -> None:
    _check(variant, draw(1, 2, 500, 64, 64, dtype=dtype, lengths=[1, 0, 129, 370], device="cuda"), gate=gate)


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
