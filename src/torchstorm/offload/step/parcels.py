"""What the Session knows while a step runs: every saved storage, and the recorded operations that made its bytes."""

from __future__ import annotations

import enum
import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torchstorm.errors import OutOfVRAMError, TorchstormError, UnsupportedError
from torchstorm.memory.tier import Copy, Handle, Tier
from torchstorm.offload.recompute.operators import Operator
from torchstorm.offload.step.views import View, weak_reference
from torchstorm.storage.aligned import round_down, round_up

_ALIGNMENT = 512

TINY_BYTES = 4096
"""What no record knows and is smaller is kept for the records that use it."""


class Place(enum.Enum):
    """Where the bytes of a parcel are."""

    HERE = "on the fast device alone"
    BOTH = "there and on another tier: their copy out has begun, or they are back"
    COMING = "on another tier, and on their way back"
    AWAY = "on another tier alone"
    ABSENT = "nowhere: they must be computed again"


@dataclass(eq=False, slots=True)
class Parcel:
    """Storages that move together, and where they are now.

    Attributes:
        nbytes: as counted on the fast tier and copied to another.
        block: module that saved the first one, for messages.
        movable: False for what must stay (inputs, and what is too small to be worth a copy).
        order: place in the order of making, over all steps.
        buffer: what `View.over` takes, on the fast device, while resident; else None. Always (nbytes,) uint8 but where
            its bytes were computed again.
        hold: for a single storage, an alias that shares the version counter of what was saved.
        shared: whether the buffer is the Session's own, with copies of several small storages in it.
        filled: bytes of a shared buffer in use.
        num_joined: how many storages it took.
        sealed: whether no further storage joins.
        tier, handle: where its bytes also lie, once a copy out was begun.
        back: the copy into `buffer` that has not been waited for yet.
        used: whether an unpack has been answered from the present buffer.
        members: its storages that autograd still holds.
        number: place among the parcels of the step's trace or plan, -1 where it has none.
        recomputed: whether its bytes were let go when they were saved, to be computed again.
    """

    nbytes: int
    block: str
    movable: bool
    order: int
    buffer: torch.Tensor | None = None
    hold: torch.Tensor | None = None
    shared: bool = False
    filled: int = 0
    num_joined: int = 0
    sealed: bool = True
    tier: Tier | None = None
    handle: Handle | None = None
    back: Copy | None = None
    used: bool = False
    members: set[Saved] = field(default_factory=set)
    number: int = -1
    recomputed: bool = False

    @property
    def place(self) -> Place:
        """Where its bytes are."""
        if self.buffer is None:
            return Place.ABSENT if self.handle is None else Place.AWAY
        if self.handle is None:
            return Place.HERE
        return Place.BOTH if self.back is None else Place.COMING

    @property
    def num_aliases(self) -> int:
        """How many tensors of the Session's own refer to the memory that the buffer is in."""
        ours = {id(self.buffer), id(self.hold)}
        for saved in self.members:
            ours.add(id(saved.base))
            ours.update(map(id, saved.kept.values()))
        return len(ours - {id(None)})


