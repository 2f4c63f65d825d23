"""Text to token ids and back: by bytes (256 ids, any file) or by characters (the distinct ones of the text)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from torchstorm.errors import CheckpointError


class Tokenizer(Protocol):
    """Turns a whole text into ids and ids into text."""

    @property
    def vocab_size(self) -> int:
        """How many ids there are."""

    def encode(self, text: bytes) -> Tensor:
        """Gives the ids (N,), uint8 or int32, of UTF-8 text; of any bytes for the bytes tokenizer."""

    def decode(self, ids: Sequence[int]) -> str:
        """Gives the text; what is not UTF-8 becomes U+FFFD."""

    def to_json(self) -> dict[str, Any]:
        """What `tokenizer_from_json` makes it from again."""


class ByteTokenizer:
    """One id per byte."""

    vocab_size = 256

    def encode(self, text: bytes) -> Tensor:
        """Gives the bytes as uint8 ids (N,)."""
        return torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())

    def decode(self, ids: Sequence[int]) -> str:
        """Gives the text; what is not UTF-8 becomes U+FFFD."""
        return bytes(ids).decode("utf-8", errors="replace")

    def to_json(self) -> dict[str, Any]:
        """What `tokenizer_from_json` makes it from again."""
        return {"kind": "bytes"}


class CharTokenizer:
    """One id per distinct unicode character, in the order of the code points.

    Args:
        characters: the vocabulary, sorted.
    """

    def __init__(self, characters: str) -> None:
        self.characters = characters
        self._codes = np.frombuffer(characters.encode("utf-32-le"), dtype=np.uint32)

    @classmethod
    def of(cls, text: bytes) -> CharTokenizer:
        """Makes the vocabulary of a text.

        Raises:
            UnicodeDecodeError: `text` is not UTF-8.
        """
        return cls("".join(sorted(set(text.decode("utf-8")))))

    @property
    def vocab_size(self) -> int:
        """How many characters there are."""
        return len(self.characters)

    def encode(self, text: bytes) -> Tensor:
        """Gives int32 ids (N,) of UTF-8 text that holds no characters but the vocabulary's."""
        codes = np.frombuffer(text.decode("utf-8").encode("utf-32-le"), dtype=np.uint32)
        return torch.from_numpy(np.searchsorted(self._codes, codes).astype(np.int32))

    def decode(self, ids: Sequence[int]) -> str:
        """Gives the text."""
        return "".join(self.characters[i] for i in ids)

    def to_json(self) -> dict[str, Any]:
        """What `tokenizer_from_json` makes it from again."""
        return {"kind": "chars", "characters": self.characters}


def make_tokenizer(kind: str, text: bytes) -> Tokenizer:
    """Makes the tokenizer called `kind` ("bytes" or "chars") for a text.

    Raises:
        UnicodeDecodeError: "chars", and `text` is not UTF-8.
    """
    return CharTokenizer.of(text) if kind == "chars" else ByteTokenizer()


def tokenizer_from_json(record: Mapping[str, Any]) -> Tokenizer:
    """Makes a tokenizer from what its `to_json` gave.

    Raises:
        CheckpointError: the record is of no known tokenizer.
    """
    match dict(record):
        case {"kind": "bytes"}:
            return ByteTokenizer()
        case {"kind": "chars", "characters": str(characters)}:
            return CharTokenizer(characters)
    raise CheckpointError(f"The checkpoint's tokenizer {dict(record)!r} is not one of bytes, chars.")
