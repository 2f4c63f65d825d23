"""Chooses the I/O path between a file and memory.

For host memory: `direct`, with the page cache as a fallback if the file system refuses O_DIRECT. For a GPU: `staged`,
or `gds` if GPUDirect Storage is proven to work here and was faster in a short trial on the same file. `xnvme` drives a
whole device, so it is only used on request. A caller can require a path, and gets an error if it is not available.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Literal, get_args

import torch

from torchstorm.errors import ConfigError, DeviceError, StorageError, UnsupportedError
from torchstorm.paths import user_path
from torchstorm.sizes import format_size
from torchstorm.storage.backend import Backend
from torchstorm.storage.direct import DirectFile
from torchstorm.storage.gds import open_gds
from torchstorm.storage.staged import CopyEngine, StagedFile
from torchstorm.storage.xnvme import XnvmeDevice
from torchstorm.transfer.engine import Engine
from torchstorm.transfer.pinned import pin_memory

# Enough for batches of small records. More threads wait for each other.
_THREADS = min(16, 8 + (os.cpu_count() or 1))

Path = Literal["direct", "buffered", "staged", "gds", "xnvme"]
_ON_HOST = ("direct", "buffered", "xnvme")
_TRIAL_BYTES = 2**26


def open_file(
    path: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    require: str | None = None,
    read_only: bool = False,
    create: bool = False,
    size_bytes: int | None = None,
) -> Backend:
    """Opens a file with the fastest available path to a device.

    Args:
        path: the file.
        device: device of the tensors to read and write besides those on the CPU; None for the CPU only.
        require: the path to use; None for the fastest one that works.
        read_only: opens it for reading.
        create: creates the file if it does not exist.
        size_bytes: new length of the file; None keeps its length.

    Raises:
        ConfigError: the path does not exist, or does not support this device.
        DeviceError: the device does not exist.
        StorageError: the file cannot be opened, or not with the required path.
    """
    path = user_path(path, name="path")
    target = device_of(device)
    if require is not None and require not in get_args(Path):
        raise ConfigError(f"require={require!r}, but the paths are {', '.join(get_args(Path))}.")
    on_host = target.type == "cpu"
    if require is not None and on_host != (require in _ON_HOST):
        wanted = "the CPU" if require in _ON_HOST else "a GPU"
        raise ConfigError(f"require={require!r} is a path to {wanted}, but device={str(target)!r}.")
    if require == "xnvme":
        if create or size_bytes is not None:
            raise ConfigError(f"require='xnvme' takes a device that is there; {path} cannot be made.")
        return XnvmeDevice(str(path), read_only=read_only)
    file = DirectFile(
        path,
        size_bytes=size_bytes,
        create=create,
        read_only=read_only,
        direct=require != "buffered",
        threads=_THREADS,
    )
    found = file.info()
    if require == "direct" and found.path != "direct":
        file.close()
        raise StorageError(f"{file.path}: require='direct', but {found.reason}. Leave it out, or move the file.")
    if on_host:
        return file
    return _above(file, target, Engine(target), pin_memory, require, read_only=read_only)  # pragma: gpu


def _above(
    file: DirectFile,
    device: torch.device,
    engine: CopyEngine,
    pin: Callable[[torch.Tensor], Callable[[], None]] | None,
    require: str | None,
    *,
    read_only: bool,
) -> Backend:
    """A backend for tensors on a GPU, on top of a file opened for host memory."""
    staged = StagedFile(file, device, engine, pin=pin)
    if require == "staged":
        staged.why = "asked for"
        return staged
    try:
        gds = open_gds(staged, device=device, mark=engine.mark, read_only=read_only)
    except UnsupportedError as error:
        if require == "gds":
            staged.close()
            raise StorageError(f"require='gds', but {error}") from error
        staged.why = str(error)
        return staged
    if require == "gds":
        return gds
    rates = [_rate(one, device) for one in (staged, gds)]
    if rates[1] >= rates[0]:
        return gds
    gds.close()
    again = DirectFile(file.path, read_only=read_only, threads=_THREADS)
    trial = " and ".join(f"{format_size(int(rate))}/s" for rate in rates)
    return StagedFile(again, device, engine, pin=pin, why=f"faster than GPUDirect Storage in a trial: {trial}")


def _rate(file: Backend, device: torch.device) -> float:
    """Bytes per second of a short read; 0 if the file is too short for a trial."""
    nbytes = min(os.stat(file.path).st_size, _TRIAL_BYTES) // 2**20 * 2**20
    if not nbytes:
        return 0.0
    out = torch.empty(nbytes, dtype=torch.uint8, device=device)
    file.read_into(out[: 2**20], 0)  # allocates and registers buffers
    start = time.perf_counter()
    file.read_into(out, 0)
    return nbytes / (time.perf_counter() - start)


def device_of(device: torch.device | str | None) -> torch.device:
    """Returns the device with its index; the CPU for None.

    Raises:
        DeviceError: it does not exist, or is neither a CPU nor a CUDA device.
    """
    found = torch.device(device or "cpu")
    if found.type == "cpu":
        return torch.device("cpu")
    if found.type != "cuda" or not torch.cuda.is_available():
        raise DeviceError(f"device={str(found)!r}, but there is no such device here: leave it out for the CPU.")
    count, index = torch.cuda.device_count(), found.index  # pragma: gpu
    if index is not None and index >= count:  # pragma: gpu
        raise DeviceError(f"device={str(found)!r}, but there are {count} GPUs, from cuda:0 to cuda:{count - 1}.")
    return torch.device("cuda", torch.cuda.current_device() if index is None else index)  # pragma: gpu
