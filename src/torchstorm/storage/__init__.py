"""Bytes between files or NVMe devices and GPU or host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torchstorm.storage.backend import BackendInfo


class _Told(Protocol):
    def info(self) -> BackendInfo: ...


def info(storage: _Told) -> BackendInfo:
    """Which path the bytes of a volume, an `NVMe` or a file take, why, and the counters that prove it."""
    return storage.info()
