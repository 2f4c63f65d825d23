"""Implements `torchstorm pack`: writes text or .npy files to a volume.

The input is read and written in pieces, so memory does not grow with the input. The volume is written under a temporary
name and renamed at the end, once it is durable. So a file with the requested name is always complete, and an existing
volume is replaced only by a complete one.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console

from torchstorm.errors import ConfigError, DataError, StorageError
from torchstorm.paths import user_path
from torchstorm.sizes import format_size
from torchstorm.storage.aligned import aligned_empty
from torchstorm.storage.layout import Kind, Layout
from torchstorm.storage.request import Request
from torchstorm.storage.volume import Volume
from torchstorm.train.arrays import ArrayFile
from torchstorm.train.checkpoint import sync
from torchstorm.train.config import TrainConfig
from torchstorm.train.data import files_of
from torchstorm.train.packed import REST, SUFFIX, TOKENIZER, TOKENS, About, is_volume
from torchstorm.train.progress import BytesDisplay
from torchstorm.train.stop import Interrupted, StopRequest
from torchstorm.train.texts import Texts, size_of

ARRAY_SUFFIX = ".npy"
_DATA = "data"
_PIECE_BYTES = 8 * 2**20
_Advance = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class Packed:
    """The result of `pack`.

    Attributes:
        path: path of the volume.
        kinds: kinds by name.
        file_bytes: size of the file, with header and checksums.
        seconds: duration, fsync included.
        notes: remarks for the user.
    """

    path: Path
    kinds: dict[str, Kind]
    file_bytes: int
    seconds: float
    notes: tuple[str, ...]

    @property
    def record_bytes(self) -> int:
        """Bytes of all records."""
        return sum(kind.nbytes for kind in self.kinds.values())

    def print_to(self, console: Console) -> None:
        """Prints the result."""
        mb_per_s = self.record_bytes / 1e6 / max(self.seconds, 1e-9)
        lines = [f"{self.path}: {format_size(self.file_bytes)} in {self.seconds:.1f} s, {mb_per_s:,.1f} MB/s"]
        for name, kind in self.kinds.items():
            dtype = str(kind.dtype).removeprefix("torch.")
            size = format_size(kind.nbytes)
            lines.append(f"  {name}: {kind.length:,} x {kind.shape} {dtype}, {size} ({kind.nbytes} bytes)")
        console.print("\n".join([*lines, *self.notes]), markup=False, highlight=False, soft_wrap=True)


class _Source(Protocol):
    """An input of `pack`."""

    @property
    def kinds(self) -> dict[str, Kind]:
        """The kinds of the new volume."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks for the user."""

    def pieces(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        """Yields all records in order: (kind, number of the first, tensor (n, *shape))."""


def pack(
    sources: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    records: str | None = None,
    tokenizer: str | None = None,
    seq: int | None = None,
    checks: bool = True,
    replace: bool = False,
    console: Console | None = None,
) -> Packed:
    """Creates a volume from text files or from .npy files.

    Text becomes the kind "tokens": int32 records of seq + 1 consecutive ids, with all files as one text. The ids of an
    incomplete last record become the kind "rest". The kind "tokenizer" decodes them: see `train.packed`. Arrays with
    equal dtype and record shape (all dimensions but the first) are joined into the kind "data". If no two are equal,
    each array becomes its own kind, named after its file.

    Args:
        sources: files and folders in order.
        out: the file to create; ends in .storm.
        records: name of the kind, for arrays; None for "data".
        tokenizer: "bytes" or "chars", for text; None for the default of `TrainConfig`.
        seq: tokens per sequence, for text; None for the default of `TrainConfig`. Training can use any other value.
        checks: whether each record gets a checksum.
        replace: whether an existing file `out` is replaced, once the new one is complete.
        console: where to print; None for standard output.

    Raises:
        ConfigError: an option is out of range, or does not apply to the sources.
        DataError: a source is missing, empty, cannot be read, or cannot be combined with the others.
        StorageError: `out` exists, or the disk is full, failing or not writable.
        Interrupted: SIGINT or SIGTERM was received; no volume was created.
    """
    console = console or Console()
    out = user_path(out, name="OUT")
    _check_place(out, replace=replace)
    text_options: dict[str, Any] = {
        name: value for name, value in (("tokenizer", tokenizer), ("seq", seq)) if value is not None
    }
    config = TrainConfig(**text_options)
    place = Path(os.path.realpath(out))  # a symbolic link stays, and its target is written
    files = _files([user_path(source, name="SOURCE") for source in sources], place)
    is_text = files[0].suffix != ARRAY_SUFFIX
    if not is_text and text_options:
        raise ConfigError(f"--{next(iter(text_options))} is for text, but {files[0]} is an array: leave it out.")
    if is_text and records is not None:
        raise ConfigError(
            f"--records {records} is for arrays, but {files[0]} is text, whose kind is {TOKENS!r}: leave it out."
        )
    passes = 2 if is_text and config.tokenizer == "chars" else 1
    total_bytes = passes * sum(size_of(file) for file in files)
    with StopRequest() as stop, BytesDisplay(console, "packing", total_bytes=total_bytes) as display:

        def advance(nbytes: int) -> None:
            display.advance(nbytes)
            if stop.signum is not None:
                raise Interrupted(stop.signum, f"before {out} was complete, so it was not created")

        began = time.perf_counter()
        source = _Text(files, config, advance) if is_text else _Arrays(files, records, advance)
        file_bytes = Layout.place(source.kinds, checks=checks).nbytes
        with _beside(place, replace=replace) as beside:
            _check_space(place, file_bytes)
            with Volume.create(beside, source.kinds, checks=checks, replace=True) as volume:
                _write(volume, source)
                volume.flush()
            advance(0)
        seconds = time.perf_counter() - began
    packed = Packed(path=out, kinds=source.kinds, file_bytes=file_bytes, seconds=seconds, notes=source.notes)
    packed.print_to(console)
    return packed


class _Text:
    """Text files as a `_Source`."""

    def __init__(self, files: Sequence[Path], config: TrainConfig, advance: _Advance) -> None:
        self._texts = Texts(files, tokenizer=config.tokenizer, advance=advance)
        num_tokens, self._record_ids = self._texts.num_tokens, config.seq + 1
        length, rest = divmod(num_tokens, self._record_ids)
        if not length:
            raise DataError(
                f"The text has {num_tokens} tokens, but a record needs {self._record_ids}, one more than "
                f"--seq {config.seq}: give more text, or lower --seq."
            )
        vocabulary = self._texts.tokenizer.vocab_size
        self.notes: tuple[str, ...] = (
            f"{num_tokens:,} tokens, with a vocabulary of {vocabulary} (--tokenizer {config.tokenizer}).",
        )
        self.kinds = {TOKENS: Kind(dtype=torch.int32, shape=(self._record_ids,), length=length)}
        if rest:
            self.kinds[REST] = Kind(dtype=torch.int32, shape=(rest,), length=1)
            self.notes += (
                f"The last {rest} of them do not fill a record of {self._record_ids}: they are kind {REST!r}, which "
                "`torchstorm train` uses, too. They are not among the records of kind 'tokens'.",
            )
        self.kinds[TOKENIZER] = Kind(dtype=torch.uint8, shape=(len(self._about("0" * 64)),), length=1)

    def pieces(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        """See `_Source`."""
        at_once = _records_at_once(self.kinds[TOKENS].record_bytes)
        first, filled, ids_NR = 0, 0, self._empty(at_once)
        for ids_N in self._texts.ids():
            while len(ids_N):
                count = min(len(ids_N), ids_NR.numel() - filled)
                ids_NR.view(-1)[filled : filled + count] = ids_N[:count]
                filled, ids_N = filled + count, ids_N[count:]
                if filled == ids_NR.numel():
                    yield TOKENS, first, ids_NR
                    first, filled, ids_NR = first + at_once, 0, self._empty(at_once)
        length, rest = divmod(filled, self._record_ids)
        if length:
            yield TOKENS, first, ids_NR[:length]
        if rest:
            yield REST, 0, ids_NR.view(-1)[filled - rest : filled].unsqueeze(0)
        yield TOKENIZER, 0, torch.frombuffer(bytearray(self._about(self._texts.sha256)), dtype=torch.uint8).unsqueeze(0)

    def _about(self, sha256: str) -> bytes:
        return About(self._texts.tokenizer, self._texts.num_tokens, sha256).to_bytes()

    def _empty(self, length: int) -> torch.Tensor:
        return aligned_empty(length * self._record_ids * 4).view(torch.int32).view(length, self._record_ids)


class _Arrays:
    """.npy files as a `_Source`."""

    notes: tuple[str, ...] = ()

    def __init__(self, files: Sequence[Path], name: str | None, advance: _Advance) -> None:
        self._advance = advance
        self._files = self._named([ArrayFile.of(file) for file in files], name)
        self.kinds = {
            name: Kind(dtype=alike[0].record_dtype, shape=alike[0].shape, length=sum(file.length for file in alike))
            for name, alike in self._files.items()
        }

    def pieces(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        """See `_Source`."""
        for name, alike in self._files.items():
            first = 0
            for file in alike:
                for piece in file.pieces(_records_at_once(file.record_bytes)):
                    self._advance(piece.nbytes)
                    yield name, first, piece
                    first += len(piece)

    @staticmethod
    def _named(files: Sequence[ArrayFile], name: str | None) -> dict[str, list[ArrayFile]]:
        """The files of each kind, by its name."""
        alike: dict[tuple[torch.dtype, tuple[int, ...]], list[ArrayFile]] = {}
        for file in files:
            alike.setdefault((file.record_dtype, file.shape), []).append(file)
        groups = list(alike.values())
        if len(groups) == 1:
            return {_DATA if name is None else name: groups[0]}
        one, other = groups[0][0], groups[1][0]
        differ = (
            f"records of {one.path} are {one.shape} {one.record_dtype}, those of {other.path} {other.shape} "
            f"{other.record_dtype}"
        )
        if name is not None:
            raise ConfigError(f"--records {name} names one kind, but {differ}. Leave it out, or pack them separately.")
        for group in groups:
            if len(group) > 1:
                raise DataError(
                    f"{differ}, and {group[0].path} and {group[1].path} are equal, so it is unclear which to join. "
                    "Pack each kind into a separate volume, or only one file of each."
                )
        if len({file.path.stem for file in files}) < len(files):
            raise DataError(f"{differ}, but two files, and so their kinds, have the same name. Rename one.")
        return {group[0].path.stem: group for group in groups}


def _files(sources: Sequence[Path], out: Path) -> list[Path]:
    """All files to pack, either text or arrays, without the file to replace."""
    found = [file for source in sources for file in files_of(source, asked="SOURCE")]
    files = [file for file in found if os.path.realpath(file) != str(out)]
    if not files:
        raise DataError(f"SOURCE has no files other than {out} itself: give text or .npy files.")
    for file in files:
        if is_volume(file):
            raise DataError(
                f"{file} is a volume, neither text nor an array: leave it out, or list the files one by one."
            )
        if (file.suffix == ARRAY_SUFFIX) != (files[0].suffix == ARRAY_SUFFIX):
            array, text = (file, files[0]) if file.suffix == ARRAY_SUFFIX else (files[0], file)
            raise DataError(f"{array} is an array and {text} is text: pack them into separate volumes.")
    return files


def _check_place(out: Path, *, replace: bool) -> None:
    if out.suffix != SUFFIX:  # probably OUT was forgotten, and this is the last source
        raise ConfigError(f"{out} is the last argument, so it is the volume to create, but it must end in {SUFFIX}.")
    if os.path.isdir(out):
        raise StorageError(f"{out} is a folder: give the file to create, as in {out / ('data' + SUFFIX)}.")
    if not replace:
        _refuse_existing(out)
    if os.path.exists(out) and not os.path.isfile(out):
        raise StorageError(f"{out} is a device or FIFO, and a volume takes a file: give another name.")
    if not os.path.isdir(os.path.dirname(os.path.realpath(out))):
        raise StorageError(f"{out} cannot be created: {out.parent} is not a folder. Create it first.")


def _refuse_existing(out: Path) -> None:
    if os.path.lexists(out):
        raise StorageError(f"{out} exists. Give another name, or use --replace to overwrite it.")


def _check_space(place: Path, nbytes: int) -> None:
    free = shutil.disk_usage(place.parent).free
    if nbytes > free:
        raise StorageError(
            f"{place} needs {format_size(nbytes)} ({nbytes} bytes), but {format_size(free)} ({free}) are free in "
            f"{place.parent}: free {format_size(nbytes - free)} more, or use a folder on another disk."
        )


@contextmanager
def _beside(place: Path, *, replace: bool) -> Iterator[Path]:
    """A temporary file next to `place`. It is renamed to `place` at the end, or removed after a failure.

    A lock prevents that two commands use it at once. The file of a killed command is reused.
    """
    beside = place.with_name(f".{place.name}.packing")
    try:
        lock = _locked(beside)
        try:
            os.truncate(beside, 0)
            yield beside
            if not replace:
                _refuse_existing(place)
            os.rename(beside, place)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
        finally:
            os.close(lock)
        sync(place.parent)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(f"{place} cannot be created: {error.strerror} ({error.filename or beside}).") from error


def _locked(path: Path) -> int:
    """Opens and locks a file."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.exists(path) and os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd  # otherwise its owner has just renamed it
        except BlockingIOError:
            os.close(fd)
            raise StorageError(f"{path} is being written by another `torchstorm pack`: wait for it.") from None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _write(volume: Volume, source: _Source) -> None:
    """Writes all records; the next piece is read while one is written."""
    under_way: Request | None = None
    for name, first, tensor in source.pieces():
        request = volume[name].write_async(first, tensor)
        if under_way is not None:
            under_way.wait()
        under_way = request
    if under_way is not None:
        under_way.wait()


def _records_at_once(record_bytes: int) -> int:
    """Number of records per piece. If possible, pieces are whole pages, so writes are direct."""
    at_once = max(1, _PIECE_BYTES // record_bytes)
    to_a_page = mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, record_bytes)
    return at_once // to_a_page * to_a_page or at_once
