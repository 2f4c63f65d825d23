"""Training data from a volume of `torchstorm pack`. It gives the same batches as the text, without reading all of it.

It uses these kinds of the volume:

    tokens     int32 records of R consecutive ids of the text
    rest       one int32 record of the remaining ids, if there are any
    tokenizer  one uint8 record of JSON: the tokenizer, the number of ids, and the text's SHA-256

A sequence can start at any id, as in a text in memory. So a batch reads the few records around each of its sequences,
and the same seed gives the same batches as the text. Any --seq works, whatever R is.

Shape suffixes: B sequences, T ids in a sequence, R ids in a record, K records around a sequence.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from torchstorm.errors import CheckpointError, ConfigError, DataError
from torchstorm.paths import user_path
from torchstorm.sizes import format_size
from torchstorm.storage.aligned import aligned_empty
from torchstorm.storage.layout import MAGIC
from torchstorm.storage.request import Request
from torchstorm.storage.volume import Volume
from torchstorm.train.config import TrainConfig
from torchstorm.train.data import (
    Tokens,
    draw_starts,
    inputs_and_targets,
    load_corpus,
    num_to_learn_from,
    require_enough,
)
from torchstorm.train.tokenizer import Tokenizer, tokenizer_from_json

TOKENS, REST, TOKENIZER = "tokens", "rest", "tokenizer"
SUFFIX = ".storm"


class About(NamedTuple):
    """The content of the kind "tokenizer"."""

    tokenizer: Tokenizer
    num_tokens: int
    sha256: str

    def to_bytes(self) -> bytes:
        """The content as JSON. Its length depends only on the tokenizer and the number of tokens."""
        record = {
            "tokenizer": self.tokenizer.to_json(),
            "vocab_size": self.tokenizer.vocab_size,
            "num_tokens": self.num_tokens,
            "text_sha256": self.sha256,
        }
        return json.dumps(record).encode()

    @classmethod
    def of(cls, volume: Volume) -> About:
        """Reads the content from a volume.

        Raises:
            DataError: the volume has no such kind, or its content is invalid.
            StorageError: it cannot be read.
        """
        if TOKENIZER not in volume:
            raise DataError(
                f"{volume.path} has no kind {TOKENIZER!r}, which decodes its ids; it has "
                f"{', '.join(map(repr, volume)) or 'none'}. Make it with `torchstorm pack` from text."
            )
        record = volume[TOKENIZER].read(0, len(volume[TOKENIZER])).flatten().view(torch.uint8).numpy().tobytes()
        try:
            found = json.loads(record)
            return cls(tokenizer_from_json(found["tokenizer"]), int(found["num_tokens"]), str(found["text_sha256"]))
        except (ValueError, KeyError, TypeError, CheckpointError) as error:
            raise DataError(
                f"{volume.path}: kind {TOKENIZER!r} is not what `torchstorm pack` writes ({type(error).__name__}: "
                f"{error}). Pack the text again."
            ) from error


def is_volume(path: str | os.PathLike[str]) -> bool:
    """Whether a file is a volume: its name ends in .storm, or it starts with a volume's header."""
    if not os.path.isfile(path):
        return False
    if Path(path).suffix == SUFFIX:
        return True
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def packed_tokenizer(data: str | None) -> dict[str, str]:
    """The tokenizer option of a volume: {"tokenizer": its kind}; {} for other data. Raises as `About.of`."""
    if data is None or not is_volume(data := str(user_path(data, name="--data"))):
        return {}
    with Volume.open(data, read_only=True) as volume:
        return {"tokenizer": About.of(volume).tokenizer.to_json()["kind"]}


@contextmanager
def opened_data(config: TrainConfig) -> Iterator[Tokens]:
    """Opens the data of a run, and closes it at the end. Raises as `load_corpus` and `PackedCorpus` do."""
    if config.data is None or not is_volume(config.data):
        yield load_corpus(config.data, tokenizer=config.tokenizer, batch=config.batch, seq=config.seq)
        return
    with PackedCorpus(config.data, tokenizer=config.tokenizer, batch=config.batch, seq=config.seq) as packed:
        yield packed


