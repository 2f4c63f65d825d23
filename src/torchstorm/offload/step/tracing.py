"""Measures a step while it runs: from hook calls to a `Trace`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torchstorm.offload.fast import FastTier
from torchstorm.offload.recompute.traced_ops import TracedOps, call_seconds, made_before
from torchstorm.offload.step.clock import Span, is_reached, seconds_between
from torchstorm.offload.step.known import SavedStorages
from torchstorm.offload.step.pace import host_cost
from torchstorm.offload.step.parcels import Call, Parcel, Saved, Value, bytes_in_a_buffer
from torchstorm.offload.step.views import has_expired, held_only_here
from torchstorm.plan.forecast import Placement, held_before_profile, held_profile
from torchstorm.plan.solve import shift_base
from torchstorm.plan.trace import ENTER, HostCost, Moment, SavedStorage, Trace, make_parcels, taking
from torchstorm.plan.typical import typical, without_waiting

_NEVER = 1 << 30
_AHEAD_S = 5e-3  # longer than the host is on its way from one moment to the next
_MOST_IDLE = 60


@dataclass(eq=False, kw_only=True)
class StorageRecord:
    """What is being learnt of one saved storage; `None` where it has not happened yet."""

    nbytes: int
    made: int
    block: str
    parcel: int = -1
    value: Value | None = None
    owned: int | None = None
    needed: int | None = None
    freed: int | None = None


@dataclass(eq=False)
class _Interval:
    """What was measured of one stretch of the user's own work, in one piece or several."""

    marks: list[tuple[object, object]] = field(default_factory=list)
    peak_bytes: int = 0


