"""A whole NVMe namespace, read and written by the drive's own commands through the xNVMe library.

No file system and no page cache: byte 0 is the namespace's first sector. `/dev/ng0n1` is driven by io_uring_cmd, which
hands NVMe commands through the kernel past its block layer; `/dev/nvme0n1` by io_uring with O_DIRECT; a PCI address by
SPDK, which drives the device from this process, where the library is built with it and the device is unbound from the
kernel. The library comes by `make xnvme`.

- Only a device that the caller names is opened. One that is mounted or otherwise in use is refused for writing, as is a
  partition, since commands count sectors from the start of the namespace.
- Whole sectors move straight between the drive and the tensor where the tensor's address allows it; otherwise through
  the library's buffers. A write of a part of a sector reads it, changes it and writes it back, safe against neighbours
  through the same object only. Two processes that write into one sector at once lose bytes: align records to sectors.
- The kernel's page cache knows nothing of io_uring_cmd's and SPDK's writes: do not read the same device by other means
  meanwhile.
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
_MOST_SECTORS = 2**16  # of one command
_GONE = {errno.ENODEV, errno.ENXIO}


class XnvmeDevice(Backend):
    """An NVMe namespace as a `Backend`.

    Args:
        uri: "/dev/ng0n1" (io_uring_cmd), "/dev/nvme0n1" (io_uring) or a PCI address as "0000:01:00.0" (SPDK).
        queue_depth: commands under way on each queue; a power of two below 4096.
        submitters: queues, each with a thread.
        command_bytes: most bytes of one command; less where the drive or the kernel takes less.
        namespace: number of the namespace behind a PCI address. A device node is one already.
        read_only: opens it for reading.
        timeout_seconds: how long a command may take before the drive counts as lost. The kernel's own limit, after
            which it resets the drive, is 30 s.
        backend: xNVMe's backend, "linux", "spdk" or "ramdisk"; None chooses by `uri`.
        asynchronous: how xNVMe submits: "io_uring_cmd", "io_uring", "emu" ...; None chooses by `uri`.
        library: path of libxnvme.so; None looks for it.

    Attributes:
        uri: as given.
        namespace: its number.
        sector_bytes: bytes of a sector: 512 or 4096.
        num_sectors: sectors of the namespace.
        size_bytes: bytes of the namespace.
        command_bytes: most bytes of one command.

    Raises:
        StorageError: the library is missing, or the device is not there, in use, or none that this can drive.
        UnsupportedError: it is zoned or keeps metadata in its sectors.
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
        # At exit, or where nobody closed it: what is under way ends, then the threads.
        self._release = weakref.finalize(self, self._queues.stop_soon)

    @property
    def align_bytes(self) -> int:
        """What an offset and a length are multiples of where nothing needs a bounce buffer or a read before a write."""
        return int(self.sector_bytes)

    @property
    def staging_bytes(self) -> int:
        """Most bytes of the library's buffers: one per command under way, allocated when first needed, and kept."""
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
        """See `Backend`. A flush command: the drive's own cache becomes durable."""
        self._queues.check_usable()
        if self._queues.lost is not None:
            raise StorageError(f"{self.uri}: making it durable failed, for the drive is lost: {self._queues.lost}")
        context = self._library.xnvme_cmd_ctx_from_dev(self._target.device)
        context.opcode = FLUSH
        context.namespace = self.namespace
        status = self._failed_flush or self._library.xnvme_cmd_pass(ctypes.byref(context), None, 0, None, 0)
        if status:
            self._failed_flush = status
            raise _told(
                abs(status),
                f"{self.uri}: making it durable failed: {os.strerror(abs(status))}. See dmesg and the drive's own log, "
                "open it again, and write again what was written since the last flush that went well.",
            )

    def info(self) -> BackendInfo:
        """See `Backend`. What the library names is what it told after it had opened the device."""
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
            way_out = "This user may not: run as root, or give the user the device node."
        elif number == errno.ENOENT:
            way_out = "There is no such device node: `nvme list` shows those that are."
        elif backend == "spdk":
            way_out = (
                "SPDK drives a device by its PCI address: build the library with it (`make xnvme XNVME_SPDK=enabled`), "
                "unbind the device from the kernel and set huge pages aside (.xnvme/bin/xnvme-driver)."
            )
        raise _told(number, f"{self.uri} cannot be opened by xNVMe {self._version}: {os.strerror(number)}. {way_out}")

    def _describe(self, device: int, node: str, command_bytes: int, timeout_seconds: float) -> Target:
        """Reads the geometry, and what the library really uses."""
        geometry = self._library.xnvme_dev_get_geo(device).contents
        sector = geometry.sector_bytes
        if geometry.type != CONVENTIONAL or geometry.metadata_interleaved or geometry.protection_type:
            raise UnsupportedError(
                f"{self.uri}: geometry type {geometry.type}, {geometry.sector_metadata_bytes} bytes of metadata a "
                f"sector, protection type {geometry.protection_type}. Only a conventional namespace (type "
                f"{CONVENTIONAL}) with plain sectors is supported: name another, or format this one (nvme format)."
            )
        if sector < 512 or sector & (sector - 1) or not geometry.total_bytes:
            raise StorageError(
                f"{self.uri} is no usable namespace: {geometry.total_bytes} bytes in sectors of {sector}."
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
                f"{self.uri} was opened without O_DIRECT, which the kernel refused. Name /dev/ng... instead."
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
            # The kernel maps user memory at words for a passed-on command, at sectors for O_DIRECT.
            address_align={"io_uring_cmd": 4, "io_uring": sector}.get(names[1], 0),
            counts_bytes=names[1] == "io_uring",
            timeout_seconds=timeout_seconds,
            explain=partial(_explain, self.uri, node, sector),
        )

    def _queue(
        self, writing: bool, requests: Sequence[tuple[torch.Tensor, int]], after: Sequence[StorageCopy]
    ) -> StorageCopy:
        if writing and self._read_only:
            # The kernel passes commands on from a node that is open for reading, too, where root asks.
            raise StorageError(f"{self.uri} was opened with read_only=True and cannot be written.")
        pieces: list[Piece] = []
        for tensor, offset in requests:
            check_request(self.uri, tensor, offset)
            nbytes = tensor.nbytes
            if nbytes and offset + nbytes > self.size_bytes:
                raise StorageError(
                    f"{self.uri} ends too early: wanted {nbytes} bytes at offset {offset}, got "
                    f"{max(self.size_bytes - offset, 0)}; it is {self.size_bytes} bytes long."
                )
            if nbytes:
                block = Block(tensor.data_ptr(), offset, offset + nbytes, offset, nbytes)
                pieces += cut(block, writing=writing, sector_bytes=self.sector_bytes, command_bytes=self.command_bytes)
        return self._queues.accept(pieces, tensors=[tensor for tensor, _ in requests], after=after)


