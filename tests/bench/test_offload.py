"""The offloading bench: the small case on a CPU, what is picked, and ways that get no time."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import math
import os
import sys
import time
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from torchstorm.bench import cases as bench_cases
from torchstorm.bench import offload, sessions, ways
from torchstorm.bench.cases import CASES, SMALL, cases_for, make_blocks, pick
from torchstorm.bench.offload import bench_offload, offload_peers
from torchstorm.bench.peers import NO_BLOCKS, Budgets, Peers
from torchstorm.bench.rows import GIB, Results, Row
from torchstorm.bench.sessions import settle
from torchstorm.errors import ConfigError, DeviceError
from torchstorm.offload.replan.measured import Measured
from torchstorm.offload.session import Session
from torchstorm.plan.forecast import Figures

CPU = torch.device("cpu")
TINY = replace(SMALL, num_layers=1, batch=2, seq=16, width=32)


def make_bench(tmp_path: Path, **changes: Any) -> Peers:
    results = Results("offload", CPU, path=None, say=lambda line: None)
    return offload_peers(replace(TINY, **changes), CPU, results, disk=str(tmp_path), steps=1)


def run(tmp_path: Path, *arguments: Any, **options: Any) -> tuple[list[Row], str]:
    text = io.StringIO()
    console = Console(file=text, width=500)
    given = {"disk": str(tmp_path), "steps": 2, "json_path": None, "console": console, **options}
    return bench_offload(*(arguments or ("cpu",)), **given), text.getvalue()


@pytest.mark.no_cover
def test_the_small_case_runs_every_way_bit_for_bit(tmp_path: Path) -> None:
    rows, text = run(tmp_path)
    assert [row.way for row in rows] == ["unlimited", "checkpoint", "selective", *["session"] * 2, "unlimited-again"]
    unlimited, recomputed, selective, session, least, again = rows
    # On a CPU only saved tensors count, and checkpointing keeps its own elsewhere: so little is too little.
    assert least.budget_name == "peak of checkpoint"
    assert least.budget_gib == recomputed.peak_gib == selective.peak_gib
    assert "Smallest feasible" in least.note
    for row in (unlimited, recomputed, selective, session, again):
        assert row.shape == SMALL.shape == "64x4"
        assert row.checked, row.note
        # Steps of milliseconds beside other work: their times may miss the forecast, and the plan is made anew.
        assert row.note == "" or row.note.startswith("planned anew in the timed steps")
        assert row.step_s is not None
        assert row.slowest_s is not None
        assert row.fastest_s is not None
        assert 0 < row.fastest_s <= row.step_s <= row.slowest_s
        assert row.host_s is not None
        assert 0 < row.host_s <= row.slowest_s
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
    assert session.highest_gib is not None
    assert session.peak_gib <= session.highest_gib <= session.budget_gib
    assert session.budget_name == "60% of the unlimited peak"
    assert session.forecast_peak_gib == session.corrected_peak_gib == session.peak_gib == session.ram_gib
    assert session.moved_gib is not None
    assert session.recomputed_gib is not None
    assert session.moved_gib + session.recomputed_gib > 0
    assert session.forecast_step_s is not None
    assert session.forecast_step_s > 0
    assert session.corrected_step_s is not None
    assert session.forward_backward_s is not None
    assert session.forward_backward_s > 0
    assert os.listdir(tmp_path) == [], "no spill file stays"
    assert "10 blocks" not in text
    assert len(text.splitlines()) == 2 + len(rows)


def test_a_part_of_the_ways_runs_with_what_it_is_compared_with(tmp_path: Path) -> None:
    rows, _ = run(tmp_path, way_names="checkpoint", shape_names="64x4", steps=1)
    assert [row.way for row in rows] == ["unlimited", "checkpoint", "unlimited-again"]


@pytest.mark.no_cover
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
    def compiled(
        blocks: list[torch.nn.Module], memory_budget: float | None = None, *, same_random: bool
    ) -> Iterator[None]:
        assert len(blocks) == SMALL.num_layers
        assert not same_random, "these blocks draw no random numbers"
        budgets.append(memory_budget)
        yield

    class Uncompiled:
        variants: dict[str, str] = {}  # noqa: RUF012
        notes: tuple[str, ...] = ()

        def tables(self) -> list[object]:
            return []

        def undo(self) -> None:
            pass

    monkeypatch.setattr(ways, "compiled", compiled)
    monkeypatch.setattr("torchstorm.offload.session.Session.compile", lambda self: Uncompiled())
    rows, _ = run(tmp_path, way_names=",".join(ways.COMPILED), steps=1)
    assert [row.way for row in rows] == [
        "unlimited",
        "checkpoint",
        "selective",
        "compile",
        "compile-checkpoint",
        "session-compiled",
        "session-compiled",
        "compile-budget-0.5",
        "compile-budget-0.2",
        "compile-budget-0",
        "compile-again",
        "unlimited-again",
    ]
    assert budgets == [None, None, 0.5, 0.2, 0.0, None]
    least = rows.pop(6)
    assert least.budget_name == "peak of checkpoint"
    assert all(row.checked for row in rows), rows
    assert {row.against for row in rows[3:-1]} == {"compile"}
    assert all(row.over_unlimited is not None for row in rows)
    eager = [row.step_s for row in rows if row.way.startswith("unlimited")]
    for row in rows:
        assert row.step_s is not None
        assert row.over_eager == pytest.approx(row.step_s * 2 / sum(filter(None, eager)))
    assert rows[3].note == "gradients within 0.0% of the eager ones"
    assert rows[5].budget_gib is not None


def test_compiled_blocks_with_dropout_are_compared_by_eager_random_numbers_and_timed_by_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    @contextlib.contextmanager
    def compiled(
        blocks: list[torch.nn.Module], memory_budget: float | None = None, *, same_random: bool = False
    ) -> Iterator[None]:
        said.append("eager" if same_random else "own")
        yield
        said.append("undone")

    monkeypatch.setattr(ways, "compiled", compiled)
    bench = make_bench(tmp_path, num_layers=2)
    step = bench.meter.time

    def time_steps(*arguments: Any, **options: Any) -> Any:
        said.append("timed")
        return step(*arguments, **options)

    bench.add_unlimited(keep_gradients=True)
    monkeypatch.setattr(bench.meter, "time", time_steps)
    bench.model.dropout = torch.nn.Dropout(0.1)
    assert bench.add_compiled(ways.COMPILE).checked
    assert said == ["eager", "undone", "own", "timed", "undone"]


def test_a_model_without_repeated_blocks_is_not_timed_as_compiled(tmp_path: Path) -> None:
    bench = make_bench(tmp_path)  # of one block, which nothing repeats
    bench.add_unlimited(keep_gradients=True)
    row = bench.add_compiled(ways.COMPILE)
    assert (row.note, row.step_s) == (NO_BLOCKS, None)


def test_compiled_ways_that_cannot_be_are_rows_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise AttributeError("there is no compiler here")

    monkeypatch.setattr(ways, "compiled", fail)
    monkeypatch.setattr("torchstorm.offload.session.Session.compile", fail)
    rows, _ = run(tmp_path, way_names="session-compiled", steps=1)
    assert [row.way for row in rows[3:-1]] == ["compile", "session-compiled", "compile-again"]
    for row in rows[3:-1]:
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


def test_trl_is_set_up_as_its_trainers_do_and_leaves_no_hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[int] = []

    class Reusable:
        def __enter__(self) -> None:
            entered.append(1)

        def __exit__(self, *error: object) -> None:
            pass

    def get_act_offloading_ctx_manager(model: Any, *, warn_if_no_head: bool) -> object:
        head = model.blocks[-1]
        head.register_forward_pre_hook(lambda *arguments: None)
        head.register_forward_hook(lambda *arguments: None, always_call=True)
        return Reusable()

    offloading = types.ModuleType("trl.models.activation_offloading")
    offloading.get_act_offloading_ctx_manager = get_act_offloading_ctx_manager  # type: ignore[attr-defined]
    accelerate = types.ModuleType("accelerate")
    accelerate.PartialState = object  # type: ignore[attr-defined]
    for name, module in (("trl.models.activation_offloading", offloading), ("accelerate", accelerate)):
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("trl", "trl.models"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(ways, "has_trl", lambda: True)
    bench = make_bench(tmp_path)
    bench.run((ways.TRL,))
    _, row, _ = bench.results.rows
    assert row.checked, row.note
    assert len(entered) == 2 + 1 + row.steps + 1  # compared, warm, timed, and once for its peak
    for module in bench.model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._forward_hooks_always_called


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


def test_a_step_above_the_budget_is_said_whichever_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make_bench(tmp_path)
    bench.add_unlimited()
    planned_or_all = Measured.planned_or_all

    def above(self: Measured) -> tuple[Figures | None, Figures | None]:
        measured, highest = planned_or_all(self)
        return measured, replace(highest, ram_bytes=2 * GIB) if highest is not None else None

    monkeypatch.setattr(Measured, "planned_or_all", above)
    row = bench.add_session(1.0)
    assert row.checked, row.note
    assert row.peak_gib is not None
    assert row.peak_gib < 1.0
    assert row.highest_gib == 2.0
    assert "a step took 2.00 GiB, more than the budget" in row.note


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
    data = make_bench(tmp_path).meter.training.data
    assert torch.equal(data(5), data(5))
    assert not torch.equal(data(5), data(6))


def test_budgets_are_those_asked_for_and_exactly_the_peaks_of_others() -> None:
    peaks = {"unlimited": 46.4, "checkpoint": 12.571, "selective": 30.2}
    assert Budgets(gib=(27.6, 16.0)).found(peaks) == [
        (30.2, "peak of selective"),
        (27.6, ""),
        (16.0, ""),
        (12.571, "peak of checkpoint"),
    ]
    assert Budgets(gib=(16.0,)).found({"selective": 30.2}) == [(30.2, "peak of selective"), (16.0, "")]
    assert Budgets(shares=(0.5,), middle=True).found({"unlimited": 4.0, "checkpoint": 1.0}) == [
        (2.5, "half way from checkpoint to unlimited"),
        (2.0, "50% of the unlimited peak"),
        (1.0, "peak of checkpoint"),
    ]
    assert Budgets(shares=(0.5,), middle=True).found({"unlimited": 4.0}) == [(2.0, "50% of the unlimited peak")]


@pytest.mark.no_cover
def test_a_session_alone_takes_the_peaks_that_the_file_has(tmp_path: Path) -> None:
    file = tmp_path / "offload.json"
    first, _ = run(tmp_path, way_names="checkpoint,selective", steps=1, json_path=file)
    second, _ = run(tmp_path, way_names="session", steps=1, json_path=file)
    assert [row.way for row in second] == ["unlimited", "session", "session", "unlimited-again"]
    assert second[2].budget_gib == first[1].peak_gib


def test_where_keeping_everything_does_not_run_the_others_are_compared_with_checkpointing(tmp_path: Path) -> None:
    bench = make_bench(tmp_path)
    model, found = bench.model, bench.meter.training.loss

    def loss(x: torch.Tensor) -> torch.Tensor:
        if model._call is None:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return found(x)

    bench.meter.training = replace(bench.meter.training, loss=loss)
    bench.run((ways.CHECKPOINT, ways.SELECTIVE))
    unlimited, full, selective, again = bench.results.rows
    assert unlimited.note == (
        "gradients are compared with those of checkpointing; OutOfMemoryError: CUDA out of memory."
    )
    assert full.checked
    assert selective.checked
    assert full.step_s is not None
    assert full.over_unlimited is None
    assert not again.checked


def test_checkpointing_computes_again_and_the_selective_kind_no_products() -> None:
    """Backward of a block has two products for each of its forward; what is computed again comes on top."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.products = self.gelus = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.products += func.name() in ("aten::addmm", "aten::mm")
            self.gelus += func.name() == "aten::gelu"
            return func(*args, **(kwargs or {}))

    found = {}
    training, model = make_blocks(TINY, CPU)
    for name, context in (
        ("keep", contextlib.nullcontext()),
        ("full", model.checkpointing()),
        ("selective", model.checkpointing(ways.selective_contexts)),
    ):
        with context, Count() as count:
            training.loss(training.data(0)).backward()
        found[name] = (count.products, count.gelus)
    products, gelus = found["keep"]
    assert products == 3 * 4  # qkv, attention's and the MLP's two
    assert gelus == 1
    assert found["selective"] == (products, 2 * gelus)
    assert found["full"][0] > products
    assert found["full"][1] == 2 * gelus


