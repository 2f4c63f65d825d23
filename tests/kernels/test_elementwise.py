"""add, mul and activations: against float64 on a CPU and in the interpreter, operators' rules, errors."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from kernels import elementwise_results
from kernels.elementwise_runs import (
    ACTIVATIONS,
    LAYOUTS,
    PAIRS,
    check_activation,
    check_pair,
    check_special,
    check_strided_pair,
)
from torchstorm.errors import ConfigError, DeviceError, ShapeError
from torchstorm.kernels import add, gelu, mul, relu, sigmoid, silu, variants
from torchstorm.kernels.elementwise import op
from torchstorm.kernels.elementwise.layout import walk

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
NAMES = tuple(ACTIVATIONS)


@pytest.mark.parametrize("name", elementwise_results.names(elementwise_results.ELEMENTWISE))
def test_interpreted(name: str) -> None:
    pytest.importorskip("triton")
    failure = elementwise_results.results()[name]["failure"]
    assert not failure, failure


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_activations(name: str, dtype: torch.dtype) -> None:
    for layout in LAYOUTS:
        check_activation(name, layout, "torch", dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["add", "mul"])
def test_pairs(name: str, dtype: torch.dtype) -> None:
    for pair in PAIRS:
        check_pair(name, pair, "torch", dtype)
    check_strided_pair(name, "torch", dtype)


def test_parallel() -> None:
    pytest.importorskip("numba")
    for name in NAMES:
        check_activation(name, "transposed", "parallel", torch.float32)
        check_special(name, "parallel", torch.float32)
    check_activation("gelu", "every third", "parallel", torch.float32)
    for pair in ("same", "a bias", "tangled"):
        check_pair("mul", pair, "parallel", torch.float32)
    check_pair("add", "a bias", "parallel", torch.float32)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_walk_visits_every_number_of_every_tensor(data: Any) -> None:
    """Whatever was permuted, sliced and expanded: the walk's offsets are those of the tensors' own."""
    sizes = data.draw(st.lists(st.integers(1, 4), max_size=5))
    tensors = []
    for _ in range(data.draw(st.integers(1, 3))):
        steps = [data.draw(st.sampled_from([1, 2])) for _ in sizes]
        expanded = [data.draw(st.booleans()) for _ in sizes]
        order = data.draw(st.permutations(range(len(sizes))))
        kept = [1 if e else s for s, e in zip(sizes, expanded, strict=True)]
        whole = torch.arange(1 << 15)[: _product([kept[d] * steps[d] for d in order])]
        x = whole.view([kept[d] * steps[d] for d in order]).permute([order.index(d) for d in range(len(sizes))])
        x = x[tuple(slice(None, None, step) for step in steps)]
        tensors.append(x.expand(sizes))
    found = walk(tensors)
    assert 1 not in found.sizes
    visited = [torch.as_strided(x, found.sizes, own).reshape(-1) for x, own in zip(tensors, found.strides, strict=True)]
    wanted = sorted(zip(*(x.reshape(-1).tolist() for x in tensors), strict=True))
    assert sorted(zip(*(x.tolist() for x in visited), strict=True)) == wanted


def _product(sizes: list[int]) -> int:
    return int(torch.tensor(sizes, dtype=torch.int64).prod()) if sizes else 1


@pytest.mark.parametrize("name", NAMES)
def test_rules_of_activations(name: str) -> None:
    forward, backward = op.FORWARD[name], op.BACKWARD[name]
    x = torch.randn(4, 6)[:, ::2].t().requires_grad_()
    torch.library.opcheck(forward, (x, "torch"))
    torch.library.opcheck(backward, (torch.randn(3, 4, requires_grad=True), x, "torch"))
    wide = torch.randn(7, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: forward(x, "torch"), wide)
    assert torch.autograd.gradgradcheck(lambda x: forward(x, "torch"), wide)
    assert torch.autograd.gradgradcheck(lambda dy, x: backward(dy, x, "torch"), (dy, wide))


@pytest.mark.parametrize("function", [add, mul])
def test_rules_of_pairs(function: Any) -> None:
    for one, other in (((2, 3), (2, 3)), ((2, 3), (3,)), ((2, 1), (1, 3)), ((), (2,))):
        a = torch.randn(one, dtype=torch.float64, requires_grad=True)
        b = torch.randn(other, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(function, (a, b))
        assert torch.autograd.gradgradcheck(function, (a, b))
        assert torch.autograd.gradgradcheck(partial(function, variant="torch"), (a, b))
        assert torch.autograd.gradgradcheck(partial(function, variant="torch"), (b, a))
    operator = {add: op.add_op, mul: op.mul_op}[function]
    a, b = torch.randn(4, 3).t().requires_grad_(), torch.randn(4, requires_grad=True)
    torch.library.opcheck(operator, (a, b, "torch"))


def test_rules_of_what_pairs_are_made_of() -> None:
    a, b, c = torch.randn(3, 2, 3).unbind()
    a, b, c = a.clone().requires_grad_(), b.clone().requires_grad_(), c.clone().requires_grad_()
    torch.library.opcheck(op.mul_backward, (a, b, c, "torch"))
    torch.library.opcheck(op.mul_backward, (a, b, c[0].detach().requires_grad_(), "torch"))
    torch.library.opcheck(op.product_sum, (a, b, (3,), "torch"))
    torch.library.opcheck(op.product_sum, (a, None, (2, 1), "torch"))


def test_only_what_backward_needs_is_kept() -> None:
    kept: list[Tensor] = []
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        add(a, b)
        assert not kept
        mul(a, b)
        assert [x.data_ptr() for x in kept] == [b.data_ptr()]
        gelu(a)
        assert [x.data_ptr() for x in kept[1:]] == [a.data_ptr()]
        for variant in ("auto", "torch"):
            y = relu(a, variant=variant)
            assert kept[-1].data_ptr() == y.data_ptr()  # as a layer after it does


def test_compiled_without_a_break_and_not_again_for_more_rows() -> None:
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def compute(x: Tensor, bias: Tensor) -> Tensor:
        return mul(gelu(add(x, bias), "tanh"), silu(sigmoid(relu(x))))

    compiled = torch.compile(compute, backend=counter, fullgraph=True)
    bias = torch.randn(6, requires_grad=True)
    for rows in (4, 7, 33, 100):
        x = torch.randn(rows, 6, requires_grad=True)
        found, wanted = compiled(x, bias), compute(x, bias)
        torch.testing.assert_close(found, wanted)
        grads = (torch.autograd.grad(y.sum(), (x, bias)) for y in (found, wanted))
        torch.testing.assert_close(*grads)
    assert counter.frame_count <= 2  # the first shape, then any
    torch.compiler.reset()


def test_autocast_changes_nothing_inside() -> None:
    x = torch.randn(5, 7, requires_grad=True)
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            y = mul(gelu(x), add(x, x[0]))
        found.append((y, *torch.autograd.grad(y.sum(), x)))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_ladder() -> None:
    for name in ("add", "mul", "relu", "sigmoid", "gelu", "silu"):
        assert variants(name) == ("torch", "parallel", "naive", "vectorised", "persistent")


def test_errors() -> None:
    x, y = torch.randn(3, 4), torch.randn(4, 3)
    with pytest.raises(ShapeError, match=r"\(3, 4\) and b \(4, 3\).*dimension -1 has 4 and 3"):
        add(x, y)
    with pytest.raises(ShapeError, match=r"a in torch\.float32 and b in torch\.float16"):
        mul(x, x.half())
    with pytest.raises(ShapeError, match=r"x of relu is torch\.int64"):
        relu(torch.ones(3, dtype=torch.int64))
    with pytest.raises(ShapeError, match="a on cpu and b on meta"):
        add(x, x.to("meta"))
    with pytest.raises(ConfigError, match=r"'fast', but silu has 'torch', 'parallel', 'naive'"):
        silu(x, variant="fast")
    with pytest.raises(DeviceError, match=r"vectorised.*cuda, not on cpu.*'torch'"):
        gelu(x, variant="vectorised")
    with pytest.raises(ConfigError, match=r"approximate='erf', but it must be 'none' or 'tanh'"):
        gelu(x, "erf")  # type: ignore[arg-type]


def test_shapes_are_known_without_data() -> None:
    x = torch.empty(3, 4, dtype=torch.bfloat16, device="meta")
    y = mul(gelu(x), x[0])
    assert (y.shape, y.dtype, y.device.type) == ((3, 4), torch.bfloat16, "meta")
