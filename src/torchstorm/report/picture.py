"""Writes plots with matplotlib, an optional dependency."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchstorm.errors import ConfigError
from torchstorm.paths import check_output, is_replaceable, user_path, write_document

INK, GRID = "#333333", "#dddddd"


def require_matplotlib(option: str) -> None:
    """Checks that matplotlib is installed, before the data of a plot is computed.

    Args:
        option: the option that requested the plot, such as "--curve", for messages.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{option} writes a plot with matplotlib, which is not installed: pip install torchstorm[plot], or leave "
            f"{option} out."
        ) from error


def check_picture(path: str | os.PathLike[str], option: str) -> None:
    """Checks that a plot can be written in this format.

    Args:
        path: file of the plot. Its suffix is the format. A device or FIFO without a suffix gets PNG.
        option: the option that requested it, for messages.

    Raises:
        ConfigError: matplotlib is not installed, or does not write this format.
        StorageError: the file cannot be written, as far as that can be told beforehand.
    """
    require_matplotlib(option)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    path = check_output(path, name=option)
    formats = FigureCanvasAgg(Figure()).get_supported_filetypes()
    if _format(path) not in formats:
        raise ConfigError(
            f"{option} {path}: {path.suffix or 'no suffix'!r} is not one of {', '.join(sorted(formats))}."
        )


def draw(path: str | os.PathLike[str], fill: Callable[[Any], None], *, option: str) -> None:
    """Creates and writes a plot with one pair of axes.

    Args:
        path: file of the plot. Its suffix is the format.
        fill: draws into the axes.
        option: the option that requested the plot, for messages.

    Raises:
        ConfigError: matplotlib is not installed, or does not write this format.
        StorageError: the file cannot be written.
    """
    check_picture(path, option)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # needs no display
    axes = figure.add_subplot()
    fill(axes)
    axes.grid(True, color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(loc="upper right", frameon=True, framealpha=0.95, edgecolor=GRID, fontsize=9)
    save(figure, path, option)


def save(figure: Any, path: str | os.PathLike[str], option: str) -> None:
    """Writes a figure. Raises as `check_picture` does."""
    check_picture(path, option)
    drawn = io.BytesIO()
    figure.savefig(drawn, format=_format(user_path(path, name=option)))
    write_document(path, drawn.getvalue(), name=option)


def _format(path: Path) -> str:
    """The format that the suffix names; PNG for a device or FIFO without one."""
    return path.suffix.removeprefix(".").lower() or ("" if is_replaceable(path) else "png")