@pytest.mark.no_cover
def test_the_forecast_is_the_first_one_and_what_was_corrected_stands_beside_it(tmp_path: Path) -> None:
    bench = make_bench(tmp_path)
    meter, open_session = bench.meter, bench.open_session
    steps = 0

    def opened(budget_bytes: int) -> Session:
        nonlocal steps
        steps = 0
        return open_session(budget_bytes)

    def loss(x: torch.Tensor) -> torch.Tensor:
        nonlocal steps
        steps += 1
        if steps > 2:
            time.sleep(0.1)  # which the steps that were measured for the plan did not take
        return found(x)

    found = meter.training.loss
    bench.add_unlimited()
    meter.training = replace(meter.training, loss=loss)
    bench.open_session = opened  # type: ignore[method-assign]
    row = bench.add_session(2**18 / GIB)
    assert row.checked, row.note
    assert row.forecast_step_s is not None
    assert row.forward_backward_s is not None
    assert row.corrected_step_s is not None
    assert row.forecast_step_s < 0.1 < row.corrected_step_s
    assert row.corrected_step_s == pytest.approx(row.forward_backward_s, rel=0.3)


def test_the_cases_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cases_for(CPU) == (SMALL,)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        DeviceError, match="--device cuda:1 was given, but PyTorch finds no GPU: --device cpu runs a small case"
    ):
        cases_for(torch.device("cuda:1"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench_cases, "allow_products", lambda device: None)
    assert cases_for(torch.device("cuda")) == CASES
    assert cases_for(torch.device("cuda"), "4096x4") == CASES[1:]
    assert CASES[1].title == "4096x4: 10 blocks, hidden 4096, 4096 tokens x 4"


def test_names_that_do_not_exist_are_told() -> None:
    assert pick("session, trl", ways.WAYS, option="--way") == ("session", "trl")
    with pytest.raises(
        ConfigError, match=r"--way 'session,tlr' names \['tlr'\]; known names are unlimited, checkpoint"
    ):
        pick("session,tlr", ways.WAYS, option="--way")
    with pytest.raises(ConfigError, match="--shape ',' names nothing; known names are 64x4"):
        cases_for(CPU, ",")
    with pytest.raises(ConfigError, match="--way"):
        offload.bench_offload("cpu", disk=None, steps=1, json_path=None, console=Console(), way_names="x")


def test_a_session_is_timed_once_it_has_said_the_same_of_five_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plan is followed from the third step on; a search ends after the eighth, and the times that are then taken
    correct the forecast after the eleventh. Before the third, blocks are compiled for a long time."""
    num_steps, clock_s = 0, 0.0

    def step() -> None:
        nonlocal num_steps, clock_s
        num_steps += 1
        clock_s += 20.0 if num_steps < 3 else 0.9

    def report() -> Any:
        known_ms = math.nan if num_steps < 8 else 30.0 if num_steps < 11 else 28.0
        forecast = Figures(step_ms=known_ms, vram_bytes=1, ram_bytes=2, disk_bytes=3) if num_steps > 2 else None
        return types.SimpleNamespace(num_in_force=max(0, num_steps - 2), forecast=forecast)

    session: Any = types.SimpleNamespace(report=report, plan=lambda: None if num_steps < 3 else object())
    monkeypatch.setattr(sessions, "time", types.SimpleNamespace(perf_counter=lambda: clock_s))
    last, first = settle(session, step)
    assert (num_steps, last.num_in_force) == (11 + 5, 14)
    assert first is not None
    assert first.step_ms == 30.0


def test_a_session_is_timed_though_hardly_a_step_is_the_very_one_of_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where lengths change on a CPU: each plan is followed by one step of its own length, before the next one."""
    num_steps = 0

    def step() -> None:
        nonlocal num_steps
        num_steps += 1

    def report() -> Any:
        forecast = Figures(step_ms=num_steps, vram_bytes=1, ram_bytes=2, disk_bytes=3)
        return types.SimpleNamespace(num_in_force=0, forecast=forecast)

    session: Any = types.SimpleNamespace(report=report, plan=object)
    monkeypatch.setattr(sessions, "time", types.SimpleNamespace(perf_counter=lambda: float(num_steps)))
    assert settle(session, step)[0].num_in_force == 0
    assert num_steps == 24 + 30
