"""Reads text files as one stream of ids, in pieces: the same ids as `load_corpus`, for texts larger than memory."""

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
    """Several text files as one text.

    Args:
        files: files in order.
        tokenizer: "bytes" or "chars". "chars" reads all files once to find the vocabulary.
        advance: called with the number of bytes after each read. An exception ends the work.

    Attributes:
        tokenizer: the tokenizer.
        num_tokens: number of ids.
        sha256: SHA-256 of the text in hex; "" until it has been read to its end.

    Raises:
        DataError: a file cannot be read, is not a regular file, or is not UTF-8 (for "chars"); or all are empty.
    """

    def __init__(self, files: Sequence[Path], *, tokenizer: str, advance: Callable[[int], None]) -> None:
        self._files, self._advance = files, advance
        self.sha256 = ""
        total_bytes = sum(size_of(file) for file in files)
        if not total_bytes:
            raise DataError(f"0 bytes of text in {len(files)} files, {files[0]} first: give files with text.")
        self.tokenizer: Tokenizer = ByteTokenizer()
        self.num_tokens = total_bytes
        self._must_decode = tokenizer == "chars"
        if self._must_decode:
            self.tokenizer, self.num_tokens = self._characters()

    def ids(self) -> Iterator[Tensor]:
        """Yields all ids in order: (n,) uint8 or int32, n at most 2**20.

        Raises:
            DataError: a file cannot be read, or has changed.
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
        """(tokenizer of the distinct characters, number of characters)."""
        is_used = np.zeros(_UNICODE, dtype=np.bool_)
        count = 0
        for text in self._read():
            codes = np.frombuffer(text.decode().encode("utf-32-le"), dtype=np.uint32)
            is_used[codes] = True
            count += len(codes)
        return CharTokenizer("".join(map(chr, np.flatnonzero(is_used)))), count

    def _read(self) -> Iterator[bytes]:
        """Yields the text in pieces. For "chars", they end at character boundaries."""
        digest = hashlib.sha256()
        for path in self._files:
            decoder = codecs.getincrementaldecoder("utf-8")()
            start = 0  # offset of the first byte not yet decoded
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
            f"The text changed while it was read: it had {self.num_tokens} ids first, then {count}, in "
            f"{len(self._files)} files, {self._files[0]} first. Pack it when no other program writes to it."
        )


def size_of(path: Path) -> int:
    """Size of a regular file.

    Raises:
        DataError: it is not a regular file, or does not exist.
    """
    try:
        found = os.stat(path)
    except OSError as error:
        raise cannot_read(path, error) from error
    if not stat.S_ISREG(found.st_mode):
        raise DataError(f"{path} is not a regular file. The size of a pipe or device is unknown: copy it to a file.")
    return found.st_size


def cannot_read(path: Path, error: OSError) -> DataError:
    """The error for a source that cannot be read."""
    return DataError(f"{path} cannot be read: {error.strerror}. Make it readable, or leave it out.")
