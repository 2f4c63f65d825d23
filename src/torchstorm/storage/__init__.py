"""Reads and writes between files or NVMe devices and GPU or host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torchstorm.storage.backend import BackendInfo


class _HasInfo(Protocol):
    def info(self) -> BackendInfo: ...


def info(storage: _HasInfo) -> BackendInfo:
    """The I/O path of a volume, an `NVMe` or a file, the reason for it, and the counters that prove it."""
    return storage.info()
