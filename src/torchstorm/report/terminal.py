"""How a command ends that cannot go on: a line for people, and an exit code."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from torchstorm.errors import TorchstormError


@contextmanager
def told() -> Iterator[None]:
    """Tells a mistake in one line, and a stop with the way to go on."""
    from torchstorm.train.stop import Interrupted, Stopped

    try:
        yield
    except TorchstormError as error:
        line = " ".join(str(error).split())
        errors = Console(stderr=True)
        errors.print(f"{type(error).__name__}: {line}", style="bold red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    except Interrupted as stopped:
        text = f"Stopped by {stopped}."
        if isinstance(stopped, Stopped):
            text += f"\nGo on with: torchstorm train --resume {shlex.quote(str(stopped.checkpoint_dir))}"
        Console().print(text, markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(stopped.exit_code) from None
