"""Every bench names the sources that its figures depend on."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import typer.main

import torchstorm
from torchstorm.bench.commands import bench_app
from torchstorm.bench.sources import SOURCES

PACKAGE = Path(torchstorm.__file__).parent
# What prints, writes and draws; and modules that benches share for one name of theirs.
NOT_MEASURED = {"bench", "report", "train"}


def rooms_imported(names: tuple[str, ...]) -> set[str]:
    """Rooms that the named sources of this package import, at any depth."""
    found = set()
    files = [
        file
        for name in names
        for file in ([PACKAGE / name] if name.endswith(".py") else (PACKAGE / name).rglob("*.py"))
    ]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("torchstorm."):
                found.add(str(node.module).split(".")[1])
    return found


def test_every_bench_is_in_the_table() -> None:
    commands = getattr(typer.main.get_command(bench_app), "commands", {})
    assert set(SOURCES) == set(commands)


@pytest.mark.parametrize("op", SOURCES)
def test_a_bench_names_all_rooms_that_its_sources_import(op: str) -> None:
    names = SOURCES[op]
    rooms = {name.split("/")[0].removesuffix(".py") for name in names}
    assert all((PACKAGE / name).exists() for name in names)
    assert rooms_imported(names) - rooms - NOT_MEASURED == set()
