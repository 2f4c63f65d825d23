"""Has a step's operations recorded within the calls that a plan needs, and within no others.

A mode that sees every operation costs the host more than most operations take. This one sees the calls of PyTorch's
functions in Python, each of which is one operation or a few, and that costs a part of it. It numbers them, so that the
same call of a later step has the same number, and lets the tape see what happens within those that were asked for.

A call's number is made of the moment of the step before it, the function, and how often that was called since. So a few
calls more, as of a step that logs something, change no other call's number.
"""

from __future__ import annotations

import sys
import threading
import weakref
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

from torchstorm.offload.native.library import KnownOperators, Library, library
from torchstorm.offload.recompute.operators import operator, single
from torchstorm.offload.recompute.repeats import NOT_REPEATED, keep_counters
from torchstorm.offload.recompute.tape import Tape
from torchstorm.offload.torch_private import pause_in_backward, see_no_more_operations, see_operations

NAMES = 1 << 20  # of functions
COUNTS = 1 << 10  # of a function's calls after a moment
_BEGINNING = 1  # the moment of a step at which its plan is chosen
PLACES = 1 << 20  # of operations in a call: a recurrent network is one, with some ten operations a time step

# Asked at every function that is recorded.
_backward = torch._C._current_graph_task_id  # which one runs; -1 for none
_vmap_level = torch._C._functorch.maybe_current_level
_num_modes, _mode_at = torch._C._len_torch_function_stack, torch._C._get_function_stack_at
_pop_mode, _push_mode = torch._C._pop_torch_function_stack, torch._C._push_on_torch_function_stack
_with_gradients, _is_autocast = torch.is_grad_enabled, torch.is_autocast_enabled
# Asked at every function. The two say what `torch.compiler.is_compiling` says, which takes the host twice as long.
_is_traced, _compiler = torch.compiler.is_dynamo_compiling, torch.compiler

GETTER = type(torch.Tensor.shape.__get__)  # type: ignore[attr-defined]
_BACKWARD = frozenset({torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad})


class Progress(Protocol):
    """How far a step is."""

    @property
    def moment(self) -> int:
        """Number of its latest moment."""


class _Begun:
    moment = 0


class Calls:
    """Within which calls operations are recorded.

    Attributes:
        numbers: of these.
        names: of the functions that are called there.
        moments: after which they are.
        present: after which the mode has to be active; None as long as no step has shown that.
        operators: what C++ knows of the operators that they call; None without it.
    """

    def __init__(self, numbers: Collection[int]) -> None:
        self.numbers = frozenset(numbers)
        self.names = frozenset(number % NAMES for number in numbers)
        self.moments = frozenset(map(_moment_of_call, numbers))
        self.present: frozenset[int] | None = None if self.numbers else frozenset()
        self.operators: KnownOperators | None = None
        self._covered: frozenset[int] = frozenset()  # moments for which these stand in for the mode
        self._within: frozenset[int] = frozenset()
        self._end = 0

    def learn(self, within: Collection[int], end: int) -> None:
        """A step has shown where the mode can become active.

        Args:
            within: moments that have come within functions which may call others. Those would be taken for the step's
                own calls where the mode became active just then, so it has to be there before.
            end: the moment up to which that was seen.
        """
        self._within, self._end = frozenset(within), end
        self._place()

    def settle(self) -> None:
        """A step is over: operators may stand in for the mode at more moments than before, or at fewer."""
        covered = self.operators.covered() if self.operators is not None else None
        if covered is not None and self.present is not None:
            self._covered = frozenset(covered)
            self._place()

    def _place(self) -> None:
        found: set[int] = set()
        for moment in {min(moment, self._end) for moment in self.moments - self._covered}:
            while moment not in found:
                found.add(moment)
                if moment in self._within and moment > 0:
                    moment -= 1
        self.present = frozenset(found)


