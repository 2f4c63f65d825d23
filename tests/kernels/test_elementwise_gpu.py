"""add, mul and activations on a GPU: by the one tolerance rule, the same bits twice, in every variant."""

from __future__ import annotations

import pytest
import torch

from kernels.elementwise_runs import (
    ACTIVATIONS,
    LAYOUTS,
    PAIRS,
    check_activation,
    check_pair,
    check_special,
    check_strided_pair,
)
from kernels.mlstm_on_gpu import nan_wherever_nothing_is_written
from torchstorm.errors import DeviceError
from torchstorm.kernels import add, gelu, mul, silu, variants
from torchstorm.kernels.elementwise import op

pytestmark = pytest.mark.gpu
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
VARIANTS = ("torch", "naive", "vectorised", "persistent")


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    nan_wherever_nothing_is_written(monkeypatch)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str, dtype: torch.dtype, variant: str) -> None:
    # Where numbers lie is found in the same way for every activation.
    for layout in LAYOUTS if name == "gelu" else ("flat", "transposed"):
        check_activation(name, layout, variant, dtype, "cuda")
    if variant != "torch":
        check_special(name, variant, dtype, "cuda")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("name", "dtype"), [("add", torch.bfloat16), *(("mul", dtype) for dtype in DTYPES)])
def test_pairs(name: str, dtype: torch.dtype, variant: str) -> None:
    for pair in PAIRS:
        check_pair(name, pair, variant, dtype, "cuda")
    check_strided_pair(name, variant, dtype, "cuda")


@pytest.mark.alone  # tens of GiB
@pytest.mark.parametrize("variant", ["naive", "vectorised", "persistent"])
def test_more_numbers_than_32_bits_count(variant: str) -> None:
    num = (1 << 31) + 4099
    x = torch.ones(num, dtype=torch.bfloat16, device="cuda")
    y = silu(x, variant=variant)
    assert torch.equal(y, y[:1].expand(num))
    del y
    rows = x[: 1 << 31].view(1 << 16, 1 << 15)
    assert bool((add(rows, rows[0], variant=variant) == 2.0).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((70001, 1024), (1024,)),
        ((70001, 1000), (1000,)),
        ((300001, 24), (24,)),
        ((5, 70000), (70000,)),
        ((7, 9001, 130), (7, 1, 130)),
        ((1 << 22,), (1,)),
        ((20011, 1024), (20011, 1)),
        ((3, 1 << 20), (3, 1)),
    ],
)
def test_sums_of_many(shape: tuple[int, ...], size: tuple[int, ...], dtype: torch.dtype) -> None:
    """In many parts, in few, in one; of rows that 16 bytes divide and others; the same bits twice."""
    # Not below 0, so that no sum cancels, and small, so that fp16 has room for it.
    dy, a = ((torch.rand(shape, device="cuda") / 64).to(dtype) for _ in range(2))
    b = torch.rand(size, device="cuda").to(dtype)
    for found, wanted in (
        (lambda: op.product_sum(dy, None, size, "vectorised"), dy.double().sum_to_size(size)),
        (lambda: op.product_sum(dy, a, size, "vectorised"), (dy.double() * a.double()).sum_to_size(size)),
        (lambda: op.mul_backward(dy, a, b, "vectorised")[1], (dy.double() * a.double()).sum_to_size(size)),
        (lambda: op.mul_backward(dy, a, b, "vectorised")[0], dy.double() * b.double()),
    ):
        once, twice = found(), found()
        assert torch.equal(once, twice)
        error = float((once.double() - wanted).norm() / wanted.norm())
        assert error < (2e-5 if dtype == torch.float32 else torch.finfo(dtype).eps), error


def test_float64_uses_pytorch() -> None:
    x = torch.randn(5, 7, dtype=torch.float64, device="cuda")
    assert torch.equal(gelu(x), torch.nn.functional.gelu(x))
    with pytest.raises(DeviceError, match=r"float64.*'torch'"):
        gelu(x, variant="vectorised")


def test_auto_is_vectorised_where_that_pays() -> None:
    x = torch.randn(40 << 20, dtype=torch.bfloat16, device="cuda")
    assert torch.equal(gelu(x), gelu(x, variant="vectorised"))
    assert torch.equal(gelu(x[:1000]), torch.nn.functional.gelu(x[:1000]))
    assert "parallel" in variants("gelu")
    with pytest.raises(DeviceError, match="cpu, not on cuda"):
        gelu(x, variant="parallel")


def test_rules() -> None:
    x = torch.randn(33, 7, device="cuda", requires_grad=True)
    bias = torch.randn(7, device="cuda", requires_grad=True)
    torch.library.opcheck(op.FORWARD["gelu"], (x, "vectorised"))
    torch.library.opcheck(op.BACKWARD["gelu"], (x.detach().clone().requires_grad_(), x, "vectorised"))
    torch.library.opcheck(op.mul_op, (x, bias, "vectorised"))
    torch.library.opcheck(op.product_sum, (x, None, (7,), "vectorised"))


def test_compiled_by_inductor_and_the_same_as_a_cpu() -> None:
    def compute(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return mul(gelu(add(x, bias), "tanh"), silu(x))

    x, bias = torch.randn(64, 96), torch.randn(96)
    found = []
    for function, device in ((compute, "cpu"), (compute, "cuda"), (torch.compile(compute, fullgraph=True), "cuda")):
        own = [each.detach().to(device).requires_grad_() for each in (x, bias)]
        y = function(*own)
        found.append([each.cpu() for each in (y, *torch.autograd.grad(y.square().sum(), own))])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-4)
    torch.compiler.reset()
