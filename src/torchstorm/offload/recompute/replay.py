"""Computes saved tensors again from a step's records: the counterpart of `plan.recompute`, which says beforehand which
operations that will be."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from torchstorm.errors import UnsupportedError
from torchstorm.offload.recompute.tensors import default_generator, tensors_of
from torchstorm.offload.step.parcels import Call, Leaf, Ref, Saved, Value
from torchstorm.offload.step.views import flat_bytes

BytesOf = Callable[[Saved], torch.Tensor | None]


def compute_again(value: Value, *, bytes_of: BytesOf, arrived: Callable[[Saved, torch.Tensor], None]) -> None:
    """Runs what makes a value, and first what makes its inputs, as far as those are not there.

    What is computed on the way is let go after the last operation that reads it.

    Args:
        value: of a saved storage whose bytes are not there.
        bytes_of: (nbytes,) uint8 over the bytes of a saved storage that is on the fast device or can be fetched;
            None for one that is not there.
        arrived: told each saved storage whose bytes are there now, and (nbytes,) uint8 over them.

    Raises:
        UnsupportedError: an operation on the way cannot run again; names it.
    """
    there: dict[Value, torch.Tensor] = {}
    calls = _calls_for(value, bytes_of, there)
    last = {one: call for call in calls for one in call.inputs}
    for call in calls:
        _run_into(there, call, arrived)
        for one in [one for one in there if last.get(one, call) is call]:
            del there[one]


def _calls_for(value: Value, bytes_of: BytesOf, there: dict[Value, torch.Tensor]) -> list[Call]:
    """What must run to make a value, in order; puts what is at hand for it into `there`."""
    calls: list[Call] = []
    coming: set[Value] = set()

    def has(one: Value) -> bool:
        if one in there or one in coming:
            return True
        found = bytes_of(one.saved) if one.saved is not None else _held(one)
        if found is not None:
            there[one] = found
        return found is not None

    wanted = [value]
    while wanted:
        if has(wanted[-1]):
            wanted.pop()
            continue
        call = wanted[-1].call
        if call is None and wanted[-1].lost is not None:
            raise wanted[-1].lost()
        if call is None:
            raise UnsupportedError(
                f"A saved tensor of {value.nbytes} bytes cannot be computed again as planned: what made its origin of "
                f"{wanted[-1].nbytes} bytes in this step is not known. This step differs from the one that was traced."
            )
        missing = [one for one in call.inputs if not has(one)]
        if missing:
            wanted += reversed(missing)
            continue
        calls.append(call)
        coming.update(made for reference in call.outputs if (made := reference()) is not None)
    return calls


def _held(value: Value) -> torch.Tensor | None:
    """(nbytes,) uint8 over the bytes of what autograd has not saved; None where they are not there any more."""
    if value.held is None:
        return None
    tensor, version = value.held
    return flat_bytes(tensor.untyped_storage()) if tensor._version == version else None


def _run_into(there: dict[Value, torch.Tensor], call: Call, arrived: Callable[[Saved, torch.Tensor], None]) -> None:
    """Runs an operation, and puts what it makes beside what is there."""
    for reference, row in zip(call.outputs, run(call, there.__getitem__), strict=True):
        made = reference()
        if made is not None and made not in there:
            there[made] = row
            # What else the operation makes may be away on another tier; it comes back when its own time has come.
            if made.saved is not None and made.saved.parcel.buffer is None and made.saved.parcel.handle is None:
                arrived(made.saved, row)


def run(call: Call, bytes_of: Callable[[Value], torch.Tensor]) -> list[torch.Tensor]:
    """Runs an operation once more, drawing from the random state that it drew from.

    Args:
        call: its record.
        bytes_of: (nbytes,) uint8 over the bytes of one of its inputs.

    Returns:
        (nbytes,) uint8 over each output's storage, in the order of `call.outputs`.

    Raises:
        UnsupportedError: a weight or an input changed since, in a way that autograd does not see; or the operation
            gives other outputs now.
    """
    target: torch.Tensor | None = None
    device = call.device
    with torch._C._AutoDispatchBelowAutograd():
        rest = [_argument(item, call, bytes_of) for item in call.args[call.operator.in_place :]]
        kwargs = {name: _argument(item, call, bytes_of) for name, item in call.kwargs.items()}
        if call.operator.in_place:
            first = call.args[0]
            assert isinstance(first, Ref)
            needed = first.value in call.inputs
            target = (
                bytes_of(first.value).clone()
                if needed
                else torch.empty(first.value.nbytes, dtype=torch.uint8, device=device)
            )
            rest.insert(0, first.view.over(target))
        out = _call(call, rest, kwargs)
    if target is not None:
        return [target]
    tensors = tensors_of(out)
    if len(tensors) <= max(call.places, default=-1):
        raise UnsupportedError(
            f"{call.operator.name} gave {max(call.places) + 1} tensors or more in forward and {len(tensors)} now."
        )
    return [flat_bytes(tensors[place].untyped_storage()) for place in call.places]


def _call(call: Call, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Calls an operator as it was dispatched: with gradients on, which some look at, and autocast has been."""
    with torch.enable_grad(), _without_autocast(call.device):
        if call.state is None:
            return call.func(*args, **kwargs)
        generator = call.kwargs.get("generator") or default_generator(call.device)
        now = generator.get_state()
        generator.set_state(call.state)
        try:
            return call.func(*args, **kwargs)
        finally:
            generator.set_state(now)


def _argument(item: Any, call: Call, bytes_of: Callable[[Value], torch.Tensor]) -> Any:
    """What a record says of an argument, as a tensor again. (Not a closure: one that names itself is a cycle, which
    would keep what it reads allocated until the next garbage collection.)"""
    if isinstance(item, Ref):
        return item.view.over(bytes_of(item.value))
    if isinstance(item, Leaf):
        if not item.tensor.is_inference() and item.tensor._version != item.version:
            raise UnsupportedError(
                f"{call.operator.name} should run again in backward, but an argument of shape "
                f"{tuple(item.tensor.shape)} has changed since (version {item.version}, now {item.tensor._version}): "
                "change weights and inputs after the step, not within its backward."
            )
        if item.address and item.tensor.untyped_storage()._cdata != item.address:
            raise UnsupportedError(
                f"{call.operator.name} should run again in backward, but an argument of shape "
                f"{tuple(item.tensor.shape)} was given other memory since (as by `.data =`): do so after the step."
            )
        return item.tensor
    if isinstance(item, list | tuple):
        return type(item)([_argument(one, call, bytes_of) for one in item])
    return item


def _without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The record has the arguments as autocast left them."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()
