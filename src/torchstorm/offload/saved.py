"""The saved-tensor hooks: what autograd saves goes where the plan says, and comes back as it was.

A storage moves as a whole, once, however many views of it are saved; views are rebuilt with their strides. In a step
with a plan every parcel leaves and returns at the moments the plan names, so the peak is the forecast's. Without one
(the first step, another branch, another shape) it is decided on the spot: everything that may move begins to move when
it is saved, and gives its room back as soon as the budget needs it.
"""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torchstorm.errors import BudgetError, StorageError
from torchstorm.memory.tier import Tier
from torchstorm.offload.parcels import (
    Parcel,
    Saved,
    View,
    flat_bytes,
    fresh_version,
    has_expired,
    held_only_here,
    in_place_error,
    weak_reference,
)
from torchstorm.offload.record import Recorder, StorageRecord
from torchstorm.plan.forecast import KEEP
from torchstorm.plan.plan import Plan
from torchstorm.plan.trace import PACK, UNPACK

SMALL_BYTES = 2**20  # below this a storage shares a copy with others
TINY_BYTES = 4096  # below this it stays
_ALIGNMENT = 512  # of storages in a shared buffer; the CUDA allocator's own


class _Ticket:
    """What autograd holds instead of the tensor; when it lets go, so does the Session."""

    __slots__ = ("__weakref__", "_owner", "saved", "view")

    def __init__(self, owner: SavedTensors, saved: Saved, view: View) -> None:
        self._owner = owner
        self.saved = saved
        self.view = view

    def __del__(self) -> None:
        self._owner.let_go(self.saved, id(self))


