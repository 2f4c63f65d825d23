"""The models on a GPU with the kernels for LayerNorm: as near to float64 as with PyTorch's own."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.nn import functional as F

from close import assert_all_close
from models.test_head_gpu import named, truth_of
from torchstorm import kernels
from torchstorm.models import norm
from torchstorm.models.gpt import GPT, GPTConfig
from torchstorm.models.xlstm import XLSTM, XLSTMConfig

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", ["gpt", "xlstm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_worse_than_with_pytorch_s(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kind: str) -> None:
    torch.manual_seed(0)
    gpt = GPTConfig(vocab_size=1001, max_seq_len=128, num_layers=2, num_heads=2, width=64, dropout=0.0)
    xlstm = XLSTMConfig(vocab_size=1001, num_layers=2, num_heads=2, width=64, dropout=0.0)
    model = (GPT(gpt) if kind == "gpt" else XLSTM(xlstm)).cuda().to(dtype)
    ids_BT = torch.randint(0, 1001, (8, 129), device="cuda")
    truth = truth_of(model, ids_BT)
    theirs = named(model, model(ids_BT[:, :-1], ids_BT[:, 1:]).loss)
    monkeypatch.setattr(norm, "LEAST_BYTES", 0)
    with monkeypatch.context() as patch:
        # A variant, as "auto" is PyTorch's own for tensors as small as these; which is not called.
        patch.setattr(kernels, "layer_norm", functools.partial(kernels.layer_norm, variant="fused"))
        patch.setattr(F, "layer_norm", None)
        loss = model(ids_BT[:, :-1], ids_BT[:, 1:]).loss
    floor = 1e-4 if dtype == torch.float32 else 0.02
    assert_all_close(named(model, loss), truth, theirs, floor=floor)
