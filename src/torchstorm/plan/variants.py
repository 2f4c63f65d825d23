"""Chooses a variant for every compiled block: what it saves for backward, and what its backward recomputes.

The backward of a compiled block unpacks all its saved tensors at once, and its recomputation is fixed at compile time.
So equal blocks are compiled in a few variants. This module chooses a variant for each block, and `plan.solve` then
moves what the blocks save. One measured step gives the times and the memory of all blocks in their current variants.
For other variants, the trace is rewritten with sizes and costs from the compiled graphs.

The first blocks' tensors are needed last, when the gradients exist. So only mixes are tried in which they save least.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import inf

from torchstorm.errors import BudgetError
from torchstorm.plan.plan import Plan
from torchstorm.plan.trace import PACK, UNPACK, Moment, SavedStorage, Trace, make_parcels
from torchstorm.plan.typical import LATE, without_waiting

SAVE, CHEAP, LEAN, INPUTS, LEAST = "save", "cheap", "lean", "inputs", "least"
VARIANTS = (SAVE, CHEAP, LEAN, INPUTS, LEAST)
"""Variant names, from the one that saves most to the one that recomputes most."""

_SMALL_BYTES = 4096  # smaller storages are never moved
_MOST = Fraction(1, 2)  # of a variant's bytes


@dataclass(frozen=True, kw_only=True)
class Variant:
    """The saved tensors and the recomputation of one block in one variant, without its inputs, outputs and weights.

    Attributes:
        name: one of `VARIANTS`.
        sizes: bytes of every saved storage of at least 1 KiB.
        small_bytes: total bytes of smaller ones.
        backward_flops: floating-point operations of matrix products that take as long as what backward recomputes.
        backward_bytes: bytes that recomputed operations write in backward.
        peak_bytes: peak memory of backward, saved tensors included.
        forward_s: seconds that the forward takes a GPU by itself; 0.0 where that was not timed.
        backward_s: the same of backward.
    """

    name: str
    sizes: tuple[int, ...]
    small_bytes: int = 0
    backward_flops: int = 0
    backward_bytes: int = 0
    peak_bytes: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0

    @property
    def saved_bytes(self) -> int:
        """Total bytes saved."""
        return sum(self.sizes) + self.small_bytes

    def scaled(self, ratio: Fraction) -> Variant:
        """The same for sizes that are larger by a ratio."""
        numbers = ("small_bytes", "backward_flops", "backward_bytes", "peak_bytes")
        sizes = tuple(round(size * ratio) for size in self.sizes)
        larger = replace(self, sizes=sizes, **{name: round(getattr(self, name) * ratio) for name in numbers})
        return replace(larger, forward_s=float(self.forward_s * ratio), backward_s=float(self.backward_s * ratio))

    def then(self, other: Variant) -> Variant:
        """The sum of two graphs of one block, which run one after the other in forward."""
        return Variant(
            name=self.name,
            sizes=self.sizes + other.sizes,
            small_bytes=self.small_bytes + other.small_bytes,
            backward_flops=self.backward_flops + other.backward_flops,
            backward_bytes=self.backward_bytes + other.backward_bytes,
            peak_bytes=max(self.peak_bytes + other.saved_bytes, other.peak_bytes + self.saved_bytes),
        )


@dataclass(frozen=True, kw_only=True)
class BlockTable:
    """One block's variants.

    Attributes:
        name: qualified name, as in the trace.
        variants: variants by name, without those that save no less than the previous one.
        forward_flops: of its forward, counted as `Variant.backward_flops`.
        kind: an equal value for blocks with equal structure, which take equally long.
    """

    name: str
    variants: Mapping[str, Variant]
    forward_flops: int
    kind: int = 0

    def scaled(self, ratio: Fraction) -> BlockTable:
        """The same block for sizes that are larger by a ratio, as those of more tokens are."""
        return replace(
            self,
            variants={name: one.scaled(ratio) for name, one in self.variants.items()},
            forward_flops=round(self.forward_flops * ratio),
        )

    def nearest(self, name: str) -> Variant:
        """The variant of that name, or else the next one that saves more, or else the one that saves most."""
        known = [other for other in VARIANTS if other in self.variants]
        more = [other for other in known if VARIANTS.index(other) <= VARIANTS.index(name)]
        return self.variants[more[-1] if more else known[0]]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A variant for every block.

    Attributes:
        variants: variant by block.
        step_ms: forecast step time; None if no mix was found within the budget, and the one with the least memory was
            taken.
        measured_ms: the same of the mix that the traced step ran in; None if no plan for that is within the budget.
        num_tried: number of mixes that were planned.
    """

    variants: dict[str, str]
    step_ms: float | None
    measured_ms: float | None
    num_tried: int


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Compiled blocks that variants are to be chosen for.

    Attributes:
        tables: of each.
        measured: the variant of each in the traced step.
        memory_bytes_per_s: approximate rate at which element-wise operations write.
    """

    tables: Sequence[BlockTable]
    measured: Mapping[str, str]
    memory_bytes_per_s: float

    def timed_alone(self, trace: Trace, ran_once: Collection[str]) -> Trace:
        """The trace of a step whose every moment was marked, with blocks that take what they take a GPU by themselves
        where it has waited for the host. Those that were not timed stay as they are.

        Args:
            trace: of the step.
            ran_once: names of blocks that were called once in it; of others it is not known which call saved what.
        """
        moments, blocks_s = list(trace.moments), list[tuple[str, float]]()
        for table in self.tables:
            measured = self.measured[table.name]
            variant = as_measured(trace, table, measured).nearest(measured)
            span = _span_of(trace, trace.storages, table.name)
            if span is None or not variant.forward_s or table.name not in ran_once:
                continue
            blocks_s.append((table.name, variant.forward_s))
            (at,) = span.backward()
            if moments[at].compute_s > LATE * variant.backward_s:
                moments[at] = replace(moments[at], compute_s=variant.backward_s)
        return without_waiting(replace(trace, moments=tuple(moments), blocks_s=tuple(blocks_s)))


def choose_variants(
    trace: Trace,
    blocks: Blocks,
    plan_of: Callable[[Trace], Plan | None],
    *,
    max_tries: int = 60,
    max_seconds: float = 10.0,
) -> Choice:
    """Finds the fastest mix whose plan is within the budget.

    Args:
        trace: a measured step.
        blocks: of the step.
        plan_of: plans a trace within the budget; None or BudgetError if that is impossible.
        max_tries, max_seconds: limits of the search; the best mix found by then is returned.
    """
    num, measured, memory_bytes_per_s = len(blocks.tables), blocks.measured, blocks.memory_bytes_per_s
    tables = sorted(
        (as_measured(trace, table, measured[table.name]) for table in blocks.tables),
        key=lambda table: trace.first_save(table.name),
    )  # in the order of forward
    trace = warm_trace(trace, tables, measured)
    stop = time.monotonic() + max_seconds
    scores: dict[tuple[str, ...], tuple[int, float]] = {}  # by the variants of the blocks

    def names(cuts: tuple[int, ...]) -> dict[str, str]:
        """The variant of block i is the number of cuts after it."""
        return {
            table.name: table.nearest(VARIANTS[sum(index < cut for cut in cuts)]).name
            for index, table in enumerate(tables)
        }

    def planned(variants: dict[str, str], than_ms: float = inf) -> tuple[int, float]:
        """0 and the time in ms of a step in this mix, or 1 and the bytes that it needs where no plan fits. Where its
        compute alone takes no less than `than_ms`, it is not planned, and its time is not known: 1 and infinity."""
        mix = tuple(variants.values())
        if mix not in scores:
            mixed = mixed_trace(trace, tables, measured, variants, memory_bytes_per_s=memory_bytes_per_s)
            if mixed.compute_s * 1e3 >= than_ms:
                return 1, inf
            try:
                plan = plan_of(mixed)
                scores[mix] = (1, inf) if plan is None else (0, plan.forecast.step_ms)
            except BudgetError as error:
                scores[mix] = (1, float(error.needed_bytes))
        return scores[mix]

    def score(cuts: tuple[int, ...]) -> tuple[int, float]:
        best_ms = min((ms for does_not_fit, ms in scores.values() if not does_not_fit), default=inf)
        return planned(names(cuts), best_ms)

    num_cuts = len(VARIANTS) - 1
    best = min(
        (tuple(num if level <= lean else 0 for level in range(1, num_cuts + 1)) for lean in range(num_cuts + 1)),
        key=score,
    )
    step = 1 << max(0, num.bit_length() - 1)
    while step and len(scores) <= max_tries and time.monotonic() < stop:
        better = min((moved for moved in _neighbours(best, step, num)), key=score, default=best)
        # Differences below a tenth of a percent are within the forecast's error.
        if score(better) < (score(best)[0], score(best)[1] * 0.999):
            best = better
        else:
            step //= 2
    feasible = score(best)[0] == 0
    does_not_fit, measured_ms = planned({table.name: table.nearest(measured[table.name]).name for table in tables})
    return Choice(
        variants=names(best if feasible else (num,) * num_cuts),
        step_ms=score(best)[1] if feasible else None,
        measured_ms=None if does_not_fit else measured_ms,
        num_tried=len(scores),
    )


def _neighbours(cuts: tuple[int, ...], step: int, num: int) -> list[tuple[int, ...]]:
    """Mixes with one cut moved. Other cuts are moved along to keep their order."""
    found = []
    for place in range(len(cuts)):
        for delta in (-step, step):
            to = min(max(cuts[place] + delta, 0), num)
            moved = [max(cut, to) for cut in cuts[:place]] + [to] + [min(cut, to) for cut in cuts[place + 1 :]]
            if tuple(moved) != cuts:
                found.append(tuple(moved))
    return found


def as_measured(trace: Trace, table: BlockTable, measured: str) -> BlockTable:
    """A block's variants for the sizes of a step. They are known for the sizes of the call that compiled them.

    Where the step's storages do not have most of the bytes that the measured variant would save, it was another number
    of tokens, and everything is taken to be larger by the ratio for which most of them are found.
    """
    sizes = table.nearest(measured).sizes
    span = _span_of(trace, trace.storages, table.name)
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
        span = _span_of(trace, trace.storages, table.name)
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
class _Span:
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


def _span_of(trace: Trace, storages: Sequence[SavedStorage], name: str) -> _Span | None:
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
    return _Span(tuple(sorted(own)), before, max(storages[n].made for n in own), unpacked)


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
        span = _span_of(trace, storages, table.name)
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
