"""The frontier as a picture and as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from plan.traces import blocks_trace
from torchstorm.errors import ConfigError, StorageError
from torchstorm.plan.machine import Machine
from torchstorm.plan.plan import Budget, Plan
from torchstorm.plan.solve import solve
from torchstorm.report.curve import write_curve

LINK = Machine(name="a slow link", d2h_bytes_per_s=5e8, h2d_bytes_per_s=5e8)


@pytest.fixture(scope="module")
def plan() -> Plan:
    trace, budget = blocks_trace(4, 3), Budget(vram=2**34, ram=2**34)
    found = solve(trace, LINK, budget)
    return Plan(**{**vars(found), "machine": LINK, "simulated": True})


def test_a_picture_and_its_numbers_are_written(plan: Plan, tmp_path: Path) -> None:
    found = write_curve(plan, tmp_path / "curve.png", json_path=tmp_path / "curve.json", title="blocks")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "matplotlib.pyplot" not in sys.modules  # no display is asked for, and no figure stays open
    written = json.loads((tmp_path / "curve.json").read_text())
    assert written["simulated"] is True
    assert written["machine"] == "a slow link"
    assert [point["step_ms"] for point in written["points"]] == [point.step_ms for point in found.points]
    assert written["unlimited"]["way"] == "unlimited"
    assert written["checkpoint"]["way"] == "checkpoint"


def test_another_format_is_taken_from_the_ending(plan: Plan, tmp_path: Path) -> None:
    write_curve(plan, tmp_path / "curve.svg")
    assert "<svg" in (tmp_path / "curve.svg").read_text()


def test_what_cannot_be_written_is_reported(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"curve.gif2: '.gif2' is not one of .*png"):
        write_curve(plan, tmp_path / "curve.gif2")
    with pytest.raises(StorageError, match="Give a path in a folder that exists"):
        write_curve(plan, tmp_path / "missing" / "curve.png")


def test_without_matplotlib_the_way_out_is_told_before_anything_is_computed(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install torchstorm\[plot\]"):
        write_curve(plan, tmp_path / "curve.png")
