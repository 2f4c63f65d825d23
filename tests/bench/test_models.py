"""The bench of whole models: tiny ones run by every way, and the recorded ones are of the size that is said."""

from __future__ import annotations

import importlib.util
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from torchstorm.bench import models
from torchstorm.bench.model_cases import ON_A_CPU, ON_A_GPU, ModelCase, make_model
from torchstorm.bench.rows import Row
from torchstorm.errors import ConfigError

transformers = pytest.importorskip("transformers")

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Models this small only lose by more; the root conftest puts it back."""
    torch.set_num_threads(1)


def run(tmp_path: Path, name: str, **options: Any) -> tuple[list[Row], str]:
    text = io.StringIO()
    given = {"disk": str(tmp_path), "steps": 1, "json_path": None, "console": Console(file=text, width=500), **options}
    return models.bench_models("cpu", model_names=name, **given), text.getvalue()


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.no_cover] if case is not ON_A_CPU[0] else []) for case in ON_A_CPU],
    ids=[case.name for case in ON_A_CPU],
)
def test_a_small_model_of_every_kind_is_checked_by_every_way(case: ModelCase, tmp_path: Path) -> None:
    file = tmp_path / "models.json"
    rows, _ = run(tmp_path, case.name, json_path=file)
    assert [row.way for row in rows] == ["unlimited", "checkpoint", "session", "session", "unlimited-again"]
    assert {row.shape for row in rows} == {case.shape}
    unlimited, own, half, third, again = rows
    assert unlimited.peak_gib is not None
    assert [half.budget_gib, third.budget_gib] == pytest.approx([unlimited.peak_gib / 2, unlimited.peak_gib / 3])
    assert own.checked != (case.name == "resnet-tiny"), own.note
    for row in (unlimited, half, again):
        assert row.checked, row.note
        assert row.step_s is not None
    assert half.peak_gib is not None
    assert half.peak_gib <= unlimited.peak_gib / 2
    share, _, rest = half.note.partition("; ")
    assert share == "50% of the unlimited peak"
    # Beside other work a step may miss its forecast, and the plan is made anew.
    assert rest == "" or rest.startswith("planned anew in the timed steps")
    assert third.checked or "Smallest feasible" in third.note, third.note
    assert [Row(**row) for row in json.loads(file.read_text())["rows"]] == rows


def test_the_recorded_models_are_of_the_size_that_is_asked_for() -> None:
    sizes = {}
    for case in ON_A_GPU:
        with torch.device("meta"):
            config = getattr(transformers, case.config)(**case.options)
            model = getattr(transformers, case.cls)(config)
        sizes[case.name] = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    assert 1 <= sizes["tinyllama-1.1b"] <= 8
    assert 1 <= sizes["qwen3-moe-2b"] <= 8
    assert sizes["vit-huge"] == pytest.approx(0.632, abs=0.005)
    assert sizes["resnet-50"] == pytest.approx(0.0256, abs=0.0001)


def test_a_model_that_cannot_be_built_is_a_row_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *_, last = ON_A_CPU

    def build(case: ModelCase, device: torch.device) -> object:
        if case is first:
            raise ValueError("no such\nattention")
        return make_model(case, device)

    monkeypatch.setattr(models, "make_model", build)
    rows, _ = run(tmp_path, f"{first.name},{last.name}")
    assert rows[0].note == "ValueError: no such attention"
    assert rows[1].shape == last.shape


def test_mistakes_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--model 'bert' names \['bert'\]; there are llama-tiny"):
        run(tmp_path, "bert")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="transformers is not installed"):
        run(tmp_path, "vit-tiny")


def test_a_models_batch_is_made_from_a_seed_and_the_default_type_stays() -> None:
    before = torch.get_default_dtype()
    data = make_model(ON_A_CPU[2], CPU).data
    assert torch.get_default_dtype() == before
    one, same, other = data(1), data(1), data(2)
    assert torch.equal(one["pixel_values"], same["pixel_values"])
    assert not torch.equal(one["pixel_values"], other["pixel_values"])
