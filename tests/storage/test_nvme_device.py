"""Every path to an NVMe namespace, on devices that may be overwritten: `make test-nvme` runs these in QEMU.

Through xNVMe by io_uring_cmd (/dev/ng...) and by io_uring (/dev/nvme...), and by O_DIRECT (DirectFile on
/dev/nvme...); on sectors of 512 and of 4096 bytes. What one path wrote is read by another.
"""

import os
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.any_range import RANGES, check_any_range
from torchstorm.errors import StorageError
from torchstorm.storage import xnvme_queues
from torchstorm.storage.aligned import aligned_empty
from torchstorm.storage.direct import DirectFile
from torchstorm.storage.xnvme import XnvmeDevice

pytestmark = pytest.mark.nvme
SECTORS = [512, 4096]
MECHANISMS = ["io_uring_cmd", "io_uring"]


def named(variable: str) -> str:
    """Devices come by name only: what is on them is lost."""
    assert variable in os.environ, f"{variable} names no device that may be overwritten; run `make test-nvme`"
    return os.environ[variable]


def node(mechanism: str, device: str) -> str:
    return f"/dev/{'ng' if mechanism == 'io_uring_cmd' else 'nvme'}{device}"


@pytest.fixture(params=SECTORS)
def sector(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(params=MECHANISMS)
def device(request: pytest.FixtureRequest, sector: int) -> Iterator[XnvmeDevice]:
    opened = XnvmeDevice(node(request.param, named(f"TORCHSTORM_NVME_{sector}")))
    yield opened
    opened.close()


@pytest.fixture
def direct(sector: int) -> Iterator[DirectFile]:
    opened = DirectFile(f"/dev/nvme{named(f'TORCHSTORM_NVME_{sector}')}")
    yield opened
    opened.close()


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(writes=RANGES, reads=RANGES, seed=st.integers(0, 2**20))
def test_any_offset_and_length_through_xnvme(
    device: XnvmeDevice, writes: list[tuple[int, int, int]], reads: list[tuple[int, int, int]], seed: int
) -> None:
    check_any_range(device, writes, reads, seed)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(writes=RANGES, reads=RANGES, seed=st.integers(0, 2**20))
def test_any_offset_and_length_through_o_direct(
    direct: DirectFile, writes: list[tuple[int, int, int]], reads: list[tuple[int, int, int]], seed: int
) -> None:
    check_any_range(direct, writes, reads, seed)
    assert direct.info().path == "direct"


def test_namespaces_and_what_is_active(device: XnvmeDevice, sector: int) -> None:
    assert device.sector_bytes == sector
    assert device.num_sectors * sector == device.size_bytes == 2**26
    assert device.namespace == {512: 1, 4096: 2}[sector]
    assert device.command_bytes == 2**17  # the controller's limit
    mechanism = "io_uring_cmd" if "/ng" in device.uri else "io_uring"
    info = device.info()
    assert info.path == "xnvme"
    assert f"xNVMe 0.7.5, backend linux, asynchronous {mechanism}, synchronous nvme" in info.reason


def test_what_is_written_is_on_the_drive(device: XnvmeDevice, direct: DirectFile, sector: int) -> None:
    source = torch.randint(256, (2**23,), dtype=torch.uint8)
    aligned = aligned_empty(2**23).copy_(source)
    before = int(Path(f"/sys/class/block/{Path(direct.path).name}/stat").read_text().split()[6])
    device.write_from(aligned, 2**24)
    device.sync()
    after = int(Path(f"/sys/class/block/{Path(direct.path).name}/stat").read_text().split()[6])
    counters = device.info().counters
    assert (counters.nvme_write_bytes, counters.nvme_write_commands) == (2**23, 64)
    # The block layer counts io_uring's writes, and never sees those that the kernel only passes on.
    assert (after - before) * 512 == (0 if "/ng" in device.uri else 2**23)
    found = aligned_empty(2**23)
    direct.read_into(found, 2**24)
    assert torch.equal(found, source)
    direct.write_from(found.neg_(), 2**24 + 5 * sector)
    direct.sync()  # edges of less than a page went through the page cache, which io_uring_cmd does not see
    device.read_into(aligned, 2**24 + 5 * sector)
    assert torch.equal(aligned, found)
    assert device.info().counters.nvme_read_commands >= 64


def test_a_batch_keeps_the_queue_full(device: XnvmeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    most = []
    submit = xnvme_queues._Submitter._submit

    def watched(self: xnvme_queues._Submitter, command: xnvme_queues._Command) -> bool:
        taken = submit(self, command)
        most.append(len(self._under_way))
        return taken

    monkeypatch.setattr(xnvme_queues._Submitter, "_submit", watched)
    offsets = [4096 * at for at in random.Random(0).sample(range(2**14), 1000)]
    device.write_batch_async([(torch.full((1024,), float(offset)), offset) for offset in offsets]).wait()
    outs = [torch.zeros(1024) for _ in offsets]
    started = time.monotonic()
    device.read_batch_async(list(zip(outs, offsets, strict=True))).wait()
    print(f"{device.uri}: {1000 / (time.monotonic() - started):.0f} reads of 4 KiB a second")
    assert all(bool((out == offset).all()) for out, offset in zip(outs, offsets, strict=True))
    assert max(most) == 32


def test_neighbours_in_one_sector_lose_nothing(device: XnvmeDevice, direct: DirectFile) -> None:
    pieces = [(torch.full((11,), at % 251, dtype=torch.uint8), 4090 + 11 * at) for at in range(600)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda piece: device.write_from(*piece), pieces[:300]))
    device.write_batch_async(pieces[300:]).wait()
    found = torch.zeros(6600, dtype=torch.uint8)
    direct.read_into(found, 4090)
    assert torch.equal(found, torch.cat([piece for piece, _ in pieces]))


def test_the_drives_own_error_is_reported(device: XnvmeDevice) -> None:
    end = device.size_bytes
    device.size_bytes *= 2  # a lie, so that the drive sees a sector it does not have
    with pytest.raises(StorageError, match=f"at offset {end} failed in sectors {device.num_sectors} to") as caught:
        device.read_into(aligned_empty(4096), end)
    told = "NVMe status code type 0x0, status code 0x80 (sector out of range)" if "/ng" in device.uri else "moved 0 of"
    assert told in str(caught.value)
    device.read_into(aligned_empty(4096), 0)


def test_a_device_in_use_is_refused(device: XnvmeDevice, direct: DirectFile) -> None:
    holder = os.open(direct.path, os.O_RDONLY | os.O_EXCL)  # as a mounted file system does
    try:
        with pytest.raises(StorageError, match="is in use: mounted"):
            XnvmeDevice(device.uri)
        XnvmeDevice(device.uri, read_only=True).close()
    finally:
        os.close(holder)


def test_names_that_are_no_namespace() -> None:
    with pytest.raises(StorageError, match="No such file or directory"):
        XnvmeDevice("/dev/ng7n7")
    with pytest.raises(StorageError, match="is not an NVMe namespace"):
        XnvmeDevice("/dev/nvme0")
    with pytest.raises(StorageError, match=r"0000:00:01\.0 cannot be opened .*XNVME_SPDK"):  # built without SPDK
        XnvmeDevice("0000:00:01.0")


@settings(max_examples=12, deadline=None)
@given(writes=RANGES, reads=RANGES, seed=st.integers(0, 2**20))
def test_the_librarys_own_memory_disk(
    writes: list[tuple[int, int, int]], reads: list[tuple[int, int, int]], seed: int
) -> None:
    """Where commands reach only the library's buffers, as with SPDK."""
    device = XnvmeDevice("1GB", backend="ramdisk", asynchronous="emu", submitters=1)
    check_any_range(device, writes, reads, seed)
    device.close()


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_device_that_disappears_while_it_is_read(mechanism: str) -> None:
    name = named("TORCHSTORM_NVME_REMOVED").split()[MECHANISMS.index(mechanism)]
    device = XnvmeDevice(node(mechanism, name))
    errors: list[StorageError] = []

    def read() -> None:
        while not errors:
            copy = device.read_batch_async([(aligned_empty(65536), 65536 * at) for at in range(100)])
            try:
                copy.wait()
            except StorageError as error:
                errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    time.sleep(1)
    assert not errors
    Path(f"/sys/class/block/nvme{name}/device/device/remove").write_text("1")
    reader.join(60)
    assert not reader.is_alive()
    print(errors[0])
    assert "The device is gone: see `nvme list`" in str(errors[0])
    with pytest.raises(StorageError, match="failed in sectors"):
        device.write_from(torch.zeros(10), 3)
    with pytest.raises(StorageError, match="making it durable failed"):
        device.sync()
    device.close()
    with pytest.raises(StorageError, match="cannot be opened"):
        XnvmeDevice(node(mechanism, name))
