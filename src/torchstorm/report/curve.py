"""Plots the frontier of step time and budget, with keeping everything and checkpointing for comparison; JSON."""

from __future__ import annotations

import os
from typing import Any

from torchstorm.plan.curve import Curve, Point, curve
from torchstorm.plan.plan import Plan
from torchstorm.report.picture import GRID, INK, draw, require_matplotlib
from torchstorm.train.result import write_json

_GIB, _MIB = 2**30, 2**20
_PLAN, _UNLIMITED, _CHECKPOINT = "#1f5fa8", "#2e7d32", "#c2571a"
_OPTION = "--curve"


def write_curve(
    plan: Plan, path: str | os.PathLike[str], *, json_path: str | os.PathLike[str] | None = None, title: str = ""
) -> Curve:
    """Computes the frontier of a planned step, and writes a plot of it.

    Args:
        plan: gives the step, the machine and the slower tiers.
        path: file of the plot. Its suffix is the format (.png, .svg, .pdf).
        json_path: file for the numbers; None for no file.
        title: title of the plot.

    Raises:
        ConfigError: matplotlib is not installed, or does not write this format.
        StorageError: a file cannot be written.
    """
    require_matplotlib(_OPTION)
    assert plan.machine is not None
    found = curve(plan.trace, plan.machine, plan.budget)
    draw_curve(found, path, title=title, simulated=plan.simulated)
    if json_path is not None:
        write_json(json_path, {**found.to_dict(), "simulated": plan.simulated})
    return found


def draw_curve(found: Curve, path: str | os.PathLike[str], *, title: str = "", simulated: bool = False) -> None:
    """Draws a frontier.

    Args:
        found: the frontier.
        path: file of the plot. Its suffix is the format.
        title: title of the plot.
        simulated: whether to note that the numbers were not measured.

    Raises:
        ConfigError: matplotlib does not write this format.
        StorageError: the file cannot be written.
    """
    draw(path, lambda axes: _draw(axes, found, title, simulated), option=_OPTION)


def _draw(axes: Any, found: Curve, title: str, simulated: bool) -> None:
    unit, name = (_GIB, "GiB") if found.unlimited.peak_bytes >= _GIB else (_MIB, "MiB")
    base_ms = found.unlimited.step_ms
    axes.axhline(base_ms, color=_UNLIMITED, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    axes.plot(
        [point.budget_bytes / unit for point in found.points],
        [point.step_ms for point in found.points],
        color=_PLAN,
        linewidth=2,
        marker="o",
        markersize=5,
        label="torchstorm plan within the budget",
        zorder=3,
    )
    _mark(axes, found.unlimited, unit, name, _UNLIMITED, "s", "everything kept", base_ms)
    if found.checkpoint is not None:
        _mark(axes, found.checkpoint, unit, name, _CHECKPOINT, "D", "full checkpointing", base_ms)
    slowest = max(point.step_ms for point in (*found.points, found.unlimited, found.checkpoint or found.unlimited))
    room = max(slowest - base_ms, base_ms * 0.05)
    axes.set_ylim(max(0.0, base_ms - 0.15 * room), slowest + 0.15 * room)
    axes.set_xlim(0, found.unlimited.peak_bytes / unit * 1.06)
    if found.points:
        least = found.points[0].budget_bytes / unit
        axes.axvspan(0, least, color=GRID, alpha=0.45, linewidth=0, zorder=0)
        axes.text(
            least / 2, 0.5, "does not fit", transform=axes.get_xaxis_transform(), rotation=90, color="#777777",
            ha="center", va="center", fontsize=9,
        )  # fmt: skip
    tier = "VRAM" if found.tier == "vram" else "RAM"
    axes.set_xlabel(f"{tier} budget, {name}", color=INK)
    axes.set_ylabel("forward and backward, ms", color=INK)
    above = axes.secondary_yaxis("right", functions=(lambda ms: ms / base_ms, lambda times: times * base_ms))
    above.set_ylabel("times everything kept", color=INK)
    how = "forecast from a profile, not measured" if simulated else "forecast from a measured step"
    axes.set_title(f"{title + ', ' if title else ''}{found.machine}\n{how}", fontsize=11, color=INK, loc="left")


def _mark(axes: Any, point: Point, unit: int, name: str, color: str, marker: str, label: str, base_ms: float) -> None:
    size, times = point.peak_bytes / unit, point.step_ms / base_ms
    axes.plot(
        [size],
        [point.step_ms],
        color=color,
        marker=marker,
        markersize=8,
        linestyle="none",
        label=f"{label}: {point.step_ms:.4g} ms ({times:.2f} x) at {size:.1f} {name}",
        zorder=4,
    )
