"""train/result.py: what is said is what was measured, and no half-written file."""

import io
import json
import math
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from rich.console import Console

from torchstorm.errors import StorageError
from torchstorm.plan.forecast import Figures
from torchstorm.train.config import TrainConfig
from torchstorm.train.loop import RunState
from torchstorm.train.result import TrainResult, first_difference, write_json
from torchstorm.train.stamp import Stamp

MIB = 2**20


def state(losses: list[float], *, ram_mib: int = 40, disk_mib: int = 60, weights: str = "abc") -> RunState:
    figures = Figures(step_ms=12.5, vram_bytes=0, ram_bytes=ram_mib * MIB, disk_bytes=disk_mib * MIB)
    return RunState(
        step=len(losses),
        losses=losses,
        val_losses=[(len(losses), 1.5)],
        train_seconds=3.0,
        forecast=figures,
        corrected=replace(figures, step_ms=13.5),
        measured=figures,
        highest=replace(figures, ram_bytes=49 * MIB, step_ms=99.0),
        notes=["the disk has no O_DIRECT"],
        weights_sha256=weights,
        sample="To be",
    )


def result(unlimited: RunState | None, *, budget: bool = True, error: str = "") -> TrainResult:
    config = TrainConfig(steps=3, ram="50MiB", disk="/scratch") if budget else TrainConfig(steps=3)
    return TrainResult(
        config=config,
        device="cpu (test)",
        run=state([3.0, 2.0, 1.0]),
        unlimited=unlimited,
        unlimited_error=error,
        checkpoint_dir=Path("runs/a"),
    )


def printed(shown: TrainResult) -> str:
    console = Console(file=io.StringIO(), width=150)
    shown.print_to(console)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


SAME = state([3.0, 2.0, 1.0], ram_mib=100, disk_mib=0)


def test_forecast_measured_and_unlimited_stand_side_by_side_with_the_cost() -> None:
    text = printed(result(SAME))
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]
    rows = {name: values for name, *values in cells}
    assert rows["ram, peak"] == ["50MiB", "40.00 MiB", "40.00 MiB", "49.00 MiB", "100.00 MiB"]
    assert rows["disk, peak"] == ["/scratch", "60.00 MiB", "60.00 MiB", "60.00 MiB", "0 B"]
    assert rows["step"] == ["", "12.5 ms", "12.5 ms", "99.0 ms", "12.5 ms"]
    assert "vram, peak" not in rows
    assert "All 3 losses and the final weights are bit-identical." in text
    assert "ram: 40.00 MiB instead of 100.00 MiB (40%). Time: 3.0 s instead of 3.0 s (1.00 x)." in text
    assert "Note: the disk has no O_DIRECT" in text
    assert "To be" in text
    assert "training loss 1.0000, validation loss 1.5000. Checkpoint: runs/a" in text


def test_one_bit_of_difference_in_a_loss_is_told_with_its_step_and_both_values() -> None:
    off = math.nextafter(2.0, 3.0)
    shown = result(replace(SAME, losses=[3.0, off, 1.0]))
    assert shown.bit_identical is False
    assert f"The losses differ from step 2 on: 2.0 with the budget, {off!r} without." in printed(shown)


def test_other_weights_behind_the_same_losses_are_reported() -> None:
    shown = result(replace(SAME, weights_sha256="abd"))
    assert shown.bit_identical is False
    assert "but the final weights differ" in printed(shown)


def test_without_a_second_run_nothing_is_claimed() -> None:
    shown = result(None)
    assert shown.bit_identical is None
    assert "bit-identical" not in printed(shown)
    assert "no budget" not in printed(shown)
    assert "does not fit this machine" in printed(result(None, error="Without a budget ... does not fit this machine"))


def test_without_a_budget_there_is_no_forecast_to_show() -> None:
    text = printed(result(None, budget=False))
    assert "forecast" not in text
    assert "40.00 MiB" in text


def test_a_resumed_run_without_figures_is_shown_with_dashes() -> None:
    shown = result(SAME)
    text = printed(
        replace(shown, run=replace(shown.run, measured=None, forecast=None, corrected=None, val_losses=[], sample=""))
    )
    assert "instead of" not in text
    assert "3 steps, training loss 1.0000. Checkpoint" in text


def test_control_characters_of_a_sample_do_not_reach_the_terminal() -> None:
    shown = result(None)
    text = printed(replace(shown, run=replace(shown.run, sample="a\x1b[31mb\nc[bold]")))
    assert "\x1b" not in text
    assert "a\N{REPLACEMENT CHARACTER}[31mb\nc[bold]" in text


def test_the_first_difference_is_found_in_losses_validations_lengths_and_nan() -> None:
    base = state([1.0, math.nan, 3.0])
    assert first_difference(base, state([1.0, math.nan, 3.0])) is None
    assert first_difference(base, state([1.0, 2.0, 4.0])) == 2
    assert first_difference(state([0.0]), state([-0.0])) == 1
    assert first_difference(base, replace(base, val_losses=[(3, 1.25)])) == 3
    assert first_difference(base, state([1.0, math.nan])) == 3


def test_the_json_has_what_was_measured(tmp_path: Path) -> None:
    budgeted = result(SAME)
    run = replace(budgeted.run, step_seconds=[99.0] * 5 + [2.0, 3.0, 9.0, 2.0])
    stamp = Stamp(sources="abc", commit="def", dirty=False)
    write_json(tmp_path / "a.json", replace(budgeted, run=run, stamp=stamp).to_json())
    content = json.loads((tmp_path / "a.json").read_text())
    assert content["forecast"] == content["measured"]
    assert content["corrected"] == {**content["forecast"], "step_ms": 13.5}
    assert content["measured"] == {
        "step_ms": 12.5,
        "vram_bytes": 0,
        "ram_bytes": 40 * MIB,
        "disk_bytes": 60 * MIB,
    }
    assert content["unlimited"]["ram_bytes"] == 100 * MIB
    assert content["losses"] == content["unlimited_losses"] == [3.0, 2.0, 1.0]
    assert content["bit_identical"] is True
    assert content["val_losses"] == [[3, 1.5]]
    assert content["config"]["ram"] == "50MiB"
    assert "json" not in content["config"]  # where a document lies is not what it is of
    assert set(content["versions"]) == {"torchstorm", "torch", "python"}
    assert content["step_seconds"] == {"steps": 4, "min": 2.0, "median": 2.5, "max": 9.0}
    assert content["unlimited_step_seconds"] == {}
    assert (content["sources"], content["commit"], content["dirty"]) == ("abc", "def", False)
    without = result(None).to_json()
    assert without["unlimited"] is without["unlimited_losses"] is without["bit_identical"] is None


def test_a_result_can_be_saved_where_torchstorm_runs_from_its_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("torchstorm.train.result.version", not_installed)
    assert result(None).to_json()["versions"]["torchstorm"] == "not installed"


def test_a_failed_write_leaves_the_file_from_before_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json(tmp_path / "a.json", {"run": 1})

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StorageError, match=r"--json .*a.json cannot be written: .*No space left"):
        write_json(tmp_path / "a.json", {"run": 2})
    assert json.loads((tmp_path / "a.json").read_text()) == {"run": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
