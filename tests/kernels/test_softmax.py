"""Softmax and log-softmax: right in every variant, with masks, at extremes, and as operators of PyTorch."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.norm_cases_interpreted import cases, failures
from kernels.norm_runs import assert_as_pytorch_at_extremes, assert_right, by, draw, extremes, reference, results
from kernels.operator_checks import assert_compiled_once, assert_same_bits_under_autocast, saved_by
from torchstorm.errors import ConfigError, DeviceError, ShapeError
from torchstorm.kernels import log_softmax, softmax, variants
from torchstorm.kernels.softmax.op import softmax_backward, softmax_forward
from torchstorm.kernels.softmax.reference import softmax_reference

OPS = {"softmax": softmax, "log_softmax": log_softmax}
CPU = ["torch", "parallel"]


@pytest.mark.parametrize("name", [case["name"] for case in cases(*OPS)])
def test_triton_no_worse_than_pytorch(name: str) -> None:
    pytest.importorskip("triton")
    assert failures()[name] == ""


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("variant", CPU)
def test_no_worse_than_pytorch(op: str, variant: str) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert_right(op, variant, draw(op, (2, 7, 37), dtype, mask=(2, 1, 37)))
        assert_right(op, variant, draw(op, (3, 501), dtype))
    assert_right(op, variant, draw(op, (5, 1), mask=(5, 1)))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("variant", CPU)
def test_nan_and_infinities_as_in_pytorch(op: str, variant: str) -> None:
    assert_as_pytorch_at_extremes(op, variant, extremes())


@pytest.mark.parametrize("op", OPS)
def test_gradients_of_gradients(op: str) -> None:
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(3, 5) > 0.4
    mask[1] = False

    def compute(x: Tensor) -> Tensor:
        return OPS[op](x, mask=mask).masked_fill(~mask, 0.0)

    for function in (OPS[op], compute):
        assert torch.autograd.gradcheck(function, x)
        assert torch.autograd.gradgradcheck(function, x)


@pytest.mark.parametrize("op", OPS)
def test_third_derivatives_are_those_of_the_definition(op: str) -> None:
    inputs = draw(op, (2, 5), torch.float64, mask=(5,))
    found = []
    for compute in (by(op, "torch"), functools.partial(reference, op)):
        x = inputs["x"].clone().requires_grad_()
        value = compute(inputs | {"x": x}).masked_fill(~inputs["mask"], 0.0).square().sum()
        for _ in range(3):
            (grad,) = torch.autograd.grad(value, x, create_graph=True)
            value = (grad * inputs["dy"]).sum()
        found.append(value.detach())
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("variant", CPU)
def test_a_row_in_which_nothing_is_seen(variant: str) -> None:
    x = torch.randn(3, 6, requires_grad=True)
    mask = torch.ones(3, 6, dtype=torch.bool)
    mask[1] = False
    y = softmax(x, mask=mask, variant=variant)
    assert torch.equal(y[1], torch.zeros(6))
    (dx,) = torch.autograd.grad(y.square().sum(), x)
    assert torch.equal(dx[1], torch.zeros(6))
    y = log_softmax(x, mask=mask, variant=variant)
    assert torch.equal(y[1], torch.full((6,), -torch.inf))
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert dx.isfinite().all()
    assert torch.equal(dx[1], torch.zeros(6))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (2, 0, 4), (4,), (1,), (2, 1)])
def test_sizes_of_nothing_and_one(op: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, requires_grad=True)
    for variant in CPU:
        y = OPS[op](x, variant=variant)
        torch.testing.assert_close(y, reference(op, {"x": x}))
        (dx,) = torch.autograd.grad(y.sum(), x)
        assert dx.shape == x.shape


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("variant", CPU)
def test_any_strides(op: str, variant: str) -> None:
    x = torch.randn(4, 6, 10)
    views = (x.transpose(0, 1), x.mT, x[:, ::2, 1:8], x[:1].expand(3, 6, 10), x[..., :1].expand(4, 6, 10))
    for view in views:
        inputs = {"x": view, "dy": torch.randn(1).expand(view.shape)}
        plain = {name: t.contiguous() for name, t in inputs.items()}
        for name, found in results(by(op, variant), inputs).items():
            assert torch.equal(found, results(by(op, variant), plain)[name])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_masks_rows_lie_where_the_kernels_look_for_them(data: st.DataObject) -> None:
    launch_triton = pytest.importorskip("torchstorm.kernels.softmax.launch_triton")
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    kept = [size if data.draw(st.booleans()) else 1 for size in shape][data.draw(st.integers(0, len(shape) - 1)) :]
    mask = torch.rand(kept) > 0.5
    if data.draw(st.booleans()):
        mask = mask.flip(0).T.contiguous().T if mask.dim() == 2 else mask.contiguous()
    seen, (middle_rows, inner_rows, *strides) = launch_triton._mask_rows(mask, torch.empty(shape))
    outer, middle, inner, columns = strides
    r = torch.arange(torch.Size(shape[:-1]).numel())[:, None]
    begin = r // inner_rows // middle_rows * outer + r // inner_rows % middle_rows * middle + r % inner_rows * inner
    at = begin + torch.arange(shape[-1]) * columns
    flat = torch.as_strided(seen, (int(at.max()) + 1,), (1,), seen.storage_offset())
    assert torch.equal(flat[at].bool(), mask.expand(shape).reshape(-1, shape[-1]))


def test_what_is_kept_for_backward() -> None:
    x = torch.randn(5, 7, requires_grad=True)
    mask = torch.ones(7, dtype=torch.bool)
    assert saved_by(lambda: softmax(x, mask=mask, variant="torch")) == [((5, 7), torch.float32)]
    assert saved_by(lambda: log_softmax(x, mask=mask, variant="torch")) == [
        ((5, 7), torch.float32),
        ((7,), torch.bool),
    ]


def test_of_large_scores_one_tensor_is_kept_with_a_mask_too() -> None:
    x, mask = torch.randn(300, 1000, requires_grad=True), torch.rand(1000) > 0.5
    assert saved_by(lambda: softmax(x, mask=mask)) == [((300, 1000), torch.float32)]
    assert torch.equal(softmax(x, mask=mask), softmax(x.detach(), mask=mask))  # by the operator and by PyTorch
    assert torch.equal(log_softmax(x, mask=mask), log_softmax(x.detach(), mask=mask))


@pytest.mark.parametrize("log", [False, True])
def test_opcheck(log: bool) -> None:
    x, mask = torch.randn(3, 5, requires_grad=True), torch.rand(5) > 0.5
    for variant in CPU:
        torch.library.opcheck(softmax_forward, (x, mask, log, variant))
    y = torch.randn(3, 5).softmax(-1).requires_grad_()
    torch.library.opcheck(softmax_backward, (torch.randn(3, 5, requires_grad=True), y, mask, log, "torch"))


def test_compiled_without_a_break_and_not_again_for_another_number_of_rows() -> None:
    mask = torch.rand(8) > 0.3

    def compute(x: Tensor) -> Tensor:
        return softmax(x, mask=mask) + log_softmax(x).exp()

    assert_compiled_once(compute, lambda rows: (torch.randn(rows, 8),))


@pytest.mark.parametrize("variant", CPU)
def test_autocast_reaches_nothing_inside(variant: str) -> None:
    x = torch.randn(5, 70, requires_grad=True)
    assert_same_bits_under_autocast(lambda: softmax(x, variant=variant) + log_softmax(x, variant=variant), (x,))


def test_the_cpu_and_auto_are_the_definition() -> None:
    x, mask = torch.randn(4, 9), torch.rand(4, 9) > 0.5
    assert torch.equal(softmax(x, mask=mask), softmax_reference(x, mask))
    assert variants("softmax") == ("naive", "online", "fused", "persistent", "cluster", "torch", "parallel")


def test_errors_say_what_was_asked_and_what_there_is() -> None:
    x = torch.randn(2, 3)
    with pytest.raises(ShapeError, match=r"x \(\).*last dimension"):
        softmax(torch.tensor(1.0))
    with pytest.raises(ShapeError, match=r"torch.int64, but log_softmax takes float32"):
        log_softmax(torch.ones(2, dtype=torch.int64))
    with pytest.raises(ShapeError, match=r"mask is torch.float32"):
        softmax(x, mask=torch.ones(3))
    for shape in ((2,), (3, 3), (1, 2, 3)):
        with pytest.raises(ShapeError, match=r"does not broadcast to x \(2, 3\)"):
            softmax(x, mask=torch.ones(shape, dtype=torch.bool))
    with pytest.raises(ShapeError, match="mask is on meta"):
        softmax(x, mask=torch.ones(3, dtype=torch.bool, device="meta"))
    with pytest.raises(ConfigError, match=r"variant='fast', but softmax has 'naive', .* and 'auto'"):
        softmax(x, variant="fast")
    with pytest.raises(DeviceError, match="runs on cuda, not on cpu"):
        softmax(x, variant="fused")
    with pytest.raises(DeviceError, match="takes float32, float16, bfloat16"):
        log_softmax(x.double(), variant="parallel")


def test_shapes_are_known_without_data() -> None:
    x = torch.empty(2, 3, dtype=torch.bfloat16, device="meta")
    y = softmax(x, mask=torch.empty(3, dtype=torch.bool, device="meta"))
    assert (y.shape, y.dtype, y.device.type) == ((2, 3), torch.bfloat16, "meta")
