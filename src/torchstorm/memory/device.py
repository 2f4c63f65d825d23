"""Device memory as a tier: a copy beside the original, ordered by the current stream."""

from __future__ import annotations

import torch

from torchstorm.errors import BudgetError
from torchstorm.memory.host import DoneCopy
from torchstorm.memory.tier import Copy, Handle, TierSpec
from torchstorm.sizes import format_size


class DeviceHandle:
    """One storage's copy."""

    def __init__(self, data: torch.Tensor, label: str) -> None:
        self.data: torch.Tensor | None = data
        self.nbytes = data.nbytes
        self.label = label
        self.written: Copy = DoneCopy()


class DeviceTier:
    """Memory of the fast device itself (a GPU's, or host memory where that is the fast device).

    Args:
        spec: capacity and speeds.
    """

    def __init__(self, spec: TierSpec) -> None:
        self.spec = spec
        self.used_bytes = 0
        self.peak_bytes = 0

    def reset_peak(self) -> None:
        """Starts `peak_bytes` again from `used_bytes`."""
        self.peak_bytes = self.used_bytes

    def put(self, source: torch.Tensor, *, label: str = "") -> DeviceHandle:
        """Copies (nbytes,) uint8.

        Raises:
            BudgetError: the tier has no room for it.
        """
        if self.used_bytes + source.nbytes > self.spec.capacity_bytes:
            raise BudgetError(
                f"{self.spec.name}={format_size(self.spec.capacity_bytes)}, but {format_size(source.nbytes)} more is "
                f"needed with {format_size(self.used_bytes)} in use.",
                tier=self.spec.name,
                budget_bytes=self.spec.capacity_bytes,
                needed_bytes=self.used_bytes + source.nbytes,
            )
        handle = DeviceHandle(source.clone(), label)
        self.used_bytes += source.nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return handle

    def get(self, handle: Handle, out: torch.Tensor) -> Copy:
        """Copies the bytes back, in the order of the current stream."""
        assert isinstance(handle, DeviceHandle)
        assert handle.data is not None
        out.copy_(handle.data)
        return DoneCopy()

    def free(self, handle: Handle) -> None:
        """Gives the room back. Freeing twice does nothing."""
        assert isinstance(handle, DeviceHandle)
        if handle.data is not None:
            self.used_bytes -= handle.nbytes
            handle.data = None

    def close(self) -> None:
        """Nothing of its own is held."""
