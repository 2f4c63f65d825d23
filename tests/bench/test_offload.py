"""The offloading bench: the small case on a CPU, what is picked, and ways that get no time."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from torchstorm.bench import offload, ways
from torchstorm.bench.cases import CASES, SMALL, cases_for, pick
from torchstorm.bench.offload import OffloadBench, bench_offload
from torchstorm.bench.rows import GIB, Results, Row
from torchstorm.errors import ConfigError, DeviceError

CPU = torch.device("cpu")
TINY = replace(SMALL, num_layers=1, batch=2, seq=16, width=32)


def make_bench(tmp_path: Path, **changes: Any) -> OffloadBench:
    results = Results("offload", CPU, path=None, say=lambda line: None)
    return OffloadBench(replace(TINY, **changes), CPU, results, disk=str(tmp_path), steps=1)


def run(tmp_path: Path, *arguments: Any, **options: Any) -> tuple[list[Row], str]:
    text = io.StringIO()
    console = Console(file=text, width=500)
    given = {"disk": str(tmp_path), "steps": 2, "json_path": None, "console": console, **options}
    return bench_offload(*(arguments or ("cpu",)), **given), text.getvalue()


def test_the_small_case_runs_every_way_bit_for_bit(tmp_path: Path) -> None:
    rows, text = run(tmp_path)
    assert [row.way for row in rows] == ["unlimited", "checkpoint", "session", "unlimited-again"]
    unlimited, recomputed, session, again = rows
    for row in rows:
        assert row.shape == SMALL.shape == "64x4"
        assert row.checked, row.note
        # Steps of milliseconds beside other work: their times may miss the forecast, and the plan is made anew.
        assert row.note == "" or row.note.startswith("planned anew in the timed steps")
        assert row.step_s is not None
        assert row.slowest_s is not None
        assert 0 < row.step_s <= row.slowest_s
        assert row.against == "unlimited"
        assert row.over_unlimited is not None
        assert (row.gpu_busy, row.overlap) == (None, None)
        assert row.steps == 2
    assert unlimited.step_s is not None
    assert again.step_s is not None
    assert session.step_s is not None
    assert session.over_unlimited == pytest.approx(2 * session.step_s / (unlimited.step_s + again.step_s))
    assert unlimited.peak_gib is not None
    assert session.peak_gib is not None
    assert recomputed.peak_gib is not None
    assert recomputed.peak_gib < unlimited.peak_gib
    assert session.budget_gib == pytest.approx(0.6 * unlimited.peak_gib)
    assert session.budget_gib is not None
    assert session.peak_gib <= session.budget_gib
    assert session.forecast_peak_gib == session.peak_gib == session.ram_gib
    assert session.moved_gib is not None
    assert session.recomputed_gib is not None
    assert session.moved_gib + session.recomputed_gib > 0
    assert session.forecast_step_s is not None
    assert session.forecast_step_s > 0
    assert session.forward_backward_s is not None
    assert session.forward_backward_s > 0
    assert os.listdir(tmp_path) == [], "no spill file stays"
    assert "10 blocks" not in text
    assert len(text.splitlines()) == 2 + len(rows)


def test_a_part_of_the_ways_runs_with_what_it_is_compared_with(tmp_path: Path) -> None:
    rows, _ = run(tmp_path, way_names="checkpoint", shape_names="64x4", steps=1)
    assert [row.way for row in rows] == ["unlimited", "checkpoint", "unlimited-again"]


def test_parts_of_a_run_come_together_in_one_file(tmp_path: Path) -> None:
    file = tmp_path / "offload.json"
    for name in ("checkpoint", "save_on_cpu"):
        run(tmp_path, way_names=name, steps=1, json_path=file)
    rows = json.loads(file.read_text())["rows"]
    assert [row["way"] for row in rows] == ["unlimited", "checkpoint", "unlimited-again", "save_on_cpu"]
    assert all(row["checked"] and row["step_s"] > 0 for row in rows)


def test_compiled_ways_are_called_with_the_same_references_and_budgets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling itself takes long: here it is left out, and what is around it runs."""
    budgets: list[float | None] = []

    @contextlib.contextmanager
    def compiled(blocks: object, memory_budget: float | None = None) -> Iterator[None]:
        budgets.append(memory_budget)
        yield

    class Uncompiled:
        variants: dict[str, str] = {}  # noqa: RUF012

        def tables(self) -> list[object]:
            return []

        def undo(self) -> None:
            pass

    monkeypatch.setattr(ways, "compiled", compiled)
    monkeypatch.setattr("torchstorm.offload.session.Session.compile", lambda self: Uncompiled())
    rows, _ = run(tmp_path, way_names="compile,session-compiled,compile-budget", steps=1)
    assert [row.way for row in rows] == [
        "unlimited",
        "compile",
        "session-compiled",
        "compile-budget-0.5",
        "compile-budget-0",
        "compile-again",
        "unlimited-again",
    ]
    assert budgets == [None, 0.5, 0.0, None]
    assert all(row.checked for row in rows), rows
    assert {row.against for row in rows[1:-1]} == {"compile"}
    assert all(row.over_unlimited is not None for row in rows)
    assert rows[1].note == "gradients within 0.0% of the eager ones"
    assert rows[2].budget_gib is not None


