"""Records of an earlier step, used again where a step does the same.

To record a function takes the host longer than most functions do: who made each argument, how it is looked at, and what
is made. Steps that follow one plan call the same functions with the same weights and with what the same functions have
returned. So a record is kept, and the next step only compares: an argument is the very tensor that a recorded function
has returned, or the same weight, or an equal number. What differs is described anew, so that a record is always one of
this step's call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional as F

from torchstorm.offload.recompute.described import (
    CONTAINERS,
    NOTHING,
    Recording,
    Unfinished,
    as_returned,
    flat,
    is_given_again,
    is_one,
    is_plain,
    is_simple,
    lies_in,
    passing_leaves,
)
from torchstorm.offload.recompute.tensors import collect, has_bytes, is_among, plain_arguments, tensors_of
from torchstorm.offload.step.parcels import Call, Leaf, Ref, Value, is_made_by
from torchstorm.offload.step.views import View, root_of, version_counter
from torchstorm.offload.torch_private import attention_backend

NOT_REPEATED, LONG_WAY = object(), object()  # see `Repeats.run`, and `Library.run`
_TENSOR, _FIRST = torch.Tensor, (0,)


@dataclass(eq=False, slots=True)
class Record:
    """A function that was called, and did a single operation.

    Attributes:
        number: of the call's first operation.
        func: the function.
        given: its arguments, described as in a `Call`, those by name last.
        names: of those.
        call: the record of the operation.
        value: what the function returned; None where that is not known.
        chosen: which of several operations the function has chosen, where it does.
        places: of the operation's arguments, where among the function's they are, -1 for none; None where they are the
            function's.
        passing: those of its arguments that are held as they are, and are others in each step.
    """

    number: int
    func: Any
    given: tuple[Any, ...]
    names: tuple[str, ...]
    call: Call
    value: Value | None
    passing: list[Leaf]
    chosen: object = None
    places: tuple[int, ...] | None = None


class Repeats:
    """The records of the last step that followed a plan, by the numbers of the calls' first operations.

    Its records are those of one step: it serves the next one when nothing of that is left.

    Attributes:
        sources: bytes that no record makes, by the number of the storage that autograd saved with them.
    """

    def __init__(self) -> None:
        self._records: dict[int, Record] = {}
        self._passing: list[Value] = []  # what records of a step refer to, and is none of theirs
        self._leaves: list[Leaf] = []  # likewise
        self.sources: dict[int, Value] = {}
        self._is_clean = True  # whether no step has used it since `forget_passing`

    def begin(self) -> None:
        """A step begins that uses the records."""
        self.forget_passing()
        self._is_clean = False

    def forget_passing(self) -> None:
        """Nothing of the last step is left: its tensors are not kept alive by what was recorded of it."""
        if self._is_clean:
            return
        self._is_clean = True
        for value in self._passing:
            value.held = value.call = value.out = value.root = value.watch = value.again = None
        self._passing.clear()
        for leaf in self._leaves:
            leaf.tensor = NOTHING
        self._leaves.clear()
        for record in self._records.values():
            if record.value is not None:
                record.value.out = record.value.root = None
            for value in record.call.inputs:
                if value.call is None:
                    value.held = value.out = value.root = value.watch = None  # where it lies is seen in the next step
            for leaf in record.passing:
                leaf.tensor = NOTHING
        for value in self.sources.values():
            value.held = value.out = value.root = value.watch = None

    def source(self, ordinal: int) -> Value | None:
        """What autograd saved as storage of a number, if no record makes it, and it was not met in this step so far."""
        value = self.sources.get(ordinal)
        return value if value is not None and value.watch is None and value.call is None else None

    def returned(self, tensor: torch.Tensor, maker: tuple[int, str]) -> Value | None:
        """The bytes of a tensor that a call has returned in this step, or of a view of the same; None for any other
        tensor, or where they were changed.

        Args:
            tensor: any one.
            maker: number and name of the operation that the call should be.
        """
        record = self._records.get(maker[0])
        value = record.value if record is not None else None
        if value is None or value.root is None or value.call is None:
            return None
        root = value.root()
        if root is None or (root is not tensor and tensor._base is not root) or tensor._version != value.version:
            return None
        return value if lies_in(tensor, value) and is_made_by(value.call, maker) else None

    def run(self, tape: Recording, number: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Runs a function that is a single operation, and records it as it was recorded the last time. What runs most,
        hence the flat code.

        Args:
            tape: of the step.
            number: of the call's first operation.
            func, args, kwargs: as it was called.

        Returns:
            What the function returns; `NOT_REPEATED` where it must be recorded anew, and did not run.
        """
        record = self._records.get(number)
        if record is None or record.func is not func:
            return NOT_REPEATED
        given = (*args, *kwargs.values()) if kwargs else args
        if len(given) != len(record.given) or (kwargs and tuple(kwargs) != record.names):
            return NOT_REPEATED
        others: list[int] | None = None  # places of arguments that are to be described anew
        place = -1
        for item in record.given:
            place += 1
            arg, kind = given[place], type(item)
            if kind is Ref:
                source, view = item
                out = source.out() if source.out is not None else None
                is_out = out is not None and out is arg and view is source.view  # as most are
                if is_out and arg._version == source.version and lies_in(arg, source):
                    continue
            elif arg is item:
                continue
            if is_given_again(tape, item, arg):
                continue
            may_differ = kind is Ref or kind is Leaf or (kind is type(arg) and kind in CONTAINERS)
            if not may_differ or not is_plain(arg):
                return NOT_REPEATED
            others = others or []
            others.append(place)
        if record.chosen is not None and record.chosen != CHOICES[func](*args, **(kwargs or {})):
            return NOT_REPEATED
        if others is not None:
            self._describe_anew(tape, record, given, others)
        call, value, operator = record.call, record.value, record.call.operator
        if value is None:
            call.outputs, call.places = [], []
        elif operator.saves != _FIRST:  # which come before what it returns
            call.outputs, call.places = [weakref.ref(value)], [0]
        if operator.draws:
            call.state = tape.generator(kwargs).get_state()
        call.order = tape.num_calls
        tape.num_calls += 1
        tape.unfinished = Unfinished(call, given, iter(operator.saves), value, record.chosen is not None)
        try:
            out = func(*args, **kwargs) if kwargs else func(*args)
        finally:
            tape.unfinished = None
        if type(out) is not _TENSOR:
            return out
        if value is None:
            tape.made(call, [out], tensors_of(given))
            return out
        storage = out.untyped_storage()
        address, version = storage._cdata, out._version
        known = tape.known.get(address)
        if known is not value:
            is_given = known is not None and known.version == version
            if is_given or (others is not None and is_among(address, given)):
                self._forget_unless_new(record)
                return out
            value.renew(storage, version, known)
            tape.known[address] = value
        value.out, value.root = weakref.ref(out), root_of(out)
        if others is not None or value.view is None or out.shape != value.view.size:  # nonzero's depends on numbers
            view = View.of(out)
            if view != value.view:
                value.view = view
        return out

    def _forget_unless_new(self, record: Record) -> None:
        """A function has returned what it was given, or bytes that were there before: it has made nothing."""
        call = record.call
        made = [pair for pair in zip(call.outputs, call.places, strict=True) if pair[0]() is not record.value]
        call.outputs, call.places = [one for one, _ in made], [place for _, place in made]
        self._drop(record.number)

    def _describe_anew(self, tape: Recording, record: Record, given: tuple[Any, ...], others: list[int]) -> None:
        """Has a record say what the function is given now, where that is not what it was given then."""
        now = list(record.given)
        for place in others:
            now[place] = self._described(tape, given[place])
        record.given = tuple(now)
        call = record.call
        if record.places is None:
            num_args = len(given) - len(record.names)
            call.args = record.given[:num_args]
            call.kwargs = dict(zip(record.names, now[num_args:], strict=True))
        else:
            call.args = tuple(
                item if place < 0 else now[place] for item, place in zip(call.args, record.places, strict=True)
            )
        read = (item.value for item in flat((*call.args, *call.kwargs.values())) if type(item) is Ref)
        inputs = list(dict.fromkeys(read))
        if inputs != call.inputs:  # else a `Chain` of it still serves
            call.inputs = inputs
        self._leaves += record.passing
        record.passing = passing_leaves(record.given)

    def _described(self, tape: Recording, arg: Any) -> Any:
        if isinstance(arg, list | tuple):
            return type(arg)([self._described(tape, one) for one in arg])
        if not isinstance(arg, torch.Tensor):
            return arg
        found = as_returned(tape.describe_tensor(arg, []), arg)
        if type(found) is Ref and found.value.out is None:
            self._passing.append(found.value)
        return found

    # ------------------------------------------------------------------ what is kept

    def keep(self, number: int, func: Any, call: Call, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keeps the record of a function that ran, and that is a single operation."""
        self._drop(number)
        described = (*call.args, *call.kwargs.values())
        given = tuple(as_returned(item, arg) for item, arg in zip(described, (*args, *kwargs.values()), strict=True))
        call.args, call.kwargs = given[: len(args)], dict(zip(kwargs, given[len(args) :], strict=True))
        self._keep(Record(number, func, given, tuple(kwargs), call, self._value_of(call, out), passing_leaves(given)))

    def keep_chosen(
        self,
        tape: Recording,
        number: int,
        func: Any,
        calls: list[Call],
        saved: list[Value],
        out: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Keeps the record of a function that ran, and has chosen a single operation.

        Args:
            tape: of the step.
            number: of the call's first operation.
            func, args, kwargs: as it was called.
            calls: what was recorded within it.
            saved: which of what they made autograd saved, in that order.
            out: what the function returned.
        """
        self._drop(number)
        if len(calls) != 1 or func not in CHOICES or type(out) is not torch.Tensor:
            return
        (call,) = calls
        arguments = plain_arguments(args, kwargs)
        if arguments is None or not all(_reads(call, one, tape) for one in arguments):
            return  # to describe what the operation does not read would keep that alive
        given = tuple(self._described(tape, arg) for arg in (*args, *kwargs.values()))
        places = tuple(next((at for at, one in enumerate(given) if is_one(item, one)), -1) for item in call.args)
        tensors = [place for item, place in zip(call.args, places, strict=True) if not is_simple(item)]
        if -1 in tensors or not all(map(is_simple, call.kwargs.values())):
            return
        place_of = {made(): place for place, made in zip(call.places, call.outputs, strict=True)}
        call.operator = replace(call.operator, saves=tuple(place_of[one] for one in dict.fromkeys(saved)))
        chosen = CHOICES[func](*args, **kwargs)
        value = self._value_of(call, out)
        self._keep(Record(number, func, given, tuple(kwargs), call, value, passing_leaves(given), chosen, places))

    def _value_of(self, call: Call, out: Any) -> Value | None:
        """What a function returned, if that is the first of what its operation makes."""
        for place, reference in zip(call.places, call.outputs, strict=True):
            value = reference()
            if place == 0 and value is not None and type(out) is torch.Tensor:
                value.out, value.root, value.view = weakref.ref(out), root_of(out), View.of(out)
                return value
        return None

    def _keep(self, record: Record) -> None:
        self._passing += [one for one in record.call.inputs if one.out is None]
        self._records[record.number] = record

    def _drop(self, number: int) -> None:
        record = self._records.pop(number, None)
        if record is not None:
            self._passing += [one for one in record.call.inputs if one.call is None]
            self._leaves += record.passing
            if record.value is not None:
                self._passing.append(record.value)

    def take_over(self, earlier: Repeats, is_kept: Callable[[int], bool]) -> None:
        """The next step follows another plan for the same operations than the last one did: takes what was recorded of
        that, as far as the plans have the same recorded. What a record is given otherwise is described anew. Nothing is
        left of either's last step.

        Args:
            earlier: of the other plan; has no records afterwards.
            is_kept: of the number of a record, whether both plans have the same recorded of its call.
        """
        for number in [number for number in earlier._records if not is_kept(number)]:
            earlier._drop(number)
        earlier.sources.clear()
        earlier._is_clean = False
        earlier.forget_passing()
        for number in self._records.keys() & earlier._records.keys():
            self._drop(number)
        self._is_clean = False
        self._records |= earlier._records
        earlier._records = {}

    def clear(self) -> None:
        """Everything is recorded anew in the next step."""
        for number in list(self._records):
            self._drop(number)
        self.sources.clear()

    def give_up(self) -> None:
        """The same, where something is left of the step that the records are of: they live on in that alone."""
        self._records.clear()
        self._passing.clear()
        self._leaves.clear()
        self.sources.clear()


def _reads(call: Call, tensor: torch.Tensor, tape: Recording) -> bool:
    """Whether a tensor's bytes are among what an operation was given."""
    value = tape.known.get(tensor.untyped_storage()._cdata)
    leaves = (item.tensor for item in flat(call.args) if type(item) is Leaf)
    return (value is not None and value in call.inputs) or any(one is tensor for one in leaves)


def keep_counters(tape: Recording, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A function may write to what it is given: whether it does must show when that is asked for again."""
    found: list[torch.Tensor] = []
    collect(args, found)
    collect(kwargs.values(), found)
    for tensor in found:
        known = tape.known.get(tensor.untyped_storage()._cdata) if has_bytes(tensor) else None
        if known is not None and known.saved is not None and known.saved.origin is not None:
            known.saved.counter, known.saved.origin = version_counter(tensor), None


CHOICES: dict[Any, Callable[..., object]] = {F.scaled_dot_product_attention: attention_backend}
