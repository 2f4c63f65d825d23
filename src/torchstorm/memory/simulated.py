"""A tier with any size and speed: real bytes in RAM, simulated time.

Each direction is a channel that runs one copy after another. A copy takes `latency_s + bytes / speed`. Bytes move at
the simulated end of a copy, so errors of synchronization have the same effects as on a real tier: a source that is
changed too early is stored with the change, and an `out` that is used without waiting holds garbage.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from torchstorm.errors import StorageError
from torchstorm.memory.tier import Handle, TierSpec, budget_error, check_bytes_tensor, freed_error
from torchstorm.storage.backend import StorageCopy

if TYPE_CHECKING:
    import torch


class SimulatedCopy(StorageCopy):
    """A copy that ends at a point in simulated time.

    Attributes:
        start_s: simulated time when its channel starts it.
        end_s: simulated time when it ends.
    """

    def __init__(self, tier: SimulatedTier, start_s: float, end_s: float) -> None:
        super().__init__()
        self.start_s = start_s
        self.end_s = end_s
        self._tier = tier

    def wait(self) -> None:
        """Advances simulated time to the end of the copy. With `sleep`, waits in real time."""
        self._tier._wait_until(self.end_s)
        super().wait()


class SimulatedHandle:
    """A storage in the simulated tier."""

    phase = 0

    def __init__(self, nbytes: int, label: str, written: SimulatedCopy) -> None:
        self.nbytes = nbytes
        self.label = label
        self.written = written
        self.data: torch.Tensor | None = None
        self.freed = False
        self.last_end_s = written.end_s


class SimulatedTier:
    """A simulated `Tier`.

    Args:
        spec: name, capacity and speeds.
        sleep: copies take real time, in a thread. Otherwise time advances only in waits and in `advance`.
    """

    def __init__(self, spec: TierSpec, *, sleep: bool = False) -> None:
        self.spec = spec
        self.used_bytes = 0
        self.peak_bytes = 0
        self._sleep = sleep
        self._origin_s = time.monotonic()
        self._now_s = 0.0
        self._channel_free_s = {"write": 0.0, "read": 0.0}
        self._events: list[tuple[float, int, Callable[[], None]]] = []  # a heap
        self._num_events = 0
        self._changed = threading.Condition(threading.RLock())
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def now_s(self) -> float:
        """Seconds since the start: simulated, or with `sleep` real."""
        return time.monotonic() - self._origin_s if self._sleep else self._now_s

    def advance(self, seconds: float) -> None:
        """Advances the simulated time, as compute would."""
        self._wait_until(self.now_s + seconds)

    def reset_peak(self) -> None:
        """Sets `peak_bytes` to `used_bytes`."""
        with self._changed:
            self.peak_bytes = self.used_bytes

    def put(self, source: torch.Tensor, *, label: str = "") -> SimulatedHandle:
        """Starts to copy a contiguous 1-D uint8 tensor; see `Tier`."""
        check_bytes_tensor(source)
        with self._changed:
            self._check_open()
            needed = self.used_bytes + source.nbytes
            if needed > self.spec.capacity_bytes:
                raise budget_error(
                    self.spec,
                    label=label,
                    wanted_bytes=source.nbytes,
                    used_bytes=self.used_bytes,
                    where=" (simulated)",
                )
            self.used_bytes = needed
            self.peak_bytes = max(self.peak_bytes, needed)
            written = self._copy("write", source.nbytes, self.spec.write_bytes_per_s, not_before_s=0.0)
            handle = SimulatedHandle(source.nbytes, label, written)

            def store() -> None:
                handle.data = source.clone()
                written.finish()

            self._schedule(written.end_s, store)
        return handle

    def get(self, handle: Handle, out: torch.Tensor) -> SimulatedCopy:
        """Starts to copy a storage back, after its `put`; see `Tier`."""
        assert isinstance(handle, SimulatedHandle)
        check_bytes_tensor(out, nbytes=handle.nbytes, label=handle.label)
        with self._changed:
            self._check_open()
            if handle.freed:
                raise freed_error(handle.label)
            copy = self._copy("read", out.nbytes, self.spec.read_bytes_per_s, not_before_s=handle.written.end_s)
            handle.last_end_s = max(handle.last_end_s, copy.end_s)

            def fetch() -> None:
                assert handle.data is not None
                out.copy_(handle.data)
                copy.finish()

            self._schedule(copy.end_s, fetch)
        return copy

    def free(self, handle: Handle) -> None:
        """Frees the storage. Its bytes stay until running copies have ended. A second call does nothing."""
        assert isinstance(handle, SimulatedHandle)
        with self._changed:
            if handle.freed:
                return
            handle.freed = True
            self.used_bytes -= handle.nbytes

            def drop() -> None:
                handle.data = None

            self._schedule(handle.last_end_s, drop)

    def close(self) -> None:
        """Waits for running copies. A second call does nothing."""
        with self._changed:
            self._closed = True
            last_s = max((event[0] for event in self._events), default=0.0)
            thread = self._thread
        self._wait_until(last_s)
        if thread is not None:
            thread.join()

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError(f"the simulated tier {self.spec.name!r} is closed.")

    def _copy(self, channel: str, nbytes: int, bytes_per_s: float, *, not_before_s: float) -> SimulatedCopy:
        start_s = max(self.now_s, self._channel_free_s[channel], not_before_s)
        end_s = start_s + self.spec.latency_s + nbytes / bytes_per_s
        self._channel_free_s[channel] = end_s
        return SimulatedCopy(self, start_s, end_s)

    def _schedule(self, at_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, self._num_events, event))  # the number orders events of equal time
        self._num_events += 1
        if self._sleep:
            if self._thread is None:
                self._thread = threading.Thread(target=self._play, name="torchstorm-simulated", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        else:
            self._wait_until(self._now_s)  # runs events without duration

    def _wait_until(self, at_s: float) -> None:
        if self._sleep:
            time.sleep(max(at_s - self.now_s, 0.0))
            return
        with self._changed:
            while self._events and self._events[0][0] <= at_s:
                heapq.heappop(self._events)[2]()
            self._now_s = max(self._now_s, at_s)

    def _play(self) -> None:
        # The thread ends with the last event, so a tier that is never closed leaves no thread.
        with self._changed:
            while self._events:
                left_s = self._events[0][0] - self.now_s
                if left_s > 0:
                    self._changed.wait(left_s)
                else:
                    heapq.heappop(self._events)[2]()
            self._thread = None
