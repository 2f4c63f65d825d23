import errno
import fcntl
import gc
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import forked
from torchstorm.errors import BudgetError, CorruptionError, StorageError, UnsupportedError
from torchstorm.memory import spill
from torchstorm.memory.disk import DiskTier
from torchstorm.memory.spill import SpillDirectory, remove_stale
from torchstorm.storage.aligned import empty_at_phase

MIB = 2**20


def numbered(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def run(script: str, directory: Path, **options: object) -> subprocess.Popen[str]:
    return forked.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **options,  # type: ignore[call-overload]
    )


HOLD = """
    import sys, torch
    from torchstorm.memory.disk import DiskTier
    tier = DiskTier(sys.argv[1], capacity_bytes=2**20)
    tier.put(torch.zeros(100_000, dtype=torch.uint8)).written.wait()
    print(tier.path, flush=True)
    sys.stdin.readline()
"""


def test_the_spill_directory_comes_and_goes(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "new", capacity_bytes=MIB)
    path = Path(tier.path)
    assert path.parent == tmp_path / "new"
    assert path.name.startswith(f"torchstorm-spill-{os.getpid()}-")
    assert path.stat().st_mode & 0o777 == 0o700
    tier.close()
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize(
    ("directory", "problem"),
    [
        ("missing/parent", "No such file"),
        ("file", "Not a directory"),
        ("/proc", "No such file"),
        ("/sys", "permitted|denied|Read-only"),
    ],
)
def test_a_directory_that_cannot_be_used(tmp_path: Path, directory: str, problem: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=rf"cannot hold a spill file: .*({problem}).*Name a directory") as caught:
        DiskTier(tmp_path / directory, capacity_bytes=MIB)
    assert caught.value.errno is not None


def test_without_a_capacity_most_of_what_is_free_is_used(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, capacity_bytes=None, write_bytes_per_s=1e9, read_bytes_per_s=2e9)
    free = shutil.disk_usage(tmp_path).free
    assert 0.8 * free < tier.spec.capacity_bytes < 0.95 * free
    assert (tier.spec.name, tier.spec.write_bytes_per_s, tier.spec.read_bytes_per_s) == ("disk", 1e9, 2e9)
    tier.close()


@pytest.mark.parametrize("unattended", [False, True])
@pytest.mark.parametrize(
    ("nbytes", "phase"), [(MIB, 0), (MIB, 64), (MIB + 100, 0), (MIB + 100, 4032), (5 * 4096, 4095)]
)
def test_nothing_goes_through_the_page_cache_nor_a_bounce_buffer_wherever_memory_begins(
    tmp_path: Path, nbytes: int, phase: int, unattended: bool
) -> None:
    tier = DiskTier(tmp_path, capacity_bytes=8 * MIB, block_bytes=8 * MIB, unattended=unattended)
    assert tier.info().path == "direct"
    source = empty_at_phase(nbytes, phase)
    source.copy_(numbered(nbytes))
    handle = tier.put(source)
    handle.written.wait()
    out = empty_at_phase(nbytes, handle.phase)
    tier.get(handle, out).wait()
    assert torch.equal(out, source)
    assert not tier._file._bounce
    counters = tier.counters()
    assert (counters.direct_write_requests, counters.direct_read_requests) == (1, 1)
    assert counters.direct_write_bytes == counters.direct_read_bytes > nbytes - 2 * 4096
    assert counters.buffered_write_requests == counters.buffered_read_requests == 0
    elsewhere = empty_at_phase(nbytes, (phase + 64) % 4096)
    tier.get(handle, elsewhere).wait()
    assert torch.equal(elsewhere, source), "read to memory that begins elsewhere in a page"
    tier.close()


@pytest.mark.parametrize("killed", [signal.SIGKILL, signal.SIGTERM])
def test_what_a_killed_process_left_is_removed_at_the_next_start(tmp_path: Path, killed: signal.Signals) -> None:
    mine = DiskTier(tmp_path, capacity_bytes=MIB)
    with run(HOLD, tmp_path) as process:
        assert process.stdout is not None
        theirs = Path(process.stdout.readline().strip())
        another = DiskTier(tmp_path, capacity_bytes=MIB)
        assert 90_000 < (theirs / "spill").stat().st_size <= 102_400
        assert Path(mine.path).exists()  # the living are left alone, ourselves included
        process.send_signal(killed)
        process.wait()
    assert (theirs / "spill").exists()
    third = DiskTier(tmp_path, capacity_bytes=MIB)
    assert not theirs.exists()
    assert sorted(map(str, tmp_path.iterdir())) == sorted(tier.path for tier in (mine, another, third))
    for tier in (mine, another, third):
        tier.close()
    assert list(tmp_path.iterdir()) == []


