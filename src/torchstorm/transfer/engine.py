"""Copies between device and host on two CUDA streams, one for each direction.

No other module creates CUDA streams. A copy starts after the work queued so far on the caller's stream, and returns an
event. To free a copied tensor, the compute stream waits for that event, then the tensor is dropped. So the peak of
allocated memory follows from program order, however far the host runs ahead. Polling and record_stream are not needed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

import torch

from torchstorm.transfer.runtime import Event, events_of, runtime


class StreamCopy(Protocol):
    """A copy that streams and the host can wait for."""

    def wait(self) -> None:
        """Makes the current stream wait for the copy."""

    def synchronize(self) -> None:
        """Makes the host wait for the copy."""

    def done(self) -> bool:
        """Whether the copy has ended."""


_BURST_BYTES, _MOST_TOGETHER = 48 * 2**20, 8  # of copies that wait for company: one of 48 MiB takes the link 1 ms
_SPIN_HZ = 2e9  # cycles a second that a GPU counts at most


class Queue:  # pragma: gpu
    """One of the copy streams. Copies on it end in the order in which they were queued.

    Copies that need not begin at once wait for company: they are queued together behind one event, followed by one. In
    the middle of a model's forward nothing of this is in the processor's caches, so one copy takes the host as long as
    several that follow each other.

    Args:
        device: of the streams.
        burst_bytes: that wait for company at most, or as many as `_MOST_TOGETHER`; 0 for none.
    """

    # These C++ asks for by their places.
    __slots__ = (
        *("__dict__", "_burst", "_handle", "_lock", "_newest", "_runtime", "events", "num_ended", "num_queued"),
    )

    def __init__(self, device: torch.device, *, burst_bytes: int) -> None:
        self.stream = torch.cuda.Stream(device)
        self.events = events_of(self.stream.device_index)
        self.num_queued = 0  # bursts on the stream
        self.num_ended = 0  # of those, the ones known to have ended, the first ones
        self._runtime = runtime()
        self._handle = self.stream.cuda_stream
        self._burst_bytes = burst_bytes
        self._burst: _Burst | None = None  # what waits for company
        self._newest: Event | None = None  # the event behind the last burst
        self._lock = threading.RLock()  # bursts have their numbers in the order of their events

    def copy(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        after: Sequence[StreamCopy],
        ready: torch.cuda.Event | None,
    ) -> CudaCopy:
        """Queues a copy behind `ready`, or else behind what the current stream was given, and the copies in `after`."""
        if target.nbytes != source.nbytes or not (target.is_contiguous() and source.is_contiguous()):
            raise ValueError("the engine copies between contiguous tensors of equally many bytes")
        events = self.events
        if not events.is_here():
            with torch.cuda.device(events.index):
                return self.copy(target, source, after, ready)
        behind = events.current_stream() if ready is None else ready.cuda_event
        with self._lock:
            burst = self._burst
            if burst is not None and burst.behind != behind:
                self.flush()
                burst = None
            if burst is None:
                burst = self._burst = _Burst(behind, events.new(), events.new() if ready is None else None)
            burst.copies.append((target, source))
            burst.after += after
            burst.nbytes += target.nbytes
            if burst.ready is not None:  # what is queued until the burst is need not end first
                burst.ready.record(behind)
            copy = CudaCopy(self, burst.ended, self.num_queued + 1)
            if burst.nbytes > self._burst_bytes or len(burst.copies) == _MOST_TOGETHER or ready is not None:
                self.flush()
            return copy

    def flush(self) -> None:
        """Queues what waits for company; where another thread does so just now, waits until it has."""
        with self._lock:
            if self._burst is None:
                return
            if not self.events.is_here():
                with torch.cuda.device(self.events.index):
                    self.flush()
                return
            burst, self._burst = self._burst, None
            runtime, handle = self._runtime, self._handle
            runtime.wait(handle, burst.behind if burst.ready is None else burst.ready.handle)
            for copy in burst.after:
                if not isinstance(copy, CudaCopy):
                    copy.synchronize()
                elif copy.queue is not self:
                    copy.wait_on(handle)
            for target, source in burst.copies:
                # Where a storage was resized meanwhile there is nothing to copy; whoever asks for the bytes is told so.
                if source.untyped_storage().nbytes() >= source.nbytes:
                    runtime.copy(target.data_ptr(), source.data_ptr(), target.nbytes, handle)
            burst.ended.record(handle)
            self.num_queued += 1
            self._newest = burst.ended

    def ask(self) -> None:
        """Finds out whether all copies have ended."""
        with self._lock:
            if self._newest is not None and self._newest.query():
                self.num_ended = self.num_queued


class _Burst:  # pragma: gpu
    """Copies that are queued together.

    Args:
        behind: an event, or the stream whose work comes before them, until the last one was asked for: their handles.
        ended: the event that follows them.
        ready: the event that says so of a stream; None where they are behind an event.

    Attributes:
        copies: to where, and from where.
        after: copies that end before.
        nbytes: of all.
    """

    __slots__ = ("after", "behind", "copies", "ended", "nbytes", "ready")

    def __init__(self, behind: int, ended: Event, ready: Event | None) -> None:
        self.behind = behind
        self.ended = ended
        self.ready = ready
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.after: list[StreamCopy] = []
        self.nbytes = 0


class CudaCopy:  # pragma: gpu
    """A copy queued on a copy stream.

    Args:
        queue: the stream.
        event: follows the copy.
        number: of the copy's burst among those on the stream.
    """

    __slots__ = ("_event", "_number", "queue")

    def __init__(self, queue: Queue, event: Event, number: int) -> None:
        self.queue = queue
        self._event = event
        self._number = number

    def wait(self) -> None:
        """Makes the device's current stream wait for the copy. Does not block the host."""
        events = self.queue.events
        if not events.is_here():
            with torch.cuda.device(events.index):
                return self.wait()
        self.wait_on(events.current_stream())

    def wait_on(self, stream: int) -> None:
        """Makes a stream, by its handle, wait for the copy."""
        if self._number > self.queue.num_queued:
            self.queue.flush()
        self._event.wait(stream)

    def synchronize(self) -> None:
        """Makes the host wait for the copy."""
        self.queue.flush()
        self._event.synchronize()

    def done(self) -> bool:
        """Whether the copy has ended. One that waits for others begins now."""
        queue = self.queue
        if self._number > queue.num_queued:
            queue.flush()
        if self._number > queue.num_ended:
            queue.ask()
        return self._number <= queue.num_ended or self._event.query()


