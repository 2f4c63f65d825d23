"""Softmax, log_softmax, LayerNorm and RMSNorm on a GPU: right by the one tolerance rule, and the same bits twice."""

from __future__ import annotations

import functools

import pytest
import torch

from close import assert_all_close
from kernels.mlstm_on_gpu import nan_wherever_nothing_is_written
from kernels.norm_cases_interpreted import TRITON
from kernels.norm_runs import (
    OPS,
    assert_as_pytorch_at_extremes,
    assert_right,
    by,
    draw,
    extremes,
    reference,
    results,
)
from kernels.operator_checks import assert_compiled_once
from torchstorm.errors import ConfigError
from torchstorm.kernels import layer_norm, log_softmax, rms_norm, softmax
from torchstorm.kernels.rows import holds

pytestmark = pytest.mark.gpu
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# exp2 on a GPU is off by up to two units in the last place of fp32, where PyTorch's exp may happen to be exact.
FP32_FLOOR = 8 * torch.finfo(torch.float32).eps
POISONED = pytest.mark.usefixtures("poisoned")
ON_GPU = (*TRITON, "cluster")
WAYS = [(op, variant) for op in OPS for variant in (*ON_GPU, "auto") if op.endswith("norm") or variant != "split"]


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    nan_wherever_nothing_is_written(monkeypatch)


def _check(op: str, variant: str, shape: tuple[int, ...], dtype: torch.dtype, **options: object) -> None:
    if not holds(variant, shape[-1], dtype):
        return
    inputs = draw(op, shape, dtype, device="cuda", **options)  # type: ignore[arg-type]
    assert_right(op, variant, inputs, floor=max(FP32_FLOOR, torch.finfo(dtype).eps))


def _check_far(op: str, variant: str, N: int, dtype: torch.dtype, far: float, places: tuple[int, ...]) -> None:
    inputs = draw(op, (40, N), dtype, device="cuda")
    inputs["x"][:, places] = far
    assert_right(op, variant, inputs, floor=max(FP32_FLOOR, torch.finfo(dtype).eps))


@POISONED
@pytest.mark.parametrize(("op", "variant"), WAYS)
def test_rows_of_any_length(op: str, variant: str) -> None:
    for shape in ((3, 1), (1000, 7), (257, 1024), (50, 1000), (33, 4099), (21, 5002), (40, 8192), (300, 16384)):
        _check(op, variant, shape, torch.bfloat16)
    for dtype in (torch.float16, torch.float32):
        _check(op, variant, (130, 129), dtype)
        _check(op, variant, (19, 5004), dtype)
        _check(op, variant, (67, 8192), dtype)


@POISONED
@pytest.mark.parametrize(("op", "variant"), WAYS)
def test_long_rows(op: str, variant: str) -> None:
    for shape in ((300, 32768), (140, 65537), (5, 131072), (2, 300007)):
        _check(op, variant, shape, torch.bfloat16)
    _check(op, variant, (150, 65536), torch.float16)
    _check(op, variant, (150, 65536), torch.float32)


@POISONED
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("op", "variant"), [way for way in WAYS if way[0].endswith("norm")])
def test_rows_whose_first_number_is_far_from_all_others(op: str, variant: str, dtype: torch.dtype) -> None:
    for N in (1024, 8192, 16384):
        if holds(variant, N, dtype):
            _check_far(op, variant, N, dtype, 1000.0, (0,))


@POISONED
@pytest.mark.parametrize("far", [1000.0, 1e18])  # the squares of distances from the latter are beyond fp32
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("variant", ["fused", "auto"])
def test_rows_whose_ends_are_far_from_all_others(variant: str, dtype: torch.dtype, far: float) -> None:
    for N in (8192, 16384):
        _check_far("layer_norm", variant, N, dtype, far, (0, -1))


@POISONED
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("op", "variant"), [way for way in WAYS if way[0].endswith("softmax") and way[1] != "cluster"])
def test_masks(op: str, variant: str, dtype: torch.dtype) -> None:
    for mask in ((2, 1, 1, 333), (70, 333), (2, 1, 70, 1), (2, 3, 70, 333), (1, 3, 1, 333), (1,)):
        _check(op, variant, (2, 3, 70, 333), dtype, mask=mask)


@POISONED
@pytest.mark.parametrize(("op", "variant"), [way for way in WAYS if way[0].endswith("norm")])
def test_params_in_float32_or_not_there(op: str, variant: str) -> None:
    for params in ("all", "weight", "no"):
        _check(op, variant, (300, 2000), torch.bfloat16, params=params, param_dtype=torch.float32)


