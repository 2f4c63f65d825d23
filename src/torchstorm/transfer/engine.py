"""Copies between device and host on two CUDA streams, one for each direction.

No other module creates CUDA streams. A copy starts after the work queued so far on the caller's stream, and returns an
event. To free a copied tensor, the compute stream waits for that event, then the tensor is dropped. So the peak of
allocated memory follows from program order, however far the host runs ahead. Polling and record_stream are not needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class StreamCopy(Protocol):
    """A copy that streams and the host can wait for."""

    def wait(self) -> None:
        """Makes the current stream wait for the copy."""

    def synchronize(self) -> None:
        """Makes the host wait for the copy."""

    def done(self) -> bool:
        """Whether the copy has ended."""


class CudaCopy:  # pragma: gpu
    """A copy queued on a copy stream."""

    def __init__(self, device: torch.device, event: torch.cuda.Event) -> None:
        self._device = device
        self._event = event

    def wait(self) -> None:
        """Makes the device's current stream wait for the copy. Does not block the host."""
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
        self._to_host = torch.cuda.Stream(device)
        self._to_device = torch.cuda.Stream(device)

    def mark(self) -> torch.cuda.Event:
        """Records an event on the current stream, for copies that another thread queues."""
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
        """Queues a device-to-host copy after the current stream's work so far (or `ready`) and the copies in `after`.

        `source` must stay allocated until the stream that may reuse its memory has waited for the copy.
        """
        return self._queue(self._to_host, host, source, after, ready)

    def copy_in(
        self,
        out: torch.Tensor,
        host: torch.Tensor,
        *,
        after: Sequence[StreamCopy] = (),
        ready: torch.cuda.Event | None = None,
    ) -> CudaCopy:
        """Queues a host-to-device copy. Earlier work on the current stream may still use the memory of `out`."""
        return self._queue(self._to_device, out, host, after, ready)

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
        self._to_host.synchronize()
        self._to_device.synchronize()


class StreamClock:  # pragma: gpu
    """Timing events on the compute stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        """Records a timing event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
