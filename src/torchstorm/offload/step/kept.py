"""Saved tensors that stay where they are in a settled step: what autograd holds of them, and what they count.

A settled step follows a plan, or keeps everything, and nothing of it is measured or recorded. What stays in such a step
needs no parcel: only the checks that autograd's own saved tensors have, the guard against resized storages, and its
bytes. So a saved tensor costs a look-up in a list, in place of all that `hooks` and `residency` do for one that moves.
C++ keeps still less of it (`Way`), which becomes this once it is asked for here: a step that leaves its plan does.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterator

import torch

from torchstorm.errors import TorchstormError
from torchstorm.offload.native.library import Way
from torchstorm.offload.step.packed import Keeper, Placeholder
from torchstorm.offload.step.parcels import Value, in_place_error, resized_error
from torchstorm.offload.step.views import share_a_counter


class KeptStorage:
    """A storage that stays, saved once or several times.

    Attributes:
        address: of the storage, which its saved tensors keep taken.
        ordinal: as in `Saved`.
        nbytes: of the storage.
        counted_bytes: what counts of it.
        movable: whether it might have moved.
        block: module that saved it, for messages.
        num_live: how many saved tensors refer to it.
        saved: those saved tensors, as far as they live.
        lost: makes the error to raise where its bytes are asked for; None where they are there.
        value: where something else is computed again from it: its bytes, which are held for that.
        owner: hears at once when autograd has let go of what is held so.
        beside: what was saved of the same storage before, with other bytes or a version counter of its own.
    """

    __slots__ = (
        *("_held", "address", "beside", "block", "counted_bytes", "lost", "movable", "nbytes", "num_live", "ordinal"),
        *("owner", "saved", "value"),
    )

    def __init__(self, address: int, ordinal: int, nbytes: int, counted_bytes: int, movable: bool, block: str) -> None:
        self.address = address
        self.ordinal = ordinal
        self.nbytes = nbytes
        self.counted_bytes = counted_bytes
        self.movable = movable
        self.block = block
        self.num_live = 0
        self.saved: list[weakref.ref[Kept]] = []
        self.lost: Callable[[], TorchstormError] | None = None
        self.value: Value | None = None
        self.owner: Keeper | None = None
        self.beside: KeptStorage | None = None
        self._held: tuple[torch.Tensor, int] | None = None

    def hold(self, value: Value, tensor: torch.Tensor, owner: Keeper) -> None:
        """Keeps its bytes for what is computed again from them.

        Args:
            value: the bytes.
            tensor: an alias, which shares the version counter of what was saved.
            owner: as the attribute.
        """
        self.value, self.owner = value, owner
        self._held = value.held = tensor, tensor._version

    def release(self) -> None:
        """Nothing more is computed again from it, or something else has its bytes."""
        if self.value is not None and self.value.held is self._held:
            self.value.held = None
        self.value = self._held = self.owner = None

    def alive(self) -> list[Kept]:
        """Its saved tensors that autograd still holds."""
        return [kept for one in self.saved if (kept := one()) is not None]


class Kept:
    """What autograd holds instead of a tensor that stays.

    Attributes:
        storage: what it is a view of.
        tensor: an alias, which shares the version counter of what was saved; None where the bytes are lost.
        version: its version when it was saved.
        pointer: where its first element was.
        placeholder: what stands for it since its step left the plan; None before.
    """

    __slots__ = ("__weakref__", "_released", "placeholder", "pointer", "storage", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, storage: KeptStorage, released: deque[KeptStorage]) -> None:
        self.tensor: torch.Tensor | None = tensor.detach()
        self.version = tensor._version
        self.pointer = tensor.data_ptr()
        self.storage = storage
        self.placeholder: Placeholder | None = None
        self._released = released
        storage.saved.append(weakref.ref(self))
        storage.num_live += 1

    def unpack(self) -> torch.Tensor | None:
        """The tensor as it was saved; None where the placeholder stands for it by now.

        Raises:
            OutOfVRAMError: its step ran out of memory.
            RuntimeError: it was changed in place, as autograd says it.
            UnsupportedError: its storage was resized.
        """
        tensor = self.tensor
        if tensor is None:
            if self.placeholder is not None:
                return None
            assert self.storage.lost is not None
            raise self.storage.lost()
        if tensor._version != self.version:
            raise in_place_error(tensor._version, self.version, tensor.dtype, tensor.shape)
        if tensor.data_ptr() != self.pointer:
            raise resized_error(self.storage.block)
        return tensor

    def drop(self) -> None:
        """Autograd has let go of it: what runs then, by way of C++ where that is there."""
        self._released.append(self.storage)  # from any thread, even from within our own work
        owner = self.storage.owner
        if owner is not None:
            owner.settle_soon()

    __del__ = drop


class KeptTensors:
    """All that is kept so, and its bytes.

    Args:
        count: adds bytes to those that are resident.
    """

    # These C++ asks for by their places.
    __slots__ = ("__dict__", "awaited", "by_address", "by_ordinal", "in_parts", "released")

    by_cpp: Way | None = None  # the settled step that runs, where C++ keeps what stays until it is asked for here

    def __init__(self, count: Callable[[int], None]) -> None:
        self.released: deque[KeptStorage] = deque()
        self.by_ordinal: dict[int, KeptStorage] = {}  # of the step that runs
        self.by_address: dict[int, KeptStorage] = {}  # likewise, the latest at each
        self.in_parts: set[int] = set()  # addresses of those that were saved in parts
        self.awaited: list[KeptStorage] = []  # autograd has let go of them, and something else is yet to read them
        self.is_read_later: Callable[[KeptStorage], bool] = lambda _: False
        self._count = count

    def add(self, storage: KeptStorage) -> None:
        """A storage was saved that was not among these, or not with these bytes."""
        self.by_ordinal[storage.ordinal] = storage
        storage.beside = self.by_address.get(storage.address)
        self.by_address[storage.address] = storage

    @property
    def is_waiting(self) -> bool:
        """Whether autograd has let go of something that is still counted."""
        return bool(self.released) or (self.by_cpp is not None and self.by_cpp.is_waiting())

    def bring_over(self, address: int | None = None) -> None:
        """What C++ keeps is among these from now on; with an address, if something there is among it."""
        if self.by_cpp is not None and (address is None or self.by_cpp.holds(address)):
            self.by_cpp.bring_over()

    def in_step(self) -> dict[int, KeptStorage]:
        """Those of the step that runs, by ordinal."""
        self.bring_over()
        return self.by_ordinal

    def at(self, address: int) -> KeptStorage | None:
        """The latest one at an address."""
        self.bring_over(address)
        return self.by_address.get(address)

    def holds(self, address: int) -> bool:
        """Whether the storage at an address is one of these."""
        if self.by_cpp is not None and self.by_cpp.holds(address):
            return True
        return any(storage.num_live for storage in self._all_at(address))

    def has(self, tensor: torch.Tensor, address: int) -> bool:
        """Whether just these bytes of the storage at an address were saved."""
        self.bring_over(address)
        for storage in self._all_at(address):
            for kept in storage.alive()[:1]:
                if kept.tensor is not None and kept.version == tensor._version and share_a_counter(kept.tensor, tensor):
                    return True
        return False

    def _all_at(self, address: int) -> Iterator[KeptStorage]:
        storage = self.by_address.get(address)
        while storage is not None:
            yield storage
            storage = storage.beside

    def settle(self) -> None:
        """Uncounts what autograd has let go of."""
        if self.by_cpp is not None:
            self.by_cpp.settle()
        released = self.released
        while released:
            storage = released.popleft()
            storage.num_live -= 1
            if storage.num_live:
                continue
            if storage.value is not None and self.is_read_later(storage):
                self.awaited.append(storage)
            else:
                self._forget(storage)

    def forget_all_but(self, values: Container[Value | None]) -> None:
        """Of what autograd has let go of, only these bytes are yet to be read."""
        awaited, self.awaited = self.awaited, []
        for storage in awaited:
            if storage.value in values:
                self.awaited.append(storage)
            else:
                self._forget(storage)

    def _forget(self, storage: KeptStorage) -> None:
        self._count(-storage.counted_bytes)
        storage.counted_bytes = 0
        storage.release()
        if self.by_address.get(storage.address) is storage:
            if storage.beside is None:
                del self.by_address[storage.address]
            else:
                self.by_address[storage.address] = storage.beside
            self.in_parts.discard(storage.address)

    def lose(self, why: Callable[[str], TorchstormError], *, address: int | None = None) -> None:
        """The bytes of the storage at an address, or of all of the running step, cannot be had any more.

        Args:
            why: makes the error for who asks for them, from the name of the module that saved them.
            address: of a storage; None for the step.
        """
        self.bring_over(address)
        for storage in self.by_ordinal.values():
            if address not in (None, storage.address):
                continue
            self._count(-storage.counted_bytes)
            storage.counted_bytes = 0
            storage.lost = functools.partial(why, storage.block)
            if storage.value is not None:
                storage.value.lost = storage.lost
            storage.release()
            for kept in storage.alive():
                kept.tensor = None

    def give_up(self) -> Iterator[tuple[KeptStorage, list[Kept]]]:
        """The running step is over, or no settled one any more: gives out what autograd still holds, uncounted."""
        self.settle()
        self.bring_over()
        storages, self.by_ordinal, self.by_address = list(self.by_ordinal.values()), {}, {}
        self.in_parts.clear()
        for storage in storages:
            alive = [kept for kept in storage.alive() if kept.tensor is not None] if storage.num_live else []
            if alive:
                self._count(-storage.counted_bytes)
                storage.counted_bytes = 0
                yield storage, alive
