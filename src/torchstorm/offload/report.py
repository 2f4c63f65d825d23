"""The report of a Session: forecast and measurement."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torchstorm.plan.forecast import Figures
from torchstorm.plan.plan import Budget
from torchstorm.sizes import format_size


@dataclass(frozen=True, kw_only=True)
class Report:
    """Forecast and measurement of a Session. Immutable; prints as a table.

    Attributes:
        forecast: forecast of the current plan; None before the first step has ended if no plan was given, and for an
            unlimited Session. Its time is NaN until it is known: a step was timed that ran as all later ones do, and no
            better plan is searched for. For steps that no plan fits, what was measured.
        measured: peaks and median time of the steps that followed this plan; without such steps, of all steps. None
            before the first one has ended.
        highest: peak bytes over all steps, the first one included, and of what compiled blocks are run for between
            them; and the time of the slowest step.
        budget: the budget.
        num_steps: number of steps so far.
        num_planned: number of steps that followed a plan from start to end.
        num_in_force: number of these that followed the current plan; a plan is replaced if steps deviate from it.
        moved_bytes: bytes moved off the fast tier in the last step.
        notes: remarks for the user, such as pageable memory, or a disk without O_DIRECT.
    """

    forecast: Figures | None
    measured: Figures | None
    highest: Figures | None
    budget: Budget
    num_steps: int
    num_planned: int
    num_in_force: int
    moved_bytes: int
    notes: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{'':<10}{'budget':>14}{'forecast':>14}{'measured':>14}{'highest':>14}"]
        columns = (self.forecast, self.measured, self.highest)
        for tier in ("vram", "ram", "disk"):
            values = [getattr(figures, f"{tier}_bytes") if figures else None for figures in columns]
            limit = getattr(self.budget, tier)
            if limit or any(values):
                cells = "".join(f"{'-' if value is None else format_size(value):>14}" for value in values)
                lines.append(f"{tier:<10}{format_size(limit) if limit else '-':>14}{cells}")
        times = "".join(f"{said_time(figures):>14}" for figures in columns)
        lines.append(f"{'step':<10}{'':>14}{times}")
        lines.append(
            f"{self.num_steps} steps, {self.num_planned} by a plan, {self.num_in_force} by the one in force; "
            f"{format_size(self.moved_bytes)} moved away in the last one"
        )
        return "\n".join(lines + list(self.notes))


def known_ms(figures: Figures | None) -> float | None:
    """Milliseconds of a step; None where they are not known."""
    return None if figures is None or math.isnan(figures.step_ms) else figures.step_ms


def said_time(figures: Figures | None) -> str:
    """The time of a step as text; a dash where it is not known."""
    found = known_ms(figures)
    return "-" if found is None else f"{found:.1f} ms"


def first_said(first: Figures | None, now: Figures | None) -> Figures | None:
    """The bytes that were forecast first, and the time that was.

    Args:
        first: what this has returned after earlier steps; None before.
        now: the forecast of a report.
    """
    if first is None or now is None or known_ms(first) is not None:
        return first or now
    return replace(first, step_ms=now.step_ms)


def highest_of(one: Figures | None, other: Figures) -> Figures:
    """The element-wise maximum."""
    if one is None:
        return other
    return Figures(
        step_ms=max(one.step_ms, other.step_ms),
        vram_bytes=max(one.vram_bytes, other.vram_bytes),
        ram_bytes=max(one.ram_bytes, other.ram_bytes),
        disk_bytes=max(one.disk_bytes, other.disk_bytes),
    )
