"""The trace of a step of other sizes, foreseen from traces of such steps: a plan belongs to a sequence of operations,
and its bytes follow the sizes of the model's input.

The bytes of a tensor are a product of sizes (batch x length x width, or length x length), or rise in equal steps with
one of them. Which it is follows from traces of different sizes, and must fit all of them to the byte; where it does
not, nothing is foreseen.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product

from torchstorm.plan.packing import Buffers, Packing
from torchstorm.plan.trace import UNPACK, SavedStorage, Trace, make_parcels
from torchstorm.plan.typical import spare_s, with_forward

_HIGHEST_POWER = 2  # of one size in a tensor's bytes
_MOST_SIZES = 3  # that change
_MOST_MORE = 8  # than a size: a label more than tokens, what pads a convolution
_FARTHEST = 4.0  # times as far from the largest trace as that is from the next


@dataclass(frozen=True)
class Known:
    """A traced step.

    Attributes:
        sizes: of its input, all in a row.
        trace: the step.
    """

    sizes: tuple[int, ...]
    trace: Trace


class UnknownLawError(Exception):
    """The traced steps do not tell how their numbers follow from their sizes."""


class Law:
    """How numbers follow from sizes.

    Args:
        known: sizes of traced steps.
        sizes: of the step that is foreseen.

    Raises:
        UnknownLawError: a size changes that was the same in all traced steps, or too many do.
    """

    def __init__(self, known: Sequence[tuple[int, ...]], sizes: tuple[int, ...]) -> None:
        # Sizes that change together, such as those of tokens and their mask, are one.
        together = dict.fromkeys(zip(*known, sizes, strict=True))
        self._sizes = [(one[:-1], one[-1]) for one in together if len(set(one)) > 1]
        if len(self._sizes) > _MOST_SIZES or any(len(set(seen)) == 1 for seen, _ in self._sizes):
            raise UnknownLawError("sizes change that did not before, or too many")
        self._known: dict[tuple[int, ...], int] = {}

    def numbers(self, seen: Iterable[Iterable[int]]) -> tuple[int, ...]:
        """What numbers are, from what they were in the traced steps.

        Raises:
            UnknownLawError: no law, or more than one, has one of them so.
        """
        return tuple(self._number(each) for each in zip(*seen, strict=True))

    def _number(self, seen: tuple[int, ...]) -> int:
        if seen not in self._known:
            self._known[seen] = self._find(seen)
        return self._known[seen]

    def _find(self, seen: tuple[int, ...]) -> int:
        places = range(len(self._sizes))
        powers = list(product(range(_HIGHEST_POWER + 1), repeat=len(self._sizes)))
        found = {self._by_powers(seen, each) for each in powers} - {None}
        if not found:
            found = {self._by_steps(seen, each, at) for at in places for each in powers if not each[at]} - {None}
        (number,) = found if len(found) == 1 else (None,)
        if number is None or number.denominator != 1 or number < 0:
            raise UnknownLawError(f"{len(found)} laws for {seen}")
        return int(number)

    def _scales(self, powers: Sequence[int]) -> list[int]:
        """The product of powers of the sizes: in the traced steps, and last in the one that is foreseen."""
        columns = ((*known, now) for known, now in self._sizes)
        factors = [[size**power for size in column] for column, power in zip(columns, powers, strict=True)]
        return [math.prod(each) for each in zip(*factors, strict=True)]

    def _by_powers(self, seen: tuple[int, ...], powers: Sequence[int]) -> Fraction | None:
        """The number, if it rises as a product of powers of the sizes does."""
        *known, now = self._scales(powers)
        if not all(known) or any(
            number * known[0] != seen[0] * scale for number, scale in zip(seen, known, strict=True)
        ):
            return None
        return Fraction(seen[0] * now, known[0])

    def _by_steps(self, seen: tuple[int, ...], powers: Sequence[int], at: int) -> Fraction | None:
        """The number, if it rises in equal steps with one size, and as a product of powers of the others does. Two
        points are always on a line: of those it must be a multiple of the size and a few more."""
        *known, now = self._scales(powers)
        if not all(known):
            return None
        sizes, size_now = self._sizes[at]
        points = {(size, Fraction(number, scale)) for size, number, scale in zip(sizes, seen, known, strict=True)}
        (first, low), (second, high) = min(points), max(points)
        if first == second:
            return None
        step = (high - low) / (second - first)
        if not step or any(low + step * (size - first) != value for size, value in points):
            return None
        more = low / step - first
        if len(points) == 2 and (more.denominator != 1 or abs(more) > _MOST_MORE):
            return None
        return Fraction(step * (size_now + more) * now)


def scaled(known: Sequence[Known], sizes: tuple[int, ...], buffers: Buffers) -> Trace | None:
    """The trace of a step of other sizes.

    Args:
        known: two traced steps or more, of different sizes, with the same operations.
        sizes: of the step's input.
        buffers: of the Session.

    Returns:
        The trace. The bytes of its tensors follow laws that all steps obey. What the model itself takes on CUDA follows
        from the two between which it lies, unless `is_too_far`, and times from the largest. None where the steps do not
        tell.
    """
    traces = [one.trace for one in known]
    if len(known) < 2 or any(not run_alike(traces[0], other) for other in traces[1:]):
        return None
    ordered = sorted(traces, key=lambda one: one.saved_bytes)
    high = ordered[-1]
    try:
        law = Law([one.sizes for one in known], sizes)
        moments = law.numbers([one.nbytes for one in trace.moments] for trace in traces)
        storages = law.numbers([one.nbytes for one in trace.storages] for trace in traces)
        values = law.numbers([one.nbytes for one in trace.values] for trace in traces)
    except UnknownLawError:
        return None
    trace = replace(
        high,
        moments=tuple(replace(one, nbytes=nbytes) for one, nbytes in zip(high.moments, moments, strict=True)),
        values=tuple(replace(one, nbytes=nbytes) for one, nbytes in zip(high.values, values, strict=True)),
        storages=tuple(replace(one, nbytes=nbytes) for one, nbytes in zip(high.storages, storages, strict=True)),
    )
    return _drawn_out(_with_parcels(trace, high, buffers), ordered)


def is_too_far(traces: Iterable[Trace], trace: Trace) -> bool:
    """Whether traced steps do not tell what the model itself takes on a GPU in one that was foreseen from them.

    It is much larger than they are, and they are so much alike that what an allocator rounds is as much as what rises
    from one to the other. All that is known then is that the larger step takes no less than they did.
    """
    low, high = sorted(one.saved_bytes for one in traces)[-2:]
    return trace.device == "cuda" and trace.saved_bytes - high > _FARTHEST * (high - low)


def run_alike(one: Trace, other: Trace) -> bool:
    """Whether two steps run the same operations, and save the same of them."""
    return (
        save_alike(one, other)
        and [(op.number, op.name, op.inputs, op.outputs) for op in one.ops]
        == [(op.number, op.name, op.inputs, op.outputs) for op in other.ops]
        and [(value.op, value.storage) for value in one.values] == [(value.op, value.storage) for value in other.values]
    )


def save_alike(one: Trace, other: Trace) -> bool:
    """Whether two steps save as many storages, and save and need each in the same order."""
    moments, others = ([(moment.kind, moment.storage) for moment in trace.moments] for trace in (one, other))
    return moments == others and len(one.storages) == len(other.storages)


def _with_parcels(trace: Trace, before: Trace, buffers: Buffers) -> Trace:
    """With parcels for the sizes that its storages have now."""
    used = [at for at, moment in enumerate(trace.moments) if moment.kind == UNPACK]
    storages: list[SavedStorage] = []
    packing, latest = Packing(buffers), 0
    for storage, was in zip(trace.storages, before.storages, strict=True):
        if bisect(used, storage.made) != bisect(used, latest):
            packing.close()
        latest = storage.made
        has_grown = was.nbytes < buffers.least_moved_bytes <= storage.nbytes
        is_made = was.value >= 0 and trace.values[was.value].op >= 0  # not an input of the model, which never moves
        moves = was.parcel >= 0 or (has_grown and is_made)
        storages.append(replace(storage, parcel=packing.parcel_for(storage.nbytes) if moves else -1))
    return replace(trace, storages=tuple(storages), parcels=make_parcels(storages, packing.parcel_bytes))


def _drawn_out(trace: Trace, traces: Sequence[Trace]) -> Trace:
    """With times, and bytes that the model itself takes on a GPU, as they rise with what is saved.

    Args:
        trace: of the step that is foreseen.
        traces: those seen, the largest last. Bytes are on the line through the two between which it lies, or the
            largest two. What is smaller than all has those of the smallest, and what `is_too_far` those of the largest.
    """
    top = traces[-1]
    above = next((at for at, one in enumerate(traces) if one.saved_bytes >= trace.saved_bytes), len(traces) - 1)
    low, high = traces[max(0, above - 1)], traces[above]
    rise = trace.saved_bytes / max(1, top.saved_bytes)
    between = high.saved_bytes - low.saved_bytes
    beyond = (trace.saved_bytes - high.saved_bytes) / between if between and not is_too_far(traces, trace) else 0.0

    shift_low, shift_high = top.base_bytes - low.base_bytes, top.base_bytes - high.base_bytes

    def bytes_of(lower: int, higher: int) -> int:
        """A larger step takes no less: where it would, the smaller one had compiled something there."""
        return max(0 if beyond < 0 else higher, higher + round((higher - lower) * beyond))

    moments = tuple(
        replace(
            one,
            compute_s=one.compute_s * rise,
            other_bytes=bytes_of(lower.other_bytes + shift_low, higher.other_bytes + shift_high),
            still_bytes=bytes_of(lower.still_bytes + shift_low, higher.still_bytes + shift_high),
        )
        for one, lower, higher in zip(trace.moments, low.moments, high.moments, strict=True)
    )
    ops = tuple(
        replace(one, compute_s=one.compute_s * rise, scratch_bytes=bytes_of(lower.scratch_bytes, higher.scratch_bytes))
        for one, lower, higher in zip(trace.ops, low.ops, high.ops, strict=True)
    )
    blocks_s = tuple((name, seconds * rise) for name, seconds in trace.blocks_s)
    return _with_the_same_host(replace(trace, moments=moments, ops=ops, blocks_s=blocks_s), top)


def _with_the_same_host(trace: Trace, top: Trace) -> Trace:
    """With a forward that takes the host of a GPU as long as another step's does: it calls as many operations."""
    if trace.device == "cpu" or not any((top.host.record_s, top.host.move_s)):
        return trace  # it is not known
    seconds = [one.compute_s for one in top.moments[: top.turn]]
    base_s = spare_s(seconds, 0.0) - top.host.idle_s if top.host.idle_s else sum(seconds)
    return with_forward(trace, [one.compute_s for one in trace.moments[: trace.turn]], base_s)