class Engine:  # pragma: gpu
    """The two copy streams of one device.

    Args:
        device: a CUDA device.
    """

    __slots__ = ("_to_device", "_to_host", "device")

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._to_host = Queue(device, burst_bytes=_BURST_BYTES)
        self._to_device = Queue(device, burst_bytes=0)

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
        Both tensors are contiguous and of equally many bytes.

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


def keep_busy(device: torch.device, seconds: float) -> None:  # pragma: gpu
    """Has the current stream wait for so many seconds, or a little longer, while the host goes on: what is timed after
    that was asked for before the device comes to it."""
    with torch.cuda.device(device):
        torch.cuda._sleep(int(seconds * _SPIN_HZ))


class StreamClock:  # pragma: gpu
    """Timing events on the compute stream."""

    def __init__(self, device: torch.device) -> None:
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._known: dict[tuple[int, int, int], torch.cuda.Stream] = {}

    def mark(self) -> torch.cuda.Event:
        """Records a timing event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._current())
        return event

    def _current(self) -> torch.cuda.Stream:
        """As `torch.cuda.current_stream`, which takes the host longer."""
        key = torch._C._cuda_getCurrentStream(self._index)
        stream = self._known.get(key)
        if stream is None:
            stream_id, index, kind = key
            stream = torch.cuda.Stream(stream_id=stream_id, device_index=index, device_type=kind)
            self._known[key] = stream
        return stream
