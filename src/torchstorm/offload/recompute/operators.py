"""What an operator does to its arguments, read from its schema: whether it may run again, and what it writes to."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

# Their outputs are whatever lay in memory, or are filled by something that nobody sees.
_UNINITIALISED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"})
# What they return lies outside of this process, and may be something else the next time.
_READING = frozenset({"read_tensor"})
# Operators of others may do what their schemas do not say (count, log, talk to other processes).
_TRUSTED = frozenset({"aten", "prims", "torchvision", "torchstorm"})
# They change what a tensor refers to, not only its bytes.
_REBINDING = frozenset({"set_", "resize_", "resize_as_", "_resize_output_"})
# They fill their first argument, whatever was in it.
_OVERWRITING = frozenset(
    {"bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "geometric_", "log_normal_"}
    | {"normal_", "random_", "uniform_", "zero_"}
)
# They write the running statistics (arguments 3 and 4, in training) and their schemas do not say so.
_BATCH_NORM = frozenset({"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"})
_TRAINING = 5
# They run one operation, which makes their output, or return what they were given.
_CONVERSIONS = frozenset({"bfloat16", "contiguous", "double", "float", "half", "to"})
_MADE_OF_OTHERS = torch._C.DispatchKey.CompositeImplicitAutograd
_IN_C = (types.MethodDescriptorType, types.BuiltinFunctionType)
_IN_PYTHON: frozenset[Any] = frozenset({F.elu, F.leaky_relu, F.mish, F.relu, F.silu})


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """How a recorded step treats one operator.

    Attributes:
        name: "aten.addmm.default".
        repeatable: whether running it with the same arguments gives the same outputs, and nothing else happens.
        own: whether it is torchstorm's, so that it writes to nothing besides what its schema says, wherever it runs.
        is_view: whether its outputs are its arguments, looked at differently.
        writes: positions of the arguments that it changes.
        write_names: the same for arguments given by name.
        in_place: whether it changes its first argument, returns it, and does nothing else.
        overwrites: of those, whether it fills the argument, whatever was in it.
        draws: whether it draws random numbers.
        keeps_statistics: whether it is a batch norm with hidden writes.
        saves: of a function that is recorded as a whole, which of its operation's results autograd saves before the
            function returns, in that order.
    """

    name: str
    repeatable: bool
    is_view: bool
    own: bool = False
    writes: tuple[int, ...] = ()
    write_names: tuple[str, ...] = ()
    in_place: bool = False
    overwrites: bool = False
    draws: bool = False
    keeps_statistics: bool = False
    saves: tuple[int, ...] = (0,)


Again = tuple[Callable[..., Any], Operator]
"""What makes the same bytes of the same arguments as a function that runs a single operation, and that operation."""

_PRODUCT = Operator(name="aten.mm.default", repeatable=True, is_view=False)
_SUM_AND_PRODUCT = Operator(name="aten.addmm.default", repeatable=True, is_view=False)
_LAYER_NORM = Operator(name="aten.native_layer_norm.default", repeatable=True, is_view=False, saves=(1, 2))
_DROPOUT = Operator(name="aten.native_dropout.default", repeatable=True, is_view=False, draws=True, saves=(1,))


def single(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Again | None:
    """What one of PyTorch's functions comes to, where that is a single operation, given these arguments.

    Args:
        func: what `__torch_function__` was given.
        args, kwargs: likewise.

    Returns:
        None where it may run another operation, or several.
    """
    what = function(func)
    if what is not None:
        return func, what
    given = _SINGLE.get(func)
    return given(args, kwargs) if given is not None else None


@functools.cache
def function(func: Any) -> Operator | None:
    """How a step treats one of PyTorch's functions as a whole: one that runs a single operation, whatever it is given.
    That operation draws no random numbers, writes to nothing and makes one tensor, which the function returns.

    Args:
        func: what `__torch_function__` was given.

    Returns:
        None for a function that may do more. So do those that PyTorch puts together of others, as `linear`; some of
        them are single operations for the arguments that they mostly get, which `single` tells.
    """
    name = getattr(func, "__name__", "")
    if not isinstance(func, _IN_C) and func not in _IN_PYTHON:
        return None  # as operators of others are, whatever their names
    if name not in _CONVERSIONS:
        found = [one for one in _overloads(name) if _takes_tensors(one)]
        if not found or not all(map(_is_single, found)):
            return None
    return Operator(name=f"torch.{name}", repeatable=True, is_view=False)


def _product_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Again | None:
    """What `linear` comes to where its rows lie one behind another: a single product."""
    if kwargs or len(args) not in (2, 3):
        return None
    rows, weight, bias = args[0], args[1], args[2] if len(args) == 3 else None
    if rows.dim() not in (2, 3) or weight.dim() != 2 or not rows.is_contiguous() or not rows.numel():
        return None
    if bias is None:
        return product, _PRODUCT
    return (product, _SUM_AND_PRODUCT) if bias.dim() == 1 else None


def product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """What `linear` gives for rows (..., features) that lie one behind another, with the rows in one dimension."""
    rows = rows.view(-1, rows.shape[-1])
    return torch.mm(rows, weight.t()) if bias is None else torch.addmm(bias, rows, weight.t())


def _norm_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Again | None:
    """What `layer_norm` always comes to: it returns the first of what its operation makes."""
    return _norm, _LAYER_NORM


def _norm(
    rows: torch.Tensor,
    normalized_shape: list[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.native_layer_norm(rows, normalized_shape, weight, bias, eps)


def _dropout_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Again | None:
    """What `dropout` comes to on a GPU, in training."""
    return (_drop, _DROPOUT) if _is_fused_dropout(*args, **kwargs) else None


def _is_fused_dropout(
    input: Any = None, p: float = 0.5, training: bool = True, inplace: bool = False, **others: Any
) -> bool:
    is_on_gpu = isinstance(input, torch.Tensor) and input.is_cuda and input.numel() > 0
    return is_on_gpu and training and not inplace and not others and 0 < p < 1


def _drop(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    return torch.native_dropout(input, p, True)


_SINGLE: dict[Any, Callable[[tuple[Any, ...], dict[str, Any]], Again | None]] = {
    F.linear: _product_of,
    F.layer_norm: _norm_of,
    F.dropout: _dropout_of,
}


def _overloads(name: str) -> list[torch._ops.OpOverload]:
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() and not name.startswith("__") else None
    return [getattr(packet, one) for one in packet.overloads()] if packet is not None else []


def _takes_tensors(overload: torch._ops.OpOverload) -> bool:
    """Whether an overload is one for tensors without names, and writes to none that it is given for its result."""
    arguments, name = overload._schema.arguments, overload._overloadname
    takes = any("Tensor" in str(one.type) for one in arguments)
    return takes and "name" not in name and not any(one.is_out for one in arguments)


def _is_single(overload: torch._ops.OpOverload) -> bool:
    what = operator(overload)
    makes_one = [str(one.type) for one in overload._schema.returns] == ["Tensor"]
    is_plain = what.repeatable and not (what.draws or what.writes or what.write_names or what.keeps_statistics)
    return makes_one and is_plain and not overload.has_kernel_for_dispatch_key(_MADE_OF_OTHERS)


@functools.cache
def operator(func: Any) -> Operator:
    """Reads an operator's schema and tags.

    Args:
        func: what `__torch_dispatch__` was given: an OpOverload, or a higher-order operator, which is not repeatable.
    """
    if not isinstance(func, torch._ops.OpOverload):
        return Operator(name=str(func), repeatable=False, is_view=False)
    schema, tags = func._schema, func.tags
    written = [index for index, arg in enumerate(schema.arguments) if arg.alias_info and arg.alias_info.is_write]
    aliases = [item for item in schema.returns if item.alias_info is not None]
    is_view = (not written and bool(aliases)) or torch.Tag.inplace_view in tags
    in_place = written == [0] and len(schema.returns) == 1 == len(aliases) and not schema.arguments[0].kwarg_only
    base_name = schema.name.split("::")[1]
    repeatable = (
        (not written or in_place)
        and not is_view
        and func.namespace in _TRUSTED
        and base_name not in _UNINITIALISED | _REBINDING | _READING
        # Their output's size is known only once they have run, which makes the host wait for the device.
        and torch.Tag.dynamic_output_shape not in tags
        and torch.Tag.data_dependent_output not in tags
    )
    return Operator(
        name=str(func),
        repeatable=repeatable,
        is_view=is_view,
        own=func.namespace == "torchstorm",
        writes=tuple(index for index in written if not schema.arguments[index].kwarg_only),
        write_names=tuple(schema.arguments[index].name for index in written),
        in_place=in_place,
        overwrites=in_place and base_name in _OVERWRITING,
        draws=torch.Tag.nondeterministic_seeded in tags,
        keeps_statistics=func.namespace == "aten" and base_name in _BATCH_NORM,
    )


def without_statistics(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A batch norm's arguments for running it again: in training without the running statistics, which it would move
    a second time and which its outputs do not depend on."""
    return (*args[:3], None, None, *args[5:]) if args[_TRAINING] else args
