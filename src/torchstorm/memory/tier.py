"""What every tier of memory promises: device memory, host memory, disk, and the simulated one.

A tier holds whole storages as flat bytes: `put` takes a contiguous uint8 tensor on the fast device, `get` brings the
same bytes back into another. Copies run beside compute: both return at once, and a `Copy` says when the bytes are
there. No torch at import, so that plan/ can speak of tiers without it.
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
    """What a tier can do.

    Attributes:
        name: "vram", "ram" or "disk".
        capacity_bytes: the budget for this tier.
        write_bytes_per_s: speed of bytes that leave the fast device for this tier.
        read_bytes_per_s: speed of bytes that come back.
        latency_s: what each copy costs besides its bytes.
    """

    name: str
    capacity_bytes: int
    write_bytes_per_s: float = float("inf")
    read_bytes_per_s: float = float("inf")
    latency_s: float = 0.0


class Copy(Protocol):
    """A copy under way."""

    def wait(self) -> None:
        """Orders what the caller does next after the copy.

        On CUDA the current stream waits and the host goes on; on CPU the host waits.

        Raises:
            StorageError: the copy failed.
        """

    def synchronize(self) -> None:
        """Blocks the host until the copy has ended. Raises as `wait` does."""

    def done(self) -> bool:
        """Whether the copy has ended, well or not. Never blocks."""


class Handle(Protocol):
    """What a tier knows of one storage it holds."""

    @property
    def nbytes(self) -> int:
        """Bytes that were put."""

    @property
    def written(self) -> Copy:
        """The copy into the tier; the source must stay alive and unchanged until it has ended."""


class Tier(Protocol):
    """A place that holds storages as flat bytes. Safe to call from several threads."""

    @property
    def spec(self) -> TierSpec:
        """What it can do."""

    @property
    def used_bytes(self) -> int:
        """Bytes now taken, as the budget counts them."""

    @property
    def peak_bytes(self) -> int:
        """The largest `used_bytes` since `reset_peak`."""

    def reset_peak(self) -> None:
        """Starts `peak_bytes` again from `used_bytes`."""

    def put(self, source: torch.Tensor, *, label: str = "") -> Handle:
        """Begins to copy a contiguous 1-D uint8 tensor into the tier; `label` names it in errors.

        Raises:
            BudgetError: the tier has no room for it.
            StorageError: the tier failed.
        """

    def get(self, handle: Handle, out: torch.Tensor) -> Copy:
        """Begins to copy a storage back into `out`, a contiguous 1-D uint8 tensor of `handle.nbytes` bytes.

        The handle stays valid: a storage can be fetched more than once. A `get` before the `put` has ended follows it.
        """

    def free(self, handle: Handle) -> None:
        """Gives the storage's room back; copies still under way are let end first. Freeing twice does nothing."""

    def close(self) -> None:
        """Gives back everything: memory, threads, files. Closing twice does nothing."""


def check_row_of_bytes(tensor: torch.Tensor, *, nbytes: int | None = None, label: str = "") -> None:
    """Holds what `put` and `get` ask of a tensor.

    Raises:
        UnsupportedError: it is not contiguous 1-D uint8, or has no bytes at all (device "meta").
        StorageError: it has not `nbytes` bytes.
    """
    is_row = str(tensor.dtype) == "torch.uint8" and tensor.ndim == 1 and tensor.is_contiguous()
    if not is_row or tensor.device.type == "meta":
        raise UnsupportedError(
            f"a tier moves contiguous 1-D uint8 tensors, not {tensor.dtype} of shape {tuple(tensor.shape)} with "
            f"strides {tensor.stride()} on {tensor.device}. Pass the storage's bytes."
        )
    if nbytes is not None and tensor.nbytes != nbytes:
        raise StorageError(f"{label or 'a saved tensor'} has {nbytes} bytes, but out has {tensor.nbytes}.")


def no_room(spec: TierSpec, *, label: str, wanted_bytes: int, used_bytes: int, where: str = "") -> BudgetError:
    """The error of a tier whose budget is spent."""
    needed = used_bytes + wanted_bytes
    return BudgetError(
        f"{spec.name}={format_size(spec.capacity_bytes)}{where}, but {label or 'a saved tensor'} needs "
        f"{format_size(wanted_bytes)} more with {format_size(used_bytes)} in use. Give {spec.name}= at least "
        f"{format_size(needed)}, or a larger budget on a faster tier.",
        tier=spec.name,
        budget_bytes=spec.capacity_bytes,
        needed_bytes=needed,
    )


def gone(label: str) -> StorageError:
    """The error for a storage that was freed before it was asked for."""
    return StorageError(f"{label or 'a saved tensor'} was freed before it was fetched.")
