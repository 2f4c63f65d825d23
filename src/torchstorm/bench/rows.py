"""Rows of the benches that train: what one way took, as a line of text and in a file."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from torchstorm.bench.record import Record, RecordRow
from torchstorm.bench.ways import UNLIMITED
from torchstorm.sizes import format_size

GIB = 2**30
_MOST_OFF = 0.05


@dataclass(frozen=True, kw_only=True)
class Row(RecordRow):
    """One way's result. A field is None where it was not measured; `note` says why.

    Attributes:
        shape: what was trained: "32768x1" is one sequence of 32768 tokens.
        way: how, as in "unlimited" or "session".
        budget_gib: GiB that a Session was given on the fast tier.
        budget_name: what the budget is, as in "peak of checkpoint"; "" where it is the number itself.
        step_s: median seconds of one step; None where the gradients were not those they must be.
        fastest_s, slowest_s: of the timed steps.
        host_s: median seconds until the host has asked for all of a step.
        peak_gib: most GiB of allocated device memory in a timed step; on a CPU, of saved storages.
        highest_gib: the same in any step, the first included, and between steps, where a Session's compiled blocks are
            compared; steps of the check of gradients, which are deterministic, apart. None for other ways on a CPU.
        over_unlimited: step_s by the time of the way in `against`.
        over_eager: step_s by the time of "unlimited", for compiled ways, too.
        against: "unlimited", or "compile" for compiled ways.
        forward_backward_s: median seconds of forward and backward alone, by a Session's own clock.
        forecast_step_s, forecast_peak_gib: the Session's own, of `forward_backward_s` and `peak_gib`: the bytes of its
            first plan, before any step had followed one, and the first time that it stated.
        corrected_step_s, corrected_peak_gib: what it said after it had measured steps that followed its plans, before
            the timed ones.
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
    budget_name: str = ""
    step_s: float | None = None
    fastest_s: float | None = None
    slowest_s: float | None = None
    host_s: float | None = None
    peak_gib: float | None = None
    highest_gib: float | None = None
    over_unlimited: float | None = None
    over_eager: float | None = None
    against: str = ""
    forward_backward_s: float | None = None
    forecast_step_s: float | None = None
    forecast_peak_gib: float | None = None
    corrected_step_s: float | None = None
    corrected_peak_gib: float | None = None
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
    def key(self) -> tuple[str, str, float | str | None]:
        """What there is one row for in a file."""
        return (self.shape, self.way, self.budget_name or self.budget_gib)


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
    """`Record` of `Row`s, and of the forecasts in them that did not come true.

    Raises:
        StorageError: `path` exists and is not a bench's record.
    """

    def __init__(
        self, op: str, device: torch.device, *, path: Path | None, say: Callable[[str], None], merge: bool = True
    ) -> None:
        super().__init__(op, device, Row, format_row, path=path, say=say, merge=merge)

    def _document(self) -> dict[str, Any]:
        return {**super()._document(), "misses": [asdict(miss) for miss in misses(self.all_rows())]}

    def against(self, shape: str, name: str, seconds: float) -> None:
        """Relates the times of all rows of a shape that compare with that way to these seconds; writes."""

        def related(row: Row) -> Row:
            if row.shape != shape or row.step_s is None:
                return row
            over = row.step_s / seconds
            if name == UNLIMITED:
                row = replace(row, over_eager=over)
            return replace(row, over_unlimited=over) if row.against == name else row

        self.change(related)

    def find(self, shape: str, way: str) -> Row | None:
        """The newest row of this file, with a peak: this run's, or an earlier run's."""
        for row in [*reversed(self.rows), *self.older]:
            if (row.shape, row.way) == (shape, way) and row.peak_gib is not None:
                return row
        return None


@dataclass(frozen=True, kw_only=True)
class Miss:
    """A Session's forecast that did not come true.

    Attributes:
        shape, way, budget_gib, budget_name: of its row.
        what: "step" for seconds of forward and backward, "peak" for GiB.
        forecast, measured: of that.
        off: by how much of what was measured the forecast was above it.
        corrected: what was said before the timed steps.
    """

    shape: str
    way: str
    budget_gib: float | None
    budget_name: str
    what: str
    forecast: float
    measured: float
    off: float
    corrected: float | None


def misses(rows: Iterable[Row]) -> list[Miss]:
    """Forecasts of times that were off by more than 5 %, and forecasts of peaks that were off at all."""
    found = []
    for row in rows:
        for what, forecast, measured, corrected, most in (
            ("step", row.forecast_step_s, row.forward_backward_s, row.corrected_step_s, _MOST_OFF),
            ("peak", row.forecast_peak_gib, row.peak_gib, row.corrected_peak_gib, 0.0),
        ):
            if forecast is None or not measured or abs(forecast / measured - 1) <= most:
                continue
            found.append(
                Miss(
                    shape=row.shape,
                    way=row.way,
                    budget_gib=row.budget_gib,
                    budget_name=row.budget_name,
                    what=what,
                    forecast=forecast,
                    measured=measured,
                    off=forecast / measured - 1,
                    corrected=corrected,
                )
            )
    return found
