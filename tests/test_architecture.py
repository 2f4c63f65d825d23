"""The rules of the house, as docs/architecture.md draws it: who may import whom, and what no file may do.

The rules are functions over source text, so that each is first shown something that breaks it.
"""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchstorm

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "src" / "torchstorm"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# Room -> what it may import from this package besides itself: rooms, or single modules of one.
BASE = {"errors", "sizes", "paths"}
OFFLOAD = BASE | {"nvrtc", "transfer", "storage", "memory", "plan"}
TRAIN = OFFLOAD | {"offload", "kernels"}
ALL = TRAIN | {"models", "train", "report", "bench"}
MAY_IMPORT = {
    "errors": set(),
    "sizes": {"errors"},
    "paths": {"errors"},
    "transfer": BASE,
    "storage": BASE | {"transfer"},
    "memory": BASE | {"transfer", "storage"},
    "plan": BASE | {"memory.tier"},
    "offload": OFFLOAD,
    "nvrtc": {"errors"},
    "kernels": {"errors", "nvrtc"},
    "models": TRAIN,
    "train": TRAIN | {"models"},
    "report": ALL,
    "bench": ALL,
    "cli": ALL,
    "__main__": {"cli"},
    "__init__": ALL,
}
WITHOUT_TORCH = [
    "errors",
    "sizes",
    "paths",
    "memory.tier",
    "plan.beside",
    "plan.forecast",
    "plan.machine",
    "plan.plan",
    "plan.solve",
    "plan.curve",
    "plan.describe",
    "plan.microbatch",
    "plan.profiles",
    "plan.waits",
    "plan.trace",
]
STREAM_OWNER = "transfer/engine.py"
MAX_LINES, MAX_LINES_IN_OFFLOAD = 449, 400
BANNED_NAMES = {"utils", "util", "common", "helpers", "helper", "manager", "managers", "misc"}
# Written so that this file does not break its own rule.
MACHINE_PATHS = re.compile(
    r"(?<![\w.~}])/(?:"
    + "|".join(["work/", "root/", r"home/\w", r"Users/\w", "tmp/v/", "opt/pypi", "opt/wheels"])
    + r")"
    r"|\.\./" + r"shared\b"
)


def module_name(path: Path, package: Path = PACKAGE) -> str:
    return ".".join(path.relative_to(package).with_suffix("").parts)


def imported_modules(source: str) -> Iterator[tuple[int, str]]:
    """(line, module of this package) of every import at any depth; "" is the package itself."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are written in full"
            top = node.module == "torchstorm"
            names = [f"torchstorm.{alias.name}" if top else str(node.module) for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            names = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
        for name in names:
            if name == "torchstorm" or name.startswith("torchstorm."):
                yield node.lineno, name.removeprefix("torchstorm").removeprefix(".")


def forbidden_imports(module: str, source: str) -> list[str]:
    """Imports of this package's modules that the table does not allow `module`."""
    room = module.split(".")[0]
    allowed = MAY_IMPORT[room] | ({room} if room != "__init__" else set())
    return [
        f"{module}, line {line}: imports torchstorm.{target}"
        for line, target in imported_modules(source)
        if not any(target == name or target.startswith(f"{name}.") for name in allowed)
    ]


def stream_makers(source: str) -> list[str]:
    """Calls that make a CUDA stream or event, and whatever speaks of record_stream."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr == "record_stream":
            found.append(f"line {node.lineno}: record_stream")
        if isinstance(node, ast.ImportFrom) and node.module in ("torch", "torch.cuda", "torch.cuda.streams"):
            made = {alias.name for alias in node.names} & {"Stream", "Event", "ExternalStream"}
            found += [f"line {node.lineno}: imports {name}" for name in sorted(made)]
        if isinstance(node, ast.Call) and re.fullmatch(
            r"(?:torch|cuda|torch\.cuda)\.(?:Stream|Event|ExternalStream)", ast.unparse(node.func)
        ):
            found.append(f"line {node.lineno}: {ast.unparse(node.func)}(...)")
    return found


def kept_files() -> list[Path]:
    """The files that the repository keeps, and those that would be added to it."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    files = [REPOSITORY / name for name in listed.split("\0") if name]
    assert REPOSITORY / "pyproject.toml" in files
    return [file for file in files if file.is_file()]


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("sizes", "import torchstorm.plan.plan"),
        ("transfer.pinned", "from torchstorm.memory.host import HostTier"),
        ("storage.direct", "from torchstorm import memory"),
        ("plan.solve", "from torchstorm.memory.host import HostTier"),
        ("plan.solve", "def late():\n    from torchstorm.offload.session import Session"),
        ("offload.session", "import importlib\nimportlib.import_module('torchstorm.cli')"),
        ("offload.session", "if TYPE_CHECKING:\n    from torchstorm.train.loop import run_training"),
        ("kernels.rms_norm", "from torchstorm.sizes import parse_size"),
        ("models.gpt", "import torchstorm.train.loop"),
        ("train.loop", "from torchstorm import Session"),
        ("report.doctor", "from torchstorm.cli import app"),
        ("__init__", "from torchstorm.cli import app"),
    ],
)
def test_the_table_forbids_an_import_against_its_direction(module: str, line: str) -> None:
    assert forbidden_imports(module, line)


def test_the_table_allows_an_import_along_its_direction() -> None:
    assert not forbidden_imports("plan.solve", "from torchstorm.memory.tier import TierSpec\nimport torch")
    assert not forbidden_imports("cli", "from torchstorm.train.job import train")
    assert not forbidden_imports("train.loop", "from torchstorm.train.data import Corpus")


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_a_module_imports_only_what_its_room_may(path: Path) -> None:
    assert forbidden_imports(module_name(path), path.read_text()) == []


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    modules = {module_name(path): path for path in SOURCES}
    edges = {
        name: {target for _, target in imported_modules(path.read_text()) if target in modules}
        for name, path in modules.items()
        if name != "__init__"  # its names are looked up when they are used
    }
    graphlib.TopologicalSorter(edges).prepare()