class WatchedCalls(TorchFunctionMode):
    """Active while a step runs; in backward it only passes calls on.

    Args:
        tape: records.
        progress: of the step; it may be set later.
        enters: whether the tape is to be entered for every call; else it is active all the time, and only numbered.
        may_go: whether it may leave the stack of modes where no call is to be recorded.
    """

    def __init__(
        self, tape: Tape, progress: Progress | None = None, *, enters: bool = True, may_go: bool = False
    ) -> None:
        super().__init__()
        pause_in_backward(WatchedCalls)
        self._calls: Calls | None = None  # within which operations are recorded; None for all
        self._tape = tape
        self.progress: Progress = progress or _Begun()
        # Only the main thread can: by what Python calls in it between two instructions.
        self._may_go = may_go and threading.current_thread() is threading.main_thread()
        self._enters, self._learns = enters, False
        self._seeing: Library | None = None  # what sees writes while the mode is away
        self._last: Any = None  # the C++ that stood for Python last
        self._moment = -1
        self._counts: dict[int, int] = {}  # calls of every function since that moment
        tape.is_within_call = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """What PyTorch calls in place of every function of its own; by way of C++ where that is there."""
        if type(func) is GETTER or _is_traced() or _compiler._is_compiling_flag:
            return func(*args, **kwargs) if kwargs else func(*args)
        name, writes = KNOWN.get(func) or get_to_know(func)
        calls = self._calls
        if kwargs and _is_to_write(kwargs):
            writes = True
        moment = self.progress.moment
        if calls is not None and not writes and (moment not in calls.moments or name not in calls.names):
            return func(*args, **kwargs) if kwargs else func(*args)
        if self._tape.idle:
            return func(*args, **kwargs) if kwargs else func(*args)
        counts = self._counts
        if moment != self._moment:
            self._moment = moment
            counts.clear()
        count = counts[name] = counts.get(name, 0) + 1
        number = (moment * COUNTS + count) * NAMES + name
        if calls is None or writes or number in calls.numbers:
            return self._within(number, func, writes, args, kwargs)
        return func(*args, **kwargs) if kwargs else func(*args)

    def __enter__(self) -> WatchedCalls:
        """A step begins, or goes on after a backward."""
        found = library() if self._may_go else None
        if found is not None and found.see_writes(True):
            self._seeing = found
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """The step is over, or its forward is."""
        within = self._leave_cpp()
        if within is not None and self._calls is not None and self._learns and error[0] is None:
            self._calls.learn(within, self.progress.moment)
        if self._calls is not None and self._seeing is not None:
            self._calls.settle()
        if self._last is not None:
            self._last.leave()  # in backward it could not come back
            self._last = None
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self._seeing is not None:
            self._seeing.see_writes(False)
            self._seeing = None

    def record_within(self, calls: Calls | None) -> None:
        """From now on operations are recorded within these calls; None for all."""
        self._leave_cpp()
        self._calls = calls
        self._learns = self._seeing is not None and self.progress.moment <= _BEGINNING
        found = library()
        if calls is not None and found is not None and _is_told_of_compiling():
            of_step = self, self._tape, self.progress, self._moment, self._counts
            present = calls.present if self._seeing is not None else None
            if present and calls.operators is None:
                calls.operators = found.Operators(calls.numbers)
            operators = calls.operators if present is not None else None
            instead = found.watch(*of_step, calls.numbers, calls.names, calls.moments, present, operators)
            if instead is not None:
                vars(self)["__torch_function__"] = self._last = instead
                _in_cpp.add(self)

    def _leave_cpp(self) -> list[int] | None:
        """The mode is there, and is Python's. Returns what `Calls.learn` asks for, if C++ was to find out."""
        _in_cpp.discard(self)
        instead = vars(self).pop("__torch_function__", None)
        if instead is None:
            return None
        self._moment = instead.moment
        within: list[int] | None = instead.leave()
        return within

    def _within(
        self, number: int, func: Any, writes: bool, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> Any:
        """A call within which operations are recorded."""
        tape = self._tape
        if tape.repeats is not None and not writes and is_plain(tape.kind):
            out = tape.repeats.run(tape, number * PLACES, func, args, kwargs)
            if out is not NOT_REPEATED:
                return out
        return self._record(number, func, writes, args, kwargs or {})

    def _record(self, number: int, func: Any, writes: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tape = self._tape
        if writes:
            keep_counters(tape, args, kwargs)
        elif _takes_whole(tape, number * PLACES):
            again = single(func, args, kwargs)
            if again is not None:
                return tape.record_function(func, *again, number * PLACES, args, kwargs)
        if func in _BACKWARD or tape.is_within_call:
            return func(*args, **kwargs)
        tape.number = number * PLACES
        tape.is_within_call = True
        if self._enters:
            see_operations(tape)
        if tape.repeats is not None:
            tape.within, tape.saved_within = [], []
        try:
            out = func(*args, **kwargs)
        finally:
            tape.is_within_call = False
            if self._enters:
                see_no_more_operations()
            calls, tape.within = tape.within, None
        if tape.repeats is not None and calls is not None and not writes and is_plain(tape.kind):
            tape.repeats.keep_chosen(tape, number * PLACES, func, calls, tape.saved_within, out, args, kwargs)
        return out


def _takes_whole(tape: Tape, number: int) -> bool:
    """Whether what a function does, as a single operation of that number, is to be recorded now, and is no more than it
    was told to do."""
    return tape.wanted is not None and number in tape.wanted and not tape.idle and is_plain(tape.kind)


def is_plain(kind: str) -> bool:
    """Whether a function does now no more than it is told to do, on a device of that kind."""
    return (
        _backward() == -1
        and forward_ad._current_level < 0
        and _with_gradients()
        and not _is_autocast(kind)  # which converts arguments
        and _vmap_level() is None  # whose tensors have no bytes of their own
        and (not _num_modes() or _is_seen_by_no_other())
    )


def _is_seen_by_no_other() -> bool:
    """Whether no mode that was entered before a function's is called next, which may run something else than it. One
    that says on which device new tensors are made does not."""
    return all(type(_mode_at(place)) is DeviceContext for place in range(_num_modes()))


_in_cpp: weakref.WeakSet[WatchedCalls] = weakref.WeakSet()  # those in which C++ stands for Python


def _before_compiling(_: object) -> None:
    for mode in list(_in_cpp):
        mode._leave_cpp()


def _is_told_of_compiling() -> bool:
    """Whether C++ is left when Dynamo begins to compile: it compiles the mode along, and knows only Python."""
    handler = getattr(sys.modules.get("torch._dynamo"), "callback_handler", None)
    told = getattr(handler, "start_callbacks", None)
    if told is None:
        return False
    if _before_compiling not in told:  # `torch._dynamo.reset` forgets all of them
        told.append(_before_compiling)
    return True


@contextmanager
def unwatched() -> Iterator[None]:
    """Leaves the mode, whatever modes are above it, for a call that torch.compile would compile the mode with."""
    above: list[Any] = []
    left: list[Any] = []
    while _num_modes() and not left:
        mode = _pop_mode()
        (left if isinstance(mode, WatchedCalls) else above).append(mode)
    for mode in reversed(above):
        _push_mode(mode)
    try:
        yield
    finally:
        if left:
            for _ in above:
                _pop_mode()
            for mode in (*left, *reversed(above)):
                _push_mode(mode)


def call_of(number: int) -> int:
    """The number of the call within which an operation of that number runs."""
    return number // PLACES


def moment_of(number: int) -> int:
    """The number of the moment after which an operation of that number runs."""
    return _moment_of_call(call_of(number))


def _moment_of_call(number: int) -> int:
    return number // (NAMES * COUNTS)


KNOWN: dict[Any, tuple[int, bool]] = {}


def get_to_know(func: Any) -> tuple[int, bool]:
    """A number for a function's name, and whether it may change a tensor that records of the tape refer to."""
    name = getattr(func, "__qualname__", "") or str(func)
    found = KNOWN[func] = zlib.crc32(name.encode()) % NAMES, _is_writing(func)
    return found


def _is_writing(func: Any) -> bool:
    if isinstance(func, torch._ops.OpOverloadPacket):
        return any(_is_writing(getattr(func, name)) for name in func.overloads())
    if isinstance(func, torch._ops.OpOverload):
        return bool(operator(func).writes or operator(func).write_names)
    name = getattr(func, "__name__", "_")
    if name.startswith("__"):
        return name.startswith("__i") or name in ("__setitem__", "__set__")
    return bool(name.endswith("_"))


def _is_to_write(kwargs: dict[str, Any]) -> bool:
    """Whether what a function is given says that it changes a tensor."""
    return "out" in kwargs or bool(kwargs.get("inplace")) or kwargs.get("max_norm") is not None


NO_CALLS = Calls(())
