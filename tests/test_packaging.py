"""A wheel holds the whole package and works where there is nothing but it and its dependencies."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
CONSTRAINTS = (REPOSITORY / "constraints.txt").read_text()


def run(*command: str, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    options = [
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--disable-pip-version-check",
        "--wheel-dir",
        str(folder),
    ]
    run(sys.executable, "-m", "pip", "wheel", *options, str(REPOSITORY), cwd=folder)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The wheel unpacked beside the dependencies of this environment, which does not see the repository."""
    folder = tmp_path_factory.mktemp("installed")
    options = ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", "--target", str(folder)]
    run(sys.executable, "-m", "pip", "install", *options, str(wheel), cwd=folder)
    return folder, {**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "120"}


def test_the_wheel_holds_every_module_every_source_to_be_compiled_the_type_marker_and_the_licence(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    source = REPOSITORY / "src"
    modules = {str(path.relative_to(source)) for path in (source / "torchstorm").rglob("*.py")}
    compiled = {
        suffix: {str(path.relative_to(source)) for path in (source / "torchstorm").rglob(f"*{suffix}")}
        for suffix in (".cu", ".cpp", ".h")
    }
    assert all(compiled.values())
    assert modules.union(*compiled.values()) <= names
    assert "torchstorm/py.typed" in names
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in names)
    beside = {name for name in names if not name.startswith("torchstorm/") and ".dist-info/" not in name}
    assert beside == set()
    assert not [name for name in names if "cache" in name]


def test_the_metadata_says_what_is_needed_with_ranges_left_open(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith("dist-info/METADATA"))
    metadata = Parser().parsestr(archive.read(name).decode())
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra" not in line]
    assert "torch>=2.11" in needed
    for line in needed:
        assert re.fullmatch(r"[\w-]+>=[0-9.]+", line), line


def test_outside_the_repository_the_installed_package_is_the_one_that_is_imported(
    installed: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    folder, env = installed
    code = "import torchstorm; print(torchstorm.__file__); print([getattr(torchstorm, n) for n in torchstorm.__all__])"
    first = run(sys.executable, "-W", "error", "-c", code, cwd=tmp_path, env=env).splitlines()[0]
    assert Path(first) == folder / "torchstorm" / "__init__.py"


def test_the_installed_command_shows_its_help(installed: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    folder, env = installed
    script = folder / "bin" / "torchstorm"
    assert "train" in run(sys.executable, str(script), "--help", cwd=tmp_path, env=env)
    assert "--ram" in run(sys.executable, str(script), "train", "--help", cwd=tmp_path, env=env)


def test_the_installed_package_trains_under_a_budget(installed: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    _, env = installed
    code = (
        "import torch\n"
        "from torchstorm import Session\n"
        "model = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(8)])\n"
        "with Session(model, ram='2MiB', disk='spill') as storm:\n"
        "    for _ in range(2):\n"
        "        with storm.step():\n"
        "            model(torch.randn(512, 128)).square().mean().backward()\n"
        "    print(storm.report())\n"
    )
    assert "forecast" in run(sys.executable, "-W", "error", "-c", code, cwd=tmp_path, env=env)


def test_the_constraints_pin_every_dependency_exactly_and_to_no_one_build() -> None:
    lines = [line for line in CONSTRAINTS.splitlines() if line and not line.startswith("#")]
    for line in lines:
        assert re.fullmatch(r"[\w.-]+==[0-9][0-9a-z.]*", line), line
    pinned = {re.sub(r"[-_.]+", "-", line.split("==")[0]).lower() for line in lines}
    extras = PROJECT["optional-dependencies"]
    for needed in [*PROJECT["dependencies"], *(each for extra in extras.values() for each in extra)]:
        assert re.sub(r"[-_.]+", "-", re.split(r"[<>=~\[; ]", needed)[0]).lower() in pinned, needed


def test_what_is_installed_here_is_what_the_constraints_pin() -> None:
    """The suite speaks for the pinned versions only if it ran with them; checked where CI runs."""
    if os.environ.get("CI") != "true":
        return
    from importlib.metadata import version

    for line in CONSTRAINTS.splitlines():
        name, _, pinned = line.partition("==")
        if name in ("torch", "numpy", "pytest", "transformers", "hypothesis", "mypy", "ruff"):
            assert version(name).split("+")[0] == pinned
