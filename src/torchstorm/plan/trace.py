"""One measured step as a value: which storages autograd saved, how large, when made, when needed, when let go.

Time is counted in moments. Moment 0 is the step's entry; every later one is a call of a saved-tensor hook: a `pack`
in forward, an `unpack` in backward. Interval i is the stretch of the user's own work between moments i and i + 1.
Memory only has to be known per interval, because the Session can act at moments and nowhere else.

Storages travel in parcels: a large storage alone, several small ones together (small copies waste the link).

What a storage could be computed from again stands in `ops` and `values`: every operation of the step whose output was
saved, or that one of those can be traced back to. A value is what an operation made: the bytes of one new storage.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torchstorm.errors import PlanError

ENTER, PACK, UNPACK = "enter", "pack", "unpack"


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """One call of a hook, and the interval that follows it.

    Attributes:
        kind: "enter", "pack" or "unpack".
        storage: the storage's number in the step, in the order of first saving; -1 for the entry, and for storages
            that are not the step's own (left over from an earlier one) or not counted (weights).
        nbytes: the storage's bytes, which with kind and storage make up what a later step is compared with.
        compute_s: seconds of the user's own work until the next moment.
        other_bytes: on CUDA, the interval's peak of allocated bytes that the Session does not hold: weights,
            gradients, activations that the model itself still holds, temporaries. 0 on CPU, where they do not count.
        still_bytes: the same at the moment itself, when no kernel of the user's runs: what lies there while the
            Session computes something again. At most `other_bytes` of the interval that follows.
    """

    kind: str
    storage: int
    nbytes: int
    compute_s: float
    other_bytes: int
    still_bytes: int = 0

    @property
    def signature(self) -> tuple[str, int, int]:
        """What must agree for a later step to follow the same plan."""
        return (self.kind, self.storage, self.nbytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedStorage:
    """One storage that autograd saved.

    Attributes:
        nbytes: as the budget counts it.
        made: moment of the first pack.
        owned: first interval in which nobody but autograd holds it, so that moving it away frees memory. On CPU equal
            to `made`: there the budget counts what autograd saved, whoever else holds it.
        needed: moment of the first unpack; the number of moments where the step had none.
        freed: first interval in which autograd has let go; the number of moments where that came after the step.
        parcel: the parcel it travels in, -1 where it may not move (inputs, and storages below 4 KiB).
        block: dotted name of the innermost module that was running when it was saved.
        value: what its bytes are, in `Trace.values`; -1 where it cannot be computed again.
    """

    nbytes: int
    made: int
    owned: int
    needed: int
    freed: int
    parcel: int
    block: str
    value: int = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One operation of the step, as it would be run again: with the same arguments, and random state where it draws.

    Attributes:
        name: "aten.addmm.default".
        compute_s: seconds it takes.
        scratch_bytes: on CUDA, the most it allocates besides its outputs; 0 on CPU.
        inputs: values that it reads. Weights and the model's own inputs are always at hand, and not named.
        outputs: values that it makes, all at once.
        number: its place among all operations that the step recorded.
        signature: a checksum of the names and sizes of all of them up to this one: a later step with the same one has
            come the same way.
    """

    name: str
    compute_s: float
    scratch_bytes: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    number: int = 0
    signature: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """The bytes of one storage as an operation left them.

    Attributes:
        nbytes: of the storage.
        op: what makes it, in `Trace.ops`; -1 where that cannot be run again, so that the bytes must be at hand.
        storage: the saved storage that holds it, in `Trace.storages`; -1 where autograd did not save it.
    """

    nbytes: int
    op: int
    storage: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Parcel:
    """Storages that move together.

    Attributes:
        nbytes: bytes of the copy, padding between small storages included.
        made: moment from which its buffer takes room: the first storage's pack.
        owned: first interval in which its buffer counts against the budget.
        sealed: moment of the last storage's pack, when the copy out can begin.
        needed: moment of the first unpack of any of its storages.
        freed: first interval in which all of its storages have been let go.
        num_storages: how many it holds.
        block: the first storage's block.
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
    """One measured step.

    Attributes:
        device: "cpu" or "cuda".
        moments: all moments, the entry first.
        storages: in the order of first saving.
        parcels: in the order of first saving.
        base_bytes: on CUDA, bytes allocated at the step's entry that are not the Session's; 0 on CPU.
        staging_bytes: constant room on the fast tier's budget for copies under way (on CPU, bounce buffers).
        ops: operations that could be run again, in the order in which the step ran them.
        values: what those made or read.
    """

    device: str
    moments: tuple[Moment, ...]
    storages: tuple[SavedStorage, ...]
    parcels: tuple[Parcel, ...]
    base_bytes: int
    staging_bytes: int
    ops: tuple[Op, ...] = ()
    values: tuple[Value, ...] = ()

    @property
    def num_moments(self) -> int:
        """Moments, and so intervals."""
        return len(self.moments)

    @property
    def saved_bytes(self) -> int:
        """Bytes of all storages that the step saved."""
        return sum(storage.nbytes for storage in self.storages)

    @property
    def compute_s(self) -> float:
        """Seconds of the user's own work in the step."""
        return sum(moment.compute_s for moment in self.moments)

    def to_json(self) -> str:
        """The trace as JSON text."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Trace:
        """Reads what `to_json` wrote.

        Raises:
            PlanError: the text is not a trace.
        """
        try:
            return trace_from_dict(json.loads(text))
        except (ValueError, TypeError, KeyError) as error:
            raise PlanError(f"this is not a trace that torchstorm wrote: {error}") from error


def trace_from_dict(fields: dict[str, Any]) -> Trace:
    """Builds a trace from the dictionary that `dataclasses.asdict` makes of one."""
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
        }
    )


def make_parcels(storages: Sequence[SavedStorage], parcel_bytes: Sequence[int]) -> tuple[Parcel, ...]:
    """Derives the parcels from their storages.

    Args:
        storages: all storages of the step; `parcel` says which one each travels in.
        parcel_bytes: bytes of each parcel's copy.
    """
    members: list[list[SavedStorage]] = [[] for _ in parcel_bytes]
    for storage in storages:
        if storage.parcel >= 0:
            members[storage.parcel].append(storage)
    return tuple(
        Parcel(
            nbytes=nbytes,
            made=min(storage.made for storage in group),
            # Several storages are copied into a buffer of the Session's own, which counts from the start.
            owned=group[0].owned if len(group) == 1 else min(storage.made for storage in group),
            sealed=max(storage.made for storage in group),
            needed=min(storage.needed for storage in group),
            freed=max(storage.freed for storage in group),
            num_storages=len(group),
            block=group[0].block,
        )
        for group, nbytes in zip(members, parcel_bytes, strict=True)
    )
