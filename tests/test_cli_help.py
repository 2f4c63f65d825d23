"""What the command tells of itself: its version, and for every command what it does, its options and an example."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
from typer.testing import CliRunner

from torchstorm.cli import app

COMMAND: Any = typer.main.get_command(app)


def all_commands(command: Any, *names: str) -> list[tuple[str, ...]]:
    below = getattr(command, "commands", {})
    return [names, *(each for name, sub in below.items() for each in all_commands(sub, *names, name))]


COMMANDS = all_commands(COMMAND)


def invoke(*arguments: str, width: int = 80) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(width)})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def example_of(names: tuple[str, ...]) -> list[str]:
    """The words behind `torchstorm` of the example that a command's help ends with."""
    code, text = invoke(*names, "-h")
    assert code == 0
    found = re.search(r"\n Example: torchstorm ([^\n]+?) *\n\s*$", text)
    assert found, f"the help ends with:\n{text[-200:]}"
    return shlex.split(found[1])


def test_the_commands_are_found() -> None:
    assert {(), ("train",), ("bench",), ("bench", "norms")} <= set(COMMANDS)


@pytest.mark.parametrize("names", COMMANDS, ids=" ".join)
def test_every_command_has_a_short_option_for_its_help_which_fits_a_narrow_terminal(names: tuple[str, ...]) -> None:
    assert invoke(*names, "-h") == invoke(*names, "--help")
    code, text = invoke(*names, "-h")
    assert code == 0
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text  # nothing is cut off
    option_lines = [line for line in text.splitlines() if re.match(r"│ +--", line)]
    assert len(option_lines) >= 1


@pytest.mark.parametrize("names", COMMANDS, ids=" ".join)
def test_every_help_ends_with_an_example_of_that_command(names: tuple[str, ...]) -> None:
    command, arguments = COMMAND, example_of(names)
    assert tuple(arguments[: len(names)]) == names
    while getattr(command, "commands", None):
        name, *arguments = arguments
        command = command.commands[name]
    command.make_context(command.name, arguments)


# Those whose work is as quick as the example makes it; the others train, or time for minutes.
@pytest.mark.parametrize("names", [("plan",), ("pack",), ("doctor",)], ids=" ".join)
def test_a_quick_example_runs(names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a storm in a text. " * 40)
    monkeypatch.chdir(tmp_path)
    arguments = [str(tmp_path) if word == "/nvme" else word for word in example_of(names)]
    code, text = invoke(*arguments)
    assert code == 0, text


def run_module(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "torchstorm", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_version_is_one_line() -> None:
    line = f"torchstorm {importlib.metadata.version('torchstorm')} (PyTorch {torch.__version__}, Python "
    code, text = invoke("--version")
    assert (code, text) == (0, f"{line}{platform.python_version()})\n")


def test_the_version_does_not_wait_for_torch() -> None:
    code = "import sys; from torchstorm.cli import app; app(['--version'], standalone_mode=False); print(*sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert told.startswith("torchstorm ")
    assert "torchstorm.train.config" in told
    assert " torch " not in told


def test_the_version_where_it_runs_from_its_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", not_installed)
    assert invoke("--version")[1].startswith("torchstorm not installed (")


def test_the_package_runs_as_a_module() -> None:
    told = run_module("--version")
    assert (told.returncode, told.stderr) == (0, "")
    assert told.stdout.startswith("torchstorm ")
    wrong = run_module("trian")
    assert wrong.returncode == 2
    assert "Usage: python -m torchstorm " in wrong.stderr
    assert "No such command 'trian'. Did you mean 'train'?" in wrong.stderr


@pytest.mark.parametrize("names", [(), ("bench",)], ids=" ".join)
def test_without_a_command_the_help_is_shown(names: tuple[str, ...]) -> None:
    code, text = invoke(*names)
    assert code == 2
    assert text.strip() == invoke(*names, "-h")[1].strip()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bench", "norm"], "No such command 'norm'. Did you mean 'norms'?"),
        (["train", "--jsn", "a"], "No such option: --jsn"),
        (["train", "extra"], "unexpected extra argument"),
        (["train", "--steps", "x"], "Invalid value for '--steps'"),
    ],
)
def test_a_misspelt_command_line_is_told_with_the_way_to_the_help(arguments: list[str], said: str) -> None:
    code, text = invoke(*arguments, width=200)
    assert code == 2
    assert said in text
    assert re.search(r"Try '.* -h' for help\.", text)
