"""The interface of memory tiers: device memory, host memory, disk, and a simulated tier.

A tier holds whole storages as flat bytes. `put` copies a contiguous uint8 tensor from the fast device into the tier;
`get` copies the bytes back into another tensor. Copies run asynchronously: both methods return at once, and a `Copy`
tells when the copy has ended. This module does not import torch, so plan/ can use it without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torchstorm.errors import BudgetError, StorageError, UnsupportedError
from torchstorm.sizes import format_size

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class TierSpec:
    """Capacity and speed of a tier.

    Attributes:
        name: "vram", "ram" or "disk".
        capacity_bytes: the budget for this tier.
        write_bytes_per_s: bandwidth from the fast device to this tier.
        read_bytes_per_s: bandwidth from this tier to the fast device.
        latency_s: fixed time per copy.
    """

    name: str
    capacity_bytes: int
    write_bytes_per_s: float = float("inf")
    read_bytes_per_s: float = float("inf")
    latency_s: float = 0.0


class Copy(Protocol):
    """An asynchronous copy."""

    def wait(self) -> None:
        """Makes the caller's next work wait for the copy.

        On CUDA the current stream waits, and the host continues. On CPU the host waits.

        Raises:
            StorageError: the copy failed.
        """

    def synchronize(self) -> None:
        """Blocks the host until the copy has ended. Raises as `wait` does."""

    def done(self) -> bool:
        """Whether the copy has succeeded or failed. Never blocks."""


class Handle(Protocol):
    """A storage that a tier holds."""

    @property
    def nbytes(self) -> int:
        """Size of the storage."""

    @property
    def written(self) -> Copy:
        """The copy into the tier. The source must stay alive and unchanged until it has ended."""

    @property
    def phase(self) -> int:
        """At how many bytes in a page of memory the tier best reads it back; see `empty_at_phase`."""


class Tier(Protocol):
    """Holds storages as flat bytes. Thread-safe."""

    @property
    def spec(self) -> TierSpec:
        """Its capacity and speed."""

    @property
    def used_bytes(self) -> int:
        """Bytes in use, as the budget counts them."""

    @property
    def peak_bytes(self) -> int:
        """The largest `used_bytes` since `reset_peak`."""

    def reset_peak(self) -> None:
        """Sets `peak_bytes` to `used_bytes`."""

    def put(self, source: torch.Tensor, *, label: str = "") -> Handle:
        """Starts to copy a contiguous 1-D uint8 tensor into the tier. `label` names it in errors.

        Raises:
            BudgetError: the tier's budget is too small.
            StorageError: the tier failed.
        """

    def get(self, handle: Handle, out: torch.Tensor) -> Copy:
        """Starts to copy a storage back into `out`, a contiguous 1-D uint8 tensor of `handle.nbytes` bytes.

        The handle stays valid, so a storage can be read several times. A `get` waits for a `put` that is still running.
        """

    def free(self, handle: Handle) -> None:
        """Frees the storage after its running copies. A second call does nothing."""

    def close(self) -> None:
        """Frees memory, threads and files. A second call does nothing."""


def check_bytes_tensor(tensor: torch.Tensor, *, nbytes: int | None = None, label: str = "") -> None:
    """Checks a tensor for `put` or `get`.

    Raises:
        UnsupportedError: it is not contiguous 1-D uint8, or is on the device "meta".
        StorageError: its size is not `nbytes`.
    """
    is_row = tensor.ndim == 1 and tensor.is_contiguous() and str(tensor.dtype) == "torch.uint8"
    if not is_row or tensor.is_meta:
        raise UnsupportedError(
            f"a tier moves contiguous 1-D uint8 tensors, not {tensor.dtype} of shape {tuple(tensor.shape)} with "
            f"strides {tensor.stride()} on {tensor.device}. Pass the storage's bytes."
        )
    if nbytes is not None and tensor.nbytes != nbytes:
        raise StorageError(f"{label or 'a saved tensor'} has {nbytes} bytes, but out has {tensor.nbytes}.")


def budget_error(spec: TierSpec, *, label: str, wanted_bytes: int, used_bytes: int, where: str = "") -> BudgetError:
    """The error for a tier whose budget is too small."""
    needed = used_bytes + wanted_bytes
    return BudgetError(
        f"{spec.name}={format_size(spec.capacity_bytes)}{where}, but {label or 'a saved tensor'} needs "
        f"{format_size(wanted_bytes)} more with {format_size(used_bytes)} in use. Give {spec.name}= at least "
        f"{format_size(needed)}, or a larger budget on a faster tier.",
        tier=spec.name,
        budget_bytes=spec.capacity_bytes,
        needed_bytes=needed,
    )


def freed_error(label: str) -> StorageError:
    """The error for a storage that was freed before it was read."""
    return StorageError(f"{label or 'a saved tensor'} was freed before it was read back.")
