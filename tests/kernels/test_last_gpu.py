"""Every operator on the last GPU while the first is the current one; of a single GPU they are the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from torchstorm import kernels

pytestmark = pytest.mark.gpu


def _batch_norm(x: Tensor, weight: Tensor) -> Tensor:
    return kernels.batch_norm_act(x, None, None, None, None, training=True)


def _loss(x: Tensor, weight: Tensor) -> Tensor:
    return kernels.linear_cross_entropy(x, weight, torch.arange(x.shape[0], device=x.device) % weight.shape[0])


def _their_loss(x: Tensor, weight: Tensor) -> Tensor:
    return F.cross_entropy(x @ weight.mT, torch.arange(x.shape[0], device=x.device) % weight.shape[0])


PAIRS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "add": (kernels.add, torch.add),
    "mul": (lambda x, weight: kernels.mul(x, weight[0]), lambda x, weight: x * weight[0]),
    "gelu": (lambda x, weight: kernels.gelu(x), lambda x, weight: F.gelu(x)),
    "softmax": (lambda x, weight: kernels.softmax(x), lambda x, weight: x.softmax(-1)),
    "layer_norm": (lambda x, weight: kernels.layer_norm(x), lambda x, weight: F.layer_norm(x, x.shape[-1:])),
    "batch_norm_act": (_batch_norm, lambda x, weight: F.batch_norm(x, None, None, training=True).relu()),
    "linear": (
        lambda x, weight: kernels.linear(x, weight, activation="silu", variant="fused"),
        lambda x, weight: F.silu(x @ weight.mT),
    ),
    "linear_cross_entropy": (_loss, _their_loss),
    "matmul": (lambda x, weight: kernels.matmul(x, weight, variant="tiled"), torch.matmul),
}


@pytest.mark.parametrize("name", PAIRS)
def test_right_wherever_the_tensors_are(name: str) -> None:
    device, (ours, theirs) = f"cuda:{torch.cuda.device_count() - 1}", PAIRS[name]
    x, weight = (torch.randn(64, 64, device=device, requires_grad=True) for _ in range(2))
    found = []
    with torch.cuda.device(0):
        for compute in (ours, theirs):
            y = compute(x, weight)
            assert y.device == x.device
            found.append((y, torch.autograd.grad(y.square().sum(), x)[0]))
        assert torch.cuda.current_device() == 0
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


def test_dropout_s_mask_is_the_same_wherever_the_tensor_is() -> None:
    x = torch.ones(1000)
    there = x.to(f"cuda:{torch.cuda.device_count() - 1}")
    with torch.cuda.device(0):
        assert torch.equal(kernels.dropout(there, 0.5, seed=3).cpu(), kernels.dropout(x, 0.5, seed=3))