class _Untouched:
    """A tensor that is none of the Session's affair: weights, other devices, layouts without plain strides."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()
        self.version = tensor._version


class SavedTensors:
    """Decides and moves.

    Args:
        device: the fast device.
        limit_bytes: what may be resident at once, on CPU; on CUDA the budget for allocated memory.
        tiers: where parcels can go, by the names of placements ("ram", "disk"); may be empty.
        default_tier: the one that unplanned moves go to; "keep" where there is none.
        empty: allocates (nbytes,) uint8 on the fast device.
        staging_bytes: constant room for copies under way, counted as resident.
        check: poison buffers that came back, once autograd has let go of them.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        limit_bytes: int,
        tiers: dict[str, Tier],
        default_tier: str,
        empty: Callable[[int], torch.Tensor],
        staging_bytes: int,
        check: bool,
    ) -> None:
        self._check = check
        self.device = device
        self.limit_bytes = limit_bytes
        self.staging_bytes = staging_bytes
        self.resident_bytes = staging_bytes
        self.peak_bytes = staging_bytes
        self.moved_bytes = 0
        self.shortfall: tuple[int, str] | None = None
        self._tiers = tiers
        self._default_tier = default_tier
        self._empty = empty
        self._slab_bytes = max(min(4 * SMALL_BYTES, limit_bytes // 32), 4 * TINY_BYTES)
        self._lock = threading.Lock()
        self._letting_go: deque[tuple[Saved, int]] = deque()
        self._fixed: set[int] = set()
        self._inputs: dict[int, StorageWeakRef] = {}  # by storage address, which the reference keeps taken
        self._by_key: dict[tuple[int, int], Saved] = {}
        self._shared: dict[int, Parcel] = {}  # storage address of a shared buffer -> parcel
        self._resident: dict[int, Parcel] = {}  # by order of making
        self._away: dict[int, Parcel] = {}  # by order of making
        self._order = 0
        self._first_order = 0
        self._open: Parcel | None = None
        self.closed = ""
        # The step that is running.
        self._in_step = False
        self._moment = 0
        self._num_saved = 0
        self._plan: Plan | None = None
        self._numbered: dict[int, Parcel] = {}
        self._choose: Callable[[tuple[Any, ...]], tuple[Plan | None, Recorder | None]] | None = None
        self._recorder: Recorder | None = None
        self._records: dict[Saved, StorageRecord] = {}
        self._unowned: dict[Saved, StorageRecord] = {}
        self._planned_held: list[int] = []
        self.left_plan = False
        self.blocks: list[str] = []

    # ------------------------------------------------------------------ a step

    def begin(
        self,
        fixed: set[int],
        choose: Callable[[tuple[Any, ...]], tuple[Plan | None, Recorder | None]],
    ) -> None:
        """A step begins.

        Args:
            fixed: addresses of storages that never move: parameters, buffers, gradients.
            choose: called at the first save with what identifies it; gives the plan to follow, or None, and the
                recorder to fill, or None.
        """
        with self._locked():
            self._fixed = fixed
            self._inputs = {}
            self._in_step = True
            self._moment = 0
            self._num_saved = 0
            self._plan = None
            self._numbered = {}
            self._choose = choose
            self._recorder = None
            self._records = {}
            self._unowned = {}
            self._first_order = self._order
            self._open = None
            self.left_plan = False
            self.shortfall = None
            self.peak_bytes = self.resident_bytes
            self.moved_bytes = 0
            self.blocks = []

    def add_inputs(self, tensors: list[torch.Tensor]) -> None:
        """Names tensors that the user gave to the model: they are counted, and never moved."""
        with self._locked():
            for tensor in tensors:
                storage = self._storage_of(tensor)
                if storage is not None:
                    self._inputs[storage._cdata] = weak_reference(storage)

    def end(self) -> Recorder | None:
        """The step is over. Returns the recorder it filled, if there was one and the step kept to what it records."""
        with self._locked():
            recorder, self._recorder = self._recorder, None
            if recorder is not None:
                recorder.arrive()
                self._watch_all(recorder.moment + 1)
            if self._open is not None:
                self._seal(self._open, move=False)
            for parcel in self._numbered.values():
                parcel.number = -1
            for saved in set(self._by_key.values()):
                saved.ordinal = -1
            self._in_step = False
            self._plan = None
            self._numbered = {}
            self._records = {}
            self._unowned = {}
            self._choose = None
            return recorder

    # ------------------------------------------------------------------ hooks

    def pack(self, tensor: torch.Tensor) -> object:
        """Called by autograd when it saves a tensor."""
        storage = self._storage_of(tensor)
        if storage is None or storage._cdata in self._fixed:
            return _Untouched(tensor)
        with self._locked():
            if self._recorder is not None:
                self._recorder.arrive()
            version = tensor._version
            saved, base = self._find(storage, tensor, version)
            first = saved is None
            nbytes = storage.nbytes() if saved is None else saved.nbytes
            self._arrive(PACK, self._num_saved if saved is None else saved.ordinal, nbytes, tensor)
            if saved is None:
                saved = self._save(storage, tensor, version)
            view = View.of(tensor, base)
            ticket = _Ticket(self, saved, view)
            saved.live += 1
            if saved.parcel.buffer is not None and saved.parcel.handle is None and not saved.parcel.shared:
                saved.kept[id(ticket)] = tensor.detach()
            if first and self._open is saved.parcel and self._slab_is_full(saved.parcel):
                self._seal(saved.parcel, move=True)
            self._depart(look_ahead=False)
            return ticket

    def unpack(self, packed: object) -> torch.Tensor:
        """Called by autograd when backward needs a saved tensor."""
        if isinstance(packed, _Untouched):
            found = packed.tensor
            if found._version != packed.version:
                raise in_place_error(found._version, packed.version, found.dtype, found.shape)
            return found
        assert isinstance(packed, _Ticket)
        saved, view = packed.saved, packed.view
        with self._locked():
            if self._recorder is not None:
                self._recorder.arrive()
            self._arrive(UNPACK, saved.ordinal, saved.nbytes, None)
            if self._open is not None:
                self._seal(self._open, move=False)
            record = self._records.get(saved)
            if record is not None and record.needed is None and self._recorder is not None:
                record.needed = self._recorder.moment
            tensor = saved.kept.get(id(packed))
            if tensor is not None:
                if tensor._version != saved.version:
                    raise in_place_error(tensor._version, saved.version, view.dtype, view.size)
            else:
                tensor = self._rebuild(saved, view)
            saved.parcel.used = True
            self._depart(look_ahead=True)
            return tensor

    def let_go(self, saved: Saved, ticket_id: int) -> None:
        """Called when autograd drops a saved tensor, from any thread and even from within our own work."""
        self._letting_go.append((saved, ticket_id))
        if self._lock.acquire(blocking=False):
            self._unlock()

    # ------------------------------------------------------------------ moments

    def _arrive(self, kind: str, ordinal: int, nbytes: int, tensor: torch.Tensor | None) -> None:
        """Counts the moment, compares it with the plan and does what the plan has for it."""
        if not self._in_step:
            return
        self._moment += 1
        if self._choose is not None:
            key = (tuple(tensor.shape), tensor.dtype) if tensor is not None else ()
            self._plan, self._recorder = self._choose(key)
            self._choose = None
            if self._recorder is not None:
                self._recorder.arrive()
            if self._plan is not None and self._recorder is not None:
                self._planned_held = planned_held(self._plan)
        if self._recorder is not None:
            self._recorder.name(kind, ordinal, nbytes)
            self._watch_all(self._moment)
        plan = self._plan
        if plan is None:
            return
        moments = plan.trace.moments
        if self._moment >= len(moments) or moments[self._moment].signature != (kind, ordinal, nbytes):
            self._leave_plan()
            return
        for number in plan.drops.get(self._moment, ()):
            parcel = self._numbered.get(number)
            if parcel is not None and parcel.handle is not None:
                self._drop(parcel)

    def _depart(self, *, look_ahead: bool) -> None:
        """The moment is over: begins the plan's fetches, or looks ahead without one."""
        if self._in_step and self._plan is not None:
            for number in self._plan.fetches.get(self._moment, ()):
                parcel = self._numbered.get(number)
                if parcel is not None and parcel.members and parcel.buffer is None:
                    self._fetch(parcel)
        elif look_ahead:
            self._look_ahead()
        if self._recorder is not None:
            self._recorder.leave(self._held_alone())

    def _leave_plan(self) -> None:
        """The step is not the one that was planned: from here on it is decided on the spot."""
        self._plan = None
        self._recorder = None
        self._records = {}
        self._unowned = {}
        self.left_plan = True
        if self._open is not None:
            self._seal(self._open, move=True)
        self._numbered = {}

    def _watch_all(self, interval: int) -> None:
        """Notes from which interval on storages are alive for autograd's sake alone. Only CUDA's budget asks."""
        for saved in list(self._unowned):  # pragma: gpu
            record, hold = self._unowned[saved], saved.parcel.hold
            if hold is not None and record.watch is not None:
                alone = not saved.kept and held_only_here(hold, aliases=2)
            else:
                alone = record.watch is None or has_expired(record.watch)
            if alone:
                record.owned = interval
                del self._unowned[saved]

    def _held_alone(self) -> int:
        """Bytes on the fast device that only the Session keeps alive."""
        if self.device.type == "cpu":
            return 0
        if self._plan is not None:  # pragma: gpu
            return self._planned_held[self._moment]
        held = 0  # pragma: gpu
        for parcel in self._resident.values():  # pragma: gpu
            if parcel.shared or parcel.hold is None:
                held += parcel.nbytes
                continue
            records = [self._records.get(saved) for saved in parcel.members]
            if not records or any(record is None or record.owned is not None for record in records):
                held += parcel.nbytes
        return held  # pragma: gpu

    # ------------------------------------------------------------------ saving

    def _storage_of(self, tensor: torch.Tensor) -> torch.UntypedStorage | None:
        """The storage, where the Session may care for it."""
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
            return None
        if tensor.device != self.device or tensor.is_quantized:
            return None
        storage = tensor.untyped_storage()
        return storage if storage.nbytes() else None

    def _find(self, storage: torch.UntypedStorage, tensor: torch.Tensor, version: int) -> tuple[Saved | None, int]:
        """The record of these very bytes, and where they begin in the tensor's storage."""
        saved = self._by_key.get((storage._cdata, version))
        if saved is not None:
            return saved, 0
        parcel = self._shared.get(storage._cdata)
        if parcel is not None and version == fresh_version():
            start = tensor.storage_offset() * tensor.element_size()
            for member in parcel.members:
                if member.offset <= start < member.offset + member.nbytes:
                    return member, member.offset
        return None, 0

    def _save(self, storage: torch.UntypedStorage, tensor: torch.Tensor, version: int) -> Saved:
        nbytes = storage.nbytes()
        is_input = storage._cdata in self._inputs
        movable = not is_input and nbytes >= TINY_BYTES
        number, tier = -1, self._default_tier if movable else KEEP
        ordinal = self._num_saved
        if self._in_step:
            self._num_saved += 1
        if self._plan is not None:
            number = self._plan.trace.storages[ordinal].parcel if movable else -1
            tier = self._plan.placements[number].tier if number >= 0 else KEEP
        block = self.blocks[-1] if self.blocks else ""
        planned_slab = number >= 0 and self._plan is not None and self._plan.trace.parcels[number].num_storages > 1
        is_small = nbytes < min(SMALL_BYTES, self._slab_bytes // 2 + 1)
        if tier == KEEP or not (planned_slab if self._plan is not None else is_small):
            counted = min(nbytes, tensor.nbytes) if is_input else nbytes
            parcel = self._new_parcel(counted, block, movable)
            offset = 0
            parcel.buffer = flat_bytes(storage)
            parcel.hold = tensor.detach()
        else:
            parcel = self._slab_for(nbytes, number, block)
            offset = parcel.filled
            parcel.filled += _aligned(nbytes)
            assert parcel.buffer is not None
            with torch.no_grad():
                parcel.buffer[offset : offset + nbytes].copy_(flat_bytes(storage))
        saved = Saved(parcel, nbytes, offset, version, ordinal=ordinal if self._in_step else -1)
        parcel.members.add(saved)
        saved.keys.append((storage._cdata, version))
        saved.watch.append(weak_reference(storage))
        self._by_key[saved.keys[0]] = saved
        if tier != KEEP and not parcel.shared:
            if number >= 0:
                parcel.number = number
                self._numbered[number] = parcel
            self._put(parcel, tier)
        if self._recorder is not None and self._plan is None:
            self._record(saved, storage, movable, is_input)
        return saved

    def _record(self, saved: Saved, storage: torch.UntypedStorage, movable: bool, is_input: bool) -> None:
        assert self._recorder is not None
        parcel = saved.parcel
        record = StorageRecord(
            nbytes=saved.nbytes if parcel.shared else parcel.nbytes, made=self._moment, block=parcel.block
        )
        if movable:  # where there is no tier to go to, it still tells what one would be worth
            if parcel.number < 0:
                parcel.number = len(self._recorder.parcel_bytes)
                self._recorder.parcel_bytes.append(0)
            record.parcel = parcel.number
            self._recorder.parcel_bytes[parcel.number] = parcel.filled if parcel.shared else parcel.nbytes
            record.watch = weak_reference(storage)
        self._recorder.storages.append(record)
        self._records[saved] = record
        if self.device.type == "cuda":  # pragma: gpu
            if is_input:
                record.owned = 1 << 30
            else:
                self._unowned[saved] = record

    def _new_parcel(self, nbytes: int, block: str, movable: bool) -> Parcel:
        self._make_room(nbytes, block)
        parcel = Parcel(nbytes, block, movable, self._order)
        self._order += 1
        self._hold(parcel)
        return parcel

    def _slab_for(self, nbytes: int, number: int, block: str) -> Parcel:
        """The shared buffer that takes the next small storage."""
        slab = self._open
        if slab is not None:
            full = slab.filled + nbytes > slab.nbytes
            if slab.number != number if self._plan is not None else full:
                self._seal(slab, move=True)
        if self._open is None:
            size = self._plan.trace.parcels[number].nbytes if self._plan is not None else self._slab_bytes
            parcel = self._new_parcel(size, block, True)
            parcel.buffer = self._empty(size)
            parcel.shared = True
            parcel.sealed = False
            self._shared[parcel.buffer.untyped_storage()._cdata] = parcel
            if self._plan is not None:
                parcel.number = number
                self._numbered[number] = parcel
            self._open = parcel
        return self._open

    def _slab_is_full(self, parcel: Parcel) -> bool:
        if self._plan is not None and parcel.number >= 0:
            return parcel.filled >= parcel.nbytes
        return parcel.nbytes - parcel.filled < TINY_BYTES

    def _seal(self, parcel: Parcel, *, move: bool) -> None:
        """No further storage joins; with `move` it begins to leave."""
        self._open = None
        parcel.sealed = True
        if not parcel.members:
            self._discard(parcel)
        elif move:
            tier = self._default_tier
            if self._plan is not None and parcel.number >= 0:
                tier = self._plan.placements[parcel.number].tier
            self._put(parcel, tier)

    # ------------------------------------------------------------------ moving

    def _put(self, parcel: Parcel, tier: str) -> None:
        assert parcel.buffer is not None
        label = f"a tensor saved in {parcel.block or 'the model'}"
        for name in dict.fromkeys((tier, *self._tiers)):
            try:
                parcel.handle = self._tiers[name].put(parcel.buffer, label=label)
            except BudgetError:
                continue  # no room there; the next tier may have some
            parcel.tier = self._tiers[name]
            break
        else:
            return  # it stays where it is; whether that is within the budget shows when the step ends
        self.moved_bytes += parcel.nbytes
        for saved in parcel.members:
            self._forget_kept(saved)

    def _drop(self, parcel: Parcel) -> None:
        """Gives the parcel's room on the fast tier back, after its copy out or in."""
        if parcel.buffer is None:
            return
        assert parcel.handle is not None
        (parcel.back or parcel.handle.written).wait()
        parcel.back = None
        self._away[parcel.order] = parcel
        if parcel.hold is not None:
            for saved in parcel.members:
                saved.stale = saved.stale or parcel.hold._version != saved.version
        self._release(parcel)

    def _release(self, parcel: Parcel) -> None:
        if parcel.buffer is not None:
            self._shared.pop(parcel.buffer.untyped_storage()._cdata, None)
        for saved in parcel.members:
            self._forget_kept(saved)
            for key in saved.keys[1:]:
                self._by_key.pop(key, None)
            del saved.keys[1:]
            del saved.watch[1:]
        parcel.buffer = None
        parcel.hold = None
        parcel.used = False
        if self._resident.pop(parcel.order, None) is not None:
            self.resident_bytes -= parcel.nbytes

    def _forget_kept(self, saved: Saved) -> None:
        if any(tensor._version != saved.version for tensor in saved.kept.values()):
            saved.stale = True
        saved.kept.clear()

    def _fetch(self, parcel: Parcel) -> None:
        """Begins to bring a parcel back."""
        assert parcel.tier is not None
        assert parcel.handle is not None
        self._make_room(parcel.nbytes, parcel.block)
        parcel.buffer = self._empty(parcel.nbytes)
        parcel.back = parcel.tier.get(parcel.handle, parcel.buffer)
        self._hold(parcel)

    def _rebuild(self, saved: Saved, view: View) -> torch.Tensor:
        """The saved tensor as a view of bytes that are back, or were never gone."""
        if self.closed:
            raise StorageError(
                f"The Session that holds this saved tensor is closed ({self.closed}); run the step again."
            )
        parcel = saved.parcel
        if parcel.buffer is None and not saved.stale:
            self._fetch(parcel)
        elif self._plan is None and self.device.type == "cuda":  # pragma: gpu
            self._make_room_on_cuda(0, spare=parcel)
        if parcel.hold is not None and parcel.hold._version != saved.version:
            saved.stale = True
        if saved.stale:
            now = parcel.hold._version if parcel.hold is not None else saved.version + 1
            raise in_place_error(now, saved.version, view.dtype, view.size)
        if parcel.back is not None:
            parcel.back.wait()
            parcel.back = None
        assert parcel.buffer is not None
        storage = parcel.buffer.untyped_storage()
        if parcel.shared:
            self._shared[storage._cdata] = parcel
        elif (key := (storage._cdata, fresh_version())) not in self._by_key and parcel.hold is None:
            saved.keys.append(key)
            saved.watch.append(weak_reference(storage))
            self._by_key[key] = saved
        return view.over(parcel.buffer, saved.offset)

    def _hold(self, parcel: Parcel) -> None:
        self._away.pop(parcel.order, None)
        self._resident[parcel.order] = parcel
        self.resident_bytes += parcel.nbytes
        self.peak_bytes = max(self.peak_bytes, self.resident_bytes)

    def _discard(self, parcel: Parcel) -> None:
        """Autograd has let go of everything in it: gone from every tier."""
        if parcel.back is not None and self.device.type == "cuda":  # pragma: gpu
            # The memory goes back to the allocator, which must not hand it out before the copy into it has ended.
            parcel.back.wait()
        parcel.back = None
        came_back = parcel.handle is not None and parcel.buffer is not None and parcel.hold is None
        if self._check and came_back and self._is_alone(parcel):
            assert parcel.buffer is not None
            parcel.buffer.fill_(0xFF)
        self._release(parcel)
        self._away.pop(parcel.order, None)
        if parcel.handle is not None and parcel.tier is not None:
            parcel.tier.free(parcel.handle)
            parcel.handle = None
        if self._open is parcel:
            self._open = None

    # ------------------------------------------------------------------ room

    def _make_room(self, nbytes: int, block: str) -> None:
        """Pushes out what is needed latest until `nbytes` more fit the budget."""
        if self.device.type == "cuda":
            if self._plan is None:  # pragma: gpu
                self._make_room_on_cuda(nbytes)
            return
        stuck: set[Parcel] = set()  # the tiers have no room for these
        while self.resident_bytes + nbytes > self.limit_bytes:
            victim = next((parcel for parcel in self._victims() if parcel not in stuck), None)
            if victim is None:
                if self.shortfall is None or self.resident_bytes + nbytes > self.shortfall[0]:
                    self.shortfall = (self.resident_bytes + nbytes, block)
                return
            self._push_out(victim)
            if victim.buffer is not None:
                stuck.add(victim)

    def _make_room_on_cuda(self, nbytes: int, *, spare: Parcel | None = None) -> None:  # pragma: gpu
        """Without a plan nobody knows what the next block allocates: keep free twice what any has so far, or half."""
        excess = self._recorder.excess_bytes if self._recorder is not None else 0
        allowed = min(self.limit_bytes // 2, self.limit_bytes - 2 * excess)
        for victim in list(self._victims()):
            if torch.cuda.memory_allocated(self.device) + nbytes <= allowed:
                return
            if victim is not spare:
                self._push_out(victim)

    def _victims(self) -> Iterator[Parcel]:
        """Resident parcels in the order in which they can best be spared: first made, last needed."""
        if self._default_tier == KEEP:
            return
        in_use: list[Parcel] = []
        for parcel in list(self._resident.values()):
            if not parcel.movable or parcel.buffer is None:
                continue
            if parcel.used:
                in_use.append(parcel)
            else:
                yield parcel
        # After retain_graph a parcel stays in use as far as autograd tells; the storage's references tell more.
        for parcel in in_use:
            if parcel.buffer is not None and self._is_alone(parcel):
                yield parcel

    def _is_alone(self, parcel: Parcel) -> bool:
        """Whether nobody but the Session refers to the parcel's buffer."""
        assert parcel.buffer is not None
        kept = sum(len(saved.kept) for saved in parcel.members)
        return held_only_here(parcel.buffer, aliases=1 + (parcel.hold is not None) + kept)

    def _push_out(self, parcel: Parcel) -> None:
        if parcel is self._open:
            self._seal(parcel, move=True)
        if parcel.handle is None and parcel.buffer is not None:
            self._put(parcel, self._default_tier)
        if parcel.buffer is not None and parcel.handle is not None:
            self._drop(parcel)

    def _look_ahead(self) -> None:
        """Without a plan: brings back what was made just before the latest parcel that backward has reached."""
        if self._default_tier == KEEP or not self._in_step:
            return
        for order in heapq.nlargest(2, self._away):
            parcel = self._away[order]
            room = self.limit_bytes - self.resident_bytes
            if self.device.type == "cuda":  # pragma: gpu
                room = self.limit_bytes // 2 - torch.cuda.memory_allocated(self.device)
            if order < self._first_order or parcel.nbytes * 2 > room:
                return
            self._fetch(parcel)

    # ------------------------------------------------------------------ locking

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._lock.acquire()
        try:
            self._settle()
            yield
        finally:
            self._unlock()

    def _unlock(self) -> None:
        """Frees what was let go while the lock was held, then releases it."""
        while True:
            try:
                self._settle()
            finally:
                self._lock.release()
            if not self._letting_go or not self._lock.acquire(blocking=False):
                return

    def _settle(self) -> None:
        while self._letting_go:
            saved, ticket_id = self._letting_go.popleft()
            saved.kept.pop(ticket_id, None)
            saved.live -= 1
            if saved.live:
                continue
            for key in saved.keys:
                self._by_key.pop(key, None)
            saved.watch.clear()
            record = self._records.pop(saved, None)
            self._unowned.pop(saved, None)
            if record is not None:
                record.freed = self._moment + 1
                if self.device.type == "cuda" and record.owned is None:  # pragma: gpu
                    record.owned = self._moment + 1
            parcel = saved.parcel
            parcel.members.discard(saved)
            if not parcel.members and parcel.sealed:
                self._discard(parcel)


def planned_held(plan: Plan) -> list[int]:  # pragma: gpu
    """Bytes on the fast device for the Session's sake alone, in every interval of a step that follows the plan."""
    from torchstorm.plan.forecast import fast_profile, other_profile

    return [int(held) for held in fast_profile(plan.trace, plan.placements) - other_profile(plan.trace)]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
