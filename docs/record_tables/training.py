"""Tables of runs by `torchstorm train --compare` and `torchstorm bench learn`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from record_tables.records import Notes, Record, number, table

_TIERS = ("vram", "ram", "disk")
_MIB = 2**20


def trained(page: Path, name: str) -> str:
    """A run under a budget beside the same one without."""
    record = Record.read(name)
    of = record.content
    columns = [of[key] for key in ("forecast", "corrected", "measured", "highest", "unlimited")]
    lines = []
    for tier in _TIERS:
        sizes = [None if one is None else one[f"{tier}_bytes"] for one in columns]
        if any(sizes):
            asked = of["config"][tier] or ""
            # The disk's is a folder, with a size behind it or without.
            budget = asked if tier != "disk" else asked.partition(":")[2]
            lines.append([tier, budget, *("-" if size is None else _size(size) for size in sizes)])
    lines.append(
        ["forward and backward", "", *("-" if one is None else f"{number(one['step_ms'], 4)} ms" for one in columns)]
    )
    spreads = [of.get("step_seconds"), of.get("unlimited_step_seconds")]
    if any(spreads):
        lines.append(["whole step", "", "", "", _spread(spreads[0]), "", _spread(spreads[1])])
    notes = Notes(record, [of])
    same = {True: "are the same to the last bit", False: "**differ**", None: "were not compared"}[of["bit_identical"]]
    header = ["", "budget", "forecast", "corrected later", "measured", "highest, the first step too", "no budget"]
    return f"{table(header, lines)}\n\n{notes.under(page)} Losses and final weights of both runs {same}."


def learned(page: Path, name: str) -> str:
    """Losses of models that saw the same tokens."""
    record = Record.read(name)
    of = record.content
    first = of["runs"][0]["model"]
    lines = [
        [
            one["model"],
            f"{one['num_params']:,}",
            f"{one['val_losses'][-1][1]:.3f}",
            _beside(one["above"], one is of["runs"][0]),
        ]
        for one in of["runs"]
    ]
    under = Notes(record, [of]).under(page)
    return f"{table(['', 'parameters', 'validation loss', f'against {first}'], lines)}\n\n{under}"


def _beside(above: float, is_first: bool) -> str:
    return "" if is_first else f"{above:+.1%}"


def _spread(seconds: dict[str, Any] | None) -> str:
    if not seconds:
        return "-"
    low, middle, high = (seconds[key] * 1e3 for key in ("min", "median", "max"))
    return f"{number(middle, 4)} ms ({number(low, 4)} to {number(high, 4)})"


def _size(nbytes: int) -> str:
    return "0" if not nbytes else f"{nbytes / _MIB:.2f} MiB" if nbytes < 2**30 else f"{nbytes / 2**30:.2f} GiB"
