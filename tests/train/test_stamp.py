"""train/stamp.py: a record says which sources were measured, also where git is wrong about them or not there."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from torchstorm.train.stamp import Stamp, stamp

NAMES = ("errors.py", "plan")


def git(folder: Path, *arguments: str) -> str:
    options = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *options, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package in a repository, with everything committed."""
    folder = tmp_path / "repository" / "src" / "package"
    (folder / "plan").mkdir(parents=True)
    for name, text in {
        "errors.py": "",
        "plan/solve.py": "a = 1\n",
        "plan/x.cu": "",
        "models.py": "",
        "a.md": "",
    }.items():
        (folder / name).write_text(text)
    git(tmp_path, "init", "--quiet", "repository")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "first")
    return folder


def test_sources_as_committed_have_that_commit(package: Path) -> None:
    found = stamp(NAMES, package)
    assert found == Stamp(sources=found.sources, commit=git(package, "rev-parse", "HEAD"), dirty=False)
    assert len(found.sources) == 12


@pytest.mark.parametrize("change", ["edit", "add", "remove", "rename"])
def test_any_change_of_a_named_source_is_another_hash_and_dirty(package: Path, change: str) -> None:
    before = stamp(NAMES, package)
    file = package / "plan" / "solve.py"
    if change == "edit":
        file.write_text("a = 2\n")
    elif change == "add":
        (package / "plan" / "more.py").write_text("")
    elif change == "remove":
        file.unlink()
    else:
        file.rename(package / "plan" / "solve2.py")
    after = stamp(NAMES, package)
    assert after.sources != before.sources
    assert (after.commit, after.dirty) == (before.commit, True)


def test_a_change_elsewhere_is_none(package: Path) -> None:
    before = stamp(NAMES, package)
    (package / "models.py").write_text("b = 1\n")
    (package / "plan" / "notes.md").write_text("c")
    (package / "a.md").write_text("c")
    assert stamp(NAMES, package) == before


def test_a_later_commit_of_the_same_sources_has_the_same_hash(package: Path) -> None:
    before = stamp(NAMES, package)
    (package / "models.py").write_text("b = 1\n")
    git(package, "commit", "--all", "--quiet", "--message", "second")
    after = stamp(NAMES, package)
    assert after.sources == before.sources
    assert after.commit != before.commit
    assert after.dirty is False


def test_an_older_repository_around_newer_sources_does_not_pass_for_their_commit(package: Path) -> None:
    """As where a machine has a copy of the files whose .git is that of an earlier copy."""
    older = git(package, "rev-parse", "HEAD")
    (package / "plan" / "solve.py").write_text("a = 3\n")
    git(package, "commit", "--all", "--quiet", "--message", "second")
    newer = stamp(NAMES, package)
    git(package, "reset", "--soft", older)
    assert stamp(NAMES, package) == Stamp(sources=newer.sources, commit=older, dirty=True)


def test_sources_that_no_repository_keeps_have_their_hash_and_no_commit(package: Path, tmp_path: Path) -> None:
    kept = stamp(NAMES, package)
    alone = tmp_path / "alone"
    package.rename(alone)
    assert stamp(NAMES, alone) == Stamp(sources=kept.sources, dirty=True)
    # Installed within somebody's project: that project's commit says nothing of the package.
    within = package.parent / "site-packages" / "package"
    within.parent.mkdir()
    alone.rename(within)
    assert stamp(NAMES, within) == Stamp(sources=kept.sources, dirty=True)


def test_where_there_is_no_git_the_hash_is_there(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = stamp(NAMES, package)
    monkeypatch.setenv("PATH", "")
    assert stamp(NAMES, package) == Stamp(sources=kept.sources, dirty=True)


def test_a_name_that_is_not_there_is_told(package: Path) -> None:
    with pytest.raises(FileNotFoundError):
        stamp(("plam",), package)
