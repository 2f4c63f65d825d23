"""The saved-tensor hooks: what autograd saves goes where the plan says, and comes back as it was.

A storage moves as a whole, once, however many views of it are saved; views are rebuilt with their strides. In a step
with a plan every parcel leaves and returns at the moments the plan names, so the peak is the forecast's. Without one
(the first step, another branch, another shape) it is decided on the spot: everything that may move begins to move when
it is saved, and gives its room back as soon as the budget needs it.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from torchstorm.errors import StorageError
from torchstorm.offload.native.library import new_lock
from torchstorm.offload.recompute.tape import Tape
from torchstorm.offload.recompute.watched import WatchedCalls
from torchstorm.offload.step.departing import Departing
from torchstorm.offload.step.improvise import Improvise
from torchstorm.offload.step.kept import Kept, KeptStorage
from torchstorm.offload.step.letting_go import LetGo
from torchstorm.offload.step.outside import Outside
from torchstorm.offload.step.pace import Pace
from torchstorm.offload.step.packed import Locked, Placeholder, Untouched, is_of_parameter, is_own_thread, storage_of
from torchstorm.offload.step.parcels import Place, Saved, in_place_error
from torchstorm.offload.step.policy import Count, Follow
from torchstorm.offload.step.residency import Residency
from torchstorm.offload.step.resizes import listen
from torchstorm.offload.step.room import Room
from torchstorm.offload.step.running import Change, Choice, Running
from torchstorm.offload.step.saving import Saver, buffers_of
from torchstorm.offload.step.settled import Settled
from torchstorm.offload.step.tables import Table, Tables
from torchstorm.offload.step.tracing import Recorder
from torchstorm.offload.step.views import View, weak_reference
from torchstorm.plan.forecast import KEEP
from torchstorm.plan.plan import Plan
from torchstorm.plan.trace import PACK, UNPACK

_APPLY, _PARAMETER = torch.autograd.Function.apply.__code__, torch.nn.Parameter
_is_function_mode_enabled = torch._C._is_torch_function_mode_enabled


class SavedTensors:
    """Decides what happens to each saved tensor, and measures where there is no plan yet.

    Args:
        residency: what is where, and moves it.
    """

    __slots__ = ("__dict__", "__weakref__", "_let_go", "_run", "closed", "num_used")  # places that C++ asks for

    def __init__(self, residency: Residency) -> None:
        self.residency = residency
        self._lock = new_lock()
        self._let_go = LetGo(residency, running=lambda: self._run)
        self._locked = Locked(self._lock, settle=self._let_go.settle, unlock=self._unlock)
        self.closed = ""
        self.num_used = 0  # saved tensors that backward has asked for
        self.outside = Outside(residency, is_leaf=self.is_leaf, in_step=lambda: self._run.in_step)
        self._room = Room(residency, running=lambda: self._run, give_up_kept=lambda: self._saver.give_up_kept(self))
        self._spot = Improvise(residency, self._room, buffers_of(residency.limit_bytes))
        self._run, self._tables = Running(policy=self._spot), Tables()
        self._saver = Saver(residency, made_otherwise=lambda *moment: self._departing.made_otherwise(*moment))
        self._departing = Departing(
            *(residency, self._room, self._saver, self, lambda: self._run),
            spot=self._spot,
            table_of=self._table_of,
            settle_in=self._settle_in,
            drop=self._drop,
        )
        listen(self)

    # ------------------------------------------------------------------ a step

    def begin(
        self,
        fixed: set[int],
        choose: Callable[[tuple[Any, ...]], Choice],
        change: Change,
        *,
        tape: Tape | None = None,
        watched: WatchedCalls | None = None,
    ) -> None:
        """A step begins.

        Args:
            fixed: addresses of storages that never move: parameters and buffers.
            choose: called at the first save with what identifies the step.
            change: called where the step turns out to be another one than its plan is for.
            tape: records the step's operations, so that saved tensors may be computed again.
            watched: within which calls it does so; None where it sees all of the step.
        """
        with self._locked:
            self._end()
            self._run = run = Running(in_step=True, fixed=fixed, policy=self._spot, tape=tape, watched=watched)
            run.choose, run.change = choose, change
            if watched is not None:
                watched.progress = self._run
            self.residency.begin_step()

    @property
    def left_plan(self) -> bool:
        """Whether the step has turned out to be another one than its plan is for."""
        return self._run.left_plan

    @property
    def blocks(self) -> list[str]:
        """The names of the modules that run, innermost last; filled by `Naming`."""
        return self._run.blocks

    def is_leaf(self, address: int) -> bool:
        """Whether the storage at an address is a weight, a buffer or an input of the model."""
        return address in self._run.fixed or address in self._run.inputs

    def add_inputs(self, tensors: list[torch.Tensor]) -> None:
        """Names tensors that the user gave to the model: they are counted, and never moved."""
        with self._locked:
            for tensor in tensors:
                storage = storage_of(tensor, self.residency.device)
                if storage is not None:
                    self._run.inputs[storage._cdata] = weak_reference(storage)

    def forget_measuring(self) -> None:
        """What a step has measured that broke is of no use."""
        self._run.recorder = self._run.probe = self._run.pace = None

    def end(self) -> Recorder | Pace | None:
        """The step is over. Returns what it was measured by, if it was and the step kept to what that records."""
        with self._locked:
            recorder, pace = self._run.recorder, self._run.pace
            if pace is not None:
                pace.end(self._run.moment)
            if recorder is not None:
                recorder.arrive()
                recorder.watch(recorder.moment + 1, self.residency.known)
            if self._run.probe is not None:
                self._run.probe.finish()
            self._end()
            return recorder or pace

    def _end(self) -> None:
        """Forgets the step, but not what autograd still holds of it."""
        self._saver.give_up_kept(self)
        if self._run.open is not None:
            self._saver.seal(self._run, move=False)
        for parcel in self._run.numbered.values():
            parcel.number = -1
        for saved in self.residency.known.all():
            saved.ordinal = -1
        if self._run.tape is not None:
            self._run.tape.clear(is_over=not self.residency.known)
        # These refer back to it: without that, its end need not wait for the garbage collector.
        self._run.settled = self._run.watched = self._run.change = None
        self._run, self.residency.waits, self.residency.kept.by_cpp = Running(policy=self._spot), None, None

    # ------------------------------------------------------------------ hooks

    def pack(self, tensor: torch.Tensor) -> object:
        """Called by autograd when it saves a tensor."""
        if _is_function_mode_enabled():  # no mode sees what is done here
            with torch._C.DisableTorchFunction():
                return self.pack(tensor)
        if type(tensor) is _PARAMETER:
            return Untouched(tensor)
        settled = self._run.settled
        if settled is not None and (packed := settled.pack(tensor)) is not None:
            return packed
        storage = storage_of(tensor, self.residency.device)
        if storage is None or storage._cdata in self._run.fixed or is_of_parameter(tensor):
            return Untouched(tensor) if storage is not None else self.outside.keep(tensor)
        with self._locked, torch._C._DisableTorchDispatch():  # what is done here is no operation of the step's
            if self._run.recorder is not None:
                self._run.recorder.arrive()
            if settled is not None and self.residency.kept.holds(storage._cdata):  # saved again, where no plan has it
                self._saver.give_up_kept(self)
            saved, base = self.residency.known.find(storage, tensor)
            if saved is None:
                saved = self._saved_by_the_same_call(storage, tensor)
            if saved is None:
                self._arrive(PACK, self._run.num_saved, storage.nbytes(), tensor)
                saved = self._saver.save(self._run, storage, tensor)
            else:
                self._arrive(PACK, saved.ordinal, saved.nbytes, tensor)
            placeholder = Placeholder(self, saved, View.of(tensor, base))
            saved.live += 1
            parcel = saved.parcel
            if parcel.hold is not None and parcel.handle is None and not parcel.shared:
                saved.kept[id(placeholder)] = tensor.detach()
            self._saver.seal_if_full(self._run, parcel)
            self._depart(look_ahead=False)
            return placeholder

    def _saved_by_the_same_call(self, storage: torch.UntypedStorage, tensor: torch.Tensor) -> Saved | None:
        """A compiled graph saves q, k and v as views of one storage with a version counter each. What one call of an
        autograd.Function saves, which a graph is, it saves at once: the bytes are the same ones."""
        caller: types.FrameType | None = sys._getframe(1)
        while caller is not None and (caller.f_code is SavedTensors.pack.__code__ or caller.f_code in Settled.PACKING):
            caller = caller.f_back
        if caller is None or caller.f_code is not _APPLY:
            return None
        if caller.f_trace_lines:  # true of every new frame, and of no use in this one: the call's first tensor
            caller.f_trace_lines = False
            self._run.call_begins = self._run.num_saved
        return self.residency.known.find_unchanged(storage, self._run.call_begins) if tensor._version == 0 else None

    def unpack(self, packed: object) -> torch.Tensor:
        """Called by autograd when backward needs a saved tensor."""
        self.num_used += 1
        run = self._run
        if type(packed) is Kept and packed.placeholder is None and not self.closed:
            if run.settled is not None and run.open is None and run.settled.arrive(packed.storage):
                tensor = packed.unpack()
                return tensor if tensor is not None else self._give_back_late(packed)
        elif type(packed) is Untouched:
            return packed.unpack()
        if self.closed:
            raise StorageError(f"The Session that holds this tensor is closed ({self.closed}); run the step again.")
        if isinstance(packed, Placeholder):
            with self._locked:
                if run.settled is None or run.open is not None or not run.settled.follows(packed.saved):
                    self._arrive_to_unpack(packed.saved)
                return self._give_back(packed)
        assert isinstance(packed, Kept)
        with self._locked:
            self._arrive_to_unpack(packed.storage if packed.placeholder is None else packed.placeholder.saved)
            if packed.placeholder is not None:  # at the latest now that it has left the plan
                return self._give_back(packed.placeholder)
            self._depart(look_ahead=True)
            tensor = packed.unpack()
            assert tensor is not None
            return tensor

    def _arrive_to_unpack(self, saved: Saved | KeptStorage) -> None:
        if self._run.recorder is not None:
            self._run.recorder.arrive()
        self._arrive(UNPACK, saved.ordinal, saved.nbytes, None)
        if self._run.open is not None:
            self._saver.seal(self._run, move=False)

    def _give_back_late(self, packed: Kept) -> torch.Tensor:
        """What stayed by plan, and has left it since backward asked for it."""
        with self._locked:
            assert packed.placeholder is not None
            return self._give_back(packed.placeholder)

    def _give_back(self, placeholder: Placeholder) -> torch.Tensor:
        saved, view, run = placeholder.saved, placeholder.view, self._run
        if run.recorder is not None:
            run.recorder.needed(saved)
        if saved.has_other_memory:
            self.residency.note_resized(saved.address)
        tensor = saved.kept.get(id(placeholder)) if saved.kept else None
        if tensor is not None and tensor._version != saved.version:
            raise in_place_error(tensor._version, saved.version, view.dtype, view.size)
        if tensor is None:
            run.policy.keep_free(saved.parcel.nbytes if saved.parcel.buffer is None else 0, spare=saved.parcel)
            tensor = self.residency.rebuild(saved, view)
        if tensor is None:
            hold = saved.parcel.hold
            now = saved.version + 1 if hold is None else max(hold._version, saved.version + 1)
            raise in_place_error(now, saved.version, view.dtype, view.size)
        saved.parcel.used = True
        self._depart(look_ahead=True)
        return tensor

    def let_go(self, saved: Saved, placeholder_id: int) -> None:
        """Called when autograd drops a saved tensor, from any thread and even from within our own work."""
        self._let_go.add(saved, placeholder_id)
        self.settle_soon()

    def settle_soon(self) -> None:
        """Frees what autograd has let go of; where someone else has the lock, that one does."""
        if not is_own_thread() and self._lock.acquire(blocking=False):
            self._unlock()

    def before_resize(self, storage: torch.UntypedStorage) -> None:
        """A storage's memory is about to be freed or replaced, by whatever thread."""
        with self._locked, torch._C._DisableTorchDispatch():
            self.residency.note_resized(storage._cdata)
            if self._run.tape is not None:
                self._run.tape.note_resized(storage)

    # ------------------------------------------------------------------ moments

    def _arrive(self, kind: str, ordinal: int, nbytes: int, tensor: torch.Tensor | None) -> None:
        """Counts the moment, compares it with the plan and does what the plan has for it."""
        run = self._run
        if run.settled is not None and run.table is not None:
            if run.pace is not None:
                run.pace.stop()
            run.moment = moment = run.moment + 1
            if not run.table.has(moment, kind, ordinal, nbytes, is_exact=run.is_exact):
                self._departing.depart(kind, ordinal, nbytes)
            elif moment in run.table.busy:
                self._drop(moment)
            return
        if not run.in_step:
            return
        run.moment += 1
        if run.choose is not None:
            choose, run.choose = run.choose, None
            choice = choose((tuple(tensor.shape), tensor.dtype) if tensor is not None else ())
            run.is_exact, run.turned = choice.is_exact, choice.turned
            run.pace = choice.measure if isinstance(choice.measure, Pace) else None
            run.recorder = choice.measure if isinstance(choice.measure, Recorder) else None
            if run.recorder is not None:
                run.recorder.arrive()
            if choice.plan is not None:
                run.policy = Follow(choice.plan, self._spot)
                run.table = self._tables.follow(choice.plan, choice.others, choice.any_other, run.watched is None)
                run.recorded = run.table.recorded
            elif run.recorder is None and run.tape is None and self.residency.default_tier == KEEP:
                run.policy = Count()
            run.set_up_tape(self.residency, may_repeat=not (self.residency.known or self.residency.checks))
            if run.plan is not None and run.recorder is not None:
                run.recorder.follow(run.plan.trace, run.plan.placements)
            run.settled = self._settle_in()
        if run.recorder is not None:
            run.recorder.name(kind, ordinal, nbytes)
            run.recorder.watch(run.moment, self.residency.known)
        plan, table = run.plan, run.table
        if table is not None and not table.has(run.moment, kind, ordinal, nbytes, is_exact=run.is_exact):
            self._departing.depart(kind, ordinal, nbytes)
            return
        if run.recorder is not None:
            run.recorder.lie_still(self.residency.resident.values())
        if plan is not None:
            self._drop(run.moment)

    def _table_of(self, plan: Plan) -> Table:
        return self._tables.of(plan, all_recorded=self._run.watched is None)

    def _settle_in(self) -> Settled | None:
        """The short way through a step; None where something is measured or decided on the spot."""
        if self._run.recorder is not None or self._run.policy is self._spot:
            return None
        table = self._run.table
        return Settled(
            *(self.residency, self._lock, self._run, self._run.fixed, table),
            is_exact=self._run.is_exact,
            owner=self,
            drop=self._drop,
            fetch=self._fetch,
            is_input=functools.partial(self._saver.is_input, self._run),
            save=functools.partial(self._saver.save_as_planned, self._run),
            save_made=functools.partial(self._saver.save_made, self._run),
            tape=self._run.tape,
            saved_by_the_same_call=self._saved_by_the_same_call,
            seal_if_full=functools.partial(self._saver.seal_if_full, self._run),
        )

    def _drop(self, moment: int) -> None:
        """Gives back what the plan drops at a moment."""
        run = self._run
        run.note_turn(moment)
        for number in run.policy.drops(moment):
            if number in run.numbered:
                self.residency.drop(run.numbered[number])

    def _fetch(self, moment: int) -> None:
        """Begins to bring back what the plan fetches at a moment."""
        self._let_go.settle()
        for number in self._run.policy.fetches(moment):
            parcel = self._run.numbered.get(number)
            if parcel is not None and parcel.place is Place.AWAY and parcel.members:
                self.residency.fetch(parcel)

    def _depart(self, *, look_ahead: bool) -> None:
        """The moment is over: begins the plan's fetches, or looks ahead without one."""
        run = self._run
        if run.settled is not None and run.table is not None:
            if run.moment in run.table.busy:
                self._fetch(run.moment)
            if run.pace is not None:
                run.pace.go_on(run.moment)
            return
        if self._run.plan is not None:
            self._fetch(self._run.moment)
        elif look_ahead and self._run.in_step:
            run.policy.look_ahead()
        if self._run.recorder is not None:
            self._run.recorder.leave(self.residency.resident.values())

    # ------------------------------------------------------------------ locking

    def _unlock(self) -> None:
        """Frees what was let go while the lock was held, then releases it."""
        while True:
            try:
                self._let_go.settle()
            finally:
                self._lock.release()
            if not self._let_go.is_waiting or not self._lock.acquire(blocking=False):
                return
