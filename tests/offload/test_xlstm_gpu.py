"""xLSTM on a GPU: the same bits within a budget, and a text read token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from offload.steps import Step, assert_same
from offload.test_cuda_gpu import budget_for, run
from torchstorm.models.xlstm import XLSTM, XLSTMConfig
from torchstorm.offload.session import Session

pytestmark = pytest.mark.gpu

CONFIG = XLSTMConfig(vocab_size=256, num_layers=4, num_heads=4, width=256, dropout=0.1, input_gate_bias=-1.0)
PATTERNS = [("mlstm",), ("mlstm-mlp",), ("mlstm", "slstm", "mlstm-mlp", "mlstm-mlp")]
each_pattern = pytest.mark.parametrize("pattern", PATTERNS, ids=" ".join)


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # put back by conftest.py
    torch.cuda.empty_cache()
    yield
    torch.cuda.synchronize()


def xlstm(pattern: tuple[str, ...]) -> Callable[[], XLSTM]:
    return lambda: XLSTM(replace(CONFIG, pattern=pattern))


def step(model: nn.Module, index: int) -> torch.Tensor:
    ids_BT = torch.randint(0, 256, (16, 513), device="cuda")
    loss: torch.Tensor = model(ids_BT[:, :-1], ids_BT[:, 1:]).loss
    loss.backward()
    return loss


def autocast(model: nn.Module, index: int) -> torch.Tensor:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return step(model, index)


@each_pattern
@pytest.mark.parametrize("step", [step, autocast])
def test_a_session_changes_no_bit(pattern: tuple[str, ...], step: Step) -> None:
    make = xlstm(pattern)
    budget = budget_for(make, step, 0.5)
    expected = run(make, step, None)
    found = run(make, step, lambda model, optimizer: Session(model, vram=budget, ram="8GiB", optimizer=optimizer))
    assert_same(expected.outcome, found.outcome)
    assert found.session is not None
    report = found.session.report()
    plan = found.session.plan()
    assert plan is not None
    assert report.moved_bytes > 0 or plan.recomputes, "nothing left, so nothing was tested"
    assert max(found.peaks) <= budget
    found.session.close()


@each_pattern
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-3), (torch.bfloat16, 5e-2)])
def test_reading_token_by_token_gives_the_logits_of_reading_at_once(
    pattern: tuple[str, ...], dtype: torch.dtype, close: float
) -> None:
    torch.manual_seed(0)
    model = xlstm(pattern)().to(device="cuda", dtype=dtype).eval()
    ids_BT = torch.randint(0, 256, (2, 300), device="cuda")
    with torch.no_grad():
        expected_BTV = model(ids_BT).logits.float()
        logits_BV, states = model.advance(ids_BT[:, :200])
        for t in range(200, 300):
            logits_BV, states = model.advance(ids_BT[:, t : t + 1], states)
    error = (logits_BV.float() - expected_BTV[:, -1]).norm() / expected_BTV[:, -1].norm()
    assert error < close
    assert model.generate(ids_BT[:, :10], 5, temperature=0).shape == (2, 15)
