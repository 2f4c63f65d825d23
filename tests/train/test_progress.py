"""train/progress.py: a bar on a terminal, lines elsewhere."""

import io
import time

import pytest
from rich.console import Console

from torchstorm.train.loop import StepInfo
from torchstorm.train.progress import Display, describe


def info(step: int, *, val_loss: float | None = None, disk_bytes: int = 0) -> StepInfo:
    return StepInfo(
        step=step,
        loss=1.25,
        val_loss=val_loss,
        tokens_per_s=12345.6,
        vram_bytes=0,
        ram_bytes=3 * 2**20,
        disk_bytes=disk_bytes,
    )


def test_a_step_is_described_by_loss_speed_and_the_tiers_that_hold_something() -> None:
    assert describe(info(1)) == "loss 1.2500  12,346 tok/s  ram 3.00 MiB"
    assert describe(info(1, disk_bytes=2**30)).endswith("ram 3.00 MiB  disk 1.00 GiB")


def shown_lines(infos: list[StepInfo], num_steps: int) -> list[str]:
    console = Console(file=io.StringIO(), width=20)
    with Display(console, "run", first_step=0, num_steps=num_steps) as display:
        for one in infos:
            display.step(one)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined,no-any-return]


def test_without_a_terminal_about_ten_whole_lines_and_each_validation_are_shown() -> None:
    lines = shown_lines([info(step, val_loss=2.5 if step == 33 else None) for step in range(1, 101)], 100)
    assert [int(line.split("/")[0].rsplit(" ", 1)[1]) for line in lines] == [1, 10, 20, 30, 33, *range(40, 101, 10)]
    assert lines[4] == "run: step 33/100  loss 1.2500  12,346 tok/s  ram 3.00 MiB  validation loss 2.5000"


def test_without_a_terminal_slow_steps_are_shown_every_half_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(0, 1000, 20))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(ticks)))
    lines = shown_lines([info(step) for step in range(2, 8)], 1000)
    assert len(lines) == 3


def test_on_a_terminal_there_is_a_bar_that_ends_full() -> None:
    console = Console(file=io.StringIO(), width=150, force_terminal=True)
    with Display(console, "run", first_step=0, num_steps=3) as display:
        for step in (1, 2, 3):
            display.step(info(step, val_loss=2.5 if step == 3 else None))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "3/3" in shown
    assert "loss 1.2500" in shown
    assert "step 3: validation loss 2.5000" in shown
