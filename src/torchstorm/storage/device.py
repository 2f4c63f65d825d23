"""What the kernel reports about a file or a block device: its size, its sectors, and who uses it."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import struct
from pathlib import Path

from torchstorm.errors import StorageError

_BLKSSZGET = 0x1268  # bytes of a logical sector, the unit of LBAs
_FILE_SECTOR_BYTES = 512
_MOUNTS = Path("/proc/self/mountinfo")
_SWAPS = Path("/proc/swaps")
_DEVICES = Path("/sys/dev/block")


def size_bytes(path: str) -> int:
    """Size of a file or a block device. Raises StorageError if it cannot be opened."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise _open_error(path, error) from error
    try:
        return os.lseek(fd, 0, os.SEEK_END)
    finally:
        os.close(fd)


def sector_bytes(path: str) -> int:
    """Bytes of a block device's logical sector; 512 for a file.

    Raises:
        StorageError: it is neither, or cannot be opened.
    """
    if not is_block_device(path):
        return _FILE_SECTOR_BYTES
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise _open_error(path, error) from error
    try:
        found: int = struct.unpack("i", fcntl.ioctl(fd, _BLKSSZGET, bytes(4)))[0]
        return found
    finally:
        os.close(fd)


def is_block_device(path: str) -> bool:
    """Whether it is a block device; False for a file. Raises StorageError if it is neither, or does not exist."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise _open_error(path, error) from error
    if stat.S_ISBLK(mode) or stat.S_ISREG(mode):
        return stat.S_ISBLK(mode)
    kinds = {stat.S_ISDIR: "a directory", stat.S_ISCHR: "a character device", stat.S_ISFIFO: "a pipe"}
    kind = next((name for test, name in kinds.items() if test(mode)), "a socket")
    raise StorageError(
        f"{path} is {kind}, which has no sectors. Name a file, or a block device such as /dev/nvme0n1 (not its "
        "controller, /dev/nvme0)."
    )


def check_unused(path: str) -> None:
    """Raises StorageError if a block device or a device on top of it is mounted, swap, or claimed by the kernel.

    Args:
        path: path of the device.
    """
    status = os.stat(path)
    numbers = _with_what_stands_on(f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}")
    for number, source, where in (*_mounted(), *_swapped()):
        found = number if number in numbers else _device_number(source)
        if found in numbers:
            name = (
                "" if found == f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}" else f", by its part {source}"
            )
            raise StorageError(
                f"{path} is in use {where}{name}: writing would destroy its data. Unmount it, give another "
                "device, or pass allow_mounted=True to write anyway."
            )
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_EXCL))  # fails for mounts in other namespaces, RAID and LVM, too
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise _open_error(path, error) from error
        raise StorageError(
            f"{path} is in use by the kernel (mounted in another namespace, or a part of a RAID or LVM): writing "
            "would destroy its data. Give another device, or pass allow_mounted=True to write anyway."
        ) from error


def sync_directory(path: str) -> None:
    """Makes a directory's entries durable (fsync). Raises StorageError if the disk failed."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # the file system does not support it
            raise StorageError(f"{path}: making its entries durable failed: {error.strerror}. See dmesg.") from error


def _with_what_stands_on(number: str) -> set[str]:
    """The numbers of a device, its partitions, and the devices on top of them (RAID, LVM, encryption)."""
    found, left = set(), [number]
    while left:
        device = left.pop()
        if device not in found:
            found.add(device)
            folder = _DEVICES / device
            for entry in (*folder.glob("*/partition"), *folder.glob("holders/*/dev")):
                left.append((entry.parent / "dev").read_text().strip())
    return found


def _mounted() -> list[tuple[str, str, str]]:
    """(device number, source, "mounted at /data") of each mount. For btrfs, the device follows from the source."""
    mounts = []
    for line in _MOUNTS.read_text(errors="surrogateescape").splitlines() if _MOUNTS.exists() else ():
        fields, _, rest = line.partition(" - ")
        mounts.append((fields.split()[2], _plain(rest.split()[1]), f"mounted at {_plain(fields.split()[4])}"))
    return mounts


def _swapped() -> list[tuple[str, str, str]]:
    lines = _SWAPS.read_text(errors="surrogateescape").splitlines()[1:] if _SWAPS.exists() else ()
    return [("", _plain(line.split()[0]), "as swap") for line in lines]


def _plain(field: str) -> str:
    """Decodes a path of the kernel's tables, which write blanks as \\040."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)


def _device_number(source: str) -> str:
    try:
        status = os.stat(source)
    except (OSError, ValueError):  # not a device: "proc", "none", "rootfs"
        return ""
    return f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}" if stat.S_ISBLK(status.st_mode) else ""


def _open_error(path: str, error: OSError) -> StorageError:
    told = StorageError(f"{path} cannot be opened: {error.strerror}. Give a file or a device that this user may open.")
    told.errno = error.errno
    return told
