"""The memory wall's bench: its small case runs the same code, and every demand can fail."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from torchstorm.bench import wall
from torchstorm.bench.rows import Row
from torchstorm.cli import app

GOOD = Row(
    shape="32768x1",
    way="session",
    budget_gib=24.1,
    step_s=1.3,
    over_unlimited=1.03,
    forward_backward_s=1.25,
    forecast_step_s=1.27,
    peak_gib=24.0,
    forecast_peak_gib=24.1,
    gpu_busy=0.97,
    checked=True,
)


def failing(row: Row, device: str = "cuda") -> set[str]:
    return {d.name for d in wall.demands(row, need_gib=54.0, device=torch.device(device)) if d.holds is False}


def test_a_good_row_meets_every_demand() -> None:
    found = wall.demands(GOOD, need_gib=54.0, device=torch.device("cuda"))
    assert all(demand.holds for demand in found)
    assert len(found) == 7


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"budget_gib": 27.5}, "need / VRAM allowed"),
        ({"peak_gib": 24.4}, "peak / need"),
        ({"peak_gib": None}, "peak / need"),
        ({"checked": False}, "gradients as unlimited, to the last bit"),
        ({"over_unlimited": 1.051}, "step time / unlimited"),
        ({"over_unlimited": None}, "step time / unlimited"),
        ({"gpu_busy": 0.79}, "GPU busy"),
        ({"forecast_peak_gib": 23.5}, "forecast of the peak, off by"),
        ({"forecast_peak_gib": 25.3}, "forecast of the peak, off by"),
        ({"forecast_step_s": 1.22}, "forecast of forward and backward, off by"),
        ({"forecast_step_s": 1.36}, "forecast of forward and backward, off by"),
    ],
)
def test_every_demand_can_fail(change: dict[str, Any], name: str) -> None:
    assert name in failing(replace(GOOD, **change))


def test_demands_on_speed_do_not_apply_to_a_cpu() -> None:
    assert failing(replace(GOOD, over_unlimited=3.0, gpu_busy=None, forecast_step_s=9.0), "cpu") == set()
    lines = [str(d) for d in wall.demands(replace(GOOD, gpu_busy=None), need_gib=54.0, device=torch.device("cpu"))]
    assert "does not apply here" in lines[4]
    assert lines[1].split() == ["peak", "/", "need", "0.4444", "must", "be", "at", "most", "0.45", "holds"]


@pytest.mark.no_cover
def test_the_small_case_proves_what_applies_and_writes_it_down(tmp_path: Path) -> None:
    file = tmp_path / "wall.json"
    file.write_text('{"op": "wall", "rows": []}')
    text = io.StringIO()
    spill = tmp_path / "spill"
    spill.mkdir()
    console = Console(file=text, width=500)
    assert wall.bench_wall("cpu", disk=str(spill), steps=2, json_path=file, console=console), text.getvalue()
    record = json.loads(file.read_text())
    assert [row["way"] for row in record["rows"]] == ["unlimited", "session", "unlimited-again"]
    session = record["rows"][1]
    assert session["peak_gib"] <= 0.45 * record["need_gib"]
    assert session["checked"]
    assert session["moved_gib"] > 0
    assert [d["holds"] for d in record["demands"]] == [True, True, True, None, None, True, None]
    assert text.getvalue().count("holds") == 4
    assert list(spill.iterdir()) == []


def test_a_session_that_fails_is_a_verdict_and_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wall, "_GIVEN", 0.01)
    file = tmp_path / "wall.json"
    result = CliRunner().invoke(app, ["bench", "wall", "--device", "cpu", "--steps", "5", "--json", str(file)])
    assert result.exit_code == 1, result.output
    assert "BudgetError" in result.output
    record = json.loads(file.read_text())
    assert [d["holds"] for d in record["demands"]][:3] == [True, False, False]


def test_the_recorded_case_is_the_one_that_is_demanded() -> None:
    case = wall.ON_A_GPU
    assert (case.shape, case.dtype) == ("32768x1", torch.bfloat16)
    assert (case.config.width, case.config.num_layers) == (4096, 10)
