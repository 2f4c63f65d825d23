"""Records a step's operations as they are dispatched, below autograd and autocast: what was called, with what.

From these records a tensor that autograd saved can be computed again from others that are still there, one operation
at a time, without running any of the model's own code a second time: counters do not count twice, caches do not grow,
autocast has nothing to decide, and a random operation draws from the state that it drew from before.

A record keeps no memory alive but that of weights, of the model's inputs and of tiny tensors. All others are named by
their bytes' origin, a `Value`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from torchstorm.errors import UnsupportedError
from torchstorm.offload.recompute.described import Unfinished, storages_in
from torchstorm.offload.recompute.operators import Operator, operator, without_statistics
from torchstorm.offload.recompute.repeats import Repeats, keep_counters
from torchstorm.offload.recompute.tensors import (
    collect,
    covers_all,
    default_generator,
    has_bytes,
    is_among,
    plain_arguments,
    tensors_of,
)
from torchstorm.offload.step.parcels import TINY_BYTES, Call, Leaf, Ref, Value
from torchstorm.offload.step.views import View, weak_reference
from torchstorm.offload.torch_private import pause_in_backward, skip_dynamo

# Asked at every operation that is recorded.
_backward = torch._C._current_graph_task_id  # which one runs; -1 for none


class Tape(TorchDispatchMode):
    """Active while a step's forward runs; in backward, and once `idle` is set, it only passes calls on.

    Args:
        device: whose tensors are recorded.
        is_leaf: whether the storage at an address is a weight, a buffer or an input of the model.
        mark: takes the time before and after each operation.
    """

    def __init__(
        self, device: torch.device, *, is_leaf: Callable[[int], bool], mark: Callable[[], object] | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        pause_in_backward(Tape)
        self.idle = False
        self.mark = mark
        self.probe: Probe | None = None  # sees every operation of a step that is traced
        self.calls: list[Call] = []  # those whose times were taken
        self.number = 0  # of the next operation that is no view
        self.num_calls = 0
        self.wanted: Collection[int] | None = None  # numbers of the operations to record; None for all
        self.is_within_call = True  # outside of what `WatchedCalls` sees, nothing is recorded
        self.repeats: Repeats | None = None  # records of an earlier step, of functions that are single operations
        self.within: list[Call] | None = None  # what is recorded within a function, while it runs
        self.saved_within: list[Value] = []  # what autograd saves meanwhile of what these make
        self._device = device
        self.kind = device.type
        self._is_leaf = is_leaf
        self.known: dict[int, Value] = {}  # what lies in the storage at an address
        self.leaves: dict[int, list[Leaf]] = {}  # what records refer to, by the same
        self.unfinished: Unfinished | None = None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions stay compiled under it: what they do inside is not recorded."""
        return True

    def dispatch(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """What PyTorch calls in place of every operation."""
        kwargs = kwargs or {}
        if self.idle or not self.is_within_call or _backward() != -1:
            return func(*args, **kwargs)
        if forward_ad._current_level >= 0:
            # PyTorch computes some tangents in another order where operations are watched.
            raise UnsupportedError(
                "Forward-mode derivatives (torch.autograd.forward_ad) within a step would differ in their last digits, "
                "because their formulas change while operations are recorded. Give Session(..., recompute=False)."
            )
        what = operator(func)
        if what.is_view:
            return func(*args, **kwargs)
        number = self.number
        self.number = number + 1
        if what.writes or what.write_names:
            self._protect_leaves(_written_to(what, args, kwargs))
        # Without gradients runs what is inside a custom function, whose kernels may write where nobody sees it. An
        # operator of ours that has a backward formula is a custom function, too, with nothing else inside.
        recordable = what.repeatable and (torch.is_grad_enabled() or what.own)
        if not recordable or (self.wanted is not None and number not in self.wanted):
            out = func(*args, **kwargs)
            self.has_changed(_written_to(what, args, kwargs))
            return out
        return self._record(func, what, number, args, kwargs)

    def value_of(self, storage: torch.UntypedStorage, version: int) -> Value | None:
        """What lies in a storage, None where that is not known."""
        known = self.known.get(storage._cdata)
        return known if known is not None and known.version == version else None

    def value_to_save(self, storage: torch.UntypedStorage, version: int, ordinal: int = -1) -> Value | None:
        """What lies in a storage that autograd saves. Where not everything is recorded, it gets a name now, by which
        operations that read it later know it.

        Args:
            storage, version: where, and autograd's version counter.
            ordinal: the storage's number in the plan that is followed, -1 where that does not tell what lies in it.
        """
        found = self.known.get(storage._cdata)
        if found is not None and found.version == version:
            if self.within is not None and found.call in self.within:
                self.saved_within.append(found)
            return found
        if self.wanted is None or self.idle:
            return None
        runs = self.unfinished
        if runs is None or (storage.nbytes() < TINY_BYTES and not runs.is_observed):
            return self._name(storage, version, ordinal)  # what is tiny may be a number that a function was given
        # Autograd saves results before a function returns them.
        call, arguments, places, again, _ = runs
        place = None if is_among(storage._cdata, arguments) else next(places, None)
        if place is None:
            return self._name(storage, version, ordinal)
        if place == 0 and again is not None:
            again.renew(storage, version, found)
            self.known[storage._cdata] = again
            return again
        return self._add_output(call, storage, version, place)

    def _name(self, storage: torch.UntypedStorage, version: int, ordinal: int) -> Value:
        """Gives what lies in a storage a name: that of the last step, if it is the storage of that number."""
        if self.repeats is None or ordinal < 0:
            return self._remember(storage, version, None)
        value = self.repeats.source(ordinal)
        if value is None:
            value = self.repeats.sources[ordinal] = self._remember(storage, version, None)
        else:
            value.renew(storage, version, self.known.get(storage._cdata))
            self.known[storage._cdata] = value
        return value

    def name(self, storage: torch.UntypedStorage, version: int) -> Value:
        """Gives what lies in a storage a name, if it has none, by which operations that read it later know it."""
        return self.value_of(storage, version) or self._remember(storage, version, None)

    def begin_late(self, mark: Callable[[], object]) -> None:
        """From now on all operations are recorded, with their times."""
        self.idle, self.wanted, self.mark, self.calls = False, None, mark, []
        self.repeats = None

    def note_resized(self, storage: torch.UntypedStorage) -> None:
        """A storage is about to lose its bytes: records that use a tiny one get a copy, others cannot run again."""
        if (known := self.known.pop(storage._cdata, None)) is not None:
            known.out = known.root = None
        for leaf in self.leaves.pop(storage._cdata, ()):
            if storage.nbytes() < TINY_BYTES:
                _keep_a_copy(leaf)
            else:
                leaf.version = -1

    def clear(self, *, is_over: bool = False) -> None:
        """Forgets the step. Records live on in what autograd still holds, unless all of it `is_over`."""
        self.idle = True
        if self.repeats is not None and is_over:
            self.repeats.forget_passing()
        elif self.repeats is not None:
            self.repeats.give_up()
        self.calls = []
        self.repeats = None
        self.known = {}
        self.leaves = {}

    # ------------------------------------------------------------------ recording

    def record_function(
        self, func: Any, again: Any, what: Operator, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs one of PyTorch's functions that is a single operation, and records it as that. Most of what is computed
        again is recorded so, hence the flat code.

        Args:
            func: the function.
            again: what makes the same bytes of the same arguments.
            what: that as an operator.
            number: of the operation.
            args, kwargs: as it was called.
        """
        arguments = plain_arguments(args, kwargs)
        if arguments is None:
            return func(*args, **kwargs)
        inputs: list[Value] = []
        described = []
        for arg in args:
            if isinstance(arg, torch.Tensor):
                described.append(self.describe_tensor(arg, inputs))
            else:
                described.append(self._describe(arg, inputs) if isinstance(arg, list | tuple) else arg)
        named = {name: self._describe(arg, inputs) for name, arg in kwargs.items()} if kwargs else kwargs
        state = self.generator(kwargs).get_state() if what.draws else None
        call = Call(self._device, again, what, tuple(described), named, inputs, [], [], state, number, self.num_calls)
        self.num_calls += 1
        self.unfinished = Unfinished(call, arguments, iter(what.saves))
        start = self.mark() if self.mark is not None else None
        try:
            out = func(*args, **kwargs) if kwargs else func(*args)
        finally:
            self.unfinished = None
        if start is not None and self.mark is not None:
            call.marks = (start, self.mark())
            self.calls.append(call)
        if type(out) is torch.Tensor:
            self.made(call, [out], arguments)
        if self.repeats is not None:
            self.repeats.keep(number, func, call, out, args, kwargs)
        return out

    def _record(self, func: Any, what: Operator, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments = plain_arguments(args, kwargs)
        if arguments is None:
            return func(*args, **kwargs)
        inputs: list[Value] = []
        described = tuple(self._describe(arg, inputs) for arg in args)
        if what.in_place and isinstance(described[0], Leaf):
            # Leaves nothing to compute again. DDP does so in its second forward alone, which is no other step for that.
            return func(*args, **kwargs)
        described_kwargs = {name: self._describe(arg, inputs) for name, arg in kwargs.items()}
        call = Call(self._device, func, what, described, described_kwargs, inputs, [], [], None, number, self.num_calls)
        if what.keeps_statistics:
            call.args = without_statistics(described)
        if what.in_place and what.overwrites and covers_all(args[0]) and isinstance(described[0], Ref):
            call.inputs = [value for value in inputs if value is not described[0].value]
        if what.draws:
            call.state = self.generator(kwargs).get_state()
        if self.probe is not None:
            self.probe.before(call, storages_in(described, args) | storages_in(described_kwargs, kwargs))
        start = self.mark() if self.mark is not None else None
        out = func(*args, **kwargs)
        if start is not None and self.mark is not None:
            call.marks = (start, self.mark())
            self.calls.append(call)
        self.num_calls += 1
        if self.within is not None:
            self.within.append(call)
        tensors = tensors_of(out)
        if what.in_place:
            self._written(call, args[0])
        else:
            self.made(call, tensors, arguments)
        if self.probe is not None:
            self.probe.after(call, out)
        return out

    def _describe(self, arg: Any, inputs: list[Value]) -> Any:
        """What stands in a record for an argument."""
        if isinstance(arg, torch.Tensor):
            return self.describe_tensor(arg, inputs)
        if isinstance(arg, list):  # which its owner may change
            return [self._describe(item, inputs) for item in arg]
        if isinstance(arg, tuple) and any(isinstance(item, torch.Tensor | list) for item in arg):
            return type(arg)([self._describe(item, inputs) for item in arg])
        return arg

    def describe_tensor(self, tensor: torch.Tensor, inputs: list[Value]) -> Ref | Leaf:
        """What stands in a record for an argument, whose value is added to the inputs if it is not among them."""
        if tensor.is_inference():  # it has no version counter, so nobody knows whether it will still be what it is
            inputs.append(Value(0, None))
            return Leaf(tensor, 0)
        storage, version = tensor.untyped_storage(), tensor._version
        address = storage._cdata
        known = self.known.get(address)
        if known is None:
            if self.is_made_outside(tensor, storage):
                return self._leaf(tensor, address, version)
            known = self._remember(storage, version, None)
        elif known.version != version:
            # Changed by something that was not recorded, or a part with a version counter of its own.
            known = self._remember(storage, version, None)
        if known not in inputs:
            inputs.append(known)
        if self.wanted is not None:
            known.is_read = True
            if known.call is None and known.saved is None and known.held is None:
                known.held = tensor, version  # what made it was not recorded, and autograd saves it later, if at all
        return tuple.__new__(Ref, (known, View.of(tensor)))

    def is_made_outside(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
        """Whether no operation of the step made a tensor, or it is so small that a record keeps it as it is."""
        is_tiny = storage.nbytes() < TINY_BYTES
        return is_tiny or tensor.device != self._device or self._is_leaf(storage._cdata)

    def _leaf(self, tensor: torch.Tensor, address: int, version: int) -> Leaf:
        leaf = Leaf(tensor, version, address)  # itself: below autograd, an alias would count its own versions
        self.leaves.setdefault(address, []).append(leaf)
        return leaf

    def _remember(self, storage: torch.UntypedStorage, version: int, call: Call | None) -> Value:
        """Gives a name to what lies in a storage now."""
        address = storage._cdata
        before = self.known.get(address)
        watch = weak_reference(storage) if before is None else before.watch
        value = self.known[address] = Value(storage.nbytes(), call, watch, version)
        return value

    def made(self, call: Call, tensors: list[torch.Tensor], arguments: list[torch.Tensor]) -> None:
        """Names an operation's outputs; what shares an argument's storage is a view, whatever the schema says."""
        for place, tensor in enumerate(tensors):
            if tensor.device != self._device or not has_bytes(tensor):
                continue
            storage = tensor.untyped_storage()
            address, version = storage._cdata, tensor._version
            known = self.known.get(address)
            if known is not None and known.version == version:
                continue  # autograd has saved it by now, or it is a view of what is known
            if storage.nbytes() and not is_among(address, arguments):
                self._add_output(call, storage, version, place)

    def _written(self, call: Call, tensor: torch.Tensor) -> None:
        """Names what an in-place operation left; autograd counts the change only after this."""
        if isinstance(call.args[0], Ref):
            _stop_holding(call.args[0].value, tensor)
            self._add_output(call, tensor.untyped_storage(), tensor._version + 1, 0)

    def _add_output(self, call: Call, storage: torch.UntypedStorage, version: int, place: int) -> Value:
        value = self._remember(storage, version, call)
        call.outputs.append(weakref.ref(value))
        call.places.append(place)
        return value

    def generator(self, kwargs: dict[str, Any] | None) -> torch.Generator:
        """What an operation draws from."""
        return (kwargs or {}).get("generator") or default_generator(self._device)

    # ------------------------------------------------------------------ writes

    def is_about_to_change(self, tensors: list[torch.Tensor]) -> None:
        """What `dispatch` does before an operation that writes to these, of one that it does not see."""
        keep_counters(self, tuple(tensors), {})
        self._protect_leaves(tensors)

    def _protect_leaves(self, tensors: Iterable[torch.Tensor]) -> None:
        """A weight, buffer or input is about to change: records that use it get a copy of what it was."""
        for tensor in tensors:
            for leaf in self.leaves.pop(tensor.untyped_storage()._cdata, ()):
                _keep_a_copy(leaf)

    def has_changed(self, tensors: Iterable[torch.Tensor]) -> None:
        """An operation that is not recorded has written to these."""
        for tensor in tensors:
            address = tensor.untyped_storage()._cdata
            if (known := self.known.get(address)) is not None:
                _stop_holding(known, tensor)
                self.known[address] = Value(known.nbytes, None, known.watch, -1)


# Set here, and not by its name in the class: PyTorch would wrap it in what takes 10 us a call.
Tape.__torch_dispatch__ = skip_dynamo(Tape.dispatch)  # type: ignore[method-assign]


class Probe:
    """What a traced step does around every recorded operation; see `offload.recompute.probe`."""

    def before(self, call: Call, storages: dict[Value, torch.UntypedStorage]) -> None:
        """The operation is about to run for the first time, on values that now lie in `storages`."""

    def after(self, call: Call, out: Any) -> None:
        """It has run."""


def _stop_holding(value: Value, written: torch.Tensor) -> None:
    """A tensor was changed: the bytes that it was held for are gone, and its memory is no longer kept for them."""
    if value.held is not None and value.held[0] is written:
        value.held = None


def _keep_a_copy(leaf: Leaf) -> None:
    """Gives a record a tensor of its own in place of one that is about to change."""
    if leaf.tensor._version == leaf.version and leaf.tensor.untyped_storage()._cdata == leaf.address:
        with torch.inference_mode(False):  # whose tensors have no version
            leaf.tensor = leaf.tensor.clone(memory_format=torch.preserve_format)
        leaf.version, leaf.address = leaf.tensor._version, leaf.tensor.untyped_storage()._cdata


def _written_to(what: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that a call changes, wherever they stand among its arguments."""
    written = [args[index] for index in what.writes if index < len(args)]
    found: list[torch.Tensor] = []
    collect([*written, *(kwargs[name] for name in what.write_names if name in kwargs)], found)
    for tensor in found:
        if has_bytes(tensor):
            yield tensor
