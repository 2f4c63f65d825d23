"""Offloading side by side: GPT blocks, forward and backward, by every way that is installed, in one run."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from torchstorm.bench.cases import OffloadCase, bench_device, cases_for, make_blocks, pick_ways
from torchstorm.bench.measure import Meter, clean
from torchstorm.bench.peers import Budgets, Peers
from torchstorm.bench.rows import HEADER, Results, Row


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
        shape_names, way_names: some of them, with commas between; None for all. What others are compared with, and
            what Sessions have the budget of, runs unless `json_path` has it.

    Raises:
        TorchstormError: the device is not there, a name is not known, or the file cannot be written.
    """
    target = bench_device(device)
    cases = cases_for(target, shape_names)
    chosen = pick_ways(way_names, target)
    results = Results(
        "offload", target, path=json_path, say=partial(console.print, highlight=False, soft_wrap=True, markup=False)
    )
    with tempfile.TemporaryDirectory() as spill:
        for case in cases:
            results.say(case.title)
            results.say(HEADER)
            try:
                offload_peers(case, target, results, disk=disk or spill, steps=steps).run(chosen)
            finally:
                clean(target)
    results.write()
    return results.rows


def offload_peers(case: OffloadCase, device: torch.device, results: Results, *, disk: str | None, steps: int) -> Peers:
    """A case with every way of training it; see `bench_offload`."""
    training, model = make_blocks(case, device)
    return Peers(
        Meter(training),
        case.shape,
        results,
        checkpointing=model.checkpointing,
        budgets=Budgets(gib=case.budgets_gib, shares=case.shares),
        disk=disk,
        steps=steps,
    )
