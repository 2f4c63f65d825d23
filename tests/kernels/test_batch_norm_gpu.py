"""batch_norm_act on a GPU: by the one tolerance rule, the same bits twice, in every variant."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.elementwise_runs import NORMS, check_batch_norm
from kernels.mlstm_on_gpu import nan_wherever_nothing_is_written
from torchstorm.kernels import batch_norm_act
from torchstorm.kernels.batch_norm.op import batch_norm_act_op

pytestmark = pytest.mark.gpu
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    nan_wherever_nothing_is_written(monkeypatch)


@pytest.mark.parametrize("variant", ["torch", "naive", "two-stage"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("norm", NORMS)
def test_norms(norm: str, dtype: torch.dtype, variant: str) -> None:
    check_batch_norm(norm, "silu", variant, dtype, "cuda")
    check_batch_norm(norm, "silu", variant, dtype, "cuda", training=False)


@pytest.mark.parametrize("variant", ["torch", "naive", "two-stage"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", ["of features", "of images"])  # by rows and by planes
def test_activations(norm: str, dtype: torch.dtype, variant: str) -> None:
    for activation in ("relu", "silu", "gelu", None):
        check_batch_norm(norm, activation, variant, dtype, "cuda")
    check_batch_norm(norm, "silu", variant, dtype, "cuda", affine=False)


@pytest.mark.parametrize("shape", [(32, 64, 56, 56), (256, 512, 7, 7), (65536, 256)])
def test_large(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NORMS, "large", (shape, ""))
    check_batch_norm("large", "silu", "two-stage", torch.bfloat16, "cuda")


def test_a_large_mean_costs_no_digits_of_the_spread() -> None:
    x = torch.randn(64, 3, 5000, device="cuda", dtype=torch.float64)
    moved = (x + 4096.0).float()
    truth: Any = torch.nn.functional.batch_norm(moved.double(), None, None, training=True)
    y = batch_norm_act(moved, None, None, None, None, training=True, activation=None, variant="two-stage")
    torch.testing.assert_close(y.double(), truth, atol=2e-3, rtol=0.0)


def test_rules() -> None:
    x, C = torch.randn(8, 5, 33, device="cuda", requires_grad=True), torch.ones(5, device="cuda", requires_grad=True)
    torch.library.opcheck(batch_norm_act_op, (x, C, C.detach().clone(), None, None, 1e-5, "gelu", "two-stage"))
