"""A batch that does not fit is trained on in micro-batches, and the row says how."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from torchstorm.bench import chunks
from torchstorm.bench.chunks import ON_A_GPU, SMALL, bench_chunks, run_chunks
from torchstorm.bench.rows import GIB
from torchstorm.errors import BudgetError

CPU = torch.device("cpu")


@pytest.mark.no_cover
def test_the_small_case_is_split_and_its_gradients_are_those_of_checkpointing(tmp_path: Path) -> None:
    text = io.StringIO()
    bench_chunks("cpu", steps=2, json_path=tmp_path / "chunks.json", console=Console(file=text, width=400))
    assert "micro-batches of" in text.getvalue()
    (row,) = json.loads((tmp_path / "chunks.json").read_text())["rows"]
    assert row["checked"]
    assert 0 < row["fastest_s"] <= row["step_s"] <= row["slowest_s"]
    assert row["budget_gib"] * GIB == 2**21
    assert 0 < row["peak_gib"] <= row["budget_gib"]
    assert int(row["note"].split()[0]) > 1
    assert "gradients within 0.0% of checkpointing in as many" in row["note"]


@pytest.mark.no_cover
def test_gradients_that_differ_show_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "_compare", lambda *_: 0.5)
    row = run_chunks(SMALL, CPU, steps=1)
    assert not row.checked
    assert row.step_s is None
    assert "within 50.0%" in row.note


def test_a_batch_of_which_not_one_sequence_fits_is_a_budget_error() -> None:
    with pytest.raises(BudgetError, match="ram="):
        run_chunks(replace(SMALL, budgets_gib=(2**15 / GIB,)), CPU, steps=1)


def test_the_recorded_case_is_the_one_that_was_asked_for() -> None:
    assert (ON_A_GPU.width, ON_A_GPU.num_layers, ON_A_GPU.batch, ON_A_GPU.seq) == (8192, 4, 128, 8192)
