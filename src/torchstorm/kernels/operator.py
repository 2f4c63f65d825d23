"""Defines PyTorch operators that take the host little time per call.

`torch.library.custom_op` wraps each call in several of Python's own: a check for aliases, a look-up of the device's
function, arguments by keyword and defaults. An operator of ours is one function for all devices, with arguments by
position and without defaults, which returns new tensors. So the dispatcher calls that function itself.

To a Session's recording, to torch.compile and to autograd it is one operation all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch._ops import OpOverload

_NAMESPACE = "torchstorm"
_LIBRARY = torch.library.Library(_NAMESPACE, "FRAGMENT")
_AFTER_AUTOGRAD = torch._C._after_autograd_keyset
_below_autograd = torch._C._AutoDispatchBelowAutograd
_any_requires_grad = torch._C._any_requires_grad


def operator(name: str) -> Callable[[Callable[..., Any]], OpOverload]:
    """Makes a function the operator torch.ops.torchstorm.NAME, on every device.

    Args:
        name: of the operator.

    Returns:
        A decorator. The function's annotations are the operator's schema; it returns new tensors, none of which shares
        memory with an input.

    Raises:
        ValueError: an argument has a default.
    """

    def define(function: Callable[..., Any]) -> OpOverload:
        if function.__defaults__ or function.__kwdefaults__:
            raise ValueError(f"Operator {name}: the dispatcher leaves out arguments that are their default.")
        schema = torch.library.infer_schema(function, mutates_args=())
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        # Else Dynamo traces it, as it does `call` below, where a compiled function calls it outside of its graphs.
        _LIBRARY.impl(name, _disable_dynamo(function), "CompositeExplicitAutograd")
        defined: OpOverload = getattr(getattr(torch.ops, _NAMESPACE), name).default
        return defined

    return define


def fake(defined: OpOverload) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a function what the operator returns where tensors have no data: their shapes and dtypes."""
    found: Callable[[Callable[..., Any]], Callable[..., Any]] = torch.library.register_fake(defined, lib=_LIBRARY)
    return found


def differentiable(
    defined: OpOverload,
    backward: Callable[..., Any] | None,
    *,
    setup_context: Callable[[Any, tuple[Any, ...], Any], None] = lambda *_: None,
) -> None:
    """Gives an operator a backward.

    Args:
        defined: the operator.
        backward: called with a context and the gradients of what the operator returned; returns those of its arguments,
            None for those that have none: in a tuple, or one alone. None for an operator that has no derivative.
        setup_context: called with the context, the operator's arguments and what it returned, to save for backward.
    """

    formula = backward

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Any) -> Any:
            *arguments, keys = given
            with _below_autograd():
                output = defined.redispatch(keys, *arguments)
            setup_context(ctx, tuple(arguments), output)
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor | None) -> Any:
            if formula is None:
                raise RuntimeError(f"{defined} has no derivative of its own.")
            found = formula(ctx, *gradients)
            return (*found, None) if isinstance(found, tuple) else (found, None)

    apply = Differentiable.apply

    def call(keys: Any, *arguments: Any) -> Any:
        keys &= _AFTER_AUTOGRAD
        if torch.is_grad_enabled() and _any_requires_grad(*arguments):
            return apply(*arguments, keys)  # type: ignore[no-untyped-call]
        with _below_autograd():
            return defined.redispatch(keys, *arguments)

    Differentiable.__name__ = Differentiable.__qualname__ = f"{defined._opname}_differentiable"
    _LIBRARY.impl(defined, _disable_dynamo(call), "Autograd", with_keyset=True)
