"""What a finished run says: forecast beside measured, with and without the budget, on the console and as JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
import struct
import sys
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from torchstorm.paths import write_document
from torchstorm.plan.forecast import Figures
from torchstorm.sizes import format_size
from torchstorm.train.config import TrainConfig
from torchstorm.train.loop import RunState
from torchstorm.train.stamp import Stamp

_TIERS = ("vram", "ram", "disk")
_WARM_STEPS = 5  # a Session may take so many until its plan is in force


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """A complete run, and where asked the same one without a budget.

    Attributes:
        config: the options.
        device: where it ran, by name.
        run: the run.
        unlimited: the same run without a budget; None without --compare, or where it ran out of memory.
        unlimited_error: why there is none although it was asked for, else "".
        checkpoint_dir: the folder of checkpoints.
        stamp: of the sources that ran.
    """

    config: TrainConfig
    device: str
    run: RunState
    unlimited: RunState | None
    unlimited_error: str
    checkpoint_dir: Path
    stamp: Stamp = field(default_factory=Stamp)

    @property
    def bit_identical(self) -> bool | None:
        """Whether both runs have the same losses and the same weights, to the last bit; None without a second run."""
        if self.unlimited is None:
            return None
        return first_difference(self.run, self.unlimited) is None and (
            self.run.weights_sha256 == self.unlimited.weights_sha256
        )

    def to_json(self) -> dict[str, Any]:
        """The result as JSON takes it; sizes in bytes, times in ms unless the name says otherwise."""
        run, unlimited = self.run, self.unlimited
        return {
            "forecast": run.forecast and vars(run.forecast),
            "measured": run.measured and vars(run.measured),
            "highest": run.highest and vars(run.highest),
            "unlimited": unlimited and unlimited.measured and vars(unlimited.measured),
            "unlimited_error": self.unlimited_error,
            "bit_identical": self.bit_identical,
            "losses": run.losses,
            "unlimited_losses": unlimited and unlimited.losses,
            "val_losses": [list(point) for point in run.val_losses],
            "unlimited_val_losses": unlimited and [list(point) for point in unlimited.val_losses],
            "weights_sha256": run.weights_sha256,
            "unlimited_weights_sha256": unlimited and unlimited.weights_sha256,
            "step_seconds": _spread(run.step_seconds),
            "unlimited_step_seconds": unlimited and _spread(unlimited.step_seconds),
            "train_seconds": run.train_seconds,
            "unlimited_train_seconds": unlimited and unlimited.train_seconds,
            "tokens": self.config.tokens_per_step * self.config.steps,
            "checkpoint_dir": str(self.checkpoint_dir),
            "config": self.config.to_json(),
            "machine": {"device": self.device, "platform": platform.platform(), "num_cpus": os.cpu_count()},
            "versions": {
                "torchstorm": _own_version(),
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            **vars(self.stamp),
        }

    def print_to(self, console: Console) -> None:
        """Prints the result for people."""
        console.print(_table(self))
        for note in self.run.notes:
            console.print(f"Note: {note}", highlight=False, soft_wrap=True)
        if self.unlimited is not None:
            _print_verdict(self, self.unlimited, console)
        elif self.unlimited_error:
            console.print(self.unlimited_error, style="yellow", highlight=False, soft_wrap=True)
        if self.run.sample:
            console.print("A sample of what the model writes now:", style="bold")
            console.print(Text(_printable(self.run.sample)), soft_wrap=True)
        last_val = f", validation loss {self.run.val_losses[-1][1]:.4f}" if self.run.val_losses else ""
        console.print(
            f"{self.run.step} steps, training loss {self.run.losses[-1]:.4f}{last_val}. "
            f"Checkpoint: {self.checkpoint_dir}",
            highlight=False,
            soft_wrap=True,
        )


def _spread(seconds: list[float]) -> dict[str, float]:
    """Of whole steps, the optimizer's part too, once a plan is in force; empty where no step came after."""
    timed = seconds[_WARM_STEPS:]
    if not timed:
        return {}
    return {"steps": len(timed), "min": min(timed), "median": statistics.median(timed), "max": max(timed)}


