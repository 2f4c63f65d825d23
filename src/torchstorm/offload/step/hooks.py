"""The saved-tensor hooks: what autograd saves goes where the plan says, and comes back as it was.

A storage moves as a whole, once, however many views of it are saved; views are rebuilt with their strides. In a step
with a plan every parcel leaves and returns at the moments the plan names, so the peak is the forecast's. Without one
(the first step, another branch, another shape) it is decided on the spot: everything that may move begins to move when
it is saved, and gives its room back as soon as the budget needs it.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torchstorm.errors import StorageError
from torchstorm.offload.recompute.probe import TracingProbe
from torchstorm.offload.recompute.tape import Tape
from torchstorm.offload.step.outside import Outside
from torchstorm.offload.step.packed import Locked, Ticket, Untouched, is_of_parameter, storage_of
from torchstorm.offload.step.parcels import Parcel, Saved, in_place_error
from torchstorm.offload.step.residency import Residency
from torchstorm.offload.step.resizes import listen
from torchstorm.offload.step.tracing import Recorder
from torchstorm.offload.step.views import View, flat_bytes, version_counter, weak_reference
from torchstorm.plan.forecast import KEEP
from torchstorm.plan.plan import Plan
from torchstorm.plan.recompute import RECOMPUTE
from torchstorm.plan.trace import PACK, UNPACK

SMALL_BYTES = 2**20  # below this a storage shares a copy with others
TINY_BYTES = 4096  # below this it stays
_ALIGNMENT = 512  # of storages in a shared buffer; the CUDA allocator's own
_OWN_THREADS = "torchstorm-"  # begins the names of the threads that copy
_APPLY = torch.autograd.Function.apply.__code__

Choice = tuple[Plan | None, Recorder | None]


def slab_bytes(limit_bytes: int) -> int:
    """Size of the buffers that small storages share, for a budget on the fast tier."""
    return max(min(4 * SMALL_BYTES, limit_bytes // 32), 4 * TINY_BYTES)


class SavedTensors:
    """Decides what happens to each saved tensor, and measures where there is no plan yet.

    Args:
        residency: what is where, and moves it.
    """

    def __init__(self, residency: Residency) -> None:
        self.residency = residency
        self._cuda = residency.device.type == "cuda"
        self._slab_bytes = slab_bytes(residency.limit_bytes)
        self._lock = threading.Lock()
        self._locked = Locked(self._lock, settle=self._settle, unlock=self._unlock)
        self._letting_go: deque[tuple[Saved, int]] = deque()
        self._open: Parcel | None = None
        self.closed = ""
        self.num_used = 0  # saved tensors that backward has asked for
        self.outside = Outside(residency, is_leaf=self.is_leaf, in_step=lambda: self._in_step)
        # The step that is running.
        self._in_step = False
        self._fixed: set[int] = set()
        self._inputs: dict[int, StorageWeakRef] = {}  # by storage address, which the reference keeps taken
        self._moment = self._num_saved = 0
        self._call_begins = 0  # the number of the first storage that the running autograd.Function saves
        self._plan: Plan | None = None
        self._numbered: dict[int, Parcel] = {}
        self._choose: Callable[[tuple[Any, ...]], Choice] | None = None
        self._recorder: Recorder | None = None
        self._tape: Tape | None = None
        self._probe: TracingProbe | None = None
        self.left_plan = False
        self.blocks: list[str] = []
        listen(self)
        residency.excess_bytes = lambda: self._recorder.excess_bytes if self._recorder is not None else 0

    # ------------------------------------------------------------------ a step

    def begin(self, fixed: set[int], choose: Callable[[tuple[Any, ...]], Choice], *, tape: Tape | None = None) -> None:
        """A step begins.

        Args:
            fixed: addresses of storages that never move: parameters and buffers.
            choose: called at the first save with what identifies it; gives the plan to follow, or None, and the
                recorder to fill, or None.
            tape: records the step's operations, so that saved tensors may be computed again.
        """
        with self._locked:
            self._end()
            self._fixed = fixed
            self._choose = choose
            self._in_step = True
            self.left_plan = False
            self.blocks = []
            self.residency.begin_step()
            self._tape = tape

    def is_leaf(self, address: int) -> bool:
        """Whether the storage at an address is a weight, a buffer or an input of the model."""
        return address in self._fixed or address in self._inputs

    def add_inputs(self, tensors: list[torch.Tensor]) -> None:
        """Names tensors that the user gave to the model: they are counted, and never moved."""
        with self._locked:
            for tensor in tensors:
                storage = storage_of(tensor, self.residency.device)
                if storage is not None:
                    self._inputs[storage._cdata] = weak_reference(storage)

    def end(self) -> Recorder | None:
        """The step is over. Returns the recorder it filled, if there was one and the step kept to what it records."""
        with self._locked:
            recorder = self._recorder
            if recorder is not None:
                recorder.arrive()
                recorder.watch(recorder.moment + 1)
            if self._probe is not None:
                self._probe.finish()
            self._end()
            return recorder

    def _end(self) -> None:
        """Forgets the step, but not what autograd still holds of it."""
        if self._open is not None:
            self._seal(self._open, move=False)
        for parcel in self._numbered.values():
            parcel.number = -1
        for saved in self.residency.all_saved():
            saved.ordinal = -1
        self._in_step = False
        self._inputs = {}
        self._moment = self._num_saved = 0
        self._plan = None
        self._numbered = {}
        self._choose = None
        self._recorder = None
        if self._tape is not None:
            self._tape.clear()
        self._tape = None
        self._probe = None

    # ------------------------------------------------------------------ hooks

    def pack(self, tensor: torch.Tensor) -> object:
        """Called by autograd when it saves a tensor."""
        storage = storage_of(tensor, self.residency.device)
        if storage is None or storage._cdata in self._fixed or is_of_parameter(tensor):
            return Untouched(tensor) if storage is not None else self.outside.keep(tensor)
        # What is done here is no operation of the step's.
        with self._locked, torch._C._DisableTorchDispatch():
            if self._recorder is not None:
                self._recorder.arrive()
            saved, base = self.residency.find(storage, tensor)
            if saved is None:
                saved = self._saved_by_the_same_call(storage, tensor)
            if saved is None:
                self._arrive(PACK, self._num_saved, storage.nbytes(), tensor)
                saved = self._save(storage, tensor)
            else:
                self._arrive(PACK, saved.ordinal, saved.nbytes, tensor)
            ticket = Ticket(self, saved, View.of(tensor, base))
            saved.live += 1
            parcel = saved.parcel
            if parcel.hold is not None and parcel.handle is None and not parcel.shared:
                saved.kept[id(ticket)] = tensor.detach()
            if parcel is self._open and self._is_full(parcel):
                self._seal(parcel, move=True)
            self._depart(look_ahead=False)
            return ticket

    def _saved_by_the_same_call(self, storage: torch.UntypedStorage, tensor: torch.Tensor) -> Saved | None:
        """A compiled graph saves q, k and v as views of one storage with a version counter each. What one call of an
        autograd.Function saves, which a graph is, it saves at once: the bytes are the same ones."""
        caller = sys._getframe(2)
        if caller.f_code is not _APPLY:
            return None
        if caller.f_trace_lines:  # true of every new frame, and of no use in this one: the call's first tensor
            caller.f_trace_lines = False
            self._call_begins = self._num_saved
        return self.residency.find_unchanged(storage, self._call_begins) if tensor._version == 0 else None

    def unpack(self, packed: object) -> torch.Tensor:
        """Called by autograd when backward needs a saved tensor."""
        self.num_used += 1
        if isinstance(packed, Untouched):
            return packed.unpack()
        assert isinstance(packed, Ticket)
        saved, view = packed.saved, packed.view
        if self.closed:
            raise StorageError(f"The Session that holds this tensor is closed ({self.closed}); run the step again.")
        with self._locked:
            if self._recorder is not None:
                self._recorder.arrive()
            self._arrive(UNPACK, saved.ordinal, saved.nbytes, None)
            if self._open is not None:
                self._seal(self._open, move=False)
            if self._recorder is not None:
                self._recorder.needed(saved)
            if saved.has_other_memory:
                self.residency.note_resized(saved.address)
            tensor = saved.kept.get(id(packed))
            if tensor is not None and tensor._version != saved.version:
                raise in_place_error(tensor._version, saved.version, view.dtype, view.size)
            if tensor is None:
                if self._cuda and self._plan is None:  # pragma: gpu
                    incoming = saved.parcel.nbytes if saved.parcel.buffer is None else 0
                    self.residency.make_room_on_cuda(incoming, spare=saved.parcel)
                tensor = self.residency.rebuild(saved, view)
            if tensor is None:
                hold = saved.parcel.hold
                now = saved.version + 1 if hold is None else max(hold._version, saved.version + 1)
                raise in_place_error(now, saved.version, view.dtype, view.size)
            saved.parcel.used = True
            self._depart(look_ahead=True)
            return tensor

    def let_go(self, saved: Saved, ticket_id: int) -> None:
        """Called when autograd drops a saved tensor, from any thread and even from within our own work."""
        self._letting_go.append((saved, ticket_id))
        # A collection can run in a thread that copies, which may hold its tier's lock just then: leave it to others.
        if not threading.current_thread().name.startswith(_OWN_THREADS) and self._lock.acquire(blocking=False):
            self._unlock()

    def before_resize(self, storage: torch.UntypedStorage) -> None:
        """A storage's memory is about to be freed or replaced, by whatever thread."""
        with self._locked, torch._C._DisableTorchDispatch():
            self.residency.note_resized(storage._cdata)
            if self._tape is not None:
                self._tape.note_resized(storage)

    # ------------------------------------------------------------------ moments

    def _arrive(self, kind: str, ordinal: int, nbytes: int, tensor: torch.Tensor | None) -> None:
        """Counts the moment, compares it with the plan and does what the plan has for it."""
        if not self._in_step:
            return
        self._moment += 1
        if self._choose is not None:
            choose, self._choose = self._choose, None
            self._plan, self._recorder = choose((tuple(tensor.shape), tensor.dtype) if tensor is not None else ())
            if self._recorder is not None:
                self._recorder.arrive()
            self._set_up_tape()
            if self._plan is not None and self._recorder is not None:
                self._recorder.follow(self._plan.trace, self._plan.placements)
        if self._recorder is not None:
            self._recorder.name(kind, ordinal, nbytes)
            self._recorder.watch(self._moment)
        plan = self._plan
        moments = plan.trace.moments if plan is not None else ()
        if plan is not None and (
            self._moment >= len(moments) or moments[self._moment].signature != (kind, ordinal, nbytes)
        ):
            self._leave_plan()
            return
        if self._recorder is not None:
            self._recorder.lie_still(self.residency.resident.values())
        if plan is None:
            return
        for number in plan.drops.get(self._moment, ()):
            if number in self._numbered:
                self.residency.drop(self._numbered[number])

    def _set_up_tape(self) -> None:
        """The step's plan is known now, or that it is traced: so is what its operations are recorded for."""
        tape, recorder = self._tape, self._recorder
        if tape is None:
            return
        if recorder is not None:
            recorder.calls = tape.calls
            if self._plan is None:
                self._probe = tape.probe = TracingProbe(
                    self.residency.device, aside=recorder.aside, room_bytes=self.residency.unused_bytes
                )
        elif self._plan is None or not self._plan.recomputes:
            tape.clear()
        else:
            tape.mark = None

    def _depart(self, *, look_ahead: bool) -> None:
        """The moment is over: begins the plan's fetches, or looks ahead without one."""
        if self._plan is not None:
            for number in self._plan.fetches.get(self._moment, ()):
                parcel = self._numbered.get(number)
                if parcel is not None and parcel.handle is not None and parcel.members and parcel.buffer is None:
                    self.residency.fetch(parcel)
        elif look_ahead and self._in_step:
            self.residency.look_ahead()
        if self._recorder is not None:
            self._recorder.leave(self.residency.resident.values())

    def _leave_plan(self) -> None:
        """The step is not the one that was planned: from here on it is decided on the spot."""
        if self._open is not None:
            self._seal(self._open, move=True)
        self._plan = None
        self._recorder = None
        self._numbered = {}
        self.left_plan = True

    # ------------------------------------------------------------------ saving

    def _save(self, storage: torch.UntypedStorage, tensor: torch.Tensor) -> Saved:
        """Takes charge of a storage that was not saved before."""
        nbytes, ordinal = storage.nbytes(), -1
        if self._in_step:
            ordinal = self._num_saved
            self._num_saved += 1
        # A small part of plain data is a slice of a data set, wherever the model got it from.
        is_slice = tensor.grad_fn is None and not tensor.requires_grad and 4 * tensor.nbytes < nbytes
        is_input = is_slice or storage._cdata in self._inputs
        movable = not is_input and nbytes >= TINY_BYTES
        number, num_together = -1, 0
        tier = self.residency.default_tier if movable else KEEP
        value = self._tape.value_of(storage, tensor._version) if self._tape is not None else None
        if value is not None and self._probe is not None and self._recorder is not None:
            with self._recorder.aside():
                self._probe.see(value, storage)
        if self._plan is not None:
            number = self._plan.trace.storages[ordinal].parcel if movable else -1
            tier = self._plan.placements[number].tier if number >= 0 else KEEP
            num_together = self._plan.trace.parcels[number].num_storages if number >= 0 else 0
            call = value.call if value is not None else None
            if tier == RECOMPUTE and (call is None or self._plan.maker(ordinal) != (call.number, call.signature)):
                self._leave_plan()
                number, num_together, tier = -1, 0, self.residency.default_tier
        block = self.blocks[-1] if self.blocks else ""
        if self._plan is not None:
            block = block or self._plan.trace.storages[ordinal].block
        is_small = nbytes < min(SMALL_BYTES, self._slab_bytes // 2 + 1)
        fingerprint = None
        if tier == RECOMPUTE:
            parcel, offset = self.residency.new_absent_parcel(nbytes, block), 0
            parcel.number = number
            self._numbered[number] = parcel
            fingerprint = self.residency.fingerprint_of(storage)
        elif tier != KEEP and (num_together > 1 if self._plan is not None else is_small):
            parcel = self._slab_for(nbytes, number, block)
            offset = parcel.filled
            parcel.filled += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
            assert parcel.buffer is not None
            with torch.no_grad():
                parcel.buffer[offset : offset + nbytes].copy_(flat_bytes(storage))
        else:
            if self._cuda and self._plan is None:  # pragma: gpu
                self.residency.make_room_on_cuda(0)
            # Of an input only what was saved counts: a slice of a whole data set does not count as all of it.
            counted = min(nbytes, tensor.nbytes) if is_input else nbytes
            parcel, offset = self.residency.new_parcel(counted, block, movable=movable), 0
            parcel.buffer = flat_bytes(storage)
            parcel.hold = tensor.detach()
        saved = Saved(
            parcel,
            nbytes,
            offset,
            tensor._version,
            version_counter(tensor) if parcel.hold is None else None,
            storage._cdata,
            weak_reference(storage),
            storage.data_ptr(),
            block,
            ordinal=ordinal,
            value=value,
            fingerprint=fingerprint,
        )
        if value is not None:
            value.saved = saved
        self.residency.add(saved)
        if tier not in (KEEP, RECOMPUTE) and not parcel.shared:
            if number >= 0:
                parcel.number = number
                self._numbered[number] = parcel
            self.residency.put(parcel, tier)
        if self._recorder is not None and self._plan is None:
            self._recorder.saved(saved, movable=movable, is_input=is_input)
        return saved

    def _slab_for(self, nbytes: int, number: int, block: str) -> Parcel:
        """The shared buffer that takes the next small storage."""
        slab = self._open
        if slab is not None and not slab.sealed:
            full = slab.filled + nbytes > slab.nbytes
            if not (slab.number != number if self._plan is not None else full):
                return slab
            self._seal(slab, move=True)
        if self._plan is not None:
            size = self._plan.trace.parcels[number].nbytes
        else:
            size = max(self.residency.room_bytes(self._slab_bytes), -(-nbytes // _ALIGNMENT) * _ALIGNMENT)
            if self._cuda:  # pragma: gpu
                self.residency.make_room_on_cuda(size)
        slab = self.residency.new_shared_parcel(size, block)
        if self._plan is not None:
            slab.number = number
            self._numbered[number] = slab
        self._open = slab
        return slab

    def _is_full(self, parcel: Parcel) -> bool:
        if self._plan is not None and parcel.number >= 0:
            return parcel.filled >= parcel.nbytes
        return parcel.nbytes - parcel.filled < TINY_BYTES

    def _seal(self, parcel: Parcel, *, move: bool) -> None:
        """No further storage joins; with `move` it begins to leave."""
        self._open = None
        if parcel.sealed:  # it had to be pushed out already
            return
        parcel.sealed = True
        if not parcel.members:
            self.residency.discard(parcel)
        elif move:
            tier = self.residency.default_tier
            if self._plan is not None and parcel.number >= 0:
                tier = self._plan.placements[parcel.number].tier
            self.residency.put(parcel, tier)

    # ------------------------------------------------------------------ locking

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
            if self._recorder is not None:
                self._recorder.let_go(saved)
            if saved.value is not None and saved.value.saved is saved:
                saved.value.saved = None
            saved.value = None
            self.residency.remove(saved)
