"""models/head.py: the loss without logits is that of the logits, under autocast, compiled and in less memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchstorm.kernels.linear_cross_entropy import chunks
from torchstorm.models.gpt import GPT, GPTConfig
from torchstorm.models.head import next_token_loss
from torchstorm.models.xlstm import XLSTM, XLSTMConfig

GPT_CONFIG = GPTConfig(vocab_size=101, max_seq_len=64, num_layers=1, num_heads=2, width=16, dropout=0.0)
XLSTM_CONFIG = XLSTMConfig(vocab_size=101, num_layers=1, num_heads=2, width=16, dropout=0.0, logit_cap=2.0)


def models() -> list[nn.Module]:
    torch.manual_seed(0)
    return [GPT(GPT_CONFIG), XLSTM(XLSTM_CONFIG)]


def tokens() -> tuple[Tensor, Tensor]:
    ids_BT = torch.randint(0, 101, (8, 65))
    targets_BT = ids_BT[:, 1:].clone()
    targets_BT[::3, ::5] = -100
    return ids_BT[:, :-1], targets_BT


@pytest.fixture(params=["at once", "in chunks"])
def _size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "in chunks":
        monkeypatch.setattr(chunks, "LEAST_BYTES", {"cpu": 0, "cuda": 0})


@pytest.mark.usefixtures("_size")
@pytest.mark.parametrize("autocast", [False, True])
def test_loss_and_gradients_are_those_of_the_logits(autocast: bool) -> None:
    for model in models():
        ids_BT, targets_BT = tokens()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            logits_BTV, no_loss = model(ids_BT)
            expected = F.cross_entropy(logits_BTV.float().flatten(0, 1), targets_BT.flatten())
            no_logits, found = model(ids_BT, targets_BT)
        assert no_loss is no_logits is None
        assert found.dtype == torch.float32
        tolerance = {"rtol": 2e-2, "atol": 1e-3} if autocast else {}
        torch.testing.assert_close(found, expected, **tolerance)  # type: ignore[arg-type]
        weights = list(model.parameters())
        wanted = torch.autograd.grad(expected, weights)
        for one, other in zip(torch.autograd.grad(found, weights), wanted, strict=True):
            assert one.dtype == other.dtype
            assert (one - other).norm() <= (2e-2 if autocast else 1e-5) * other.norm() + 1e-6


@pytest.mark.usefixtures("_size")
def test_compiled_as_a_whole() -> None:
    ids_BT, targets_BT = tokens()
    model = GPT(GPT_CONFIG)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(compiled(ids_BT, targets_BT).loss, model(ids_BT, targets_BT).loss)
    torch.testing.assert_close(compiled(ids_BT, targets_BT).loss, model(ids_BT, targets_BT).loss)
    torch.compiler.reset()


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_in_a_forecast_either_autocast_counts(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    x_BTC, head_VC = torch.empty(2, 5, 8, device="meta"), torch.empty(11, 8, device="meta")
    given: list[torch.dtype] = []

    def noted(x: Tensor, weight: Tensor, targets: Tensor, **_: object) -> Tensor:
        given.extend((x.dtype, weight.dtype))
        return x.sum()

    monkeypatch.setattr("torchstorm.models.head.linear_cross_entropy", noted)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == device)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: torch.bfloat16 if kind == device else None)
    next_token_loss(x_BTC, head_VC, torch.empty(2, 5, dtype=torch.int64, device="meta"))
    assert given == [torch.bfloat16] * 2
