"""The directory of one spill file: its owner holds a lock on it, so that what a killed process left can be told apart.

    <directory>/torchstorm-spill-<pid>-<random>/lock     held with flock for as long as the process lives
                                               /spill    the bytes

The kernel drops the lock when its owner dies, however it dies. The process id in the name is for people only: it may
be another container's, or used again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets

from torchstorm.errors import StorageError
from torchstorm.paths import user_path

_PREFIX = "torchstorm-spill-"
_LOCK = "lock"
_FILE = "spill"

# A forked child shares its parent's locks. It gives up its share, so that the locks die with the parent.
_held_locks: set[int] = set()


def _drop_locks_in_child() -> None:
    for fd in _held_locks:
        os.close(fd)
    _held_locks.clear()


os.register_at_fork(after_in_child=_drop_locks_in_child)


class SpillDirectory:
    """Makes a locked directory of its own; removes those in the same place whose process has died.

    Args:
        directory: where. Made where only its parent exists.

    Raises:
        StorageError: it cannot be made, written or locked.

    Attributes:
        path: the directory made.
        file_path: where its one file is to be.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._pid = os.getpid()
        self._removed = False
        directory = os.path.abspath(user_path(directory, name="disk"))
        way_out = "Name a directory with disk= that this user can write and whose parent exists."
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory)
            remove_stale(directory)
            self.path, self._lock_fd = _make(directory)
        except OSError as error:
            told = StorageError(f"{directory} cannot hold a spill file: {error.strerror}. {way_out}")
            told.errno = error.errno
            raise told from error
        _held_locks.add(self._lock_fd)
        self.file_path = os.path.join(self.path, _FILE)

    def remove(self) -> None:
        """Removes the directory and lets go of the lock; does nothing in a forked process, and the second time."""
        if self._removed or os.getpid() != self._pid:
            return
        self._removed = True
        _remove(self.path)
        _held_locks.discard(self._lock_fd)
        os.close(self._lock_fd)


def remove_stale(directory: str | os.PathLike[str]) -> list[str]:
    """Removes the spill directories whose process has died.

    Args:
        directory: where they lie; what else is there is left alone.

    Returns:
        Paths of those removed.
    """
    removed = []
    with os.scandir(user_path(directory, name="disk")) as entries:
        spills = [entry for entry in entries if entry.name.startswith(_PREFIX)]
    for path in [entry.path for entry in spills if entry.is_dir(follow_symlinks=False)]:
        try:
            fd = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            # Half made or half removed. Only an empty one can be: its owner makes the lock first and removes it last.
            with contextlib.suppress(OSError):
                os.rmdir(path)
                removed.append(path)
            continue
        except OSError:  # another user's
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(path)
            if not os.path.exists(path):
                removed.append(path)
        except OSError:  # in use
            pass
        finally:
            os.close(fd)
    return removed


def _make(directory: str) -> tuple[str, int]:
    while True:
        path = os.path.join(directory, f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}")
        os.mkdir(path, 0o700)
        fd = -1
        try:
            fd = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), os.stat(os.path.join(path, _LOCK))):
                return path, fd
        except (FileNotFoundError, BlockingIOError):
            pass  # another process took it for stale before it was locked; again, under another name
        except OSError:
            _remove(path)
            if fd >= 0:
                os.close(fd)
            raise
        if fd >= 0:
            os.close(fd)


def _remove(path: str) -> None:
    # By name, never recursively; the lock last, for what has none is anybody's to remove. What cannot be removed now
    # (somebody put a file beside it) is left to the next start.
    with contextlib.suppress(OSError):
        for name in (_FILE, _LOCK):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(path, name))
        os.rmdir(path)
