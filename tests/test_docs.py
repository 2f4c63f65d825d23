"""The docs do what they say: their Python runs, their commands exist, their links lead somewhere."""

from __future__ import annotations

import functools
import re
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.main

import forked
import torchstorm
from torchstorm import kernels
from torchstorm.cli import app

REPOSITORY = Path(__file__).parents[1]
README = REPOSITORY / "README.md"
PAGES = [
    README,
    REPOSITORY / "CONTRIBUTING.md",
    REPOSITORY / "CHANGELOG.md",
    *sorted((REPOSITORY / "docs").glob("**/*.md")),
]
WITH_PYTHON = [README, REPOSITORY / "docs" / "tutorial.md"]
# typer has click inside in some versions and beside it in others.
USAGE_ERROR = typer.BadParameter.__mro__[1]
MAKEFILE = (REPOSITORY / "Makefile").read_text()
PYTEST = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def documented_commands() -> list[tuple[str, str]]:
    """(page, command) for every command line in a bash block, and every command quoted in a text."""
    found = []
    for page in PAGES:
        if page.name == "reference.md":
            continue
        lines = [line for block in blocks(page, "bash") for line in block.splitlines()]
        lines += re.findall(r"`((?:torchstorm|make) [^`\n]+)`", page.read_text())
        found += [(page.name, line.split("  #")[0].strip()) for line in lines if line.strip()]
    return found


def make_targets(line: str) -> list[str]:
    return [word for word in shlex.split(line)[1:] if "=" not in word]


@functools.cache
def torchstorm_command() -> Any:
    """Made once: it takes longer than what is looked up in it."""
    return typer.main.get_command(app)


def parse_torchstorm(arguments: list[str]) -> list[str]:
    """Takes a command line apart as the command would, without running it. Returns the subcommands."""
    command = torchstorm_command()
    names = []
    while getattr(command, "commands", None):
        name, *arguments = arguments
        command = command.commands[name]
        names.append(name)
    command.make_context(names[-1], arguments)
    return names


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.name)
def test_the_python_of_a_page_runs_in_order(page: Path, tmp_path: Path) -> None:
    code = blocks(page, "python")
    assert code
    command = [sys.executable, "-W", "error", "-c", "\n".join(code)]
    done = forked.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "forecast" in done.stdout
    assert list(tmp_path.glob("spill/*")) == []


@pytest.mark.parametrize(("page", "line"), documented_commands())
def test_a_documented_command_exists_with_all_its_options(page: str, line: str) -> None:
    program, *arguments = shlex.split(line)
    if program == "make":
        for target in make_targets(line):
            assert re.search(rf"^{re.escape(target)}:", MAKEFILE, re.MULTILINE), f"{page}: no target {target}"
    elif program == "torchstorm":
        assert parse_torchstorm(arguments)
    elif program == "pytest":
        assert any(mark.startswith(f"{arguments[1]}:") for mark in PYTEST["markers"]), f"{page}: {line}"
    elif program == "python3" and arguments[0].startswith("tools/"):
        text = (REPOSITORY / arguments[0]).read_text()
        options = [one for one in arguments[1:] if one.startswith("--")]
        assert all(f'"{one}"' in text for one in options), f"{page}: {line}"
    else:
        pytest.fail(f"{page} shows {line!r}, and this test knows no program {program!r}")


def test_an_option_that_does_not_exist_would_be_noticed() -> None:
    assert parse_torchstorm(["train", "--ram", "64MiB", "--compare"]) == ["train"]
    with pytest.raises(USAGE_ERROR):
        parse_torchstorm(["train", "--no-such-option"])
    with pytest.raises(KeyError):
        parse_torchstorm(["no-such-command"])


def test_every_command_is_in_the_readme() -> None:
    commands = getattr(typer.main.get_command(app), "commands", {})
    for name in commands:
        assert f"`torchstorm {name}" in README.read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, target


def test_the_readme_begins_with_a_sentence_a_measured_table_the_two_commands_and_ten_lines_of_python() -> None:
    lines = README.read_text().splitlines()
    start = "\n".join(lines[:30])
    sentence = lines[2]
    assert re.fullmatch(r"[^.|`]+\.", sentence)
    assert "make train" in start
    assert "make test" in start
    example = blocks(README, "python")[0].splitlines()
    assert example[-1] in start
    assert len([line for line in example if line]) <= 10
    assert re.search(r"^\|.*\d", start, re.MULTILINE), "the measured table is missing"
    assert "<!-- measured table -->" not in start


def test_what_a_budget_means_is_said_in_the_docs() -> None:
    text = " ".join((REPOSITORY / "docs" / "architecture.md").read_text().split())
    for meaning in (
        "`vram` is the peak of `torch.cuda.memory_allocated` within a step, weights and all.",
        "`ram` on CUDA is pinned arena plus staging.",
        "`ram` on CPU is the bytes of saved-tensor storages (each storage once; weights and gradients not counted) "
        "from the moment autograd saves them until it lets go, with staging and prefetched ones.",
        "`disk` is the bytes in spill files.",
    ):
        assert meaning in text


def test_the_reference_is_what_the_docstrings_say_now() -> None:
    code = "import runpy, sys; sys.stdout.write(runpy.run_path('docs/generate_reference.py')['make_reference']())"
    made = forked.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    written = (REPOSITORY / "docs" / "reference.md").read_text()
    assert made == written, "run `make docs`"


def test_every_public_name_and_command_stands_in_the_reference_with_what_it_is() -> None:
    reference = (REPOSITORY / "docs" / "reference.md").read_text()
    for module, names in (("torchstorm", torchstorm.__all__), ("torchstorm.kernels", kernels.__all__)):
        (section,) = re.findall(rf"^## {re.escape(module)}\n(.*?)(?=^## |\Z)", reference, re.MULTILINE | re.DOTALL)
        found = re.findall(r"^### (\w+)\n\n```python\n(?:def|class) \w.*?^```\n\n\S", section, re.MULTILINE | re.DOTALL)
        assert found == list(names)
    commands: Any = typer.main.get_command(app)
    below = {f"{name} {sub}" for name, command in commands.commands.items() for sub in getattr(command, "commands", ())}
    for name in {*commands.commands, *below} - {"bench"}:
        assert re.search(rf"^\| `torchstorm {name}` \| \S.* \|$", reference, re.MULTILINE), name


def test_the_reference_is_one_page_that_can_be_read() -> None:
    lines = (REPOSITORY / "docs" / "reference.md").read_text().splitlines()
    assert len(lines) < 1000
