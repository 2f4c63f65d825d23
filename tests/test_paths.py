"""Paths as users write them, and documents that replace regular files and are written into all else."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from torchstorm.errors import ConfigError, StorageError
from torchstorm.paths import check_output, descriptor_of, is_replaceable, user_path, write_document


def run_python(code: str, **options: object) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-W", "error", "-c", code], timeout=60, check=False, **options)  # type: ignore[call-overload,no-any-return]


class Reader(threading.Thread):
    """Reads a FIFO to its end, as `cat` does."""

    def __init__(self, fifo: Path) -> None:
        super().__init__(daemon=True)
        os.mkfifo(fifo)
        self._fifo = fifo
        self.data = b""
        self.start()

    def run(self) -> None:
        self.data = self._fifo.read_bytes()

    def all(self) -> bytes:
        self.join(30)
        assert not self.is_alive(), "the writer has not closed the FIFO"
        return self.data


def test_a_path_may_be_a_string_or_a_path_and_begin_with_a_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/of/ann")
    assert user_path("~", name="disk") == Path("/of/ann")
    assert user_path("~/a", name="disk") == user_path(Path("~/a"), name="disk") == Path("/of/ann/a")
    assert user_path("~root/a", name="disk") == Path("/root") / "a"
    for unchanged in ("a", "a/~", "/a~b"):
        assert user_path(unchanged, name="disk") == Path(unchanged)
    odd = user_path("./~x/a", name="disk")
    assert odd == user_path(odd, name="disk") == Path.cwd() / "~x" / "a"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("~no-such-user/a", r"--json='~no-such-user/a' begins with '~no-such-user', and no such user"),
        ("", "--json='' is empty"),
        ("a\0b", "has a null byte"),
        (7, "--json=7 is of type int"),
        (b"a", "of type bytes"),
        (None, "of type NoneType"),
    ],
)
def test_what_is_no_path_is_told(given: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        user_path(given, name="--json")  # type: ignore[arg-type]


def test_a_document_replaces_a_file_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    write_document(file, "one", name="--json")
    opened = file.open()
    write_document(str(file), b"two", name="--json")
    assert file.read_text() == "two"
    assert opened.read() == "one"  # a reader has the whole file from before
    opened.close()
    assert os.listdir(tmp_path) == ["a.json"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~_umask()


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


def test_a_name_as_long_as_a_name_may_be_can_be_written(tmp_path: Path) -> None:
    file = tmp_path / ("n" * 255)
    write_document(file, "one", name="--json")
    assert file.read_text() == "one"


def test_a_document_goes_to_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert check_output("~/a.json", name="--json") == tmp_path / "a.json"
    write_document("~/a.json", "one", name="--json")
    assert (tmp_path / "a.json").read_text() == "one"


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays_and_what_it_leads_to_is_written(exists: bool, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    file, link, chain = tmp_path / "elsewhere" / "a.json", tmp_path / "link", tmp_path / "chain"
    link.symlink_to(Path("elsewhere") / "a.json")
    chain.symlink_to(link)
    if exists:
        file.write_text("one")
    write_document(chain, "two", name="--json")
    assert link.is_symlink()
    assert chain.is_symlink()
    assert not file.is_symlink()
    assert file.read_text() == "two"
    assert os.listdir(file.parent) == ["a.json"]


def test_a_fifo_stays_and_its_reader_gets_one_whole_document(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    reader = Reader(fifo)
    document = "x" * 300_000  # more than a pipe holds
    assert not is_replaceable(check_output(fifo, name="--json"))
    write_document(fifo, document, name="--json")
    assert reader.all() == document.encode()
    assert fifo.is_fifo()
    assert os.listdir(tmp_path) == ["fifo"]


def test_a_link_to_a_fifo_is_a_fifo(tmp_path: Path) -> None:
    reader = Reader(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("fifo")
    write_document(tmp_path / "link", "one", name="--json")
    assert reader.all() == b"one"
    assert (tmp_path / "fifo").is_fifo()


def test_a_reader_that_goes_away_is_told(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    leaves = threading.Thread(target=lambda: fifo.open("rb").close())
    leaves.start()
    with pytest.raises(StorageError, match=r"--json .*/fifo cannot be written: Broken pipe"):
        write_document(fifo, "x" * 3_000_000, name="--json")
    leaves.join()


def test_a_full_device_is_told_and_stays() -> None:
    check_output("/dev/full", name="--json")
    with pytest.raises(StorageError, match="--json /dev/full cannot be written: No space left on device"):
        write_document("/dev/full", "one", name="--json")
    assert Path("/dev/full").is_char_device()
    write_document("/dev/null", "one", name="--json")
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
@pytest.mark.parametrize("kind", ["pipe", "file", "appended"])
def test_a_document_to_standard_output_comes_after_what_was_printed(name: str, kind: str, tmp_path: Path) -> None:
    code = f"""
