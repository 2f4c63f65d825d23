"""train/texts.py: the ids that `load_corpus` gives, without the text in memory."""

import os
from pathlib import Path

import pytest
import torch

from torchstorm.errors import DataError
from torchstorm.train import texts
from torchstorm.train.data import files_of, load_corpus
from torchstorm.train.texts import Texts, size_of


def ignore(nbytes: int) -> None:
    """Where nobody asks how much was read."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Characters of one to four bytes, in files of which one is empty."""
    place = tmp_path / "texts"
    place.mkdir()
    for name, text in (("b", "naïve 日本 🌩 " * 70), ("a", "storm\n" * 90), ("c", ""), ("d", "é")):
        (place / f"{name}.txt").write_text(text)
    return place


@pytest.mark.parametrize("tokenizer", ["bytes", "chars"])
@pytest.mark.parametrize("at_once", [1, 3, 64, 2**20])
def test_the_ids_are_those_of_the_text_in_memory_wherever_it_is_cut(
    folder: Path, tokenizer: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "_READ_BYTES", at_once)
    corpus = load_corpus(str(folder), tokenizer=tokenizer, batch=2, seq=8)
    told: list[int] = []
    found = Texts(files_of(folder), tokenizer=tokenizer, advance=told.append)
    ids = torch.cat(list(found.ids()))
    assert torch.equal(ids, torch.cat([corpus.train_N, corpus.val_N]))
    assert found.num_tokens == len(ids)
    assert found.sha256 == corpus.sha256
    assert found.tokenizer.to_json() == corpus.tokenizer.to_json()
    assert sum(told) == sum(size_of(file) for file in files_of(folder)) * (2 if tokenizer == "chars" else 1)
    assert max(told) <= at_once


@pytest.mark.parametrize("at_once", [1, 2, 5, 2**20])
@pytest.mark.parametrize(
    ("content", "offset"), [(b"caf\xe9 au lait", 3), ("é日".encode() + b"\xff", 5), ("日日".encode()[:-1], 3)]
)
def test_characters_need_utf8_and_the_first_bad_byte_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int, content: bytes, offset: int
) -> None:
    monkeypatch.setattr(texts, "_READ_BYTES", at_once)
    file = tmp_path / "a.txt"
    file.write_bytes(content)
    said = rf"a.txt is not UTF-8: byte 0x{content[offset]:02x} at offset {offset}\. .*--tokenizer bytes"
    with pytest.raises(DataError, match=said):
        Texts([file], tokenizer="chars", advance=ignore)
    assert Texts([file], tokenizer="bytes", advance=ignore).num_tokens == len(content)


@pytest.mark.parametrize("tokenizer", ["bytes", "chars"])
@pytest.mark.parametrize("after", ["storm" * 99, "storm" * 101, "storm" * 99 + "stork"])
def test_a_text_that_changes_meanwhile_is_reported(tmp_path: Path, tokenizer: str, after: str) -> None:
    file = tmp_path / "a.txt"
    file.write_text("storm" * 100)
    found = Texts([file], tokenizer=tokenizer, advance=ignore)
    file.write_text(after)
    if tokenizer == "bytes" and len(after) == 500:
        list(found.ids())  # read once only: what it is now is what counts
        return
    with pytest.raises(DataError, match=r"text changed while it was read: it had 500 ids first, .*a.txt first"):
        list(found.ids())


def test_a_text_that_has_gone_or_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    file, pipe = tmp_path / "a.txt", tmp_path / "pipe"
    file.write_text("storm")
    found = Texts([file], tokenizer="bytes", advance=ignore)
    file.unlink()
    with pytest.raises(DataError, match=r"a.txt cannot be read: No such file"):
        list(found.ids())
    with pytest.raises(DataError, match=r"a.txt cannot be read: No such file"):
        Texts([file], tokenizer="bytes", advance=ignore)
    os.mkfifo(pipe)
    with pytest.raises(DataError, match="pipe is not a regular file"):
        Texts([pipe], tokenizer="bytes", advance=ignore)
    file.touch()
    with pytest.raises(DataError, match=r"0 bytes of text in 1 files, .*a.txt first"):
        Texts([file], tokenizer="chars", advance=ignore)


def test_what_advance_raises_ends_the_reading(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("storm")

    def stop(nbytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Texts([file], tokenizer="chars", advance=stop)
