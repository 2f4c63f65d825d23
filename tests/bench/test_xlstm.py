"""The bench of xLSTM beside GPT: its small case runs the same code, and the recorded one is what was asked for."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from torchstorm.bench import xlstm
from torchstorm.bench.rows import Row
from torchstorm.errors import ConfigError
from torchstorm.models.families import make_model


def run(tmp_path: Path, **options: Any) -> tuple[list[xlstm.Speed], str]:
    text = io.StringIO()
    given = {"disk": str(tmp_path), "steps": 1, "json_path": None, **options}
    return xlstm.bench_xlstm("cpu", console=Console(file=text, width=500), **given), text.getvalue()


def test_both_families_are_checked_and_timed_with_everything_and_within_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    file = tmp_path / "xlstm.json"
    found, said = run(tmp_path, json_path=file, shape_names="64x4")
    record = json.loads(file.read_text())
    rows = [Row(**row) for row in record["rows"]]
    assert [row.shape for row in rows] == ["gpt-nano 64x4"] * 3 + ["xlstm-nano 64x4"] * 3
    assert [row.way for row in rows] == ["unlimited", "session", "unlimited-again"] * 2
    assert all(row.checked for row in rows), [row.note for row in rows]
    for unlimited, session in (rows[:2], rows[3:5]):
        assert session.budget_gib == pytest.approx(unlimited.peak_gib / 2)
        assert session.peak_gib <= session.budget_gib
    assert [speed.way for speed in found] == ["unlimited", "session"] * 2
    assert found[0].tokens_per_s == pytest.approx(256 / rows[0].step_s)
    assert found[2].over_gpt == pytest.approx(found[2].tokens_per_s / found[0].tokens_per_s)
    assert record["speeds"] == [vars(speed) for speed in found]
    assert "x the GPT" in said
    # Another context of the same file keeps these rows.
    monkeypatch.setattr(xlstm, "SMALL", xlstm.SMALL[:3])
    again, _ = run(tmp_path, json_path=file, shape_names="256x1")
    assert [speed.shape for speed in again] == ["gpt-nano 256x1"] * 2
    assert len(json.loads(file.read_text())["speeds"]) == 6


def test_the_recorded_models_are_of_the_size_that_is_asked_for() -> None:
    assert [case.shape for case in xlstm.ON_A_GPU] == [
        *("gpt2-medium 8192x4", "xlstm-350m 8192x4", "gpt2-medium 32768x1", "xlstm-350m 32768x1")
    ]
    for case in xlstm.ON_A_GPU:
        with torch.device("meta"):
            model = make_model(case.config())
        assert model.num_params(embeddings=False) == pytest.approx(303e6, rel=0.01)
        assert case.tokens == 32768


def test_rows_without_a_time_have_no_speed_and_nothing_is_set_beside_them() -> None:
    gpt, ours = xlstm.SMALL[:2]
    rows = [Row(shape=gpt.shape, way="unlimited"), Row(shape=ours.shape, way="unlimited", step_s=0.5)]
    broken, fine = xlstm.speeds(rows, (gpt, ours))
    assert broken.tokens_per_s is None
    assert fine.tokens_per_s == 2 * ours.tokens
    assert fine.over_gpt is None
    assert "-" in str(broken)
    rows[0] = replace(rows[0], step_s=1.0)
    assert xlstm.speeds(rows, (gpt, ours))[1].over_gpt == 2


def test_a_model_that_cannot_be_built_is_a_row_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = replace(xlstm.SMALL[0], changes=(("num_layers", 0),))
    monkeypatch.setattr(xlstm, "SMALL", (first, xlstm.SMALL[1]))
    found, said = run(tmp_path)
    assert "ConfigError: num_layers=0" in said
    assert found[-1].tokens_per_s
    with pytest.raises(ConfigError, match="--shape '1x1'"):
        run(tmp_path, shape_names="1x1")