from torchstorm.paths import write_document
print("before")
write_document({name!r}, "document\\n", name="--json")
print("after")
"""
    if kind == "pipe":
        found = run_python(code, stdout=subprocess.PIPE).stdout
    else:
        file = tmp_path / "out"
        file.write_text("older\n")
        with file.open("ab" if kind == "appended" else "wb") as out:
            run_python(code, stdout=out)
        found = file.read_bytes()
        assert os.listdir(tmp_path) == ["out"]
    assert found == (b"older\n" if kind == "appended" else b"") + b"before\ndocument\nafter\n"


def test_a_document_goes_into_a_descriptor_that_the_shell_opened(tmp_path: Path) -> None:
    code = "from torchstorm.paths import write_document; write_document('/dev/fd/3', 'document', name='--json')"
    file = tmp_path / "out"
    command = f'exec 3>"{file}"; echo before >&3; "$PYTHON" -c "{code}"; echo after >&3'
    subprocess.run(["bash", "-c", command], check=True, timeout=60, env={**os.environ, "PYTHON": sys.executable})
    assert file.read_text() == "before\ndocumentafter\n"


def test_a_closed_standard_output_is_told() -> None:
    code = """
import os, sys
from torchstorm.errors import StorageError
from torchstorm.paths import write_document
os.close(1)
sys.stdout = None
try:
    write_document("/dev/stdout", "document", name="--json")
except StorageError as error:
    print(error, file=sys.stderr)
"""
    done = run_python(code, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr
    assert b"--json /dev/stdout cannot be written: " in done.stderr


def test_only_descriptors_of_this_process_are_descriptors(tmp_path: Path) -> None:
    assert descriptor_of(Path("/dev/stdout")) == descriptor_of(Path("/dev/fd/1")) == 1
    (tmp_path / "link").symlink_to("/dev/stderr")
    assert descriptor_of(tmp_path / "link") == 2
    (tmp_path / "1").touch()
    assert descriptor_of(tmp_path / "1") is None
    (tmp_path / "round").symlink_to("round")
    assert descriptor_of(tmp_path / "round") is None


@pytest.mark.parametrize("call", [check_output, partial(write_document, content="two")], ids=["checked", "written"])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("folder", "it is a folder"),
        ("missing/a.json", "No such file or directory"),
        ("to-nowhere", "No such file or directory"),
        ("file/a.json", "Not a directory"),
        ("round", "Too many levels of symbolic links"),
    ],
)
def test_what_cannot_be_written_is_told_with_the_way_out(
    name: str, said: str, call: Callable[..., object], tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("one")
    (tmp_path / "round").symlink_to("round")
    (tmp_path / "to-nowhere").symlink_to("missing/a.json")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(StorageError, match=rf"--json .*{name} cannot be written: {said}\. Give a path in a folder"):
        call(tmp_path / name, name="--json")
    assert sorted(os.listdir(tmp_path)) == before
    assert (tmp_path / "file").read_text() == "one"


def test_a_folder_that_cannot_be_written_is_told_before_the_work() -> None:
    code = """
import os, sys
from torchstorm.errors import StorageError
from torchstorm.paths import check_output
if os.geteuid() == 0:
    os.setuid(65534)  # root writes anywhere
try:
    check_output(sys.argv[1] + "/a.json", name="--json")
except StorageError as error:
    print(error)
"""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o555)
        told = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, timeout=60).stdout
    assert told.startswith(f"--json {folder}/a.json cannot be written: Permission denied.")


def test_a_failed_write_leaves_the_file_from_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_document(tmp_path / "a.json", "one", name="--json")

    def stopped(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", stopped)
    with pytest.raises(KeyboardInterrupt):
        write_document(tmp_path / "a.json", "two", name="--json")
    assert (tmp_path / "a.json").read_text() == "one"
    assert os.listdir(tmp_path) == ["a.json"]
