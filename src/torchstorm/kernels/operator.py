"""Defines PyTorch operators that take the host little time per call.

`torch.library.custom_op` wraps each call in functions of Python's: a check for aliases, a look-up of the device's
function, arguments by keyword and defaults. An operator of ours is one function for all devices, with arguments by
position and without defaults, which returns new tensors. So the dispatcher calls that function itself.

To a Session's recording, to torch.compile and to autograd it is one operation all the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch._ops import OpOverload

_NAMESPACE = "torchstorm"
_AFTER_AUTOGRAD = torch._C._after_autograd_keyset
_below_autograd = torch._C._AutoDispatchBelowAutograd
_any_requires_grad = torch._C._any_requires_grad

_libraries: dict[str, torch.library.Library] = {}  # by operator, so that its module may be imported again


class _Derivative:
    """Of one operator, as `differentiable` gives it."""

    def __init__(self) -> None:
        self.backward: Callable[..., Any] | None = None
        self.setup_context: Callable[[Any, tuple[Any, ...], Any], None] = lambda *_: None


_derivatives: dict[str, _Derivative] = {}  # by operator; apart, since a library goes when nothing refers to it


def operator(name: str) -> Callable[[Callable[..., Any]], OpOverload]:
    """Makes a function the operator torch.ops.torchstorm.NAME, on every device.

    Args:
        name: of the operator.

    Returns:
        A decorator. The function's annotations are the operator's schema; it returns new tensors, none of which shares
        memory with an input.

    Raises:
        ValueError: an argument has a default, or is given by keyword alone.
    """

    def define(function: Callable[..., Any]) -> OpOverload:
        for argument in inspect.signature(function).parameters.values():
            if argument.default is not argument.empty or argument.kind is argument.KEYWORD_ONLY:
                raise ValueError(f"Operator {name}: {argument} has a default or is given by keyword alone.")
        schema = torch.library.infer_schema(function, mutates_args=())
        _libraries.pop(name, None)  # which takes the operator back that it has defined
        _libraries[name] = library = torch.library.Library(_NAMESPACE, "FRAGMENT")
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        defined: OpOverload = getattr(getattr(torch.ops, _NAMESPACE), name).default
        _derivatives[name] = derivative = _Derivative()
        # Dynamo would trace both where a compiled function calls the operator outside of its graphs.
        library.impl(name, _disable_dynamo(function), "CompositeExplicitAutograd")
        library.impl(name, _disable_dynamo(_with_autograd(name, defined, derivative)), "Autograd", with_keyset=True)
        return defined

    return define


def fake(defined: OpOverload) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a function what the operator returns where tensors have no data: their shapes and dtypes."""
    library = _libraries[defined._opname]
    found: Callable[[Callable[..., Any]], Callable[..., Any]] = torch.library.register_fake(defined, lib=library)
    return found


def differentiable(
    defined: OpOverload,
    backward: Callable[..., Any],
    *,
    setup_context: Callable[[Any, tuple[Any, ...], Any], None],
) -> None:
    """Gives an operator a backward; without one it raises RuntimeError there.

    Args:
        defined: the operator.
        backward: called with a context and the gradients of what the operator returned; returns those of its arguments,
            None for those that have none: in a tuple, or one alone. The context's `needs_input_grad` has one element
            more than there are arguments.
        setup_context: called with the context, the operator's arguments and what it returned, to save for backward.
    """
    derivative = _derivatives[defined._opname]
    derivative.backward, derivative.setup_context = backward, setup_context


def _with_autograd(name: str, defined: OpOverload, derivative: _Derivative) -> Callable[..., Any]:
    """What the dispatcher calls where autograd may have to remember an operator."""

    def forward(ctx: Any, *given: Any) -> Any:
        *arguments, keys = given
        with _below_autograd():
            output = defined.redispatch(keys, *arguments)
        derivative.setup_context(ctx, tuple(arguments), output)
        return output

    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if derivative.backward is None:
            raise RuntimeError(f"{defined} has no derivative of its own.")
        found = derivative.backward(ctx, *gradients)
        return (*found, None) if isinstance(found, tuple) else (found, None)

    # Dynamo, which looks into backward, remembers a few cases of each code: so each operator has a code of its own.
    code = backward.__code__.replace(co_name=f"{name}_backward")
    own = FunctionType(code, backward.__globals__, closure=backward.__closure__)
    functions = {"forward": staticmethod(forward), "backward": staticmethod(own)}
    kind: Any = type(f"{name}_", (torch.autograd.Function,), functions)
    apply = kind.apply

    def call(keys: Any, *arguments: Any) -> Any:
        keys &= _AFTER_AUTOGRAD
        if torch.is_grad_enabled() and _any_requires_grad(*arguments):
            return apply(*arguments, keys)
        with _below_autograd():
            return defined.redispatch(keys, *arguments)

    return call
