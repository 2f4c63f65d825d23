"""The fast tier: the device on which a model trains, what of it the budget counts, and how its time is told.

On a GPU the budget counts all that PyTorch's allocator has handed out, and the device works while the host goes on. On
a CPU it counts what autograd saved, since nobody tells what else a model allocates, and each operation has ended when
it returns.
"""

from __future__ import annotations

from typing import Protocol

import torch

from torchstorm.errors import UnsupportedError
from torchstorm.memory.allocated import allocated_bytes, peak_allocated_bytes
from torchstorm.offload.native import memory
from torchstorm.offload.recompute import fused
from torchstorm.offload.step.clock import Clock, CpuClock
from torchstorm.storage.aligned import empty_at_phase
from torchstorm.transfer.engine import StreamClock, keep_busy

_ANY_BYTES = 1 << 62


class FastTier(Protocol):
    """A device, as a Session's steps see it.

    Attributes:
        device: where the model is.
        name: what budgets call it, "vram" or "ram".
        counts_all: whether the budget counts all that is allocated, and not only what autograd saved.
        is_beside_host: whether the device works while the host goes on, so that either may have to wait for the other,
            and copies run between them.
    """

    device: torch.device
    name: str
    counts_all: bool
    is_beside_host: bool

    def clock(self) -> Clock:
        """Marks times of the device."""

    def synchronize(self) -> None:
        """Waits until the device has done all that it was given."""

    def keep_busy(self, seconds: float) -> None:
        """Gives a device beside the host work for so long, so that the host gets ahead of it."""

    def is_idle(self) -> bool:
        """Whether it has, as far as the current stream goes."""

    def begin_step(self) -> None:
        """A step begins: peaks count from here.

        Raises:
            UnsupportedError: the device is capturing a CUDA graph.
        """

    def close(self) -> None:
        """No step begins any more."""

    def allocated_bytes(self) -> int:
        """What is allocated; 0 where that is not counted."""

    def peak_bytes(self) -> int:
        """The most since `reset_peak`, likewise."""

    def reset_peak(self) -> None:
        """Counts peaks from here."""

    def unused_bytes(self, limit_bytes: int) -> int:
        """What may be allocated of so many bytes beside all that is there; anything where that is not counted."""

    def in_use(self, held_bytes: int, limit_bytes: int) -> tuple[int, int, int]:
        """Bytes of tensors, what is reserved for them, and what is free.

        Args:
            held_bytes: what a Session holds.
            limit_bytes: what it may.
        """

    def empty(self, nbytes: int, phase: int) -> torch.Tensor:
        """Allocates (nbytes,) uint8; on a CPU at a phase of a page, for a disk to fill it directly."""


class Gpu:  # pragma: gpu
    """A CUDA device; see `FastTier`."""

    name = "vram"
    counts_all = is_beside_host = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def clock(self) -> Clock:
        """Timing events on the current stream."""
        return StreamClock(self.device)

    def synchronize(self) -> None:
        """Waits for all streams."""
        torch.cuda.synchronize(self.device)

    def keep_busy(self, seconds: float) -> None:
        """A kernel that spins."""
        keep_busy(self.device, seconds)

    def is_idle(self) -> bool:
        """Asks the current stream."""
        return torch.cuda.current_stream(self.device).query()

    def begin_step(self) -> None:
        """Refuses to run within a capture: waits for copies would not be in the graph. Takes kernels up."""
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedError("A step cannot be captured into a CUDA graph, which would lose its waits.")
        fused.take_over()
        self.reset_peak()

    def close(self) -> None:
        """Its memory is PyTorch's."""

    def allocated_bytes(self) -> int:
        """As the allocator counts."""
        return allocated_bytes(self.device)

    def peak_bytes(self) -> int:
        """As the allocator counts."""
        return peak_allocated_bytes(self.device)

    def reset_peak(self) -> None:
        """Resets the allocator's peaks."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def unused_bytes(self, limit_bytes: int) -> int:
        """Beside all tensors."""
        return limit_bytes - allocated_bytes(self.device)

    def in_use(self, held_bytes: int, limit_bytes: int) -> tuple[int, int, int]:
        """As allocator and driver say."""
        free = torch.cuda.mem_get_info(self.device)[0]
        return allocated_bytes(self.device), torch.cuda.memory_reserved(self.device), free

    def empty(self, nbytes: int, phase: int) -> torch.Tensor:
        """At any address."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)


class Cpu:
    """The host itself; see `FastTier`.

    Args:
        has_budget: whether what the process holds is to stay near what it uses; see `native.memory`.
    """

    name = "ram"
    counts_all = is_beside_host = False
    device = torch.device("cpu")

    def __init__(self, *, has_budget: bool) -> None:
        self._has_budget = has_budget

    def clock(self) -> Clock:
        """The host's own."""
        return CpuClock()

    def synchronize(self) -> None:
        """Nothing is under way."""

    def keep_busy(self, seconds: float) -> None:
        """It is no device beside the host."""

    def is_idle(self) -> bool:
        """Always, between two operations."""
        return True

    def begin_step(self) -> None:
        """Peaks are the Session's own."""
        if self._has_budget:
            memory.begin_step(self)

    def close(self) -> None:
        """PyTorch allocates as ever."""
        memory.let_go(self)

    def allocated_bytes(self) -> int:
        """Not counted."""
        return 0

    def peak_bytes(self) -> int:
        """Not counted."""
        return 0

    def reset_peak(self) -> None:
        """Nothing to do."""

    def unused_bytes(self, limit_bytes: int) -> int:
        """Anything."""
        return _ANY_BYTES

    def in_use(self, held_bytes: int, limit_bytes: int) -> tuple[int, int, int]:
        """What the Session holds, and may hold besides."""
        return held_bytes, held_bytes, max(0, limit_bytes - held_bytes)

    def empty(self, nbytes: int, phase: int) -> torch.Tensor:
        """At that phase of a page."""
        own = memory.empty(nbytes) if phase == 0 else None
        return own if own is not None else empty_at_phase(nbytes, phase)


def fast_tier_on(device: torch.device, *, has_budget: bool) -> FastTier:
    """The fast tier that a device is.

    Args:
        device: where the model is.
        has_budget: whether a Session there has one.
    """
    return Gpu(device) if device.type == "cuda" else Cpu(has_budget=has_budget)
