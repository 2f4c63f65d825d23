"""The resources of a file that is open for GPUDirect Storage, and raw device pointers."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Any

import torch

from torchstorm.errors import StorageError
from torchstorm.storage import cufile
from torchstorm.storage.aligned import memory_view
from torchstorm.storage.cufile import CuFile


@dataclass(frozen=True, kw_only=True)
class DevicePointer:
    """Memory on a GPU that does not belong to a tensor.

    Attributes:
        address: start address.
        nbytes: its size.
        device_index: the GPU's index; -1 for host memory.
    """

    address: int
    nbytes: int
    device_index: int


Memory = torch.Tensor | DevicePointer


class GdsResources:
    """The resources of an open file in cuFile and the system, freed in the order that cuFile requires."""

    def __init__(self, driver: CuFile) -> None:
        self.fd = -1
        self.handle = 0
        self.batches: list[int] = []
        self.buffers: dict[int, torch.UntypedStorage] = {}
        self._driver = driver
        self._pid = os.getpid()

    @property
    def usable(self) -> bool:
        """Whether cuFile can be called: not closed, and not in a forked process."""
        return bool(self.handle) and os.getpid() == self._pid

    def borrow_batch(self) -> int:
        """A batch without running requests."""
        try:
            return self.batches.pop()
        except IndexError:  # a thread uses one at a time, so there are at most `threads`
            return self._driver.open_batch()

    def close(self) -> None:
        """Frees batches, memory, the handle, its file, and then the driver. A forked process only closes the file."""
        if os.getpid() == self._pid:
            for batch in self.batches:
                self._driver.close_batch(batch)
            for base in self.buffers:
                with contextlib.suppress(StorageError):  # closing the driver frees it anyway
                    self._driver.deregister_memory(base)
            if self.handle:
                self._driver.deregister_file(self.handle)
                self.handle = 0
        self.buffers.clear()
        if self.fd >= 0:
            os.close(self.fd)
        cufile.release()


def as_tensor(pointer: DevicePointer, device: torch.device) -> torch.Tensor:
    """(nbytes,) uint8 view of the memory. The caller keeps it alive."""
    if not pointer.nbytes:
        return torch.empty(0, dtype=torch.uint8, device=device)
    if device.type == "cpu":
        return torch.frombuffer(memory_view(pointer.address, pointer.nbytes), dtype=torch.uint8)
    return torch.as_tensor(_CudaArray(pointer), device=device)  # pragma: gpu


class _CudaArray:  # pragma: gpu
    def __init__(self, pointer: DevicePointer) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (pointer.nbytes,),
            "typestr": "|u1",
            "data": (pointer.address, False),
            "version": 3,
        }
