"""Host memory as the next tier below a CUDA device: pinned arena, copies on the engine's streams."""

from __future__ import annotations

import zlib

import torch

from torchstorm.errors import CorruptionError
from torchstorm.memory.tier import Copy, Handle, TierSpec
from torchstorm.storage.aligned import byte_view
from torchstorm.transfer.engine import Engine
from torchstorm.transfer.pinned import PinnedArena, Slot


class HostHandle:
    """One storage in the arena."""

    def __init__(self, slot: Slot, written: Copy, label: str, checksum: int | None) -> None:
        self.slot: Slot | None = slot
        self.written = written
        self.label = label
        self.checksum = checksum
        self.reads: list[Copy] = []

    @property
    def nbytes(self) -> int:
        """Bytes that were put."""
        assert self.slot is not None
        return self.slot.buffer.nbytes


class DoneCopy:
    """A copy that had ended when it was returned."""

    def wait(self) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def done(self) -> bool:
        """True."""
        return True


class HostTier:
    """Pinned (or, where that fails, pageable) host memory.

    Args:
        arena: where the bytes lie.
        engine: the device's copy streams; None for host tensors, which are copied at once.
        check: checksum what leaves and what returns, and poison freed slots; slow, synchronous.
        spec: capacity and speeds.
    """

    def __init__(self, arena: PinnedArena, *, engine: Engine | None, spec: TierSpec, check: bool = False) -> None:
        self.spec = spec
        self.arena = arena
        self._engine = engine
        self._check = check

    @property
    def used_bytes(self) -> int:
        """Bytes of slots in use."""
        return self.arena.used_bytes

    @property
    def peak_bytes(self) -> int:
        """The largest `used_bytes` since `reset_peak`."""
        return self.arena.peak_bytes

    def reset_peak(self) -> None:
        """Starts `peak_bytes` again from `used_bytes`."""
        self.arena.peak_bytes = self.arena.used_bytes

    def put(self, source: torch.Tensor, *, label: str = "") -> HostHandle:
        """Begins to copy (nbytes,) uint8 into the arena.

        Raises:
            BudgetError: the arena has no room for it.
        """
        slot = self.arena.allocate(source.nbytes)
        written: Copy
        if self._engine is None:
            slot.buffer.copy_(source)
            written = DoneCopy()
        else:
            written = self._engine.copy_out(slot.buffer, source, after=slot.after)
        return HostHandle(slot, written, label, _checksum(source) if self._check else None)

    def get(self, handle: Handle, out: torch.Tensor) -> Copy:
        """Begins to copy the bytes back.

        Raises:
            CorruptionError: with `check`, the bytes differ from those that were put.
        """
        assert isinstance(handle, HostHandle)
        assert handle.slot is not None
        buffer = handle.slot.buffer
        if handle.checksum is not None:
            handle.written.synchronize()
            if _checksum(buffer) != handle.checksum:
                what = handle.label or "a saved tensor"
                raise CorruptionError(f"{what} ({buffer.nbytes} bytes) changed in host memory.")
        if self._engine is None:
            out.copy_(buffer)
            return DoneCopy()
        copy = self._engine.copy_in(out, buffer, after=[handle.written])
        handle.reads = [read for read in handle.reads if not read.done()] + [copy]
        return copy

    def free(self, handle: Handle) -> None:
        """Gives the slot back. Freeing twice does nothing."""
        assert isinstance(handle, HostHandle)
        slot, handle.slot = handle.slot, None
        if slot is None:
            return
        after = [handle.written, *handle.reads]
        if self._check:
            for copy in after:
                copy.synchronize()
            slot.buffer.fill_(0xFF)
        self.arena.free(slot, after=after)

    def close(self) -> None:
        """Gives the arena back."""
        self.arena.close()


def _checksum(data: torch.Tensor) -> int:
    host = data.cpu()  # the view does not keep it alive
    return zlib.crc32(byte_view(host))
