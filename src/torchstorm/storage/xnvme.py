"""A whole NVMe namespace, read and written by the drive's own commands through the xNVMe library.

There is no file system and no page cache: byte 0 is in the namespace's first sector. `/dev/ng0n1` uses io_uring_cmd,
which passes NVMe commands through the kernel and bypasses its block layer. `/dev/nvme0n1` uses io_uring with O_DIRECT.
A PCI address uses SPDK, which drives the device from this process; the library must be built with SPDK, and the device
unbound from the kernel. `make xnvme` builds the library.

- A device that is mounted or otherwise in use is refused for writing. Partitions are always refused, since commands
  count sectors from the start of the namespace.
- Whole sectors are transferred directly between the drive and the tensor if the tensor's address is aligned; otherwise
  through the library's buffers. A write to a part of a sector is a read-modify-write. It is safe against other writes
  to the sector through the same object only. Two processes that write to one sector at once lose bytes: align records
  to sectors.
- Writes by io_uring_cmd and SPDK do not update the kernel's page cache: do not read the same device by other means at
  the same time.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import time
import weakref
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from torchstorm.errors import StorageError, UnsupportedError
from torchstorm.sizes import format_size
from torchstorm.storage.aligned import round_down
from torchstorm.storage.backend import Backend, BackendInfo, StorageCopy
from torchstorm.storage.blocks import Block, check_request
from torchstorm.storage.xnvme_library import CONVENTIONAL, FLUSH, Options, load_library
from torchstorm.storage.xnvme_queues import CommandQueues, Piece, Target, cut

_NAMESPACE = re.compile(r"/dev/(?:nvme|ng)(\d+n\d+)")
_PCI_ADDRESS = re.compile(r"(?:[0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.IGNORECASE)
_PAGE = 4096
_MOST_SECTORS = 2**16  # per command
_GONE = {errno.ENODEV, errno.ENXIO}


class XnvmeDevice(Backend):
    """An NVMe namespace as a `Backend`.

    Args:
        uri: "/dev/ng0n1" (io_uring_cmd), "/dev/nvme0n1" (io_uring) or a PCI address as "0000:01:00.0" (SPDK).
        queue_depth: commands in flight per queue; a power of two below 4096.
        submitters: number of queues, each with its own thread.
        command_bytes: largest size of a command; reduced to the limits of the drive and the kernel.
        namespace: number of the namespace, for a PCI address. A device node already names a namespace.
        read_only: opens it for reading only.
        timeout_seconds: time limit of a command, after which the drive counts as lost. The kernel resets a drive after
            30 s.
        backend: xNVMe's backend, "linux", "spdk" or "ramdisk"; None chooses by `uri`.
        asynchronous: how xNVMe submits: "io_uring_cmd", "io_uring", "emu" ...; None chooses by `uri`.
        library: path of libxnvme.so; None searches for it.

    Attributes:
        uri: the URI as given.
        namespace: number of the namespace.
        sector_bytes: size of a sector, 512 or 4096.
        num_sectors: number of sectors of the namespace.
        size_bytes: size of the namespace.
        command_bytes: largest size of a command.

    Raises:
        StorageError: the library is missing, or the device does not exist, is in use, or is not supported.
        UnsupportedError: the namespace is zoned, or its sectors have metadata.
    """

    def __init__(
        self,
        uri: str,
        *,
        queue_depth: int = 32,
        submitters: int = 2,
        command_bytes: int = 2**18,
        namespace: int = 1,
        read_only: bool = False,
        timeout_seconds: float = 60.0,
        backend: str | None = None,
        asynchronous: str | None = None,
        library: str | os.PathLike[str] | None = None,
    ) -> None:
        if queue_depth < 1 or queue_depth >= 4096 or queue_depth & (queue_depth - 1) or submitters < 1:
            raise StorageError(
                f"{uri}: queue_depth={queue_depth}, submitters={submitters}; a power of two from 1 to 2048 is needed, "
                "and at least one submitter."
            )
        self.uri = uri
        self._library, self._version = load_library(library)
        node = _device_node(uri) if backend is None else ""
        if node and not read_only:
            _refuse_in_use(uri, node)
        backend = backend or ("linux" if node else "spdk")
        asynchronous = asynchronous or (("io_uring_cmd" if "/ng" in node else "io_uring") if node else None)
        device = self._open(node or uri, backend, asynchronous, namespace, read_only)
        try:
            target = self._describe(device, node, command_bytes, timeout_seconds)
        except BaseException:
            self._library.xnvme_dev_close(device)
            raise
        self.path, self.device = uri, torch.device("cpu")
        self.namespace = target.namespace
        self.command_bytes = target.command_bytes
        self._node = node
        self._target = target
        self._queues = CommandQueues(target, queue_depth, submitters)
        self._submitters = submitters
        self._read_only = read_only
        self._failed_flush = 0
        # At exit, or if nobody called `close`: waits for running commands, then ends the threads.
        self._release = weakref.finalize(self, self._queues.stop_soon)

    @property
    def align_bytes(self) -> int:
        """Alignment of offsets and lengths that avoids bounce buffers and read-modify-write."""
        return int(self.sector_bytes)

    @property
    def staging_bytes(self) -> int:
        """Largest size of the library's buffers: one per command in flight, allocated on first use, and kept."""
        return self._queues.queue_depth * self._submitters * self.command_bytes

    def read_batch_async(
        self, requests: Sequence[tuple[torch.Tensor, int]], *, after: Sequence[StorageCopy] = ()
    ) -> StorageCopy:
        """See `Backend`."""
        return self._queue(False, requests, after)

    def write_batch_async(
        self, requests: Sequence[tuple[torch.Tensor, int]], *, after: Sequence[StorageCopy] = ()
    ) -> StorageCopy:
        """See `Backend`."""
        return self._queue(True, requests, after)

    def sync(self) -> None:
        """See `Backend`. Sends a flush command, which makes the drive's cache durable."""
        self._queues.check_usable()
        if self._queues.lost is not None:
            raise StorageError(f"{self.uri}: making it durable failed, since the drive is lost: {self._queues.lost}")
        context = self._library.xnvme_cmd_ctx_from_dev(self._target.device)
        context.opcode = FLUSH
        context.namespace = self.namespace
        status = self._failed_flush or self._library.xnvme_cmd_pass(ctypes.byref(context), None, 0, None, 0)
        if status:
            self._failed_flush = status
            raise _storage_error(
                abs(status),
                f"{self.uri}: making it durable failed: {os.strerror(abs(status))}. See dmesg and the drive's own log, "
                "reopen it, and repeat the writes since the last successful flush.",
            )

    def info(self) -> BackendInfo:
        """See `Backend`. The reason names what the library reported after opening the device."""
        return BackendInfo(path="xnvme", reason=self._reason, counters=self._queues.counters())

    def close(self) -> None:
        """See `Backend`."""
        self._queues.close()

    def _open(self, uri: str, backend: str, asynchronous: str | None, namespace: int, read_only: bool) -> int:
        options = Options()
        self._library.xnvme_opts_set_defaults(ctypes.byref(options))
        options.backend = backend.encode()
        options.asynchronous = asynchronous.encode() if asynchronous else None
        options.namespace = namespace
        options.read_only, options.read_write = read_only, not read_only
        options.direct = asynchronous == "io_uring"
        ctypes.set_errno(0)
        device = self._library.xnvme_dev_open(uri.encode(), ctypes.byref(options))
        if device:
            return int(device)
        number = ctypes.get_errno()
        way_out = f"The library was asked for backend '{backend}' with '{asynchronous or 'its own choice'}'."
        if number in (errno.EACCES, errno.EPERM):
            way_out = "Permission denied: run as root, or give this user access to the device node."
        elif number == errno.ENOENT:
            way_out = "The device node does not exist: `nvme list` shows existing ones."
        elif backend == "spdk":
            way_out = (
                "SPDK drives a device by its PCI address: build the library with it (`make xnvme XNVME_SPDK=enabled`), "
                "unbind the device from the kernel and reserve huge pages (.xnvme/bin/xnvme-driver)."
            )
        raise _storage_error(
            number, f"{self.uri} cannot be opened by xNVMe {self._version}: {os.strerror(number)}. {way_out}"
        )

    def _describe(self, device: int, node: str, command_bytes: int, timeout_seconds: float) -> Target:
        """Reads the geometry, and the backends that the library really uses."""
        geometry = self._library.xnvme_dev_get_geo(device).contents
        sector = geometry.sector_bytes
        if geometry.type != CONVENTIONAL or geometry.metadata_interleaved or geometry.protection_type:
            raise UnsupportedError(
                f"{self.uri}: geometry type {geometry.type}, {geometry.sector_metadata_bytes} bytes of metadata a "
                f"sector, protection type {geometry.protection_type}. Only a conventional namespace (type "
                f"{CONVENTIONAL}) with plain sectors is supported: use another, or format this one (nvme format)."
            )
        if sector < 512 or sector & (sector - 1) or not geometry.total_bytes:
            raise StorageError(
                f"{self.uri} is not a usable namespace: {geometry.total_bytes} bytes in sectors of {sector}."
            )
        used = self._library.xnvme_dev_get_opts(device).contents
        names = [
            (getattr(used, name) or b"?").decode() for name in ("backend", "asynchronous", "synchronous", "memory")
        ]
        most = min(_kernel_limit(node) or geometry.largest_transfer_bytes, _MOST_SECTORS * sector)
        most = min(max(command_bytes, sector), most)
        unit = _PAGE if most >= _PAGE else sector
        if names[1] == "io_uring" and node and not used.direct:
            raise StorageError(
                f"{self.uri} was opened without O_DIRECT, which the kernel refused. Use /dev/ng... instead."
            )
        self.sector_bytes = sector
        self.num_sectors = geometry.total_bytes // sector
        self.size_bytes = self.num_sectors * sector
        self._reason = (
            f"xNVMe {self._version}, backend {names[0]}, asynchronous {names[1]}, synchronous {names[2]}, memory "
            f"{names[3]}; {self.num_sectors} sectors of {sector} bytes, commands of at most "
            f"{format_size(round_down(most, unit))}"
        )
        return Target(
            library=self._library,
            device=device,
            uri=self.uri,
            namespace=self._library.xnvme_dev_get_nsid(device),
            sector_bytes=sector,
            command_bytes=round_down(most, unit),
            # The kernel requires word alignment of memory for pass-through commands, sector alignment for O_DIRECT.
            address_align={"io_uring_cmd": 4, "io_uring": sector}.get(names[1], 0),
            counts_bytes=names[1] == "io_uring",
            timeout_seconds=timeout_seconds,
            explain=partial(_explain, self.uri, node, sector),
        )

    def _queue(
        self, writing: bool, requests: Sequence[tuple[torch.Tensor, int]], after: Sequence[StorageCopy]
    ) -> StorageCopy:
        if writing and self._read_only:
            # Checked here, since for root the kernel passes writes on even if the node is open for reading only.
            raise StorageError(f"{self.uri} was opened with read_only=True and cannot be written.")
        pieces: list[Piece] = []
        for tensor, offset in requests:
            check_request(self.uri, tensor, offset)
            nbytes = tensor.nbytes
            if nbytes and offset + nbytes > self.size_bytes:
                raise StorageError(
                    f"{self.uri} is too short: wanted {nbytes} bytes at offset {offset}, got "
                    f"{max(self.size_bytes - offset, 0)}; it is {self.size_bytes} bytes long."
                )
            if nbytes:
                block = Block(tensor.data_ptr(), offset, offset + nbytes, offset, nbytes)
                pieces += cut(block, writing=writing, sector_bytes=self.sector_bytes, command_bytes=self.command_bytes)
        return self._queues.accept(pieces, tensors=[tensor for tensor, _ in requests], after=after)


