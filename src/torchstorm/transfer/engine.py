"""Copies between device and host on two CUDA streams, one for each direction.

No other module creates CUDA streams. A copy starts after the work queued so far on the caller's stream, and returns an
event. To free a copied tensor, the compute stream waits for that event, then the tensor is dropped. So the peak of
allocated memory follows from program order, however far the host runs ahead. Polling and record_stream are not needed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch


class StreamCopy(Protocol):
    """A copy that streams and the host can wait for."""

    def wait(self) -> None:
        """Makes the current stream wait for the copy."""

    def synchronize(self) -> None:
        """Makes the host wait for the copy."""

    def done(self) -> bool:
        """Whether the copy has ended."""


# What `torch.cuda.Event` is made of: its methods are called twice for every copy, and its own are Python around these.
_Event: Any = torch.cuda.Event.__base__


class _Streams:  # pragma: gpu
    """The current stream of one device, without the time that `torch.cuda.current_stream` and `torch.cuda.stream` take
    the host at every call."""

    def __init__(self, device: torch.device) -> None:
        self.index = torch.cuda.current_device() if device.index is None else device.index
        self._known: dict[tuple[int, int, int], torch.cuda.Stream] = {}

    def current(self) -> torch.cuda.Stream:
        """The stream that work on the device is queued on now."""
        key = torch._C._cuda_getCurrentStream(self.index)
        stream = self._known.get(key)
        if stream is None:
            stream_id, index, kind = key
            stream = torch.cuda.Stream(stream_id=stream_id, device_index=index, device_type=kind)
            self._known[key] = stream
        return stream


class _Queue:  # pragma: gpu
    """One of the copy streams. Copies on it end in the order in which they were queued."""

    def __init__(self, device: torch.device, streams: _Streams) -> None:
        self.stream = torch.cuda.Stream(device)
        self.streams = streams
        self.num_ended = 0  # copies known to have ended, the first ones
        self._num_queued = 0
        self._newest: Any = None  # the event behind the last one
        self._lock = threading.RLock()  # copies have their numbers in the order of their events

    def copy(
        self, target: torch.Tensor, source: torch.Tensor, after: Sequence[StreamCopy], ready: Any | None
    ) -> CudaCopy:
        """Queues a copy behind `ready`, or else behind what the current stream was given, and the copies in `after`."""
        streams, index = self.streams, self.streams.index
        if torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                return self.copy(target, source, after, ready)
        if ready is None:
            ready = _Event()
            ready.record(streams.current())
        ended = _Event()
        with self._lock:
            _Event.wait(ready, self.stream)
            before = torch._C._cuda_getCurrentStream(index)
            _set_stream(self.stream.stream_id, index, self.stream.device_type)
            try:
                for copy in after:
                    copy.wait()
                target.copy_(source, non_blocking=True)
            finally:
                _set_stream(*before)
            ended.record(self.stream)
            self._num_queued += 1
            self._newest = ended
            return CudaCopy(self, ended, self._num_queued)

    def ask(self) -> None:
        """Finds out whether all copies have ended."""
        with self._lock:
            if self._newest is not None and self._newest.query():
                self.num_ended = self._num_queued


def _set_stream(stream_id: int, index: int, kind: int) -> None:  # pragma: gpu
    torch._C._cuda_setStream(stream_id=stream_id, device_index=index, device_type=kind)


class CudaCopy:  # pragma: gpu
    """A copy queued on a copy stream.

    Args:
        queue: the stream.
        event: follows the copy.
        number: of the copy among those on the stream.
    """

    __slots__ = ("_event", "_number", "_queue")

    def __init__(self, queue: _Queue, event: Any, number: int) -> None:
        self._queue = queue
        self._event = event
        self._number = number

    def wait(self) -> None:
        """Makes the device's current stream wait for the copy. Does not block the host."""
        self._event.wait(self._queue.streams.current())

    def synchronize(self) -> None:
        """Makes the host wait for the copy."""
        self._event.synchronize()

    def done(self) -> bool:
        """Whether the copy has ended."""
        queue = self._queue
        if self._number > queue.num_ended:
            queue.ask()
        return self._number <= queue.num_ended or bool(self._event.query())


class Engine:  # pragma: gpu
    """The two copy streams of one device.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams = _Streams(device)
        self._to_host = _Queue(device, self._streams)
        self._to_device = _Queue(device, self._streams)

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
        return self._to_host.copy(host, source, after, ready)

    def copy_in(
        self,
        out: torch.Tensor,
        host: torch.Tensor,
        *,
        after: Sequence[StreamCopy] = (),
        ready: torch.cuda.Event | None = None,
    ) -> CudaCopy:
        """Queues a host-to-device copy. Earlier work on the current stream may still use the memory of `out`."""
        return self._to_device.copy(out, host, after, ready)

    def synchronize(self) -> None:
        """Makes the host wait for all copies."""
        self._to_host.stream.synchronize()
        self._to_device.stream.synchronize()


class StreamClock:  # pragma: gpu
    """Timing events on the compute stream."""

    def __init__(self, device: torch.device) -> None:
        self._streams = _Streams(device)

    def mark(self) -> torch.cuda.Event:
        """Records a timing event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._streams.current())
        return event
