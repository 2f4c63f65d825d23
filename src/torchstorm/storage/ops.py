"""Reading files as PyTorch operators, for use within torch.compile: `import torchstorm.storage.ops` registers them.

    torch.ops.torchstorm.read_tensor(path, offset, shape, dtype, device) -> Tensor
    torch.ops.torchstorm.read_into_tensor(tensor, path, offset)

Reads use O_DIRECT if the file system allows it. Tensors on a GPU are read through host memory. A file stays open for
the next call. At most 16 files stay open; the least recently used one is closed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import torch

from torchstorm.errors import ConfigError, StorageError
from torchstorm.paths import user_path
from torchstorm.storage.aligned import aligned_empty
from torchstorm.storage.direct import DirectFile

_MOST_OPEN = 16
_lock = threading.Lock()
_open: dict[
    tuple[int, int, int], DirectFile
] = {}  # by process, device and inode, since a path may be replaced by another file


@torch.library.custom_op("torchstorm::read_tensor", mutates_args=())
def read_tensor(path: str, offset: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Reads a contiguous tensor from a file.

    Args:
        path: the file.
        offset: byte offset of the tensor in the file.
        shape: shape of the tensor.
        dtype: dtype of the tensor in the file and in memory.
        device: device of the result.

    Returns:
        A new tensor that owns its memory.

    Raises:
        ConfigError: the offset or a size is negative.
        StorageError: the file cannot be opened, or is too short.
    """
    if min((offset, *shape)) < 0:
        raise ConfigError(f"offset={offset}, shape={tuple(shape)}: neither may be negative.")
    host = _read(path, offset, torch.Size(shape).numel() * dtype.itemsize)
    return host.view(dtype).view(shape).to(device)


@read_tensor.register_fake
def _(path: str, offset: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


@torch.library.custom_op("torchstorm::read_into_tensor", mutates_args={"tensor"})
def read_into_tensor(tensor: torch.Tensor, path: str, offset: int) -> None:
    """Fills a tensor with the bytes of a file.

    Args:
        tensor: any strides. The file has its elements in the order of `tensor.contiguous()`.
        path: the file.
        offset: byte offset in the file.

    Raises:
        ConfigError: the offset is negative.
        StorageError: the file cannot be opened, or is too short. The tensor is unchanged then.
    """
    if offset < 0:
        raise ConfigError(f"offset={offset}, but it may not be negative.")
    host = _read(path, offset, tensor.numel() * tensor.element_size())
    tensor.copy_(host.view(tensor.dtype).view(tensor.shape))


@read_into_tensor.register_fake
def _(tensor: torch.Tensor, path: str, offset: int) -> None:
    return None


def _read(path: str, offset: int, nbytes: int) -> torch.Tensor:
    host = aligned_empty(nbytes)
    _file(path).read_into(host, offset)
    return host


def _file(path: str) -> DirectFile:
    try:
        status = os.stat(user_path(path, name="path"))
    except OSError as error:
        raise StorageError(f"{path} cannot be opened: {error.strerror}. Give a file that exists.") from error
    key = (os.getpid(), status.st_dev, status.st_ino)
    with _lock:
        file = _open.pop(key, None) or DirectFile(path, read_only=True)
        _open[key] = file
        while len(_open) > _MOST_OPEN:
            _open.pop(next(iter(_open)))  # closed when its last reader has finished
        return file
