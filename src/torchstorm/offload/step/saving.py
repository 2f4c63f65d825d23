"""Takes charge of a storage when autograd saves it: as a parcel of its own, or in a buffer that small ones share."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional as F

from torchstorm.offload.step.kept import Kept, KeptStorage
from torchstorm.offload.step.packed import Keeper, Placeholder
from torchstorm.offload.step.parcels import (
    TINY_BYTES,
    Call,
    Parcel,
    Saved,
    Value,
    bytes_in_a_buffer,
    is_made_by,
    whole_places,
)
from torchstorm.offload.step.residency import Residency
from torchstorm.offload.step.running import Running
from torchstorm.offload.step.views import View, flat_bytes, root_of, version_counter, weak_reference
from torchstorm.plan.forecast import KEEP
from torchstorm.plan.packing import Buffers
from torchstorm.plan.recompute import RECOMPUTE

SMALL_BYTES = 2**20  # below this a storage shares a copy with others
_OURS = str(Path(__file__).parents[2])  # begins the names of the files of whatever runs between an operation and this
_FEW = 2**18  # of storages that a budget has room for, whatever each of them holds


def least_moved_bytes(limit_bytes: int) -> int:
    """Size of the smallest storage that may move, for a budget on the fast tier: less costs the host more than it is
    worth."""
    return max(TINY_BYTES, min(limit_bytes // _FEW, SMALL_BYTES // 4))


def slab_bytes(limit_bytes: int) -> int:
    """Size of the buffers that small storages share, for a budget on the fast tier."""
    return max(min(4 * SMALL_BYTES, whole_places(limit_bytes // 32)), 4 * TINY_BYTES)


def small_bytes(limit_bytes: int) -> int:
    """What is smaller shares a buffer with others, for a budget on the fast tier."""
    return min(SMALL_BYTES, slab_bytes(limit_bytes) // 2 + 1)


def buffers_of(limit_bytes: int, *, can_move: bool = True) -> Buffers:
    """What a Session that has such a budget on the fast tier puts together when it decides on the spot.

    Args:
        limit_bytes: that budget.
        can_move: whether there is a tier to move to.
    """
    return Buffers(
        least_moved_bytes=least_moved_bytes(limit_bytes),
        small_bytes=small_bytes(limit_bytes) if can_move else 0,
        shared_bytes=slab_bytes(limit_bytes),
        least_left_bytes=TINY_BYTES,
        padded=bytes_in_a_buffer,
    )


class Saver:
    """Makes parcels of what autograd saves.

    Args:
        residency: what is where, and moves it.
        made_otherwise: called where another operation than the plan's has made a storage, with that one's number and
            bytes, and the operation, if it was recorded. Another plan may be followed then, or none.
    """

    def __init__(self, residency: Residency, *, made_otherwise: Callable[[int, int, Call | None], None]) -> None:
        self._residency = residency
        self._made_otherwise = made_otherwise

    def make_parcels(self, owner: Keeper, storage: KeptStorage, alive: list[Kept]) -> None:
        """What stayed may move from here on: gives its saved tensors placeholders, which `owner` takes back."""
        for version in {kept.version for kept in alive}:
            same = [kept for kept in alive if kept.version == version]
            tensor = same[0].tensor
            assert tensor is not None
            nbytes = storage.nbytes if storage.movable else min(storage.nbytes, tensor.nbytes)
            memory = tensor.untyped_storage()
            parcel = self._residency.new_parcel(nbytes, storage.block, movable=storage.movable)
            parcel.buffer, parcel.hold = flat_bytes(memory), tensor
            saved = Saved(
                *(parcel, storage.nbytes, 0, version, None, storage.address, weak_reference(memory)),
                *(memory.data_ptr(), storage.block),
                ordinal=storage.ordinal,
            )
            if storage.value is not None and storage.value.version == version:
                saved.value, storage.value.saved = storage.value, saved
            parcel.members.add(saved)
            self._residency.known.add(saved, saved.address)
            for kept in same:
                assert kept.tensor is not None
                kept.placeholder = Placeholder(owner, saved, View.of(kept.tensor))
                saved.live += 1
                saved.kept[id(kept.placeholder)] = kept.tensor
                kept.tensor = None
        storage.release()

    def give_up_kept(self, owner: Keeper) -> None:
        """What stayed, and autograd still holds, may move from here on; see `make_parcels`."""
        for storage, alive in self._residency.kept.give_up():
            self.make_parcels(owner, storage, alive)

    def is_input(self, run: Running, storage: torch.UntypedStorage, tensor: torch.Tensor) -> bool:
        """Whether a storage is one that the user gave to the model, which never moves."""
        # A small part of plain data is a slice of a data set, wherever the model got it from.
        if not tensor.requires_grad and tensor.grad_fn is None and 4 * tensor.nbytes < storage.nbytes():
            return True
        return storage._cdata in run.inputs

    def save(self, run: Running, storage: torch.UntypedStorage, tensor: torch.Tensor) -> Saved:
        """Takes charge of a storage that was not saved before."""
        nbytes, ordinal = storage.nbytes(), -1
        if run.in_step:
            ordinal = run.num_saved
            run.num_saved += 1
        is_input = self.is_input(run, storage, tensor)
        may_leave = run.policy.may_leave(ordinal, nbytes)
        movable = may_leave and not is_input and (tensor.requires_grad or not _is_filled_later())
        value = run.tape.value_to_save(storage, tensor._version) if run.tape is not None else None
        if value is not None and run.probe is not None and run.recorder is not None:
            with run.recorder.aside():
                run.probe.see(value, storage)
        call = value.call if value is not None else None
        if movable and run.policy.is_made_otherwise(ordinal, call):
            self._made_otherwise(ordinal, nbytes, call)
        block = run.blocks[-1] if run.blocks else ""
        tier, number, is_shared, block = run.policy.decide(ordinal, nbytes, movable=movable, block=block)
        fingerprint = None
        if tier == RECOMPUTE:
            parcel, offset = self._residency.new_absent_parcel(nbytes, block), 0
            parcel.number = number
            run.numbered[number] = parcel
            fingerprint = self._residency.fingerprint_of(storage)
        elif is_shared:
            parcel = self._slab_for(run, nbytes, number, block)
            offset = self._join(parcel, storage, nbytes)
        else:
            run.policy.keep_free(0)
            # Of an input only what was saved counts: a slice of a whole data set does not count as all of it.
            counted = min(nbytes, tensor.nbytes) if is_input else nbytes
            parcel, offset = self._residency.new_parcel(counted, block, movable=movable), 0
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
            value.saved, value.held = saved, None
        parcel.members.add(saved)
        self._residency.known.add(saved, saved.address)
        if tier not in (KEEP, RECOMPUTE) and not parcel.shared:
            if number >= 0:
                parcel.number = number
                run.numbered[number] = parcel
            self._residency.put(parcel, tier)
        if run.recorder is not None and run.plan is None:
            run.recorder.saved(saved, movable=movable, is_input=is_input)
        return saved

    def save_as_planned(
        self, run: Running, storage: torch.UntypedStorage, tensor: torch.Tensor, ordinal: int
    ) -> Saved | None:
        """The same as `save` for what leaves in a settled step; None where the plan is for another one.

        Args:
            run: the step, which follows a plan.
            storage: of the tensor; as large as the plan has it.
            tensor: what autograd saves.
            ordinal: the storage's number.
        """
        table, residency = run.table, self._residency
        assert table is not None
        number, tier, is_shared, maker, block = table.leaving[ordinal]
        version, nbytes, address, offset = tensor._version, storage.nbytes(), storage._cdata, 0
        value = run.tape.value_to_save(storage, version, ordinal) if run.tape is not None else None
        counter = fingerprint = None
        if tier == RECOMPUTE:
            call = value.call if value is not None else None
            if call is None or not is_made_by(call, maker):
                return None
            parcel = residency.new_absent_parcel(nbytes, block)
            fingerprint = residency.fingerprint_of(storage)
            counter = version_counter(tensor)
        elif is_shared:
            parcel = self._slab_for(run, nbytes, number, block)
            offset = self._join(parcel, storage, nbytes)
            counter = version_counter(tensor)
        else:
            parcel = residency.new_parcel(nbytes, block, movable=True)
            parcel.buffer, parcel.hold = flat_bytes(storage), tensor.detach()
        parcel.number = number
        run.numbered[number] = parcel
        watch = weak_reference(storage) if value is None or value.watch is None else value.watch
        saved = Saved(parcel, nbytes, offset, version, counter, address, watch, storage.data_ptr(), block, 0, ordinal)
        if value is not None:
            saved.value, value.saved, value.held = value, saved, None
        saved.fingerprint, saved.root = fingerprint, root_of(tensor)
        parcel.members.add(saved)
        residency.known.add(saved, address)
        if parcel.hold is not None:
            residency.send(parcel, tier)
        return saved

    def save_made(self, run: Running, value: Value, tensor: torch.Tensor, ordinal: int) -> Saved:
        """The same for a tensor that a recorded function returned, and that is to be computed again.

        Args:
            run: the step, which follows a plan.
            value: its bytes.
            tensor: what autograd saves.
            ordinal: the storage's number.
        """
        assert run.table is not None
        assert value.watch is not None
        number, _, _, _, block = run.table.leaving[ordinal]
        nbytes, watch, pointer = value.nbytes, value.watch, tensor.untyped_storage().data_ptr()
        address, saved = watch.cdata, value.saved_before
        if saved is None or saved.nbytes != nbytes:
            parcel = self._residency.new_absent_parcel(nbytes, block)
            saved = Saved(parcel, nbytes, 0, value.version, None, address, watch, pointer, block)
        else:  # gone from everywhere, since nothing is left of the step that it belonged to
            parcel = saved.parcel
            self._residency.let_go_again(parcel)
            saved.version, saved.address, saved.watch, saved.pointer = value.version, address, watch, pointer
            saved.counter, saved.stale, saved.lost, saved.block = None, False, None, block
            saved.fingerprint = None  # of what that step let go
        parcel.number, saved.ordinal = number, ordinal
        run.numbered[number] = parcel
        saved.value, saved.origin, value.saved, value.saved_before = value, value.root, saved, saved
        parcel.members.add(saved)
        self._residency.known.add(saved, address)
        return saved

    def seal_if_full(self, run: Running, parcel: Parcel) -> None:
        """A storage has joined a parcel, maybe the last one that the open buffer has room for."""
        if parcel is run.open and run.policy.is_full(parcel):
            self.seal(run, move=True)

    def _join(self, slab: Parcel, storage: torch.UntypedStorage, nbytes: int) -> int:
        """Copies a storage into a shared buffer; returns where it begins there."""
        offset = slab.filled
        slab.filled += bytes_in_a_buffer(nbytes)
        slab.num_joined += 1
        assert slab.buffer is not None
        with torch.no_grad():
            slab.buffer[offset : offset + nbytes].copy_(flat_bytes(storage))
        return offset

    def _slab_for(self, run: Running, nbytes: int, number: int, block: str) -> Parcel:
        """The shared buffer that takes the next small storage."""
        slab = run.open
        if slab is not None and not slab.sealed:
            if run.policy.joins(slab, number, nbytes):
                return slab
            self.seal(run, move=True)
        slab = self._residency.new_shared_parcel(run.policy.shared_bytes(number, nbytes), block)
        if number >= 0:
            slab.number = number
            run.numbered[number] = slab
        run.open = slab
        return slab

    def seal(self, run: Running, *, move: bool) -> None:
        """No further storage joins the open buffer; with `move` it begins to leave."""
        parcel, run.open = run.open, None
        if parcel is None or parcel.sealed:  # it had to be pushed out already
            return
        parcel.sealed = True
        if not parcel.members:
            self._residency.discard(parcel)
        elif move:
            self._residency.put(parcel, run.policy.tier_of(parcel))


def _is_filled_later() -> bool:
    """Whether what is saved is filled only afterwards, as rrelu does with its noise: a copy would hold none of it."""
    caller: types.FrameType | None = sys._getframe(1)
    while caller is not None and caller.f_code.co_filename.startswith(_OURS):
        caller = caller.f_back
    return caller is not None and caller.f_code is F.rrelu.__code__