class Recorder:
    """Collects one step.

    The hooks call `arrive` when they are entered and `leave` when they return, so that the time and the memory between
    a `leave` and the next `arrive` are the user's own. The allocator is asked at every moment, and every operation is
    marked, which takes the host longer than many a kernel takes a GPU. So that this is no part of an operation's time,
    the GPU waits for its host where nothing counts, between `arrive` and `leave` (see `_let_host_ahead`). What a step
    takes whose host has nothing to measure is for `Pace` to tell.

    Args:
        fast: the fast device.
        span: of the step, which begins at its entry.
        base_bytes: as in `Trace`.
        staging_bytes: as in `Trace`.
    """

    def __init__(self, fast: FastTier, span: Span, *, base_bytes: int, staging_bytes: int) -> None:
        self.clock = fast.clock()
        self.calls: list[Call] = []  # whose times are being measured
        self._storages: list[StorageRecord] = []
        self._parcel_bytes: list[int] = []
        self._records: dict[Saved, StorageRecord] = {}  # of what autograd still holds
        self._unowned: dict[Saved, StorageRecord] = {}  # of those, what the user may hold too
        self._fast = fast
        self._base_bytes = base_bytes
        self._staging_bytes = staging_bytes
        self._signatures: list[tuple[str, int, int]] = [(ENTER, -1, 0)]
        self._followed: Trace | None = None  # the trace of the plan that the step has followed so far
        self._moments_before: tuple[Moment, ...] = ()  # those of it that have come
        self._num_before = 0  # storages saved in them
        self._intervals: list[_Interval] = []
        self._interval = _Interval()
        self._stills = [0]  # by moment
        self._planned_before: list[int] = []  # what the Session alone holds, by moment
        self._planned: list[int] = []
        self._is_paused = False
        self._left = span.start
        self._behind: object = None  # marks where the device begins to let the host ahead
        self._num_idle = 0  # times at which it had nothing to do then
        # What the Session held alone in the interval that is running: it is not "other".
        self._held_bytes = 0
        self.peak_bytes = 0
        self.excess_bytes = 0
        self._start_bytes = base_bytes  # what was allocated as the interval that is running began

    @property
    def moment(self) -> int:
        """Number of the latest moment."""
        return len(self._signatures) - 1

    def begin_late(self, followed: Trace, moment: int, num_saved: int, saved: Mapping[int, Saved]) -> None:
        """The step has followed a plan so far, and turns out to be another one at this moment, whose hook runs. What
        came before it is as that plan's trace has it, with the sizes of this step.

        Args:
            followed: that trace.
            moment: the first one that is not in it.
            num_saved: storages saved before that.
            saved: of those, by number, the ones that autograd still holds.
        """
        self._is_paused = True
        self._followed, self._num_before = followed, num_saved
        sizes = [saved[at].nbytes if at in saved else followed.storages[at].nbytes for at in range(num_saved)]
        # Beside as much of other memory as there is in this step.
        moments = shift_base(followed, self._base_bytes - followed.base_bytes).moments
        self._moments_before = tuple(
            replace(one, nbytes=sizes[one.storage] if one.storage >= 0 else one.nbytes) for one in moments[:moment]
        )
        self._signatures = [one.signature for one in self._moments_before]
        self._stills = []
        numbers: dict[int, int] = {}  # of parcels, without those that have no bytes in this step
        for at, old in enumerate(followed.storages[:num_saved]):
            one = saved.get(at)
            is_movable = old.parcel >= 0 and sizes[at] > 0
            record = StorageRecord(
                nbytes=sizes[at] if one is None or one.parcel.shared else one.parcel.nbytes,
                made=old.made,
                block=old.block,
                parcel=numbers.setdefault(old.parcel, len(numbers)) if is_movable else -1,
                value=one.value if one is not None else None,
                owned=old.owned if old.owned <= moment or old.parcel < 0 else None,
                needed=old.needed if old.needed < moment else None,
                freed=None if one is not None else min(old.freed, moment),
            )
            self._storages.append(record)
            if one is not None:
                one.parcel.number = record.parcel
                self._records[one] = record
                if self._fast.counts_all and record.owned is None:
                    self._unowned[one] = record
            if record.parcel >= len(self._parcel_bytes):
                self._parcel_bytes.append(0)
            if record.parcel >= 0:
                is_shared = followed.parcels[old.parcel].num_storages > 1
                self._parcel_bytes[record.parcel] += bytes_in_a_buffer(record.nbytes) if is_shared else record.nbytes

    def arrive(self) -> None:
        """The interval ends here: a hook was entered, or the step is over."""
        self._pause()
        interval = self._interval
        self.peak_bytes = max(self.peak_bytes, interval.peak_bytes)
        self.excess_bytes = max(self.excess_bytes, interval.peak_bytes - self._start_bytes)
        interval.peak_bytes -= self._held_bytes
        self._intervals.append(interval)
        self._interval = _Interval()

    def name(self, kind: str, storage: int, nbytes: int) -> None:
        """Says what the moment that has just arrived is."""
        self._signatures.append((kind, storage, nbytes))

    def follow(self, trace: Trace, placements: Sequence[Placement]) -> None:
        """The step follows a plan, which says what the Session holds."""
        self._planned_before = held_before_profile(trace, placements).tolist()
        self._planned = held_profile(trace, placements).tolist()

    def lie_still(self, resident: Iterable[Parcel]) -> None:
        """What is allocated at this moment and not held by the Session alone, which has the `resident` parcels."""
        # Not what it held in the interval that has ended: autograd has let go of some of that since.
        held = self._planned_before[self.moment] if self._planned_before else self.held_alone(resident)
        self._stills.append(self._fast.allocated_bytes() - held)

    def leave(self, resident: Iterable[Parcel]) -> None:
        """The next interval begins; the Session has the `resident` parcels on the fast device."""
        self._resume()
        self._start_bytes = self._fast.allocated_bytes()
        self._held_bytes = self._planned[self.moment] if self._planned else self.held_alone(resident)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """What happens within is not the step's: neither its time nor its memory counts."""
        between_moments = not self._is_paused  # within a hook nothing counts anyway
        self._pause()
        try:
            yield
        finally:
            if between_moments:
                self._resume()

    def _pause(self) -> None:
        if self._is_paused:
            return
        self._is_paused = True
        self._interval.marks.append((self._left, self.clock.mark()))
        self._interval.peak_bytes = max(self._interval.peak_bytes, self._fast.peak_bytes())

    def _resume(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self._fast.peak_bytes())
        self._fast.reset_peak()
        self._let_host_ahead()
        self._left = self.clock.mark()
        self._is_paused = False

    def _let_host_ahead(self) -> None:
        """Has a device beside the host do nothing for a while. As soon as it has begun to, the next such while is put
        behind what it has been given by then: so one is always before it, and it never waits within an operation.

        Where it has nothing to do all the same, the host has waited for it, as that of a model does which reads results
        on its way. It would wait for this each time, so there is an end to it.
        """
        if not self._fast.is_beside_host or (self._behind is not None and not is_reached(self._behind)):
            return
        self._num_idle += self._fast.is_idle()
        if self._num_idle <= _MOST_IDLE:
            self._behind = self.clock.mark()
            self._fast.keep_busy(_AHEAD_S)

    def saved(self, saved: Saved, *, movable: bool, is_input: bool) -> None:
        """A storage was saved for the first time, at this moment."""
        parcel = saved.parcel
        record = StorageRecord(
            nbytes=saved.nbytes if parcel.shared else parcel.nbytes,
            made=self.moment,
            block=saved.block,
            value=saved.value,
        )
        if movable:  # where there is no tier to go to, it still tells what one would be worth
            if parcel.number < 0:
                parcel.number = len(self._parcel_bytes)
                self._parcel_bytes.append(0)
            record.parcel = parcel.number
            self._parcel_bytes[parcel.number] = parcel.filled if parcel.shared else parcel.nbytes
        self._storages.append(record)
        self._records[saved] = record
        if self._fast.counts_all:
            if is_input:
                record.owned = _NEVER
            else:
                self._unowned[saved] = record

    def needed(self, saved: Saved) -> None:
        """A storage was unpacked at this moment."""
        record = self._records.get(saved)
        if record is not None and record.needed is None:
            record.needed = self.moment

    def let_go(self, saved: Saved) -> None:
        """Autograd has let go of a storage since the latest moment."""
        record = self._records.pop(saved, None)
        if record is not None:
            record.freed = self.moment + 1
            if self._unowned.pop(saved, None) is not None:
                record.owned = self.moment + 1

    def watch(self, interval: int, known: SavedStorages) -> None:
        """Notes from which interval on storages are alive for autograd's sake alone. Only CUDA's budget asks.

        Args:
            interval: the one that begins.
            known: all that autograd holds.
        """
        for saved in list(self._unowned):
            hold = saved.parcel.hold
            if has_expired(saved.watch) if hold is None else held_only_here(hold, aliases=_num_aliases(saved, known)):
                self._unowned.pop(saved).owned = interval

    def is_alone(self, parcel: Parcel) -> bool:
        """Whether nobody but the Session has held what lies in a parcel at the latest moment; plans move nothing away
        before that."""
        return parcel.shared or all(saved not in self._unowned for saved in parcel.members)

    def held_alone(self, resident: Iterable[Parcel]) -> int:
        """Bytes on the fast device that only the Session keeps alive; of those on a CPU nobody asks."""
        if not self._fast.counts_all:
            return 0
        held = 0
        for parcel in resident:
            records = [self._records.get(saved) for saved in parcel.members]
            theirs = not parcel.shared and parcel.hold is not None and records
            if not theirs or any(not record or (record.owned or _NEVER) <= self.moment for record in records):
                held += parcel.nbytes
        return held

    def trace(self) -> Trace:
        """The finished step as a value. On CUDA the host waits for the device here."""
        num_moments = len(self._signatures)
        moments = self._moments()
        values = [record.value for record in self._storages]
        before = made_before(self._followed, values[: self._num_before]) if self._followed is not None else {}
        traced = TracedOps(values, before)
        storages = tuple(
            SavedStorage(
                nbytes=record.nbytes,
                made=record.made,
                owned=record.made if record.owned is None else record.owned,
                needed=num_moments if record.needed is None else record.needed,
                freed=num_moments if record.freed is None else record.freed,
                parcel=record.parcel,
                block=record.block,
                value=traced.number_of(record.value, number),
            )
            for number, record in enumerate(self._storages)
        )
        trace = Trace(
            device=self._fast.device.type,
            moments=moments,
            storages=storages,
            parcels=make_parcels(storages, self._parcel_bytes),
            base_bytes=self._base_bytes,
            staging_bytes=self._staging_bytes,
            ops=traced.ops(),
            values=traced.values(),
            host=host_cost() if self._fast.is_beside_host else HostCost(),
        )
        return without_waiting(typical(trace))

    def refine(self, trace: Trace) -> Trace:
        """The same step with this run's times and memory: the first step's hold warm-up and much measuring. Only CUDA's
        memory is asked for a second time."""
        moments = self._moments()
        if len(moments) != trace.num_moments:
            return trace
        seconds = {call.number: call_seconds(call) for call in self.calls}
        ops = taking(trace.ops, (seconds.get(op.number, op.compute_s) for op in trace.ops))
        found = tuple(
            replace(new, storage=old.storage, nbytes=old.nbytes)
            for old, new in zip(trace.moments, moments, strict=True)
        )
        return without_waiting(typical(replace(trace, base_bytes=self._base_bytes, moments=found, ops=ops)))

    def _moments(self) -> tuple[Moment, ...]:
        self._fast.synchronize()
        num_before = len(self._moments_before)
        return self._moments_before + tuple(
            Moment(
                kind=kind,
                storage=storage,
                nbytes=nbytes,
                compute_s=sum(max(0.0, seconds_between(*marks)) for marks in interval.marks),
                other_bytes=max(0, interval.peak_bytes),
                still_bytes=max(0, still),
            )
            for (kind, storage, nbytes), interval, still in zip(
                self._signatures[num_before:], self._intervals, self._stills, strict=True
            )
        )


def _num_aliases(saved: Saved, known: SavedStorages) -> int:
    """How many tensors of the Session's own refer to the memory of a storage that is there. Parts of it that were saved
    with a version counter each are parcels of their own."""
    parcels = {saved.parcel, *(one.parcel for one in known.at(saved.address) if one.parcel.hold is not None)}
    return sum(parcel.num_aliases for parcel in parcels)
