"""A disk that fails is told with what it failed, nothing half done looks whole, and what is left goes on."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest
import torch

from storage.faulty_disk import READS, SYNCS, WRITES, Disk, on_a_faulty_disk
from torchstorm.errors import CorruptionError, StorageError
from torchstorm.storage.direct import DirectFile
from torchstorm.storage.layout import Kind
from torchstorm.storage.nvme import NVMe
from torchstorm.storage.volume import Volume

SIZE = 8192
ODD = Kind(dtype=torch.uint8, shape=(701,), length=20)
BIG = Kind(dtype=torch.uint8, shape=(SIZE,), length=20)
HUGE = Kind(dtype=torch.uint8, shape=(3 * 2**20,), length=2)


def rows(kind: Kind, first: int, count: int, turn: int = 0) -> torch.Tensor:
    """What records are to hold."""
    values = torch.arange(first, first + count).unsqueeze(1) * 7 + torch.arange(kind.shape[0]) + 3 * turn
    return values.to(torch.uint8)


def filled(path: Path) -> Volume:
    volume = Volume.create(path, kinds={"odd": ODD, "big": BIG})
    volume["odd"].write(0, rows(ODD, 0, 20))
    volume["big"].write(0, rows(BIG, 0, 20))
    volume.flush()
    return volume


def start_of(volume: Volume, name: str, record: int = 0) -> int:
    kind = volume[name].kind
    assert kind.start_bytes is not None
    return kind.start_bytes + record * kind.record_bytes


def checks_of(volume: Volume, name: str, record: int = 0) -> int:
    start = volume[name].kind.checks_bytes
    assert start is not None
    return start + 8 * record


# ---------------------------------------------------------------------- reads


@on_a_faulty_disk
def test_a_read_that_fails_names_kind_and_records_and_the_rest_is_read(disk: Disk, path: Path) -> None:
    with filled(path) as volume:
        start = start_of(volume, "big", 5)
        with disk.failing(path, READS, start=start, stop=start + 1, error=errno.EIO):
            told = (
                rf"^record 5 of kind 'big' of {path}: {path}: reading {SIZE} bytes at offset {start} failed in the "
                rf"block at {start}: Input/output error\. Check the disk"
            )
            out = torch.empty(1, SIZE, dtype=torch.uint8)
            request = volume["big"].read_async(5, 1, out)
            for use in (request.wait, request.result, request.wait, lambda: volume["big"].read(5)):
                with pytest.raises(StorageError, match=told) as caught:
                    use()
                assert caught.value.errno == errno.EIO
            with pytest.raises(StorageError, match=r"^records 3 to 8 of kind 'big'"):
                volume["big"].read(3, 6)
            with pytest.raises(StorageError, match=r"^record 5 of kind 'big'"):
                volume.read_batch([("odd", 0, 9, None), ("big", 5, 1, None), ("big", 6, 2, None)]).wait()
            # Where no address is aligned: rows that are go through io_uring, before which the shim cannot stand.
            rows_out = torch.empty(3 * SIZE + 1, dtype=torch.uint8)[1:].view(3, SIZE)
            with pytest.raises(StorageError, match=r"^record 5 of kind 'big'"):
                volume["big"].read_rows_async([9, 5, 2], rows_out).wait()
            with pytest.raises(StorageError, match=r"^records 0 to 19 of kind 'big'"):
                volume["big"].check()
            assert torch.equal(volume["big"].read(6, 14), rows(BIG, 6, 14))
            assert torch.equal(volume["odd"].read(0, 20), rows(ODD, 0, 20))
        assert torch.equal(volume["big"].read(0, 20), rows(BIG, 0, 20))
        volume.flush()  # a read that failed is nothing to tell


@on_a_faulty_disk
def test_checks_that_cannot_be_read_are_told_and_no_record_is_handed_out(disk: Disk, path: Path) -> None:
    with filled(path) as volume:
        at = checks_of(volume, "odd", 3)
        with disk.failing(path, READS, start=at, stop=at + 8, error=errno.EIO):
            told = rf"^kind 'odd' of {path}: reading the checksums of records 2 to 5 failed at offset {at - 8}: Inp"
            with pytest.raises(StorageError, match=told) as caught:
                volume["odd"].read(2, 4)
            assert caught.value.errno == errno.EIO
            with pytest.raises(StorageError, match="reading the checksums of records 0 to 19 failed"):
                volume["odd"].check()
            assert torch.equal(volume["odd"].read(4, 16), rows(ODD, 4, 16))
        assert torch.equal(volume["odd"].read(0, 20), rows(ODD, 0, 20))
        with disk.failing(path, READS, start=at, stop=at + 8, most=3):
            assert torch.equal(volume["odd"].read(0, 20), rows(ODD, 0, 20))
            assert disk.num_struck > 2


@on_a_faulty_disk
def test_a_volume_whose_start_cannot_be_read_is_not_opened(disk: Disk, path: Path) -> None:
    filled(path).close()
    descriptors = len(os.listdir("/proc/self/fd"))
    for start, what in ((0, 4096), (4096, r"\d+")):
        with (
            disk.failing(path, READS, start=start, stop=start + 1, error=errno.EIO),
            pytest.raises(StorageError, match=rf"^{path}: reading {what} bytes at offset 0 failed.*Input/output"),
        ):
            Volume.open(path)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    with Volume.open(path) as volume:
        assert volume["odd"].check().num_intact == 20


# ---------------------------------------------------------------------- writes


@on_a_faulty_disk
def test_a_write_that_fails_is_told_by_the_next_flush_too(disk: Disk, path: Path) -> None:
    with Volume.create(path, kinds={"odd": ODD, "big": BIG}) as volume:
        start = start_of(volume, "big", 5)
        for error, said in ((errno.EIO, r"Input/output error\. Check"), (errno.ENOSPC, r"No space .* Free some space")):
            told = rf"record 5 of kind 'big' of {path}: {path}: writing {SIZE} bytes at offset {start} failed.*{said}"
            with disk.failing(path, WRITES, start=start, stop=start + 1, error=error):
                with pytest.raises(StorageError, match=rf"^{told}") as caught:
                    volume["big"].write(5, rows(BIG, 5, 1))
                assert caught.value.errno == error
                volume["big"].write(6, rows(BIG, 6, 1))
                volume["big"].write_async(5, rows(BIG, 5, 1))  # nobody waits for it
                with pytest.raises(StorageError, match=rf"{path}: a write since the last flush failed, .* {told}"):
                    volume.flush()
            volume.flush()  # told once
            with pytest.raises(CorruptionError, match="record 5 was never written"):
                volume["big"].read(5)
            assert torch.equal(volume["big"].read(6), rows(BIG, 6, 1))
        volume["big"].write(5, rows(BIG, 5, 1))
        volume.flush()
    with Volume.open(path) as volume:
        assert torch.equal(volume["big"].read(5, 2), rows(BIG, 5, 2))
        assert volume["big"].check().unwritten == tuple({*range(20)} - {5, 6})


@on_a_faulty_disk
def test_of_a_write_that_failed_in_the_middle_nothing_looks_whole(disk: Disk, path: Path) -> None:
    with Volume.create(path, kinds={"huge": HUGE}) as volume:
        volume["huge"].write(0, rows(HUGE, 0, 1))
        start = start_of(volume, "huge", 1) - 1
        with (
            disk.failing(path, WRITES, start=start, stop=start + 1, error=errno.EIO),
            pytest.raises(StorageError, match=r"^records? 0.* of kind 'huge'"),
        ):
            volume["huge"].write(0, rows(HUGE, 0, 2, turn=1))
        with pytest.raises(StorageError, match="since the last flush"):
            volume.flush()
        volume.flush()
        condition = volume["huge"].check()
        assert (condition.num_intact, condition.unwritten, condition.damaged) == (0, (1,), (0,))
        for record, said in ((0, "record 0 is not what was written"), (1, "record 1 was never written")):
            with pytest.raises(CorruptionError, match=said):
                volume["huge"].read(record)
        volume["huge"].write(0, rows(HUGE, 0, 2, turn=2))
        assert torch.equal(volume["huge"].read(0, 2), rows(HUGE, 0, 2, turn=2))


@on_a_faulty_disk
def test_a_record_whose_check_cannot_be_written_was_not_written(disk: Disk, path: Path) -> None:
    with Volume.create(path, kinds={"odd": ODD}) as volume:
        at = checks_of(volume, "odd", 3)
        with disk.failing(path, WRITES, start=at, stop=at + 8, error=errno.ENOSPC):
            told = rf"kind 'odd' of {path}: writing the checksums of records 2 to 5 failed at offset {at - 8}: No space"
            with pytest.raises(StorageError, match=rf"^{told}") as caught:
                volume["odd"].write(2, rows(ODD, 2, 4))
            assert caught.value.errno == errno.ENOSPC
        with pytest.raises(StorageError, match=f"since the last flush failed, .* {told}"):
            volume.flush()
        assert volume["odd"].check().unwritten == tuple(range(20))
        for most in (1, 3, 13):
            with disk.failing(path, WRITES, start=at, stop=at + 8, most=most):
                volume["odd"].write(2, rows(ODD, 2, 4, turn=most))
                assert disk.num_struck > 1 or most == 13
            assert torch.equal(volume["odd"].read(2, 4), rows(ODD, 2, 4, turn=most))


@on_a_faulty_disk
def test_a_volume_whose_header_cannot_be_written_is_none(disk: Disk, path: Path) -> None:
    for calls, said in ((WRITES, "bytes at offset 0 failed"), (SYNCS, "making it durable failed")):
        with disk.failing(path, calls, error=errno.EIO), pytest.raises(StorageError, match=rf"^{path}: .*{said}"):
            Volume.create(path, kinds={"odd": ODD}, replace=True)
        with pytest.raises(StorageError, match="no torchstorm volume"):
            Volume.open(path)
    with (
        disk.failing(path.parent, SYNCS, error=errno.EIO),
        pytest.raises(StorageError, match=rf"^{path.parent}: making its entries durable failed: Input/output error"),
    ):
        Volume.create(path, kinds={"odd": ODD}, replace=True)
    with disk.failing(path.parent, SYNCS, error=errno.EINVAL):  # a file system that knows nothing of it
        Volume.create(path, kinds={"odd": ODD}, replace=True).close()


# ---------------------------------------------------------------------- fsync


@on_a_faulty_disk
def test_once_it_could_not_be_made_durable_no_later_flush_says_that_it_is(disk: Disk, path: Path) -> None:
    """After a failed write-back the kernel drops the pages, tells it once, and the next fsync succeeds."""
    told = rf"^{path}: making it durable failed: Input/output error\. Data written since the last successful flush"
    with filled(path) as volume:
        volume["odd"].write(3, rows(ODD, 3, 1, turn=1))
        with disk.failing(path, SYNCS, error=errno.EIO, times=1), pytest.raises(StorageError, match=told) as caught:
            volume.flush()
        assert caught.value.errno == errno.EIO
        for _ in range(2):
            with pytest.raises(StorageError, match=told):
                volume.flush()
        volume["odd"].write(4, rows(ODD, 4, 1, turn=1))
        with pytest.raises(StorageError, match=told):
            volume.flush()
        assert torch.equal(volume["odd"].read(3, 2), rows(ODD, 3, 2, turn=1))  # as far as anybody can see
    with Volume.open(path) as volume:
        volume["odd"].write(3, rows(ODD, 3, 1, turn=1))
        volume.flush()
    path.write_bytes(bytes(8192))
    with NVMe(path, read_only=False) as device:
        device.write(3, 1, torch.ones(512, dtype=torch.uint8))
        with disk.failing(path, SYNCS, error=errno.EIO, times=1), pytest.raises(StorageError, match=told):
            device.flush()
        with pytest.raises(StorageError, match=told):
            device.flush()
    file = DirectFile(path)
    with disk.failing(path, SYNCS, error=errno.ENOSPC, times=1), pytest.raises(StorageError, match="durable failed"):
        file.sync()
    with pytest.raises(StorageError, match="durable failed: No space left") as caught:
        file.sync()
    assert caught.value.errno == errno.ENOSPC
    file.close()


# ---------------------------------------------------------------------- interrupted and short


@on_a_faulty_disk
def test_short_and_interrupted_transfers_go_on_to_the_byte(disk: Disk, path: Path) -> None:
    torch.manual_seed(0)
    for direct in (True, False):
        for offset, nbytes in ((0, 8192), (4096, 12_288), (1, 5000), (4095, 4098), (777, 20_001)):
            for fault in ({"most": 1, "times": 3}, {"most": 7}, {"most": 511}, {"most": 4097}, {"most": 8192}):
                path.write_bytes(bytes(30_000))
                source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
                out = torch.zeros_like(source)
                file = DirectFile(path, block_bytes=16_384, direct=direct)
                with disk.failing(path, WRITES, **fault):
                    file.write_from(source, offset)
                expected = bytes(offset) + source.numpy().tobytes() + bytes(30_000 - offset - nbytes)
                assert path.read_bytes() == expected, (direct, offset, nbytes, fault)
                with disk.failing(path, READS, **fault):
                    file.read_into(out, offset)
                assert torch.equal(out, source), (direct, offset, nbytes, fault)
                file.close()
    with filled(path.with_name("volume")) as volume:
        with disk.failing("volume", READS + WRITES + SYNCS, error=errno.EINTR, times=50):
            volume["odd"].write(2, rows(ODD, 2, 9, turn=1))
            volume.flush()
            assert torch.equal(volume["odd"].read(2, 9), rows(ODD, 2, 9, turn=1))
            assert disk.num_struck == 50
        with disk.failing("volume", READS + WRITES, most=101):
            volume["odd"].write(2, rows(ODD, 2, 9, turn=2))
            assert torch.equal(volume["odd"].read(2, 9), rows(ODD, 2, 9, turn=2))
        assert volume["odd"].check().num_intact == 20


# ---------------------------------------------------------------------- sectors


@on_a_faulty_disk
def test_sectors_that_fail_are_named_and_the_rest_goes_on(disk: Disk, path: Path) -> None:
    path.write_bytes(bytes(64 * 4096))
    with NVMe(path, sector_bytes=4096, read_only=False) as device:
        with disk.failing(path, READS + WRITES, start=9 * 4096, stop=9 * 4096 + 1, error=errno.EIO):
            for use in (
                lambda: device.read(9, 1),
                lambda: device.write(9, 1, torch.ones(1024)),
                device.read_async(9, 1).wait,
                device.write_async(9, 1, torch.ones(1024)).wait,
            ):
                with pytest.raises(
                    StorageError, match=rf"^sector 9 of {path}: .*ing 4096 bytes at .*: Input"
                ) as caught:
                    use()
                assert caught.value.errno == errno.EIO
                assert caught.value.extent == (9 * 4096, 10 * 4096)
            with pytest.raises(StorageError, match=r"^sectors 8 to 10"):
                device.read(8, 3)
            device.write(10, 2, torch.ones(2048))
            assert bool((device.read(10, 2).view(torch.float32) == 1).all())
        with pytest.raises(StorageError, match=rf"^{path}: a write since the last flush failed, .* sector 9 of"):
            device.flush()
        device.write(9, 1, torch.ones(1024))
        device.flush()
        assert bool((device.read(9, 3).view(torch.float32) == 1).all())


def test_the_disk_that_fails_tells_where_a_test_does(faulty_process, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(AssertionError, match=re.compile("ended with 1.*the disk never failed", re.DOTALL)):
        faulty_process.run(never_fails.elsewhere, tmp_path)


@on_a_faulty_disk
def never_fails(disk: Disk, path: Path) -> None:
    with disk.failing(path, READS, error=errno.EIO):
        pass
