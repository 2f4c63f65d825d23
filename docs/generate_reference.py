"""Writes docs/reference.md from the docstrings and the command's options.

Modules are read as text, so nothing about the machine or the Python version gets into the result.

    python docs/generate_reference.py
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import typer.main

import torchstorm
from torchstorm.cli import app

DOCS = Path(__file__).parent
PACKAGE = DOCS.parent / "src" / "torchstorm"
# In the order of the house: what stands on nothing first.
ROOMS = [
    "errors",
    "sizes",
    "paths",
    "transfer",
    "storage",
    "memory",
    "plan",
    "offload",
    "kernels",
    "models",
    "train",
    "report",
    "bench",
]
# Modules shown with all that is public in them: what a user calls, gets back, or writes a tier or a backend against.
IN_FULL = [
    "offload.session",
    "offload.planning",
    "offload.given",
    "offload.simulate",
    "offload.report",
    "plan.plan",
    "plan.forecast",
    "plan.trace",
    "plan.machine",
    "plan.profiles",
    "plan.curve",
    "plan.microbatch",
    "plan.solve",
    "errors",
    "sizes",
    "memory.tier",
    "storage.backend",
    "storage.xnvme",
    "storage.layout",
    "storage.volume",
    "storage.nvme",
    "storage.request",
    "storage.records",
    "storage.loader",
    "storage.choice",
    "storage.ops",
    "kernels.ladders",
    "kernels.linear.function",
    "kernels.linear_cross_entropy.function",
    "kernels.elementwise.function",
    "kernels.dropout.function",
    "kernels.batch_norm.function",
    "kernels.mlstm.function",
    "kernels.mlstm.step",
    "kernels.mlstm.reference",
    "kernels.softmax.function",
    "kernels.norms.function",
    "kernels.slstm",
    "kernels.mlstm.ladder",
    "models.gpt",
    "models.xlstm",
    "train.config",
    "train.job",
    "report.doctor",
]

Documented = ast.ClassDef | ast.FunctionDef


def make_reference() -> str:
    """The whole page."""
    parts = ["# Reference", "", "Written by `make docs` from the docstrings: change those, not this page.", ""]
    parts += ["## Public names", "", "| name | what it is |", "|---|---|"]
    parts += [_public_row(name) for name in torchstorm.__all__]
    parts += ["", "## Command", ""]
    command = typer.main.get_command(app)
    for name, sub in _leaf_commands("torchstorm", command):
        parts += _command(name, sub)
    parts += ["## Modules", ""]
    for name in IN_FULL:
        parts += _module(name)
    parts += ["## Every module", "", "| module | what it is |", "|---|---|"]
    for path in _modules():
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        shown = f"[`{name}`](#torchstorm{name.replace('.', '')})" if name in IN_FULL else f"`{name}`"
        parts.append(f"| {shown} | {_summary(ast.parse(path.read_text()))} |")
    return "\n".join(parts).rstrip() + "\n"


def _public_row(name: str) -> str:
    module = _homes()[name]
    tree = ast.parse((DOCS.parent / "src" / f"{module.replace('.', '/')}.py").read_text())
    found = [node for node in tree.body if isinstance(node, Documented) and node.name == name]
    return f"| [`torchstorm.{name}`](#{module.replace('.', '')}) | {_summary(found[0])} |"


def _homes() -> dict[str, str]:
    """Public name -> the module that it is made in, as `torchstorm/__init__.py` tells type checkers."""
    imports = [
        node for node in ast.walk(ast.parse((PACKAGE / "__init__.py").read_text())) if isinstance(node, ast.ImportFrom)
    ]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def _leaf_commands(name: str, command: Any) -> list[tuple[str, Any]]:
    subs = getattr(command, "commands", None)
    if not subs:
        return [(name, command)]
    return [leaf for sub_name, sub in subs.items() for leaf in _leaf_commands(f"{name} {sub_name}", sub)]


def _command(name: str, command: Any) -> list[str]:
    lines = [f"### `{name}`", "", inspect.cleandoc(command.help or ""), ""]
    rows = []
    for parameter in command.params:
        names = ", ".join(f"`{option}`" for option in (*parameter.opts, *parameter.secondary_opts))
        if names != "`--help`":
            rows.append(f"| {names} | {getattr(parameter, 'help', None) or ''} |")
    return [*lines, "| option | what it says |", "|---|---|", *rows, ""] if rows else lines


def _modules() -> list[Path]:
    paths = [path for path in PACKAGE.rglob("*.py") if not path.name.startswith("_") and path.stem != "cli"]
    return sorted(paths, key=lambda path: (ROOMS.index(path.relative_to(PACKAGE).parts[0].removesuffix(".py")), path))


def _module(name: str) -> list[str]:
    tree = ast.parse((PACKAGE / f"{name.replace('.', '/')}.py").read_text())
    lines = [f"### torchstorm.{name}", "", *_text(tree)]
    for node in tree.body:
        if isinstance(node, Documented) and not node.name.startswith("_") and not _is_overload(node):
            lines += [f"#### {node.name}", "", "```python", _signature(node), "```", "", *_text(node)]
            if isinstance(node, ast.ClassDef):
                lines += _methods(node)
    return lines


def _is_overload(node: Documented) -> bool:
    """Whether this only tells type checkers about a function that follows."""
    return any(ast.unparse(decorator) == "overload" for decorator in node.decorator_list)


def _methods(node: ast.ClassDef) -> list[str]:
    lines = []
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_") and ast.get_docstring(method):
            lines += ["```python", _signature(method), "```", "", *_text(method)]
    return lines


def _summary(node: ast.Module | Documented) -> str:
    return " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split()).replace("|", "\\|")


def _text(node: ast.Module | Documented) -> list[str]:
    text = ast.get_docstring(node)
    return ["```text", text, "```", ""] if text else []


def _signature(node: Documented) -> str:
    if isinstance(node, ast.FunctionDef):
        decorators = "".join(f"@{ast.unparse(decorator)}\n" for decorator in node.decorator_list)
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        return f"{decorators}def {node.name}({ast.unparse(node.args)}){returns}"
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    lines = [f"class {node.name}({bases})" if bases else f"class {node.name}"]
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            lines.append(f"    {_signature(statement)}")
        elif isinstance(statement, ast.AnnAssign) and not ast.unparse(statement.target).startswith("_"):
            lines.append(f"    {ast.unparse(statement)}")
    return "\n".join(lines)


if __name__ == "__main__":
    (DOCS / "reference.md").write_text(make_reference())
