"""Which parcels are on the fast device, which are away, and how they come and go within the budget."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import torch

from torchstorm.errors import BudgetError, CorruptionError, StorageError, TorchstormError, UnsupportedError
from torchstorm.memory.tier import Tier
from torchstorm.offload.fast import FastTier
from torchstorm.offload.recompute.fingerprint import fingerprint
from torchstorm.offload.recompute.replay import compute_again
from torchstorm.offload.step.kept import KeptTensors
from torchstorm.offload.step.known import SavedStorages
from torchstorm.offload.step.parcels import Parcel, Place, Saved, dropped_error, label_of, resized_error
from torchstorm.offload.step.views import View, flat_bytes, held_only_here, row_of, version_counter


class Residency:
    """Moves parcels.

    Not thread-safe: `SavedTensors` holds its lock around every call.

    Args:
        fast: the fast device.
        limit_bytes: the budget on it.
        tiers: where parcels can go, by the names of placements ("ram", "disk"); may be empty.
        default_tier: the one that unplanned moves go to; "keep" where there is none.
        staging_bytes: constant room for copies under way, counted as resident.
        check: poison buffers that came back, once autograd has let go of them.
    """

    # These C++ asks for by their places.
    __slots__ = (
        *("__dict__", "_order", "absent", "away", "checks", "known", "limit_bytes", "peak_bytes", "resident"),
        *("resident_bytes", "waits"),
    )

    def __init__(
        self,
        fast: FastTier,
        *,
        limit_bytes: int,
        tiers: dict[str, Tier],
        default_tier: str,
        staging_bytes: int,
        check: bool,
    ) -> None:
        self.fast, self.device = fast, fast.device
        self.limit_bytes = limit_bytes
        self.default_tier = default_tier
        self.staging_bytes = staging_bytes
        self.resident_bytes = staging_bytes
        self.peak_bytes = staging_bytes
        self.moved_bytes = 0
        self.shortfall: tuple[int, str] | None = None
        self.has_forgotten = False  # whether the step has let anything go to compute it again, without a plan
        self.resident: dict[int, Parcel] = {}  # by order of making
        self.make_room: Callable[[int, str], None] = lambda nbytes, block: None  # see `Room`
        self.checks = check
        self.waits: list[tuple[object, object]] | None = None  # see `Span`
        self._mark = fast.clock().mark
        self._tiers, self._empty = tiers, fast.empty
        self._others = {name: [one for one in tiers.values() if one is not tier] for name, tier in tiers.items()}
        self.away: dict[int, Parcel] = {}  # by order of making
        self.absent: set[Parcel] = set()  # let go when they were saved, and not computed again so far
        self._order = self.first_order = 0
        self.known = SavedStorages()
        self.kept = KeptTensors(self._count)

    def begin_step(self) -> None:
        """Counts peaks and moved bytes from here."""
        self.first_order = self._order
        self.peak_bytes = self.resident_bytes
        self.moved_bytes = 0
        self.shortfall, self.has_forgotten = None, False

    def remove(self, saved: Saved) -> None:
        """Autograd has let go of a storage; the last one of a parcel takes the parcel with it."""
        self.known.remove(saved)
        saved.parcel.members.discard(saved)
        if not saved.parcel.members and saved.parcel.sealed:
            self.discard(saved.parcel)

    def abandon_step(self) -> None:
        """Lets go of all bytes that the running step saved, though autograd still refers to them."""
        self.kept.lose(lambda block: dropped_error())
        for saved in self.known.all():
            if saved.parcel.order >= self.first_order:
                self._lose(saved, dropped_error)
        for parcel in [*self.resident.values(), *self.away.values()]:
            if parcel.order >= self.first_order:
                self.discard(parcel)

    def note_resized(self, address: int) -> None:
        """The storage at an address has other memory, or is about to: lets go of what was saved of it."""
        self.kept.lose(resized_error, address=address)
        for saved in self.known.at(address):
            parcel = saved.parcel
            if parcel.handle is not None and parcel.hold is not None and not self.fast.is_beside_host:
                with contextlib.suppress(StorageError):
                    parcel.handle.written.wait()  # a thread may be reading it
            elif parcel.handle is not None:
                parcel.handle.written.done()  # begins what has not begun, as long as the memory is there
            self._lose(saved, functools.partial(resized_error, saved.block))
            if not parcel.shared:
                self.discard(parcel)

    def _lose_if_resized(self, parcel: Parcel) -> bool:
        """Lets go of a parcel whose storage has other memory by now; returns whether it has. Shared ones are copies."""
        resized = [saved for saved in parcel.members if saved.has_other_memory] if not parcel.shared else []
        for saved in resized:
            self.note_resized(saved.address)
        return bool(resized)

    def _lose(self, saved: Saved, why: Callable[[], TorchstormError]) -> None:
        """Autograd still refers to it, but its bytes cannot be had any more; what saves the same tensor is new."""
        saved.lost = why
        if saved.value is not None and saved.value.saved is saved:
            saved.value.saved, saved.value.lost = None, why
        saved.value = None
        self.known.remove(saved)

    # ------------------------------------------------------------------ coming and going

    def new_parcel(self, nbytes: int, block: str, *, movable: bool) -> Parcel:
        """Makes room for a parcel and counts it as resident; the caller gives it its buffer."""
        self.make_room(nbytes, block)
        order = self._order
        self._order = order + 1
        parcel = self.resident[order] = Parcel(nbytes, block, movable, order)
        self._count(nbytes)
        return parcel

    def new_shared_parcel(self, nbytes: int, block: str) -> Parcel:
        """A parcel with a buffer of its own, into which small storages are copied."""
        parcel = self.new_parcel(nbytes, block, movable=True)
        parcel.buffer = self._empty(nbytes, 0)
        parcel.shared = True
        parcel.sealed = False
        return parcel

    def new_absent_parcel(self, nbytes: int, block: str) -> Parcel:
        """A parcel whose bytes are let go at once, and computed again when they are needed."""
        parcel = Parcel(nbytes, block, True, self._order, recomputed=True)
        self._order += 1
        self.absent.add(parcel)
        return parcel

    def let_go_again(self, parcel: Parcel) -> None:
        """Makes a parcel that `new_absent_parcel` made, and of which nothing is left, a new one."""
        parcel.order = self._order
        self._order += 1
        parcel.used, parcel.recomputed = False, True
        self.absent.add(parcel)

    def put(self, parcel: Parcel, tier: str) -> None:
        """Begins the copy out, to the named tier or, where that has no room, to another."""
        if not self._lose_if_resized(parcel):
            self.send(parcel, tier)

    def send(self, parcel: Parcel, tier: str) -> None:
        """The same for a parcel that was made just now, so that nobody has resized its storage."""
        assert parcel.buffer is not None
        content = parcel.buffer[: parcel.filled] if parcel.shared else row_of(parcel.buffer)
        is_read_by_threads = not self.fast.is_beside_host
        if self.checks and is_read_by_threads and parcel.hold is not None and parcel.hold.nbytes < parcel.nbytes:
            content = content.clone()  # parts with a version counter of their own may change while it is written
        label = label_of(parcel.block)
        for candidate in (self._tiers[tier], *self._others[tier]):
            try:
                parcel.handle = candidate.put(content, label=label)
            except BudgetError:
                continue
            parcel.tier = candidate
            break
        else:
            return  # it stays where it is; whether that is within the budget shows when the step ends
        self.moved_bytes += content.nbytes
        for saved in parcel.members:
            if saved.kept:
                _forget_kept(saved)

    def drop(self, parcel: Parcel) -> None:
        """Gives the parcel's room on the fast device back, after its copy out (or in) has ended.

        Raises:
            StorageError: that copy failed.
        """
        if parcel.place not in (Place.BOTH, Place.COMING):
            return
        assert parcel.handle is not None
        begun = self._mark() if self.waits is not None else None
        (parcel.back or parcel.handle.written).wait()
        if self.waits is not None:
            self.waits.append((begun, self._mark()))
        parcel.back = None
        if self._lose_if_resized(parcel):
            return
        for saved in parcel.members:
            if parcel.hold is not None:
                saved.stale = saved.stale or parcel.hold._version != saved.version
            if saved.base is not None:
                saved.stale = saved.stale or saved.base._version != saved.base_version
        self.away[parcel.order] = parcel
        self._release(parcel)

    def forget(self, parcel: Parcel) -> None:
        """Gives the parcel's room on the fast device back: its one storage is computed again when it is needed."""
        assert parcel.buffer is not None
        (saved,) = parcel.members
        saved.fingerprint = fingerprint(row_of(parcel.buffer))
        parcel.recomputed = self.has_forgotten = True
        self._release(parcel)
        self.absent.add(parcel)

    def fetch(self, parcel: Parcel) -> None:
        """Takes room for a parcel that is away and begins the copy in."""
        assert parcel.tier is not None
        assert parcel.handle is not None
        self.make_room(parcel.nbytes, parcel.block)
        buffer = self._empty(parcel.nbytes, parcel.handle.phase)
        parcel.back = parcel.tier.get(parcel.handle, buffer)
        parcel.buffer = buffer  # not before, since `get` may fail
        self._hold(parcel)

    def rebuild(self, saved: Saved, view: View) -> torch.Tensor | None:
        """A saved tensor as a view of bytes that are back, or were never gone; None if they changed in place.

        Raises:
            CorruptionError: with `check`, bytes that were computed again differ from those that were saved.
            OutOfVRAMError: they were saved by a step that ran out of memory.
            StorageError: the copy in failed.
            UnsupportedError: bytes cannot be computed again.
        """
        parcel = saved.parcel
        if saved.lost is not None:
            raise saved.lost()
        if self.is_stale(saved):
            return None
        if parcel.place is Place.ABSENT:
            assert saved.value is not None
            arrived = functools.partial(self._arrived, wanted=saved)
            compute_again(saved.value, bytes_of=self._bytes_of, arrived=arrived)
            other = saved.value.saved
            if parcel.buffer is None and other is not None and other is not saved:  # saved again, and there
                row = self._bytes_of(other)
                if row is not None:
                    self._arrived(saved, row, wanted=saved)
        if saved.base is None:
            row = self._bytes_of(saved)
            assert row is not None
            self._is_back(saved, flat_bytes(row.untyped_storage(), saved.offset, saved.nbytes))
        assert saved.base is not None
        return view.over(saved.base)

    def _is_back(self, saved: Saved, base: torch.Tensor) -> None:
        """The bytes of a storage are there, where views over them may be handed out; `base` is as in `Saved`."""
        saved.base, saved.base_version = base, base._version
        address = base.untyped_storage()._cdata
        if address != saved.address:
            self.known.add(saved, address)

    def is_stale(self, saved: Saved) -> bool:
        """Whether the bytes are no longer those that were saved."""
        parcel = saved.parcel
        if parcel.hold is not None and parcel.hold._version != saved.version:
            saved.stale = True
        if saved.base is not None and saved.base._version != saved.base_version:
            saved.stale = True
        if parcel.recomputed and parcel.buffer is None:
            token = saved.token
            if token is not None and token._version != saved.version:
                saved.stale = True  # autograd would not have it either
        return saved.stale

    def _bytes_of(self, saved: Saved) -> torch.Tensor | None:
        """What `View.over` takes for a saved storage's bytes, fetched if need be; None if they must be computed."""
        parcel = saved.parcel
        if self.is_stale(saved) or parcel.place is Place.ABSENT:
            return None
        if parcel.buffer is None:
            self.fetch(parcel)
        if parcel.back is not None:
            parcel.back.wait()
            parcel.back = None
        if saved.base is not None:
            return saved.base
        assert parcel.buffer is not None
        return parcel.buffer[saved.offset : saved.offset + saved.nbytes] if parcel.shared else parcel.buffer

    def _arrived(self, saved: Saved, content: torch.Tensor, *, wanted: Saved) -> None:
        """Takes charge of bytes that were computed again: of those that are wanted now, and of others as far as there
        is room."""
        parcel = saved.parcel
        nbytes = content.nbytes if content.dtype is torch.uint8 else content.untyped_storage().nbytes()
        if nbytes != saved.nbytes:
            raise UnsupportedError(
                f"A tensor saved in {parcel.block or 'the model'} had {saved.nbytes} bytes; computed again it has "
                f"{nbytes}."
            )
        if saved.fingerprint is not None and not torch.equal(fingerprint(row_of(content)), saved.fingerprint):
            made_by = saved.value.call.operator.name if saved.value and saved.value.call else "an operation"
            raise CorruptionError(
                f"A tensor of {saved.nbytes} bytes saved in {parcel.block or 'the model'} was made by {made_by}; now "
                "that it was computed again, its bytes are others."
            )
        is_counted = not self.fast.counts_all
        if saved is not wanted and is_counted and self.resident_bytes + nbytes > self.limit_bytes:
            return
        self.make_room(parcel.nbytes, parcel.block)
        parcel.buffer = content
        self.absent.discard(parcel)
        self._hold(parcel)
        self._is_back(saved, content)

    def discard(self, parcel: Parcel) -> None:
        """Autograd has let go of everything in it: gone from every tier."""
        if parcel.back is not None and self.fast.is_beside_host:  # pragma: gpu
            # The memory goes back to the allocator, which must not hand it out before the copy into it has ended.
            with contextlib.suppress(StorageError):
                parcel.back.wait()
        parcel.back = None
        came_back = parcel.place is Place.BOTH and parcel.hold is None
        if self.checks and came_back and self.is_alone(parcel):
            assert parcel.buffer is not None
            parcel.buffer.fill_(0xFF)
        self._release(parcel)
        self.absent.discard(parcel)
        self.away.pop(parcel.order, None)
        if parcel.handle is not None and parcel.tier is not None:
            parcel.tier.free(parcel.handle)
            parcel.handle = None

    def _hold(self, parcel: Parcel) -> None:
        self.away.pop(parcel.order, None)
        self.resident[parcel.order] = parcel
        self._count(parcel.nbytes)

    def _count(self, nbytes: int) -> None:
        """So many bytes more are resident."""
        self.resident_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.resident_bytes)

    def _release(self, parcel: Parcel) -> None:
        for saved in parcel.members:
            _forget_kept(saved)
            self.known.remove_base(saved)
        parcel.buffer = None
        if parcel.hold is not None:
            for saved in parcel.members:
                if saved.counter is None:
                    saved.counter = version_counter(parcel.hold)
        parcel.hold = None
        parcel.used = False
        if self.resident.pop(parcel.order, None) is not None:
            self.resident_bytes -= parcel.nbytes
        if parcel.shared:
            parcel.nbytes = parcel.filled

    # ------------------------------------------------------------------ room

    def fingerprint_of(self, storage: torch.UntypedStorage) -> torch.Tensor | None:
        """With `check`, what tells later whether the same bytes came back."""
        return fingerprint(flat_bytes(storage)) if self.checks else None

    def unused_bytes(self) -> int:
        """What may be allocated beside all that is there."""
        return self.fast.unused_bytes(self.limit_bytes)

    def is_alone(self, parcel: Parcel) -> bool:
        """Whether nobody but the Session refers to the parcel's buffer. On a CPU waits for a copy out, which does."""
        assert parcel.buffer is not None
        if parcel.handle is not None and not self.fast.is_beside_host:
            with contextlib.suppress(StorageError):  # told where the parcel is dropped
                parcel.handle.written.wait()
        return held_only_here(parcel.buffer, aliases=parcel.num_aliases)


def _forget_kept(saved: Saved) -> None:
    if any(tensor._version != saved.version for tensor in saved.kept.values()):
        saved.stale = True
    saved.kept.clear()
