"""Plots the losses of several runs over the number of training tokens."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torchstorm.report.picture import INK, draw

_COLOURS = ("#1f5fa8", "#c2571a", "#2e7d32", "#7b3fa0")
_SMOOTHED = 0.9


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One run.

    Attributes:
        name: name in the legend.
        losses: training loss of every step.
        val_losses: (number of steps, validation loss).
    """

    name: str
    losses: Sequence[float]
    val_losses: Sequence[tuple[int, float]]


def draw_losses(
    curves: Sequence[Curve], path: str | os.PathLike[str], *, tokens_per_step: int, title: str, option: str
) -> None:
    """Plots the training loss of every run, smoothed over about ten steps, and its validation loss.

    Args:
        curves: the runs.
        path: file of the plot. Its suffix is the format.
        tokens_per_step: tokens per step, equal for all runs.
        title: title of the plot.
        option: the option that requested the plot, such as "--png", for messages.

    Raises:
        ConfigError: matplotlib is not installed, or does not write this format.
        StorageError: the file cannot be written.
    """

    def fill(axes: Any) -> None:
        for curve, colour in zip(curves, _COLOURS * len(curves), strict=False):
            smooth = list(accumulate(curve.losses, lambda mean, loss: _SMOOTHED * mean + (1 - _SMOOTHED) * loss))
            steps = [tokens_per_step * (step + 1) / 1e6 for step in range(len(smooth))]
            axes.plot(steps, smooth, color=colour, linewidth=1, alpha=0.5)
            axes.plot(
                [tokens_per_step * step / 1e6 for step, _ in curve.val_losses],
                [loss for _, loss in curve.val_losses],
                color=colour,
                linewidth=2,
                marker="o",
                markersize=4,
                label=f"{curve.name}: {curve.val_losses[-1][1]:.3f}",
            )
        lowest = min(loss for curve in curves for _, loss in curve.val_losses)
        highest = max(curve.val_losses[0][1] for curve in curves)
        axes.set_ylim(lowest - 0.1 * (highest - lowest), highest + 0.3 * (highest - lowest))
        axes.set_xlabel("tokens seen, millions", color=INK)
        axes.set_ylabel("loss, nats a token", color=INK)
        axes.set_title(f"{title}\nvalidation thick, training thin and smoothed", fontsize=11, color=INK, loc="left")

    draw(path, fill, option=option)
