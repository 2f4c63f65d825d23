"""train/pack.py: a volume holds its sources to the byte, or they are refused."""

import io
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

import forked
from torchstorm.errors import ConfigError, DataError, StorageError, TorchstormError
from torchstorm.storage.volume import Volume
from torchstorm.train import pack as pack_module
from torchstorm.train.pack import pack
from torchstorm.train.texts import Texts

QUIET = Console(quiet=True)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "a.storm"


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few kilobytes are many pieces."""
    monkeypatch.setattr(pack_module, "_PIECE_BYTES", 8192)


def save(path: Path, array: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    np.save(path, array)
    return path


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def numbers(*shape: int, dtype: str = "float32") -> np.ndarray[Any, Any]:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(dtype)


# ---------------------------------------------------------------------- text


@pytest.mark.parametrize("num_bytes", [33, 34, 65, 33 * 400, 33 * 400 + 7])
@pytest.mark.usefixtures("small_pieces")
def test_the_records_and_the_rest_are_the_text_to_the_byte(tmp_path: Path, out: Path, num_bytes: int) -> None:
    text = random.Random(num_bytes).randbytes(num_bytes)
    (tmp_path / "text").write_bytes(text)
    packed = pack([tmp_path / "text"], out, seq=32, console=QUIET)
    with Volume.open(out, read_only=True) as volume:
        records = volume["tokens"]
        assert records.kind.shape == (33,)
        assert records.kind.dtype == torch.int32
        rest = volume["rest"][0].tolist() if "rest" in volume else []
        assert bytes(records.read(0, len(records)).flatten().tolist() + rest) == text
        assert len(rest) == num_bytes % 33
        assert list(volume) == ["tokens", *(["rest"] if rest else []), "tokenizer"]
        for name in volume:
            assert volume[name].check().num_intact == len(volume[name])
    assert packed.file_bytes == out.stat().st_size
    assert names_in(tmp_path) == ["a.storm", "text"]


def test_folders_and_files_are_one_text_in_their_order(tmp_path: Path, out: Path) -> None:
    (tmp_path / "f" / "sub").mkdir(parents=True)
    for name, text in (("f/b", "B"), ("f/a", "A"), ("f/sub/c", "C"), ("f/.hidden", "H"), ("z", "Z")):
        (tmp_path / name).write_text(text * 5)
    pack([tmp_path / "z", tmp_path / "f", tmp_path / "f" / "a"], out, seq=24, console=QUIET)
    with Volume.open(out) as volume:
        assert bytes(volume["tokens"][0].tolist()) == b"ZZZZZAAAAABBBBBCCCCCAAAAA"


def test_the_same_sources_give_the_same_bytes(tmp_path: Path, out: Path) -> None:
    for name in ("b", "a", "c"):
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / "texts" / name).write_text(f"été {name} " * 500)
    pack([tmp_path / "texts"], out, seq=16, tokenizer="chars", console=QUIET)
    first = out.read_bytes()
    pack([tmp_path / "texts"], out, seq=16, tokenizer="chars", replace=True, console=QUIET)
    assert out.read_bytes() == first


def test_a_text_shorter_than_a_record_is_refused(tmp_path: Path, out: Path) -> None:
    (tmp_path / "text").write_text("storm")
    with pytest.raises(DataError, match="text has 5 tokens, but a record needs 6, one more than --seq 5"):
        pack([tmp_path / "text"], out, seq=5, console=QUIET)
    pack([tmp_path / "text"], out, seq=4, console=QUIET)


# ---------------------------------------------------------------------- arrays


@pytest.mark.parametrize(
    "array",
    [
        numbers(1000, 3, 5),
        numbers(5000, dtype="float64"),
        numbers(3, 40, 40),
        np.asfortranarray(numbers(700, 4, 3)),
        numbers(700, 4).astype(">f4"),
        numbers(700, 4).astype("float16"),
        numbers(700, 4).astype("complex64"),
        numbers(9000, 2) > 0,
        numbers(300, 7).astype("uint16"),
    ],
    ids=lambda array: f"{array.dtype.str}{array.shape}",
)
@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.usefixtures("small_pieces")
def test_an_arrays_records_come_back(tmp_path: Path, out: Path, array: Any, checks: bool) -> None:
    pack([save(tmp_path / "x.npy", array)], out, checks=checks, console=QUIET)
    with Volume.open(out, read_only=True) as volume:
        assert list(volume) == ["data"]
        found = volume["data"].read(0, len(array)).numpy()
        assert (volume["data"].checks is not None) == checks
    assert found.dtype == array.dtype.newbyteorder("=")
    assert found.tobytes() == array.astype(found.dtype).tobytes("C")


def test_arrays_that_are_alike_are_joined_under_the_name_that_is_given(tmp_path: Path, out: Path) -> None:
    parts = [numbers(n, 3) for n in (5, 1, 8)]
    for number, part in enumerate(parts):
        save(tmp_path / "parts" / f"{number}.npy", part.astype(">f4") if number else part)
    pack([tmp_path / "parts"], out, records="images", console=QUIET)
    with Volume.open(out) as volume:
        assert list(volume) == ["images"]
        assert np.array_equal(volume["images"].read(0, 14).numpy(), np.concatenate(parts))


def test_arrays_no_two_of_which_are_alike_are_kinds_called_as_their_files(tmp_path: Path, out: Path) -> None:
    images, labels = numbers(6, 2, 2), np.arange(7)
    sources = [save(tmp_path / "x" / "images.npy", images), save(tmp_path / "y" / "labels.npy", labels)]
    pack(sources, out, console=QUIET)
    with Volume.open(out) as volume:
        assert list(volume) == ["images", "labels"]
        assert np.array_equal(volume["images"].read(0, 6).numpy(), images)
        assert np.array_equal(volume["labels"].read(0, 7).numpy(), labels)


def test_what_cannot_be_told_to_be_one_kind_is_refused_with_both_files(tmp_path: Path, out: Path) -> None:
    one = save(tmp_path / "one.npy", numbers(3, 4))
    two = save(tmp_path / "two.npy", numbers(3, 5))
    also = save(tmp_path / "also.npy", numbers(9, 4))
    differ = r"records of .*one.npy are \(4,\) torch.float32, those of .*two.npy \(5,\) torch.float32"
    with pytest.raises(ConfigError, match=rf"--records x names one kind, but {differ}"):
        pack([one, two], out, records="x", console=QUIET)
    with pytest.raises(DataError, match=rf"{differ}, and .*one.npy and .*also.npy are equal"):
        pack([one, two, also], out, console=QUIET)
    same_name = save(tmp_path / "sub" / "one.npy", numbers(3, 5))
    with pytest.raises(DataError, match="have the same name"):
        pack([one, same_name], out, console=QUIET)
    assert not out.exists()


# ---------------------------------------------------------------------- what does not go together


def test_options_and_sources_that_do_not_go_together_are_refused(tmp_path: Path, out: Path) -> None:
    array, text = save(tmp_path / "x.npy", numbers(3)), tmp_path / "t.txt"
    text.write_text("storm " * 100)
    refused: list[tuple[list[Path], dict[str, Any], type[TorchstormError], str]] = [
        ([text, array], {}, DataError, r"x.npy is an array and .*t.txt is text: pack them into separate volumes"),
        ([array, text], {}, DataError, r"x.npy is an array and .*t.txt is text"),
        ([array], {"seq": 4}, ConfigError, r"--seq is for text, but .*x.npy is an array"),
        ([array], {"tokenizer": "chars"}, ConfigError, r"--tokenizer is for text, but .*x.npy"),
        ([text], {"records": "x"}, ConfigError, r"--records x is for arrays, but .*t.txt is text"),
        ([text], {"tokenizer": "bpe"}, ConfigError, r"--tokenizer='bpe', but it must be one of bytes, chars"),
        ([text], {"seq": 0}, ConfigError, r"--seq=0, but it must be at least 1"),
        ([tmp_path / "no"], {}, DataError, r"SOURCE .*no does not exist \(looked in "),
        ([array], {"records": ""}, ConfigError, r"the name of a kind must be a text that is not empty"),
    ]
    for sources, options, error, said in refused:
        with pytest.raises(error, match=said):
            pack(sources, out, **options, console=QUIET)
    assert names_in(tmp_path) == ["t.txt", "x.npy"]


def test_a_volume_is_no_source_and_what_is_replaced_is_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    folder.mkdir()
    (folder / "text").write_text("storm " * 100)
    pack([folder], folder / "a.storm", seq=8, console=QUIET)
    first = (folder / "a.storm").read_bytes()
    pack([folder], folder / "a.storm", seq=8, replace=True, console=QUIET)
    assert (folder / "a.storm").read_bytes() == first
    with pytest.raises(DataError, match=r"a.storm is a volume, neither text nor an array"):
        pack([folder], tmp_path / "b.storm", console=QUIET)
    with pytest.raises(DataError, match=r"SOURCE has no files other than .*a.storm itself"):
        pack([folder / "a.storm"], folder / "a.storm", replace=True, console=QUIET)
    assert (folder / "a.storm").read_bytes() == first


def test_a_place_that_cannot_be_is_refused(tmp_path: Path, out: Path) -> None:
    text = tmp_path / "t.txt"
    text.write_text("storm " * 100)
    with pytest.raises(
        ConfigError, match=r"t.txt is the last argument, so it is the volume to create, but it must end in .storm"
    ):
        pack([text], text, replace=True, console=QUIET)
    with pytest.raises(StorageError, match=r"a.storm cannot be created: .*missing is not a folder"):
        pack([text], tmp_path / "missing" / "a.storm", console=QUIET)
    out.mkdir()
    with pytest.raises(StorageError, match=r"a.storm is a folder: give the file to create"):
        pack([text], out, replace=True, console=QUIET)
    assert text.read_text() == "storm " * 100


# ---------------------------------------------------------------------- memory, and what is printed


@pytest.mark.parametrize("what", ["array", "bytes", "chars"])
def test_memory_does_not_grow_with_the_input(tmp_path: Path, out: Path, what: str) -> None:
    if what == "array":
        source = tmp_path / "x.npy"
        np.lib.format.open_memmap(source, mode="w+", dtype=np.uint8, shape=(3200, 65536)).flush()
    else:
        source = tmp_path / "x.txt"
        source.write_text("storm é " * (40 * 2**20 // 9))
    script = f"""
