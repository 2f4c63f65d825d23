"""Offloading side by side: GPT blocks, forward and backward, by every way that is installed, in one run.

Each way trains the same blocks on fresh random data. Before its time counts, its gradients are compared with those of
the run that keeps everything, to the last bit and under deterministic algorithms; a way that fails shows no time.
Compiled blocks round elsewhere than eager ones, so those of a Session are compared, to the last bit too, with the same
compiled blocks when they save everything; those of torch.compile alone with the eager ones, by size.

The run that keeps everything is timed at the start and at the end of each shape, and `over_unlimited` has the mean of
both below the line, since a GPU's clock drifts.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from torchstorm.bench import ways
from torchstorm.bench.cases import OffloadCase, bench_device, cases_for, make_subject, pick
from torchstorm.bench.measure import Meter, clean
from torchstorm.bench.rows import HEADER, Results, Row
from torchstorm.bench.sessions import CHECKED_STEPS, compiled_reference
from torchstorm.bench.side_by_side import SideBySide

_MEMORY_BUDGETS = {"32768x1": (0.5, 0.2, 0.0)}
_OTHER_MEMORY_BUDGETS = (0.5, 0.0)


def bench_offload(
    device: str | None,
    *,
    disk: str | None,
    steps: int,
    json_path: Path | None,
    console: Console,
    shape_names: str | None = None,
    way_names: str | None = None,
) -> list[Row]:
    """Runs and prints every case; with `json_path`, writes what was measured with versions and machine, row by row.

    Args:
        device: "cpu", "cuda" or "cuda:N"; None for CUDA where there is one.
        disk: where Session spills to on a CPU; None for a new folder.
        steps: timed steps a row.
        json_path: rows of the same machine and versions that it has already stay, unless they are made anew.
        console: where rows are printed.
        shape_names, way_names: some of them, with commas between; None for all. What others are compared with always
            runs.

    Raises:
        TorchstormError: the device is not there, a name is not known, or the file cannot be written.
    """
    target = bench_device(device)
    cases = cases_for(target, shape_names)
    names = ways.WAYS if target.type == "cuda" else ways.ON_A_CPU
    chosen = names if way_names is None else pick(way_names, ways.WAYS, option="--way")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    results = Results(
        "offload", target, path=json_path, say=partial(console.print, highlight=False, soft_wrap=True, markup=False)
    )
    with tempfile.TemporaryDirectory() as spill:
        for case in cases:
            results.say(case.title)
            results.say(HEADER)
            run_case(case, target, results, ways_chosen=chosen, disk=disk or spill, steps=steps)
    results.write()
    return results.rows


def run_case(
    case: OffloadCase,
    device: torch.device,
    results: Results,
    *,
    ways_chosen: tuple[str, ...] = ways.ON_A_CPU,
    disk: str | None = None,
    steps: int = 8,
) -> None:
    """Runs one case; see `bench_offload`."""
    bench = OffloadBench(case, device, results, disk=disk, steps=steps)
    try:
        bench.run(ways_chosen)
    finally:
        clean(device)


class OffloadBench(SideBySide):
    """One case, way after way."""

    def __init__(
        self, case: OffloadCase, device: torch.device, results: Results, *, disk: str | None, steps: int
    ) -> None:
        self.case = case
        subject, self.model = make_subject(case, device)
        super().__init__(Meter(subject), case.shape, results, disk=disk, steps=steps)

    def run(self, chosen: tuple[str, ...]) -> None:
        """The named ways in their order, and what they are compared with."""
        compiles = bool({ways.COMPILE, ways.SESSION_COMPILED, ways.COMPILE_BUDGET} & set(chosen))
        unlimited = self.add_unlimited(
            keep_gradients=compiles, checked_steps=CHECKED_STEPS if ways.SESSION in chosen else 2
        )
        if ways.CHECKPOINT in chosen:
            self.model.recompute = True
            self.add(ways.CHECKPOINT, ways.keep_everything)
            self.model.recompute = False
        checkpoint = self.results.find(self.shape, ways.CHECKPOINT)
        budgets = self.case.all_budgets_gib(
            unlimited_gib=unlimited.peak_gib, checkpoint_gib=checkpoint.peak_gib if checkpoint else None
        )
        if ways.SESSION in chosen:
            for budget_gib in budgets:
                self.add_session(budget_gib)
        if compiles:
            self._run_compiled(chosen, budgets)
        if ways.TRL in chosen:
            if ways.has_trl():  # pragma: gpu
                self.add(ways.TRL, ways.offload_by_trl, slow=True)
            else:
                self.results.add(self.row(ways.TRL, note=ways.NO_TRL))
        if ways.SAVE_ON_CPU in chosen:
            self.add(ways.SAVE_ON_CPU, lambda: ways.save_to_ram(self.device), slow=True)
        self.settle(ways.UNLIMITED, unlimited, self.add(f"{ways.UNLIMITED}-again", ways.keep_everything))

    def _run_compiled(self, chosen: tuple[str, ...], budgets: list[float]) -> None:
        first = self.add_compiled(ways.COMPILE)
        if ways.SESSION_COMPILED in chosen:
            with self.kept(self.row(ways.SESSION_COMPILED, against=ways.COMPILE)):
                reference = compiled_reference(self.meter, steps=CHECKED_STEPS)
                clean(self.device)
                for budget_gib in budgets[-2:]:  # the ones that are hard
                    self.add_session(budget_gib, compiled=reference)
        if ways.COMPILE_BUDGET in chosen:
            for budget in _MEMORY_BUDGETS.get(self.shape, _OTHER_MEMORY_BUDGETS):
                self.add_compiled(f"{ways.COMPILE_BUDGET}-{budget:g}", budget, slow=True)
        self.settle(ways.COMPILE, first, self.add_compiled(f"{ways.COMPILE}-again", slow=True))

    def add_compiled(self, way: str, memory_budget: float | None = None, *, slow: bool = False) -> Row:
        """Checks and times torch.compile of every block; gradients by size, against the eager ones."""
        row = self.row(way, against=ways.COMPILE)
        with self.kept(row), ways.compiled(self.model.blocks, memory_budget):
            assert self.reference is not None
            error, wrong = self.meter.compare_size(ways.keep_everything, self.reference)
            row = replace(row, note=f"gradients within {error:.1%} of the eager ones")
            return self.time(row, ways.keep_everything, wrong, slow=slow)
        return self.results.rows[-1]
