"""Bar charts of milliseconds, with one panel per shape."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchstorm.report.picture import GRID, save

_COLORS = ("#7fa8d1", "#1f5fa8", "#12365f")
_KNOWN = "#c2571a"


@dataclass(frozen=True, kw_only=True)
class Panel:
    """The bars of one shape.

    Attributes:
        title: title of the panel.
        bars: (name, milliseconds per pass); None for a missing value.
        lines: reference values in milliseconds.
    """

    title: str
    bars: Sequence[tuple[str, Sequence[float | None]]]
    lines: Sequence[float] = ()


def draw_bars(panels: Sequence[Panel], path: str | os.PathLike[str], *, title: str, legend: str) -> None:
    """Plots panels below each other. Names without any time are left out.

    Args:
        panels: from top to bottom.
        path: file of the plot. Its suffix is the format.
        title: title of the plot.
        legend: explanation of the bars of a name, from top to bottom, and of the lines.

    Raises:
        StorageError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [[bar for bar in panel.bars if any(ms is not None for ms in bar[1])] for panel in panels]
    heights = [0.45 * max(1, len(bars)) + 0.9 for bars in shown]
    figure = Figure(figsize=(9.0, sum(heights) + 0.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    places = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    for axes, panel, bars in zip(places[:, 0], panels, shown, strict=True):
        _draw(axes, panel, bars, legend)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    save(figure, path, "--plot")


def _draw(axes: Any, panel: Panel, bars: Sequence[tuple[str, Sequence[float | None]]], legend: str) -> None:
    for number, (_, times) in enumerate(bars):
        height = 0.8 / len(times)
        for index, ms in enumerate(times):
            if ms is not None:
                place = number + (index - (len(times) - 1) / 2) * height
                axes.barh(place, ms, height=height * 0.95, color=_COLORS[index], zorder=2)
                axes.text(ms, place, f" {ms:.3g}", va="center", fontsize=8)
    for ms in panel.lines:
        axes.axvline(ms, color=_KNOWN, linewidth=1, linestyle=(0, (4, 3)), zorder=3)
    axes.set_yticks(range(len(bars)), [name for name, _ in bars], fontsize=8)
    axes.invert_yaxis()
    if bars:
        axes.set_xscale("log")
    axes.set_xlabel(legend, fontsize=8)
    axes.set_title(panel.title, fontsize=9, loc="left")
    axes.grid(True, axis="x", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.margins(x=0.12)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
