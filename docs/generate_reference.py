"""Writes docs/reference.md: the public names, each with its signature and the first paragraph of its docstring.

Signatures and docstrings are read as text, so nothing about the machine or the Python version gets into the result.

    python docs/generate_reference.py
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import typer.main

import torchstorm
from torchstorm import kernels
from torchstorm.cli import app

DOCS = Path(__file__).parent
# Modules that users import, and what they import of each.
PUBLIC = {
    "torchstorm": torchstorm.__all__,
    "torchstorm.kernels": kernels.__all__,
    "torchstorm.models.gpt": ["GPT", "GPTConfig"],
    "torchstorm.models.xlstm": ["XLSTM", "XLSTMConfig"],
    "torchstorm.train.job": ["train"],
    "torchstorm.train.config": ["TrainConfig"],
    "torchstorm.storage": ["info"],
    "torchstorm.storage.choice": ["open_file"],
    "torchstorm.report.doctor": ["examine"],
}
WIDTH = 100

Documented = ast.ClassDef | ast.FunctionDef


def make_reference() -> str:
    """The whole page."""
    lines = [
        "# Reference",
        "",
        "Written by `make docs` from the docstrings: change those, not this page. The whole of a",
    ]
    lines += [
        "docstring, with arguments, units and errors, is shown by `help()`, as in `help(torchstorm.Session)`.",
        "",
    ]
    lines += ["## Commands", "", "Options and an example are shown by `-h`, as in `torchstorm train -h`.", ""]
    lines += ["| command | what it does |", "|---|---|"]
    lines += [f"| `{name}` | {text} |" for name, text in _commands("torchstorm", typer.main.get_command(app))]
    for module, names in PUBLIC.items():
        lines += ["", f"## {module}"]
        for name in names:
            lines += ["", f"### {name}", "", *_entry(_node(module, name))]
    return "\n".join(lines) + "\n"


def _commands(name: str, command: Any) -> list[tuple[str, str]]:
    below = getattr(command, "commands", None)
    if not below:
        return [(name, " ".join(command.help.split()))]
    return [each for sub_name, sub in below.items() for each in _commands(f"{name} {sub_name}", sub)]


def _node(module: str, name: str) -> Documented:
    """Where a name is made, in the text of its module."""
    found = getattr(import_module(module), name)
    if isinstance(found, ModuleType):  # torchstorm.plan is the planning room, too
        found = import_module("torchstorm.offload.preview").plan
    tree = ast.parse(Path(str(import_module(found.__module__).__file__)).read_text())
    # The last of its name: overloads, which only tell type checkers about it, stand before.
    return [node for node in tree.body if isinstance(node, Documented) and node.name == found.__name__][-1]


def _entry(node: Documented) -> list[str]:
    lines = ["```python", *_signature(node), "```", "", _summary(node)]
    if isinstance(node, ast.ClassDef):
        methods = [each for each in node.body if isinstance(each, ast.FunctionDef) and ast.get_docstring(each)]
        shown = [f"- `{_head(each)}`: {_summary(each)}" for each in methods if not each.name.startswith("_")]
        lines += ["", *shown] if shown else []
    return lines


def _signature(node: Documented) -> list[str]:
    if isinstance(node, ast.FunctionDef):
        return _wrapped(f"def {node.name}", node)
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    lines = [f"class {node.name}({bases})" if bases else f"class {node.name}"]
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            lines += [f"    {line}" for line in _wrapped("def __init__", statement)]
        elif isinstance(statement, ast.AnnAssign) and not ast.unparse(statement.target).startswith("_"):
            lines.append(f"    {ast.unparse(statement)}")
    return lines


def _wrapped(head: str, node: ast.FunctionDef) -> list[str]:
    """In one line where that is short enough, else an argument a line."""
    arguments = _arguments(node)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"{head}({', '.join(arguments)}){returns}"
    if len(line) <= WIDTH:
        return [line]
    return [f"{head}(", *(f"    {argument}," for argument in arguments), f"){returns}"]


def _head(node: ast.FunctionDef) -> str:
    """A method as it is called; a property as it is read."""
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    if any(decorator in ("property", "cached_property") for decorator in decorators):
        return node.name
    arguments = _arguments(node)
    return f"{node.name}({', '.join(arguments if 'staticmethod' in decorators else arguments[1:])})"


def _arguments(node: ast.FunctionDef) -> list[str]:
    """Each with its type and its default."""
    found, depth = [""], 0
    for character in ast.unparse(node.args):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            found.append("")
        else:
            found[-1] += character
    return [argument.strip() for argument in found if argument]


def _summary(node: Documented) -> str:
    return " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())


if __name__ == "__main__":
    (DOCS / "reference.md").write_text(make_reference())
