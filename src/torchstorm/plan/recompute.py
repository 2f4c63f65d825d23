"""What runs again, when, and in which order, once it is decided which parcels are computed again.

At the moment when a recomputed storage is first needed, its operation runs again. An input of that operation is used
where it lies if autograd still holds it there (kept, or moved and fetched by then). Otherwise it is computed too: one
that was itself to be recomputed and is still going to be needed stays from then on; any other is let go when the moment
is over. All outputs of an operation appear together; those that nobody waits for are let go likewise.

The Session does exactly this (`offload.replay`), so bytes and operations here are those of the real step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torchstorm.plan.trace import Trace

RECOMPUTE = "recompute"


class HasTier(Protocol):
    """A placement, as far as it matters here."""

    @property
    def tier(self) -> str:
        """ "keep", "recompute", "ram" or "disk"."""


@dataclass(eq=False)
class Replay:
    """What is computed again at one moment.

    Attributes:
        ops: operations in the order in which they run.
        made: parcels whose bytes are there from this moment on.
        sources: parcels whose bytes it reads; those that moved must be back by then.
        transient_bytes: bytes that are allocated on top meanwhile, and gone when the moment is over.
        seconds: of all its operations.
    """

    ops: list[int] = field(default_factory=list)
    made: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    transient_bytes: int = 0
    seconds: float = 0.0


def can_recompute(trace: Trace) -> list[bool]:
    """For every parcel, whether it may be computed again while all others stay: one storage, made by something that can
    run again from what is there when it is needed."""
    single = _single(trace)
    return [
        number in single
        and (
            parcel.needed >= trace.num_moments or _play(trace, single[number], parcel.needed, {number}, set(), Replay())
        )
        for number, parcel in enumerate(trace.parcels)
    ]


def replays(trace: Trace, placements: Sequence[HasTier]) -> dict[int, Replay] | None:
    """Plays the recomputation of every parcel placed on "recompute".

    Args:
        trace: the step.
        placements: one per parcel; only `tier` is looked at.

    Returns:
        By moment, what is computed again there; None where one cannot be computed from what is there then.
    """
    recomputed = {number for number, placement in enumerate(placements) if placement.tier == RECOMPUTE}
    if not recomputed:
        return {}
    single = _single(trace)
    if not recomputed <= single.keys():
        return None
    there: set[int] = set()
    found: dict[int, Replay] = {}
    for number in sorted(recomputed, key=lambda number: (trace.parcels[number].needed, number)):
        moment = trace.parcels[number].needed
        if number in there or moment >= trace.num_moments:
            continue
        replay = found.setdefault(moment, Replay())
        if not _play(trace, single[number], moment, recomputed, there, replay):
            return None
    return found


def _play(trace: Trace, target: int, moment: int, recomputed: set[int], there: set[int], replay: Replay) -> bool:
    """Computes storage `target` at `moment`; adds to `there` and `replay`. False where that is impossible."""
    transient: set[int] = set()  # values that exist until the moment is over
    scratch = 0
    wanted = [trace.storages[target].value]
    while wanted:
        value = wanted[-1]
        if value in transient or _at_hand(trace, value, moment, recomputed, there, replay):
            wanted.pop()
            continue
        number = trace.values[value].op
        if number < 0:
            return False
        op = trace.ops[number]
        missing = [
            other
            for other in op.inputs
            if other not in transient and not _at_hand(trace, other, moment, recomputed, there, replay)
        ]
        if missing:
            wanted += reversed(missing)
            continue
        replay.ops.append(number)
        replay.seconds += op.compute_s
        scratch = max(scratch, op.scratch_bytes)
        for output in op.outputs:
            storage = trace.values[output].storage
            parcel = trace.storages[storage].parcel if storage >= 0 else -1
            stays = (
                parcel in recomputed
                and parcel not in there
                and trace.storages[storage].made <= moment < trace.storages[storage].freed
            )
            if stays:
                there.add(parcel)
                replay.made.append(parcel)
            elif output not in transient:
                transient.add(output)
                replay.transient_bytes += trace.values[output].nbytes
    replay.transient_bytes += scratch
    return True


def _at_hand(trace: Trace, value: int, moment: int, recomputed: set[int], there: set[int], replay: Replay) -> bool:
    storage = trace.values[value].storage
    if storage < 0:
        return False
    saved = trace.storages[storage]
    if not saved.made <= moment < saved.freed:
        return False
    if saved.parcel < 0:
        return True
    if saved.parcel in recomputed:
        return saved.parcel in there
    if saved.parcel not in replay.sources:
        replay.sources.append(saved.parcel)
    return True


def _single(trace: Trace) -> dict[int, int]:
    """The parcels of one storage that has an operation to make it again, and which storage that is."""
    return {
        storage.parcel: number
        for number, storage in enumerate(trace.storages)
        if storage.parcel >= 0
        and trace.parcels[storage.parcel].num_storages == 1
        and storage.value >= 0
        and trace.values[storage.value].op >= 0
    }
