"""Host memory as a tier below a CUDA device: a pinned arena, and copies on the engine's streams."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import accumulate

import torch

from torchstorm.errors import CorruptionError, StorageError
from torchstorm.memory.tier import Copy, Handle, TierSpec, budget_error, check_bytes_tensor, freed_error
from torchstorm.storage.aligned import byte_view
from torchstorm.transfer.engine import Engine
from torchstorm.transfer.pinned import PinnedArena, Slot


class HostHandle:
    """A storage in the arena."""

    phase = 0
    __slots__ = ("checksum", "label", "nbytes", "reads", "slot", "written")

    def __init__(self, slot: Slot, written: Copy, label: str, checksum: int | None) -> None:
        self.slot: Slot | None = slot
        self.nbytes = slot.nbytes
        self.written = written
        self.label = label
        self.checksum = checksum
        self.reads: list[Copy] = []


class DoneCopy:
    """A copy that has already ended."""

    def wait(self) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def done(self) -> bool:
        """True."""
        return True


class HostTier:
    """Pinned host memory; pageable memory if pinning fails.

    Args:
        arena: the allocator of the memory; closed with this tier.
        engine: the device's copy streams; None for host tensors, which are copied synchronously.
        check: compares checksums of each storage, and overwrites freed slots. Slow and synchronous; for debugging.
        spec: capacity and speeds.
    """

    __slots__ = ("__dict__", "_check", "_closed", "_engine", "arena", "spec")  # C++ asks for them

    def __init__(self, arena: PinnedArena, *, engine: Engine | None, spec: TierSpec, check: bool = False) -> None:
        self.spec = spec
        self.arena = arena
        self._engine = engine
        self._check = check
        self._closed = False

    @property
    def used_bytes(self) -> int:
        """Bytes of slots in use."""
        return self.arena.used_bytes

    @property
    def peak_bytes(self) -> int:
        """The largest `used_bytes` since `reset_peak`."""
        return self.arena.peak_bytes

    def reset_peak(self) -> None:
        """Sets `peak_bytes` to `used_bytes`."""
        self.arena.peak_bytes = self.arena.used_bytes

    def put(self, source: torch.Tensor, *, label: str = "") -> HostHandle:
        """Starts to copy a tensor (nbytes,) uint8 into the arena.

        Raises:
            BudgetError: the arena's budget is too small.
            StorageError: the tier is closed.
            UnsupportedError: the tensor is not contiguous 1-D uint8.
        """
        check_bytes_tensor(source)
        with self.arena.lock:
            self._check_open()
            nbytes = source.nbytes
            rounded = -(-nbytes // 4096) * 4096
            if self.arena.used_bytes + rounded > self.spec.capacity_bytes:
                raise budget_error(self.spec, label=label, wanted_bytes=rounded, used_bytes=self.used_bytes)
            slot = self.arena.allocate(nbytes)
            checksum = _checksum([source]) if self._check else None
            return HostHandle(slot, self._copy(source, slot, slot.after), label, checksum)

    def get(self, handle: Handle, out: torch.Tensor) -> Copy:
        """Starts to copy the bytes back.

        Raises:
            CorruptionError: with `check`, the bytes have changed since `put`.
            StorageError: the handle was freed, `out` has another size, or the tier is closed.
            UnsupportedError: `out` is not contiguous 1-D uint8.
        """
        assert isinstance(handle, HostHandle)
        check_bytes_tensor(out, nbytes=handle.nbytes, label=handle.label)
        with self.arena.lock:
            self._check_open()
            if handle.slot is None:
                raise freed_error(handle.label)
            if handle.checksum is not None:
                handle.written.synchronize()
                if _checksum(handle.slot.pieces) != handle.checksum:
                    what = handle.label or "a saved tensor"
                    raise CorruptionError(f"{what} ({handle.nbytes} bytes) changed in host memory.")
            copy: Copy = DoneCopy()
            for part, piece in _parts(out, handle.slot.pieces):
                if self._engine is None:
                    part.copy_(piece)
                else:
                    copy = self._engine.copy_in(part, piece, after=[handle.written])
            if handle.reads:
                handle.reads = [read for read in handle.reads if not read.done()]
            handle.reads.append(copy)
            return copy

    def free(self, handle: Handle) -> None:
        """Frees the slot. A second call does nothing."""
        assert isinstance(handle, HostHandle)
        with self.arena.lock:
            slot, handle.slot = handle.slot, None
            if slot is None or self._closed:
                return
            handle.written.done()  # a copy that has not begun begins, so that it no longer holds its source
            after = handle.reads or [handle.written]  # a read has waited for what was written
            if self._check:
                for copy in after:
                    copy.synchronize()
                for piece in slot.pieces:
                    piece.fill_(0xFF)
            self.arena.free(slot, after=after)

    def close(self) -> None:
        """Waits for running copies and frees the arena. A second call does nothing."""
        with self.arena.lock:
            self._closed = True
            if self._engine is not None:
                self._engine.synchronize()
            self.arena.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError("this tier of host memory is closed; create a new one.")

    def _copy(self, source: torch.Tensor, slot: Slot, after: list[Copy]) -> Copy:
        copy: Copy = DoneCopy()
        for part, piece in _parts(source, slot.pieces):
            if self._engine is None:
                piece.copy_(part)
            else:
                copy = self._engine.copy_out(piece, part, after=after)
        return copy  # all copies are on one stream, so the last one ends last


def _parts(tensor: torch.Tensor, pieces: list[torch.Tensor]) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
    """The parts of a tensor that have their places in these pieces, each beside its piece."""
    if len(pieces) == 1:
        return ((tensor, pieces[0]),)
    stops = accumulate(piece.nbytes for piece in pieces)
    return [(tensor[stop - piece.nbytes : stop], piece) for piece, stop in zip(pieces, stops, strict=True)]


def _checksum(pieces: list[torch.Tensor]) -> int:
    checksum = 0
    for piece in pieces:
        host = piece.cpu()  # a variable keeps it alive, unlike the view
        checksum = zlib.crc32(byte_view(host), checksum)
    return checksum
