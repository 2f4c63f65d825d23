"""Decides on the spot what becomes of what autograd saves, where no plan is followed."""

from __future__ import annotations

from torchstorm.offload.step.parcels import Parcel, bytes_in_a_buffer, whole_places
from torchstorm.offload.step.policy import Decision, Policy
from torchstorm.offload.step.residency import Residency
from torchstorm.offload.step.room import Room
from torchstorm.plan.forecast import KEEP
from torchstorm.plan.packing import Buffers


class Improvise(Policy):
    """It is decided on the spot: all that is large enough goes to the tier for that, small storages together.

    Args:
        residency: what is where.
        room: makes room.
        buffers: what is put together.
    """

    def __init__(self, residency: Residency, room: Room, buffers: Buffers) -> None:
        self._residency, self._room, self._buffers = residency, room, buffers

    def may_leave(self, ordinal: int, nbytes: int) -> bool:
        """If a copy of it is worth what it takes the host."""
        return nbytes >= self._buffers.least_moved_bytes

    def decide(self, ordinal: int, nbytes: int, *, movable: bool, block: str) -> Decision:
        """It goes, if it may."""
        tier = self._residency.default_tier if movable else KEEP
        return Decision(tier, -1, tier != KEEP and nbytes < self._buffers.small_bytes, block)

    def shared_bytes(self, number: int, nbytes: int) -> int:
        """As large as there is room for."""
        size = max(whole_places(self._room.part_of(self._buffers.shared_bytes)), bytes_in_a_buffer(nbytes))
        self._room.keep_free(size)
        return size

    def tier_of(self, slab: Parcel) -> str:
        """To the tier for what is decided so."""
        return self._residency.default_tier

    def keep_free(self, nbytes: int, *, spare: Parcel | None = None) -> None:
        """Moves what can best be spared."""
        self._room.keep_free(nbytes, spare=spare)

    def look_ahead(self) -> None:
        """What was made just before."""
        self._room.look_ahead()
