"""Paths as users write them, and documents that replace regular files and are written into all else."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

import torchstorm
from torchstorm.bench.bars import Panel, draw_bars
from torchstorm.errors import ConfigError, SizeError, StorageError
from torchstorm.memory.spill import remove_stale
from torchstorm.offload.budget import parse_disk
from torchstorm.paths import check_output, descriptor_of, is_replaceable, user_path, write_document
from torchstorm.report.doctor import examine
from torchstorm.storage.choice import open_file
from torchstorm.storage.layout import Kind
from torchstorm.storage.measure import measure_disk
from torchstorm.storage.ops import read_tensor
from torchstorm.train.forecast import plan_training
from torchstorm.train.job import train
from torchstorm.train.pack import pack


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


def test_a_block_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchstorm.paths.stat.S_ISBLK", stat.S_ISCHR)  # not every machine has one to try
    for call in (check_output, partial(write_document, content="two")):
        with pytest.raises(StorageError, match="it is a block device, whose contents would be lost"):
            call("/dev/null", name="--json")


def test_a_failed_write_leaves_the_file_from_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_document(tmp_path / "a.json", "one", name="--json")

    def stopped(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", stopped)
    with pytest.raises(KeyboardInterrupt):
        write_document(tmp_path / "a.json", "two", name="--json")
    assert (tmp_path / "a.json").read_text() == "one"
    assert os.listdir(tmp_path) == ["a.json"]


KINDS = {"x": Kind(dtype=torch.uint8, shape=(4096,), length=2)}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory that is not the working directory."""
    found = tmp_path / "home"
    found.mkdir()
    monkeypatch.setenv("HOME", str(found))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return found


def step(storm: torchstorm.Session, model: nn.Module) -> None:
    with storm.step():
        model(torch.ones(64, 256)).square().sum().backward()


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(module for _ in range(3) for module in (nn.Linear(256, 256), nn.GELU())))


@pytest.mark.parametrize("disk", ["~/spill", "~/spill:1GiB", Path("~/spill"), Path("~/spill:1GiB")], ids=repr)
def test_a_session_spills_to_a_path_in_the_home_directory(disk: str | Path, home: Path) -> None:
    model = layers()
    with torchstorm.Session(model, ram="4MiB", disk=disk) as storm:
        assert [entry.name.startswith("torchstorm-spill-") for entry in (home / "spill").iterdir()] == [True]
        step(storm, model)
        if "GiB" in str(disk):
            assert storm._shared.tiers.budget.disk == 2**30
    assert os.listdir() == []


@pytest.mark.parametrize(
    ("disk", "directory", "nbytes"),
    [
        (Path("/nvme:400GiB"), "/nvme", 400 * 2**30),
        ("~:1KiB", "{home}", 1024),
        (Path("~:1KiB"), "{home}", 1024),
        ("~root:1KiB", "/root", 1024),
        ("~/a:b:1KiB", "{home}/a:b", 1024),
        ("~/there:1KiB", "{home}/there:1KiB", None),
        ("./a/", "a", None),
    ],
)
def test_a_disk_is_a_directory_with_or_without_a_size(
    disk: str | Path, directory: str, nbytes: int | None, home: Path
) -> None:
    (home / "there:1KiB").mkdir()
    assert parse_disk(disk) == (directory.format(home=home), nbytes)


@pytest.mark.parametrize(
    ("disk", "error", "said"),
    [
        (":1KiB", SizeError, "names no directory"),
        (Path(":1KiB"), SizeError, "names no directory"),
        ("~/a:", SizeError, "the size"),
        ("~/a:soon", SizeError, "the size"),
        ("~no-such-user:1KiB", ConfigError, "no such user"),
        ("", ConfigError, "is empty"),
        (7, ConfigError, "is of type int"),
    ],
)
def test_what_is_no_disk_is_told(disk: object, error: type[Exception], said: str, home: Path) -> None:
    with pytest.raises(error, match=f"disk=.*{said}"):
        torchstorm.Session(layers(), ram="4MiB", disk=disk)  # type: ignore[arg-type]
    assert os.listdir() == os.listdir(home) == []


@pytest.mark.parametrize("kind", [str, Path])
def test_plans_go_to_and_come_from_the_home_directory(kind: type, home: Path) -> None:
    model, x = layers(), torch.ones(64, 256)
    plan = torchstorm.plan(model, x, lambda model, x: model(x).square().sum(), ram="4MiB", disk=kind("~/spill:1GiB"))
    plan.save(kind("~/plan.json"))
    assert (home / "plan.json").is_file()
    assert torchstorm.Plan.load(kind("~/plan.json")) == plan
    with torchstorm.Session(model, ram="4MiB", disk=kind("~/spill:1GiB"), plan=kind("~/plan.json")) as storm:
        step(storm, model)


