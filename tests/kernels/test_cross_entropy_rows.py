"""The softmax part of linear_cross_entropy in plain PyTorch: what is rounded, and what is not."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from torchstorm.kernels.linear_cross_entropy.rows_torch import Options, losses


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_losses_of_logits_in_halves_are_those_of_float32(dtype: torch.dtype, softcap: float | None) -> None:
    logits, target = (4 * torch.randn(7, 300)).to(dtype), torch.randint(300, (7,))
    options = Options(ignore_index=-100, label_smoothing=0.1, softcap=softcap)
    z = logits.double() if softcap is None else softcap * torch.tanh(logits.double() / softcap)
    truth = F.cross_entropy(z, target, reduction="none", label_smoothing=0.1)
    loss = torch.empty(7)
    losses(logits.clone(), 300, target, options, loss, torch.empty(7), None)
    torch.testing.assert_close(loss.double(), truth, rtol=1e-5, atol=1e-5)
