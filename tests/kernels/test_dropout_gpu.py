"""dropout on a GPU: the masks of a CPU, in every variant."""

from __future__ import annotations

import pytest
import torch

from kernels.elementwise_runs import check_dropout
from kernels.mlstm_on_gpu import nan_wherever_nothing_is_written
from torchstorm.kernels import dropout
from torchstorm.kernels.dropout.op import dropout_op

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    nan_wherever_nothing_is_written(monkeypatch)


@pytest.mark.parametrize("variant", ["torch", "naive", "vectorised"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_masks_and_values(dtype: torch.dtype, variant: str) -> None:
    for num in (1, 15, 16, 4096, 9001, 1_000_003):
        check_dropout(variant, dtype, "cuda", num=num)


def test_the_same_bits_as_a_cpu() -> None:
    x = torch.randn(777, 130)
    assert torch.equal(dropout(x.cuda(), 0.3, seed=11).cpu(), dropout(x, 0.3, seed=11, variant="torch"))


@pytest.mark.alone  # tens of GiB
def test_places_beyond_32_bits() -> None:
    num = (1 << 32) + 8192
    x = torch.ones(num, dtype=torch.bfloat16, device="cuda")
    y = dropout(x, 0.5, seed=1)
    assert not torch.equal(y[:8192], y[1 << 32 :])
    assert abs(float(y[1 << 32 :].float().mean()) - 1.0) < 0.1


def test_a_seed_of_the_gpus_generator() -> None:
    x = torch.ones(1000, device="cuda")
    torch.manual_seed(5)
    one, two = dropout(x), dropout(x)
    torch.manual_seed(5)
    assert torch.equal(dropout(x), one)
    assert not torch.equal(one, two)


def test_rules() -> None:
    x = torch.randn(33, 7, device="cuda", requires_grad=True)
    torch.library.opcheck(dropout_op, (x, torch.tensor(3, device="cuda"), 0.5, "vectorised"))
