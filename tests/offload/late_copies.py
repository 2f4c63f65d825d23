"""A Session on a CPU whose tensors move as they do on a GPU: into an arena, by the engine's streams, over a CUDA
runtime that stands for the real one. Copies are made as late as streams and events allow, so that one that nobody has
waited for is missed."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import random
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

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
_OTHERS = CURRENT + 1, CURRENT + 2  # on which it runs, too, where it has several
_AWAY_BYTES = 2**30
_P, _I = ctypes.c_void_p, ctypes.c_int


_Clock = dict[int, int]
"""Of each stream, how much of its work is known to have ended: a vector clock."""


@dataclass(eq=False)
class _Point:
    """What an event stands for: so much of a stream's work, and what that came after."""

    stream: int
    num_before: int
    clock: _Clock


class _Access(NamedTuple):
    """A copy that has read or written an address."""

    stream: int
    number: int
    is_write: bool


def _together(method: Any) -> Any:
    """Threads take turns."""

    @functools.wraps(method)
    def alone(self: Streams, *args: Any) -> Any:
        with self.lock:
            return method(self, *args)

    return alone


@dataclass(eq=False)
class Streams:
    """Work that was queued, and how far each stream has come.

    Args:
        has_many: whether the model runs on one of three streams, another one each time.

    Attributes:
        log: the runtime's functions in the order in which they were called.
        races: accesses to the same pinned memory that nothing puts in an order.
        arenas: that memory.
        status: what the next copy returns.
        ignores_waits: whether the model goes on without the copies that it should wait for.
        lock: held by each of the functions.
    """

    has_many: bool = False
    log: list[str] = field(default_factory=list)
    races: list[str] = field(default_factory=list)
    arenas: list[PinnedArena] = field(default_factory=list)
    status: int = 0
    ignores_waits: bool = False
    lock: threading.RLock = field(default_factory=threading.RLock)
    _work: dict[int, list[Any]] = field(default_factory=dict)
    _num_done: dict[int, int] = field(default_factory=dict)
    _events: dict[int, _Point] = field(default_factory=dict)
    _handles: Any = field(default_factory=lambda: itertools.count(1))
    _clocks: dict[int, _Clock] = field(default_factory=dict)
    _host: _Clock = field(default_factory=dict)
    _touched: dict[int, list[_Access]] = field(default_factory=dict)
    _asked: tuple[int, int] = CURRENT, 0  # the model's stream at the last record there, and how far it was
    _random: random.Random = field(default_factory=lambda: random.Random(0))

    def current(self, _: object) -> int:
        return self._random.choice((CURRENT, *_OTHERS)) if self.has_many else CURRENT

    @_together
    def copy(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> int:
        assert kind == 4
        self.log.append(f"copy {nbytes} on {stream}")
        if not self.status:
            self._look_for_races(target, source, stream)
            self._queue(stream, (target, source, nbytes))
        return self.status

    @_together
    def record(self, event: int, stream: int) -> int:
        self.log.append(f"record on {stream}")
        clock = self._clock(stream)
        clock[stream] = clock.get(stream, 0) + 1
        if stream in (CURRENT, *_OTHERS):
            self._asked = stream, clock[stream]
        self._events[event] = _Point(stream, len(self._work.get(stream, [])), dict(clock))
        return 0

    @_together
    def wait(self, stream: int, event: int, flags: int) -> int:
        assert flags == 0
        point = self._events[event]
        self.log.append(f"wait on {stream} for {point.stream}")
        _learn(self._clock(stream), point.clock)
        if stream not in (CURRENT, *_OTHERS):
            self._queue(stream, point)
        elif not self.ignores_waits:
            self.reach(point)
        return 0

    @_together
    def create(self, event: Any, flags: int) -> int:
        ctypes.cast(event, ctypes.POINTER(_P))[0] = next(self._handles)
        return 0

    @_together
    def query(self, event: int) -> int:
        point = self._events[event]
        if self._num_done.get(point.stream, 0) < point.num_before:
            return 600
        _learn(self._host, point.clock)
        return 0

    @_together
    def synchronize(self, event: int) -> int:
        _learn(self._host, self._events[event].clock)
        self.reach(self._events[event])
        return 0

    @_together
    def finish(self, stream: int) -> None:
        self.reach(_Point(stream, len(self._work.get(stream, [])), {}))

    @_together
    def forget(self) -> None:
        """Nothing that was queued is ever done: its memory may be gone."""
        self._num_done = {stream: len(work) for stream, work in self._work.items()}

    @_together
    def reach(self, point: _Point) -> None:
        """Does what comes before a point, and what that waits for."""
        work = self._work.get(point.stream, [])
        while self._num_done.get(point.stream, 0) < point.num_before:
            one = work[self._num_done.get(point.stream, 0)]
            if isinstance(one, _Point):
                self.reach(one)
            else:
                self._move(*one)
            self._num_done[point.stream] = self._num_done.get(point.stream, 0) + 1

    def _move(self, target: int, source: int, nbytes: int) -> None:
        # Of what nobody needs any more, the memory may be gone.
        with contextlib.suppress(OSError), open("/proc/self/mem", "rb", buffering=0) as memory:
            ctypes.memmove(target, os.pread(memory.fileno(), nbytes, source), nbytes)

    def _queue(self, stream: int, one: object) -> None:
        self._work.setdefault(stream, []).append(one)

    def _clock(self, stream: int) -> _Clock:
        clock = self._clocks.setdefault(stream, {})
        _learn(clock, self._host)  # what is queued from here on comes after what the host has seen
        return clock

    def _look_for_races(self, target: int, source: int, stream: int) -> None:
        clock = self._clock(stream)
        clock[stream] = clock.get(stream, 0) + 1
        asked_on, num_asked = self._asked
        if clock.get(asked_on, 0) < num_asked:
            self.races.append("a copy is not behind the model")
        for address, is_write in (target, True), (source, False):
            if not any(_is_in(arena, address) for arena in self.arenas):
                continue  # what is not needed any more may be overwritten while it goes out; else the bits will differ
            earlier = self._touched.setdefault(address, [])
            for one in earlier:
                if (is_write or one.is_write) and clock.get(one.stream, 0) < one.number:
                    self.races.append(f"{one} comes in no order with {'a write' if is_write else 'a read'} on {stream}")
            earlier.append(_Access(stream, clock[stream], is_write))
            del earlier[:-4]


def _learn(clock: _Clock, other: _Clock) -> None:
    for stream, number in other.items():
        clock[stream] = max(clock.get(stream, 0), number)


def _is_in(arena: PinnedArena, address: int) -> bool:
    buffers = (segment.buffer for segment in arena._segments)
    return any(one.data_ptr() <= address < one.data_ptr() + one.nbytes for one in buffers)


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
        streams: all copies.

    Attributes:
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
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", self.streams.current, raising=False)
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
        self.streams.arenas.append(arena)
        tiers = _Tiers(
            fast=_Fast(has_budget=False),
            budget=Budget(ram=ram, disk=_AWAY_BYTES),
            fast_bytes=ram,
            slow={DISK: tier},
            default_tier=DISK,
            arenas=[arena],
        )
        with self.monkeypatch.context() as patch:
            patch.setattr(session, "build_tiers", lambda *_, **__: tiers)
            return Session(model, ram=ram, **options)
