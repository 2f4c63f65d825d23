"""The models' heads on a GPU: the loss without logits is as near to float64 as that of the logits."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from close import assert_all_close
from torchstorm.kernels.linear_cross_entropy import chunks
from torchstorm.models.gpt import GPT, GPTConfig
from torchstorm.models.xlstm import XLSTM, XLSTMConfig

pytestmark = pytest.mark.gpu


def named(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """The loss and its gradients."""
    names, weights = zip(*model.named_parameters(), strict=True)
    return {"loss": loss.detach(), **dict(zip(names, torch.autograd.grad(loss, weights), strict=True))}


def truth_of(model: nn.Module, ids_BT: Tensor) -> dict[str, Tensor]:
    """In float64, on a CPU."""
    model, ids_BT = copy.deepcopy(model).double().cpu(), ids_BT.cpu()
    found = named(model, model(ids_BT[:, :-1], ids_BT[:, 1:]).loss)
    return {name: t.cuda() for name, t in found.items()}


@pytest.mark.parametrize("kind", ["gpt", "xlstm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_under_autocast(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kind: str) -> None:
    monkeypatch.setattr(chunks, "LEAST_BYTES", {"cpu": 0, "cuda": 0})
    torch.manual_seed(0)
    gpt = GPTConfig(vocab_size=1001, max_seq_len=256, num_layers=1, num_heads=2, width=64, dropout=0.0)
    xlstm = XLSTMConfig(vocab_size=1001, num_layers=1, num_heads=2, width=64, dropout=0.0, logit_cap=2.0)
    model = (GPT(gpt) if kind == "gpt" else XLSTM(xlstm)).cuda()
    ids_BT = torch.randint(0, 1001, (16, 257), device="cuda")
    truth = truth_of(model, ids_BT)
    with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
        output = model(ids_BT[:, :-1], ids_BT[:, 1:])
        assert output.logits is None
        logits_BTV = model(ids_BT[:, :-1]).logits
        their_loss = F.cross_entropy(logits_BTV.flatten(0, 1), ids_BT[:, 1:].flatten())
    floor = 1e-4 if dtype == torch.float32 else 0.02
    assert_all_close(named(model, output.loss), truth, named(model, their_loss), floor=floor)
