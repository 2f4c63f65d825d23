"""Where commands print their lines and documents, and how a failed or stopped one ends: one line and an exit code."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from torchstorm.errors import TorchstormError
from torchstorm.paths import descriptor_of

_STANDARD_OUTPUT = 1


def document_option(text: str) -> Any:
    """An option that says where a document goes; `-` is standard output."""
    return typer.Option(help=text, parser=lambda given: Path("/dev/stdout" if given == "-" else given), metavar="FILE")


def console_beside(*documents: Path | None) -> Console:
    """Where a command's lines go: to standard error where standard output is a document's, which is then all it has."""
    taken = any(path is not None and descriptor_of(path) == _STANDARD_OUTPUT for path in documents)
    return Console(stderr=taken)


def installed_version(name: str) -> str:
    """Of a distribution; "not installed" where there is none, as where this one is run from its sources."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


@contextmanager
def told() -> Iterator[None]:
    """Prints the message of a TorchstormError, or of a stopped run with the command to resume it."""
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
            text += f"\nResume with: torchstorm train --resume {shlex.quote(str(stopped.checkpoint_dir))}"
        Console().print(text, markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(stopped.exit_code) from None
