"""Kernels that begin while the one before ends give the same bits by themselves, in a row, and in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from torchstorm.kernels.batch_norm.op import batch_norm_act_backward, batch_norm_act_op
from torchstorm.kernels.elementwise import launch_triton as elementwise
from torchstorm.kernels.norms import launch_triton as norms

pytestmark = pytest.mark.gpu


def _norm(x: Tensor) -> tuple[Tensor, ...]:
    w = x[0].clone()
    _, mean, rstd = norms.forward(x, w, w, 1e-5, True, "fused")
    return norms.backward(x * 0.5, x, w, mean, rstd, True, True, True, x.dtype, "persistent")


def _batch_norm(x: Tensor) -> tuple[Tensor, ...]:
    C = x.float().mean(0)
    y, mean, rstd, var = batch_norm_act_op(x, C, C, None, None, 1e-5, "silu", "two-stage")
    return y, mean, var, *batch_norm_act_backward(x * 0.5, x, C, C, mean, rstd, True, 1e-5, "silu", "two-stage")


def _sum(x: Tensor) -> tuple[Tensor, ...]:
    out = x.new_empty((x.shape[1],))
    elementwise.product_sum(x, None, out)
    return (out,)


@pytest.mark.parametrize("compute", [_norm, _batch_norm, _sum])
def test_the_same_bits_in_a_row_and_in_a_graph(compute: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
    x = torch.zeros(20000, 1024, device="cuda", dtype=torch.bfloat16)
    compute(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [compute(x) for _ in range(3)]
    for seed in range(3):
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        torch.cuda.synchronize()
        alone = compute(x)
        torch.cuda.synchronize()
        for found in (compute(x), compute(x)):
            assert all(torch.equal(one, other) for one, other in zip(found, alone, strict=True))
        graph.replay()
        for found in captured:
            assert all(torch.equal(one, other) for one, other in zip(found, alone, strict=True))
