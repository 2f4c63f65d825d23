"""The short way through a settled step: its moments come from a list, and what stays is looked up there.

Everything else, a tensor that moves as well as a step that turns out to be another one, takes the long way in `hooks`.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from typing import ClassVar, Protocol

import torch

from torchstorm.offload.native.library import Way, library
from torchstorm.offload.recompute.tape import Tape
from torchstorm.offload.recompute.tensors import has_bytes
from torchstorm.offload.step.kept import Kept, KeptStorage
from torchstorm.offload.step.pace import Pace
from torchstorm.offload.step.packed import Keeper, Placeholder, Untouched, is_of_parameter
from torchstorm.offload.step.parcels import Parcel, Saved, Value
from torchstorm.offload.step.residency import Residency
from torchstorm.offload.step.tables import Table, fits
from torchstorm.offload.step.views import View, share_a_counter
from torchstorm.plan.recompute import RECOMPUTE
from torchstorm.plan.trace import PACK, UNPACK

_TENSOR, _PARAMETER, _STRIDED = torch.Tensor, torch.nn.Parameter, torch.strided
_num_dispatch_modes = torch._C._len_torch_dispatch_stack


class Progress(Protocol):
    """How far a step is; see `Running`."""

    moment: int
    num_saved: int
    pace: Pace | None
    settled: Settled | None


def _is_of_all(tensor: torch.Tensor, nbytes: int) -> bool:
    """Whether a tensor, or the one that it is a view of, is all of a storage: then they have one version counter."""
    whole = tensor if tensor._base is None else tensor._base
    return whole.layout is _STRIDED and whole.nbytes == nbytes


class Settled:
    """A step that follows a plan, or keeps everything, and of which nothing is measured or recorded.

    Each saved tensor passes here twice, so the code is flat.

    Attributes:
        native: what the C++ knows of it; None where Python takes the way.

    Args:
        residency: what is where.
        lock: held while anything is looked up.
        progress: of the step.
        fixed: addresses of storages that never move.
        table: of the plan; None where everything stays.
        is_exact: whether the plan is for steps of just these sizes; else none may be larger.
        owner: gets placeholders back.
        drop, fetch: do what the plan has for a moment.
        is_input: whether a storage, saved as a tensor, is an input of the model.
        save, save_made: take charge of what leaves, as `Saver.save_as_planned` and `Saver.save_made`.
        tape: records the step's operations; None where none are.
        saved_by_the_same_call: a storage as that call of an autograd.Function saved it which saves this tensor of it.
        seal_if_full: told that a storage has joined a parcel.
    """

    PACKING: ClassVar[frozenset[types.CodeType]]
    """What runs between the hook and the question which call it is in."""

    __slots__ = ("__dict__", "native")  # which C++ asks for by its place

    def __init__(
        self,
        residency: Residency,
        lock: threading.Lock,
        progress: Progress,
        fixed: set[int],
        table: Table | None,
        *,
        is_exact: bool,
        owner: Keeper,
        drop: Callable[[int], None],
        fetch: Callable[[int], None],
        is_input: Callable[[torch.UntypedStorage, torch.Tensor], bool],
        save: Callable[[torch.UntypedStorage, torch.Tensor, int], Saved | None],
        save_made: Callable[[Value, torch.Tensor, int], Saved],
        tape: Tape | None,
        saved_by_the_same_call: Callable[[torch.UntypedStorage, torch.Tensor], Saved | None],
        seal_if_full: Callable[[Parcel], None],
    ) -> None:
        self._residency = residency
        self._kept = residency.kept
        self._is_on_cpu = residency.device.type == "cpu"
        self._index = -1 if self._is_on_cpu else residency.device.index
        self._lock = lock
        self._progress = progress
        self._fixed = fixed
        self._table = table
        self._is_exact = is_exact
        self._drop, self._fetch = drop, fetch
        self._owner = owner
        self._is_input = is_input
        self._save_made = save_made
        self._repeats = repeats = tape.repeats if tape is not None else None
        self._notice = tape.value_to_save if tape is not None else None  # names the bytes in a storage that stays
        self._save, self._saved_by_the_same_call, self._seal_if_full = save, saved_by_the_same_call, seal_if_full
        self._pack = self._pack_unplanned if table is None else self._pack_planned
        self._made = table.made if table is not None and repeats is not None else {}
        self.native: Way | None = None
        if (found := library()) is not None:
            of_step = progress, lock, fixed, residency.kept, residency, repeats, tape, owner
            moments = table.moments_for(found) if table is not None else None
            self.native = residency.kept.by_cpp = found.Way(moments, *of_step, self._index, is_exact)

    def pack(self, tensor: torch.Tensor) -> Kept | Placeholder | Untouched | None:
        """What autograd gets for a tensor; None where the long way must be taken."""
        moment = self._progress.moment + 1
        if moment in self._made and not _num_dispatch_modes():
            placeholder = self._pack_made(tensor, moment)
            if placeholder is not None:
                return placeholder
        kind = type(tensor)
        if (kind is not _TENSOR and kind is not _PARAMETER) or tensor.layout is not _STRIDED:
            return None
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._fixed:
            if kind is _PARAMETER or not _num_dispatch_modes():
                return Untouched(tensor)
            with torch._C._DisableTorchDispatch():
                return Untouched(tensor)
        with self._lock:
            if self._progress.settled is not self:  # another thread has left the plan just now
                return None
            if self._kept.is_waiting:
                self._kept.settle()
            if _num_dispatch_modes():
                with torch._C._DisableTorchDispatch():  # no mode sees what is done here, the tape neither
                    return self._pack(tensor, storage, address)
            return self._pack(tensor, storage, address)

    def _pack_made(self, tensor: torch.Tensor, moment: int) -> Placeholder | None:
        """What autograd gets for a tensor that a recorded function returned, or a view of one, and that is to be
        computed again; None for any other one.

        Args:
            tensor: what it saves.
            moment: the next one, at which the table has such a tensor.
        """
        table, progress, repeats = self._table, self._progress, self._repeats
        assert table is not None
        assert repeats is not None
        ordinal, maker, nbytes = self._made[moment]
        value = repeats.returned(tensor, maker)
        if value is None:
            return None
        with self._lock:
            if progress.settled is not self or progress.moment + 1 != moment:  # another thread was faster
                return None
            if value.nbytes != nbytes and not fits(value.nbytes, nbytes, is_exact=self._is_exact):
                return None
            saved = value.saved
            if (ordinal != progress.num_saved) if saved is None else (saved.ordinal != ordinal):
                return None
            is_busy = moment in table.busy
            if is_busy:
                self._begin(moment)
            if saved is None:
                saved = self._save_made(value, tensor, ordinal)
                progress.num_saved += 1
            progress.moment = moment
            saved.live += 1
            view = value.view
            placeholder = Placeholder(
                self._owner, saved, view if view is not None and tensor._base is None else View.of(tensor)
            )
            if is_busy:
                self._finish(moment)
            return placeholder

    def _is_its_own(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor with plain strides, saved for the first time, is one that the Session cares for."""
        if tensor.get_device() != self._index or tensor.is_cpu is not self._is_on_cpu:
            return False
        if tensor.is_nested or tensor.is_quantized or tensor._is_zerotensor():
            return False
        return tensor._base is None or not is_of_parameter(tensor)

    def _pack_planned(
        self, tensor: torch.Tensor, storage: torch.UntypedStorage, address: int
    ) -> Kept | Placeholder | None:
        table, progress, kept = self._table, self._progress, self._kept
        assert table is not None
        moment, nbytes = progress.moment + 1, storage.nbytes()
        if moment >= table.num_moments:
            return None
        stay = table.stayers[moment]
        if stay is None:
            kind, ordinal, expected_bytes = table.signatures[moment]
            if kind != PACK or not fits(nbytes, expected_bytes, is_exact=self._is_exact):
                return None
            return self._pack_away(table, tensor, storage, ordinal, moment)
        ordinal, expected_bytes, counted_bytes, movable, block, is_noticed, is_read, is_busy = stay
        if nbytes != expected_bytes and not fits(nbytes, expected_bytes, is_exact=self._is_exact):
            return None
        if is_busy:
            self._begin(moment)
        value = None
        if ordinal == progress.num_saved:
            if self._was_saved(tensor, storage, address):
                return None
            if nbytes < counted_bytes:
                counted_bytes = nbytes
            if not self._is_its_own(tensor) or not self._count(counted_bytes):
                return None
            progress.num_saved = ordinal + 1
            if is_noticed and self._notice is not None:
                value = self._notice(storage, tensor._version, ordinal)
            found = KeptStorage(address, ordinal, nbytes, counted_bytes, movable, block)
            kept.add(found)
        else:
            known = kept.in_step().get(ordinal)
            if known is None or known.address != address or not known.num_live:
                return None
            found = known
        progress.moment = moment
        one = Kept(tensor, found, kept.released)
        if is_read and value is not None and one.tensor is not None:
            found.hold(value, one.tensor, self._owner)
        if is_busy:
            self._finish(moment)
        return one

    def _was_saved(self, tensor: torch.Tensor, storage: torch.UntypedStorage, address: int) -> bool:
        """Whether these bytes were saved before: where the plan has others, it is for another step."""
        if self._kept.has(tensor, address):
            return True
        known = self._residency.known
        return known.holds(address) and known.find(storage, tensor)[0] is not None

    def _pack_away(
        self, table: Table, tensor: torch.Tensor, storage: torch.UntypedStorage, ordinal: int, moment: int
    ) -> Placeholder | None:
        """What autograd gets for a tensor that leaves, or that may leave where the step turns out to be another one."""
        known, progress, address = self._residency.known, self._progress, storage._cdata
        is_known = known.holds(address)
        if not is_known and not self._may_leave(table, tensor, storage, ordinal):
            return None
        if self._kept.has(tensor, address):
            return None  # what stays in this plan
        is_busy = moment in table.busy
        if is_busy:
            self._begin(moment)
        saved, base = known.find(storage, tensor) if is_known else (None, 0)
        if saved is None and ordinal in table.saved_again:
            saved = self._saved_by_the_same_call(storage, tensor)
        is_new = saved is None
        if is_new and ordinal == progress.num_saved:
            if is_known and not self._may_leave(table, tensor, storage, ordinal):
                return None
            saved = self._save(storage, tensor, ordinal)
            progress.num_saved += saved is not None
        if saved is None or saved.ordinal != ordinal:
            return None
        progress.moment = moment
        placeholder = Placeholder(self._owner, saved, View.of(tensor, base))
        saved.live += 1
        parcel = saved.parcel
        if parcel.shared:
            self._seal_if_full(parcel)
        elif parcel.hold is not None and parcel.handle is None:
            saved.kept[id(placeholder)] = parcel.hold if is_new else tensor.detach()
        if is_busy:
            self._finish(moment)
        return placeholder

    def _may_leave(self, table: Table, tensor: torch.Tensor, storage: torch.UntypedStorage, ordinal: int) -> bool:
        """Whether a tensor that is saved for the first time is one that a plan may have leave."""
        if table.leaving[ordinal][1] == RECOMPUTE:  # an operation of the step has made it, as is looked up later
            return has_bytes(tensor)
        return self._is_its_own(tensor) and not self._is_input(storage, tensor)

    def _pack_unplanned(self, tensor: torch.Tensor, storage: torch.UntypedStorage, address: int) -> Kept | None:
        """Without a plan everything stays, and is only counted."""
        found = self._kept.at(address)
        if found is None:
            nbytes = storage.nbytes()
            if not nbytes or not self._is_its_own(tensor) or self._residency.known.holds(address):
                return None
            if self._is_input(storage, tensor) or not self._count(nbytes):
                return None  # of an input only what was saved counts
            ordinal = self._progress.num_saved
            self._progress.num_saved += 1
            found = KeptStorage(address, ordinal, nbytes, nbytes, True, "")
            self._kept.add(found)
            if not _is_of_all(tensor, nbytes):
                self._kept.in_parts.add(address)
        elif (address in self._kept.in_parts or not _is_of_all(tensor, found.nbytes)) and not any(
            kept.tensor is not None and share_a_counter(kept.tensor, tensor) for kept in found.alive()[:1]
        ):
            return None  # parts with a version counter each count as one storage each, as they do where they move
        return Kept(tensor, found, self._kept.released)

    def _count(self, nbytes: int) -> bool:
        """Counts bytes that become resident, if they fit."""
        residency = self._residency
        resident_bytes = residency.resident_bytes + nbytes
        if resident_bytes > residency.limit_bytes:
            return False
        residency.resident_bytes = resident_bytes
        if resident_bytes > residency.peak_bytes:
            residency.peak_bytes = resident_bytes
        return True

    def arrive(self, storage: KeptStorage) -> bool:
        """Backward asks for a tensor of this storage; False where the step is not the planned one."""
        table = self._table
        if table is None:
            return True
        with self._lock:
            if self._progress.settled is not self:
                return False
            moment = self._progress.moment + 1
            if moment >= table.num_moments:
                return False
            kind, ordinal, expected_bytes = table.signatures[moment]
            if kind != UNPACK or ordinal != storage.ordinal:
                return False
            if not fits(storage.nbytes, expected_bytes, is_exact=self._is_exact):
                return False
            self._progress.moment = moment
            if moment in table.busy:
                self._begin(moment)
                self._finish(moment)
        return True

    def follows(self, saved: Saved) -> bool:
        """Backward asks for a tensor of a storage that left; False where the step is not the planned one, or something
        is to be dropped or fetched. Under the lock."""
        table, progress = self._table, self._progress
        moment = progress.moment + 1
        if table is None or progress.pace is not None or moment in table.busy:
            return False
        if not table.has(moment, UNPACK, saved.ordinal, saved.nbytes, is_exact=self._is_exact):
            return False
        progress.moment = moment
        return True

    def _begin(self, moment: int) -> None:
        """A moment has come at which something is dropped or fetched."""
        if self._progress.pace is not None:
            self._progress.pace.stop()
        self._drop(moment)

    def _finish(self, moment: int) -> None:
        """It is over."""
        self._fetch(moment)
        if self._progress.pace is not None:
            self._progress.pace.go_on(moment)


Settled.PACKING = frozenset(one.__code__ for one in (Settled.pack, Settled._pack_planned, Settled._pack_away))
