"""Tokenizers: bytes (256 ids, for any file) or characters (the distinct ones of the text)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from torchstorm.errors import CheckpointError


class Tokenizer(Protocol):
    """Converts text to ids and ids to text."""

    @property
    def vocab_size(self) -> int:
        """Number of ids."""

    def encode(self, text: bytes) -> Tensor:
        """Returns the ids (N,), uint8 or int32, of UTF-8 text. The bytes tokenizer accepts any bytes."""

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text. Invalid UTF-8 becomes U+FFFD."""

    def to_json(self) -> dict[str, Any]:
        """The tokenizer as a dictionary for `tokenizer_from_json`."""


class ByteTokenizer:
    """One id per byte."""

    vocab_size = 256

    def encode(self, text: bytes) -> Tensor:
        """Returns the bytes as uint8 ids (N,)."""
        return torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text. Invalid UTF-8 becomes U+FFFD."""
        return bytes(ids).decode("utf-8", errors="replace")

    def to_json(self) -> dict[str, Any]:
        """The tokenizer as a dictionary for `tokenizer_from_json`."""
        return {"kind": "bytes"}


class CharTokenizer:
    """One id per distinct unicode character, in the order of the code points.

    Args:
        characters: the sorted vocabulary.
    """

    def __init__(self, characters: str) -> None:
        self.characters = characters
        self._codes = np.frombuffer(characters.encode("utf-32-le"), dtype=np.uint32)

    @classmethod
    def of(cls, text: bytes) -> CharTokenizer:
        """Creates the tokenizer for a text.

        Raises:
            UnicodeDecodeError: `text` is not UTF-8.
        """
        return cls("".join(sorted(set(text.decode("utf-8")))))

    @property
    def vocab_size(self) -> int:
        """Number of characters."""
        return len(self.characters)

    def encode(self, text: bytes) -> Tensor:
        """Returns the int32 ids (N,) of UTF-8 text. All characters must be in the vocabulary."""
        codes = np.frombuffer(text.decode("utf-8").encode("utf-32-le"), dtype=np.uint32)
        return torch.from_numpy(np.searchsorted(self._codes, codes).astype(np.int32))

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text."""
        return "".join(self.characters[i] for i in ids)

    def to_json(self) -> dict[str, Any]:
        """The tokenizer as a dictionary for `tokenizer_from_json`."""
        return {"kind": "chars", "characters": self.characters}


def make_tokenizer(kind: str, text: bytes) -> Tokenizer:
    """Creates the tokenizer `kind` ("bytes" or "chars") for a text.

    Raises:
        UnicodeDecodeError: "chars", and `text` is not UTF-8.
    """
    return CharTokenizer.of(text) if kind == "chars" else ByteTokenizer()


def tokenizer_from_json(record: Mapping[str, Any]) -> Tokenizer:
    """Creates a tokenizer from the result of its `to_json`.

    Raises:
        CheckpointError: the tokenizer is unknown.
    """
    match dict(record):
        case {"kind": "bytes"}:
            return ByteTokenizer()
        case {"kind": "chars", "characters": str(characters)}:
            return CharTokenizer(characters)
    raise CheckpointError(f"The checkpoint's tokenizer {dict(record)!r} is not one of bytes, chars.")
