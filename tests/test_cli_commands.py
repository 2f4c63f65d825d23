"""`torchstorm plan`, `doctor` and `bench offload`, as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from torchstorm.cli import app
from torchstorm.plan.plan import Plan

SMALL = ["--layers", "2", "--heads", "2", "--width", "64", "--batch", "8", "--seq", "128"]


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.mark.no_cover
def test_plan_prints_blocks_and_forecast_and_writes_them(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    code, text = run("plan", *SMALL, "--ram", "12MiB", "--disk", f"{tmp_path}:1GiB", "--json", str(file))
    assert code == 0, text
    assert "blocks.1" in text
    assert "forecast" in text
    plan = json.loads(file.read_text())
    assert 0 < plan["forecast"]["ram_bytes"] <= 12 * 2**20
    assert plan["forecast"]["disk_bytes"] > 0


def test_plan_answers_for_an_xlstm_here_and_elsewhere(tmp_path: Path) -> None:
    model = ["--model", "xlstm-micro", *SMALL]
    code, text = run("plan", *model, "--device", "cpu", "--ram", "12MiB", "--disk", str(tmp_path))
    assert code == 0, text
    assert "blocks.1" in text
    code, text = run("plan", *model, "--machine", "rtx4090", "--vram", "2GiB")
    assert code == 0, text
    assert "FORECAST for rtx4090" in text


@pytest.mark.no_cover
def test_plan_answers_for_hardware_that_is_not_here_and_draws_its_curve(tmp_path: Path) -> None:
    picture, numbers, file = tmp_path / "curve.png", tmp_path / "curve.json", tmp_path / "plan.json"
    code, text = run("plan", *SMALL, "--machine", "rtx4090", "--vram", "2GiB", "--json", str(file))
    assert code == 0, text
    assert "FORECAST for rtx4090" in text
    assert Plan.load(file).simulated
    code, text = run("plan", *SMALL, "--machine", "rtx4090", "--curve", str(picture), "--json", str(numbers))
    assert code == 0, text
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads(numbers.read_text())["checkpoint"]["step_ms"] > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--machine", "rtx5090"], "PlanError: machine='rtx5090' is not a machine that torchstorm knows: use one of"),
        (["--machine", "h200", "--device", "cpu"], "ConfigError: --device cpu was given together with --machine h200"),
        (["--machine", "rtx3090", "--vram", "40GiB"], "BudgetError: vram=40.00 GiB, but rtx3090 has 24.00 GiB"),
        (["--machine", "rtx3090", "--vram", "20MiB", "--batch", "64"], "BudgetError: vram=20.00 MiB, but"),
    ],
)
def test_a_mistake_about_another_machine_is_told_in_one_line(options: list[str], said: str) -> None:
    code, text = run("plan", *SMALL, *options)
    assert code == 2
    assert text.startswith(said)
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ram", "1MiB"], "BudgetError: ram=1.00 MiB, but"),
        (["--vram", "8GiB"], "DeviceError: "),
        (["--ram", "24 GB?"], "SizeError: "),
        (["--model", "gpt-huge"], "ConfigError: "),
    ],
)
def test_a_mistake_is_told_in_one_line(options: list[str], said: str, tmp_path: Path) -> None:
    code, text = run("plan", *SMALL, "--device", "cpu", "--disk", str(tmp_path), *options)
    assert code == 2
    assert text.startswith(said)
    assert "Traceback" not in text


def test_doctor_says_what_is_here(tmp_path: Path) -> None:
    code, text = run("doctor", "--directory", str(tmp_path))
    assert code == 0, text
    for named in ("CPU", "GPU", "RAM", "disk", "active"):
        assert named in text


def test_bench_offload_checks_times_and_writes_its_rows(tmp_path: Path) -> None:
    file = tmp_path / "offload.json"
    code, text = run(
        "bench", "offload", "--device", "cpu", "--steps", "5", "--disk", str(tmp_path), "--json", str(file)
    )
    assert code == 0, text
    record = json.loads(file.read_text())
    assert {row["way"] for row in record["rows"]} == {
        "unlimited",
        "checkpoint",
        "selective",
        "session",
        "unlimited-again",
    }
    # On a CPU the peak of checkpointing, which counts saved tensors alone, is less than a Session can do with.
    rows = [row for row in record["rows"] if row["budget_name"] != "peak of checkpoint"]
    assert all(row["checked"] and row["steps"] == 5 and row["step_s"] > 0 for row in rows)
    assert record["torch"]
    assert record["device"]
