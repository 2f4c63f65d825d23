"""train/data.py: finding, reading, cutting and drawing."""

import os
import sysconfig
from pathlib import Path

import pytest
import torch

from torchstorm.errors import DataError
from torchstorm.train import data
from torchstorm.train.data import Corpus, load_corpus


def load(path: Path | None, *, tokenizer: str = "bytes", batch: int = 2, seq: int = 4) -> Corpus:
    return load_corpus(None if path is None else str(path), tokenizer=tokenizer, batch=batch, seq=seq)


def test_the_last_tenth_is_held_back(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(bytes(range(200)))
    corpus = load(file)
    assert corpus.train_N.tolist() == list(range(180))
    assert corpus.val_N.tolist() == list(range(180, 200))


def test_a_folder_is_read_in_the_order_of_its_names_without_hidden_files(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name, text in (("b.txt", "B" * 50), ("a.txt", "A" * 50), ("sub/c.txt", "C" * 50), (".hidden", "H" * 50)):
        (tmp_path / name).write_text(text)
    corpus = load(tmp_path)
    both = torch.cat([corpus.train_N, corpus.val_N]).tolist()
    assert corpus.tokenizer.decode(both) == "A" * 50 + "B" * 50 + "C" * 50


@pytest.mark.no_cover
def test_the_default_text_is_the_standard_librarys_own_source_and_the_same_each_time() -> None:
    corpus = load(None, tokenizer="chars")
    again = load(None, tokenizer="chars")
    first = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[0]
    assert corpus.tokenizer.decode(corpus.train_N[:5000].tolist()).startswith(first.read_text()[:200])
    assert corpus.sha256 == again.sha256
    assert 2**20 < len(corpus.train_N) < 16 * 2**20


def test_a_file_of_the_standard_library_that_is_no_utf8_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.py").write_bytes(b"\xff" * 100)
    (tmp_path / "b.py").write_bytes(b"x = 1\n" * 20)
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "c.py").write_bytes(b"y = 2\n" * 20)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    corpus = load(None)
    assert set(corpus.train_N.tolist()) == set(b"x = 1\n")


def test_the_default_text_stops_at_its_cap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        (tmp_path / f"{name}.py").write_text(name * 100)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(data, "_DEFAULT_TEXT_CAP_BYTES", 150)
    assert load(None).tokenizer.decode(load(None).val_N.tolist()) == "b" * 20


def test_a_python_without_its_source_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match=r"no source in .*give --data"):
        load(None)


def test_a_path_that_is_missing_is_named_with_the_folder_searched(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere.txt does not exist \(looked in "):
        load(tmp_path / "nowhere.txt")


def test_an_empty_file_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="folder without files"):
        load(tmp_path)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match="0 bytes of text in 1 files"):
        load(tmp_path / "empty.txt")
    with pytest.raises(DataError, match="0 bytes of text in 1 files"):
        load(tmp_path)


def test_a_file_that_cannot_be_read_is_refused_with_the_systems_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"x" * 1000)
    file.chmod(0)
    if os.access(file, os.R_OK):  # root reads everything, so the refusal has to be made

        def refuse(self: Path) -> bytes:
            raise PermissionError(13, "Permission denied", str(self))

        monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(DataError, match="text cannot be read: Permission denied"):
        load(file)


def test_a_folder_that_cannot_be_listed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(DataError, match="cannot be listed"):
        load(tmp_path)


def test_characters_need_utf8_and_the_first_bad_byte_is_named(tmp_path: Path) -> None:
    file = tmp_path / "latin1.txt"
    file.write_bytes(b"caf\xe9 " * 100)
    with pytest.raises(DataError, match=r"latin1.txt is not UTF-8: byte 0xe9 at offset 3.*--tokenizer bytes"):
        load(file, tokenizer="chars")
    assert len(load(file).train_N) == 450


def test_text_shorter_than_one_training_batch_is_refused_with_both_lengths(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"x" * 111)
    with pytest.raises(
        DataError, match=r"training part .* has 100 tokens, but --batch 20 x --seq 5 needs at least 101"
    ):
        load(file, batch=20, seq=5)
    load(file, batch=11, seq=9)


def test_text_whose_held_back_part_is_shorter_than_one_sequence_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"x" * 100)
    with pytest.raises(DataError, match=r"validation part .* has 10 tokens, but --seq 10 needs at least 11"):
        load(file, batch=1, seq=10)
    load(file, batch=1, seq=9)


def test_targets_are_the_tokens_one_place_on(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(bytes(range(250)))
    x_BT, y_BT = load(file).batch("train", batch=64, seq=7, seed=0, index=(0, 0))
    assert x_BT.shape == y_BT.shape == (64, 7)
    assert x_BT.dtype == y_BT.dtype == torch.int64
    assert torch.equal(y_BT, x_BT + 1)
    assert torch.equal(x_BT[:, 1:], x_BT[:, :-1] + 1)


def test_every_place_is_drawn_and_none_outside_its_part(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(bytes(range(250)))
    corpus = load(file, seq=24)
    for split, low, high in (("train", 0, 225), ("val", 225, 250)):
        x_BT, y_BT = corpus.batch(split, batch=5000, seq=24, seed=0, index=(0,))
        assert set(torch.cat([x_BT, y_BT]).flatten().tolist()) == set(range(low, high))


def test_a_batch_depends_on_the_seed_the_split_and_its_index_alone(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(os.urandom(5000))
    corpus = load(file)

    def draw(split: str, seed: int, index: tuple[int, ...]) -> list[int]:
        torch.rand(3)  # the global generator is not asked
        return corpus.batch(split, batch=3, seq=4, seed=seed, index=index)[0].flatten().tolist()

    assert draw("train", 0, (4, 0)) == draw("train", 0, (4, 0))
    others = [("train", 1, (4, 0)), ("train", 0, (5, 0)), ("train", 0, (4, 1)), ("val", 0, (4, 0))]
    assert len({tuple(draw("train", 0, (4, 0))), *(tuple(draw(*other)) for other in others)}) == 5
