"""Device memory as a tier. Copies run on the current stream."""

from __future__ import annotations

import threading

import torch

from torchstorm.errors import StorageError
from torchstorm.memory.host import DoneCopy
from torchstorm.memory.tier import Copy, Handle, TierSpec, budget_error, check_bytes_tensor, freed_error


class DeviceHandle:
    """A storage in device memory."""

    phase = 0

    def __init__(self, data: torch.Tensor, label: str) -> None:
        self.data: torch.Tensor | None = data
        self.nbytes = data.nbytes
        self.label = label
        self.written: Copy = DoneCopy()


class DeviceTier:
    """Memory of the fast device (a GPU, or host memory if training runs on the CPU).

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
        """Sets `peak_bytes` to `used_bytes`."""
        self.peak_bytes = self.used_bytes

    def put(self, source: torch.Tensor, *, label: str = "") -> DeviceHandle:
        """Copies (nbytes,) uint8.

        Raises:
            BudgetError: the tier's budget is too small.
            StorageError: the tier is closed.
            UnsupportedError: the tensor is not contiguous 1-D uint8.
        """
        check_bytes_tensor(source)
        with self._lock:
            self._check_open()
            if self.used_bytes + source.nbytes > self.spec.capacity_bytes:
                raise budget_error(self.spec, label=label, wanted_bytes=source.nbytes, used_bytes=self.used_bytes)
            self.used_bytes += source.nbytes
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        try:
            return DeviceHandle(source.clone(), label)
        except BaseException:  # the device is out of memory
            with self._lock:
                self.used_bytes -= source.nbytes
            raise

    def get(self, handle: Handle, out: torch.Tensor) -> Copy:
        """Copies the bytes back on the current stream.

        Raises:
            StorageError: the handle was freed, `out` has another size, or the tier is closed.
            UnsupportedError: `out` is not contiguous 1-D uint8.
        """
        assert isinstance(handle, DeviceHandle)
        check_bytes_tensor(out, nbytes=handle.nbytes, label=handle.label)
        self._check_open()
        data = handle.data
        if data is None:
            raise freed_error(handle.label)
        out.copy_(data)
        return DoneCopy()

    def free(self, handle: Handle) -> None:
        """Frees the copy. A second call does nothing."""
        assert isinstance(handle, DeviceHandle)
        with self._lock:
            if handle.data is not None:
                self.used_bytes -= handle.nbytes
                handle.data = None

    def close(self) -> None:
        """Refuses further storages. A second call does nothing."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError("this tier of device memory is closed; create a new one.")
