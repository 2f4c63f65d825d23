"""The bench of losses: models learn from the same tokens, and one that stays behind is told."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from torchstorm.bench import learn
from torchstorm.cli import app
from torchstorm.errors import ConfigError


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(" ".join(random.Random(0).choices(["storm", "tensor", "budget", "tier", "and"], k=2000)))
    return file


def run(text_file: Path, **options: Any) -> tuple[bool, str]:
    said = io.StringIO()
    given: dict[str, Any] = {
        "model_names": "gpt-nano,xlstm-nano",
        "steps": 4,
        "batch": 2,
        "seq": 32,
        "picture": None,
        "json_path": None,
        **options,
    }
    near = learn.bench_learn("cpu", data=str(text_file), console=Console(file=said, width=200), **given)
    return near, said.getvalue()


@pytest.mark.no_cover
def test_losses_are_compared_written_and_drawn(text_file: Path, tmp_path: Path) -> None:
    file, picture = tmp_path / "learn.json", tmp_path / "learn.png"
    near, said = run(text_file, json_path=file, picture=picture)
    record = json.loads(file.read_text())
    gpt, xlstm = record["runs"]
    assert [gpt["model"], xlstm["model"]] == ["gpt-nano", "xlstm-nano"]
    assert all(len(one["losses"]) == 4 and one["val_losses"][-1][0] == 4 for one in (gpt, xlstm))
    assert gpt["above"] == 0
    assert xlstm["above"] == pytest.approx(xlstm["val_losses"][-1][1] / gpt["val_losses"][-1][1] - 1)
    assert near == xlstm["near"]
    assert record["tokens"] == 4 * 2 * 32
    assert record["config"]["seq"] == 32
    assert record["torch"]
    assert len(record["sources"]) == 12
    assert "xlstm-nano" in said
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_model_that_stays_behind_fails(text_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learn, "MOST_ABOVE", -0.9)
    near, said = run(text_file)
    assert not near
    assert "FAILS" in said
    options = ["--device", "cpu", "--steps", "2", "--batch", "2", "--seq", "32", "--data", str(text_file)]
    result = CliRunner().invoke(app, ["bench", "learn", *options])
    assert result.exit_code == 1, result.output


def test_mistakes_are_told_before_anything_is_trained(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learn, "run_training", None)
    with pytest.raises(ConfigError, match=r"--model 'gpt-nano,lstm' names \['lstm'\]"):
        run(text_file, model_names="gpt-nano,lstm")
    with pytest.raises(ConfigError, match=r"--png .*'.txt' is not one of"):
        run(text_file, picture=tmp_path / "picture.txt")
