"""The queues of copies, with a runtime that stands for CUDA's."""

from __future__ import annotations

import _ctypes
import ctypes
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchstorm.errors import UnsupportedError
from torchstorm.transfer import engine, runtime
from torchstorm.transfer.engine import Queue

_STREAM, _CURRENT = 111, 777


class Runtime:
    """Copies when it is asked to, and knows which events were recorded. As CUDA's, it takes one that was not for one
    that has come."""

    def __init__(self) -> None:
        self.recorded: set[int] = set()
        self.in_vain: list[str] = []  # waits for what was not recorded
        self.num_events = 0
        self.begins, self.may_go_on = threading.Event(), threading.Event()

    def new_event(self) -> int:
        self.num_events += 1
        return self.num_events

    def record(self, event: int, stream: int) -> None:
        self.recorded.add(event)

    def wait(self, stream: int, event: int) -> None:
        if event not in self.recorded:
            self.in_vain.append("wait")

    def synchronize(self, event: int) -> None:
        if event not in self.recorded:
            self.in_vain.append("synchronize")

    def has_passed(self, event: int) -> bool:
        return True

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self.begins.set()
        assert self.may_go_on.wait(10)
        ctypes.memmove(target, source, nbytes)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    found = Runtime()
    monkeypatch.setattr(engine, "runtime", lambda: found)
    monkeypatch.setattr(runtime, "runtime", lambda: found)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: _CURRENT, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    stream = SimpleNamespace(device_index=0, cuda_stream=_STREAM)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: stream)
    monkeypatch.setattr(engine, "events_of", runtime.Events)
    return found


@pytest.mark.parametrize("ask", ["wait", "synchronize", "done"])
def test_whoever_waits_for_a_copy_that_another_thread_is_queueing_waits_until_it_is_queued(
    fake: Runtime, ask: str
) -> None:
    queue = Queue(torch.device("cpu"), burst_bytes=1 << 20)
    source, target = torch.full((1024,), 7, dtype=torch.uint8), torch.zeros(1024, dtype=torch.uint8)
    copy = queue.copy(target, source, (), None)
    queueing = threading.Thread(target=queue.flush)
    queueing.start()
    assert fake.begins.wait(10)
    seen: list[Any] = []

    def waits() -> None:
        getattr(copy, ask)()
        seen.append(int(target[0]))

    waiting = threading.Thread(target=waits)
    waiting.start()
    waiting.join(0.05)
    fake.may_go_on.set()
    queueing.join()
    waiting.join()
    assert fake.in_vain == []
    assert seen == [7]


def test_tensors_that_cannot_be_copied_as_bytes_are_refused(fake: Runtime) -> None:
    queue = Queue(torch.device("cpu"), burst_bytes=0)
    with pytest.raises(ValueError, match="equally many bytes"):
        queue.copy(torch.zeros(8), torch.zeros(9), (), None)
    with pytest.raises(ValueError, match="contiguous"):
        queue.copy(torch.zeros(4, 4), torch.zeros(4, 4).t(), (), None)


def test_a_pytorch_without_a_cuda_runtime_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "__file__", _ctypes.__file__)
    with pytest.raises(UnsupportedError, match=r"No CUDA runtime was found .*cudaMemcpyAsync.* Install PyTorch"):
        runtime.Runtime()
