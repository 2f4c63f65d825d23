"""Device memory as a tier: a copy beside the original, ordered by the current stream."""

from __future__ import annotations

import threading

import torch

from torchstorm.errors import StorageError
from torchstorm.memory.host import DoneCopy
from torchstorm.memory.tier import Copy, Handle, TierSpec, check_row_of_bytes, gone, no_room


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
        self._closed = False
        self._lock = threading.Lock()
        self.used_bytes = 0
        self.peak_bytes = 0

    def reset_peak(self) -> None:
        """Starts `peak_bytes` again from `used_bytes`."""
        self.peak_bytes = self.used_bytes

    def put(self, source: torch.Tensor, *, label: str = "") -> DeviceHandle:
        """Copies (nbytes,) uint8.

        Raises:
            BudgetError: the tier has no room for it.
            StorageError: the tier is closed.
            UnsupportedError: the tensor is not of that kind.
        """
        check_row_of_bytes(source)
        with self._lock:
            self._check_open()
            if self.used_bytes + source.nbytes > self.spec.capacity_bytes:
                raise no_room(self.spec, label=label, wanted_bytes=source.nbytes, used_bytes=self.used_bytes)
            self.used_bytes += source.nbytes
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        try:
            return DeviceHandle(source.clone(), label)
        except BaseException:  # the device itself has no memory left
            with self._lock:
                self.used_bytes -= source.nbytes
            raise

    def get(self, handle: Handle, out: torch.Tensor) -> Copy:
        """Copies the bytes back, in the order of the current stream.

        Raises:
            StorageError: the handle was freed, `out` has another size, or the tier is closed.
            UnsupportedError: `out` is not of the right kind.
        """
        assert isinstance(handle, DeviceHandle)
        check_row_of_bytes(out, nbytes=handle.nbytes, label=handle.label)
        self._check_open()
        data = handle.data
        if data is None:
            raise gone(handle.label)
        out.copy_(data)
        return DoneCopy()

    def free(self, handle: Handle) -> None:
        """Gives the room back. Freeing twice does nothing."""
        assert isinstance(handle, DeviceHandle)
        with self._lock:
            if handle.data is not None:
                self.used_bytes -= handle.nbytes
                handle.data = None

    def close(self) -> None:
        """Takes nothing more. Closing twice does nothing."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError("this tier of device memory is closed; make a new one.")
