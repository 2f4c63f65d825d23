"""The trace of a step whose compiled blocks run in other variants: rewritten, with sizes and costs from the compiled
graphs, from the trace of one that was measured."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import inf

from torchstorm.plan.trace import PACK, UNPACK, Moment, SavedStorage, Trace, make_parcels
from torchstorm.plan.variants import BlockTable

_SMALL_BYTES = 4096  # smaller storages are never moved
_MOST = Fraction(1, 2)  # of a variant's bytes


def as_measured(trace: Trace, table: BlockTable, measured: str) -> BlockTable:
    """A block's variants for the sizes of a step. They are known for the sizes of the call that compiled them.

    Where the step's storages do not have most of the bytes that the measured variant would save, it was another number
    of tokens, and everything is taken to be larger by the ratio for which most of them are found.
    """
    sizes = table.nearest(measured).sizes
    span = span_of(trace, trace.storages, table.name)
    if span is None or not sizes:
        return table
    found = Counter(trace.storages[number].nbytes for number in span.storages)

    def share(ratio: Fraction) -> Fraction:
        """Of the bytes that the variant would save, what is there."""
        wanted = Counter(round(size * ratio) for size in sizes)
        there = sum(size * number for size, number in (wanted & found).items())
        return Fraction(there, max(1, sum(size * number for size, number in wanted.items())))

    if share(Fraction(1)) > _MOST:  # some may differ: another kind of attention saves other tensors
        return table
    ratios = [Fraction(1), *(Fraction(size, other) for size in found for other in {min(sizes), max(sizes)} if size)]
    best = max(ratios, key=share)
    return table if best == 1 else table.scaled(best)


def warm_trace(trace: Trace, tables: Sequence[BlockTable], measured: Mapping[str, str]) -> Trace:
    """The step with every block as fast as the fastest of its kind, since the first one's time includes compilation.

    Backward is compared among blocks in one variant, since it computes again what the variant did not save.
    """
    moments = list(trace.moments)
    alike: dict[tuple[int, str], list[range]] = {}
    for table in tables:
        span = span_of(trace, trace.storages, table.name)
        if span is not None:
            alike.setdefault((table.kind, ""), []).append(span.forward())
            variant = table.nearest(measured[table.name]).name
            alike.setdefault((table.kind, variant), []).append(span.backward())
    for intervals in alike.values():
        seconds = [sum(moments[at].compute_s for at in interval) for interval in intervals]
        for interval, took in zip(intervals, seconds, strict=True):
            share = min(seconds) / took if took > 0 else 1.0
            for at in interval:
                moments[at] = replace(moments[at], compute_s=moments[at].compute_s * share)
    return replace(trace, moments=tuple(moments))


@dataclass(frozen=True, slots=True)
class Span:
    """The moments of a block in a step.

    Attributes:
        storages: storages that it was the first to save.
        before: last moment before the block.
        packed: moment of its last pack.
        unpacked: moment of its last unpack.
    """

    storages: tuple[int, ...]
    before: int
    packed: int
    unpacked: int

    def forward(self) -> range:
        """The intervals of its forward."""
        return range(self.before, self.packed)

    def backward(self) -> range:
        """The interval of its backward: after the last unpack of its storages."""
        return range(self.unpacked, self.unpacked + 1)


def span_of(trace: Trace, storages: Sequence[SavedStorage], name: str) -> Span | None:
    """The moments of a block; None if the step has no backward of it."""
    own = {number for number, storage in enumerate(storages) if storage.is_of(name)}
    needed = [storages[n].needed for n in own if storages[n].needed < trace.num_moments]
    if not needed:
        return None
    first = min(storages[n].made for n in own)
    # The block may also save storages that were saved before, such as its input.
    before = max((s.made for n, s in enumerate(storages) if n not in own and s.made < first), default=0)
    unpacked = max(needed)
    while unpacked + 1 < trace.num_moments and trace.moments[unpacked + 1].signature[:2] in {(UNPACK, n) for n in own}:
        unpacked += 1  # another view of a storage that was already unpacked
    return Span(tuple(sorted(own)), before, max(storages[n].made for n in own), unpacked)


def mixed_trace(
    trace: Trace,
    tables: Sequence[BlockTable],
    measured: Mapping[str, str],
    wanted: Mapping[str, str],
    *,
    memory_bytes_per_s: float,
) -> Trace:
    """Rewrites a trace for other variants.

    Storages that a block does not save in its new variant get 0 bytes. Additional storages are packed and unpacked with
    the block's others. Recomputation adds time: as timed, or at the speed of the block's forward (`_backward_s`).
    """
    moments, storages = list(trace.moments), list(trace.storages)
    inserted: list[tuple[int, Moment]] = []  # (old moment to insert before, moment)
    added: list[tuple[int, int, int, SavedStorage]] = []  # (pack, unpack) in `inserted`, old moment of freeing
    for table in tables:
        old, new = table.nearest(measured[table.name]), table.nearest(wanted[table.name])
        span = span_of(trace, storages, table.name)
        if old is new or span is None:
            continue
        own, unpacked = span.storages, span.unpacked
        gone = Counter(old.sizes) - Counter(new.sizes)
        for number in own:
            if gone[storages[number].nbytes] > 0:
                gone[storages[number].nbytes] -= 1
                storages[number] = replace(storages[number], nbytes=0, parcel=-1, value=-1)
        for nbytes in (Counter(new.sizes) - Counter(old.sizes)).elements():
            places = []
            for at, kind in ((span.packed, PACK), (unpacked, UNPACK)):
                still = moments[at].still_bytes  # no kernel of the user runs in between
                moment = Moment(
                    kind=kind,
                    storage=len(trace.storages) + len(added),
                    nbytes=nbytes,
                    compute_s=0.0,
                    other_bytes=still,
                    still_bytes=still,
                )
                places.append(len(inserted))
                inserted.append((at, moment))
            block = storages[own[-1]].block
            storage = SavedStorage(nbytes=nbytes, parcel=-1, block=block, made=0, owned=0, needed=0, freed=0)
            added.append((places[0], places[1], unpacked + 1, storage))
        seconds = old.forward_s or sum(moments[at].compute_s for at in span.forward())
        backward_s = _backward_s(table, seconds / max(1, table.forward_flops), 1 / memory_bytes_per_s)
        extra = backward_s[new.name] - backward_s[old.name]
        working = (new.peak_bytes - new.saved_bytes) - (old.peak_bytes - old.saved_bytes)
        moments[unpacked] = replace(
            moments[unpacked],
            compute_s=max(0.0, moments[unpacked].compute_s + extra),
            other_bytes=max(0, moments[unpacked].other_bytes + working) if trace.device == "cuda" else 0,
        )
    return _with_inserted(trace, moments, storages, inserted, added)


def _backward_s(table: BlockTable, s_per_flop: float, s_per_byte: float) -> dict[str, float]:
    """Seconds of backward by variant: as timed, or on the line between the two timed ones that compute again next less
    and next more. What is not between two is reckoned from the nearest; where none was timed, without what all share.
    """
    again = {v.name: v.backward_flops * s_per_flop + v.backward_bytes * s_per_byte for v in table.variants.values()}
    found = {v.name: v.backward_s for v in table.variants.values() if v.backward_s}
    timed = sorted((again[name], seconds) for name, seconds in found.items()) or [(0.0, 0.0)]
    for name in again.keys() - found.keys():
        at = bisect_right(timed, (again[name], inf))
        (less, less_s), (more, more_s) = timed[max(0, at - 1)], timed[min(at, len(timed) - 1)]
        found[name] = less_s + (again[name] - less) * ((more_s - less_s) / (more - less) if more > less else 1.0)
    return found


def _with_inserted(
    trace: Trace,
    moments: list[Moment],
    storages: list[SavedStorage],
    inserted: list[tuple[int, Moment]],
    added: list[tuple[int, int, int, SavedStorage]],
) -> Trace:
    order = sorted(range(len(inserted)), key=lambda place: (inserted[place][0], place))
    ats = [inserted[place][0] for place in order]

    def now(old: int) -> int:
        """The new index of an old moment."""
        return old + bisect_right(ats, old)

    new_index = {place: inserted[place][0] + rank for rank, place in enumerate(order)}
    merged: list[Moment] = []
    waiting = [(inserted[place][0], inserted[place][1]) for place in order]
    for index, moment in enumerate(moments):
        while waiting and waiting[0][0] == index:
            merged.append(waiting.pop(0)[1])
        merged.append(moment)
    moved = [
        replace(s, made=now(s.made), owned=now(s.owned), needed=now(s.needed), freed=now(s.freed)) for s in storages
    ]
    for pack, unpack, freed, storage in added:
        made = new_index[pack]
        moved.append(replace(storage, made=made, owned=made, needed=new_index[unpack], freed=now(freed)))
    # New parcels: those without storages are removed, and each added storage gets its own.
    numbers: dict[int, int] = {}
    parcel_bytes: list[int] = []
    for number, storage in enumerate(moved):
        is_new = number >= len(storages)
        if storage.nbytes < _SMALL_BYTES if is_new else storage.parcel < 0:  # it stays
            continue
        key = -1 - number if is_new else storage.parcel
        if key not in numbers:
            numbers[key] = len(parcel_bytes)
            parcel_bytes.append(storage.nbytes if is_new else trace.parcels[storage.parcel].nbytes)
        moved[number] = replace(storage, parcel=numbers[key])
    return replace(trace, moments=tuple(merged), storages=tuple(moved), parcels=make_parcels(moved, parcel_bytes))
