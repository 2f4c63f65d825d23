"""The bench of whole models: tiny ones run by every way, and the recorded ones are of the size that is said."""

from __future__ import annotations

import importlib.util
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from torchstorm.bench import models
from torchstorm.bench.model_cases import ON_A_CPU, ON_A_GPU, ModelCase, checkpointing_of, make_model
from torchstorm.bench.peers import NO_CHECKPOINTING
from torchstorm.bench.rows import Row
from torchstorm.bench.ways import selective_contexts
from torchstorm.errors import ConfigError

transformers = pytest.importorskip("transformers")

CPU = torch.device("cpu")
TINY = ON_A_CPU[:-1]


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
    [pytest.param(case, marks=[pytest.mark.no_cover] if case is not ON_A_CPU[0] else []) for case in TINY],
    ids=[case.name for case in TINY],
)
def test_a_small_model_of_every_kind_is_checked_by_every_way(case: ModelCase, tmp_path: Path) -> None:
    file = tmp_path / "models.json"
    rows, _ = run(tmp_path, case.name, json_path=file)
    assert {row.shape for row in rows} == {case.shape}
    unlimited, own, selective, *sessions, again = rows
    assert [row.way for row in rows[:3]] == ["unlimited", "checkpoint", "selective"]
    assert (again.way, {row.way for row in sessions}) == ("unlimited-again", {"session"})
    assert unlimited.peak_gib is not None
    names = ["50% of the unlimited peak", "33% of the unlimited peak"] if case.shares else []
    if case.name == "resnet-tiny":
        assert own.note == selective.note == NO_CHECKPOINTING
    else:
        assert own.peak_gib is not None
        assert sessions[0].budget_gib == (unlimited.peak_gib + own.peak_gib) / 2
        names = ["half way from checkpoint to unlimited", *names, "peak of checkpoint"]
    assert [row.budget_name for row in sessions] == names
    for row in (unlimited, sessions[0], again, *([own, selective] if len(names) != 2 else [])):
        assert row.checked, row.note
        assert row.step_s is not None
    assert sessions[0].peak_gib is not None
    assert sessions[0].budget_gib is not None
    assert sessions[0].peak_gib <= sessions[0].budget_gib
    for row in sessions[1:]:
        assert row.checked or "Smallest feasible" in row.note, row.note
    assert [Row(**row) for row in json.loads(file.read_text())["rows"]] == rows


def test_the_recorded_models_are_of_the_size_that_is_asked_for() -> None:
    sizes = {}
    for case in ON_A_GPU:
        with torch.device("meta"):
            config = getattr(transformers, case.config)(**case.options)
            model = getattr(transformers, case.cls)(config)
        sizes[case.name] = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    assert sizes["llama-1.1b"] == pytest.approx(1.10, abs=0.005)
    assert sizes["llama-8b"] == pytest.approx(8.03, abs=0.005)
    assert sizes["qwen2-1.5b"] == pytest.approx(1.78, abs=0.005)  # its embeddings' and its head's weights apart
    assert sizes["gpt2-xl"] == pytest.approx(1.56, abs=0.005)
    assert sizes["bert-large"] == pytest.approx(0.335, abs=0.005)
    assert sizes["vit-large"] == pytest.approx(0.304, abs=0.005)
    assert sizes["gpt2"] == pytest.approx(0.124, abs=0.0005)
    assert sizes["olmoe-1b-7b"] == pytest.approx(6.92, abs=0.005)
    assert 1 <= sizes["qwen3-moe-2b"] <= 8
    assert sizes["vit-huge"] == pytest.approx(0.632, abs=0.005)
    assert sizes["resnet-50"] == pytest.approx(0.0256, abs=0.0001)


def test_a_model_that_cannot_be_built_is_a_row_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *_, last = TINY

    def build(case: ModelCase, device: torch.device) -> object:
        if case == first:
            raise ValueError("no such\nattention")
        return make_model(case, device)

    monkeypatch.setattr(models, "make_model", build)
    rows, _ = run(tmp_path, f"{first.name},{last.name}")
    assert rows[0].note == "ValueError: no such attention"
    assert rows[1].shape == last.shape


def test_mistakes_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--model 'bert' names \['bert'\]; known names are llama-tiny"):
        run(tmp_path, "bert")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="transformers is not installed"):
        run(tmp_path, "vit-tiny")


def test_a_models_own_checkpointing_is_on_inside_and_off_again_outside() -> None:
    model: Any = make_model(ON_A_CPU[0], CPU).model
    checkpointing = checkpointing_of(model)
    assert checkpointing is not None
    layer = model.model.layers[0]
    assert not layer.gradient_checkpointing
    with checkpointing(selective_contexts):
        assert layer.gradient_checkpointing
        assert layer._gradient_checkpointing_func.keywords == {"use_reentrant": False, "context_fn": selective_contexts}
    assert not layer.gradient_checkpointing
    assert checkpointing_of(torch.nn.Linear(1, 1)) is None


def test_ways_can_be_picked_and_the_whole_step_has_an_optimizer(tmp_path: Path) -> None:
    rows, _ = run(tmp_path, "gpt2-tiny", way_names="save_on_cpu")
    assert [row.way for row in rows] == ["unlimited", "save_on_cpu", "unlimited-again"]
    assert all(row.checked for row in rows)
    assert isinstance(make_model(ON_A_CPU[0], CPU).optimizer, torch.optim.AdamW)


def test_batches_of_random_sizes_have_rows_of_their_own_within_what_full_ones_take(tmp_path: Path) -> None:
    case = replace(ON_A_CPU[0], has_random_sizes=True)
    assert case.shape == "llama-tiny 32-64x4"
    options: dict[str, Any] = {"json_path": tmp_path / "models.json", "has_random_sizes": True}
    rows, _ = run(tmp_path, case.name, way_names="session", **options)
    full, random = ([row for row in rows if row.shape == shape] for shape in (ON_A_CPU[0].shape, case.shape))
    assert [row.way for row in full] == ["unlimited", "checkpoint", "unlimited-again"]
    assert full[0].peak_gib is not None
    assert full[1].peak_gib is not None
    session = next(row for row in random if row.way == "session")
    assert session.budget_name == "half way from checkpoint to unlimited, full size"
    assert session.budget_gib == (full[0].peak_gib + full[1].peak_gib) / 2
    assert session.checked, session.note
    assert session.steps == 2
    assert session.forecast_step_s is None, "it would be of another size"
    again, _ = run(tmp_path, case.name, way_names="unlimited", **options)
    assert {row.shape for row in again} == {case.shape}, "what full batches take stands in the file"


def test_sizes_of_batches_follow_from_their_seeds_and_are_from_half_to_all() -> None:
    for case in (ON_A_CPU[0], next(case for case in ON_A_CPU if not case.seq)):
        random = replace(case, has_random_sizes=True)
        training = make_model(random, CPU)
        assert training.share is not None
        assert make_model(case, CPU).share is None
        shares = {random.share(seed) for seed in range(400)}
        assert (min(shares), max(shares)) == (0.5, 1.0)
        for seed in range(3):
            labels = training.data(seed)["labels"]
            assert labels.numel() == case.batch * (case.seq or 1) * training.share(seed)


def test_a_models_batch_is_made_from_a_seed_and_the_default_type_stays() -> None:
    before = torch.get_default_dtype()
    data = make_model(next(case for case in ON_A_CPU if not case.seq), CPU).data
    assert torch.get_default_dtype() == before
    one, same, other = data(1), data(1), data(2)
    assert torch.equal(one["pixel_values"], same["pixel_values"])
    assert not torch.equal(one["pixel_values"], other["pixel_values"])
