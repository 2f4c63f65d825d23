"""Every bench names the sources that its figures depend on."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest
import typer.main

import torchstorm
from torchstorm.bench.commands import bench_app
from torchstorm.bench.sources import SOURCES

PACKAGE = Path(torchstorm.__file__).parent
# What prints, draws, and finds files.
NOT_MEASURED = {"paths", "report", "train"}
# Of which benches that train nothing use what takes options apart, and tidies up.
OF_TRAINING = {"bench/cases.py", "bench/measure.py", "bench/side_by_side.py"}
PRINTS = {"bars", "mlstm_rows", "op_rows", "ops", "record", "rows", "sources"}


def imported(names: tuple[str, ...]) -> set[str]:
    """What the named sources import of this package; see `imported_by`."""
    folders = [PACKAGE / name for name in names]
    files = [file for folder in folders for file in ([folder] if folder.suffix else folder.rglob("*.py"))]
    return {each for file in files for each in imported_by(file)}


@functools.cache
def imported_by(file: Path) -> frozenset[str]:
    """Rooms, and of the benches' room modules, as "bench/x.py"."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("torchstorm."):
            modules = [str(node.module), *(f"{node.module}.{each.name}" for each in node.names)]
            found |= {module.split(".")[1] for module in modules if not module.startswith("torchstorm.bench")}
            paths = {"/".join(module.split(".")[1:3]) + ".py" for module in modules}
            found |= {path for path in paths if path.startswith("bench/") and (PACKAGE / path).exists()}
    return frozenset(found)


def test_every_bench_is_in_the_table() -> None:
    commands = getattr(typer.main.get_command(bench_app), "commands", {})
    assert set(SOURCES) == set(commands)


@pytest.mark.parametrize("op", SOURCES)
def test_a_bench_names_all_that_its_sources_import(op: str) -> None:
    names = SOURCES[op]
    assert [name for name in names if not (PACKAGE / name).exists()] == []
    rooms = {name.split("/")[0].removesuffix(".py") for name in names}
    not_measured = NOT_MEASURED | {f"bench/{name}.py" for name in PRINTS}
    if "bench/sessions.py" not in names:
        not_measured |= OF_TRAINING
    assert imported(names) - rooms - set(names) - not_measured == set()
