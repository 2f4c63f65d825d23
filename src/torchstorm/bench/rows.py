"""Rows of a bench: what one way took, a line of text, and a JSON file that is whole after every row.

A file that exists and is of the same machine and versions keeps its other rows: a bench can be run in parts.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from torchstorm.errors import StorageError
from torchstorm.offload.measure import cpu_name
from torchstorm.sizes import format_size
from torchstorm.train.result import write_json

GIB = 2**30
_SAME = ("op", "device", "driver", "python", "torch", "cuda")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way's result. A field is None where it was not measured; `note` says why.

    Attributes:
        shape: what was trained: "32768x1" is one sequence of 32768 tokens.
        way: how, as in "unlimited" or "session".
        budget_gib: GiB that a Session was given on the fast tier.
        step_s: median seconds of one step; None where the gradients were not those they must be.
        slowest_s: of the timed steps.
        peak_gib: most GiB of allocated device memory in a timed step; on a CPU, of saved storages.
        over_unlimited: step_s by the time of the way in `against`.
        against: "unlimited", or "compile" for compiled ways.
        forward_backward_s: median seconds of forward and backward alone, by a Session's own clock.
        forecast_step_s, forecast_peak_gib: the Session's own, of `forward_backward_s` and `peak_gib`.
        gpu_busy: union of the intervals of kernels by wall time, in one profiled step.
        overlap: share of the time of host-device copies during which a kernel runs, in the same step.
        moved_gib: GiB that left the fast tier in a step.
        recomputed_gib: GiB of saved storages that are computed again instead.
        ram_gib: GiB of pinned memory that the Session holds; on a CPU, of saved storages.
        checked: whether the gradients are those they must be.
        note: what else is to be said.
        steps: timed steps.
        commit: of the code that was measured.
    """

    shape: str
    way: str
    budget_gib: float | None = None
    step_s: float | None = None
    slowest_s: float | None = None
    peak_gib: float | None = None
    over_unlimited: float | None = None
    against: str = ""
    forward_backward_s: float | None = None
    forecast_step_s: float | None = None
    forecast_peak_gib: float | None = None
    gpu_busy: float | None = None
    overlap: float | None = None
    moved_gib: float | None = None
    recomputed_gib: float | None = None
    ram_gib: float | None = None
    checked: bool = False
    note: str = ""
    steps: int = 0
    commit: str = ""

    @property
    def key(self) -> tuple[str, str, float | None]:
        """What there is one row for in a file."""
        return (self.shape, self.way, self.budget_gib)


HEADER = (
    f"{'way':<19}{'budget':>12}{'step':>10}{'over':>7}{'forecast':>10}{'peak':>12}{'forecast':>12}{'busy':>6}"
    f"{'hidden':>7}{'moved':>12}{'again':>12}  gradients"
)


def format_row(row: Row) -> str:
    """One line of the table under `HEADER`."""

    def cell(text: str | None, width: int) -> str:
        return f"{'-' if text is None else text:>{width}}"

    def size(gib: float | None) -> str:
        return cell(None if gib is None else format_size(gib * GIB), 12)

    def time(seconds: float | None) -> str:
        return cell(None if seconds is None else f"{seconds * 1e3:.4g} ms", 10)

    def share(part: float | None, width: int) -> str:
        return cell(None if part is None else f"{part:.0%}", width)

    over = cell(None if row.over_unlimited is None else f"{row.over_unlimited:.3f}", 7)
    return (
        f"{row.way:<19}{size(row.budget_gib)}{time(row.step_s)}{over}{time(row.forecast_step_s)}{size(row.peak_gib)}"
        f"{size(row.forecast_peak_gib)}{share(row.gpu_busy, 6)}{share(row.overlap, 7)}{size(row.moved_gib)}"
        f"{size(row.recomputed_gib)}  {'checked' if row.checked else 'NOT CHECKED'}{'; ' if row.note else ''}{row.note}"
    )


class Results:
    """The rows of one run, printed and written as they come.

    Args:
        op: the bench's name.
        device: where it runs.
        path: JSON file; None for none. Rows in it of the same machine and versions stay, unless they are made anew.
        say: told every line.
        merge: whether rows of an existing file stay; else it is replaced.

    Raises:
        StorageError: `path` exists and is not a bench's record.
    """

    def __init__(
        self, op: str, device: torch.device, *, path: Path | None, say: Callable[[str], None], merge: bool = True
    ) -> None:
        self.rows: list[Row] = []
        self._record = {"op": op, **environment(device)}
        self._path = path
        self._say = say
        older = self._read() if path is not None and path.exists() else []
        self._older = older if merge else []

    def __setitem__(self, name: str, value: Any) -> None:
        """Adds something to the record besides the rows."""
        self._record[name] = value

    def say(self, line: str) -> None:
        """Prints a line that is no row."""
        self._say(line)

    def add(self, row: Row) -> Row:
        """Adds, prints and writes a row."""
        row = replace(row, commit=str(self._record["commit"]))
        self.rows.append(row)
        self._say(format_row(row))
        self.write()
        return row

    def against(self, shape: str, name: str, seconds: float) -> None:
        """Relates the times of all rows of a shape that compare with that way to these seconds; writes."""
        for index, row in enumerate(self.rows):
            if row.shape == shape and row.against == name and row.step_s is not None:
                self.rows[index] = replace(row, over_unlimited=row.step_s / seconds)
        self.write()

    def find(self, shape: str, way: str) -> Row | None:
        """The newest row of this file, with a peak: this run's, or an earlier run's."""
        for row in [*reversed(self.rows), *self._older]:
            if (row.shape, row.way) == (shape, way) and row.peak_gib is not None:
                return row
        return None

    def all_rows(self) -> list[Row]:
        """This run's rows, and those of the file that it did not make anew."""
        return list({row.key: row for row in self._older + self.rows}.values())

    def write(self) -> None:
        """Writes all rows.

        Raises:
            StorageError: the file cannot be written.
        """
        if self._path is not None:
            write_json(self._path, {**self._record, "rows": [asdict(row) for row in self.all_rows()]})

    def _read(self) -> list[Row]:
        assert self._path is not None
        try:
            record = json.loads(self._path.read_text())
            rows, op = list(record["rows"]), record["op"]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise StorageError(
                f"--json {self._path} exists and is not what this bench writes ({type(error).__name__}: {error}): name "
                "another file."
            ) from error
        if op != self._record["op"]:
            raise StorageError(f"--json {self._path} holds the rows of `torchstorm bench {op}`: name another file.")
        others = [f"{name} {record.get(name)!r}" for name in _SAME if record.get(name) != self._record[name]]
        if others:
            self._say(f"{self._path} is of another machine or versions ({', '.join(others)}): its rows are replaced.")
            return []
        known = {field.name for field in fields(Row)}
        return [Row(**row) for row in rows if isinstance(row, dict) and {"shape", "way"} <= row.keys() <= known]


def environment(device: torch.device) -> dict[str, Any]:
    """What a figure depends on besides the code: machine and versions, and the commit where git knows it."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "driver": driver_version() if device.type == "cuda" else "",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "allocator": os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or "",
        "commit": git.stdout.strip() if git.returncode == 0 else "",
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def driver_version() -> str:  # pragma: gpu
    """The NVIDIA driver's version, "" where it cannot be asked."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return ""
