"""Simulates recomputation: which operations run again, when, and in which order.

A recomputed storage is computed at the moment when it is first needed, by running its operation again. Inputs that
autograd still holds (kept, or moved and fetched by then) are used as they are. Other inputs are computed, too. One that
is itself a recomputed parcel and is needed later stays from then on; any other is freed after the last operation that
reads it. All outputs of an operation are created together; unused ones are freed with it.

The Session does exactly the same (`offload.recompute.replay`), so bytes and operations here are those of the real step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torchstorm.plan.trace import Trace

RECOMPUTE = "recompute"

POINTWISE = frozenset(
    {"_to_copy", "abs", "add", "bfloat16", "cos", "div", "divide", "exp", "float", "gelu", "half", "mul", "multiply"}
    | {"neg", "negative", "pow", "reciprocal", "rsqrt", "rsub", "sigmoid", "silu", "sin", "sqrt", "square", "sub"}
    | {"subtract", "tanh", "to", "true_divide"}
)
"""PyTorch's pointwise operations that run again in one kernel where they lie one behind another, without their rooms
and overloads."""

_STAYS, _GONE, _BACK = 0, 1, 2  # a parcel is: not recomputed; not yet recomputed; already recomputed
_REMEMBERED = 12  # cached replays per parcel


class HasTier(Protocol):
    """The part of a placement that is used here."""

    @property
    def tier(self) -> str:
        """ "keep", "recompute", "ram" or "disk"."""


@dataclass(eq=False)
class Replay:
    """The recomputation at one moment.

    Attributes:
        ops: operations in the order in which they run.
        made: parcels that exist from this moment on.
        sources: parcels that it reads. Moved ones must be back by then.
        transient_bytes: peak of temporarily allocated bytes.
        compute_s: time of all its operations.
        seconds: that, and what recording them takes the host in forward.
    """

    ops: list[int] = field(default_factory=list)
    made: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    transient_bytes: int = 0
    seconds: float = 0.0
    compute_s: float = 0.0


def can_recompute(trace: Trace) -> list[bool]:
    """For every parcel, whether it can be recomputed while all others are kept. Such a parcel has one storage, whose
    operation can run again from values that exist when it is needed."""
    replayer = Replayer(trace)
    return [replayer.alone(number) is not None for number in range(len(trace.parcels))]


def _is_pointwise(name: str) -> bool:
    room, base, *_ = *name.split("."), ""
    return room in ("aten", "torch") and base in POINTWISE


def replays(trace: Trace, placements: Sequence[HasTier]) -> dict[int, Replay] | None:
    """Simulates the recomputation of every parcel with the placement "recompute".

    Args:
        trace: the step.
        placements: one per parcel; only `tier` is used.

    Returns:
        Moment -> its recomputation; None if a parcel cannot be recomputed from the values that exist then.
    """
    recomputed = [number for number, placement in enumerate(placements) if placement.tier == RECOMPUTE]
    return Replayer(trace).play(recomputed) if recomputed else {}


class Replayer:
    """Simulates recomputations of one trace. It caches results per parcel, since the plans of a search are similar.

    Args:
        trace: the step.
    """

    def __init__(self, trace: Trace) -> None:
        self.num = trace.num_moments
        self._op_of = [value.op for value in trace.values]
        self._bytes_of = [value.nbytes for value in trace.values]
        self._storage_of = [value.storage for value in trace.values]
        self._ops = trace.ops
        self._record_s = trace.host.record_s
        self._is_pointwise = [trace.host.fuses and _is_pointwise(op.name) for op in trace.ops]
        self._made = [storage.made for storage in trace.storages]
        # What autograd still holds when the step is over is at hand then, too: at a moment beyond the last one.
        self._freed = [storage.freed + (storage.freed >= self.num) for storage in trace.storages]
        self._parcel_of = [storage.parcel for storage in trace.storages]
        self._needed = [parcel.needed for parcel in trace.parcels]
        by_need = sorted(range(len(self._needed)), key=lambda number: (self._needed[number], number))
        self._need_rank = {number: rank for rank, number in enumerate(by_need)}
        self._never_needed = {
            number for number, parcel in enumerate(trace.parcels) if parcel.freed < self.num <= parcel.needed
        }
        self._value_of = {
            storage.parcel: storage.value
            for storage in trace.storages
            if storage.parcel >= 0
            and trace.parcels[storage.parcel].num_storages == 1
            and storage.value >= 0
            and trace.values[storage.value].op >= 0
        }
        # Per parcel: results, with the states of the other parcels that they depend on.
        self._known: dict[int, list[tuple[tuple[tuple[int, int], ...], Replay | None]]] = {}

    def alone(self, number: int) -> Replay | None:
        """The recomputation of one parcel while all others are kept; None if impossible."""
        if number not in self._value_of:
            return None
        if number in self._never_needed:
            return Replay()
        state = [_STAYS] * len(self._needed)
        state[number] = _GONE
        replay = self._found(number, state)
        return replay if replay is None or self._needed[number] < self.num else Replay()  # a later step computes it

    def play(self, recomputed: Iterable[int]) -> dict[int, Replay] | None:
        """Moment -> its recomputation, in order; None if impossible.

        Args:
            recomputed: numbers of the recomputed parcels.
        """
        order = sorted(recomputed, key=self._need_rank.__getitem__)
        state = [_STAYS] * len(self._needed)
        for number in order:
            if number not in self._value_of:
                return None
            state[number] = _GONE
        found: dict[int, Replay] = {}
        for number in order:
            moment = self._needed[number]
            if state[number] != _GONE or number in self._never_needed:
                continue
            replay = self._found(number, state)
            if replay is None:
                return None
            if moment >= self.num:
                continue
            for made in replay.made:
                state[made] = _BACK
            found[moment] = replay
        return found

    def _found(self, number: int, state: list[int]) -> Replay | None:
        known = self._known.setdefault(number, [])
        for states, replay in known:
            for parcel, then in states:
                if state[parcel] != then:
                    break
            else:
                return replay
        seen: dict[int, int] = {}
        replay = self._compute(number, state, seen)
        if len(known) >= _REMEMBERED:
            known.pop()
        known.insert(0, (tuple(seen.items()), replay))
        return replay

    def _compute(self, number: int, state: list[int], seen: dict[int, int]) -> Replay | None:
        """Simulates the recomputation of a parcel when it is needed. Adds the states that it depends on to `seen`."""
        moment = self._needed[number]
        replay = Replay()
        there: set[int] = set()  # values that exist
        made: list[tuple[int, int, bool, bool]] = []  # (index of the operation, value, stays, is read)

        def at_hand(value: int) -> bool:
            if value in there:
                return True
            storage = self._storage_of[value]
            if storage < 0 or not self._made[storage] <= moment < self._freed[storage]:
                return False
            parcel = self._parcel_of[storage]
            if parcel >= 0:
                seen[parcel] = state[parcel]
                if state[parcel] == _GONE:
                    return parcel in replay.made
                if state[parcel] == _STAYS and parcel not in replay.sources:
                    replay.sources.append(parcel)
            there.add(value)
            return True

        wanted = [self._value_of[number]]
        while wanted:
            if at_hand(wanted[-1]):
                wanted.pop()
                continue
            index = self._op_of[wanted[-1]]
            if index < 0:
                return None
            op = self._ops[index]
            missing = [value for value in op.inputs if not at_hand(value)]
            if missing:
                wanted += reversed(missing)
                continue
            replay.ops.append(index)
            replay.compute_s += op.compute_s
            replay.seconds += op.compute_s + self._record_s
            for output in op.outputs:
                is_read = output not in there  # otherwise the existing value is read
                there.add(output)
                storage = self._storage_of[output]
                parcel = self._parcel_of[storage] if storage >= 0 else -1
                if parcel >= 0:
                    seen[parcel] = state[parcel]
                    if state[parcel] == _GONE and self._made[storage] <= moment < self._freed[storage]:
                        replay.made.append(parcel)
                        made.append((len(replay.ops) - 1, output, True, True))
                        continue
                made.append((len(replay.ops) - 1, output, False, is_read))
        replay.transient_bytes = self._transient_bytes(replay.ops, made)
        if saved_s := self._saved_s(replay.ops, {value for _, value, stays, _ in made if stays}):
            replay.compute_s -= saved_s
            replay.seconds -= saved_s
        return replay

    def _saved_s(self, ops: list[int], stay: set[int]) -> float:
        """Seconds that pointwise operations take less in one kernel: as much as they read and write less."""
        saved_s, at = 0.0, 0
        while at < len(ops):
            end = at
            while end < len(ops) and self._goes_with(ops[at], ops[end]):
                end += 1
            if end > at + 1:
                group = [self._ops[index] for index in ops[at:end]]
                read = [value for op in group for value in op.inputs]
                made = {value for op in group for value in op.outputs}
                later = {value for index in ops[end:] for value in self._ops[index].inputs}
                moved = self._bytes(set(read) - made) + self._bytes(made & (stay | later))
                share = moved / (self._bytes(read) + self._bytes(made))
                saved_s += (1 - share) * sum(op.compute_s for op in group)
            at = max(end, at + 1)
        return saved_s

    def _goes_with(self, first: int, other: int) -> bool:
        """Whether two operations may be of one kernel: dtypes that differ have other bytes for as many elements."""
        if not (self._is_pointwise[first] and self._is_pointwise[other]):
            return False
        one, another = (self._bytes(self._ops[index].outputs) for index in (first, other))
        return another <= 2 * one and one <= 2 * another

    def _bytes(self, values: Iterable[int]) -> int:
        return sum(self._bytes_of[value] for value in values)

    def _transient_bytes(self, ops: list[int], made: list[tuple[int, int, bool, bool]]) -> int:
        """Peak of temporarily allocated bytes, without values that stay."""
        last = {value: place for place, index in enumerate(ops) for value in self._ops[index].inputs}
        changes = [0] * (len(ops) + 1)
        stay_bytes = 0
        for place, value, stays, is_read in made:
            nbytes = self._bytes_of[value]
            changes[place] += nbytes
            if stays:
                stay_bytes += nbytes
            else:
                changes[(last.get(value, place) if is_read else place) + 1] -= nbytes
        live = peak = 0
        for index, change in zip(ops, changes, strict=False):
            live += change
            peak = max(peak, live + self._ops[index].scratch_bytes)
        return peak - stay_bytes
