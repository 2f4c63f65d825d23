"""The trace of a measured step: the storages that autograd saved, and when they were created, needed and freed.

Time is counted in moments. Moment 0 is the start of the step. Every later moment is a call of a saved-tensor hook: a
`pack` in forward or an `unpack` in backward. Interval i is the user's own work between moments i and i + 1. Memory is
recorded per interval, because the Session can act only at moments.

A parcel is the unit of copies: one large storage, or several small ones together (small copies waste bandwidth).

`ops` and `values` describe recomputation: every operation whose output was saved, and the operations that it depends
on. A value is the output of an operation: the bytes of one new storage.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, TypeVar

from torchstorm.errors import PlanError

ENTER, PACK, UNPACK = "enter", "pack", "unpack"


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """One call of a hook, and the interval that follows it.

    Attributes:
        kind: "enter", "pack" or "unpack".
        storage: number of the storage, in the order of first saving; -1 for the start of the step, for storages of an
            earlier step, and for weights, which are not counted.
        nbytes: bytes of the storage. With `kind` and `storage`, they are compared with those of later steps.
        compute_s: seconds of the user's own work until the next moment.
        other_bytes: on CUDA, the interval's peak of allocated bytes outside the Session: weights, gradients,
            activations that the model holds, temporaries. 0 on CPU, where they are not counted.
        still_bytes: as `other_bytes`, but at the moment itself, when no kernel of the user runs. It is the memory
            outside the Session during a recomputation. At most `other_bytes` of the following interval.
    """

    kind: str
    storage: int
    nbytes: int
    compute_s: float
    other_bytes: int
    still_bytes: int = 0

    @property
    def signature(self) -> tuple[str, int, int]:
        """What must be equal for a later step to follow the same plan."""
        return (self.kind, self.storage, self.nbytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedStorage:
    """A storage that autograd saved.

    Attributes:
        nbytes: bytes, as the budget counts them.
        made: moment of the first pack.
        owned: first interval in which only autograd holds it, so that moving it frees memory. On CPU equal to `made`,
            since the budget counts all storages that autograd saved.
        needed: moment of the first unpack; the number of moments if there is none.
        freed: first interval after autograd has released it; the number of moments if that is after the step.
        parcel: number of its parcel; -1 if it is not moved (inputs, and storages below 4 KiB).
        block: qualified name of the innermost module that ran when it was saved.
        value: its index in `Trace.values`; -1 if it cannot be recomputed.
    """

    nbytes: int
    made: int
    owned: int
    needed: int
    freed: int
    parcel: int
    block: str
    value: int = -1

    def is_of(self, block: str) -> bool:
        """Whether it was saved within a block, named as in `block`."""
        return self.block == block or self.block.startswith(f"{block}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """An operation of the step that can run again with the same arguments and random state.

    Attributes:
        name: "aten.addmm.default".
        compute_s: duration in seconds.
        scratch_bytes: on CUDA, peak of allocated bytes besides its outputs; 0 on CPU.
        inputs: values that it reads, without weights and inputs of the model, which always exist.
        outputs: values that it creates.
        number: tells it from the step's other operations. The same operation of a later step has the same number.
    """

    name: str
    compute_s: float
    scratch_bytes: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    number: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """The content of a storage after an operation.

    Attributes:
        nbytes: bytes of the storage.
        op: index in `Trace.ops` of the operation that creates it; -1 if it cannot run again.
        storage: index in `Trace.storages` of the saved storage with this value; -1 if autograd did not save it.
    """

    nbytes: int
    op: int
    storage: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCost:
    """What following a plan takes the host of a GPU in forward. It counts where the host comes late, so that the device
    waits for it.

    Attributes:
        record_s: seconds per operation that is recorded to run again.
        move_s: seconds per storage that moves; small ones that move together are copied into one buffer one by one.
        idle_s: seconds of that which the device hardly notices, since it is the one that comes late.
        fuses: whether pointwise operations that run again one behind another do so in one kernel.
    """

    record_s: float = 0.0
    move_s: float = 0.0
    idle_s: float = 0.0
    fuses: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Parcel:
    """Storages that move together.

    Attributes:
        nbytes: bytes of the copy, padding between small storages included.
        made: moment when its buffer is allocated: the first storage's pack.
        owned: first interval in which its buffer counts against the budget.
        sealed: moment of the last storage's pack, when the copy out can start.
        needed: moment of the first unpack of any of its storages.
        freed: first interval after all its storages are released.
        num_storages: number of storages.
        block: block of the first storage.
    """

    nbytes: int
    made: int
    owned: int
    sealed: int
    needed: int
    freed: int
    num_storages: int
    block: str


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The trace of one measured step.

    Attributes:
        device: "cpu" or "cuda".
        moments: all moments; the first is the start of the step.
        storages: saved storages in the order of first saving.
        parcels: parcels in the order of first saving.
        base_bytes: on CUDA, bytes allocated outside the Session at the start of the step; 0 on CPU.
        staging_bytes: constant part of the fast tier's budget for copies in progress (on CPU, bounce buffers).
        ops: operations that can run again, in the order of the step.
        values: their inputs and outputs.
        host: what following a plan takes the host.
        blocks_s: names of compiled blocks, whose operations nobody sees, and the seconds that the forward of each takes
            a GPU by itself; where that was timed.
    """

    device: str
    moments: tuple[Moment, ...]
    storages: tuple[SavedStorage, ...]
    parcels: tuple[Parcel, ...]
    base_bytes: int
    staging_bytes: int
    ops: tuple[Op, ...] = ()
    values: tuple[Value, ...] = ()
    host: HostCost = HostCost()
    blocks_s: tuple[tuple[str, float], ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        # Thousands of objects are pickled several times as fast by the values in them. It holds Python's lock.
        return {**vars(self), **{name: [*map(_VALUES_OF[kind], vars(self)[name])] for name, kind in _LISTED.items()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        lists = {name: tuple(_made_of(kind, values) for values in state[name]) for name, kind in _LISTED.items()}
        vars(self).update(state, **lists)

    @property
    def num_moments(self) -> int:
        """Number of moments, which is also the number of intervals."""
        return len(self.moments)

    @property
    def turn(self) -> int:
        """The moment at which backward first asks for something, which is the number of intervals before; the number of
        moments if it never does."""
        return next((at for at, one in enumerate(self.moments) if one.kind == UNPACK), self.num_moments)

    def first_save(self, block: str) -> int:
        """The moment at which something was first saved within a block, named as in `SavedStorage.block`; the number of
        moments if nothing was."""
        return min((one.made for one in self.storages if one.is_of(block)), default=self.num_moments)

    @cached_property
    def saved_bytes(self) -> int:
        """Bytes of all saved storages."""
        return sum(storage.nbytes for storage in self.storages)

    @property
    def compute_s(self) -> float:
        """Seconds of the user's own work in the step."""
        return sum(moment.compute_s for moment in self.moments)

    @property
    def forward_s(self) -> float:
        """The same before backward first asks for something."""
        return sum(moment.compute_s for moment in self.moments[: self.turn])

    def to_json(self) -> str:
        """The trace as JSON text."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Trace:
        """Parses the text of `to_json`.

        Raises:
            PlanError: the text is not a trace.
        """
        try:
            return trace_from_dict(json.loads(text))
        except (ValueError, TypeError, KeyError) as error:
            raise PlanError(f"the text is not a trace written by torchstorm: {error}") from error


_LISTED: dict[str, type] = {"moments": Moment, "storages": SavedStorage, "parcels": Parcel, "ops": Op, "values": Value}
_VALUES_OF = {kind: attrgetter(*(one.name for one in fields(kind))) for kind in _LISTED.values()}
_SLOTS_OF = {kind: tuple(getattr(kind, one.name) for one in fields(kind)) for kind in _LISTED.values()}


def _made_of(kind: type, values: Iterable[Any]) -> Any:
    """As `kind(...)` with values in the order of its fields, in a fraction of the time."""
    made: Any = object.__new__(kind)
    for slot, value in zip(_SLOTS_OF[kind], values, strict=True):
        slot.__set__(made, value)
    return made


_Timed = TypeVar("_Timed", Moment, Op)


def taking(timed: Iterable[_Timed], seconds: Iterable[float]) -> tuple[_Timed, ...]:
    """Moments or operations, in order, that take so many seconds. What takes as long as before is not copied: there are
    thousands of them, a copy takes 6 us, and a step may wait for all."""
    return tuple(
        one if one.compute_s == took else replace(one, compute_s=took) for one, took in zip(timed, seconds, strict=True)
    )


def slower(trace: Trace, times: float) -> Trace:
    """The trace with operations, and compiled blocks by themselves, that take so many times as long."""
    blocks_s = tuple((name, seconds * times) for name, seconds in trace.blocks_s)
    return replace(trace, ops=taking(trace.ops, (op.compute_s * times for op in trace.ops)), blocks_s=blocks_s)


def trace_from_dict(fields: dict[str, Any]) -> Trace:
    """Creates a trace from the result of `dataclasses.asdict`."""
    return Trace(
        **{
            **fields,
            "moments": tuple(Moment(**moment) for moment in fields["moments"]),
            "storages": tuple(SavedStorage(**storage) for storage in fields["storages"]),
            "parcels": tuple(Parcel(**parcel) for parcel in fields["parcels"]),
            "ops": tuple(
                Op(**{**op, "inputs": tuple(op["inputs"]), "outputs": tuple(op["outputs"])}) for op in fields["ops"]
            ),
            "values": tuple(Value(**value) for value in fields["values"]),
            "host": HostCost(**fields.get("host", {})),
            "blocks_s": tuple((name, seconds) for name, seconds in fields.get("blocks_s", ())),
        }
    )


def num_shared(trace: Trace, other: Trace) -> int:
    """How many moments two steps begin with alike, but for sizes."""
    pairs = enumerate(zip(trace.moments, other.moments, strict=False))
    parted = (at for at, (one, two) in pairs if (one.kind, one.storage) != (two.kind, two.storage))
    return next(parted, min(trace.num_moments, other.num_moments))


def without_origin(trace: Trace, storage: int) -> Trace:
    """The same step where it is not known what has made a storage, so that it cannot be recomputed."""
    storages, values = list(trace.storages), list(trace.values)
    value = storages[storage].value
    storages[storage] = replace(storages[storage], value=-1)
    if value >= 0 and values[value].storage == storage:
        values[value] = replace(values[value], storage=-1)
    return replace(trace, storages=tuple(storages), values=tuple(values))


def make_parcels(storages: Sequence[SavedStorage], parcel_bytes: Sequence[int]) -> tuple[Parcel, ...]:
    """Creates the parcels from their storages.

    Args:
        storages: all storages of the step; `parcel` is the number of each one's parcel.
        parcel_bytes: bytes of each parcel.
    """
    members: list[list[SavedStorage]] = [[] for _ in parcel_bytes]
    for storage in storages:
        if storage.parcel >= 0:
            members[storage.parcel].append(storage)
    return tuple(
        Parcel(
            nbytes=nbytes,
            made=min(storage.made for storage in group),
            # Several storages are copied into a buffer of the Session, which counts from its allocation.
            owned=group[0].owned if len(group) == 1 else min(storage.made for storage in group),
            sealed=max(storage.made for storage in group),
            needed=min(storage.needed for storage in group),
            freed=max(storage.freed for storage in group),
            num_storages=len(group),
            block=group[0].block,
        )
        for group, nbytes in zip(members, parcel_bytes, strict=True)
    )
