"""The C++ of settled steps: built once, beside training, and done without where it cannot be."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from offload.noted import note_packed
from torchstorm.offload.native import library
from torchstorm.offload.native.classes import classes
from torchstorm.offload.recompute.repeats import LONG_WAY
from torchstorm.offload.session import Session
from torchstorm.offload.step.kept import Kept
from torchstorm.offload.step.packed import Placeholder
from torchstorm.transfer.runtime import Event

pytestmark = pytest.mark.usefixtures("nothing_built")


@pytest.fixture
def nothing_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has not asked for the library, with an empty folder to keep it in."""
    monkeypatch.setattr(library, "_building", library._Building())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for one in Placeholder, Kept, Event:  # of which another library that is loaded would change it for all that follows
        monkeypatch.setattr(one, "__del__", one.drop)


@pytest.fixture(scope="module")
def built() -> Path:
    """The library as this machine's compiler has made it."""
    path = library._path()
    assert path.exists(), "tests/conftest.py has it built"
    return path


def put_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """A compiler that notes its calls and does what a shell script says; $out is the file that it is to make."""
    folder.mkdir(exist_ok=True)
    compiler, calls = folder / "compiler", folder / "calls"
    compiler.write_text(
        f'#!/bin/sh\necho >> {calls}\nwhile [ $# -gt 0 ]; do [ "$1" = -o ] && out="$2"; shift; done\n{script}\n'
    )
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(compiler))
    return calls


def train(session: Session, model: nn.Module, num_steps: int = 4) -> torch.Tensor:
    """The last step's gradient of the first weight."""
    for seed in range(num_steps):
        model.zero_grad()
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(seed))
        with session.step():
            model(x).square().mean().backward()
    return next(model.parameters()).grad  # type: ignore[return-value]


def chain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)))


def expected_after(num_steps: int = 4) -> torch.Tensor:
    model = chain()
    with Session(model, unlimited=True) as session:
        return train(session, model, num_steps)


def test_without_a_compiler_python_takes_the_way_and_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    model = chain()
    with Session(model, ram="1MiB") as session:
        assert "no C++ compiler" in library.wait()
        assert torch.equal(train(session, model), expected_after())
    assert library.library() is None
    assert library.describe().startswith("settled steps: by Python, since there is no C++ compiler")


def test_a_compiler_that_fails_is_called_once_and_its_error_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = put_compiler(tmp_path / "bin", monkeypatch, 'echo "x.h:1: error: no such thing" >&2; exit 1')
    for _ in range(2):
        model = chain()
        with Session(model, ram="1MiB") as session:
            assert library.wait().endswith("failed: x.h:1: error: no such thing")
            assert torch.equal(train(session, model), expected_after())
    assert calls.read_text() == "\n"
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_steps_go_on_while_it_is_built_and_take_it_up_when_it_is_there(
    built: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun, go_on = tmp_path / "begun", tmp_path / "go"
    put_compiler(
        tmp_path / "bin", monkeypatch, f"touch {begun}; until [ -e {go_on} ]; do sleep 0.01; done; cp {built} $out"
    )
    model, types = chain(), list[object]()
    with Session(model, ram="1MiB") as session:
        assert torch.equal(train(session, model), expected_after())
        assert library.library() is None
        go_on.touch()
        assert library.wait() == ""
        assert begun.exists()
        assert library.library() is not None
        with pytest.MonkeyPatch.context() as patch:
            note_packed(patch, types)
            assert torch.equal(train(session, model), expected_after())
    assert types.count(Kept) >= 4
    assert library._path().exists()


def test_two_processes_that_need_it_at_once_build_it_once(
    built: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = put_compiler(tmp_path / "bin", monkeypatch, f"sleep 0.2; cp {built} $out")
    both = [threading.Thread(target=library._build, args=(library._path(),)) for _ in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join()
    assert calls.read_text() == "\n"
    assert library._path().read_bytes() == built.read_bytes()


@pytest.mark.no_cover
def test_a_process_that_ends_while_it_is_built_leaves_nothing_half_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun = tmp_path / "begun"
    put_compiler(tmp_path / "bin", monkeypatch, f"echo half > $out; touch {begun}; exec sleep 100")
    script = f"""
import os, time
from torchstorm.offload.native import library
library.begin(dict)
while not os.path.exists({str(begun)!r}):
    time.sleep(0.01)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_a_file_that_is_no_library_is_removed_and_python_takes_the_way() -> None:
    path = library._path()
    path.parent.mkdir(parents=True)
    path.write_text("no library")
    model = chain()
    with Session(model, ram="1MiB") as session:
        assert "cannot be loaded" in library.wait()
        assert torch.equal(train(session, model), expected_after())
    assert not path.exists()


def test_a_folder_that_cannot_be_made_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    put_compiler(tmp_path / "bin", monkeypatch, "exit 0")
    library.begin(classes)
    assert library.wait().startswith("it cannot be written: ")


def test_without_a_home_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def expanduser(self: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "expanduser", expanduser)
    model = chain()
    with Session(model, ram="1MiB") as session:
        assert torch.equal(train(session, model), expected_after())
    assert "there is no folder to keep it in" in library.describe()


def test_a_variable_keeps_it_from_being_used(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library._path().parent.mkdir(parents=True)
    shutil.copy(built, library._path())
    monkeypatch.setenv("TORCHSTORM_NATIVE", "0")
    library.begin(classes)
    assert library.library() is None
    monkeypatch.delenv("TORCHSTORM_NATIVE")
    monkeypatch.setattr(library, "_building", library._Building())
    assert library.describe() == f"settled steps: by C++, from {library.folder()}"
    library.begin(classes)
    found = library.library()
    assert found is not None
    assert found.run.__name__ == "run"
    assert LONG_WAY is classes()["long_way"]


def test_classes_that_it_does_not_know_keep_it_from_being_loaded(built: Path) -> None:
    os.makedirs(library._path().parent)
    shutil.copy(built, library._path())
    library.begin(lambda: {**classes(), "value": nn.Linear})
    assert "cannot be loaded" in library.wait()
    assert library.library() is None
