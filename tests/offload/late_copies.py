"""A Session on a CPU whose tensors move as they do on a GPU: into an arena, by the engine's streams, over a CUDA
runtime that stands for the real one. Copies are made as late as streams and events allow, so that one that nobody has
waited for is missed."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchstorm.memory.host import HostTier
from torchstorm.memory.tier import TierSpec
from torchstorm.offload import session
from torchstorm.offload.budget import Tiers
from torchstorm.offload.fast import Cpu
from torchstorm.offload.session import Session
from torchstorm.plan.forecast import DISK
from torchstorm.plan.machine import Machine
from torchstorm.plan.plan import Budget
from torchstorm.transfer import engine, runtime
from torchstorm.transfer.engine import Engine
from torchstorm.transfer.pinned import PinnedArena

CURRENT = 777  # the stream on which the model runs, whose work has ended when it was queued
_AWAY_BYTES = 2**30
_P, _I = ctypes.c_void_p, ctypes.c_int


@dataclass(eq=False)
class _Point:
    """What an event stands for: so much of a stream's work."""

    stream: int
    num_before: int


@dataclass(eq=False)
class Streams:
    """Work that was queued, and how far each stream has come.

    Attributes:
        log: the runtime's functions in the order in which they were called, without handles.
        status: what the next copy returns.
        ignores_waits: whether the model goes on without the copies that it should wait for.
    """

    log: list[str] = field(default_factory=list)
    status: int = 0
    ignores_waits: bool = False
    _work: dict[int, list[Any]] = field(default_factory=dict)
    _num_done: dict[int, int] = field(default_factory=dict)
    _events: dict[int, _Point] = field(default_factory=dict)
    _handles: Any = field(default_factory=lambda: itertools.count(1))

    def copy(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> int:
        assert kind == 4
        self.log.append(f"copy {nbytes} on {stream}")
        if not self.status:
            self._queue(stream, (target, source, nbytes))
        return self.status

    def record(self, event: int, stream: int) -> int:
        self.log.append(f"record on {stream}")
        self._events[event] = _Point(stream, len(self._work.get(stream, [])))
        return 0

    def wait(self, stream: int, event: int, flags: int) -> int:
        assert flags == 0
        self.log.append(f"wait on {stream}")
        point = self._events[event]
        if stream != CURRENT:
            self._queue(stream, point)
        elif not self.ignores_waits:
            self.reach(point)
        return 0

    def create(self, event: Any, flags: int) -> int:
        ctypes.cast(event, ctypes.POINTER(_P))[0] = next(self._handles)
        return 0

    def query(self, event: int) -> int:
        point = self._events[event]
        return 0 if self._num_done.get(point.stream, 0) >= point.num_before else 600

    def synchronize(self, event: int) -> int:
        self.reach(self._events[event])
        return 0

    def finish(self, stream: int) -> None:
        self.reach(_Point(stream, len(self._work.get(stream, []))))

    def forget(self) -> None:
        """Nothing that was queued is ever done: its memory may be gone."""
        self._num_done = {stream: len(work) for stream, work in self._work.items()}

    def reach(self, point: _Point) -> None:
        """Does what comes before a point, and what that waits for."""
        work = self._work.get(point.stream, [])
        while self._num_done.get(point.stream, 0) < point.num_before:
            one = work[self._num_done.get(point.stream, 0)]
            if isinstance(one, _Point):
                self.reach(one)
            else:
                ctypes.memmove(*one)
            self._num_done[point.stream] = self._num_done.get(point.stream, 0) + 1

    def _queue(self, stream: int, one: object) -> None:
        self._work.setdefault(stream, []).append(one)


class _Runtime(runtime.Runtime):
    """The functions of `Streams`, as C has them."""

    def __init__(self, streams: Streams) -> None:
        self._memcpy = ctypes.CFUNCTYPE(_I, _P, _P, ctypes.c_size_t, _I, _P)(_with_zeros(streams.copy))
        self._stream_wait = ctypes.CFUNCTYPE(_I, _P, _P, ctypes.c_uint)(_with_zeros(streams.wait))
        self._record = ctypes.CFUNCTYPE(_I, _P, _P)(_with_zeros(streams.record))
        self._create, self._query, self._synchronize = streams.create, streams.query, streams.synchronize
        self._last_error, self._error_string = int, lambda status: b"out of luck"
        self.copy_at, self.wait_at = runtime.address_of(self._memcpy), runtime.address_of(self._stream_wait)
        self.record_at = runtime.address_of(self._record)


def _with_zeros(function: Any) -> Any:
    return lambda *numbers: function(*(number or 0 for number in numbers))  # a null pointer comes as None


class _Fast(Cpu):
    """The CPU, whose copies run beside it."""

    is_beside_host = True


class _Tiers(Tiers):
    def machine(self) -> Machine:
        speed = 1e9
        return Machine(name="late", disk_write_bytes_per_s=speed, disk_read_bytes_per_s=speed)


@dataclass(eq=False)
class LateCopies:
    """Makes Sessions like that, within one test.

    Args:
        monkeypatch: of the test.

    Attributes:
        streams: all copies.
        tiers: where the tensors of the Sessions go, the newest last.
    """

    monkeypatch: pytest.MonkeyPatch
    streams: Streams = field(default_factory=Streams)
    tiers: list[HostTier] = field(default_factory=list)
    _numbers: Any = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        patch, known = self.monkeypatch, _Runtime(self.streams)
        patch.setattr(engine, "runtime", lambda: known)
        patch.setattr(runtime, "runtime", lambda: known)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: CURRENT, raising=False)
        patch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
        events = runtime.Events(0)
        patch.setattr(engine, "events_of", lambda _: events)

    def _new_stream(self, _: object) -> Any:
        handle = 111 * next(self._numbers)
        return SimpleNamespace(device_index=0, cuda_stream=handle, synchronize=lambda: self.streams.finish(handle))

    def session(self, model: torch.nn.Module, ram: int, **options: Any) -> Session:
        """A Session whose tensors go into an arena where others' go to the disk."""
        arena = PinnedArena(_AWAY_BYTES, pin=None, available_bytes=lambda: 2**40)
        spec = TierSpec(name="disk", capacity_bytes=_AWAY_BYTES)
        with self.monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "Stream", self._new_stream)
            tier = HostTier(arena, engine=Engine(torch.device("cuda", 0)), spec=spec)
        self.tiers.append(tier)
        tiers = _Tiers(
            fast=_Fast(),
            budget=Budget(ram=ram, disk=_AWAY_BYTES),
            fast_bytes=ram,
            slow={DISK: tier},
            default_tier=DISK,
            arenas=[arena],
        )
        with self.monkeypatch.context() as patch:
            patch.setattr(session, "build_tiers", lambda *_, **__: tiers)
            return Session(model, ram=ram, **options)
