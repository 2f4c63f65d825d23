"""LayerNorm and RMSNorm: right in every variant, at extremes and far from 0, and as operators of PyTorch."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from close import error_of
from kernels.norm_cases_interpreted import cases, failures
from kernels.norm_runs import (
    EPS,
    Inputs,
    assert_as_pytorch_at_extremes,
    assert_right,
    by,
    draw,
    extremes,
    reference,
    results,
)
from kernels.operator_checks import assert_compiled_once, assert_same_bits_under_autocast, saved_by
from torchstorm.errors import ConfigError, DeviceError, ShapeError
from torchstorm.kernels import layer_norm, rms_norm, variants
from torchstorm.kernels.norms.op import norm_backward, norm_forward
from torchstorm.kernels.norms.reference import layer_norm_reference

OPS = ("layer_norm", "rms_norm")
CPU = ("torch", "parallel")


@pytest.mark.parametrize("name", [case["name"] for case in cases(*OPS)])
def test_triton_no_worse_than_pytorch(name: str) -> None:
    pytest.importorskip("triton")
    assert failures()[name] == ""


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("variant", CPU)
def test_no_worse_than_pytorch(op: str, variant: str) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert_right(op, variant, draw(op, (2, 7, 37), dtype))
        assert_right(op, variant, draw(op, (101, 64), dtype, params="weight", param_dtype=torch.float32))
        assert_right(op, variant, draw(op, (3, 501), dtype, params="no"))
    assert_right(op, variant, draw(op, (5, 1)))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("variant", CPU)
def test_nan_and_infinities_as_in_pytorch(op: str, variant: str) -> None:
    assert_as_pytorch_at_extremes(op, variant, extremes())


@settings(max_examples=30, deadline=None)
@given(
    value=st.floats(-1e6, 1e6, width=32),
    N=st.integers(1, 300),
    spread=st.sampled_from([0.0, 1.0]),
)
def test_numbers_alike_or_far_from_zero(value: float, N: int, spread: float) -> None:
    x = torch.full((1, N), value) + spread * torch.randn(1, N)
    truth = layer_norm_reference(x.double(), None, None, EPS)
    found = layer_norm(x, variant="parallel", eps=EPS)
    assert error_of(found, truth, scale=N**0.5) < 1e-6


@pytest.mark.parametrize("params", ["all", "weight", "no"])
@pytest.mark.parametrize("op", OPS)
def test_gradients_of_gradients(op: str, params: str) -> None:
    inputs = draw(op, (2, 3, 5), torch.float64, params=params)
    names = [name for name in ("x", "weight", "bias") if name in inputs]

    def compute(*tensors: Tensor) -> Tensor:
        return by(op, "torch")(inputs | dict(zip(names, tensors, strict=True)))

    given = [inputs[name].requires_grad_() for name in names]
    assert torch.autograd.gradcheck(compute, given)
    assert torch.autograd.gradgradcheck(compute, given)


@pytest.mark.parametrize("op", OPS)
def test_third_derivatives_are_those_of_the_formula(op: str) -> None:
    # PyTorch's own are another thing: those of its layer_norm are wrong from the third on (2.13).
    inputs = draw(op, (2, 5), torch.float64, params="no")
    found = []

    def formula(given: Inputs) -> Tensor:
        left = given["x"] - (given["x"].mean(-1, keepdim=True) if op == "layer_norm" else 0.0)
        return left / (left.square().mean(-1, keepdim=True) + EPS).sqrt()

    for compute in (by(op, "torch"), formula):
        x = inputs["x"].clone().requires_grad_()
        value = compute(inputs | {"x": x}).pow(3).sum()
        for _ in range(3):
            (grad,) = torch.autograd.grad(value, x, create_graph=True)
            value = (grad * inputs["dy"]).sum()
        found.append(value.detach())
    torch.testing.assert_close(found[0], found[1])


def test_gradients_of_some_inputs_alone() -> None:
    inputs = draw("layer_norm", (6, 9))
    right = results(functools.partial(reference, "layer_norm"), inputs)
    for name in ("x", "weight", "bias"):
        own = {key: t.clone().requires_grad_(key == name) for key, t in inputs.items()}
        (found,) = torch.autograd.grad(by("layer_norm", "torch")(own), own[name], inputs["dy"])
        torch.testing.assert_close(found, right[f"d{name}"])


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (2, 0, 4), (4,), (1,), (2, 1)])
@pytest.mark.parametrize("op", OPS)
def test_sizes_of_nothing_and_one(op: str, shape: tuple[int, ...]) -> None:
    for variant in CPU:
        inputs = draw(op, shape)
        found, right = results(by(op, variant), inputs), results(functools.partial(reference, op), inputs)
        for name, x in right.items():
            torch.testing.assert_close(found[name], x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("variant", CPU)
def test_any_strides(op: str, variant: str) -> None:
    x = torch.randn(4, 6, 10)
    for view in (x.transpose(0, 1), x.mT, x[:, ::2, 1:8], x[:1].expand(3, 6, 10), x[..., :1].expand(4, 6, 10)):
        N = view.shape[-1]
        params = {name: torch.randn(2 * N)[::2] for name in ("weight", "bias")}
        inputs = {"x": view, "dy": torch.randn(1).expand(view.shape), **params}
        right = results(by(op, variant), {name: t.contiguous() for name, t in inputs.items()})
        for name, found in results(by(op, variant), inputs).items():
            torch.testing.assert_close(found, right[name])


def test_what_is_kept_for_backward() -> None:
    x = torch.randn(2, 5, 7, dtype=torch.bfloat16, requires_grad=True)
    weight, bias = (torch.randn(7, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    kept, numbers = [((2, 5, 7), torch.bfloat16), ((7,), torch.bfloat16)], ((10,), torch.float32)
    assert saved_by(lambda: layer_norm(x, weight, bias, variant="torch")) == [*kept, numbers, numbers]
    assert saved_by(lambda: rms_norm(x, weight, variant="torch")) == [*kept, ((0,), torch.float32), numbers]


def test_of_large_inputs_rms_norm_keeps_no_copies_on_a_cpu_either() -> None:
    x, weight = torch.randn(300, 1000, requires_grad=True), torch.ones(1000)
    large = [size for size, _ in saved_by(lambda: rms_norm(x, weight)) if len(size) > 1]
    assert large == [(300, 1000)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_has_the_same_bits_with_and_without_a_gradient(dtype: torch.dtype) -> None:
    """By the operator and by PyTorch: a checkpoint computes without, and again with."""
    x, weight = torch.randn(300, 2000, dtype=dtype), torch.randn(2000, dtype=dtype)
    assert torch.equal(rms_norm(x, weight), rms_norm(x.clone().requires_grad_(), weight))


@pytest.mark.parametrize("centred", [True, False])
def test_opcheck(centred: bool) -> None:
    x, weight, bias = (torch.randn(size, requires_grad=True) for size in ((3, 5), (5,), (5,)))
    for variant in CPU:
        torch.library.opcheck(norm_forward, (x, weight, bias if centred else None, EPS, centred, True, variant))
    _, mean, rstd = norm_forward(x, weight, None, EPS, centred, True, "torch")
    dy = torch.randn(3, 5, requires_grad=True)
    given = dy, x, weight, mean.detach(), rstd.detach(), EPS, centred
    torch.library.opcheck(norm_backward, (*given, True, centred, torch.float32, "torch"))
    torch.library.opcheck(norm_backward, (*given, False, False, torch.float32, "torch"))


@pytest.mark.no_cover
def test_compiled_without_a_break_and_not_again_for_another_number_of_rows() -> None:
    weight, bias = torch.randn(8), torch.randn(8)

    def compute(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return rms_norm(layer_norm(x, weight, bias), weight)

    assert_compiled_once(compute, lambda rows: (torch.randn(rows, 8), weight, bias))


@pytest.mark.parametrize("variant", CPU)
def test_autocast_reaches_nothing_inside(variant: str) -> None:
    x, weight = torch.randn(5, 70, requires_grad=True), torch.randn(70, requires_grad=True)
    inputs = x, weight
    function = functools.partial(layer_norm, x, weight, weight, variant=variant)
    assert_same_bits_under_autocast(lambda: function() + rms_norm(x, weight, variant=variant), inputs)


def test_variants_are_listed_and_auto_is_pytorch_on_a_cpu() -> None:
    inputs = draw("layer_norm", (4, 9))
    found = layer_norm(inputs["x"], inputs["weight"], inputs["bias"], eps=EPS)
    assert torch.equal(found, reference("layer_norm", inputs))
    assert variants("rms_norm") == ("naive", "online", "fused", "persistent", "split", "cluster", "torch", "parallel")


def test_errors_say_what_was_asked_and_what_there_is() -> None:
    x, weight = torch.randn(2, 3), torch.randn(3)
    with pytest.raises(ShapeError, match=r"x \(\).*last dimension"):
        rms_norm(torch.tensor(1.0), weight)
    with pytest.raises(ShapeError, match=r"torch.int64, but layer_norm takes float32"):
        layer_norm(torch.ones(2, dtype=torch.int64))
    with pytest.raises(ShapeError, match=r"weight \(4,\): with x \(2, 3\), rms_norm takes it as \(3,\)"):
        rms_norm(x, torch.randn(4))
    with pytest.raises(ShapeError, match=r"bias \(1, 3\)"):
        layer_norm(x, weight, torch.randn(1, 3))
    with pytest.raises(ShapeError, match=r"weight is torch.float16 and x torch.float32"):
        rms_norm(x, weight.half())
    with pytest.raises(ShapeError, match="both in the same dtype"):
        layer_norm(x.half(), weight.half(), weight)
    with pytest.raises(ShapeError, match="weight is on meta"):
        rms_norm(x, weight.to("meta"))
    with pytest.raises(ConfigError, match=r"variant='fast', but rms_norm has 'naive', .* and 'auto'"):
        rms_norm(x, weight, variant="fast")
    with pytest.raises(DeviceError, match="runs on cuda, not on cpu"):
        layer_norm(x, variant="split")
    with pytest.raises(DeviceError, match="takes float32, float16, bfloat16"):
        layer_norm(x.double(), variant="parallel")


def test_shapes_are_known_without_data() -> None:
    x = torch.empty(2, 3, 4, dtype=torch.bfloat16, device="meta")
    y = layer_norm(x, torch.empty(4, device="meta"))
    assert (y.shape, y.dtype, y.device.type) == ((2, 3, 4), torch.bfloat16, "meta")
