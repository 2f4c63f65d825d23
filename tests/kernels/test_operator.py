"""An operator of ours is one operation to everything that looks, has the derivative that it was given, and no other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.convert_frame import ConvertFrame
from torch.utils._python_dispatch import TorchDispatchMode

from torchstorm.kernels.operator import differentiable, fake, operator


@operator("test_scaled")
def scaled(x: Tensor, y: Tensor | None, factor: float, how: str) -> tuple[Tensor, Tensor]:
    """x times a factor and times y, and how much of it there is."""
    with torch.autocast("cpu", enabled=False):
        product = x * factor if y is None else x * factor * y
    return product, torch.tensor([float(x.numel())])


@fake(scaled)
def _(x: Tensor, y: Tensor | None, factor: float, how: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty((1,))


@operator("test_scaled_backward")
def scaled_backward(dy: Tensor, factor: float) -> Tensor:
    return dy * factor


@fake(scaled_backward)
def _(dy: Tensor, factor: float) -> Tensor:
    return torch.empty_like(dy)


kept: list[str] = []


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, y, ctx.factor, how = inputs
    assert how == "as given"
    kept.append(how)
    ctx.save_for_backward(x, y)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, d_product: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    x, y = ctx.saved_tensors
    needs_x, needs_y, *_rest = ctx.needs_input_grad
    dx = scaled_backward(d_product if y is None else d_product * y, ctx.factor) if needs_x else None
    return dx, d_product * x * ctx.factor if needs_y else None, None, None


def _keep_factor(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.factor = inputs


def _second_backward(ctx: Any, ddy: Tensor) -> tuple[Tensor, None]:
    return ddy * ctx.factor, None


differentiable(scaled, _backward, setup_context=_keep)
differentiable(scaled_backward, _second_backward, setup_context=_keep_factor)


@operator("test_alone")
def alone(x: Tensor) -> Tensor:
    return x.clone()


def test_its_derivatives_are_those_that_it_was_given() -> None:
    x, y = (torch.randn(3, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda x, y: scaled(x, y, 3.0, "as given")[0], (x, y))
    assert torch.autograd.gradgradcheck(lambda x: scaled(x, None, 3.0, "as given")[0], (x,))
    only_y = scaled(x.detach(), y, 3.0, "as given")[0]
    only_y.sum().backward()
    assert torch.equal(y.grad, 3.0 * x.detach())
    assert not scaled(x, y, 3.0, "as given")[1].requires_grad


def test_it_is_one_operation_to_what_sees_operations_and_has_no_graph_where_none_is_asked_for() -> None:
    seen: list[str] = []

    class See(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x = torch.randn(3, requires_grad=True)
    with See():
        product, _ = scaled(x, None, 2.0, "as given")
        assert seen == ["torchstorm.test_scaled.default"]
        product.backward(torch.ones(3))
    assert seen.count("torchstorm.test_scaled_backward.default") == 1
    assert product.grad_fn.name() == "test_scaled_Backward"
    kept.clear()
    with torch.no_grad():
        assert scaled(x, None, 2.0, "as given")[0].grad_fn is None
    assert scaled(x.detach(), None, 2.0, "as given")[0].grad_fn is None
    assert not kept


def test_one_without_a_derivative_says_so_instead_of_giving_a_wrong_one() -> None:
    x = torch.randn(3, requires_grad=True)
    assert torch.equal(alone(x), x)
    with pytest.raises(RuntimeError, match=r"test_alone\.default has no derivative"):
        alone(x).sum().backward()


def test_it_keeps_pytorchs_rules_and_compiles_without_a_break() -> None:
    x = torch.randn(3, requires_grad=True)
    torch.library.opcheck(scaled, (x, x.detach(), 2.0, "as given"))
    compiled = torch.compile(lambda x: scaled(x, None, 2.0, "as given")[0].sin(), backend="aot_eager", fullgraph=True)
    compiled(x).sum().backward()
    assert torch.allclose(x.grad, 2.0 * torch.cos(2.0 * x.detach()))


def test_dynamo_does_not_look_into_one_that_is_called_outside_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    convert = ConvertFrame.__call__

    def noted(self: ConvertFrame, frame: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(frame.f_code.co_name)
        return convert(self, frame, *args, **kwargs)

    def calls(x: Tensor) -> Tensor:
        try:
            torch._dynamo.graph_break()  # so that all of it runs as it is
            return alone(x)
        finally:
            pass

    monkeypatch.setattr(ConvertFrame, "__call__", noted)
    x = torch.ones(2)
    compiled = torch.compile(calls, backend="eager")
    assert torch.equal(compiled(x), x)
    assert torch.equal(compiled(x.requires_grad_()), x)
    assert set(seen) == {"calls"}


def test_dynamo_tells_the_backward_of_many_operators_apart() -> None:
    own = [grad_fn_of(name).backward.__code__ for name in ("one", "other")]
    assert own[0] is not own[1]
    assert own[0] != own[1]


def grad_fn_of(name: str) -> Any:
    @operator(f"test_{name}")
    def same(x: Tensor) -> Tensor:
        return x.clone()

    return same(torch.ones(1, requires_grad=True)).grad_fn._forward_cls


def test_one_may_be_defined_again_as_its_module_is_imported_again() -> None:
    assert grad_fn_of("again") is not grad_fn_of("again")


def test_its_arguments_come_without_defaults() -> None:
    with pytest.raises(ValueError, match=r"factor: 'float' = 2\.0 has a default"):

        @operator("test_default")
        def _(x: Tensor, factor: float = 2.0) -> Tensor:
            return x * factor

    with pytest.raises(ValueError, match="by keyword alone"):

        @operator("test_keyword")
        def _(x: Tensor, *, factor: float) -> Tensor:
            return x * factor
