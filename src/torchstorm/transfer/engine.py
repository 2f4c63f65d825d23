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


class _Streams:  # pragma: gpu
    """The current stream of one device, without the time that `torch.cuda.current_stream` and `torch.cuda.stream` take
    the host at every call."""

    def __init__(self, device: torch.device) -> None:
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._known: dict[tuple[int, int, int], torch.cuda.Stream] = {}

    def current(self) -> torch.cuda.Stream:
        """The stream that work on the device is queued on now."""
        key = torch._C._cuda_getCurrentStream(self._index)
        stream = self._known.get(key)
        if stream is None:
            stream_id, index, kind = key
            stream = torch.cuda.Stream(stream_id=stream_id, device_index=index, device_type=kind)
            self._known[key] = stream
        return stream

    def copy(
        self,
        stream: torch.cuda.Stream,
        target: torch.Tensor,
        source: torch.Tensor,
        after: Sequence[StreamCopy],
    ) -> torch.cuda.Event:
        """Queues a copy on one of the device's streams, and records an event behind it."""
        if torch._C._cuda_getDevice() != self._index:
            with torch.cuda.device(self._index):
                return self.copy(stream, target, source, after)
        before = self.current()
        _set_stream(stream)
        try:
            for copy in after:
                copy.wait()
            target.copy_(source, non_blocking=True)
        finally:
            _set_stream(before)
        finished = torch.cuda.Event()
        finished.record(stream)
        return finished


def _set_stream(stream: torch.cuda.Stream) -> None:  # pragma: gpu
    torch._C._cuda_setStream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )


class CudaCopy:  # pragma: gpu
    """A copy queued on a copy stream."""

    __slots__ = ("_event", "_streams")

    def __init__(self, streams: _Streams, event: torch.cuda.Event) -> None:
        self._streams = streams
        self._event = event

    def wait(self) -> None:
        """Makes the device's current stream wait for the copy. Does not block the host."""
        self._streams.current().wait_event(self._event)

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
        self._streams = _Streams(device)

    def mark(self) -> torch.cuda.Event:
        """Records an event on the current stream, for copies that another thread queues."""
        ready = torch.cuda.Event()
        ready.record(self._streams.current())
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
        return CudaCopy(self._streams, self._streams.copy(stream, target, source, after))

    def synchronize(self) -> None:
        """Makes the host wait for all copies."""
        self._to_host.synchronize()
        self._to_device.synchronize()


class StreamClock:  # pragma: gpu
    """Timing events on the compute stream."""

    def __init__(self, device: torch.device) -> None:
        self._streams = _Streams(device)

    def mark(self) -> torch.cuda.Event:
        """Records a timing event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._streams.current())
        return event
