"""The tool that says where the time of steps goes runs on a CPU, too, where it can be tried out."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

TOOL = Path(__file__).parents[1] / "tools" / "step_times.py"


@pytest.mark.no_cover
def test_it_shows_steps_of_a_session_and_what_runs_in_python(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(TOOL), "llama-tiny", "--random-lengths", "--seconds", "0.2"])
    runpy.run_path(str(TOOL), run_name="__main__")
    said = capsys.readouterr().out
    for part in ("everything kept: step ", "own checkpointing: step ", "Session, 0.000 GiB: step ", "  forward:\n"):
        assert part in said
