"""Rows: one line each, and a file that is whole after each one and can be made in parts."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torchstorm.bench import record
from torchstorm.bench.rows import Results, Row, format_row, misses
from torchstorm.errors import StorageError
from torchstorm.train.stamp import Stamp

CPU = torch.device("cpu")


def ignore(line: str) -> None:
    """Says nothing."""


def read(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


def written(path: Path) -> str:
    """A file with one row, as text."""
    results(path).add(Row(shape="8x1", way="unlimited"))
    return path.read_text()


def results(path: Path | None, **options: Any) -> Results:
    return Results("offload", CPU, path=path, say=options.pop("say", ignore), **options)


def test_a_row_prints_what_it_has() -> None:
    row = Row(shape="x", way="trl", note="trl is not installed")
    assert format_row(row).split() == ["trl", *["-"] * 10, "NOT", "CHECKED;", *row.note.split()]
    full = Row(
        shape="x",
        way="session",
        budget_gib=16.0,
        step_s=1.2571,
        over_unlimited=1.0287,
        peak_gib=15.61,
        gpu_busy=0.98,
        overlap=0.876,
        forecast_step_s=1.26,
        forecast_peak_gib=15.6,
        moved_gib=20.5,
        recomputed_gib=0.5,
        checked=True,
    )
    assert " ".join(format_row(full).split()) == (
        "session 16.00 GiB 1257 ms 1.029 1260 ms 15.61 GiB 15.60 GiB 98% 88% 20.50 GiB 512.00 MiB checked"
    )


def test_the_file_has_every_row_as_soon_as_it_is_done(tmp_path: Path) -> None:
    file, said = tmp_path / "rows.json", list[str]()
    run = results(file, say=said.append)
    for number, way in enumerate(("unlimited", "session"), 1):
        run.add(Row(shape="8x1", way=way))
        assert [row["way"] for row in read(file)] == ["unlimited", "session"][:number]
    assert said == [format_row(row) for row in run.rows]
    record = json.loads(file.read_text())
    assert {"op", "device", "driver", "python", "torch", "cuda", "packages", "time"} < set(record)
    assert [Row(**row) for row in record["rows"]] == run.rows
    assert {len(row.sources) for row in run.rows} == {12}


def test_a_second_run_replaces_its_rows_and_keeps_the_others(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    first = results(file)
    kept = [first.add(Row(shape="8x1", way="session", budget_gib=gib, note="first")) for gib in (1.0, 2.0)]
    second = results(file)
    anew = second.add(Row(shape="8x1", way="session", budget_gib=2.0, note="second"))
    other = second.add(Row(shape="4x1", way="session", budget_gib=2.0))
    assert [Row(**row) for row in read(file)] == [kept[0], anew, other]
    assert second.rows == [anew, other]


@pytest.mark.no_cover
def test_two_runs_at_once_fill_one_file(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    first, second = results(file), results(file)
    ways = ["a", "b", "c", "d"]
    for number, way in enumerate(ways):
        (first, second)[number % 2].add(Row(shape="8x1", way=way))
    assert sorted(row["way"] for row in read(file)) == ways
    with ThreadPoolExecutor() as pool:
        shapes = [f"{number}x1" for number in range(40)]
        list(pool.map(lambda shape: results(file).add(Row(shape=shape, way="a")), shapes))
    assert {row["shape"] for row in read(file)} == {"8x1", *shapes}


def test_another_machines_rows_are_replaced_and_that_is_said(tmp_path: Path) -> None:
    file, said = tmp_path / "rows.json", list[str]()
    results(file).add(Row(shape="8x1", way="session"))
    record = json.loads(file.read_text())
    file.write_text(json.dumps({**record, "torch": "1.0"}))
    run = results(file, say=said.append)
    assert "torch '1.0'" in said[0]
    run.add(Row(shape="8x1", way="unlimited"))
    assert [row["way"] for row in read(file)] == ["unlimited"]


def test_rows_stay_where_another_package_is_missing_and_go_where_it_is_another_version(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    results(file).add(Row(shape="8x1", way="trl"))
    record = json.loads(file.read_text())
    here = record["packages"]
    assert here["numpy"] == np.__version__
    file.write_text(json.dumps({**record, "packages": {**here, "some-peer": "1.0"}}))
    results(file).add(Row(shape="8x1", way="session"))
    record = json.loads(file.read_text())
    assert [row["way"] for row in record["rows"]] == ["trl", "session"]
    assert record["packages"] == {**here, "some-peer": "1.0"}
    file.write_text(json.dumps({**record, "packages": {**here, "numpy": "0.1"}}))
    said: list[str] = []
    results(file, say=said.append).add(Row(shape="8x1", way="session"))
    assert "numpy '0.1'" in said[0]
    record = json.loads(file.read_text())
    assert [row["way"] for row in record["rows"]] == ["session"]
    assert record["packages"] == here


def test_a_row_says_of_which_sources_it_is_and_keeps_that_beside_newer_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rows.json"
    older = [{"shape": "8x1", "way": "trl", "commit": "abc"}]
    file.write_text(json.dumps({**json.loads(written(file)), "rows": older}))
    for way, digits in (("checkpoint", "1" * 12), ("session", "2" * 12)):
        monkeypatch.setattr(record, "stamp", lambda names, digits=digits: Stamp(sources=digits, dirty=True))
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", way)
        results(file).add(Row(shape="8x1", way=way))
    assert [(row["way"], row["sources"], row["commit"], row["dirty"], row["allocator"]) for row in read(file)] == [
        ("trl", "", "abc", None, None),
        ("checkpoint", "1" * 12, "", True, "checkpoint"),
        ("session", "2" * 12, "", True, "session"),
    ]


def test_the_steps_of_a_row_have_a_median_and_a_range() -> None:
    row = Row(shape="8x1", way="session").timed([3.0, 1.0, 2.0, 9.0, 2.5])
    assert (row.fastest_s, row.step_s, row.slowest_s) == (1.0, 2.5, 9.0)


def test_rows_of_an_older_form_go(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    results(file).add(Row(shape="8x1", way="session"))
    record = json.loads(file.read_text())
    file.write_text(json.dumps({**record, "rows": [*record["rows"], {"case": "x", "way": "trl"}]}))
    results(file).add(Row(shape="8x1", way="unlimited"))
    assert [row["way"] for row in read(file)] == ["session", "unlimited"]


def test_a_record_of_its_own_keeps_nothing(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    results(file).add(Row(shape="8x1", way="session", budget_gib=1.0))
    results(file, merge=False).add(Row(shape="8x1", way="session", budget_gib=1.1))
    assert [row["budget_gib"] for row in read(file)] == [1.1]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": [], "op": "wall"}'])
def test_a_file_of_something_else_is_not_overwritten(text: str, tmp_path: Path) -> None:
    file = tmp_path / "notes.json"
    file.write_text(text)
    with pytest.raises(StorageError, match=r"notes\.json .*name another file"):
        results(file)
    assert file.read_text() == text


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be written"):  # before anything is measured
        results(tmp_path / "missing" / "rows.json")
    run = results(Path("/dev/full"))
    run.add(Row(shape="8x1", way="session"))
    with pytest.raises(StorageError, match="--json /dev/full cannot be written: No space left on device"):
        run.write()


def test_a_fifo_is_not_read_and_gets_one_document_at_the_end(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    run = results(fifo)  # where nobody writes, a read would wait for ever
    run.add(Row(shape="8x1", way="unlimited", step_s=2.0))
    run.add(Row(shape="8x1", way="session", step_s=3.0, against="unlimited"))
    run.against("8x1", "unlimited", 2.0)
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(fifo.read_text)
        run.write()
        rows = json.loads(reader.result(timeout=30))["rows"]
    assert [(row["way"], row["over_unlimited"]) for row in rows] == [("unlimited", None), ("session", 1.5)]
    assert fifo.is_fifo()


def test_times_relate_to_what_they_compare_with() -> None:
    run = results(None)
    eager = run.add(Row(shape="8x1", way="session", step_s=3.0, against="unlimited"))
    compiled = run.add(Row(shape="8x1", way="session-compiled", step_s=3.0, against="compile"))
    failed = run.add(Row(shape="8x1", way="trl", against="unlimited"))
    elsewhere = run.add(Row(shape="4x1", way="session", step_s=3.0, against="unlimited"))
    run.against("8x1", "unlimited", 2.0)
    over = {"over_eager": 1.5}
    assert run.rows == [replace(eager, over_unlimited=1.5, **over), replace(compiled, **over), failed, elsewhere]
    run.against("8x1", "compile", 1.0)
    assert run.rows[1] == replace(compiled, over_unlimited=3.0, **over)


def test_a_budget_with_a_name_has_one_row_however_large_it_was_found(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    for gib in (1.0, 1.1):
        results(file).add(Row(shape="8x1", way="session", budget_gib=gib, budget_name="peak of checkpoint"))
    assert [row["budget_gib"] for row in read(file)] == [1.1]


def test_forecasts_that_did_not_come_true_are_found_and_written(tmp_path: Path) -> None:
    row = Row(
        shape="8x1",
        way="session",
        budget_gib=2.0,
        forward_backward_s=1.0,
        forecast_step_s=1.04,
        corrected_step_s=1.0,
        peak_gib=2.0,
        forecast_peak_gib=2.0,
        corrected_peak_gib=2.0,
    )
    assert misses([Row(shape="8x1", way="unlimited", step_s=1.0, peak_gib=2.0), row]) == []
    (slow,) = misses([replace(row, forecast_step_s=0.94)])
    assert (slow.what, slow.forecast, slow.measured, slow.corrected) == ("step", 0.94, 1.0, 1.0)
    assert slow.off == pytest.approx(-0.06)
    (high,) = misses([replace(row, peak_gib=1.99)])
    assert (high.what, high.measured) == ("peak", 1.99)
    assert high.off > 0
    assert misses([replace(row, forward_backward_s=None, forecast_peak_gib=None)]) == []
    file = tmp_path / "rows.json"
    first = results(file)
    first.add(row)
    assert json.loads(file.read_text())["misses"] == []
    first.add(replace(row, shape="4x1", forecast_step_s=0.94))
    results(file).add(replace(row, budget_gib=1.0, peak_gib=1.99))
    found = json.loads(file.read_text())["misses"]
    assert [(miss["shape"], miss["budget_gib"], miss["what"]) for miss in found] == [
        ("4x1", 2.0, "step"),
        ("8x1", 1.0, "peak"),
    ]


def test_the_newest_row_with_a_peak_is_found(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    first = results(file)
    first.add(Row(shape="8x1", way="checkpoint", peak_gib=1.0))
    second = results(file)
    found = second.find("8x1", "checkpoint")
    assert found is not None
    assert found.peak_gib == 1.0
    second.add(Row(shape="8x1", way="checkpoint", peak_gib=2.0))
    second.add(Row(shape="8x1", way="checkpoint", note="failed"))
    found = second.find("8x1", "checkpoint")
    assert found is not None
    assert found.peak_gib == 2.0
    assert second.find("8x2", "checkpoint") is None
