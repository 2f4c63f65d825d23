"""Progress display: a bar on a terminal. Without a terminal, a training run prints a line now and then."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from torchstorm.sizes import format_size
from torchstorm.train.loop import StepInfo

_PLAIN_LINES = 10
_PLAIN_LINE_EVERY_S = 30.0


class _Shown:
    """Shows a progress bar within a `with`, on a terminal only."""

    _bar: Progress | None = None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


class Display(_Shown):
    """Shows the steps of one run within a `with`.

    Args:
        console: where.
        title: name of the run.
        first_step: number of steps completed before.
        num_steps: total number of steps.
    """

    def __init__(self, console: Console, title: str, *, first_step: int, num_steps: int) -> None:
        self._console = console
        self._title = title
        self._num_steps = num_steps
        self._line_every = max(1, num_steps // _PLAIN_LINES)
        self._last_line_s = time.monotonic()
        if console.is_terminal:
            columns = ("[bold]{task.description}", BarColumn(bar_width=20), MofNCompleteColumn())
            self._bar = Progress(*columns, TextColumn("{task.fields[info]}"), TimeRemainingColumn(), console=console)
            self._task = self._bar.add_task(title, total=num_steps, completed=first_step, info="first step")

    def step(self, info: StepInfo) -> None:
        """Shows a completed step."""
        text = describe(info)
        if self._bar is not None:
            self._bar.update(self._task, completed=info.step, info=text)
            if info.val_loss is not None:
                self._bar.console.print(f"step {info.step}: validation loss {info.val_loss:.4f}", highlight=False)
            return
        now_s = time.monotonic()
        is_due = info.step % self._line_every == 0 or now_s - self._last_line_s > _PLAIN_LINE_EVERY_S
        if is_due or info.val_loss is not None or info.step in (1, self._num_steps):
            self._last_line_s = now_s
            validation = "" if info.val_loss is None else f"  validation loss {info.val_loss:.4f}"
            line = f"{self._title}: step {info.step}/{self._num_steps}  {text}{validation}"
            self._console.print(line, highlight=False, soft_wrap=True)


class BytesDisplay(_Shown):
    """Shows processed bytes within a `with`: a bar on a terminal, nothing elsewhere.

    Args:
        console: where.
        title: name of the work.
        total_bytes: total number of bytes.
    """

    def __init__(self, console: Console, title: str, *, total_bytes: int) -> None:
        if console.is_terminal:
            columns = ("[bold]{task.description}", BarColumn(bar_width=20), DownloadColumn(), TransferSpeedColumn())
            self._bar = Progress(*columns, TimeRemainingColumn(), console=console)
            self._task = self._bar.add_task(title, total=total_bytes)

    def advance(self, nbytes: int) -> None:
        """Adds processed bytes."""
        if self._bar is not None:
            self._bar.update(self._task, advance=nbytes)


def describe(info: StepInfo) -> str:
    """Formats a step's loss, speed and memory per tier. Tiers without data are left out."""
    tiers = {"vram": info.vram_bytes, "ram": info.ram_bytes, "disk": info.disk_bytes}
    memory = "  ".join(f"{name} {format_size(size_bytes)}" for name, size_bytes in tiers.items() if size_bytes)
    return f"loss {info.loss:.4f}  {info.tokens_per_s:,.0f} tok/s  {memory}".rstrip()