@dataclass(eq=False, slots=True)
class Saved:
    """One storage at one version, saved by autograd at least once.

    Attributes:
        parcel: what it travels in.
        nbytes: bytes of the storage.
        offset: its first byte within the parcel.
        version: autograd's version counter when it was saved.
        counter: shares that version counter, but not the memory; None as long as the parcel's `hold` does.
        watch: keeps the storage's address from being used again for another one.
        pointer: where the storage's memory was.
        block: module that saved it, for messages.
        live: how many saved tensors refer to it.
        ordinal: its number in the step that is running or last ran, -1 once that is over.
        address: where the storage was.
        base: what `View.over` takes for bytes that came back; all views of them share its version counter. None before.
        base_version: its version counter when it was made.
        kept: tensors that are handed back as they were, by handle.
        stale: whether its bytes changed in place while they were being copied.
        value: where its bytes come from, where the step is recorded.
        root: what the tensor that was saved is a view of, or itself; None where that is not known.
        origin: the tensor that was saved, which shares the version counter as long as it lives, in place of `counter`.
        fingerprint: with self-check, of bytes that are to be computed again, as they were saved.
        lost: makes the error to raise where its bytes, which were let go, are asked for; None where they were not.
    """

    parcel: Parcel
    nbytes: int
    offset: int
    version: int
    counter: torch.Tensor | None
    address: int
    watch: StorageWeakRef
    pointer: int
    block: str
    live: int = 0
    ordinal: int = -1
    base: torch.Tensor | None = None
    base_version: int = 0
    kept: dict[int, torch.Tensor] = field(default_factory=dict)
    stale: bool = False
    value: Value | None = None
    root: weakref.ref[torch.Tensor] | None = None
    origin: weakref.ref[torch.Tensor] | None = None
    fingerprint: torch.Tensor | None = None
    lost: Callable[[], TorchstormError] | None = None

    @property
    def has_other_memory(self) -> bool:
        """Whether the storage is still there, and has been given other memory, or none."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.watch.cdata)
        return storage is not None and storage.data_ptr() != self.pointer

    @property
    def token(self) -> torch.Tensor | None:
        """A tensor that shares the version counter; None where none does any more that could change the bytes."""
        if self.counter is not None:
            return self.counter
        return self.origin() if self.origin is not None else self.parcel.hold


class Value:
    """The bytes of one storage, as one operation left them.

    Attributes:
        nbytes: of the storage.
        call: the operation that made them; None where that is not known or cannot run again.
        saved: the record of the same bytes saved by autograd, as long as it holds them.
        held: a tensor with these bytes and its version, where a recorded operation reads them, and nothing else tells
            where they are to be had.
        lost: makes the error to raise where nothing can make its bytes, which were let go; None where they were not.
        is_read: whether an operation reads them that only those that a plan needs were recorded with.
        watch: keeps the storage's address from being used again for another one.
        version: autograd's version counter when they were there.
        out: the tensor that a function returned with them, as long as nothing changes it; None where none is known.
        root: what that is a view of, as a product with a bias is, or itself.
        view: how that looks at the storage.
        saved_before: the record of the same in an earlier step, of which nothing is left.
        again: what made it when it was last computed again.
    """

    __slots__ = (
        *("__weakref__", "again", "call", "held", "is_read", "lost", "nbytes", "out", "saved"),
        *("root", "saved_before", "version", "view", "watch"),
    )

    def __init__(self, nbytes: int, call: Call | None, watch: StorageWeakRef | None = None, version: int = 0) -> None:
        self.nbytes = nbytes
        self.call = call
        self.watch = watch
        self.version = version
        self.saved: Saved | None = None
        self.held: tuple[torch.Tensor, int] | None = None
        self.lost: Callable[[], TorchstormError] | None = None
        self.is_read = False
        self.out: weakref.ref[torch.Tensor] | None = None
        self.root: weakref.ref[torch.Tensor] | None = None
        self.view: View | None = None
        self.saved_before: Saved | None = None
        self.again: Chain | None = None

    @property
    def absent(self) -> Saved | None:
        """The record of its bytes saved by autograd, where they are nowhere now; else None."""
        saved = self.saved
        return saved if saved is not None and saved.parcel.place is Place.ABSENT else None

    def renew(self, storage: torch.UntypedStorage, version: int, before: Value | None) -> None:
        """A later step makes it again, in another storage, in which lay what was there before."""
        self.watch = weak_reference(storage) if before is None else before.watch
        self.version, self.nbytes = version, storage.nbytes()
        self.saved = self.held = self.lost = None


@dataclass(eq=False, slots=True)
class Leaf:
    """A tensor that no operation of the step made: a weight, an input, a constant.

    Attributes:
        tensor: itself.
        version: autograd's version counter when it was read.
        address: of its storage; 0 where it cannot have another one.
    """

    tensor: torch.Tensor
    version: int
    address: int = 0


class Ref(NamedTuple):
    """An argument that an earlier operation made."""

    value: Value
    view: View


@dataclass(eq=False, slots=True)
class Call:
    """One operation as it was called.

    Attributes:
        device: where its outputs are.
        func: the operator.
        operator: what it does to its arguments.
        args, kwargs: as they were, each tensor replaced by a `Ref` or a `Leaf`.
        inputs: the values among them that are needed to run it again, each once.
        outputs: the values it made; dead where nobody has a use for one any more.
        places: which of its output tensors holds each of those.
        state: random state that it drew from, None for an operation that draws none.
        number: as in `plan.trace.Op`.
        order: its place among the operations that were recorded.
        scratch_bytes: as in `plan.trace.Op`.
        marks: when it began and ended, where times are measured.
    """

    device: torch.device
    func: Any
    operator: Operator
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[Value]
    outputs: list[weakref.ref[Value]]
    places: list[int]
    state: torch.Tensor | None
    number: int
    order: int
    scratch_bytes: int = 0
    marks: tuple[object, object] | None = None


class Chain:
    """The operations that make a value, in order, and what they begin with. It serves each step that does the same.

    Args:
        calls: the operations.
        sources: values that are there before any of them has run.
        num_before: how many have made the same value before.

    Attributes:
        fused: how it runs with pointwise operations in one kernel (`recompute.fused`); None where each runs by itself.
        prepared: the same before its kernels are compiled and compared.
    """

    __slots__ = ("__weakref__", "calls", "frees", "fused", "inputs", "num_before", "passed", "prepared", "sources")

    def __init__(self, calls: list[Call], sources: list[Value], num_before: int = 0) -> None:
        self.num_before = num_before
        self.calls = calls
        self.sources = sources
        self.fused: Any = None
        self.prepared: Any = None
        self.inputs = [call.inputs for call in calls]
        last = {one: at for at, call in enumerate(calls) for one in call.inputs}
        self.frees: list[list[Value]] = [[] for _ in calls]  # after each operation, what none reads that follows
        for one, at in last.items():
            self.frees[at].append(one)
        self.passed = last.keys() - set(sources)  # what one operation makes and another reads

    def serves(self, value: Value) -> bool:
        """Whether just these operations would make a value now, from the same that they began with."""
        if value.call is not self.calls[-1]:
            return False
        for call, inputs in zip(self.calls, self.inputs, strict=True):
            if call.inputs is not inputs:
                return False
        for one in self.passed:
            saved = one.saved
            if one.held is not None or (saved is not None and saved.parcel.place is not Place.ABSENT):
                return False
        return True


def is_made_by(call: Call, maker: tuple[int, str]) -> bool:
    """Whether an operation is the one that a plan names, by number and name. A function that is recorded as a whole,
    and is part of that number, runs no other."""
    number, name = maker
    return call.number == number and (call.operator.name == name or call.operator.name.startswith("torch."))


def bytes_in_a_buffer(nbytes: int) -> int:
    """What a storage takes of a buffer that it shares with others, where each begins as the CUDA allocator's own do."""
    return round_up(nbytes, _ALIGNMENT)


def whole_places(nbytes: int) -> int:
    """What of so many bytes a buffer for small storages can take: each has whole places there."""
    return round_down(nbytes, _ALIGNMENT)


@functools.cache
def label_of(block: str) -> str:
    """What messages call a tensor that a module has saved."""
    return f"a tensor saved in {block or 'the model'}"


def dropped_error() -> OutOfVRAMError:
    """For a saved tensor whose step ran out of memory."""
    return OutOfVRAMError("The step that saved this tensor ran out of memory and was dropped: run it again.")


def resized_error(block: str) -> UnsupportedError:
    """For a saved tensor whose storage has been resized since."""
    return UnsupportedError(
        f"The memory of a tensor saved in {block or 'the model'} was freed or replaced before backward used it (as by "
        "untyped_storage().resize_). A Session cannot tell what it should hold now: leave the memory of such a tensor "
        "alone and give the Session a smaller budget instead, or run that module without one."
    )


def in_place_error(version: int, expected: int, dtype: torch.dtype, size: Sequence[int]) -> RuntimeError:
    """What autograd itself raises for a saved tensor that was changed, in its own words."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{dtype} {list(size)}] is at version {version}; expected version {expected} instead. Hint: enable anomaly "
        "detection to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True)."
    )