import re
from pathlib import Path
from rich.console import Console
from torchstorm.train.pack import pack
options = {{}} if {what!r} == "array" else {{"tokenizer": {what!r}}}
def peak_kib():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
quiet = Console(quiet=True)
Path({str(tmp_path / "small.txt")!r}).write_text("storm" * 1000)
pack([Path({str(tmp_path / "small.txt")!r})], Path({str(tmp_path / "small.storm")!r}), tokenizer="chars", console=quiet)
before = peak_kib()
pack([Path({str(source)!r})], Path({str(out)!r}), **options, console=quiet)
print(peak_kib() - before)
"""
    ran = forked.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert out.stat().st_size > 140 * 2**20
    assert int(ran.stdout) * 1024 < 64 * 2**20


def test_it_says_what_it_made_and_of_what_speed(tmp_path: Path, out: Path) -> None:
    (tmp_path / "text").write_text("storm " * 1000)
    console = Console(file=io.StringIO(), width=40)
    pack([tmp_path / "text"], out, seq=63, console=console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[0].startswith(f"{out}: ")
    assert lines[0].endswith(" MB/s")
    assert lines[1:3] == [
        "  tokens: 93 x (64,) int32, 23.25 KiB (23808 bytes)",
        "  rest: 1 x (48,) int32, 192 B (192 bytes)",
    ]
    assert lines[4] == "6,000 tokens, with a vocabulary of 256 (--tokenizer bytes)."
    assert lines[5].startswith("The last 48 of them do not fill a record of 64: they are kind 'rest'")
    assert len(lines) == 6


def test_on_a_terminal_there_is_a_bar_that_ends_full(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").write_text("storm " * 1000)
    told: list[int] = []
    monkeypatch.setattr(
        pack_module,
        "Texts",
        lambda *args, advance, **kw: Texts(*args, advance=lambda n: (told.append(n), advance(n))[1], **kw),
    )
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    pack([tmp_path / "text"], out, seq=63, tokenizer="chars", console=console)
    assert "12.0/12.0 kB" in console.file.getvalue()  # type: ignore[attr-defined]
    assert sum(told) == 12_000, "counted once, encoded once"