def _device_node(uri: str) -> str:
    """The device node of `uri` with links resolved; "" for a PCI address."""
    if _PCI_ADDRESS.fullmatch(uri):
        return ""
    node = os.path.realpath(uri)
    if not _NAMESPACE.fullmatch(node):
        raise StorageError(
            f"{uri} is not an NVMe namespace. Use /dev/ng0n1, /dev/nvme0n1 or a PCI address as 0000:01:00.0. Files, "
            "partitions and other disks need DirectFile."
        )
    return node


def _refuse_in_use(uri: str, node: str) -> None:
    """Raises StorageError if the namespace is mounted, or part of a volume group or an array."""
    block_device = _NAMESPACE.sub(r"/dev/nvme\1", node)
    for tries_left in (2, 1, 0):
        try:
            os.close(os.open(block_device, os.O_RDONLY | os.O_EXCL))
            return
        except OSError as error:
            if error.errno != errno.EBUSY:
                return  # opening it later raises the error
            if not tries_left:
                raise _storage_error(
                    errno.EBUSY,
                    f"{uri} is in use: mounted, or part of a volume group or an array. Writing would destroy its "
                    "data. Unmount it first, or open it with read_only=True.",
                ) from error
        time.sleep(0.02)  # another process may be doing the same check


def _kernel_limit(node: str) -> int:
    """Largest command that the kernel accepts for any memory; 0 if it does not report a limit."""
    limits = Path("/sys/class/block") / f"nvme{node.removeprefix('/dev/ng').removeprefix('/dev/nvme')}" / "queue"
    try:
        most_bytes = int((limits / "max_hw_sectors_kb").read_text()) * 1024
        # User pages are not contiguous, and memory that starts within a page touches one more.
        return min(most_bytes, (int((limits / "max_segments").read_text()) - 1) * _PAGE)
    except (OSError, ValueError):
        return 0


def _explain(uri: str, node: str, sector_bytes: int, piece: Piece, happened: str, number: int) -> StorageError:
    block = piece.block
    first, last = block.start // sector_bytes, (block.stop - 1) // sector_bytes
    way_out = "See the drive's own log (nvme error-log) and the kernel's (dmesg)."
    if number in _GONE or (node and not os.path.exists(node)):
        way_out = "The device is gone: see `nvme list` and dmesg, and reopen it when it is back."
    error = _storage_error(
        number,
        f"{uri}: {'writing' if piece.writing else 'reading'} {block.nbytes} bytes at offset {block.offset} failed in "
        f"sectors {first} to {last}: {happened}. {way_out}",
    )
    error.extent = block.start, block.stop
    return error


def _storage_error(number: int, message: str) -> StorageError:
    error = StorageError(message)
    if number:
        error.errno = number
    return error
