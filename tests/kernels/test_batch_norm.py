"""batch_norm_act: against float64 on a CPU and in the interpreter, running statistics, operators' rules, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from kernels import elementwise_results
from kernels.elementwise_runs import NORMS, check_batch_norm
from torchstorm.errors import ConfigError, ShapeError
from torchstorm.kernels import batch_norm_act, variants
from torchstorm.kernels.batch_norm.op import batch_norm_act_backward, batch_norm_act_op

CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


@pytest.mark.parametrize("name", elementwise_results.names(elementwise_results.BATCH_NORM))
def test_interpreted(name: str) -> None:
    pytest.importorskip("triton")
    failure = elementwise_results.results()[name]["failure"]
    assert not failure, failure


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("norm", NORMS)
def test_plain(norm: str, dtype: torch.dtype) -> None:
    check_batch_norm(norm, "silu", "torch", dtype)
    check_batch_norm(norm, "relu", "torch", dtype, training=False)
    check_batch_norm(norm, None, "torch", dtype, affine=False)


def test_parallel() -> None:
    pytest.importorskip("numba")
    for norm in NORMS:
        check_batch_norm(norm, "gelu", "parallel", torch.float32)
    check_batch_norm("of images", "gelu", "parallel", torch.float32, training=False, affine=False)


@pytest.mark.parametrize("activation", ["relu", "silu", "gelu", None])
def test_rules(activation: Any) -> None:
    x, dy = (torch.randn(3, 2, 4, dtype=torch.float64).requires_grad_() for _ in range(2))
    weight, bias = (torch.randn(2, dtype=torch.float64).requires_grad_() for _ in range(2))
    mean, var = torch.randn(2, dtype=torch.float64), torch.rand(2, dtype=torch.float64) + 0.5
    for training in (True, False):

        def compute(*x: Tensor, training: bool = training) -> Tensor:
            options = {"training": training, "momentum": 0.0, "activation": activation}
            return batch_norm_act(*x, mean, var, **options)  # type: ignore[arg-type]

        assert torch.autograd.gradcheck(compute, (x, weight, bias), fast_mode=True)
        assert torch.autograd.gradgradcheck(compute, (x, weight, bias), fast_mode=True)
        stats = (None, None) if training else (mean, var)
        torch.library.opcheck(batch_norm_act_op, (x, weight, bias, *stats, 1e-5, activation or "", "torch"))
        arguments = (dy, x, weight, bias, mean, var)
        options = training, 1e-5, activation or "", "torch"
        torch.library.opcheck(batch_norm_act_backward, (*arguments, *options), test_utils=CHECKS)


def test_running_statistics_as_pytorchs_and_of_momentum_zero_and_one() -> None:
    x = torch.randn(5, 3, 4) * 2 + 1
    for momentum in (0.0, 0.1, 1.0):
        mean, var = torch.zeros(3), torch.ones(3)
        wanted = mean.clone(), var.clone()
        for _ in range(2):
            batch_norm_act(x, None, None, mean, var, training=True, momentum=momentum)
            F.batch_norm(x, *wanted, training=True, momentum=momentum)
        torch.testing.assert_close((mean, var), wanted)


def test_a_large_mean_costs_no_digits_of_the_spread() -> None:
    x = torch.randn(64, 3, 50, dtype=torch.float64)
    moved = (x + 4096.0).float()
    truth = F.batch_norm(moved.double(), None, None, training=True)
    for variant in ("torch", *(["parallel"] if _has_numba() else [])):
        y = batch_norm_act(moved, None, None, None, None, training=True, activation=None, variant=variant)
        torch.testing.assert_close(y.double(), truth, atol=2e-3, rtol=0.0)


def _has_numba() -> bool:
    from importlib.util import find_spec

    return find_spec("numba") is not None


def test_backward_keeps_x_the_statistics_and_the_parameters() -> None:
    kept: list[Tensor] = []
    x, weight, bias = torch.randn(4, 3, 5, requires_grad=True), torch.ones(3, requires_grad=True), torch.zeros(3)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        batch_norm_act(x, weight, bias, None, None, training=True, variant="torch")
    assert sorted(each.numel() for each in kept) == [3, 3, 3, 3, 60]


def test_parameters_in_halves() -> None:
    x = torch.randn(6, 3, 4).bfloat16()
    weight, bias = torch.randn(2, 3).bfloat16().requires_grad_().unbind()
    y = batch_norm_act(x, weight, bias, None, None, training=True, variant="torch")
    assert torch.equal(y, batch_norm_act(x, weight.float(), bias.float(), None, None, training=True, variant="torch"))
    assert [grad.dtype for grad in torch.autograd.grad(y.float().sum(), (weight, bias))] == [torch.bfloat16] * 2


def test_nothing() -> None:
    x = torch.empty(0, 3, 4, requires_grad=True)
    mean, var = torch.zeros(3), torch.ones(3)
    y = batch_norm_act(x, torch.ones(3), None, mean, var, training=True)
    assert y.shape == x.shape
    assert torch.autograd.grad(y.sum(), x)[0].shape == x.shape
    assert torch.equal(mean, torch.zeros(3))


def test_nan_spreads_over_its_channel_alone() -> None:
    x = torch.randn(4, 3, 5)
    x[1, 2, 3] = float("nan")
    y = batch_norm_act(x, None, None, None, None, training=True)
    assert y[:, 2].isnan().all()
    assert y[:, :2].isfinite().all()


def test_compiled_without_a_break_and_not_again_for_more_rows() -> None:
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    weight, bias = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    running = [(torch.zeros(3), torch.ones(3)) for _ in range(2)]

    def compute(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return batch_norm_act(x, weight, bias, mean, var, training=True, activation="silu")

    compiled = torch.compile(compute, backend=counter, fullgraph=True)
    for rows in (4, 7, 33):
        x = torch.randn(rows, 3, 5, requires_grad=True)
        found, wanted = compiled(x, *running[0]), compute(x, *running[1])
        torch.testing.assert_close((found, *running[0]), (wanted, *running[1]))
        grads = (torch.autograd.grad(y.square().sum(), (x, weight, bias)) for y in (found, wanted))
        torch.testing.assert_close(*grads)
    assert counter.frame_count <= 2
    torch.compiler.reset()


def test_errors() -> None:
    x, three = torch.randn(4, 3), torch.ones(3)
    assert variants("batch_norm_act") == ("torch", "parallel", "naive", "two-stage")
    with pytest.raises(ShapeError, match=r"weight is \(4,\): with x \(4, 3\) it must be \(3,\)"):
        batch_norm_act(x, torch.ones(4), None, None, None, training=True)
    with pytest.raises(ShapeError, match=r"bias is torch\.float16, but x is torch\.float32"):
        batch_norm_act(x, None, three.half(), None, None, training=True)
    with pytest.raises(ShapeError, match="one value per channel"):
        batch_norm_act(x[:1], None, None, None, None, training=True)
    with pytest.raises(ShapeError, match=r"\(N, C, \.\.\.\)"):
        batch_norm_act(three, None, None, None, None, training=True)
    with pytest.raises(ShapeError, match="go together"):
        batch_norm_act(x, None, None, three, None, training=True)
    with pytest.raises(ShapeError, match="weight is on meta, but x is on cpu"):
        batch_norm_act(x, three.to("meta"), None, None, None, training=True)
    with pytest.raises(ConfigError, match="activation='tanh', but batch_norm_act has 'relu', 'silu', 'gelu' and None"):
        batch_norm_act(x, None, None, None, None, training=True, activation="tanh")  # type: ignore[arg-type]