def _device_node(uri: str) -> str:
    """The device node behind `uri`, links followed; "" for a PCI address."""
    if _PCI_ADDRESS.fullmatch(uri):
        return ""
    node = os.path.realpath(uri)
    if not _NAMESPACE.fullmatch(node):
        raise StorageError(
            f"{uri} is no NVMe namespace. Name one: /dev/ng0n1, /dev/nvme0n1 or a PCI address as 0000:01:00.0. Files, "
            "partitions and other disks are for DirectFile."
        )
    return node


def _refuse_in_use(uri: str, node: str) -> None:
    """Raises StorageError where the namespace is mounted, or part of a volume group or an array."""
    block_device = _NAMESPACE.sub(r"/dev/nvme\1", node)
    for tries_left in (2, 1, 0):
        try:
            os.close(os.open(block_device, os.O_RDONLY | os.O_EXCL))
            return
        except OSError as error:
            if error.errno != errno.EBUSY:
                return  # opening it will tell
            if not tries_left:
                raise _told(
                    errno.EBUSY,
                    f"{uri} is in use: mounted, or part of a volume group or an array. Writing would destroy what is "
                    "on it. Unmount it first, or open it with read_only=True.",
                ) from error
        time.sleep(0.02)  # someone else was asking the same


def _kernel_limit(node: str) -> int:
    """Most bytes of a command that the kernel passes on from any memory; 0 where it does not tell."""
    limits = Path("/sys/class/block") / f"nvme{node.removeprefix('/dev/ng').removeprefix('/dev/nvme')}" / "queue"
    try:
        most_bytes = int((limits / "max_hw_sectors_kb").read_text()) * 1024
        # Pages of user memory lie anywhere; one more is touched where it does not start at a page.
        return min(most_bytes, (int((limits / "max_segments").read_text()) - 1) * _PAGE)
    except (OSError, ValueError):
        return 0


def _explain(uri: str, node: str, sector_bytes: int, piece: Piece, happened: str, number: int) -> StorageError:
    block = piece.block
    first, last = block.start // sector_bytes, (block.stop - 1) // sector_bytes
    way_out = "See the drive's own log (nvme error-log) and the kernel's (dmesg)."
    if number in _GONE or (node and not os.path.exists(node)):
        way_out = "The device is gone: see `nvme list` and dmesg, and open it again when it is back."
    error = _told(
        number,
        f"{uri}: {'writing' if piece.writing else 'reading'} {block.nbytes} bytes at offset {block.offset} failed in "
        f"sectors {first} to {last}: {happened}. {way_out}",
    )
    error.extent = block.start, block.stop
    return error


def _told(number: int, message: str) -> StorageError:
    error = StorageError(message)
    if number:
        error.errno = number
    return error
