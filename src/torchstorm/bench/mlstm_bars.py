"""The mLSTM's ladder as a picture: bars of milliseconds, one panel a shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchstorm.bench.mlstm_rows import MLSTMRow
from torchstorm.report.picture import GRID, save

_FORWARD, _BACKWARD, _KNOWN = "#7fa8d1", "#1f5fa8", "#c2571a"


def draw_bars(rows: list[MLSTMRow], path: Path, *, title: str) -> None:
    """Draws what was timed; the best known times as lines.

    Args:
        rows: in the order of the bars.
        path: of the picture; its ending says the format.
        title: stands above it.

    Raises:
        StorageError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shapes = list(dict.fromkeys(row.shape for row in rows))
    shown = {shape: [row for row in rows if row.shape == shape and row.fwd_ms is not None] for shape in shapes}
    heights = [0.45 * max(1, len(shown[shape])) + 0.9 for shape in shapes]
    figure = Figure(figsize=(9.0, sum(heights) + 0.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(shapes), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    for panel, shape in zip(panels[:, 0], shapes, strict=True):
        _draw(panel, shape, shown[shape])
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    save(figure, path, "--plot")


def _draw(axes: Any, shape: str, rows: list[MLSTMRow]) -> None:
    for number, row in enumerate(rows):
        for offset, ms, color in ((-0.2, row.fwd_ms, _FORWARD), (0.2, row.fwdbwd_ms, _BACKWARD)):
            if ms is not None:
                axes.barh(number + offset, ms, height=0.38, color=color, zorder=2)
                axes.text(ms, number + offset, f" {ms:.3g}", va="center", fontsize=8)
    known = next((row.best_known_ms for row in rows if row.best_known_ms is not None), None)
    for ms in known or ():
        axes.axvline(ms, color=_KNOWN, linewidth=1, linestyle=(0, (4, 3)), zorder=3)
    axes.set_yticks(range(len(rows)), [row.variant for row in rows], fontsize=8)
    axes.invert_yaxis()
    if rows:
        axes.set_xscale("log")
    legend = "forward, and with backward, ms" + (", dashed: best known" if known else "")
    axes.set_xlabel(legend, fontsize=8)
    axes.set_title(shape, fontsize=9, loc="left")
    axes.grid(True, axis="x", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.margins(x=0.12)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