@POISONED
@pytest.mark.parametrize(("op", "variant"), WAYS)
def test_many_rows(op: str, variant: str) -> None:
    """More rows than programs, and than a chunk of "split"."""
    _check(op, variant, (70001, 256), torch.bfloat16)
    _check(op, variant, (5000, 2048), torch.bfloat16)


@POISONED
@pytest.mark.parametrize(("op", "variant"), [way for way in WAYS if way[1] != "auto"])  # which is PyTorch's for these
def test_nan_and_infinities_as_in_pytorch(op: str, variant: str) -> None:
    for N in (40, 5000):
        assert_as_pytorch_at_extremes(op, variant, extremes(N).cuda())


@pytest.mark.parametrize(("op", "variant"), WAYS)
def test_any_strides(op: str, variant: str) -> None:
    x = torch.randn(6, 50, 260, device="cuda")
    odd = torch.randn(7, 1003, device="cuda")[:, 1:1001]
    for view in (x.transpose(0, 1), x[:, ::2, 1:258], x[:, ::2, 2:258], x[:1].expand(3, 50, 260), odd, odd[:1]):
        if not holds(variant, view.shape[-1], view.dtype):
            continue
        inputs = {"x": view, "dy": torch.randn(1, device="cuda").expand(view.shape)}
        right = results(by(op, variant), {name: t.contiguous() for name, t in inputs.items()})
        for name, found in results(by(op, variant), inputs).items():
            torch.testing.assert_close(found, right[name])


def test_rows_too_long_for_registers_are_reported() -> None:
    x = torch.zeros(2, 1 << 17, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=r"rows of up to 32768 numbers of torch.bfloat16, and these have 131072"):
        softmax(x, variant="fused")
    with pytest.raises(ConfigError, match="rows of up to 16384"):
        layer_norm(x, variant="persistent")


def test_far_from_zero() -> None:
    x = 1e4 + torch.randn(64, 4096, device="cuda")
    truth = reference("layer_norm", {"x": x.double()})
    for variant in ON_GPU:
        if holds(variant, 4096, x.dtype):
            assert float((layer_norm(x, variant=variant).double() - truth).abs().max()) < 1e-4
    for N in (1000, 1024):
        for dtype in DTYPES:
            constant = torch.full((8, N), 12345.678, device="cuda", dtype=dtype)
            for variant in ON_GPU:
                assert torch.equal(layer_norm(constant, variant=variant), torch.zeros_like(constant)), (
                    variant,
                    dtype,
                    N,
                )


@POISONED
@pytest.mark.parametrize("variant", ON_GPU)
def test_the_same_bits_where_no_backward_needs_statistics(variant: str) -> None:
    for N in (1000, 1024, 8192, 32768):
        x, weight = torch.randn(65, N, device="cuda").bfloat16(), torch.rand(N, device="cuda").bfloat16()
        for norm in (layer_norm, rms_norm):
            if holds(variant, N, x.dtype):
                with_gradient = norm(x.clone().requires_grad_(), weight, variant=variant)
                assert torch.equal(norm(x, weight, variant=variant), with_gradient)


@pytest.mark.parametrize("op", OPS)
def test_cpu_and_gpu_agree(op: str) -> None:
    mask = None if op.endswith("norm") else (20, 300)
    inputs = draw(op, (20, 300), mask=mask)
    here = results(by(op, "auto"), {name: t.cuda() for name, t in inputs.items()})
    there = results(by(op, "auto"), inputs)
    for name, x in here.items():
        torch.testing.assert_close(x.cpu(), there[name], rtol=1e-5, atol=1e-5)


def test_float64_uses_pytorch() -> None:
    for op in OPS:
        inputs = draw(op, (20, 300), torch.float64, device="cuda")
        right = results(functools.partial(reference, op), inputs)
        assert_all_close(results(by(op, "auto"), inputs), right, floor=1e-12)


def test_compiled_without_a_break_and_not_again_for_another_number_of_rows() -> None:
    weight, bias = torch.randn(2, 512, device="cuda")

    def compute(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        # A variant, as what is small is PyTorch's where nothing is compiled.
        normal = rms_norm(layer_norm(x, weight, bias, variant="fused"), weight, variant="fused")
        return normal + softmax(x, variant="fused") + log_softmax(x, variant="fused")

    assert_compiled_once(compute, lambda rows: (torch.randn(rows, 512, device="cuda"), weight, bias))
