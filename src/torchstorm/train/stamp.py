"""What a record says of the code it measured: a hash of the sources, and the commit that has them.

The hash is taken of the files as they lie on the disk, so it names what ran where git knows nothing of it: from a copy
of the sources, from an unpacked wheel, or with changes that nobody has committed.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
_SUFFIXES = (".py", ".cu", ".cuh", ".cpp", ".h")
_HASH_DIGITS = 12

TRAINING = (
    *("errors.py", "sizes.py", "nvrtc.py", "transfer", "storage", "memory", "plan", "offload", "kernels", "models"),
)
"""What the time and the memory of a training step depend on, below the package's folder."""


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """Which code was measured.

    Attributes:
        sources: hash of the source files that the figures depend on; "" in a record of before there was one.
        commit: of the repository that keeps the sources; "" where none does.
        dirty: whether the sources are others than the commit's, or no commit is known; None in a record of before.
    """

    sources: str = ""
    commit: str = ""
    dirty: bool | None = None


def stamp(names: Sequence[str], package: Path = PACKAGE) -> Stamp:
    """The stamp of some sources as they are now.

    Args:
        names: files and folders below `package`.
        package: the folder that they are in.

    Raises:
        FileNotFoundError: one of the names is not there.
    """
    sources = _hash(_on_disk(names, package))
    committed = _at_head(names, package)
    if not committed:  # not a repository, or one that keeps other things
        return Stamp(sources=sources, dirty=True)
    commit = _git(package, "rev-parse", "HEAD").strip()
    return Stamp(sources=sources, commit=commit, dirty=_hash(committed) != sources)


def _hash(blobs: Mapping[str, str]) -> str:
    lines = "".join(f"{name}\0{blob}\n" for name, blob in sorted(blobs.items()))
    return hashlib.sha256(lines.encode()).hexdigest()[:_HASH_DIGITS]


def _on_disk(names: Sequence[str], package: Path) -> dict[str, str]:
    """What git would call each file's content, by the file's path below the package."""
    found = {}
    for name in names:
        path = package / name
        path.stat()  # a name in vain would be a hash of nothing
        for file in path.rglob("*") if path.is_dir() else [path]:
            if file.suffix in _SUFFIXES:
                content = file.read_bytes()
                header = b"blob %d\0" % len(content)
                found[file.relative_to(package).as_posix()] = hashlib.sha1(header + content).hexdigest()
    return found


def _at_head(names: Sequence[str], package: Path) -> dict[str, str]:
    """The same of the files that the last commit has; empty where there is none."""
    found = {}
    for entry in _git(package, "ls-tree", "-r", "-z", "HEAD", "--", *names).split("\0"):
        about, _, name = entry.partition("\t")
        if name.endswith(_SUFFIXES):
            found[name] = about.split()[2]
    return found


def _git(folder: Path, *arguments: str) -> str:
    """What git prints in a folder; "" where it fails or is not there."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout
