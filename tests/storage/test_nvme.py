"""Sectors by number, of files and of real block devices where this machine lends one."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchstorm
from torchstorm.errors import ConfigError, StorageError
from torchstorm.storage import device as asked
from torchstorm.storage.nvme import NVMe

SECTORS = 64


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "disk"
    path.write_bytes(bytes(number % 251 for number in range(SECTORS * 512 + 100)))
    return path


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[str]:
    """A block device of 8 MiB + 512 bytes over a file; only root may make one, and not everywhere."""
    behind = tmp_path / "behind"
    behind.write_bytes(os.urandom(8 * 2**20 + 512))
    made = subprocess.run(["losetup", "--find", "--show", behind], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no block device can be made here: {made.stderr.strip()}")
    name = made.stdout.strip()
    try:
        yield name
    finally:
        subprocess.run(["losetup", "--detach", name], check=True)


# ---------------------------------------------------------------------- what is there


def test_sectors_are_read_by_number(path: Path) -> None:
    assert torchstorm.NVMe is NVMe
    content = path.read_bytes()
    with NVMe(path) as device:
        assert (device.sector_bytes, device.num_sectors, device.read_only) == (512, SECTORS, True)
        found = device.read(3, 2)
        assert (found.shape, found.dtype) == ((2, 512), torch.uint8)
        assert found.numpy().tobytes() == content[3 * 512 : 5 * 512]
        out = torch.empty(4, 32, dtype=torch.float64)
        assert device.read(60, 2, out) is out
        assert out.numpy().tobytes() == content[60 * 512 : 62 * 512]
        assert device.read(SECTORS, 0).shape == (0, 512)
        request = device.read_async(SECTORS - 1, 1, out := torch.empty(256, dtype=torch.int16))
        request.wait()
        assert request.done()
        assert request.result() is out
        assert out.numpy().tobytes() == content[63 * 512 : 64 * 512]
        assert device.info().counters.direct_read_bytes + device.info().counters.buffered_read_bytes > 0
        assert repr(device) == f"NVMe({str(path)!r}, 64 sectors of 512 bytes, 32.00 KiB, reading only)"
    with pytest.raises(StorageError, match=r"is closed\. Open it again"):
        device.read(0, 1)


actions = st.lists(st.tuples(st.booleans(), st.integers(0, 39), st.integers(0, 40)), max_size=12)


@settings(max_examples=40, deadline=None)
@given(sector_bytes=st.sampled_from([1, 7, 512, 520, 4096]), todo=actions, seed=st.integers(0, 99))
def test_any_sectors_as_a_plain_file(
    place: Path, sector_bytes: int, todo: list[tuple[bool, int, int]], seed: int
) -> None:
    torch.manual_seed(seed)
    path = place / "any"
    expected = bytearray(os.urandom(40 * sector_bytes + sector_bytes // 2))
    path.write_bytes(expected)
    with NVMe(path, sector_bytes=sector_bytes, read_only=False) as device:
        for writes, lba, count in todo:
            count = min(count, 40 - lba)
            inside = slice(lba * sector_bytes, (lba + count) * sector_bytes)
            if writes:
                source = torch.randint(0, 256, (count * sector_bytes,), dtype=torch.uint8)
                device.write(lba, count, source)
                expected[inside] = source.numpy().tobytes()
            else:
                assert device.read(lba, count).numpy().tobytes() == expected[inside]
        device.flush()
    assert path.read_bytes() == expected


def test_a_write_that_is_begun_is_there_after_the_flush(path: Path) -> None:
    with NVMe(path, read_only=False) as device:
        for lba in range(SECTORS):
            device.write_async(lba, 1, torch.full((64,), lba))  # dropped: flush waits for it
        device.flush()
        found = device.read(0, SECTORS).view(torch.int64)
        assert torch.equal(found, torch.arange(SECTORS).unsqueeze(1).expand(SECTORS, 64))
        assert "reading and writing" in repr(device)


# ---------------------------------------------------------------------- what is asked wrongly


@pytest.mark.parametrize("ask", [(-1, 1), (SECTORS, 1), (0, SECTORS + 1), (3, -1), (True, 1), (1, 1.0)], ids=str)
def test_sectors_that_are_not_there_are_told_with_number_and_limit(path: Path, ask: tuple[int, int]) -> None:
    lba, count = ask
    told = rf"disk: {count} sectors from {lba} on were requested, but there are 64 .* from 0 to 63|must be integers"
    with NVMe(path, read_only=False) as device:
        for use in (device.read, device.read_async, lambda *ask: device.write(*ask, torch.zeros(512))):
            with pytest.raises(ConfigError, match=told):
                use(lba, count)
    assert path.read_bytes()[:251] == bytes(range(251))


def test_a_tensor_that_does_not_fit_is_told_and_nothing_moves(path: Path) -> None:
    content = path.read_bytes()
    square = torch.zeros(16, 32).t()
    with NVMe(path, read_only=False) as device:
        for tensor, told in (
            (
                torch.zeros(1024),
                r"4 sectors of 512 bytes need a tensor of 2048 bytes, but this one has 4096: \(1024,\)",
            ),
            (square, r"contiguous tensor is needed, but this one is \(32, 16\) with strides \(1, 32\)"),
        ):
            with pytest.raises(ConfigError, match=told):
                device.read(0, 4, tensor)
            with pytest.raises(ConfigError, match=told):
                device.write(0, 4, tensor)
            assert not tensor.any()
        stream = object()  # a CPU tensor has no use for any
        with pytest.raises(ConfigError, match=r"for a tensor on cpu, but only tensors on a GPU use a stream"):
            device.read_async(0, 1, torch.zeros(128), stream)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"for a tensor on cpu"):
            device.write_async(0, 1, torch.zeros(128), stream)  # type: ignore[arg-type]
    with NVMe(path) as device, pytest.raises(StorageError, match="reading only: open it with read_only=False"):
        device.write(0, 1, torch.zeros(128))
    assert path.read_bytes() == content


@pytest.mark.parametrize("size", [0, -512, True, 1.5])
def test_a_sector_of_no_size_is_reported(path: Path, size: int) -> None:
    with pytest.raises(ConfigError, match=f"sector_bytes={size!r}, but it must be an integer"):
        NVMe(path, sector_bytes=size)


def test_what_is_no_disk_is_reported(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "small").write_bytes(bytes(511))
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as listening:
        listening.bind(str(tmp_path / "socket"))
        for name, told in (
            (tmp_path, "is a directory, which has no sectors"),
            (tmp_path / "pipe", "is a pipe, which has no sectors"),
            (tmp_path / "socket", "is a socket, which has no sectors"),
            ("/dev/null", "is a character device, which has no sectors"),
            (tmp_path / "none", "none cannot be opened: No such file"),
            (tmp_path / "small", "too small: it has 511 bytes, and a sector has 512"),
        ):
            with pytest.raises(StorageError, match=told):
                NVMe(name)


def test_a_file_that_this_user_may_not_open_is_reported() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "disk"
        path.write_bytes(bytes(512))
        path.chmod(0)
        Path(folder).chmod(0o711)
        user = os.geteuid()
        if user == 0:  # who may open all
            os.seteuid(65534)
        try:
            with pytest.raises(StorageError, match=f"{path} cannot be opened: Permission denied. Give a file") as told:
                NVMe(path)
        finally:
            os.seteuid(user)
        assert told.value.errno == errno.EACCES


def test_a_file_cut_off_while_it_is_open_is_reported(path: Path) -> None:
    with NVMe(path) as device:
        os.truncate(path, 1000)
        with pytest.raises(StorageError, match=r"sector 1 of .*disk is too short: wanted 512 bytes at offset 512"):
            device.read(1, 1)
        assert device.read(0, 1).any()


# ---------------------------------------------------------------------- block devices


def test_a_block_device_is_asked_for_its_sectors(loop: str) -> None:
    with NVMe(loop, read_only=False) as device:
        assert (device.sector_bytes, device.num_sectors) == (512, 16_385)
        source = torch.randint(0, 256, (5 * 512,), dtype=torch.uint8)
        device.write(16_380, 5, source)  # to the last sector, within a page
        device.flush()
        assert torch.equal(device.read(16_380, 5).flatten(), source)
    with NVMe(loop, sector_bytes=4096) as device:
        assert device.num_sectors == 2048
        assert torch.equal(device.read(2047, 1).flatten()[2048:], source[:2048])
    with pytest.raises(ConfigError, match=f"sector_bytes=700, but {loop} has sectors of 512 bytes"):
        NVMe(loop, sector_bytes=700)


def test_a_block_device_that_the_kernel_holds_is_not_written(loop: str) -> None:
    held = os.open(loop, os.O_RDONLY | os.O_EXCL)  # as mounting it does, unseen by this process's tables
    try:
        with pytest.raises(StorageError, match=f"{loop} is in use by the kernel"):
            NVMe(loop, read_only=False)
        NVMe(loop).close()
        NVMe(loop, read_only=False, allow_mounted=True).close()
    finally:
        os.close(held)
    NVMe(loop, read_only=False).close()


MOUNTS = r"""22 27 0:21 / /proc rw,relatime - proc proc rw
29 1 259:1 / /data\040of\040mine rw shared:1 - ext4 /dev/nvme0n1p1 rw
30 1 0:44 / /snap rw - btrfs {source} rw
31 1 253:3 / /vault rw - xfs /dev/mapper/vault rw
"""


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kernel's tables, of a machine with one disk of two partitions, and an encrypted one."""
    devices = tmp_path / "devices"
    for folder, number in (("259:0/nvme0n1p1", "259:1"), ("259:0/nvme0n1p2", "259:2"), ("8:0/holders/dm-3", "253:3")):
        (devices / folder).mkdir(parents=True)
        (devices / folder / "dev").write_text(f"{number}\n")
        if "holders" not in folder:
            (devices / folder / "partition").write_text("1\n")
    (tmp_path / "mounts").write_text(MOUNTS.format(source="/dev/null"))
    (tmp_path / "swaps").write_text("Filename Type Size Used Priority\n/dev/null partition 1 0 -2\n")
    monkeypatch.setattr(asked, "_MOUNTS", tmp_path / "mounts")
    monkeypatch.setattr(asked, "_SWAPS", tmp_path / "swaps")
    monkeypatch.setattr(asked, "_DEVICES", devices)
    return tmp_path


