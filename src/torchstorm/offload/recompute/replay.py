"""Computes saved tensors again from a step's records: the counterpart of `plan.recompute`, which says beforehand which
operations that will be."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

import torch

from torchstorm.errors import UnsupportedError
from torchstorm.offload.native.library import library
from torchstorm.offload.recompute import fused
from torchstorm.offload.recompute.fused import Noted
from torchstorm.offload.recompute.geometry import Look
from torchstorm.offload.recompute.groups import unchanged
from torchstorm.offload.recompute.repeats import LONG_WAY
from torchstorm.offload.recompute.tensors import default_generator, tensors_of
from torchstorm.offload.step.parcels import Call, Chain, Leaf, Ref, Saved, Value
from torchstorm.offload.step.views import content_of, row_of

_MOST_CHAINS, _MOST_MISSED = 4, 16

BytesOf = Callable[[Saved], torch.Tensor | None]
Arrived = Callable[[Saved, torch.Tensor], None]


def compute_again(value: Value, *, bytes_of: BytesOf, arrived: Arrived) -> None:
    """Runs what makes a value, and first what makes its inputs, as far as those are not there; pointwise operations in
    one kernel, where that was found to give the same bits.

    What is computed on the way is let go after the last operation that reads it.

    Args:
        value: of a saved storage whose bytes are not there.
        bytes_of: what `View.over` takes, for a saved storage that is on the fast device or can be fetched; None for one
            that is not there.
        arrived: told each saved storage whose bytes are there now, and the like of it.

    Raises:
        UnsupportedError: an operation on the way cannot run again; names it.
    """
    chain, there, noted = value.again, None, None
    if chain is not None and chain.serves(value):
        there = _find(chain.sources, bytes_of)
    if chain is None or there is None:
        there = {}
        calls = _calls_for(value, bytes_of, there)
        if not calls:  # something else that was saved has the same bytes, and is there
            return
        num_before = 0 if chain is None else chain.num_before + 1
        chain = value.again = Chain(calls, list(there), num_before)
        # One that is another in each step, as where it reads what the model is given, is considered no more.
        is_considered = len(calls) > 1 and num_before < _MOST_CHAINS
        noted = Noted() if is_considered and fused.is_on(calls[-1].device) else None
    elif chain.fused is not None:
        if chain.fused.is_ready():
            _run_fused(chain, there, arrived)
            return
        chain.fused.num_missed += 1
        if chain.fused.num_missed > _MOST_MISSED or not chain.fused.is_as_planned():
            chain.fused = None
    for at in range(len(chain.calls)):
        _run_at(chain, at, there, arrived, noted)
    if noted is not None:
        fused.consider(chain, noted)


def _run_fused(chain: Chain, there: dict[Value, torch.Tensor], arrived: Arrived) -> None:
    """Runs a chain with its pointwise operations in groups."""
    for part in chain.fused.parts:
        contents = None if isinstance(part, int) else part.run(there)
        if contents is not None:
            _spread(part.made, contents, there, part.passed, arrived)
            for one in part.frees:
                del there[one]
            continue
        for at in (part,) if isinstance(part, int) else range(part.begin, part.begin + len(part.calls)):
            _run_at(chain, at, there, arrived)


def _run_at(
    chain: Chain, at: int, there: dict[Value, torch.Tensor], arrived: Arrived, noted: Noted | None = None
) -> None:
    """Runs one operation of a chain; of what it makes, puts what others read beside what is there, and lets go what
    none reads that follows."""
    call = chain.calls[at]
    contents = run(call, there)
    if noted is not None:
        noted.looks.append(Look.of(contents[0]) if len(contents) == 1 else None)
        made = (reference() for reference in call.outputs)
        noted.wanted |= {one for one in made if one is not None and one.absent is not None}
    _spread(call.outputs, contents, there, chain.passed, arrived)
    for one in chain.frees[at]:
        del there[one]


def _spread(
    outputs: Sequence[weakref.ref[Value]],
    contents: Sequence[torch.Tensor],
    there: dict[Value, torch.Tensor],
    passed: Collection[Value],
    arrived: Arrived,
) -> None:
    """Takes charge of what operations have made."""
    for reference, content in zip(outputs, contents, strict=True):
        made = reference()
        if made is None:
            continue
        if made in passed:
            there[made] = content
        # What else the operation makes may be away on another tier; it comes back when its own time has come.
        if (saved := made.absent) is not None:
            arrived(saved, content)


def _find(sources: list[Value], bytes_of: BytesOf) -> dict[Value, torch.Tensor] | None:
    """What holds the bytes of each; None where one is not there."""
    there: dict[Value, torch.Tensor] = {}
    for one in sources:
        found = bytes_of(one.saved) if one.saved is not None else _held(one)
        if found is None:
            return None
        there[one] = found
    return there


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
    """What holds the bytes of what autograd has not saved; None where they are not there any more."""
    if value.held is None:
        return None
    tensor, version = value.held
    return content_of(tensor) if tensor._version == version else None


def run(call: Call, there: Mapping[Value, torch.Tensor]) -> list[torch.Tensor]:
    """Runs an operation once more, drawing from the random state that it drew from.

    Args:
        call: its record.
        there: what `View.over` takes, for each of its inputs.

    Returns:
        The like for each output, in the order of `call.outputs`.

    Raises:
        UnsupportedError: a weight or an input changed since, in a way that autograd does not see; or the operation
            gives other outputs now.
    """
    if (found := library()) is not None and (made := found.again(call, there)) is not LONG_WAY:
        return cast(list[torch.Tensor], made)
    target: torch.Tensor | None = None
    in_place = call.operator.in_place
    args = [_argument(item, call, there) for item in call.args[in_place:]]
    kwargs = {name: _argument(item, call, there) for name, item in call.kwargs.items()}
    if in_place:
        first = call.args[0]
        assert isinstance(first, Ref)
        needed = first.value in call.inputs
        target = (
            row_of(there[first.value]).clone()
            if needed
            else torch.empty(first.value.nbytes, dtype=torch.uint8, device=call.device)
        )
        args.insert(0, first.view.over(target))
    out = _call(call, args, kwargs)
    if target is not None:
        return [target]
    tensors = tensors_of(out)
    if len(tensors) <= max(call.places, default=-1):
        raise UnsupportedError(
            f"{call.operator.name} gave {max(call.places) + 1} tensors or more in forward and {len(tensors)} now."
        )
    return [content_of(tensors[place]) for place in call.places]


def _call(call: Call, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Calls an operator as it was dispatched: with gradients on, which some look at, and autocast has been."""
    if torch.is_autocast_enabled(call.device.type):
        with torch.autocast(call.device.type, enabled=False):  # the record has the arguments as autocast left them
            return _call(call, args, kwargs)
    generator = now = None
    if call.state is not None:
        generator = call.kwargs.get("generator") or default_generator(call.device)
        now = generator.get_state()
        generator.set_state(call.state)
    is_off = not torch.is_grad_enabled()
    if is_off:
        torch._C._set_grad_enabled(True)
    try:
        with torch._C._AutoDispatchBelowAutograd():
            return call.func(*args, **kwargs)
    finally:
        if is_off:
            torch._C._set_grad_enabled(False)
        if generator is not None and now is not None:
            generator.set_state(now)


def _argument(item: Any, call: Call, there: Mapping[Value, torch.Tensor]) -> Any:
    """What a record says of an argument, as a tensor again. (Not a closure: one that names itself is a cycle, which
    would keep what it reads allocated until the next garbage collection.)"""
    if isinstance(item, Ref):
        return item.view.over(there[item.value])
    if isinstance(item, Leaf):
        return unchanged(item, call)
    if isinstance(item, list | tuple):
        return type(item)([_argument(one, call, there) for one in item])
    return item
