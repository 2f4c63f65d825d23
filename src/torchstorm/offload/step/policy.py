"""What becomes of what autograd saves in a step: the one place that says what happens to a tensor now.

A step follows a plan, or it is decided on the spot (`improvise.py`), or everything is only counted. (What a settled
step does with each tensor is the same, as tables: `tables.py`.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torchstorm.offload.step.parcels import TINY_BYTES, Call, Parcel, bytes_in_a_buffer, is_made_by
from torchstorm.plan.forecast import KEEP
from torchstorm.plan.plan import Plan
from torchstorm.plan.recompute import RECOMPUTE


class Decision(NamedTuple):
    """What happens to a storage that was saved.

    Attributes:
        tier: where it goes: "keep" for nowhere, "recompute" where it is let go and computed again.
        number: of its parcel in the plan that is followed, -1 where it has none.
        is_shared: whether it goes there in a buffer with others.
        block: the module that saved it, for messages.
    """

    tier: str
    number: int
    is_shared: bool
    block: str


class Policy:
    """Decides for one step, or for the rest of it. As it stands here, everything is kept; others change what they need.

    Attributes:
        plan: the one that is followed; None for none.
    """

    plan: Plan | None = None

    def may_leave(self, ordinal: int, nbytes: int) -> bool:
        """Whether a storage of that number and size may leave at all."""
        return nbytes >= TINY_BYTES

    def is_made_otherwise(self, ordinal: int, call: Call | None) -> bool:
        """Whether a storage is to be computed again, and another operation than that has made it."""
        return False

    def decide(self, ordinal: int, nbytes: int, *, movable: bool, block: str) -> Decision:
        """What happens to a storage.

        Args:
            ordinal: its number in the step.
            nbytes: of it.
            movable: whether it may leave.
            block: the module that runs, "" where that is not known.
        """
        return Decision(KEEP, -1, False, block)

    def shared_bytes(self, number: int, nbytes: int) -> int:
        """Size of a new buffer for small storages.

        Args:
            number: of the buffer's parcel in the plan, -1 where it has none.
            nbytes: of the first of these storages.
        """
        return bytes_in_a_buffer(nbytes)

    def joins(self, slab: Parcel, number: int, nbytes: int) -> bool:
        """Whether the next small storage goes into the buffer that took the last one."""
        return slab.filled + nbytes <= slab.nbytes

    def is_full(self, slab: Parcel) -> bool:
        """Whether no further storage does."""
        return slab.nbytes - slab.filled < TINY_BYTES

    def tier_of(self, slab: Parcel) -> str:
        """Where such a buffer goes."""
        return KEEP

    def drops(self, moment: int) -> Sequence[int]:
        """Numbers of the parcels whose room on the fast device is given back at a moment."""
        return ()

    def fetches(self, moment: int) -> Sequence[int]:
        """Numbers of those that begin to come back at it."""
        return ()

    def keep_free(self, nbytes: int, *, spare: Parcel | None = None) -> None:
        """So many bytes are about to be allocated on the fast device; `spare` must stay there."""

    def look_ahead(self) -> None:
        """Backward has reached a parcel: what it needs next may begin to come back."""


class Count(Policy):
    """Everything is kept, and only counted."""


class Follow(Policy):
    """A plan says it.

    Args:
        plan: the plan.
        otherwise: says it of buffers that the plan does not have, where a step has gone over to it.
    """

    def __init__(self, plan: Plan, otherwise: Policy) -> None:
        self.plan: Plan = plan
        self._otherwise = otherwise

    def may_leave(self, ordinal: int, nbytes: int) -> bool:
        """If the plan has a parcel for it."""
        return self.plan.trace.storages[ordinal].parcel >= 0

    def is_made_otherwise(self, ordinal: int, call: Call | None) -> bool:
        """If what made it is not what will be run again."""
        number = self.plan.trace.storages[ordinal].parcel
        if number < 0 or self.plan.placements[number].tier != RECOMPUTE:
            return False
        return call is None or not is_made_by(call, self.plan.maker(ordinal))

    def decide(self, ordinal: int, nbytes: int, *, movable: bool, block: str) -> Decision:
        """As its parcel is placed."""
        storage = self.plan.trace.storages[ordinal]
        number, block = storage.parcel if movable else -1, block or storage.block
        if number < 0:
            return Decision(KEEP, -1, False, block)
        tier = self.plan.placements[number].tier
        is_shared = tier not in (KEEP, RECOMPUTE) and self.plan.trace.parcels[number].num_storages > 1
        return Decision(tier, number, is_shared, block)

    def shared_bytes(self, number: int, nbytes: int) -> int:
        """As large as in the plan."""
        return self.plan.trace.parcels[number].nbytes

    def joins(self, slab: Parcel, number: int, nbytes: int) -> bool:
        """If it is of the same parcel."""
        return slab.number == number

    def is_full(self, slab: Parcel) -> bool:
        """If it has all that the parcel has."""
        if slab.number < 0:
            return self._otherwise.is_full(slab)
        return slab.num_joined >= self.plan.trace.parcels[slab.number].num_storages

    def tier_of(self, slab: Parcel) -> str:
        """As the parcel is placed."""
        return self._otherwise.tier_of(slab) if slab.number < 0 else self.plan.placements[slab.number].tier

    def drops(self, moment: int) -> Sequence[int]:
        """The plan's."""
        return self.plan.drops.get(moment, ())

    def fetches(self, moment: int) -> Sequence[int]:
        """The plan's."""
        return self.plan.fetches.get(moment, ())
