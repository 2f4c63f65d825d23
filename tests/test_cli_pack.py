"""`torchstorm pack` as a user types it, and training from what it wrote."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import forked
from torchstorm.cli import app
from torchstorm.storage.volume import Volume

TINY = [
    *("--device=cpu", "--layers=2", "--heads=2", "--width=16", "--batch=4", "--seq=16", "--steps=3"),
    *("--val-every=0", "--sample-chars=8", "--warmup=2"),
]


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in "ba":
        (folder / f"{name}.txt").write_text(f"storm {name} tensor budget " * 90)
    return folder


def result_of(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())
    return {name: found[name] for name in ("losses", "val_losses", "weights_sha256")}


def test_a_folder_of_text_is_packed_and_trained_on_as_the_text_would_be(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.storm"
    code, stdout, stderr = invoke("pack", str(texts), str(out), "--seq=16", "--tokenizer=chars")
    assert (code, stderr) == (0, "")
    assert f"{out}: " in stdout
    assert "tokens: " in stdout
    for name, data in (("packed", [str(out)]), ("text", [str(texts), "--tokenizer=chars"])):
        arguments = [*TINY, "--data", *data, "--out", str(tmp_path / name), "--json", str(tmp_path / f"{name}.json")]
        code, _, stderr = invoke("train", *arguments)
        assert (code, stderr) == (0, "")
    assert result_of(tmp_path / "packed.json") == result_of(tmp_path / "text.json")


def test_arrays_are_packed_under_the_name_that_is_given(tmp_path: Path) -> None:
    array, out = np.arange(600, dtype=np.uint16).reshape(200, 3), tmp_path / "a.storm"
    np.save(tmp_path / "x.npy", array)
    asked = ("pack", str(tmp_path / "x.npy"), str(out), "--records", "rows", "--no-checks")
    code, stdout, stderr = invoke(*asked)
    assert (code, stderr) == (0, "")
    assert "rows: 200 x (3,) uint16, 1.17 KiB (1200 bytes)" in stdout
    with Volume.open(out) as volume:
        assert volume["rows"].read(0, 200).numpy().tobytes() == array.tobytes()
        assert volume["rows"].checks is None
    code, _, stderr = invoke(*asked)
    assert code == 2
    assert stderr.startswith(f"StorageError: {out} exists. Give another name, or use --replace")
    assert invoke(*asked, "--replace")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["/nowhere", "a.storm"], "DataError: SOURCE /nowhere does not exist"),
        (["{texts}", "a.bin"], "ConfigError: a.bin is the last argument, so it is the volume to create"),
        (["{texts}", "a.storm", "--seq=9999"], "DataError: The text has 3960 tokens, but a record needs 10000"),
        (["{texts}", "a.storm", "--tokenizer=bpe"], "ConfigError: --tokenizer='bpe', but it must be one of"),
        (["{texts}", "a.storm", "--records=x"], "ConfigError: --records x is for arrays"),
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_exit_code_2(
    texts: Path, tmp_path: Path, arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, stdout, stderr = invoke("pack", *(argument.format(texts=texts) for argument in arguments))
    assert (code, stdout, stderr.count("\n")) == (2, "", 1)
    assert stderr.startswith(said), stderr
    assert os.listdir(tmp_path) == ["texts"]


SLOWLY = """
import time
from torchstorm.cli import main
from torchstorm.storage.records import Records
write_async = Records.write_async
def slowly(self, i, tensor):
    time.sleep(0.1)
    return write_async(self, i, tensor)
Records.write_async = slowly
main()
"""


@pytest.mark.parametrize(("signum", "exit_code", "existed"), [(signal.SIGINT, 130, False), (signal.SIGTERM, 143, True)])
def test_a_signal_leaves_what_was_there_and_nothing_else(
    tmp_path: Path, signum: signal.Signals, exit_code: int, existed: bool
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    out = place / "a.storm"
    if existed:
        out.write_bytes(b"what was there")
    np.lib.format.open_memmap(tmp_path / "x.npy", mode="w+", dtype=np.uint8, shape=(6400, 65536)).flush()
    command = [sys.executable, "-c", SLOWLY, "pack", str(tmp_path / "x.npy"), str(out), "--replace"]
    process = forked.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline_s = time.monotonic() + 60
    beside = place / ".a.storm.packing"
    while not (beside.exists() and beside.stat().st_blocks * 512 > 8e6):  # at work
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    process.send_signal(signum)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (exit_code, "")
    assert stdout == f"Stopped by {signum.name} before {out} was complete, so it was not created.\n"
    assert os.listdir(place) == (["a.storm"] if existed else [])
    assert not existed or out.read_bytes() == b"what was there"
