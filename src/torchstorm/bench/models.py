"""Whole models by every way that is installed: language models, vision transformers and a residual network.

All from Hugging Face's classes with random weights: nothing is downloaded. A step is forward, backward and fused AdamW.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from torchstorm.bench import ways
from torchstorm.bench.cases import bench_device, pick, pick_ways
from torchstorm.bench.measure import Meter, clean
from torchstorm.bench.model_cases import ON_A_CPU, ON_A_GPU, ModelCase, check_transformers, checkpointing_of, make_model
from torchstorm.bench.peers import Budgets, Peers
from torchstorm.bench.rows import HEADER, Results, Row
from torchstorm.bench.side_by_side import failure

_MANY = 2  # times as many steps are timed where sizes differ


def bench_models(
    device: str | None,
    *,
    disk: str | None,
    steps: int,
    json_path: Path | None,
    console: Console,
    model_names: str | None = None,
    way_names: str | None = None,
    has_random_sizes: bool = False,
) -> list[Row]:
    """Runs and prints every model; with `json_path`, writes what was measured, row by row.

    Args:
        device: "cpu", "cuda" or "cuda:N"; None for CUDA where there is one, else small models on the CPU.
        disk: where Session spills to on a CPU; None for a new folder.
        steps: timed steps a row.
        json_path: rows of the same machine and versions that it has already stay, unless they are made anew.
        console: where rows are printed.
        model_names, way_names: some of them, with commas between; None for all. What others are compared with, and
            what Sessions have the budget of, runs unless `json_path` has it.
        has_random_sizes: whether each batch has a size of its own, as in `ModelCase`. Sessions have what checkpointing
            takes for full batches, or half way from that to everything kept, and times are for as much as a full batch.

    Raises:
        TorchstormError: the device or transformers is not there, a name is not known, or the file cannot be written.
    """
    target = bench_device(device)
    check_transformers()
    cases = ON_A_GPU if target.type == "cuda" else ON_A_CPU
    names = tuple(case.name for case in cases)
    chosen = names if model_names is None else pick(model_names, names, option="--model")
    chosen_ways = pick_ways(way_names, target)
    say = partial(console.print, highlight=False, soft_wrap=True, markup=False)
    results = Results("models", target, path=json_path, say=say)
    with tempfile.TemporaryDirectory() as spill:
        for case in cases:
            if case.name in chosen:
                run_model(
                    replace(case, has_random_sizes=has_random_sizes),
                    target,
                    results,
                    ways_chosen=chosen_ways,
                    disk=disk or spill,
                    steps=steps,
                )
                clean(target)
    results.write()
    return results.rows


def run_model(
    case: ModelCase,
    device: torch.device,
    results: Results,
    *,
    ways_chosen: tuple[str, ...],
    disk: str | None,
    steps: int,
) -> None:
    """Runs one model by every way; see `bench_models`."""
    budgets = Budgets(shares=case.shares, middle=True)
    if case.has_random_sizes:
        full, asked = replace(case, has_random_sizes=False), (ways.UNLIMITED, ways.CHECKPOINT)
        if any(results.find(full.shape, way) is None for way in asked):
            run_model(full, device, results, ways_chosen=asked, disk=disk, steps=steps)
            clean(device)
        peaks = {way: row.peak_gib for way in asked if (row := results.find(full.shape, way)) and row.peak_gib}
        budgets = Budgets(named={f"{name}, full size": gib for gib, name in Budgets(middle=True).found(peaks)})
        steps *= _MANY
    try:
        training = make_model(case, device)
        model = training.model
        size = f"{sum(parameter.numel() for parameter in model.parameters()) / 1e9:.3g} billion parameters"
        results.say(f"{case.shape}: {size}, with AdamW")
        results.say(HEADER)
        peers = Peers(
            Meter(training),
            case.shape,
            results,
            checkpointing=checkpointing_of(model),
            budgets=budgets,
            disk=disk,
            steps=steps,
        )
        peers.run(ways_chosen, note=size)
    except Exception as error:  # this model's result; the others still run
        results.add(Row(shape=case.shape, way=ways.UNLIMITED, note=failure(error)))
