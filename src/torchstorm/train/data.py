"""Loads training text, splits it into a training and a validation part, and draws random batches.

Shape suffixes: N tokens of a part, B sequences, T tokens per sequence.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from torchstorm.errors import DataError
from torchstorm.paths import user_path
from torchstorm.sizes import format_size
from torchstorm.storage.layout import MAGIC
from torchstorm.train.seeds import derive_seed
from torchstorm.train.tokenizer import Tokenizer, make_tokenizer

_DEFAULT_TEXT_CAP_BYTES = 8 * 2**20
_VALIDATION_SHARE = 0.1
# Skipped: third-party packages, and tests, which contain deliberately invalid files.
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__", "idle_test", "lib2to3"})


class Tokens(Protocol):
    """The data of a run: a text in memory (`Corpus`) or in a volume (`PackedCorpus`). Both give the same batches."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the text."""

    @property
    def sha256(self) -> str:
        """SHA-256 of the text in hex. A resumed run compares it."""

    @property
    def source(self) -> str:
        """Description for messages."""

    @property
    def num_train(self) -> int:
        """How many there are to learn from."""

    @property
    def num_val(self) -> int:
        """How many are held back."""

    def batch(
        self,
        split: str,
        *,
        batch: int,
        seq: int,
        seed: int,
        index: tuple[int, ...],
        ahead: tuple[int, ...] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Draws sequences at random positions.

        Args:
            split: "train" or "val".
            batch: B.
            seq: T.
            seed: the run's seed.
            index: identifies the batch, for example (step, micro-batch). Equal indices give equal batches.
            ahead: index of the next batch, which can be read ahead; None for no next batch.

        Returns:
            int64 ids (B, T) and target ids (B, T), shifted by one position; on the CPU.
        """

    def first_held_back(self) -> Tensor:
        """The first id of the validation part: int64 (1,). Generated samples start with it."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A tokenized text in memory.

    Attributes:
        train_N: token ids of the training part, the first 90 %; uint8 or int32, on the CPU.
        val_N: token ids of the validation part, the last 10 %.
        tokenizer: the tokenizer of the text.
        sha256: SHA-256 of the text in hex. A resumed run compares it.
        source: description for messages.
    """

    train_N: Tensor
    val_N: Tensor
    tokenizer: Tokenizer
    sha256: str
    source: str

    @property
    def num_train(self) -> int:
        """How many there are to learn from."""
        return len(self.train_N)

    @property
    def num_val(self) -> int:
        """How many are held back."""
        return len(self.val_N)

    def batch(
        self,
        split: str,
        *,
        batch: int,
        seq: int,
        seed: int,
        index: tuple[int, ...],
        ahead: tuple[int, ...] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `Tokens`."""
        tokens_N = self.train_N if split == "train" else self.val_N
        start_B1 = draw_starts(len(tokens_N), split, batch=batch, seq=seq, seed=seed, index=index)
        return inputs_and_targets(tokens_N[start_B1 + torch.arange(seq + 1)])

    def first_held_back(self) -> Tensor:
        """See `Tokens`."""
        return self.val_N[:1].long()


def draw_starts(num_tokens: int, split: str, *, batch: int, seq: int, seed: int, index: tuple[int, ...]) -> Tensor:
    """Start positions of a batch's sequences in their part: int64 (B, 1). See `Tokens.batch`."""
    generator = torch.Generator().manual_seed(derive_seed(seed, split, *index))
    return torch.randint(num_tokens - seq, (batch, 1), generator=generator)


def inputs_and_targets(window_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Splits ids (B, T + 1) of any integer dtype into int64 inputs (B, T) and int64 targets (B, T)."""
    window_BT = window_BT.long()
    return window_BT[:, :-1].contiguous(), window_BT[:, 1:].contiguous()


def num_to_learn_from(num_tokens: int) -> int:
    """Number of tokens of the training part, the first 90 %."""
    return num_tokens - int(num_tokens * _VALIDATION_SHARE)


def require_enough(source: str, *, num_train: int, num_val: int, batch: int, seq: int) -> None:
    """Raises DataError if the training part is shorter than a batch, or the validation part than a sequence."""
    if num_train <= batch * seq:
        raise DataError(
            f"The training part (the first 90 %) of {source} has {num_train} tokens, but --batch {batch} x "
            f"--seq {seq} needs at least {batch * seq + 1}: give --data more text, or lower --batch or --seq."
        )
    if num_val <= seq:
        raise DataError(
            f"The validation part (the last 10 %) of {source} has {num_val} tokens, but --seq {seq} "
            f"needs at least {seq + 1}: give --data more text, or lower --seq."
        )


def load_corpus(path: str | None, *, tokenizer: str, batch: int, seq: int) -> Corpus:
    """Reads and tokenizes a text, and splits it.

    Args:
        path: a file, or a folder whose files are joined in the order of their names; None for the first 8 MiB of the
            source of Python's standard library.
        tokenizer: "bytes" or "chars".
        batch: sequences per batch. The training part must have at least one batch.
        seq: tokens per sequence. The validation part must have at least one sequence.

    Raises:
        DataError: the text is missing, empty, cannot be read, is not UTF-8 (for "chars"), or is too short.
    """
    files = _standard_library() if path is None else files_of(user_path(path, name="--data"))
    source = "the Python standard library's source" if path is None else str(path)
    cap_bytes = _DEFAULT_TEXT_CAP_BYTES if path is None else None
    text = _join(files, cap_bytes, must_decode=tokenizer == "chars", skip_undecodable=path is None)
    if not text:
        raise DataError(
            f"{source} holds 0 bytes of text in {len(files)} files: give --data a file or folder with text."
        )
    made = make_tokenizer(tokenizer, text)
    ids_N = made.encode(text)
    num_train = num_to_learn_from(len(ids_N))
    require_enough(source, num_train=num_train, num_val=len(ids_N) - num_train, batch=batch, seq=seq)
    return Corpus(
        train_N=ids_N[:num_train],
        val_N=ids_N[num_train:],
        tokenizer=made,
        sha256=hashlib.sha256(text).hexdigest(),
        source=f"{source}, {format_size(len(text))}",
    )


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in root.rglob("*.py") if not _NOT_LIBRARY.intersection(file.relative_to(root).parts)]
    if not files:
        raise DataError(
            f"This Python's standard library has no source in {root}: give --data a file or folder of text."
        )
    return sorted(files, key=lambda file: file.relative_to(root).as_posix())


def files_of(path: Path, *, asked: str = "--data") -> list[Path]:
    """Returns a file, or all files in a folder and its subfolders, sorted by name, without hidden ones.

    Args:
        path: path of the file or folder.
        asked: name of the option, for messages.

    Raises:
        DataError: it does not exist, cannot be listed, or is a folder without files.
    """
    if path.is_dir():
        if not os.access(path, os.R_OK | os.X_OK):
            raise DataError(f"{asked} {path} cannot be listed: this user has no permission.")
        files = [file for file in path.rglob("*") if file.is_file() and not file.name.startswith(".")]
        if not files:
            raise DataError(f"{asked} {path} is a folder without files: give a text file, or a folder with text files.")
        return sorted(files, key=lambda file: file.relative_to(path).as_posix())
    if not path.exists():
        raise DataError(
            f"{asked} {path} does not exist (looked in {Path.cwd()}): give a text file or a folder of them."
        )
    return [path]


def _join(files: list[Path], cap_bytes: int | None, *, must_decode: bool, skip_undecodable: bool) -> bytes:
    parts: list[bytes] = []
    total_bytes = 0
    for file in files:
        if cap_bytes is not None and total_bytes >= cap_bytes:
            break
        try:
            part = file.read_bytes()
        except OSError as error:
            raise DataError(
                f"{file} cannot be read: {error.strerror}. Make it readable, or remove it from --data."
            ) from error
        if part.startswith(MAGIC):  # otherwise its binary data would be used as text
            raise DataError(f"{file} is a volume, not text: give --data it alone, or move it out of the folder.")
        if must_decode or skip_undecodable:
            try:
                part.decode("utf-8")
            except UnicodeDecodeError as error:
                if skip_undecodable:
                    continue
                raise DataError(
                    f"{file} is not UTF-8: byte 0x{part[error.start]:02x} at offset {error.start}. "
                    "--tokenizer chars reads only UTF-8; use --tokenizer bytes, or convert the file."
                ) from error
        parts.append(part)
        total_bytes += len(part)
    return b"".join(parts)
