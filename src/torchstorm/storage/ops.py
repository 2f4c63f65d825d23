"""Reading files as PyTorch operators, for use within torch.compile: `import torchstorm.storage.ops` registers them.

    torch.ops.torchstorm.read_tensor(path, offset, shape, dtype, device) -> Tensor
    torch.ops.torchstorm.read_into_tensor(tensor, path, offset)

Bytes come past the page cache where the file system allows it. For a tensor on a GPU they go through host memory. A
file stays open for the next call; the longest unused of more than 16 is closed.
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
_open: dict[tuple[int, int, int], DirectFile] = {}  # by process, device and inode: a path may come to mean another file


@torch.library.custom_op("torchstorm::read_tensor", mutates_args=())
def read_tensor(path: str, offset: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Reads a contiguous tensor from a file.

    Args:
        path: the file.
        offset: byte where the tensor begins.
        shape: of the tensor.
        dtype: of its elements, as they lie in the file.
        device: where it is wanted.

    Returns:
        A new tensor, not connected to the file.

    Raises:
        ConfigError: the offset or a size is negative.
        StorageError: the file cannot be opened, or ends before.
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
        tensor: of any strides; what the file has is its elements in order, as `tensor.contiguous()` has them.
        path: the file.
        offset: byte where they begin.

    Raises:
        ConfigError: the offset is negative.
        StorageError: the file cannot be opened, or ends before; the tensor is then as it was.
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
        raise StorageError(f"{path} cannot be opened: {error.strerror}. Name a file that exists.") from error
    key = (os.getpid(), status.st_dev, status.st_ino)
    with _lock:
        file = _open.pop(key, None) or DirectFile(path, read_only=True)
        _open[key] = file
        while len(_open) > _MOST_OPEN:
            _open.pop(next(iter(_open)))  # closed when its last reader is done with it
        return file
