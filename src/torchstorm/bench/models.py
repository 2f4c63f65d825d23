"""Whole models side by side: unlimited, with their own gradient checkpointing, and with a Session.

Two language models, one of them a mixture of experts, a vision transformer and a residual network, all from Hugging
Face's classes with random weights: nothing is downloaded. Forward and backward; a Session gets a half and a third of
the unlimited run's peak.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from torchstorm.bench import ways
from torchstorm.bench.cases import bench_device, pick
from torchstorm.bench.measure import Meter, clean
from torchstorm.bench.model_cases import ON_A_CPU, ON_A_GPU, ModelCase, make_model
from torchstorm.bench.rows import HEADER, Results, Row
from torchstorm.bench.side_by_side import SideBySide, failure
from torchstorm.errors import ConfigError

SHARES = (1 / 2, 1 / 3)
"""Budgets of a Session, of the unlimited run's peak."""


def bench_models(
    device: str | None,
    *,
    disk: str | None,
    steps: int,
    json_path: Path | None,
    console: Console,
    model_names: str | None = None,
) -> list[Row]:
    """Runs and prints every model; with `json_path`, writes what was measured, row by row.

    Args:
        device: "cpu", "cuda" or "cuda:N"; None for CUDA where there is one, else small models on the CPU.
        disk: where Session spills to on a CPU; None for a new folder.
        steps: timed steps a row.
        json_path: rows of the same machine and versions that it has already stay, unless they are made anew.
        console: where rows are printed.
        model_names: some of them, with commas between; None for all.

    Raises:
        TorchstormError: the device or transformers is not there, a name is not known, or the file cannot be written.
    """
    target = bench_device(device)
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            "transformers is not installed, and its models are what this trains: pip install transformers."
        )
    cases = ON_A_GPU if target.type == "cuda" else ON_A_CPU
    names = tuple(case.name for case in cases)
    chosen = names if model_names is None else pick(model_names, names, option="--model")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    say = partial(console.print, highlight=False, soft_wrap=True, markup=False)
    results = Results("models", target, path=json_path, say=say)
    with tempfile.TemporaryDirectory() as spill:
        for case in cases:
            if case.name in chosen:
                run_model(case, target, results, disk=disk or spill, steps=steps)
                clean(target)
    results.write()
    return results.rows


def run_model(case: ModelCase, device: torch.device, results: Results, *, disk: str | None, steps: int) -> None:
    """Runs one model by every way; see `bench_models`."""
    try:
        subject = make_model(case, device)
        model: Any = subject.model
        size = f"{sum(parameter.numel() for parameter in model.parameters()) / 1e9:.3g} billion parameters"
        results.say(f"{case.shape}: {size}")
        results.say(HEADER)
        bench = SideBySide(Meter(subject), case.shape, results, disk=disk, steps=steps)
        unlimited = bench.add_unlimited(note=size)
    except Exception as error:  # this model's result; the others still run
        results.add(Row(shape=case.shape, way=ways.UNLIMITED, note=failure(error)))
        return
    if getattr(model, "supports_gradient_checkpointing", False):
        switch = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"  # the newer name
        getattr(model, f"{switch}_checkpointing_enable")({"use_reentrant": False})
        bench.add(ways.CHECKPOINT, ways.keep_everything)
        getattr(model, f"{switch}_checkpointing_disable")()
    else:
        results.add(bench.row(ways.CHECKPOINT, note="this model has no gradient checkpointing of its own"))
    if unlimited.peak_gib is not None:
        for share in SHARES:
            bench.add_session(share * unlimited.peak_gib, note=f"{share:.0%} of the unlimited peak")
    bench.settle(ways.UNLIMITED, unlimited, bench.add(f"{ways.UNLIMITED}-again", ways.keep_everything, slow=True))
