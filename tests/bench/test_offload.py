"""The offloading bench: the arithmetic of overlap, the small case on a CPU, and ways that get no time."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from torchstorm.bench import offload
from torchstorm.bench.offload import CASES, SMALL, OffloadRow, cases_for, format_row, overlap, run_offload
from torchstorm.errors import DeviceError

END = 40
intervals = st.lists(
    st.tuples(st.integers(0, END), st.integers(0, END)).map(lambda pair: (min(pair), max(pair))), max_size=12
)


def ticks(spans: list[tuple[int, int]]) -> set[int]:
    """The whole units of time that some interval covers."""
    return {tick for start, stop in spans for tick in range(start, stop)}


@settings(max_examples=300, deadline=None)
@given(copies=intervals, kernels=intervals)
def test_overlap_is_the_share_of_copied_ticks_with_a_kernel(
    copies: list[tuple[int, int]], kernels: list[tuple[int, int]]
) -> None:
    copied, busy = ticks(copies), ticks(kernels)
    found = overlap(copies, kernels)
    if not copied:
        assert found is None
    else:
        assert found == pytest.approx(len(copied & busy) / len(copied))


@settings(max_examples=200, deadline=None)
@given(spans=intervals)
def test_a_union_is_sorted_apart_and_covers_the_same(spans: list[tuple[int, int]]) -> None:
    merged = offload._union(spans)
    assert all(stop < start for (_, stop), (start, _) in itertools.pairwise(merged))
    assert ticks([(int(start), int(stop)) for start, stop in merged]) == ticks(spans)


def test_overlap_by_hand() -> None:
    # Copies cover 0..10 and 20..30; kernels 5..8, 9..22 and 29..40: 3 + 1 + 2 + 1 of 20.
    assert overlap([(20, 30), (0, 10), (2, 4)], [(9, 22), (5, 8), (29, 40)]) == pytest.approx(7 / 20)
    assert overlap([], [(0, 1)]) is None
    assert overlap([(3, 3)], [(0, 9)]) is None
    assert overlap([(0, 1)], []) == 0.0


def make_bench(said: list[str], *, steps: int = 1) -> offload._Bench:
    torch.manual_seed(0)
    case = replace(SMALL, num_layers=1, batch=2, seq=16, width=32)
    return offload._Bench(case, torch.device("cpu"), offload._Blocks(case), steps, said.append)


def test_the_small_case_runs_every_way_bit_for_bit(tmp_path: Path) -> None:
    said: list[str] = []
    rows = run_offload(SMALL, torch.device("cpu"), disk=str(tmp_path), steps=2, say=said.append)
    assert [row.way for row in rows] == ["unlimited", "session"]
    assert said == [format_row(row) for row in rows]
    unlimited, session = rows
    for row in rows:
        assert row.case == SMALL.name == "3 blocks, hidden 64, 64 x 4"
        assert row.checked, row.note
        assert row.note == ""
        assert row.step_ms is not None
        assert row.slowest_ms is not None
        assert 0 < row.step_ms <= row.slowest_ms
        assert row.overlap is None
    assert unlimited.peak_bytes is not None
    assert session.peak_bytes is not None
    assert session.budget_bytes == int(0.6 * unlimited.peak_bytes)
    assert session.peak_bytes <= session.budget_bytes
    assert session.forecast_bytes == session.peak_bytes
    assert session.moved_bytes is not None
    assert session.moved_bytes > 0
    assert session.forecast_ms is not None
    assert session.forecast_ms > 0
    assert os.listdir(tmp_path) == [], "no spill file stays"


def test_checkpointing_changes_no_bit_either() -> None:
    bench = make_bench([])
    bench.add("unlimited", contextlib.nullcontext)
    bench.model.recompute = True
    bench.add("checkpoint", contextlib.nullcontext)
    assert [row.checked for row in bench.rows] == [True, True]


@pytest.mark.parametrize("device", [None, "cpu"])
def test_the_command_writes_down_what_its_figures_depend_on(
    device: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = io.StringIO()
    file = tmp_path / "offload.json"
    rows = offload.bench_offload(device, disk=None, steps=1, json_path=file, console=Console(file=text, width=500))
    record = json.loads(file.read_text())
    assert (record["op"], record["steps"], record["torch"]) == ("offload", 1, torch.__version__)
    assert [OffloadRow(**row) for row in record["rows"]] == rows
    assert {"device", "driver", "python", "cuda", "commit", "time"} < set(record)
    assert record["driver"] == ""
    assert text.getvalue().splitlines()[0] == SMALL.name
    assert len(text.getvalue().splitlines()) == 1 + len(rows)
    assert offload.bench_offload("cpu", disk=str(tmp_path), steps=1, json_path=None, console=Console(file=text))


def test_a_budget_that_cannot_be_kept_is_a_row_that_says_so() -> None:
    said: list[str] = []
    bench = make_bench(said)
    bench.add("unlimited", contextlib.nullcontext)
    bench.add_session(4096, None)
    row = bench.rows[-1]
    assert (row.way, row.budget_bytes, row.step_ms, row.checked) == ("session", 4096, None, False)
    assert "Smallest feasible" in row.note
    assert "NOT CHECKED" in said[-1]


@pytest.mark.parametrize("turn", [1, 2, 3])
def test_a_way_whose_gradients_differ_shows_no_time(turn: int) -> None:
    """In one of the three compared steps alone, one bit of one gradient is wrong."""
    bench = make_bench([])
    bench.add("unlimited", contextlib.nullcontext)
    calls = 0

    @contextlib.contextmanager
    def perturb() -> Iterator[None]:
        nonlocal calls
        calls += 1
        yield
        if calls == turn:
            gradient = list(bench.model.parameters())[-1].grad
            assert gradient is not None
            gradient.view(torch.int32)[0] ^= 1

    bench.add("wrong", perturb)
    bench.add("right", contextlib.nullcontext)
    unlimited, wrong, right = bench.rows
    assert unlimited.checked
    assert not wrong.checked
    assert (wrong.step_ms, wrong.slowest_ms) == (None, None)
    assert wrong.note == "gradients differ from the unlimited run's, so no time is shown"
    assert right.checked
    assert right.step_ms is not None


def test_a_way_that_leaves_a_gradient_out_shows_no_time() -> None:
    bench = make_bench([])
    bench.add("unlimited", contextlib.nullcontext)

    @contextlib.contextmanager
    def forget() -> Iterator[None]:
        yield
        list(bench.model.parameters())[-1].grad = None

    with contextlib.suppress(ValueError):  # it may refuse to compare, but must not pass
        bench.add("forgetful", forget)
    assert not any(row.checked for row in bench.rows[1:])


def test_a_way_without_any_gradient_shows_no_time() -> None:
    bench = make_bench([])
    bench.add("unlimited", contextlib.nullcontext)

    @contextlib.contextmanager
    def forget_all() -> Iterator[None]:
        yield
        bench.model.zero_grad(set_to_none=True)

    with contextlib.suppress(ValueError):
        bench.add("forgetful", forget_all)
    assert not any(row.checked for row in bench.rows[1:])


def test_the_same_numbers_for_every_way_and_new_ones_every_step() -> None:
    bench = make_bench([])
    assert torch.equal(bench._data(5), bench._data(5))
    assert not torch.equal(bench._data(5), bench._data(6))


def test_checking_leaves_torch_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = torch.are_deterministic_algorithms_enabled()
    with offload._deterministic():
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert torch.are_deterministic_algorithms_enabled() == before
    with pytest.raises(KeyError), offload._deterministic():
        raise KeyError
    assert torch.are_deterministic_algorithms_enabled() == before


def test_rows_print_what_they_have() -> None:
    row = OffloadRow(case="x", way="trl", note="trl is not installed")
    assert format_row(row).split() == ["trl", "-", "-", "-", "-", "-", "NOT", "CHECKED", *row.note.split()]
    full = OffloadRow(
        case="x",
        way="session",
        budget_bytes=2**30,
        step_ms=12.3,
        slowest_ms=13.0,
        peak_bytes=2**29,
        moved_bytes=2**28,
        overlap=0.876,
        forecast_ms=11.6,
        forecast_bytes=2**29,
        checked=True,
    )
    assert format_row(full) == (
        "session         1.00 GiB     12 ms  512.00 MiB  256.00 MiB   88%  bit-identical  forecast 12 ms, 512.00 MiB"
    )


def test_the_cases_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cases_for(torch.device("cpu")) == (SMALL,)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="--device cuda:1 was asked, but PyTorch sees no GPU here; --device cpu"):
        cases_for(torch.device("cuda:1"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cases_for(torch.device("cuda")) == CASES
    assert CASES[0].name == "10 blocks, hidden 4096, 4096 x 4"