def test_the_end_of_the_interpreter_removes_it(tmp_path: Path) -> None:
    with run(HOLD, tmp_path, stderr=subprocess.PIPE) as process:
        assert process.communicate("\n")[1] == ""
        assert process.returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_copies_under_way_at_exit_end_first(tmp_path: Path) -> None:
    script = """
        import sys, torch
        from torchstorm.memory.disk import DiskTier
        tier = DiskTier(sys.argv[1], capacity_bytes=2**28)
        handles = [tier.put(torch.zeros(2**24, dtype=torch.uint8)) for _ in range(6)]
        outs = [torch.empty(2**24, dtype=torch.uint8) for _ in range(6)]
        copies = [tier.get(handle, out) for handle, out in zip(handles, outs)]
    """
    with run(script, tmp_path, stderr=subprocess.PIPE) as process:
        assert process.communicate(timeout=60)[1] == ""
        assert process.returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_garbage_collection_removes_it(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, capacity_bytes=MIB)
    tier.put(numbered(100_000))
    del tier
    stop = time.monotonic() + 5
    while list(tmp_path.iterdir()) and time.monotonic() < stop:
        gc.collect()
        time.sleep(0.01)
    assert list(tmp_path.iterdir()) == []


def test_a_forked_process_neither_removes_it_nor_keeps_it_locked(tmp_path: Path) -> None:
    script = """
        import os, sys, time, warnings
        warnings.simplefilter("ignore")
        from torchstorm.memory.disk import DiskTier
        tier = DiskTier(sys.argv[1], capacity_bytes=2**20)
        if os.fork() == 0:
            sys.exit(0)  # through atexit and every finalizer
        os.wait()
        print(os.path.exists(tier.path), flush=True)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write, b"1")
            time.sleep(60)
            os._exit(0)
        os.read(read, 1)  # the child runs
        print(child, flush=True)
        time.sleep(60)
    """
    with run(script, tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        child = int(process.stdout.readline())
        try:
            assert remove_stale(tmp_path) == []
            process.kill()
            process.wait()
            assert len(remove_stale(tmp_path)) == 1  # although a fork of its owner lives
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_forked_process_may_close_its_copy(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, capacity_bytes=MIB)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: of forking with threads
        child = os.fork()
    if child == 0:
        tier.close()
        tier._spill.remove()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    data = numbered(5000)
    handle = tier.put(data)
    tier.get(handle, out := torch.empty_like(data)).wait()
    assert torch.equal(out, data)
    assert Path(tier.path).exists()
    tier.close()


def test_locks_that_a_fork_shares_are_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    monkeypatch.setattr(spill, "_held_locks", {fd})
    spill._drop_locks_in_child()
    assert not spill._held_locks
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_starting_together(tmp_path: Path) -> None:
    """A directory is not taken for stale between its making and its locking."""

    def start(_: int) -> None:
        own = SpillDirectory(tmp_path)
        assert (Path(own.path) / "lock").exists()
        remove_stale(tmp_path)
        assert (Path(own.path) / "lock").exists()
        own.remove()
        own.remove()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(start, range(400)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("moment", ["before the lock file", "before the lock", "lock replaced", "while it is locked"])
def test_taken_for_stale_while_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    flock, open_, times = fcntl.flock, os.open, []

    def lock_late(fd: int, how: int) -> None:
        if not times:
            times.append(1)
            [path] = tmp_path.iterdir()
            if moment == "before the lock":
                shutil.rmtree(path)
            elif moment == "lock replaced":
                (path / "lock").unlink()
                (path / "lock").touch()
            else:
                raise BlockingIOError
        flock(fd, how)

    def open_late(path: str, *arguments: int, **options: int) -> int:
        if str(path).startswith(str(tmp_path / "torchstorm-spill-")) and not times:
            times.append(1)
            os.rmdir(os.path.dirname(path))
        return open_(path, *arguments, **options)

    if moment == "before the lock file":
        monkeypatch.setattr(os, "open", open_late)
    else:
        monkeypatch.setattr(fcntl, "flock", lock_late)
    own = SpillDirectory(tmp_path)
    assert (Path(own.path) / "lock").exists()
    assert times
    monkeypatch.undo()
    remove_stale(tmp_path)  # in the last two cases, what was left unlocked
    assert [str(path) for path in tmp_path.iterdir()] == [own.path]
    own.remove()


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StorageError, match="No locks available"):
        SpillDirectory(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_only_stale_spills_are_removed(tmp_path: Path) -> None:
    half_made = tmp_path / "torchstorm-spill-1-half"
    half_made.mkdir()
    strange = tmp_path / "torchstorm-spill-1-strange"
    strange.mkdir()
    (strange / "mine.txt").touch()
    used = tmp_path / "torchstorm-spill-1-used"
    used.mkdir()
    (used / "lock").touch()
    (used / "mine.txt").touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "spill").touch()
    (tmp_path / "torchstorm-spill-1-link").symlink_to(tmp_path / "elsewhere")
    trap = tmp_path / "torchstorm-spill-1-trap"
    trap.mkdir()
    (trap / "lock").symlink_to(tmp_path / "elsewhere" / "spill")
    (tmp_path / "torchstorm-spill-file").touch()
    assert remove_stale(tmp_path) == [str(half_made)]
    assert (strange / "mine.txt").exists()
    assert (used / "mine.txt").exists()
    assert (tmp_path / "elsewhere" / "spill").exists()
    assert (trap / "lock").is_symlink()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A full file system for those who may mount one; else a limit on the file's length says no just so."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "torchstorm-test", str(place)], capture_output=True, check=False
    )
    if mounted.returncode == 0:
        yield place
        subprocess.run(["umount", "--lazy", str(place)], check=True)
    else:
        import resource

        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, limits[1]))
        yield place
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("check", [False, True])
def test_a_full_disk_fails_one_put_and_no_more(small_disk: Path, check: bool) -> None:
    tier = DiskTier(small_disk, capacity_bytes=64 * MIB, check=check, block_bytes=65_536)
    kept = tier.put(numbered(300_000), label="kept")
    kept.written.wait()
    used = tier.used_bytes
    failed = tier.put(numbered(2 * MIB), label="too large")
    copy = tier.get(failed, torch.empty(2 * MIB, dtype=torch.uint8))
    for waited in (failed.written, copy):
        with pytest.raises(
            StorageError, match=r"spill: writing 20[0-9]{5} bytes at .* are free there. Free some space"
        ):
            waited.wait()
    assert failed.written.done()
    assert tier.used_bytes == used
    assert (Path(tier.path) / "spill").stat().st_blocks * 512 <= used  # what it wrote was given back to the disk
    with pytest.raises(StorageError, match="Free some space"):
        tier.get(failed, torch.empty(2 * MIB, dtype=torch.uint8)).wait()
    tier.free(failed)
    assert tier.used_bytes == used
    after = tier.put(numbered(200_000, 1))
    for handle, seed in ((kept, 0), (after, 1)):
        out = torch.empty(handle.nbytes, dtype=torch.uint8)
        tier.get(handle, out).wait()
        assert torch.equal(out, numbered(handle.nbytes, seed))
    freed_at_once = tier.put(numbered(2 * MIB))
    tier.free(freed_at_once)
    assert tier.used_bytes == used + 200_704
    tier.close()
    assert list(small_disk.iterdir()) == []


