"""Host memory that the process can still allocate, limited by the machine and by its cgroups.

A container's limit is not in /proc/meminfo, and a process that exceeds it is killed. Cgroups are nested, and each level
has its own limit, so the tightest one counts. A cgroup's usage includes inactive file cache (`inactive_file`). The
kernel frees it when memory is short, so it counts as free here.

Each function takes the root of the file system that it reads, so that tests can simulate another machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import psutil

_ROOT = Path("/")
# Version 1 writes "no limit" as the largest whole number of pages that a signed 64-bit number holds.
_NO_LIMIT_BYTES = 2**62


class _Level(NamedTuple):
    """A cgroup: the process's own or one of its ancestors."""

    limit_bytes: int
    usage_bytes: int
    reclaimable_bytes: int


def total_ram_bytes(root: Path = _ROOT) -> int:
    """Bytes of RAM that the process could use on an idle machine: its RAM, or the tightest cgroup limit."""
    limit_bytes = cgroup_limit_bytes(root)
    total_bytes = _meminfo(root).get("MemTotal") or psutil.virtual_memory().total
    return total_bytes if limit_bytes is None else min(total_bytes, limit_bytes)


def available_ram_bytes(root: Path = _ROOT) -> int:
    """Bytes of RAM that the process can still allocate without swapping or being killed; at least 0."""
    rooms = [level.limit_bytes - level.usage_bytes + level.reclaimable_bytes for level in _levels(root)]
    available_bytes = _meminfo(root).get("MemAvailable") or psutil.virtual_memory().available
    return max(0, min([available_bytes, *rooms]))


def cgroup_limit_bytes(root: Path = _ROOT) -> int | None:
    """The tightest memory limit of the process's cgroups in bytes; None without a limit."""
    return min((level.limit_bytes for level in _levels(root)), default=None)


def _meminfo(root: Path) -> dict[str, int]:
    text = _read(root / "proc/meminfo") or ""
    return {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+): *([0-9]+) kB$", text, re.MULTILINE)}


def _levels(root: Path) -> Iterator[_Level]:
    """The cgroups of this process that have a limit, of both versions (a machine can mount both)."""
    for version, mount_point, mount_root in _mounts(root):
        path = _path_in_hierarchy(root, version)
        if path is None:
            continue
        # In a container, the mount contains only a part of the hierarchy, and paths may start at the host's root.
        inside = PurePosixPath(path.removeprefix(mount_root) if mount_root != "/" else path)
        folder = root / mount_point.lstrip("/") / str(inside).lstrip("/")
        top = root / mount_point.lstrip("/")
        for level in (folder, *folder.parents):
            limit = _level(level, version)
            if limit is not None:
                yield limit
            if level == top:
                break


def _level(folder: Path, version: int) -> _Level | None:
    names = ("memory.max", "memory.high") if version == 2 else ("memory.limit_in_bytes",)
    limits = [int(text) for name in names if (text := _read(folder / name) or "max").strip() != "max"]
    limit_bytes = min(limits, default=_NO_LIMIT_BYTES)
    if limit_bytes >= _NO_LIMIT_BYTES:
        return None
    usage = _read(folder / ("memory.current" if version == 2 else "memory.usage_in_bytes")) or "0"
    field = "inactive_file" if version == 2 else "total_inactive_file"
    reclaimable = re.search(rf"^{field} ([0-9]+)$", _read(folder / "memory.stat") or "", re.MULTILINE)
    return _Level(limit_bytes, int(usage), int(reclaimable[1]) if reclaimable else 0)


def _mounts(root: Path) -> Iterator[tuple[int, str, str]]:
    """(version, mount point, mounted part of the hierarchy) of every cgroup mount with a memory controller."""
    for line in (_read(root / "proc/self/mountinfo") or "").splitlines():
        before, separator, after = line.partition(" - ")
        left, right = before.split(), after.split()
        if not separator or len(left) < 5 or not right:
            continue
        if right[0] == "cgroup2":
            yield 2, left[4], left[3]
        elif right[0] == "cgroup" and "memory" in right[-1].split(","):
            yield 1, left[4], left[3]


def _path_in_hierarchy(root: Path, version: int) -> str | None:
    """The process's own cgroup: a line "0::/a/b" of version 2, or "4:memory:/a/b" of version 1."""
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if (version == 2 and number == "0" and not controllers) or (
            version == 1 and "memory" in controllers.split(",")
        ):
            return path
    return None


def _read(file: Path) -> str | None:
    try:
        return file.read_text()
    except OSError:
        return None
