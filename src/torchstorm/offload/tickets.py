"""What autograd holds instead of the tensors that it saved."""

from __future__ import annotations

from typing import Protocol

import torch

from torchstorm.offload.parcels import Saved, View, in_place_error


class Keeper(Protocol):
    """Who gives tickets out."""

    def let_go(self, saved: Saved, ticket_id: int) -> None:
        """Autograd has dropped a ticket."""


class Ticket:
    """What autograd holds instead of the tensor; when it lets go, so does the Session."""

    __slots__ = ("__weakref__", "_owner", "saved", "view")

    def __init__(self, owner: Keeper, saved: Saved, view: View) -> None:
        self._owner = owner
        self.saved = saved
        self.view = view

    def __del__(self) -> None:
        self._owner.let_go(self.saved, id(self))


class Untouched:
    """A tensor that is none of the Session's affair: weights, other devices, layouts without plain strides."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()
        self.version = tensor._version

    def unpack(self) -> torch.Tensor:
        """The tensor as it was, unless it changed in place."""
        if self.tensor._version != self.version:
            raise in_place_error(self.tensor._version, self.version, self.tensor.dtype, self.tensor.shape)
        return self.tensor
