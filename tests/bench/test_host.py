"""Small steps by every way, and where the host's time goes."""

from __future__ import annotations

import io
import json
import time
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from torchstorm.bench import host
from torchstorm.bench.host import CAUSES, bench_host, causes_of
from torchstorm.errors import ConfigError
from torchstorm.offload.session import Session


def test_every_way_has_a_row_and_a_plan_of_a_full_batch_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = replace(host._NARROW, options={**host._NARROW.options, "num_hidden_layers": 6})
    monkeypatch.setattr(host, "_NARROW", short)
    path, text = tmp_path / "host.json", io.StringIO()
    bench_host("cpu", steps=3, json_path=path, console=Console(file=text, width=200))
    rows = {row["way"]: row for row in json.loads(path.read_text())["rows"]}
    assert list(rows) == [
        *("none", "checkpoint", "hooks that do nothing"),
        *("session, unlimited", "session, everything kept", "session, plan of a full batch"),
    ]
    for way, row in rows.items():
        assert 0 < row["fastest_s"] <= row["step_s"] <= row["slowest_s"]
        assert row["ratio"] == pytest.approx(row["step_s"] / row["alone_s"])
        assert set(row["causes"]) == set(CAUSES)
        assert (row["causes"]["hooks"] > 0.02) == way.startswith("session")
        assert way in text.getvalue()
    planned = rows["session, plan of a full batch"]
    assert planned["num_moved"] + planned["num_recomputed"] > 0
    assert rows["session, everything kept"]["num_recomputed"] == 0
    # With RAM alone, a Session that keeps everything records, too, for a step that would be another one.
    assert planned["causes"]["recording"] > 0.02 > rows["session, unlimited"]["causes"]["recording"]


def test_a_cause_has_the_time_that_its_calls_into_pytorch_take() -> None:
    model = torch.nn.Linear(4, 4)
    with Session(model, unlimited=True) as session:

        def step() -> None:
            with session.step():
                model(torch.ones(2, 4)).sum().backward()
            time.sleep(0.05)

        causes = causes_of(step)
    assert sum(causes.values()) < 0.5, "the pause is none of them"
    assert causes["hooks"] > 0


def test_what_was_left_behind_before_a_step_is_let_go_of_before_its_profile() -> None:
    class Left:
        def __init__(self) -> None:
            self.cycle = self

    left = weakref.ref(Left())
    is_gone: list[bool] = []
    assert left() is not None
    causes_of(lambda: is_gone.append(left() is None))
    assert is_gone == [True]


def test_a_model_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="llama-narrow"):
        bench_host("cpu", steps=1, json_path=None, console=Console(), model_names="gpt-5")