def first_difference(run: RunState, other: RunState) -> int | None:
    """Gives the first step (from 1) whose training or validation losses differ in any bit, or None."""

    def bits(state: RunState) -> list[tuple[int, bytes]]:
        points = [*enumerate(state.losses, start=1), *state.val_losses]
        return [(step, struct.pack("<d", loss)) for step, loss in points]

    mine, theirs = bits(run), bits(other)
    if len(mine) != len(theirs):
        return min(run.step, other.step) + 1
    return min((step for (step, a), (_, b) in zip(mine, theirs, strict=True) if a != b), default=None)


def write_json(path: str | os.PathLike[str], content: dict[str, Any]) -> None:
    """Writes what --json asks for, as `write_document` does.

    Raises:
        StorageError: it cannot be written.
    """
    write_document(path, json.dumps(content, indent=1) + "\n", name="--json")


def device_name(device: torch.device) -> str:
    """Names the device for people and records."""
    if device.type == "cuda":  # pragma: gpu
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"cpu ({torch.get_num_threads()} threads, {platform.machine()}, {sys.platform})"


def _own_version() -> str:
    try:
        return version("torchstorm")
    except PackageNotFoundError:
        return "not installed"  # run from its sources, which carry no version


def _printable(text: str) -> str:
    """Takes out what could steer the terminal: an untrained model writes any byte."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _table(result: TrainResult) -> Table:
    columns: list[tuple[str, Figures | None]] = [("measured", result.run.measured)]
    if result.config.has_budget:
        columns = [("forecast", result.run.forecast), *columns, ("highest", result.run.highest)]
    if result.unlimited is not None:
        columns.append(("no budget", result.unlimited.measured))
    table = Table(title=f"Memory and time of a step on {result.device}", title_justify="left")
    table.add_column("")
    if result.config.has_budget:
        table.add_column("budget", justify="right")
    for title, _ in columns:
        table.add_column(title, justify="right")
    for tier in _TIERS:
        sizes = [getattr(figures, f"{tier}_bytes") if figures else None for _, figures in columns]
        if any(sizes):
            cells = ["-" if size is None else format_size(size) for size in sizes]
            unnamed = "-" if result.config.plan is None else "plan's"
            budget = [getattr(result.config, tier) or unnamed] if result.config.has_budget else []
            table.add_row(f"{tier}, peak", *budget, *cells)
    times = [f"{figures.step_ms:.1f} ms" if figures else "-" for _, figures in columns]
    table.add_row("step", *([""] if result.config.has_budget else []), *times)
    return table


def _print_verdict(result: TrainResult, unlimited: RunState, console: Console) -> None:
    run, step = result.run, first_difference(result.run, unlimited)
    if result.bit_identical:
        console.print(
            f"All {len(run.losses)} losses and the final weights are the same to the last bit.",
            style="green",
            highlight=False,
        )
    elif step is None:
        console.print("All losses are the same to the last bit, but the final weights differ.", style="red")
    else:
        a, b = (dict(enumerate(s.losses, start=1)).get(step, float("nan")) for s in (run, unlimited))
        console.print(f"The losses differ from step {step} on: {a!r} with the budget, {b!r} without.", style="red")
    if run.measured is None or unlimited.measured is None:
        return
    fast = "vram" if unlimited.measured.vram_bytes else "ram"
    kept, all_kept = (getattr(figures, f"{fast}_bytes") for figures in (run.measured, unlimited.measured))
    console.print(
        f"{fast}: {format_size(kept)} instead of {format_size(all_kept)}"
        + (f" ({kept / all_kept:.0%})" if all_kept else "")
        + f". Time: {run.train_seconds:.1f} s instead of {unlimited.train_seconds:.1f} s "
        f"({run.train_seconds / max(unlimited.train_seconds, 1e-9):.2f} x).",
        highlight=False,
        soft_wrap=True,
    )
