"""train/packed.py: a packed text is drawn from as the text itself is, by reading little, or refused."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from torchstorm.errors import CheckpointError, ConfigError, CorruptionError, DataError, StorageError
from torchstorm.storage.layout import Kind
from torchstorm.storage.volume import Volume
from torchstorm.train import job
from torchstorm.train.data import load_corpus
from torchstorm.train.loop import StepInfo
from torchstorm.train.pack import pack
from torchstorm.train.packed import PackedCorpus, is_volume, packed_tokenizer
from torchstorm.train.progress import Display
from torchstorm.train.stop import Stopped
from torchstorm.train.tokenizer import ByteTokenizer


@pytest.fixture
def volume(text_file: Path, tmp_path: Path, console: Console) -> Path:
    """Of records that are no multiple of the runs' sequences, with a rest."""
    out = tmp_path / "text.storm"
    pack([text_file], out, seq=40, console=console)
    return out


def opened(path: Path, *, batch: int = 4, seq: int = 32, tokenizer: str = "bytes") -> PackedCorpus:
    return PackedCorpus(str(path), tokenizer=tokenizer, batch=batch, seq=seq)


# ---------------------------------------------------------------------- the same draws


@settings(max_examples=40, deadline=None)
@given(
    num_bytes=st.integers(100, 700),
    packed_seq=st.integers(1, 60),
    seq=st.integers(1, 9),
    batch=st.integers(1, 9),
    seed=st.integers(0, 2**40),
)
@pytest.mark.no_cover
def test_the_batches_are_those_of_the_text_for_any_lengths(
    tmp_path_factory: pytest.TempPathFactory, num_bytes: int, packed_seq: int, seq: int, batch: int, seed: int
) -> None:
    place = tmp_path_factory.mktemp("packed")
    (place / "text").write_bytes(bytes(i * i % 256 for i in range(num_bytes)))
    pack([place / "text"], place / "a.storm", seq=packed_seq, console=Console(quiet=True))
    text = load_corpus(str(place / "text"), tokenizer="bytes", batch=batch, seq=seq)
    with opened(place / "a.storm", batch=batch, seq=seq) as packed:
        assert (packed.num_train, packed.num_val, packed.sha256) == (text.num_train, text.num_val, text.sha256)
        assert torch.equal(packed.first_held_back(), text.first_held_back())
        for split in ("train", "val"):
            for step in range(4):
                asked: dict[str, Any] = {"batch": batch, "seq": seq, "seed": seed, "index": (step, 0)}
                theirs = text.batch(split, **asked)
                ours = packed.batch(split, **asked, ahead=(step + 1, 0))
                for mine, other in zip(ours, theirs, strict=True):
                    assert mine.dtype == other.dtype
                    assert mine.is_contiguous()
                    assert torch.equal(mine, other)


def test_every_id_is_drawn_the_first_and_the_last_too(tmp_path: Path, console: Console) -> None:
    (tmp_path / "text").write_bytes(bytes(range(250)))
    pack([tmp_path / "text"], tmp_path / "a.storm", seq=30, console=console)
    with opened(tmp_path / "a.storm", seq=7) as packed:
        for split, low, high in (("train", 0, 225), ("val", 225, 250)):
            x_BT, y_BT = packed.batch(split, batch=3000, seq=7, seed=0, index=(0,))
            assert set(torch.cat([x_BT, y_BT]).flatten().tolist()) == set(range(low, high))


@pytest.mark.parametrize("tokenizer", ["bytes", "chars"])
def test_training_from_the_volume_gives_the_losses_of_the_text_to_the_last_bit(
    options: dict[str, Any], text_file: Path, tmp_path: Path, console: Console, tokenizer: str
) -> None:
    volume = tmp_path / "text.storm"
    pack([text_file], volume, seq=32, tokenizer=tokenizer, console=console)
    asked = {**options, "accumulate": 2, "dropout": 0.2}
    text = job.train({**asked, "tokenizer": tokenizer, "out": str(tmp_path / "text")}, console=console).run
    run = job.train({**asked, "data": str(volume), "out": str(tmp_path / "packed")}, console=console)
    assert run.config.tokenizer == tokenizer, "the volume brings it along"
    assert run.run.losses == text.losses
    assert run.run.val_losses == text.val_losses
    assert run.run.weights_sha256 == text.weights_sha256
    assert run.run.sample == text.sample


@pytest.mark.parametrize("begins_with", ["text", "volume"])
def test_a_stopped_run_goes_on_with_the_volume_to_the_losses_of_one_never_stopped(
    options: dict[str, Any],
    volume: Path,
    tmp_path: Path,
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
    begins_with: str,
) -> None:
    options |= {"dropout": 0.3, "accumulate": 2}
    whole = job.train({**options, "out": str(tmp_path / "whole")}, console=console).run
    show = Display.step

    def show_and_stop(self: Display, info: StepInfo) -> None:
        show(self, info)
        if info.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Display, "step", show_and_stop)
        with pytest.raises(Stopped, match="SIGTERM after step 3"):
            job.train({**options, **({"data": str(volume)} if begins_with == "volume" else {})}, console=console)
    resumed = job.train({"data": str(volume)}, resume=Path(options["out"]), console=console).run
    assert resumed.losses == whole.losses
    assert resumed.val_losses == whole.val_losses
    assert resumed.weights_sha256 == whole.weights_sha256


