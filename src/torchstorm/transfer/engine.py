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


_BURST_BYTES, _MOST_TOGETHER = 48 * 2**20, 8  # of copies that wait for company: one of 48 MiB takes the link 1 ms

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


class _Burst:  # pragma: gpu
    """Copies that are queued together.

    Attributes:
        targets, sources: of the copies.
        after: copies that end before.
        behind: an event, or the stream whose work comes before them, until the last one was asked for.
        ready: the event that says so of a stream.
        ended: the event that follows them.
        nbytes: of all.
    """

    __slots__ = ("after", "behind", "ended", "nbytes", "ready", "sources", "targets")

    def __init__(self, behind: Any) -> None:
        self.targets: list[torch.Tensor] = []
        self.sources: list[torch.Tensor] = []
        self.after: list[StreamCopy] = []
        self.behind = behind
        self.ready: Any = _Event() if isinstance(behind, torch.cuda.Stream) else behind
        self.ended: Any = _Event()
        self.nbytes = 0

    def leave_out_what_is_gone(self) -> None:
        """Where a storage was resized meanwhile there is nothing to copy; whoever asks for the bytes is told so."""
        if any(one.untyped_storage().nbytes() < one.nbytes for one in self.sources):
            pairs = zip(self.targets, self.sources, strict=True)
            there = [(to, of) for to, of in pairs if of.untyped_storage().nbytes() >= of.nbytes]
            self.targets, self.sources = [to for to, _ in there], [of for _, of in there]


class _Queue:  # pragma: gpu
    """One of the copy streams. Copies on it end in the order in which they were queued.

    Copies that need not begin at once wait for company: they are queued together behind one event, followed by one. In
    the middle of a model's forward nothing of this is in the processor's caches, so one copy takes the host as long as
    several that follow each other.

    Args:
        device, streams: of the caller.
        burst_bytes: that wait for company at most, or as many as `_MOST_TOGETHER`; 0 for none.
    """

    def __init__(self, device: torch.device, streams: _Streams, *, burst_bytes: int) -> None:
        self.stream = torch.cuda.Stream(device)
        self.streams = streams
        self.num_queued = 0  # bursts on the stream
        self.num_ended = 0  # of those, the ones known to have ended, the first ones
        self._burst_bytes = burst_bytes
        self._burst: _Burst | None = None  # what waits for company
        self._newest: Any = None  # the event behind the last burst
        self._lock = threading.RLock()  # bursts have their numbers in the order of their events

    def copy(
        self, target: torch.Tensor, source: torch.Tensor, after: Sequence[StreamCopy], ready: Any | None
    ) -> CudaCopy:
        """Queues a copy behind `ready`, or else behind what the current stream was given, and the copies in `after`."""
        behind = self.streams.current() if ready is None else ready
        with self._lock:
            if self._burst is not None and self._burst.behind is not behind:
                self.flush()
            burst = self._burst = self._burst or _Burst(behind)
            burst.targets.append(target)
            burst.sources.append(source)
            burst.after += after
            burst.nbytes += target.nbytes
            if ready is None:  # what is queued until the burst is need not end first
                burst.ready.record(behind)
            copy = CudaCopy(self, burst.ended, self.num_queued + 1)
            if burst.nbytes > self._burst_bytes or len(burst.targets) == _MOST_TOGETHER or ready is not None:
                self.flush()
            return copy

    def flush(self) -> None:
        """Queues what waits for company."""
        with self._lock:
            burst, index = self._burst, self.streams.index
            if burst is None:
                return
            if torch._C._cuda_getDevice() != index:
                with torch.cuda.device(index):
                    self.flush()
                return
            self._burst = None
            _Event.wait(burst.ready, self.stream)
            before = torch._C._cuda_getCurrentStream(index)
            _set_stream(self.stream.stream_id, index, self.stream.device_type)
            try:
                for copy in burst.after:
                    copy.wait()
                burst.leave_out_what_is_gone()
                with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():  # no mode of the user's sees it
                    if burst.targets:
                        torch._foreach_copy_(burst.targets, burst.sources, non_blocking=True)
            finally:
                _set_stream(*before)
            burst.ended.record(self.stream)
            self.num_queued += 1
            self._newest = burst.ended

    def ask(self) -> None:
        """Finds out whether all copies have ended."""
        with self._lock:
            if self._newest is not None and self._newest.query():
                self.num_ended = self.num_queued


def _set_stream(stream_id: int, index: int, kind: int) -> None:  # pragma: gpu
    torch._C._cuda_setStream(stream_id=stream_id, device_index=index, device_type=kind)


class CudaCopy:  # pragma: gpu
    """A copy queued on a copy stream.

    Args:
        queue: the stream.
        event: follows the copy.
        number: of the copy's burst among those on the stream.
    """

    __slots__ = ("_event", "_number", "_queue")

    def __init__(self, queue: _Queue, event: Any, number: int) -> None:
        self._queue = queue
        self._event = event
        self._number = number

    def wait(self) -> None:
        """Makes the device's current stream wait for the copy. Does not block the host."""
        if self._number > self._queue.num_queued:
            self._queue.flush()
        self._event.wait(self._queue.streams.current())

    def synchronize(self) -> None:
        """Makes the host wait for the copy."""
        self._queue.flush()
        self._event.synchronize()

    def done(self) -> bool:
        """Whether the copy has ended. One that waits for others begins now."""
        queue = self._queue
        if self._number > queue.num_queued:
            queue.flush()
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
        self._to_host = _Queue(device, self._streams, burst_bytes=_BURST_BYTES)
        self._to_device = _Queue(device, self._streams, burst_bytes=0)

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

        It may begin some moments later, together with the next ones: at the latest when anyone waits for it, or when a
        copy in the other direction begins. `source` must stay as it is until the stream that may change it, or reuse
        its memory, has waited for the copy.
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
        self._to_host.flush()
        return self._to_device.copy(out, host, after, ready)

    def synchronize(self) -> None:
        """Makes the host wait for all copies."""
        self._to_host.flush()
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
