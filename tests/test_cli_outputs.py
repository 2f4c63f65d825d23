"""Documents that the commands write to FIFOs, full devices and standard output, and paths in a home directory."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

import forked
from torchstorm.bench import storage, timing
from torchstorm.bench.ceilings import Ceilings
from torchstorm.cli import app

TINY = "--device cpu --layers 1 --heads 1 --width 16 --batch 2 --seq 16"
PLAN = f"plan {TINY} --ram 8MiB"
TRAIN = f"train {TINY} --steps 1 --sample-chars 0 --data text --out runs"
BENCH = "bench matmul --device cpu --sizes 256x256x256 --variant reference,auto"
LEARN = "bench learn --device cpu --model gpt-nano --steps 2 --batch 1 --seq 16 --data text"
QUICKLY = """
from torchstorm.bench import timing
from torchstorm.bench.ceilings import Ceilings
from torchstorm.cli import main
timing._SECONDS_A_TIME, Ceilings.of = 0.0, lambda self, unit, dtype: 1e9
main()
"""
ALL = {"plan": PLAN, "train": TRAIN, "bench": BENCH, "learn": LEARN}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What benches find is not looked at here: each time is taken as quickly as it can be."""
    monkeypatch.setattr(timing, "_SECONDS_A_TIME", 0.0)
    monkeypatch.setattr(Ceilings, "of", lambda self, unit, dtype: 1e9)
    monkeypatch.setattr(storage, "_SIZES", (storage.MIB,))
    monkeypatch.setattr(storage, "_DEPTHS", (1,))
    monkeypatch.setattr(storage, "_TURNS", 1)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a text, and a home directory beside it."""
    (tmp_path / "work").mkdir()
    (tmp_path / "home").mkdir()
    (tmp_path / "work" / "text").write_text("a storm in a text. " * 60)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def invoke(line: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, shlex.split(line))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def is_whole(text: str | bytes) -> bool:
    """One JSON document, which has something in it."""
    return bool(json.loads(text))


@pytest.mark.parametrize("name", ALL)
def test_a_fifo_gets_one_document(name: str, place: Path) -> None:
    fifo = place / "fifo"
    os.mkfifo(fifo)
    texts: list[str] = []
    reader = threading.Thread(target=lambda: texts.append(fifo.read_text()), daemon=True)
    reader.start()
    code, _, stderr = invoke(f"{ALL[name]} --json fifo")
    assert code == 0, stderr
    reader.join(30)
    assert is_whole(texts[0])
    assert fifo.is_fifo()


@pytest.mark.parametrize("name", ALL)
def test_a_full_device_is_one_line_and_exit_code_2(name: str) -> None:
    code, _, stderr = invoke(f"{ALL[name]} --json /dev/full")
    assert code == 2
    assert stderr.startswith("StorageError: --json /dev/full cannot be written: No space left on device."), stderr
    assert stderr.count("\n") == 1
    assert Path("/dev/full").is_char_device()


@pytest.mark.parametrize(
    ("line", "name", "kind"),
    [(PLAN, "-", "pipe"), (TRAIN, "/dev/stdout", "file"), (BENCH, "/dev/fd/1", "file")],
)
def test_standard_output_has_the_document_and_nothing_else(line: str, name: str, kind: str, place: Path) -> None:
    # One from its very start; to what the others print, it does not matter how they start, or how exact times are.
    run, program = (subprocess.run, ["-m", "torchstorm"]) if name == "-" else (forked.run, ["-c", QUICKLY])
    with (place / "out").open("wb") as out:
        done = run(
            [sys.executable, "-W", "error", *program, *shlex.split(line), "--json", name],
            stdout=out if kind == "file" else subprocess.PIPE,
            stderr=subprocess.PIPE,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert is_whole((place / "out").read_bytes() if kind == "file" else done.stdout)
    assert done.stderr  # what else is on standard output


def test_a_picture_goes_to_standard_output(place: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    code, stdout, stderr = invoke(f"{PLAN} --curve - --json curve.json")
    assert (code, stdout) == (0, "")
    assert "curve: /dev/stdout" in stderr
    assert capfdbinary.readouterr().out.startswith(b"\x89PNG")
    assert is_whole((place / "curve.json").read_text())


@pytest.mark.parametrize("name", ["plan", "bench", "learn"])
@pytest.mark.parametrize(
    ("output", "said"), [("folder", "it is a folder"), ("missing/a.json", "No such file or directory")]
)
def test_what_cannot_be_written_is_told_before_the_work(name: str, output: str, said: str, place: Path) -> None:
    (place / "folder").mkdir()
    code, stdout, stderr = invoke(f"{ALL[name]} --json {output}")
    assert (code, stdout) == (2, "")
    assert stderr.startswith(f"StorageError: --json {output} cannot be written: {said}.")
    assert stderr.count("\n") == 1


def test_a_home_directory_may_stand_behind_the_equals_sign_of_every_option(place: Path) -> None:
    home = place.parent / "home"
    (home / "text").write_text("a storm in a text. " * 60)
    for line in (
        "pack ~/text ~/text.storm --seq 16",
        f"{PLAN} --disk=~/spill:1GiB --json=~/plan.json",
        f"{PLAN} --disk=~/spill:1GiB --curve=~/curve.png",
        f"train {TINY} --steps 1 --sample-chars 0 --data=~/text.storm --out=~/runs --disk=~/spill:1GiB --ram 8MiB "
        "--json=~/run.json",
        "train --resume=~/runs",
        f"{BENCH} --json=~/bench.json --plot=~/bench.png",
        LEARN.replace("--data text", "--data=~/text") + " --json=~/learn.json --png=~/learn.png",
        "bench chunks --device cpu --json=~/chunks.json",
        "bench storage --directory=~ --size 64MiB --seconds 0.01 --pattern read --json=~/storage.json",
        "doctor --directory=~",
    ):
        code, stdout, stderr = invoke(line)
        assert code == 0, (line, stdout, stderr)
    made = {path.name for path in home.iterdir() if not path.name.startswith(".")}
    documents = {"plan.json", "run.json", "bench.json", "learn.json", "chunks.json", "storage.json"}
    assert made == {"text", "text.storm", "spill", "runs", "curve.png", "bench.png", "learn.png"} | documents
    for name in documents:
        assert is_whole((home / name).read_text())
    assert [path.name for path in place.iterdir()] == ["text"]


def test_a_volume_does_not_replace_a_fifo(place: Path) -> None:
    os.mkfifo(place / "a.storm")
    code, _, stderr = invoke("pack text a.storm --replace --seq 16")
    assert code == 2
    assert "a.storm is a device or FIFO, and a volume takes a file" in stderr
    assert (place / "a.storm").is_fifo()