def test_compiled_ways_that_cannot_be_are_rows_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise AttributeError("there is no compiler here")

    monkeypatch.setattr(ways, "compiled", fail)
    monkeypatch.setattr("torchstorm.offload.session.Session.compile", fail)
    rows, _ = run(tmp_path, way_names="session-compiled", steps=1)
    assert [row.way for row in rows] == ["unlimited", "compile", "session-compiled", "compile-again", "unlimited-again"]
    for row in rows[1:4]:
        assert row.note == "AttributeError: there is no compiler here"
        assert not row.checked
        assert row.step_s is None


def test_blocks_are_compiled_inside_and_plain_again_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._functorch import config

    block = torch.nn.Linear(2, 2)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: setattr(self, "_compiled_call_impl", lambda x: "x"))
    before = config.activation_memory_budget
    found: list[Any] = []

    def run_and_fail() -> None:
        with ways.compiled(iter([block]), 0.5):
            found.extend([block(torch.ones(2)), config.activation_memory_budget])
            raise KeyError

    with pytest.raises(KeyError):
        run_and_fail()
    assert found == ["x", 0.5]
    assert isinstance(block(torch.ones(2)), torch.Tensor)
    assert config.activation_memory_budget == before


def test_trl_that_is_missing_is_a_row_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    rows, text = run(tmp_path, way_names="trl", steps=1)
    assert [(row.way, row.note) for row in rows[1:-1]] == [("trl", "trl is not installed")]
    assert "NOT CHECKED; trl is not installed" in text


def test_a_way_whose_gradients_differ_shows_no_time(tmp_path: Path) -> None:
    bench = make_bench(tmp_path)
    bench.add_unlimited()

    @contextlib.contextmanager
    def perturb() -> Iterator[None]:
        yield
        gradient = list(bench.model.parameters())[-1].grad
        assert gradient is not None
        gradient.view(torch.int32)[0] ^= 1

    wrong, right = bench.add("wrong", perturb), bench.add("right", ways.keep_everything)
    assert not wrong.checked
    assert (wrong.step_s, wrong.slowest_s, wrong.over_unlimited) == (None, None, None)
    assert wrong.note == ("gradients: in step 1 the bits of blocks.0.mlp.c_proj.bias differ; so no time is shown")
    assert wrong.peak_gib is not None
    assert right.checked
    assert right.step_s is not None


def test_a_session_whose_gradients_differ_shows_no_time(tmp_path: Path) -> None:
    bench = make_bench(tmp_path)
    bench.add_unlimited()
    assert bench.reference is not None
    bench.reference = replace(bench.reference, steps=tuple({**bits, "the loss": 0} for bits in bench.reference.steps))
    row = bench.add_session(2**-10)
    assert not row.checked
    assert (row.step_s, row.slowest_s, row.forward_backward_s) == (None, None, None)
    assert row.note == "gradients: in step 1 the bits of the loss differ; so no time is shown"


def test_a_way_that_fails_is_a_row_and_the_next_one_runs(tmp_path: Path) -> None:
    bench = make_bench(tmp_path)
    bench.add_unlimited()

    @contextlib.contextmanager
    def fail() -> Iterator[None]:
        raise torch.OutOfMemoryError("CUDA out of memory.\n  Tried to allocate 1 GiB")
        yield

    row = bench.add("fails", fail)
    assert row.note == "OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB"
    assert not row.checked
    small = bench.add_session(100_000 / GIB)
    assert small.note.startswith("BudgetError: ram=97.66 KiB, but")
    assert "Smallest feasible" in small.note
    assert bench.add("works", ways.keep_everything).checked


def test_the_same_numbers_for_every_way_and_new_ones_every_step(tmp_path: Path) -> None:
    data = make_bench(tmp_path).meter.subject.data
    assert torch.equal(data(5), data(5))
    assert not torch.equal(data(5), data(6))


def test_budgets_are_those_asked_for_and_checkpointings_own_peak() -> None:
    wide, batch = CASES
    assert (wide.shape, batch.shape) == ("32768x1", "4096x4")
    assert wide.all_budgets_gib(unlimited_gib=46.4, checkpoint_gib=None) == [27.6, 16.0, 12.6]
    assert wide.all_budgets_gib(unlimited_gib=46.4, checkpoint_gib=12.571) == [27.6, 16.0, 12.6]
    assert wide.all_budgets_gib(unlimited_gib=None, checkpoint_gib=12.61) == [27.6, 16.0, 12.7]
    assert batch.all_budgets_gib(unlimited_gib=25.1, checkpoint_gib=9.94) == [12.5, 10.0]
    assert SMALL.all_budgets_gib(unlimited_gib=2.0, checkpoint_gib=1.0) == [1.2]


def test_the_cases_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cases_for(CPU) == (SMALL,)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        DeviceError, match="--device cuda:1 was asked, but PyTorch sees no GPU here; --device cpu runs a small case"
    ):
        cases_for(torch.device("cuda:1"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cases_for(torch.device("cuda")) == CASES
    assert cases_for(torch.device("cuda"), "4096x4") == CASES[1:]
    assert CASES[1].title == "4096x4: 10 blocks, hidden 4096, 4096 tokens x 4"


def test_names_that_do_not_exist_are_told() -> None:
    assert pick("session, trl", ways.WAYS, option="--way") == ("session", "trl")
    with pytest.raises(ConfigError, match=r"--way 'session,tlr' names \['tlr'\]; there are unlimited, checkpoint"):
        pick("session,tlr", ways.WAYS, option="--way")
    with pytest.raises(ConfigError, match="--shape ',' names nothing; there are 64x4"):
        cases_for(CPU, ",")
    with pytest.raises(ConfigError, match="--way"):
        offload.bench_offload("cpu", disk=None, steps=1, json_path=None, console=Console(), way_names="x")