def test_a_directory_that_disappears(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "gone", capacity_bytes=MIB)
    first = tier.put(numbered(5000))
    first.written.wait()
    shutil.rmtree(tmp_path / "gone")
    second = tier.put(numbered(5000, 1))  # the file lives on until it is closed
    for seed, handle in enumerate((first, second)):
        tier.get(handle, out := torch.empty(5000, dtype=torch.uint8)).wait()
        assert torch.equal(out, numbered(5000, seed))
    tier.close()


def test_a_flipped_byte_is_found_and_named(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, capacity_bytes=MIB, check=True)
    data = numbered(5000)
    handle = tier.put(data, label="blocks.3.mlp")
    other = tier.put(numbered(5000, 1))
    handle.written.wait()
    with open(Path(tier.path) / "spill", "r+b") as file:
        file.seek(4999)
        byte = file.read(1)[0]
        file.seek(4999)
        file.write(bytes([byte ^ 1]))
    copy = tier.get(handle, out := torch.empty(5000, dtype=torch.uint8))
    for _ in range(2):
        with pytest.raises(CorruptionError, match=r"blocks.3.mlp \(5000 bytes\) was read from .*spill with checksum"):
            copy.synchronize()
    tier.get(other, out).wait()
    assert torch.equal(out, numbered(5000, 1))
    tier.close()


