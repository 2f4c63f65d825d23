"""Text files as one stream of ids, read in pieces: what `load_corpus` holds in memory, however long it is."""

from __future__ import annotations

import codecs
import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from torchstorm.errors import DataError
from torchstorm.train.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer

_READ_BYTES = 2**20
_UNICODE = 0x110000


class Texts:
    """Text files, one after the other.

    Args:
        files: in their order.
        tokenizer: "bytes" or "chars"; the latter reads all of them once before the ids are asked for.
        advance: told how many bytes were read, again and again; what it raises ends the work.

    Attributes:
        tokenizer: for their ids.
        num_tokens: how many ids there are.
        sha256: of the text, in hex; "" before it was read to its end.

    Raises:
        DataError: a file cannot be read, is no regular file, or is not UTF-8 (for "chars"); or all are empty.
    """

    def __init__(self, files: Sequence[Path], *, tokenizer: str, advance: Callable[[int], None]) -> None:
        self._files, self._advance = files, advance
        self.sha256 = ""
        total_bytes = sum(size_of(file) for file in files)
        if not total_bytes:
            raise DataError(f"0 bytes of text in {len(files)} files, {files[0]} first: name files with text in them.")
        self.tokenizer: Tokenizer = ByteTokenizer()
        self.num_tokens = total_bytes
        self._must_decode = tokenizer == "chars"
        if self._must_decode:
            self.tokenizer, self.num_tokens = self._characters()

    def ids(self) -> Iterator[Tensor]:
        """All ids in turn: (n,) of uint8 or int32, n at most 2**20.

        Raises:
            DataError: a file cannot be read, or is not what it was before.
        """
        before, count = self.sha256, 0
        for text in self._read():
            ids_N = self.tokenizer.encode(text)
            count += len(ids_N)
            if count > self.num_tokens:
                raise self._changed(f"more than {count}")
            yield ids_N
        if count < self.num_tokens or before not in ("", self.sha256):
            raise self._changed(str(count))

    def _characters(self) -> tuple[CharTokenizer, int]:
        """The tokenizer of the characters in use, and how many characters there are."""
        is_used = np.zeros(_UNICODE, dtype=np.bool_)
        count = 0
        for text in self._read():
            codes = np.frombuffer(text.decode().encode("utf-32-le"), dtype=np.uint32)
            is_used[codes] = True
            count += len(codes)
        return CharTokenizer("".join(map(chr, np.flatnonzero(is_used)))), count

    def _read(self) -> Iterator[bytes]:
        """The text in pieces, which end where a character does if it must be decoded."""
        digest = hashlib.sha256()
        for path in self._files:
            decoder = codecs.getincrementaldecoder("utf-8")()
            start = 0  # of what the decoder has not given yet
            try:
                with open(path, "rb", buffering=0) as file:
                    while piece := file.read(_READ_BYTES):
                        digest.update(piece)
                        self._advance(len(piece))
                        if not self._must_decode:
                            yield piece
                            continue
                        text = decoder.decode(piece).encode()
                        start += len(text)
                        yield text
                decoder.decode(b"", final=True)
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {start + error.start}. "
                    "--tokenizer chars reads only UTF-8; use --tokenizer bytes, or convert the file."
                ) from error
            except OSError as error:
                raise cannot_read(path, error) from error
        self.sha256 = digest.hexdigest()

    def _changed(self, count: str) -> DataError:
        return DataError(
            f"The text changed while it was read: {self.num_tokens} ids were counted, {count} came, in "
            f"{len(self._files)} files, {self._files[0]} first. Pack it when nobody writes to it."
        )


def size_of(path: Path) -> int:
    """Bytes of a regular file.

    Raises:
        DataError: it is none, or gone.
    """
    try:
        found = os.stat(path)
    except OSError as error:
        raise cannot_read(path, error) from error
    if not stat.S_ISREG(found.st_mode):
        raise DataError(
            f"{path} is no regular file, and a pipe or device cannot be measured before it is read: copy it."
        )
    return found.st_size


def cannot_read(path: Path, error: OSError) -> DataError:
    """What is raised where a source cannot be read."""
    return DataError(f"{path} cannot be read: {error.strerror}. Correct that, or leave it out.")
