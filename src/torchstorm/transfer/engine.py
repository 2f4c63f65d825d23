"""The only owner of copy streams and their events: device to host on one stream, host to device on another.

A copy is queued behind what the caller's stream has been given so far, and answers with the event to wait for. Waiting
is the compute stream's affair, not the host's: giving memory back means making the compute stream wait for the copy
and only then dropping the tensor. So peaks follow from program order, however far the host runs ahead, and neither
polling nor record_stream is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class StreamCopy(Protocol):
    """A copy that other streams can be ordered after."""

    def wait(self) -> None:
        """Makes the current stream wait for the copy."""

    def synchronize(self) -> None:
        """Makes the host wait for the copy."""

    def done(self) -> bool:
        """Whether the copy has ended."""


class CudaCopy:  # pragma: gpu
    """One copy queued on a copy stream."""

    def __init__(self, device: torch.device, event: torch.cuda.Event) -> None:
        self._device = device
        self._event = event

    def wait(self) -> None:
        """Makes the device's current stream wait for the copy; the host goes on."""
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def synchronize(self) -> None:
        """Makes the host wait for the copy."""
        self._event.synchronize()

    def done(self) -> bool:
        """Whether the copy has ended."""
        return bool(self._event.query())


class Engine:  # pragma: gpu
    """The two copy streams of one device.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._out = torch.cuda.Stream(device)
        self._back = torch.cuda.Stream(device)

    def mark(self) -> torch.cuda.Event:
        """The current stream's work so far, for copies that another thread will queue."""
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self.device))
        return ready

    def copy_out(
        self,
        host: torch.Tensor,
        source: torch.Tensor,
        *,
        after: Sequence[StreamCopy] = (),
        ready: torch.cuda.Event | None = None,
    ) -> CudaCopy:
        """Queues device -> host behind the current stream's work so far (or `ready`) and the copies named in `after`.

        The source must stay allocated until a stream that would reuse its memory has waited for the copy.
        """
        return self._queue(self._out, host, source, after, ready)

    def copy_in(
        self,
        out: torch.Tensor,
        host: torch.Tensor,
        *,
        after: Sequence[StreamCopy] = (),
        ready: torch.cuda.Event | None = None,
    ) -> CudaCopy:
        """Queues host -> device likewise; the current stream's work so far may still use `out`'s memory."""
        return self._queue(self._back, out, host, after, ready)

    def _queue(
        self,
        stream: torch.cuda.Stream,
        target: torch.Tensor,
        source: torch.Tensor,
        after: Sequence[StreamCopy],
        ready: torch.cuda.Event | None,
    ) -> CudaCopy:
        stream.wait_event(ready or self.mark())
        with torch.cuda.stream(stream):
            for copy in after:
                copy.wait()
            target.copy_(source, non_blocking=True)
            finished = torch.cuda.Event()
            finished.record(stream)
        return CudaCopy(self.device, finished)

    def synchronize(self) -> None:
        """Makes the host wait for all copies."""
        self._out.synchronize()
        self._back.synchronize()


class StreamClock:  # pragma: gpu
    """Marks on the compute stream whose distances are device milliseconds."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        """A point in the current stream's work."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
