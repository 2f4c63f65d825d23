"""train/pack.py where it breaks off: nothing half made, nothing lost."""

import errno
import fcntl
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

import forked
from torchstorm.errors import DataError, StorageError
from torchstorm.storage.records import Records
from torchstorm.storage.volume import Volume
from torchstorm.train import pack as pack_module
from torchstorm.train.arrays import ArrayFile
from torchstorm.train.pack import pack
from torchstorm.train.stop import Interrupted

QUIET = Console(quiet=True)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "a.storm"


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def array(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype("float32")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "x.npy"
    np.save(file, array(64, 1024))
    return file


def break_off(monkeypatch: pytest.MonkeyPatch, error: BaseException, after: int = 3) -> None:
    """Lets the work fail after a few pieces."""
    pieces = ArrayFile.pieces

    def broken(self: ArrayFile, most: int) -> Iterator[torch.Tensor]:
        for number, piece in enumerate(pieces(self, 8)):
            if number == after:
                raise error
            yield piece

    monkeypatch.setattr(ArrayFile, "pieces", broken)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt),
        (OSError(errno.EIO, "Input/output error", "x.npy"), StorageError),
        (DataError("it was cut off"), DataError),
        (MemoryError(), MemoryError),
    ],
)
@pytest.mark.parametrize("existed", [False, True])
def test_what_breaks_off_leaves_what_was_there(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, told: Any, existed: bool
) -> None:
    if existed:
        out.write_bytes(b"what was there")
    break_off(monkeypatch, error)
    with pytest.raises(told):
        pack([source], out, replace=True, console=QUIET)
    assert names_in(out.parent) == (["a.storm", "x.npy"] if existed else ["x.npy"])
    assert not existed or out.read_bytes() == b"what was there"


def test_a_signal_ends_it_between_two_pieces(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_module, "_PIECE_BYTES", 8192)
    write_async, count = Records.write_async, 0

    def write_and_stop(self: Records, i: int, tensor: torch.Tensor) -> Any:
        nonlocal count
        count += 1
        if count == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return write_async(self, i, tensor)

    monkeypatch.setattr(Records, "write_async", write_and_stop)
    with pytest.raises(Interrupted, match=r"SIGTERM before .*a.storm was complete, so it was not created") as stopped:
        pack([source], out, console=QUIET)
    assert stopped.value.exit_code == 143
    assert count == 2
    assert names_in(out.parent) == ["x.npy"]


def test_an_existing_file_is_refused_unless_it_is_to_be_replaced(source: Path, out: Path) -> None:
    pack([source], out, console=QUIET)
    before = out.read_bytes()
    with pytest.raises(StorageError, match=r"a.storm exists. Give another name, or use --replace"):
        pack([source], out, console=QUIET)
    assert out.read_bytes() == before
    np.save(source, array(3, 5))
    pack([source], out, replace=True, console=QUIET)
    with Volume.open(out) as volume:
        assert np.array_equal(volume["data"].read(0, 3).numpy(), array(3, 5))


def test_a_file_that_appears_meanwhile_is_not_overwritten(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush = Volume.flush
    monkeypatch.setattr(Volume, "flush", lambda self: (flush(self), out.write_text("mine")))
    with pytest.raises(StorageError, match=r"a.storm exists"):
        pack([source], out, console=QUIET)
    assert names_in(out.parent) == ["a.storm", "x.npy"]
    assert out.read_text() == "mine"


def test_a_link_stays_one(source: Path, out: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    out.symlink_to(tmp_path / "there" / "real.storm")
    pack([source], out, replace=True, console=QUIET)
    assert out.is_symlink()
    with Volume.open(tmp_path / "there" / "real.storm") as volume:
        assert len(volume["data"]) == 64


def test_a_disk_without_room_is_told_before_anything_is_written(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out.write_bytes(b"what was there")
    usage = shutil.disk_usage(out.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=200 * 1024))
    monkeypatch.setattr(Volume, "create", lambda *args, **kwargs: pytest.fail("written"))
    said = r"a.storm needs 26\d.00 KiB \(2\d{5} bytes\), but 200.00 KiB \(204800\) are free in .*: free 6\d.00 KiB more"
    with pytest.raises(StorageError, match=said):
        pack([source], out, replace=True, console=QUIET)
    assert out.read_bytes() == b"what was there"
    assert names_in(out.parent) == ["a.storm", "x.npy"]


def test_a_disk_that_fills_up_meanwhile_leaves_nothing(source: Path, out: Path) -> None:
    """A limit on the size of files stands for the full disk: the kernel refuses the write either way."""
    script = f"""
import resource
from pathlib import Path
from torchstorm.errors import StorageError
from torchstorm.storage import direct
from torchstorm.train.pack import pack
import os
truncate = os.ftruncate
def truncate_and_limit(fd, size):
    truncate(fd, size)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
os.ftruncate = truncate_and_limit
try:
    pack([Path({str(source)!r})], Path({str(out)!r}))
except StorageError as error:
    print(error)
"""
    ran = forked.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "File too large" in ran.stdout
    assert "Free some space" in ran.stdout
    assert names_in(out.parent) == ["x.npy"]


def test_what_a_killed_one_left_is_used_again_and_another_at_work_is_not_disturbed(source: Path, out: Path) -> None:
    left = out.with_name(".a.storm.packing")
    left.write_bytes(b"STORMVOL" * 100_000)
    with open(left, "rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(StorageError, match=r"\.a\.storm\.packing is being written by another `torchstorm pack`"):
            pack([source], out, console=QUIET)
        assert left.stat().st_size == 800_000
    pack([source], out, console=QUIET)
    assert names_in(out.parent) == ["a.storm", "x.npy"]
    with Volume.open(out) as volume:
        assert volume["data"].check().num_intact == 64


def test_one_that_is_done_between_our_opening_and_locking_its_file_keeps_it(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, taken = fcntl.flock, []

    def rename_first(fd: int, operation: int) -> None:
        if not taken:
            (out.parent / ".a.storm.packing").rename(out.parent / "theirs.storm")
        taken.append(os.fstat(fd).st_ino)
        lock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", rename_first)
    pack([source], out, console=QUIET)
    assert len(set(taken)) == 2
    assert out.stat().st_ino == taken[1]
    assert names_in(out.parent) == ["a.storm", "theirs.storm", "x.npy"]


def test_a_file_system_that_does_not_lock_is_reported(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StorageError, match=r"a.storm cannot be created: No locks available"):
        pack([source], out, console=QUIET)


def test_a_folder_that_refuses_is_reported(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Any, *args: Any) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StorageError, match=r"a.storm cannot be created: Permission denied \(.*packing\)"):
        pack([source], out, console=QUIET)
