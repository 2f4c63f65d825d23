"""Bars: a panel a shape, and a clear error where the picture cannot be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchstorm.bench.bars import Panel, draw_bars
from torchstorm.errors import StorageError


def test_a_picture_shows_what_was_timed_beside_what_is_known(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    known = Panel(title="x", bars=[("a", (1.0, 3.0)), ("b", (2.0, None)), ("failed", (None, None))], lines=(1.5, 4.0))
    nothing = Panel(title="y", bars=[("b", (None, None))])
    draw_bars([known, nothing], tmp_path / "a.svg", title="t", legend="forward, both")
    text = (tmp_path / "a.svg").read_text()
    assert text.count("<svg") == 1
    with pytest.raises(StorageError, match="cannot be written"):
        draw_bars([known], tmp_path / "missing" / "a.png", title="t", legend="")
