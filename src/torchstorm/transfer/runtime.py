"""What copies need of the CUDA runtime that PyTorch has loaded: events, and copies between addresses.

PyTorch's own way to a copy, through an operator, two streams and two events of its classes, takes the host 70 us in the
middle of a model's forward, and a step that moves much makes hundreds of them. The runtime's functions take some 10 us.
They are called by `ctypes`, without giving up Python's lock: to have it back can take as long as another thread likes.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from torchstorm.errors import UnsupportedError

_NOT_READY = 600
_NO_TIMES = 2  # cudaEventDisableTiming
_BY_ADDRESS = 4  # cudaMemcpyDefault: the addresses tell which is the host's

_POINTER = ctypes.c_void_p
_ARGUMENTS = {
    "cudaMemcpyAsync": (_POINTER, _POINTER, ctypes.c_size_t, ctypes.c_int, _POINTER),
    "cudaStreamWaitEvent": (_POINTER, _POINTER, ctypes.c_uint),
    "cudaEventCreateWithFlags": (_POINTER, ctypes.c_uint),
    "cudaEventRecord": (_POINTER, _POINTER),
    "cudaEventQuery": (_POINTER,),
    "cudaEventSynchronize": (_POINTER,),
}


class Runtime:  # pragma: gpu
    """The functions. Each raises RuntimeError with the runtime's own words where it fails.

    Attributes:
        copy_at, wait_at, record_at: addresses of cudaMemcpyAsync, cudaStreamWaitEvent and cudaEventRecord.

    Raises:
        UnsupportedError: this PyTorch has no CUDA runtime beside it.
    """

    __slots__ = ("__dict__", "copy_at", "record_at", "wait_at")  # these C++ asks for by their places

    def __init__(self) -> None:
        loaded = torch._C.__file__  # among what this needs is the runtime that PyTorch itself uses
        try:
            found = {name: getattr(ctypes.PyDLL(loaded), name) for name in _ARGUMENTS}
        except AttributeError as error:
            raise UnsupportedError(
                f"No CUDA runtime was found beside this PyTorch ({torch.__version__}), as copies between GPU and RAM "
                f"need: {error}. Install PyTorch from its own wheels for CUDA, which bring one."
            ) from None
        found["cudaEventSynchronize"] = ctypes.CDLL(loaded).cudaEventSynchronize  # waits, so others may run
        for name, function in found.items():
            function.argtypes, function.restype = _ARGUMENTS[name], ctypes.c_int
        self._memcpy, self._stream_wait = found["cudaMemcpyAsync"], found["cudaStreamWaitEvent"]
        self._create, self._record = found["cudaEventCreateWithFlags"], found["cudaEventRecord"]
        self.copy_at, self.wait_at = address_of(self._memcpy), address_of(self._stream_wait)
        self.record_at = address_of(self._record)
        self._query, self._synchronize = found["cudaEventQuery"], found["cudaEventSynchronize"]
        self._last_error = ctypes.PyDLL(loaded).cudaGetLastError
        self._error_string = ctypes.PyDLL(loaded).cudaGetErrorString
        self._error_string.argtypes, self._error_string.restype = (ctypes.c_int,), ctypes.c_char_p

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Queues a copy of bytes on a stream."""
        if status := self._memcpy(target, source, nbytes, _BY_ADDRESS, stream):
            raise self.failed("a copy between host and device", status)

    def wait(self, stream: int, event: int) -> None:
        """Has what a stream is given from here on wait for an event."""
        if status := self._stream_wait(stream, event, 0):
            raise self.failed("waiting for an event", status)

    def new_event(self) -> int:
        """An event of the current device."""
        event = _POINTER()
        if status := self._create(ctypes.byref(event), _NO_TIMES):
            raise self.failed("making an event", status)
        assert event.value is not None
        return event.value

    def record(self, event: int, stream: int) -> None:
        """Has an event follow what a stream was given so far."""
        if status := self._record(event, stream):
            raise self.failed("recording an event", status)

    def has_passed(self, event: int) -> bool:
        """Whether an event has come."""
        status = self._query(event)
        if status == _NOT_READY:
            self._last_error()  # else the next one who asks for the last error takes this for one
        elif status:
            raise self.failed("a copy between host and device", status)
        return bool(status == 0)

    def synchronize(self, event: int) -> None:
        """Makes the host wait for an event."""
        if status := self._synchronize(event):
            raise self.failed("a copy between host and device", status)

    def failed(self, what: str, status: int) -> RuntimeError:
        """What to raise where a function returns a status that is not 0."""
        self._last_error()
        return RuntimeError(f"CUDA error {status} in {what}: {self._error_string(status).decode()}")


def address_of(function: Any) -> int:
    """Where a function of a library, or one that Python gives to C, lies."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@functools.cache
def runtime() -> Runtime:  # pragma: gpu
    """The runtime, found once."""
    return Runtime()


class Events:  # pragma: gpu
    """Events of one device. One that nobody refers to any more is used again.

    Args:
        index: of the device.

    Attributes:
        unused: handles of those.
        current_device, raw_stream: PyTorch's functions for the current device, and for its current stream's handle.
    """

    __slots__ = ("current_device", "index", "raw_stream", "unused")

    def __init__(self, index: int) -> None:
        self.index = index
        self.unused: list[int] = []
        self.current_device = torch._C._cuda_getDevice
        self.raw_stream = torch._C._cuda_getCurrentRawStream

    def new(self) -> Event:
        """An event; the device is the current one."""
        try:
            handle = self.unused.pop()
        except IndexError:
            handle = runtime().new_event()
        return Event(handle, self.unused)

    def is_here(self) -> bool:
        """Whether the device is the current one."""
        return bool(self.current_device() == self.index)

    def current_stream(self) -> int:
        """The handle of the stream that work on the device is queued on now."""
        return int(self.raw_stream(self.index))


@functools.cache
def events_of(index: int) -> Events:  # pragma: gpu
    """The events of a device."""
    return Events(index)


class Event:  # pragma: gpu
    """An event without times.

    Args:
        handle: the runtime's own.
        unused: takes the handle back.
    """

    __slots__ = ("_unused", "handle")

    def __init__(self, handle: int, unused: list[int]) -> None:
        self.handle = handle
        self._unused = unused

    def drop(self) -> None:
        """Gives the handle back. C++ does so in place of it, where that is there."""
        self._unused.append(self.handle)

    __del__ = drop

    def record(self, stream: int) -> None:
        """Follows what a stream, by its handle, was given so far."""
        runtime().record(self.handle, stream)

    def wait(self, stream: int) -> None:
        """Has what a stream, by its handle, is given from here on wait."""
        runtime().wait(stream, self.handle)

    def query(self) -> bool:
        """Whether it has come."""
        return runtime().has_passed(self.handle)

    def synchronize(self) -> None:
        """Makes the host wait."""
        runtime().synchronize(self.handle)