def test_a_source_that_changes_too_early_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = DiskTier(tmp_path, capacity_bytes=64 * MIB, check=True)
    source = numbered(8 * MIB)
    gate = threading.Event()
    write = os.pwritev

    def held_up(fd: int, views: list[memoryview], offset: int) -> int:
        gate.wait(10)
        return write(fd, views, offset)

    monkeypatch.setattr(os, "pwritev", held_up)
    handle = tier.put(source, label="reused")
    source.zero_()
    gate.set()
    with pytest.raises(CorruptionError, match="reused"):
        tier.get(handle, torch.empty_like(source)).wait()
    tier.close()


def test_freed_slots_are_poisoned(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, capacity_bytes=8 * MIB, check=True)
    first, kept = tier.put(numbered(2 * MIB + 5)), tier.put(numbered(100, 1))
    empty = tier.put(numbered(0))
    tier.free(first)
    tier.free(empty)
    tier.get(kept, out := torch.empty(100, dtype=torch.uint8)).wait()
    assert torch.equal(out, numbered(100, 1))
    [spilled] = Path(tier.path).glob("spill")
    stop = time.monotonic() + 5
    while (found := spilled.read_bytes()[: 2 * MIB + 4096]).count(0xFF) < len(found) and time.monotonic() < stop:
        time.sleep(0.01)
    assert found == bytes([0xFF]) * (2 * MIB + 4096)
    tier.close()


def test_the_next_owner_of_a_slot_waits_for_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reads held up: the slot is given back, and given out, at once; its bytes only when they may change."""
    tier = DiskTier(tmp_path, capacity_bytes=8192)
    data = numbered(8192)
    handle = tier.put(data)
    handle.written.wait()
    gate = threading.Event()
    read = os.preadv

    def held_up(fd: int, views: list[memoryview], offset: int) -> int:
        gate.wait(10)
        return read(fd, views, offset)

    monkeypatch.setattr(os, "preadv", held_up)
    copy = tier.get(handle, out := torch.empty_like(data))
    tier.free(handle)
    following = tier.put(numbered(8192, 1))
    time.sleep(0.05)
    assert not copy.done()
    assert not following.written.done()
    gate.set()
    copy.wait()
    assert torch.equal(out, data)
    tier.get(following, out).wait()
    assert torch.equal(out, numbered(8192, 1))
    tier.close()


def test_budget_names_what_did_not_fit(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, capacity_bytes=10_000)  # two whole pages
    tier.put(numbered(1))
    with pytest.raises(BudgetError, match=r"disk=9.77 KiB in .*, but x needs 8.00 KiB more with 4.00 KiB in use"):
        tier.put(numbered(4097), label="x")
    tier.close()


def test_cuda_is_told_to_come_through_the_host(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, capacity_bytes=MIB)
    handle = tier.put(numbered(5))
    with FakeTensorMode(allow_non_fake_inputs=True):
        on_gpu = torch.empty(5, dtype=torch.uint8, device="cuda:1")
    told = "the disk tier accepts host memory, not cuda:1: use a StagedDiskTier"
    with pytest.raises(UnsupportedError, match=told):
        tier.put(on_gpu)
    with pytest.raises(UnsupportedError, match=told):
        tier.get(handle, on_gpu)
    tier.close()


def test_a_start_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(shutil, "disk_usage", fail)
    with pytest.raises(OSError, match="Input/output"):
        DiskTier(tmp_path, capacity_bytes=None)
    gc.collect()
    assert list(tmp_path.iterdir()) == []
    assert not spill._held_locks