def test_resuming_with_the_volume_of_another_text_is_refused(
    options: dict[str, Any], tmp_path: Path, console: Console
) -> None:
    job.train({**options, "steps": 1}, console=console)
    (tmp_path / "other.txt").write_text("other " * 2000)
    pack([tmp_path / "other.txt"], tmp_path / "other.storm", seq=40, console=console)
    with pytest.raises(CheckpointError, match=r"The text has changed: .* SHA-256 .*other.storm"):
        job.train({"data": str(tmp_path / "other.storm")}, resume=Path(options["out"]), console=console)


@pytest.mark.no_cover
def test_a_compared_run_under_a_budget_reads_the_same_batches_twice(
    options: dict[str, Any], volume: Path, tmp_path: Path, console: Console
) -> None:
    asked = {**options, "data": str(volume)}
    free = job.train({**asked, "out": str(tmp_path / "free")}, console=console).run
    assert free.measured is not None
    ram = str(free.measured.ram_bytes * 6 // 10)
    result = job.train({**asked, "ram": ram, "disk": str(tmp_path), "compare": True}, console=console)
    assert result.bit_identical is True
    assert result.run.losses == free.losses


# ---------------------------------------------------------------------- what is read, and when


def test_the_next_batch_is_read_before_it_is_asked_for_and_only_once(
    volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    read_batch = Volume.read_batch
    monkeypatch.setattr(Volume, "read_batch", lambda self, asked: begun.append(len(asked)) or read_batch(self, asked))
    asked: dict[str, Any] = {"batch": 4, "seq": 32, "seed": 0}
    with opened(volume) as packed:
        packed.batch("train", **asked, index=(0, 0), ahead=(1, 0))
        assert len(begun) == 2
        packed.batch("val", **asked, index=(0,))
        assert len(begun) == 3, "what is read ahead stays"
        packed.batch("train", **asked, index=(1, 0), ahead=(2, 0))
        assert len(begun) == 4
        packed.batch("train", **asked, index=(2, 0))
        assert len(begun) == 4
        packed.batch("train", **asked, index=(3, 0))
        assert len(begun) == 5


def test_a_run_reads_each_of_its_batches_once_and_none_beyond(
    options: dict[str, Any], volume: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    read_batch = Volume.read_batch
    monkeypatch.setattr(Volume, "read_batch", lambda self, asked: begun.append(len(asked)) or read_batch(self, asked))
    job.train({**options, "data": str(volume), "accumulate": 2, "sample_chars": 0}, console=console)
    assert len(begun) == 6 * 2 + 3 * 2, "micro-batches, and batches of three validations"


def test_a_batch_reads_only_the_records_around_its_sequences(tmp_path: Path, console: Console) -> None:
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 20_000)
    pack([text], tmp_path / "a.storm", seq=256, console=console)
    with opened(tmp_path / "a.storm") as packed:
        before = packed._volume.info().counters
        packed.batch("train", batch=8, seq=256, seed=0, index=(0,))
        after = packed._volume.info().counters
    read = sum(getattr(after, name) - getattr(before, name) for name in ("direct_read_bytes", "buffered_read_bytes"))
    assert 8 * 257 * 4 <= read <= 8 * (2 * 257 * 4 + 2 * 4096)
    assert (tmp_path / "a.storm").stat().st_size > 20e6


# ---------------------------------------------------------------------- what is refused


def test_a_damaged_record_is_told_and_not_learnt_from(options: dict[str, Any], volume: Path, console: Console) -> None:
    with Volume.open(volume) as opened_volume:
        start = opened_volume["tokens"].kind.start_bytes
        nbytes = opened_volume["tokens"].kind.nbytes
    assert start is not None
    with open(volume, "r+b") as file:
        for offset in range(start, start + nbytes, 41 * 4):
            file.seek(offset)
            file.write(b"\x07")
    with pytest.raises(CorruptionError, match=r"kind 'tokens' of .*text.storm: record \d+ is not what was written"):
        job.train({**options, "data": str(volume)}, console=console)


def handmade(path: Path, about: Any, *, dtype: torch.dtype = torch.int32, shape: tuple[int, ...] = (11,)) -> Path:
    """A volume with 100 records of tokens, all 300, and what stands for the tokenizer."""
    record = (about if isinstance(about, bytes) else json.dumps(about).encode()) if about is not None else b""
    kinds = {"tokens": Kind(dtype=dtype, shape=shape, length=100)}
    if about is not None:
        kinds["tokenizer"] = Kind(dtype=torch.uint8, shape=(len(record),), length=1)
    with Volume.create(path, kinds) as volume:
        volume["tokens"].write(0, torch.full((100, *shape), 300).to(dtype))
        if about is not None:
            volume["tokenizer"].write(0, torch.tensor(list(record), dtype=torch.uint8))
    return path


ABOUT = {"tokenizer": {"kind": "bytes"}, "num_tokens": 1100, "text_sha256": "0" * 64}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"about": None}, r"has no kind 'tokenizer', which decodes its ids; it has 'tokens'\."),
        ({"about": b"storm"}, "kind 'tokenizer' is not what `torchstorm pack` writes"),
        ({"about": []}, "kind 'tokenizer' is not what `torchstorm pack` writes"),
        ({"about": {**ABOUT, "tokenizer": {"kind": "bpe"}}}, "kind 'tokenizer' is not what .*'bpe'"),
        (
            {"about": {**ABOUT, "num_tokens": 1200}},
            "has 1100 ids, 100 records of 11 and a rest of 0, but its text has 1200",
        ),
        (
            {"about": ABOUT, "dtype": torch.int64},
            r"are \(11,\) torch.int64, but a text needs \(ids,\) torch.int32",
        ),
        ({"about": ABOUT, "shape": (11, 2)}, r"are \(11, 2\) torch.int32, but a text needs \(ids,\)"),
    ],
)
def test_what_is_no_packed_text_is_refused_with_what_was_found(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    path = handmade(tmp_path / "a.storm", **changes)
    with pytest.raises(DataError, match=said):
        opened(path)


def test_an_id_beyond_the_vocabulary_is_refused_with_both_numbers(tmp_path: Path) -> None:
    with (
        opened(handmade(tmp_path / "a.storm", ABOUT)) as packed,
        pytest.raises(DataError, match=r"has id 300, but its tokenizer, and so the model, has 256, from 0 to 255"),
    ):
        packed.batch("train", batch=1, seq=4, seed=0, index=(0,))


def test_arrays_and_other_tokenizers_and_too_little_text_are_refused(
    options: dict[str, Any], volume: Path, tmp_path: Path, console: Console
) -> None:
    with Volume.create(tmp_path / "b.storm", {"data": Kind(dtype=torch.int32, shape=(9,), length=3)}):
        pass
    with pytest.raises(DataError, match=r"b.storm has no kind 'tokenizer'.* it has 'data'"):
        job.train({**options, "data": str(tmp_path / "b.storm")}, console=console)
    with pytest.raises(DataError, match=r"b.storm has no kind 'tokens' to train on; it has 'data'"):
        opened(tmp_path / "b.storm")
    said = r"--tokenizer=chars was given, but .*text.storm was packed with --tokenizer bytes: leave the option out"
    with pytest.raises(ConfigError, match=said):
        job.train({**options, "data": str(volume), "tokenizer": "chars"}, console=console)
    with pytest.raises(DataError, match=r"training part .* of .*text.storm has \d+ tokens, but --batch 400 x --seq 32"):
        job.train({**options, "data": str(volume), "batch": 400}, console=console)


def test_what_looks_like_a_volume_and_is_none_is_never_read_as_text(
    options: dict[str, Any], volume: Path, text_file: Path, tmp_path: Path, console: Console
) -> None:
    assert not is_volume(text_file)
    assert not is_volume(tmp_path)
    assert packed_tokenizer(None) == packed_tokenizer(str(text_file)) == {}
    renamed = volume.rename(tmp_path / "renamed")
    assert is_volume(renamed)
    assert packed_tokenizer(str(renamed)) == {"tokenizer": "bytes"}
    broken = tmp_path / "broken.storm"
    broken.write_bytes(b"\0" * 100_000)
    with pytest.raises(StorageError, match=r"broken.storm is no torchstorm volume"):
        job.train({**options, "data": str(broken)}, console=console)
    with pytest.raises(DataError, match=r"missing.storm does not exist \(looked in "):
        job.train({**options, "data": str(tmp_path / "missing.storm")}, console=console)
    folder = tmp_path / "folder"
    folder.mkdir()
    renamed.rename(folder / "a.txt")
    with pytest.raises(DataError, match=r"a.txt is a volume, not text: give --data it alone"):
        load_corpus(str(folder), tokenizer="bytes", batch=1, seq=1)


def test_a_volume_without_checks_is_trained_on_too(
    options: dict[str, Any], text_file: Path, volume: Path, tmp_path: Path, console: Console
) -> None:
    pack([text_file], tmp_path / "bare.storm", checks=False, console=console)
    with opened(tmp_path / "bare.storm") as bare, opened(volume) as checked:
        asked: dict[str, Any] = {"batch": 4, "seq": 32, "seed": 0, "index": (5, 0)}
        assert torch.equal(bare.batch("train", **asked)[0], checked.batch("train", **asked)[0])
        assert isinstance(bare.tokenizer, ByteTokenizer)
