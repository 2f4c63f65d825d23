"""Rows of the benches that train: what one way took, as a line of text and in a file."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from torchstorm.bench.record import Record, RecordRow
from torchstorm.sizes import format_size

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Row(RecordRow):
    """One way's result. A field is None where it was not measured; `note` says why.

    Attributes:
        shape: what was trained: "32768x1" is one sequence of 32768 tokens.
        way: how, as in "unlimited" or "session".
        budget_gib: GiB that a Session was given on the fast tier.
        step_s: median seconds of one step; None where the gradients were not those they must be.
        fastest_s, slowest_s: of the timed steps.
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
    """

    shape: str
    way: str
    budget_gib: float | None = None
    step_s: float | None = None
    fastest_s: float | None = None
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

    def timed(self, seconds: Sequence[float]) -> Row:
        """The row with what those steps took."""
        return replace(self, step_s=statistics.median(seconds), fastest_s=min(seconds), slowest_s=max(seconds))

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


class Results(Record[Row]):
    """`Record` of `Row`s. Raises StorageError: `path` exists and is not a bench's record."""

    def __init__(
        self, op: str, device: torch.device, *, path: Path | None, say: Callable[[str], None], merge: bool = True
    ) -> None:
        super().__init__(op, device, Row, format_row, path=path, say=say, merge=merge)

    def against(self, shape: str, name: str, seconds: float) -> None:
        """Relates the times of all rows of a shape that compare with that way to these seconds; writes."""

        def related(row: Row) -> Row:
            if row.shape != shape or row.against != name or row.step_s is None:
                return row
            return replace(row, over_unlimited=row.step_s / seconds)

        self.change(related)

    def find(self, shape: str, way: str) -> Row | None:
        """The newest row of this file, with a peak: this run's, or an earlier run's."""
        for row in [*reversed(self.rows), *self.older]:
            if (row.shape, row.way) == (shape, way) and row.peak_gib is not None:
                return row
        return None
