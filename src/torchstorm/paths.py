"""Paths that users name, and the documents that are written there.

A document takes the place of a regular file at once and whole. Into what is no regular file (a device, a FIFO, a
descriptor such as /dev/stdout) it is written, once, and what is there is neither read, nor moved, nor removed.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import sys
from pathlib import Path

from torchstorm.errors import ConfigError, StorageError


def user_path(path: str | os.PathLike[str], *, name: str) -> Path:
    """Makes a path of what a user gave, with a home directory in the place of `~` or `~user`.

    Args:
        path: as given.
        name: what it is for, as in "--json" or "disk", named in the error.

    Raises:
        ConfigError: it is no path, is empty, or begins with a `~user` that has no home directory here.
    """
    text = path_text(path, name=name)
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        raise ConfigError(
            f"{name}={text!r} begins with {text.split('/')[0]!r}, and no such user has a home directory here: write "
            f"the directory's path, or './{text}' for a name that begins with '~'."
        )
    found = Path(expanded)
    return found.absolute() if str(found).startswith("~") else found  # "./~a", which a Path would make "~a" of


def path_text(path: str | os.PathLike[str], *, name: str) -> str:
    """A path as it was written, for what is more than a path: "DIR:SIZE". Raises ConfigError as `user_path` does."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(text, str):
        raise ConfigError(f"{name}={path!r} is of type {type(path).__name__}: give a path, as str or pathlib.Path.")
    if not text or "\0" in text:
        what = "has a null byte in it" if text else "is empty"
        raise ConfigError(f"{name}={path!r} {what}: give a path, as in results/a or ~/a.")
    return text


def descriptor_of(path: Path) -> int | None:
    """The descriptor of this process that a path names, as /dev/stdout and /dev/fd/3 do; None for other paths."""
    for _ in range(40):  # as many links as Linux follows
        if path.name.isdecimal() and os.path.realpath(path.parent) == f"/proc/{os.getpid()}/fd":
            return int(path.name)
        if not os.path.islink(path):
            break
        path = path.parent / os.readlink(path)
    return None


def is_replaceable(path: Path) -> bool:
    """Whether a document takes the place of what is at `path`: a regular file, or nothing yet.

    Raises:
        OSError: what is there cannot be looked at.
    """
    if descriptor_of(path) is not None:  # even that of a regular file, which has other lines in it
        return False
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return True


def check_output(path: str | os.PathLike[str], *, name: str) -> Path:
    """Makes sure, before any work is done, that a document can be written, as far as that can be told beforehand.

    Args:
        path: where it is to go.
        name: what asked for it, as in "--json".

    Returns:
        The path, as `user_path` gives it.

    Raises:
        ConfigError: see `user_path`.
        StorageError: it is a folder or a block device, or its own folder is missing or cannot be written to.
    """
    path = user_path(path, name=name)
    try:
        _check(path)
    except OSError as error:
        raise _unwritable(path, error, name) from error
    return path


def write_document(path: str | os.PathLike[str], content: str | bytes, *, name: str) -> None:
    """Writes a document; whoever reads a regular file at any moment finds a whole one: this or the one before.

    Args:
        path: where it goes; a link stays, and what it leads to is written.
        content: the whole document.
        name: what asked for it, as in "--json".

    Raises:
        ConfigError: see `user_path`.
        StorageError: it cannot be written.
    """
    path = user_path(path, name=name)
    data = content.encode() if isinstance(content, str) else content
    try:
        _check(path)
        if is_replaceable(path):
            _replace(Path(os.path.realpath(path)), data)
        else:
            _write_into(path, data)
    except OSError as error:
        raise _unwritable(path, error, name) from error


def _unwritable(path: Path, error: OSError, name: str) -> StorageError:
    return StorageError(
        f"{name} {path} cannot be written: {error.strerror or error}. Give a path in a folder that exists, can be "
        "written to and has room."
    )


def _check(path: Path) -> None:
    if descriptor_of(path) is not None:
        return
    if is_replaceable(path):
        folder = os.path.dirname(os.path.realpath(path))
        os.stat(folder)  # tells that there is none
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder")
    if stat.S_ISBLK(mode):
        raise OSError(errno.EINVAL, "it is a block device, whose contents would be lost")


def _replace(path: Path, data: bytes) -> None:
    written = path.with_name(f".torchstorm-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with written.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        written.replace(path)
    except BaseException:
        written.unlink(missing_ok=True)
        raise
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_into(path: Path, data: bytes) -> None:
    own = descriptor_of(path)
    if own is None:
        descriptor = os.open(path, os.O_WRONLY | os.O_NOCTTY)  # nothing is made or cut off; a FIFO waits for a reader
    else:
        for stream in (sys.stdout, sys.stderr):  # what was printed before stands before
            if stream is not None:
                stream.flush()
        descriptor = os.dup(own)  # opened anew, a regular file behind it would be written over from its beginning
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