class PackedCorpus:
    """A tokenized text in a volume; see `Tokens`.

    Args:
        path: path of a volume from `torchstorm pack`.
        tokenizer: "bytes" or "chars"; must be the volume's.
        batch: sequences per batch. The training part must have at least one batch.
        seq: tokens per sequence. The validation part must have at least one sequence.

    Raises:
        ConfigError: the volume has another tokenizer.
        DataError: its kinds are not those of a packed text, or it has too few tokens.
        StorageError: it is not a volume, or cannot be read.
    """

    def __init__(self, path: str, *, tokenizer: str, batch: int, seq: int) -> None:
        self._volume = Volume.open(path, read_only=True)
        try:
            self._begin(path, tokenizer)
            require_enough(path, num_train=self.num_train, num_val=self.num_val, batch=batch, seq=seq)
        except BaseException:
            self._volume.close()
            raise

    def _begin(self, path: str, tokenizer: str) -> None:
        if TOKENS not in self._volume:
            raise DataError(
                f"{path} has no kind {TOKENS!r} to train on; it has {', '.join(map(repr, self._volume)) or 'none'}. "
                "Give --data a volume that `torchstorm pack` created from text, or the text."
            )
        kind = self._volume[TOKENS].kind
        if kind.dtype != torch.int32 or len(kind.shape) != 1 or not kind.shape[0]:
            raise DataError(
                f"{path}: records of kind {TOKENS!r} are {kind.shape} {kind.dtype}, but a text needs (ids,) "
                "torch.int32, at least one. Create it with `torchstorm pack` from text."
            )
        self.tokenizer, num_tokens, self.sha256 = About.of(self._volume)
        packed_with = self.tokenizer.to_json()["kind"]
        if packed_with != tokenizer:
            raise ConfigError(
                f"--tokenizer={tokenizer} was given, but {path} was packed with --tokenizer {packed_with}: leave the "
                f"option out, or pack the text again with --tokenizer {tokenizer}."
            )
        self._num_records, self._record_ids = kind.length, kind.shape[0]
        self._rest_R = torch.empty(0, dtype=torch.int32)
        if REST in self._volume:
            self._rest_R = self._volume[REST].read(0, len(self._volume[REST])).flatten()
        there = self._num_records * self._record_ids + len(self._rest_R)
        if there != num_tokens or len(self._rest_R) >= self._record_ids:
            raise DataError(
                f"{path} has {there} ids, {self._num_records} records of {self._record_ids} and a rest of "
                f"{len(self._rest_R)}, but its text has {num_tokens}. Pack the text again."
            )
        self.num_train = num_to_learn_from(num_tokens)
        self.num_val = num_tokens - self.num_train
        self.source = f"{path}, {format_size(os.stat(path).st_size)}"
        self._ahead: tuple[tuple[Any, ...], _Reading] | None = None

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
        """See `Tokens`. At most one batch is read ahead.

        Raises:
            CorruptionError: a record is not what was written.
            DataError: an id is outside the tokenizer's vocabulary.
            StorageError: the disk failed.
        """
        asked = (split, batch, seq, seed, index)
        reading = None
        if self._ahead is not None and self._ahead[0] == asked:
            reading, self._ahead = self._ahead[1], None
        reading = reading or self._read(*asked)
        if ahead is not None:
            following = (split, batch, seq, seed, ahead)
            if self._ahead is None or self._ahead[0] != following:
                self._ahead = following, self._read(*following)
        window_BT = reading.window_BT()
        low, high = int(window_BT.min()), int(window_BT.max())
        if low < 0 or high >= self.tokenizer.vocab_size:
            raise DataError(
                f"{self._volume.path} has id {low if low < 0 else high}, but its tokenizer, and so the model, has "
                f"{self.tokenizer.vocab_size}, from 0 to {self.tokenizer.vocab_size - 1}. Pack the text again."
            )
        return inputs_and_targets(window_BT)

    def first_held_back(self) -> Tensor:
        """See `Tokens`."""
        return self._around(torch.tensor([[self.num_train]]), 1).window_BT()[0].long()

    def close(self) -> None:
        """Waits for running reads, and closes the volume."""
        self._volume.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, split: str, batch: int, seq: int, seed: int, index: tuple[int, ...]) -> _Reading:
        num_tokens, part_start = (self.num_train, 0) if split == "train" else (self.num_val, self.num_train)
        start_B1 = draw_starts(num_tokens, split, batch=batch, seq=seq, seed=seed, index=index)
        return self._around(start_B1 + part_start, seq + 1)

    def _around(self, start_B1: Tensor, num_ids: int) -> _Reading:
        """Starts to read the records around windows of ids."""
        size = self._record_ids
        num_around = (num_ids - 1 + size - 1) // size + 1  # the maximum: the first id is the last of its record
        nbytes = len(start_B1) * num_around * size * 4
        ids_BKR = aligned_empty(nbytes).view(torch.int32).view(len(start_B1), num_around, size)
        requests: list[tuple[str | int, int, int, Tensor | None]] = []
        for ids_KR, start in zip(ids_BKR, start_B1.flatten().tolist(), strict=True):
            first, last = start // size, (start + num_ids - 1) // size
            count = min(last + 1, self._num_records) - first
            if count > 0:
                requests.append((TOKENS, first, count, ids_KR[:count]))
            if last >= self._num_records:  # the rest follows the last record
                ids_KR[max(count, 0)][: len(self._rest_R)] = self._rest_R
        return _Reading(self._volume.read_batch(requests), ids_BKR.flatten(1), start_B1 % size, num_ids)


class _Reading(NamedTuple):
    """A running read of the records around each window of a batch."""

    request: Request
    ids_BK: Tensor
    offset_B1: Tensor
    num_ids: int

    def window_BT(self) -> Tensor:
        """Waits for the read, and returns the windows: int32 (B, T)."""
        self.request.wait()
        return self.ids_BK.gather(1, self.offset_B1 + torch.arange(self.num_ids))