def test_only_the_engine_makes_streams_and_nothing_uses_record_stream() -> None:
    found = {module_name(path): stream_makers(path.read_text()) for path in SOURCES}
    engine = found.pop(module_name(PACKAGE / STREAM_OWNER))
    assert any("Stream(...)" in line for line in engine), "the rule no longer sees what it is about"
    assert not any("record_stream" in line for line in engine)
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_the_stream_rule_sees_every_way_to_make_one() -> None:
    assert stream_makers("tensor.record_stream(stream)")
    assert stream_makers("import torch\nside = torch.cuda.Stream(0)")
    assert stream_makers("import torch\nside = torch.Stream()")
    assert stream_makers("from torch.cuda import Event")
    assert not stream_makers("import threading\nended = threading.Event()\nisinstance(x, torch.cuda.Event)")


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_a_file_is_short_enough_to_read_at_once(path: Path) -> None:
    allowed = MAX_LINES_IN_OFFLOAD if module_name(path).startswith("offload.") else MAX_LINES
    assert len(path.read_text().splitlines()) <= allowed


def test_every_name_says_what_is_inside() -> None:
    parts = {part for path in SOURCES for part in module_name(path).split(".")}
    assert parts & BANNED_NAMES == set()


def test_every_room_is_known_and_has_something_in_it() -> None:
    rooms = {module_name(path).split(".")[0] for path in SOURCES}
    assert rooms <= MAY_IMPORT.keys()
    # What caches and editors leave behind begins with a dot or with two underscores.
    folders = [folder for folder in PACKAGE.rglob("*") if folder.is_dir()]
    for folder in folders:
        if any(part.startswith((".", "__")) for part in folder.relative_to(PACKAGE).parts):
            continue
        bodies = [ast.parse(path.read_text()).body for path in folder.glob("*.py")]
        assert any(isinstance(node, ast.ClassDef | ast.FunctionDef) for body in bodies for node in body), folder.name


def test_the_table_in_the_docs_is_this_one() -> None:
    drawn = {}
    for line in (REPOSITORY / "docs" / "architecture.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 3 and re.fullmatch(r"`\w+`", cells[0]):
            drawn[cells[0].strip("`")] = set(re.findall(r"`([\w.]+)`", cells[1]))
    expected = {room: may for room, may in MAY_IMPORT.items() if may != ALL}
    assert {room: may for room, may in drawn.items() if room in expected} == expected


def run_python(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_what_decides_can_be_imported_without_torch(module: str) -> None:
    run_python(f"import sys, torchstorm.{module}; assert 'torch' not in sys.modules, 'torch was imported'")


def test_importing_everything_asks_cuda_nothing() -> None:
    modules = [f"torchstorm.{module_name(path)}" for path in SOURCES if path.name != "__init__.py"]
    run_python(
        "import importlib, torch, torch.cuda\n"
        "def asked(*_, **__): raise AssertionError('an import asked CUDA something')\n"
        "for name in ('_lazy_init', 'init', 'is_available', 'device_count', 'current_device', 'mem_get_info'):\n"
        "    setattr(torch.cuda, name, asked)\n"
        "torch._C._cuda_init = torch._C._cuda_getDeviceCount = asked\n"
        f"for name in {['torchstorm', *modules]}: importlib.import_module(name)\n"
        "assert not torch.cuda.is_initialized()\n"
    )


def test_all_lists_exactly_the_public_names_in_order() -> None:
    names = torchstorm.__all__
    assert list(names) == sorted(set(names))
    assert {"Session", "TorchstormError", "plan"} <= set(names)
    for name in names:
        getattr(torchstorm, name)  # raises where there is none
    made_here = {
        name
        for name, value in vars(torchstorm).items()
        if not name.startswith("_") and str(getattr(value, "__module__", "")).startswith("torchstorm")
    }
    assert made_here <= set(names)
    assert {name for name in dir(torchstorm) if not name.startswith("_")} >= set(names)
    with pytest.raises(AttributeError, match="no_such_name"):
        torchstorm.no_such_name  # noqa: B018


@pytest.mark.parametrize("first", ["torchstorm.Session", "import torchstorm.plan.solve", "torchstorm.plan"])
def test_plan_can_be_called_and_its_room_imported_whatever_came_first(first: str) -> None:
    run_python(
        f"import torchstorm\n{first}\n"
        "assert callable(torchstorm.plan)\n"
        "from torchstorm.plan.solve import solve\n"
        "import torchstorm.plan.trace\n"
        "assert callable(torchstorm.plan)\n"
    )


def test_the_rule_about_machine_paths_sees_them_and_nothing_else() -> None:
    for path in ("/" + "root/x", "see /" + "work/main", "'/" + "home/ann'", "../" + "shared/design.md"):
        assert MACHINE_PATHS.search(path), path
    for path in ("/nvme:400GiB", "tests/home/x", "~/" + "work/x", "/proc/meminfo", "https://example.org/" + "root/"):
        assert not MACHINE_PATHS.search(path), path


def test_no_kept_file_names_a_path_of_someones_machine() -> None:
    found = []
    for path in kept_files():
        try:
            lines = path.read_text().splitlines()
        except UnicodeDecodeError:
            continue
        found += [
            f"{path.relative_to(REPOSITORY)}:{n}: {line}"
            for n, line in enumerate(lines, 1)
            if MACHINE_PATHS.search(line)
        ]
    assert found == []
