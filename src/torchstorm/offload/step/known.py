"""The storages that autograd has saved, found again by their addresses."""

from __future__ import annotations

import torch

from torchstorm.offload.step.parcels import Saved
from torchstorm.offload.step.views import share_a_counter


class SavedStorages:
    """Everything that autograd still holds, by the address of the storage that holds the bytes, first or returned."""

    __slots__ = ("_at",)  # C++ asks for it by its place

    def __init__(self) -> None:
        self._at: dict[int, list[Saved]] = {}

    def __bool__(self) -> bool:
        return bool(self._at)

    def find(self, storage: torch.UntypedStorage, tensor: torch.Tensor) -> tuple[Saved | None, int]:
        """The record of a tensor's bytes, if they were saved before, and where they begin in the tensor's storage."""
        address, root = storage._cdata, tensor if tensor._base is None else tensor._base
        for saved in self._at.get(address, ()):
            is_as_saved = saved.address == address and saved.version == tensor._version
            if is_as_saved and saved.root is not None and saved.root() is root:
                return saved, 0
            came_back = saved.base is not None and saved.address != address
            token, version = (saved.base, saved.base_version) if came_back else (saved.token, saved.version)
            if token is not None and tensor._version == version and share_a_counter(token, tensor):
                return saved, saved.offset if came_back else 0
        return None, 0

    def find_unchanged(self, storage: torch.UntypedStorage, first: int) -> Saved | None:
        """The record of a storage that this step saved as number `first` or later, and that nothing has changed since
        it was made, by whatever version counter."""
        for saved in self._at.get(storage._cdata, ()):
            token = saved.token
            if saved.ordinal >= first and saved.version == 0 and token is not None and token._version == 0:
                return saved
        return None

    def holds(self, address: int) -> bool:
        """Whether the storage at an address is one that was saved, and so within the budget."""
        return address in self._at

    def at(self, address: int) -> list[Saved]:
        """The records of the storage at an address."""
        return list(self._at.get(address, ()))

    def all(self) -> list[Saved]:
        """All records."""
        return [saved for group in self._at.values() for saved in group]

    def add(self, saved: Saved, address: int) -> None:
        """The bytes of a record are at this address."""
        self._at.setdefault(address, []).append(saved)

    def remove(self, saved: Saved) -> None:
        """Forgets a record."""
        self.remove_base(saved)
        self._forget(saved, saved.address)

    def remove_base(self, saved: Saved) -> None:
        """The bytes of a record that came back are gone again."""
        if saved.base is not None:
            self._forget(saved, saved.base.untyped_storage()._cdata)
            saved.base = None

    def _forget(self, saved: Saved, address: int) -> None:
        group = self._at.get(address, [])
        if saved in group:
            group.remove(saved)
        if not group:
            self._at.pop(address, None)
