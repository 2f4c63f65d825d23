""" "auto" on a CPU is PyTorch's own function and no operator around it: same values, gradients, memory order, rules."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from close import assert_close
from kernels.operator_checks import assert_compiled_once, assert_same_bits_under_autocast
from torchstorm.kernels import (
    add,
    batch_norm_act,
    dropout,
    gelu,
    layer_norm,
    linear,
    log_softmax,
    mul,
    relu,
    rms_norm,
    sigmoid,
    silu,
    softmax,
)
from torchstorm.kernels.pytorch_fallback import is_small, prefers_pytorch

N = 6


@dataclass(frozen=True, kw_only=True)
class Case:
    """One operation as "auto" has it, and PyTorch's own; sizes are those of the inputs after x."""

    auto: Callable[..., Tensor]
    pytorch: Callable[..., Tensor]
    sizes: tuple[tuple[int, ...], ...] = ()


def _masked(x: Tensor) -> Tensor:
    return x.masked_fill(torch.arange(N) >= 4, -torch.inf)


MASK = torch.arange(N) < 4
CASES = {
    "add": Case(auto=add, pytorch=torch.add, sizes=((N,),)),
    "mul": Case(auto=mul, pytorch=torch.mul, sizes=((5, 4, N),)),
    "relu": Case(auto=relu, pytorch=F.relu),
    "sigmoid": Case(auto=sigmoid, pytorch=torch.sigmoid),
    "silu": Case(auto=silu, pytorch=F.silu),
    "gelu": Case(auto=gelu, pytorch=F.gelu),
    "gelu tanh": Case(auto=lambda x: gelu(x, "tanh"), pytorch=lambda x: F.gelu(x, approximate="tanh")),
    "softmax": Case(auto=softmax, pytorch=lambda x: x.softmax(-1)),
    "softmax, mask": Case(auto=lambda x: softmax(x, mask=MASK), pytorch=lambda x: _masked(x).softmax(-1)),
    "log_softmax": Case(auto=log_softmax, pytorch=lambda x: x.log_softmax(-1)),
    "layer_norm": Case(auto=layer_norm, pytorch=lambda x, w, b: F.layer_norm(x, (N,), w, b), sizes=((N,), (N,))),
    "rms_norm": Case(auto=rms_norm, pytorch=lambda x, w: F.rms_norm(x, (N,), w, 1e-6), sizes=((N,),)),
    "batch_norm_act": Case(
        auto=lambda x, w, b: batch_norm_act(x, w, b, None, None, training=True, activation="silu"),
        pytorch=lambda x, w, b: F.silu(F.batch_norm(x, None, None, w, b, training=True)),
        sizes=((4,), (4,)),
    ),
    "linear": Case(
        auto=lambda x, w, b: linear(x, w, b, activation="gelu"),
        pytorch=lambda x, w, b: F.gelu(F.linear(x, w, b)),
        sizes=((3, N), (3,)),
    ),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Operators(TorchDispatchMode):
    """Names of all operators that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.namespace)
        return func(*args, **(kwargs or {}))


def draw(case: Case, dtype: torch.dtype, rows: int = 5) -> list[Tensor]:
    sizes = [(rows, *size[1:]) if len(size) == 3 else size for size in ((5, 4, N), *case.sizes)]
    return [torch.randn(size, dtype=dtype).requires_grad_() for size in sizes]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_no_operator_of_ours_runs_and_results_and_gradients_equal_pytorch(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    inputs = draw(case, dtype)
    with Operators() as ran:
        y = case.auto(*inputs)
        dy = torch.randn_like(y)
        found = torch.autograd.grad(y, inputs, dy)
    assert set(ran.names) == {"aten"}
    wanted = case.pytorch(*inputs)
    assert torch.equal(y, wanted)
    assert y.stride() == wanted.stride()
    for one, other in zip(found, torch.autograd.grad(wanted, inputs, dy), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_gradients(name: str) -> None:
    case = CASES[name]
    inputs = [x.detach()[:2, :, :].requires_grad_() if x.dim() == 3 else x for x in draw(case, torch.float64)]
    assert torch.autograd.gradgradcheck(case.auto, inputs, fast_mode=True)


@pytest.mark.parametrize("name", CASES)
def test_compiled_once_for_any_number_of_rows(name: str) -> None:
    case = CASES[name]
    assert_compiled_once(case.auto, lambda rows: draw(case, torch.float32, rows))


@pytest.mark.parametrize("name", CASES)
def test_autocast_reaches_nothing(name: str) -> None:
    case = CASES[name]
    inputs = draw(case, torch.float32)
    assert_same_bits_under_autocast(lambda: case.auto(*inputs), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_running_statistics_are_brought_up_to_date_as_by_the_operator(activation: Any, dtype: torch.dtype) -> None:
    x = torch.randn(7, 3, 5).to(dtype)
    found, wanted = [], []
    for variant, results in (("auto", found), ("torch", wanted)):
        mean, var = torch.zeros(3), torch.ones(3)
        for training in (True, True, False):
            y = batch_norm_act(
                x, None, None, mean, var, training=training, momentum=0.3, activation=activation, variant=variant
            )
            results.append(y)
        results.extend([mean, var])
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_a_channels_last_image_stays_so() -> None:
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    y = batch_norm_act(x, torch.ones(3), torch.zeros(3), None, None, training=True)
    assert y.is_contiguous(memory_format=torch.channels_last)


def test_what_pytorch_does_not_take_goes_by_the_operator() -> None:
    x = torch.randn(4, N).bfloat16()
    wide = torch.randn(N)
    with Operators() as ran:
        layer_norm(x, wide, wide)
        rms_norm(x, wide)
        batch_norm_act(x, torch.ones(N).bfloat16(), None, torch.zeros(N), torch.ones(N), training=True)
    assert ran.names.count("torchstorm") == 3


def test_a_row_in_which_nothing_is_seen() -> None:
    x, mask = torch.randn(3, N, requires_grad=True), torch.tensor([[True], [False], [True]])
    y = softmax(x, mask=mask)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(y[1], torch.zeros(N))
    assert torch.equal(dx[1], torch.zeros(N))


def test_what_is_small() -> None:
    assert is_small(torch.empty(1 << 18))
    assert not is_small(torch.empty((1 << 18) + 1))
    assert not is_small(torch.empty(1), torch.empty(1 << 20))
    assert prefers_pytorch(torch.empty(1 << 20))  # as there is no GPU to be faster on


MIB = 1 << 20
ON_GPU = {
    "gelu": gelu,
    "add": lambda x: add(x, x.new_empty(1024)),
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "softmax": softmax,
    "batch_norm_act": lambda x: batch_norm_act(x, None, None, None, None, training=True),
    "linear": lambda x: linear(x, x.new_empty(64, x.shape[1]), activation="gelu"),
}


def owners(compute: Callable[[Tensor], Tensor], num_bytes: int, *, is_compiling: bool = False) -> set[str]:
    """Of the operators that run for a float32 tensor of that size on a GPU that need not be there."""
    with FakeTensorMode(), pytest.MonkeyPatch.context() as patch, Operators() as ran:
        patch.setattr(torch.compiler, "is_compiling", lambda: is_compiling)
        compute(torch.empty(num_bytes // 4096, 1024, device="cuda"))
    return {name for name in ran.names if name != "prim"}


@pytest.mark.parametrize("name", ON_GPU)
def test_on_a_gpu_small_tensors_use_pytorch_and_large_ones_our_kernels(name: str) -> None:
    pytest.importorskip("triton")
    assert owners(ON_GPU[name], 64 * MIB) == {"aten"}
    assert "torchstorm" in owners(ON_GPU[name], 65 * MIB)


@pytest.mark.parametrize("name", ON_GPU)
def test_while_torch_compile_traces_nothing_is_small_on_a_gpu(name: str) -> None:
    pytest.importorskip("triton")
    assert "torchstorm" in owners(ON_GPU[name], MIB, is_compiling=True)


def test_what_keeps_more_by_pytorch_is_ours_at_any_size_on_a_gpu() -> None:
    pytest.importorskip("triton")
    ways: tuple[Callable[[Tensor], Tensor], ...] = (
        dropout,
        lambda x: softmax(x, mask=torch.empty(x.shape, dtype=torch.bool, device=x.device)),
        lambda x: batch_norm_act(x, None, None, None, None, training=True, activation="silu"),
    )
    for compute in ways:
        assert "torchstorm" in owners(compute, MIB)


def test_a_layer_that_takes_long_is_ours_however_little_it_reads() -> None:
    pytest.importorskip("triton")
    square = partial(torch.empty, 4096, 4096, dtype=torch.bfloat16, device="cuda")  # 2^36 products, 32 MiB
    assert "torchstorm" in owners(lambda _: linear(square(), square(), activation="silu"), MIB)


@pytest.mark.gpu
class TestOnAGPU:
    """Small tensors there are PyTorch's, which keeps what our kernels keep."""

    @pytest.mark.parametrize("name", [name for name in CASES if name not in ("softmax, mask", "batch_norm_act")])
    def test_small_tensors_use_pytorch(self, name: str) -> None:
        case = CASES[name]
        inputs = [x.detach().cuda().requires_grad_() for x in draw(case, torch.bfloat16)]
        with Operators() as ran:
            y = case.auto(*inputs)
            torch.autograd.grad(y, inputs, torch.randn_like(y))
        assert set(ran.names) == {"aten"}

    def test_batch_norm_keeps_no_more_than_ours(self) -> None:
        x, ones = torch.randn(5, 4, N, device="cuda", requires_grad=True), torch.ones(4, device="cuda")
        for activation, owner in ((None, "aten"), ("relu", "aten"), ("silu", "torchstorm"), ("gelu", "torchstorm")):
            with Operators() as ran:
                batch_norm_act(x, ones, ones, None, None, training=True, activation=activation)  # type: ignore[arg-type]
            assert owner in ran.names
            assert (owner == "torchstorm") == ("torchstorm" in ran.names)

    def test_small_rms_norm_is_one_operation_of_pytorchs_that_keeps_x_once(self) -> None:
        x = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            rms_norm(x, torch.ones(128, device="cuda", dtype=torch.bfloat16))
        assert [tuple(t.shape) for t in kept if t.numel() == x.numel()] == [(64, 128)]

    def test_large_is_ours_and_as_right(self) -> None:
        x = torch.randn(4096, 10000, device="cuda", dtype=torch.bfloat16)
        with Operators() as ran:
            y = gelu(x)
        assert "torchstorm" in ran.names
        assert_close(y, F.gelu(x.double()), F.gelu(x))


def test_a_layer_that_keeps_z_is_the_persistent_kernels_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    auto = sys.modules["torchstorm.kernels.linear.function"]._auto  # in the package the name is the function's
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    with FakeTensorMode():
        x, weight, odd = (torch.empty(rows, 4096, device="cuda", dtype=torch.bfloat16) for rows in (8192, 4096, 4100))
        assert auto(x, weight, "gelu", True) == auto(x, weight, "silu", True) == "persistent"
        assert (
            auto(x, weight, "gelu", False) == auto(x, weight, "relu", True) == auto(x, odd, "gelu", True) == "cublaslt"
        )
        assert auto(x, weight, None, True) == "torch"
