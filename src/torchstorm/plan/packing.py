"""Which storages move together: a large one alone, small ones in a buffer that they share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Buffers:
    """How a Session puts what is saved into parcels.

    Attributes:
        least_moved_bytes: what is smaller never moves.
        small_bytes: what is smaller shares a buffer with others.
        shared_bytes: size of such a buffer.
        least_left_bytes: a buffer with less left is full.
        padded: the bytes that a storage takes in one.
    """

    least_moved_bytes: int
    small_bytes: int
    shared_bytes: int
    least_left_bytes: int
    padded: Callable[[int], int]


class Packing:
    """Numbers the parcels of what is saved, in the order of saving.

    Args:
        buffers: of the Session.

    Attributes:
        parcel_bytes: of the parcels so far.
    """

    def __init__(self, buffers: Buffers) -> None:
        self.parcel_bytes: list[int] = []
        self._buffers = buffers
        self._open = -1  # number of the buffer that takes the next small storage, -1 for none

    def parcel_for(self, nbytes: int) -> int:
        """The number of the parcel of a storage, which is as large as to move."""
        buffers, number = self._buffers, len(self.parcel_bytes)
        if nbytes >= buffers.small_bytes:
            self.parcel_bytes.append(nbytes)
            return number
        if self._open >= 0 and self.parcel_bytes[self._open] + nbytes <= buffers.shared_bytes:
            number = self._open
        else:
            self.parcel_bytes.append(0)
        self.parcel_bytes[number] += buffers.padded(nbytes)
        is_full = buffers.shared_bytes - self.parcel_bytes[number] < buffers.least_left_bytes
        self._open = -1 if is_full else number
        return number

    def close(self) -> None:
        """No further storage joins a buffer: backward has asked for one of its storages."""
        self._open = -1
