"""Measures what a plan needs to know of this machine: the link to the GPU, and the disk."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass, replace

import torch

from torchstorm.memory.limits import total_ram_bytes
from torchstorm.offload.step.clock import seconds_between
from torchstorm.plan.machine import Machine
from torchstorm.storage.aligned import aligned_empty, empty_at_phase
from torchstorm.storage.backend import StorageCopy
from torchstorm.storage.direct import DirectFile
from torchstorm.storage.measure import measure_disk
from torchstorm.transfer.engine import Engine, StreamClock
from torchstorm.transfer.pinned import pin_memory

_LINK_BYTES = 64 * 2**20
_LEAST_BYTES = 2**20  # of two copies
_NUM_COPIES = 5
_DELAY_BYTES, _PIECE_BYTES = 64 * 2**20, 8 * 2**20  # of the file that delays compute, and of each of its copies
_WIDTH, _NUM_ALONE, _NUM_TURNS = 512, 20, 4  # of matrices of 1 MiB


@dataclass(frozen=True, kw_only=True)
class LinkSpeed:
    """How fast bytes move between a GPU and the host, each way while the other is idle.

    Attributes:
        d2h_bytes_per_s: from the GPU to the host.
        h2d_bytes_per_s: from the host to the GPU.
        not_pinned: why the host memory was pageable, "" where it was pinned.
    """

    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    not_pinned: str = ""


def measure_machine(device: torch.device, directory: str | None) -> Machine:
    """Measures this machine, once in a process for each device, and for each file system.

    Args:
        device: the fast device, CPU or CUDA.
        directory: where spill files go; None for no disk.

    Returns:
        What was measured; zeros for a tier that is not there.

    Raises:
        StorageError: the directory cannot be written, or is full.
    """
    machine = _without_disk(str(device))
    if directory is None:
        return machine
    write_bytes_per_s, read_bytes_per_s = _disk_speeds(directory)
    return replace(
        machine,
        disk_bytes=shutil.disk_usage(directory).free,
        disk_write_bytes_per_s=write_bytes_per_s,
        disk_read_bytes_per_s=read_bytes_per_s,
        disk_delay_s_per_byte=_disk_delay(directory) if device.type == "cpu" else 0.0,
    )


def cpu_name() -> str:
    """The processor as its maker calls it, else its architecture."""
    try:
        with open("/proc/cpuinfo") as file:
            named = re.search(r"^model name\s*: (.+)$", file.read(), re.MULTILINE)
    except OSError:
        named = None
    return named[1] if named else platform.machine()


_speeds: dict[int, tuple[float, float]] = {}  # by file system


def _disk_speeds(directory: str) -> tuple[float, float]:
    """Bytes per second written and read."""
    if not os.access(directory, os.W_OK):
        return measure_disk(directory)  # which tells what is wrong
    file_system = os.stat(directory).st_dev
    if file_system not in _speeds:
        _speeds[file_system] = measure_disk(directory)
    return _speeds[file_system]


_delays: dict[tuple[int, int], float] = {}  # by file system and number of threads that compute


def _disk_delay(directory: str) -> float:
    """Seconds by which compute on all cores is late for every byte that is written and read back meanwhile."""
    key = os.stat(directory).st_dev, torch.get_num_threads()
    if key not in _delays:
        _delays[key] = _measure_delay(directory)
    return _delays[key]


def _measure_delay(directory: str) -> float:
    """Multiplies matrices on all cores, alone and while a file is written and read, three times. Takes less than half a
    second."""
    factor, product = torch.ones(_WIDTH, _WIDTH), torch.empty(_WIDTH, _WIDTH)
    source = aligned_empty(_DELAY_BYTES).zero_()
    pieces = source.split(_PIECE_BYTES)
    offsets = range(0, _DELAY_BYTES, _PIECE_BYTES)

    def alone_s() -> float:
        start = time.perf_counter()
        for _ in range(_NUM_ALONE):
            torch.mm(factor, factor, out=product)
        return (time.perf_counter() - start) / _NUM_ALONE

    def late_s(copies: list[StorageCopy], each_s: float) -> float:
        start, num_done = time.perf_counter(), 0
        while not all(copy.done() for copy in copies):
            torch.mm(factor, factor, out=product)
            num_done += 1
        return time.perf_counter() - start - num_done * each_s

    lost_s = []
    descriptor, path = tempfile.mkstemp(prefix="torchstorm-measure-", dir=directory)
    os.close(descriptor)
    try:
        with torch.no_grad(), contextlib.closing(DirectFile(path, unattended=True)) as file:
            for _ in range(_NUM_TURNS):
                each_s = alone_s()
                late = late_s(
                    [file.write_batch_async([(one, at)]) for one, at in zip(pieces, offsets, strict=True)], each_s
                )
                late += late_s(  # into memory as what comes back is given; no name holds it until the next turn
                    [file.read_batch_async([(empty_at_phase(_PIECE_BYTES, 0), at)]) for at in offsets], each_s
                )
                lost_s.append(late)
    finally:
        os.unlink(path)
    return max(0.0, statistics.median(lost_s[1:])) / _DELAY_BYTES  # the first turn warms up


@functools.cache
def _without_disk(device: str) -> Machine:
    machine = Machine(name=cpu_name(), device=device, ram_bytes=total_ram_bytes())
    return machine if device == "cpu" else _with_gpu(machine)


def _with_gpu(machine: Machine) -> Machine:  # pragma: gpu
    device = torch.device(machine.device)
    link = measure_link(device)
    return replace(
        machine,
        name=torch.cuda.get_device_name(device),
        vram_bytes=torch.cuda.get_device_properties(device).total_memory,
        d2h_bytes_per_s=link.d2h_bytes_per_s,
        h2d_bytes_per_s=link.h2d_bytes_per_s,
    )


def measure_link(device: torch.device) -> LinkSpeed:  # pragma: gpu
    """Times copies of 64 MiB each way between a CUDA device and pinned host memory.

    One way at a time, as a step uses the link: what goes out does so in forward, and comes back in backward. Takes 128
    MiB on both for a moment, or, of a device that is nearly full, as much as there is. The median of five copies
    counts.

    Returns:
        The speeds; those of pageable memory, with the reason, where memory cannot be pinned.
    """
    engine, clock = Engine(device), StreamClock(device)
    on_device = _what_fits(device)
    host = aligned_empty(on_device.nbytes)
    copy_bytes = on_device.nbytes // 2
    (host_out, host_in), (device_out, device_in) = host.split(copy_bytes), on_device.split(copy_bytes)
    unpin, not_pinned = None, ""
    try:
        unpin = pin_memory(host)
    except RuntimeError as error:
        not_pinned = str(error)
    try:
        out_s, back_s = list[float](), list[float]()
        ways = (
            (out_s, functools.partial(engine.copy_out, host_out, device_out)),
            (back_s, functools.partial(engine.copy_in, device_in, host_in)),
        )
        for turn in range(_NUM_COPIES + 1):
            for seconds, begin_copy in ways:
                start = clock.mark()
                begin_copy().wait()
                stop = clock.mark()
                stop.synchronize()
                if turn:  # the first copy each way warms up
                    seconds.append(seconds_between(start, stop))
    finally:
        engine.synchronize()
        if unpin is not None:
            unpin()
    return LinkSpeed(
        d2h_bytes_per_s=copy_bytes / statistics.median(out_s),
        h2d_bytes_per_s=copy_bytes / statistics.median(back_s),
        not_pinned=not_pinned,
    )


def _what_fits(device: torch.device) -> torch.Tensor:  # pragma: gpu
    """Both copies' memory on a device, shorter ones where it is full, as after a step that ran out of memory."""
    num_bytes = 2 * _LINK_BYTES
    while True:
        try:
            return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            if num_bytes <= _LEAST_BYTES:
                raise
            num_bytes //= 2
