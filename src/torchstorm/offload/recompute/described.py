"""How arguments stand in a record, and whether those of a later call are the same."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from torchstorm.offload.recompute.tensors import has_bytes
from torchstorm.offload.step.packed import is_of_parameter
from torchstorm.offload.step.parcels import Call, Leaf, Ref, Value
from torchstorm.offload.step.views import View

_TENSOR, CONTAINERS = torch.Tensor, (list, tuple)
NOTHING = torch.empty(0)  # stands for what was of a step that is over


class Unfinished(NamedTuple):
    """A recorded function that runs.

    Attributes:
        call: its record.
        arguments: what it is given, tensors among them.
        places: of those of its results that autograd has yet to save before it returns.
        again: what it returned in an earlier step, and makes again.
        is_observed: whether the places are those that autograd was seen to save, however small.
    """

    call: Call
    arguments: Sequence[Any]
    places: Iterator[int]
    again: Value | None = None
    is_observed: bool = False


class Recording(Protocol):
    """A step that is recorded; see `Tape`."""

    known: dict[int, Value]
    leaves: dict[int, list[Leaf]]
    num_calls: int
    unfinished: Unfinished | None

    def is_made_outside(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
        """Whether no operation of the step made a tensor, or it is so small that a record keeps it as it is."""

    def describe_tensor(self, tensor: torch.Tensor, inputs: list[Value]) -> Ref | Leaf:
        """What stands in a record for an argument."""

    def generator(self, kwargs: dict[str, Any] | None) -> torch.Generator:
        """What an operation draws from."""

    def made(self, call: Call, tensors: list[torch.Tensor], arguments: list[torch.Tensor]) -> None:
        """Names an operation's outputs."""


def lies_in(tensor: torch.Tensor, value: Value) -> bool:
    """Whether a tensor still has the memory in which it was made."""
    return value.watch is not None and tensor.untyped_storage()._cdata == value.watch.cdata


def _is_same(one: Any, other: Any) -> bool:
    """Whether two plain values are the same to a function."""
    if one is other:
        return True
    if type(one) is not type(other) or not is_simple(one) or one != other:
        return False
    return type(one) is not float or one != 0 or math.copysign(1, one) == math.copysign(1, other)


def is_simple(item: Any) -> bool:
    """Whether a value has no tensors in it."""
    if isinstance(item, list | tuple) and type(item) is not Ref:
        return all(is_simple(one) for one in item)
    return not isinstance(item, torch.Tensor | Ref | Leaf | dict)


def is_plain(arg: Any) -> bool:
    """Whether an argument is plain tensors only."""
    if isinstance(arg, list | tuple):
        return all(map(is_plain, arg))
    return isinstance(arg, torch.Tensor) and has_bytes(arg)


def flat(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        if isinstance(item, list | tuple) and type(item) is not Ref:
            yield from flat(item)
        else:
            yield item


def as_returned(item: Any, arg: Any) -> Any:
    """An argument's description; where it is the very tensor that a function has returned, by that one's own view."""
    if type(item) is not Ref:
        return item
    value, view = item
    is_out = value.out is not None and value.out() is arg and view == value.view
    return tuple.__new__(Ref, (value, value.view)) if is_out else item


def is_one(item: Any, other: Any) -> bool:
    """Whether two descriptions are of one tensor."""
    if type(item) is Ref and type(other) is Ref:
        return item.value is other.value and item.view == other.view
    return isinstance(item, Leaf) and isinstance(other, Leaf) and item.tensor is other.tensor


def passing_leaves(described: tuple[Any, ...]) -> list[Leaf]:
    """What a record holds as it is, and would keep alive: inputs, buffers, and what is tiny, but no weights."""
    return [item for item in flat(described) if type(item) is Leaf and not is_of_parameter(item.tensor)]


def is_given_again(tape: Recording, item: Any, arg: Any) -> bool:
    """Whether an argument is the one that a record describes."""
    if type(item) is Ref:
        return _is_source_again(tape, item.value, item.view, arg)
    if type(item) is Leaf:
        return _is_leaf_again(tape, item, arg)
    if type(item) in CONTAINERS and type(arg) is type(item) and len(arg) == len(item):
        return all(is_given_again(tape, one, other) for one, other in zip(item, arg, strict=True))
    return _is_same(arg, item)


def _is_source_again(tape: Recording, source: Value, view: View, arg: Any) -> bool:
    """Whether a tensor is a view of bytes that the step has made, or one that no record makes: that is met again where
    it has the place of the one that was met in the last step."""
    if type(arg) is not _TENSOR or not has_bytes(arg) or arg.is_inference():
        return False
    storage, version = arg.untyped_storage(), arg._version
    address = storage._cdata
    known = tape.known.get(address)
    if known is not source or version != source.version:
        is_new = known is None or known.version != version
        if source.call is not None or source.watch is not None or not is_new:
            return False
        if known is None and tape.is_made_outside(arg, storage):
            return False
        source.renew(storage, version, known)
        tape.known[address] = source
    if source.call is None and source.saved is None and source.held is None:
        source.held = arg, version
    return View.of(arg) == view


def _is_leaf_again(tape: Recording, leaf: Leaf, arg: Any) -> bool:
    """Whether a tensor is the weight that a record reads, or one that it would hold as it is, which is another one in
    each step."""
    if arg is leaf.tensor:
        address = arg.untyped_storage()._cdata
        if address != leaf.address or address in tape.known:
            return False
        leaf.version = arg._version
    else:
        if leaf.tensor is not NOTHING or type(arg) is not _TENSOR or not has_bytes(arg) or arg.is_inference():
            return False
        storage = arg.untyped_storage()
        address = storage._cdata
        if address in tape.known or not tape.is_made_outside(arg, storage):
            return False
        leaf.tensor, leaf.version, leaf.address = arg, arg._version, address
    tape.leaves.setdefault(address, []).append(leaf)
    return True


def storages_in(described: Any, actual: Any) -> dict[Value, torch.UntypedStorage]:
    """Where the values among a call's arguments lie."""
    if isinstance(described, Ref):
        return {described.value: actual.untyped_storage()}
    if isinstance(described, dict):
        described, actual = list(described.values()), list(actual.values())
    found: dict[Value, torch.UntypedStorage] = {}
    if isinstance(described, list | tuple):
        for one, other in zip(described, actual, strict=True):
            found |= storages_in(one, other)
    return found