@pytest.mark.parametrize(
    ("number", "told"),
    [
        ((259, 1), "is in use mounted at /data of mine: writing"),
        ((259, 0), "is in use mounted at /data of mine, by its part /dev/nvme0n1p1: writing"),
        ((8, 0), "is in use mounted at /vault, by its part /dev/mapper/vault"),
    ],
    ids=["itself", "its partition", "what is made of it"],
)
def test_a_mounted_device_is_refused_with_its_mount_point(
    tables: Path, monkeypatch: pytest.MonkeyPatch, number: tuple[int, int], told: str
) -> None:
    _pretend(monkeypatch, {"/dev/disk": number})
    with pytest.raises(StorageError, match=told):
        asked.check_unused("/dev/disk")


def test_a_device_that_a_table_names_by_its_path_alone_is_refused(
    tables: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _pretend(monkeypatch, {"/dev/disk": (8, 16), "/dev/null": (8, 16)})
    with pytest.raises(StorageError, match="is in use mounted at /snap"):
        asked.check_unused("/dev/disk")
    (tables / "mounts").unlink()
    with pytest.raises(StorageError, match="is in use as swap"):
        asked.check_unused("/dev/disk")


def test_a_device_that_no_table_names_is_asked_of_the_kernel(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, {"/dev/disk": (259, 2)})
    with pytest.raises(StorageError, match="/dev/disk cannot be opened"):  # there is none
        asked.check_unused("/dev/disk")


def _pretend(monkeypatch: pytest.MonkeyPatch, numbers: dict[str, tuple[int, int]]) -> None:
    """Some names are block devices of these numbers."""
    real = os.stat

    def stat(path: str, **options: object) -> os.stat_result:
        if str(path) not in numbers:
            return real(path, **options)  # type: ignore[arg-type]
        fields = list(real("/dev/null"))
        fields[0] = 0o060600
        return os.stat_result(fields, {"st_rdev": os.makedev(*numbers[str(path)])})

    monkeypatch.setattr(os, "stat", stat)