@pytest.mark.parametrize("kind", [str, Path])
def test_volumes_and_files_lie_in_the_home_directory(kind: type, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchstorm.storage.ops._open", {})  # what is opened there is closed at the end
    path = kind("~/a.storm")
    with torchstorm.Volume.create(path, KINDS) as volume:
        volume["x"].write(0, torch.ones(2, 4096, dtype=torch.uint8))
        volume.flush()
        start_bytes = volume["x"].kind.start_bytes
    assert os.listdir(home) == ["a.storm"]
    with pytest.raises(StorageError, match="exists"):
        torchstorm.Volume.create(path, KINDS)
    with torchstorm.Volume.open(path) as volume:
        assert volume["x"].read(1).sum() == 4096
    by_hand = {"x": Kind(dtype=torch.uint8, shape=(4096,), length=2, start_bytes=start_bytes)}
    with torchstorm.Volume.describe(path, by_hand) as volume:
        assert volume["x"].read(1).sum() == 4096
    with torchstorm.NVMe(path) as drive:
        assert drive.path == str(home / "a.storm")
    open_file(path).close()
    assert read_tensor(str(path), start_bytes, [4096], torch.uint8, torch.device("cpu")).sum() == 4096
    with torchstorm.Volume.create(path, KINDS, replace=True):
        pass
    assert os.listdir(home) == ["a.storm"]
    assert os.listdir() == []


@pytest.mark.parametrize("kind", [str, Path])
def test_a_run_reads_and_writes_in_the_home_directory(kind: type, home: Path) -> None:
    (home / "text").write_text("a text to learn from, again and again. " * 40)
    console = Console(file=StringIO())
    packed = pack([kind("~/text")], kind("~/text.storm"), seq=16, console=console)
    assert packed.path == home / "text.storm"
    small = {"layers": 1, "heads": 1, "width": 16, "batch": 2, "seq": 16, "device": "cpu", "sample_chars": 0}
    disk = kind("~/spill:1GiB")
    plan_training({**small, "ram": "8MiB", "disk": disk, "json": kind("~/plan.json")}, console=console)
    assert (home / "plan.json").is_file()
    for data in (kind("~/text"), kind("~/text.storm")):
        out = kind(f"~/runs-{Path(data).suffix}")
        options = {**small, "data": data, "out": out, "json": kind("~/run.json"), "ram": "8MiB", "disk": disk}
        run = train({**options, "steps": 1}, console=console)
        assert (home / "run.json").is_file()
        assert run.checkpoint_dir == home / f"runs-{Path(data).suffix}"
        more = train({"val_every": 0}, resume=out, console=console)
        assert more.run.losses == run.run.losses
        assert more.checkpoint_dir == run.checkpoint_dir
    assert os.listdir() == []


@pytest.mark.parametrize("kind", [str, Path])
def test_a_disk_is_measured_and_swept_in_the_home_directory(
    kind: type, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[object] = []
    monkeypatch.setattr("torchstorm.report.doctor.measure_disk", lambda path: measured.append(path) or (1.0, 1.0))
    assert examine(kind("~")).disk.directory == str(home)
    assert measured == [str(home)]
    assert min(measure_disk(kind("~"), nbytes=4096)) > 0
    (home / "torchstorm-spill-1-left").mkdir()
    assert remove_stale(kind("~")) == [str(home / "torchstorm-spill-1-left")]
    with pytest.raises(StorageError, match=re.escape(f"{home}/missing")):
        measure_disk(kind("~/missing"), nbytes=4096)


@pytest.mark.no_cover
@pytest.mark.parametrize("kind", [str, Path])
def test_pictures_go_to_the_home_directory_and_into_a_fifo(kind: type, home: Path) -> None:
    panels = [Panel(title="1x1", bars=[("ours", (1.0, 3.0))])]
    draw_bars(panels, kind("~/a.PNG"), title="a", legend="b")
    assert (home / "a.PNG").read_bytes().startswith(b"\x89PNG")
    reader = Reader(home / "fifo")
    draw_bars(panels, kind("~/fifo"), title="a", legend="b")
    assert reader.all().startswith(b"\x89PNG")
    with pytest.raises(StorageError, match="--plot /dev/full cannot be written: No space left"):
        draw_bars(panels, kind("/dev/full"), title="a", legend="b")
    with pytest.raises(ConfigError, match="'no suffix' is not one of"):
        draw_bars(panels, kind("~/a"), title="a", legend="b")
