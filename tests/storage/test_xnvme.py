"""XnvmeDevice over a stand-in for the library (fake_xnvme.c) that has its interface and moves bytes of a plain file.

The library itself, on emulated NVMe devices, is what tests/storage/test_nvme_device.py is for.
"""

import ctypes
import gc
import os
import random
import shutil
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.any_range import RANGES, check_any_range
from torchstorm.errors import ConfigError, StorageError, UnsupportedError
from torchstorm.storage import choice, xnvme, xnvme_library, xnvme_queues
from torchstorm.storage.aligned import aligned_empty
from torchstorm.storage.backend import Backend, StorageCopy
from torchstorm.storage.nvme import NVMe
from torchstorm.storage.xnvme import XnvmeDevice

SIZE = 2**20
Open = Callable[..., XnvmeDevice]


def build(folder: Path, *options: str) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "a C compiler is needed for the stand-in of the xNVMe library"
    library = folder / f"libfake{len(options)}.so"
    source = Path(__file__).with_name("fake_xnvme.c")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-Wall", *options, "-o", str(library), str(source)], check=True
    )
    return library


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("fake"))


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    path = tmp_path / "disk"
    path.write_bytes(random.Random(1).randbytes(SIZE))
    return path


@pytest.fixture
def opened(fake: Path, disk: Path) -> Iterator[Open]:
    devices = []

    def open_device(extra: str = "", **options: object) -> XnvmeDevice:
        settled = {"library": fake, "backend": "fake", "asynchronous": "io_uring", "submitters": 2} | options
        device = XnvmeDevice(f"{disk}?{extra}", **settled)  # type: ignore[arg-type]
        devices.append(device)
        return device

    yield open_device
    for device in devices:
        device.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    writes=RANGES,
    reads=RANGES,
    sector=st.sampled_from([512, 4096]),
    asynchronous=st.sampled_from(["io_uring", "io_uring_cmd", None]),
    seed=st.integers(0, 2**20),
)
def test_any_offset_and_length(
    opened: Open,
    writes: list[tuple[int, int, int]],
    reads: list[tuple[int, int, int]],
    sector: int,
    asynchronous: str | None,
    seed: int,
) -> None:
    device = opened(f"sector={sector}&mdts=16384&busy=3", asynchronous=asynchronous, queue_depth=4)
    check_any_range(device, writes, reads, seed)
    assert device.sector_bytes == device.align_bytes == sector
    device.close()


def test_geometry_info_and_counters(opened: Open, disk: Path) -> None:
    device = opened("sector=4096&mdts=131072", queue_depth=8)
    backend: Backend = device
    assert (device.size_bytes, device.num_sectors, device.command_bytes, device.namespace) == (SIZE, 256, 131072, 1)
    assert device.staging_bytes == 8 * 2 * 131072
    info = backend.info()
    assert info.path == "xnvme"
    assert "xNVMe 0.7.5, backend fake, asynchronous io_uring, synchronous fake, memory fake" in info.reason
    assert "256 sectors of 4096 bytes, commands of at most 128.00 KiB" in info.reason
    device.write_from(aligned_empty(262144).fill_(3), 4096)  # cut where 128 KiB of the device end
    device.write_from(torch.ones(10, dtype=torch.uint8), 4090)  # in two sectors: each read, changed and written
    device.sync()
    out = aligned_empty(4096)
    device.read_into(out, 4096)
    assert out[:4].tolist() == [1, 1, 1, 1]
    assert out[4] == 3
    counters = device.info().counters
    assert (counters.nvme_write_bytes, counters.nvme_write_commands) == (262144 + 8192, 5)
    assert (counters.nvme_read_bytes, counters.nvme_read_commands) == (8192 + 4096, 3)
    assert counters.direct_read_requests == counters.buffered_write_requests == 0
    device.close()
    assert disk.read_bytes()[4090:4100] == b"\1" * 10


def test_no_command_is_larger_than_asked_for(opened: Open) -> None:
    assert opened(command_bytes=10_000).command_bytes == 8192
    assert opened(command_bytes=1).command_bytes == 512
    assert opened("mdts=1048576").command_bytes == 2**18


@pytest.mark.no_cover
def test_neighbours_in_one_sector_lose_nothing(opened: Open, disk: Path) -> None:
    sizes = [random.Random(0).choice([1, 3, 100, 777, 4096, 5000]) for _ in range(120)]
    offsets = [sum(sizes[:index]) for index in range(len(sizes))]
    device = opened("sector=4096", submitters=3, queue_depth=16)

    def write(index: int) -> None:
        for value in range(5):
            data = torch.full((sizes[index],), (value + index) % 251, dtype=torch.uint8)
            device.write_from(data, offsets[index])

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(write, range(120)))
    pieces = [(torch.full((7,), 200 + index % 50, dtype=torch.uint8), 600_000 + 7 * index) for index in range(2000)]
    device.write_batch_async(pieces).wait()
    found = disk.read_bytes()
    for index in range(120):
        offset, size = offsets[index], sizes[index]
        assert found[offset : offset + size] == bytes([(4 + index) % 251]) * size, offset
    assert found[600_000:614_000] == b"".join(bytes([200 + index % 50]) * 7 for index in range(2000))


def test_queues_are_kept_full(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    most = []
    submit = xnvme_queues._Submitter._submit

    def watched(self: xnvme_queues._Submitter, command: xnvme_queues._Command) -> bool:
        taken = submit(self, command)
        most.append(len(self._under_way))
        return taken

    monkeypatch.setattr(xnvme_queues._Submitter, "_submit", watched)
    device = opened(submitters=1, queue_depth=16)
    outs = [torch.zeros(512, dtype=torch.uint8) for _ in range(400)]
    device.read_batch_async([(out, 1024 * index) for index, out in enumerate(outs)]).wait()
    assert max(most) == 16


def test_a_failed_command_tells_its_status_and_only_its_request_fails(opened: Open, disk: Path) -> None:
    device = opened("error=100", submitters=1)
    whole = torch.zeros(8192, dtype=torch.uint8)
    text = (
        r"reading 8192 bytes at offset 49152 failed in sectors 96 to 111: NVMe status code type 0x2, status code 0x81 "
        r"\(unrecovered read error\)\. See the drive's own log"
    )
    for _ in range(2):
        with pytest.raises(StorageError, match=text):
            device.read_into(whole, 49152)
    with pytest.raises(StorageError, match=r"writing 3 bytes at offset 51201 failed in sectors 100 to 100"):
        device.write_from(whole[:3], 51201)
    for at in range(40):  # contexts that failed are used again, and their old status is not taken for a new one
        device.read_into(whole, 8192 * at if at != 6 else 0)
    device.read_into(whole, 0)
    assert bytes(whole.tolist()) == disk.read_bytes()[:8192]


def test_sectors_by_number_are_the_drives_own(opened: Open, monkeypatch: pytest.MonkeyPatch, disk: Path) -> None:
    monkeypatch.setattr(choice, "XnvmeDevice", lambda _, read_only: opened("sector=4096&error=9", read_only=read_only))
    content = disk.read_bytes()
    with NVMe("/dev/ng0n1", require="xnvme", read_only=False) as device:
        assert (device.sector_bytes, device.num_sectors, device.info().path) == (4096, 256, "xnvme")
        assert device.read(3, 2).numpy().tobytes() == content[3 * 4096 : 5 * 4096]
        with pytest.raises(StorageError, match=r"^sector 9 of /dev/ng0n1: .*disk.*: reading 4096 bytes"):
            device.read(9, 1)
        with pytest.raises(StorageError, match=r"^sector 9 of .* writing 4096 bytes"):
            device.write(9, 1, torch.zeros(4096, dtype=torch.uint8))
        with pytest.raises(StorageError, match=r"a write since the last flush failed, .* sector 9 of"):
            device.flush()
        device.write(255, 1, torch.ones(1024))
        device.flush()
        assert bool((device.read(255, 1).view(torch.float32) == 1).all())
    with pytest.raises(ConfigError, match=r"sector_bytes=512, but .* has sectors of 4096 bytes"):
        NVMe("/dev/ng0n1", require="xnvme", sector_bytes=512)


def test_a_short_completion_is_an_error(opened: Open) -> None:
    with pytest.raises(StorageError, match="sectors 3 to 3: the drive moved 256 of 512 bytes"):
        opened("short=3").read_into(aligned_empty(512), 1536)


def test_a_refused_command_is_an_error(opened: Open) -> None:
    device = opened()
    device._target.library.xnvme_nvm_read, real = (lambda *_: -22), device._target.library.xnvme_nvm_read
    try:
        with pytest.raises(StorageError, match="the library refused the command: Invalid argument"):
            device.read_into(aligned_empty(512), 0)
    finally:
        device._target.library.xnvme_nvm_read = real


def test_a_flush_that_failed_is_told_by_every_later_one(opened: Open) -> None:
    device = opened()
    device.sync()
    device._library.xnvme_cmd_pass, real = (lambda *_: -5), device._library.xnvme_cmd_pass
    try:
        with pytest.raises(StorageError, match="making it durable failed: Input/output error"):
            device.sync()
    finally:
        device._library.xnvme_cmd_pass = real
    with pytest.raises(StorageError, match="making it durable failed: Input/output error") as caught:
        device.sync()
    assert caught.value.errno == 5


@pytest.mark.parametrize("asynchronous", ["io_uring_cmd", "io_uring"])
def test_a_device_that_disappears_fails_what_is_under_way(opened: Open, asynchronous: str) -> None:
    device = opened("gone=30", asynchronous=asynchronous)
    copies = [device.read_into_async(aligned_empty(512), 512 * at) for at in range(100)]
    for copy in copies:
        copy.ended()
    failed = [copy.error for copy in copies if copy.error is not None]
    assert len(failed) == 71
    assert isinstance(failed[0], StorageError)
    assert failed[0].errno == 19
    assert "0xed (the kernel: No such device). The device is gone: see `nvme list`" in str(failed[0])
    with pytest.raises(StorageError, match="making it durable failed: No such device"):
        device.sync()


def test_a_drive_that_does_not_answer_is_given_up(opened: Open) -> None:
    device = opened("never=5", timeout_seconds=0.2, submitters=1)
    out = aligned_empty(512)
    device.read_into(out, 0)
    address = out.data_ptr()
    copy = device.read_into_async(out, 2560)
    with pytest.raises(StorageError, match=r"sectors 5 to 5: the drive has not answered for 0\.2 s"):
        copy.wait()
    del out, copy
    kept = [tensor for entry in xnvme_queues._abandoned for tensors in entry[1:] for tensor in tensors]  # type: ignore[index]
    assert address in [tensor.data_ptr() for tensor in kept]  # the drive may still write there
    with pytest.raises(StorageError, match=r"sectors 0 to 0: not begun: .* has not answered"):
        device.read_into(aligned_empty(512), 0)
    with pytest.raises(StorageError, match="since the drive is lost"):
        device.sync()
    device.close()


def test_a_device_that_cannot_be_asked_is_given_up(opened: Open) -> None:
    device = opened("never=5")
    real = device._target.library.xnvme_queue_poke
    device._target.library.xnvme_queue_poke = lambda *_: -5
    try:
        with pytest.raises(StorageError, match="polling for completions failed: Input/output error"):
            device.read_into(aligned_empty(512), 2560)
    finally:
        device._target.library.xnvme_queue_poke = real


def test_ends_of_the_device_and_empty_requests(opened: Open) -> None:
    device = opened()
    for use in (device.read_into, device.write_from):
        with pytest.raises(StorageError, match=r"wanted 10 bytes at offset 1048570, got 6; it is 1048576 bytes long"):
            use(torch.zeros(10, dtype=torch.uint8), SIZE - 6)
        use(torch.zeros(6, dtype=torch.uint8), SIZE - 6)
        use(torch.zeros(0), 5)
    device.write_batch_async([]).wait()
    with pytest.raises(StorageError, match="offsets go from 0"):
        device.read_into(torch.zeros(1), -1)
    with pytest.raises(UnsupportedError, match="contiguous CPU tensor"):
        device.write_from(torch.zeros(4, 4).t(), 0)


def test_read_only(opened: Open) -> None:
    device = opened(read_only=True)
    device.read_into(torch.zeros(4), 0)
    with pytest.raises(StorageError, match="read_only=True"):
        device.write_from(torch.zeros(4), 0)


def test_a_request_follows_those_it_names(opened: Open) -> None:
    device = opened()
    gate = StorageCopy()
    data = torch.full((1000,), 7.0)
    write = device.write_from_async(data, 3, after=[gate])
    read = device.read_into_async(out := torch.zeros(1000), 3, after=[write])
    time.sleep(0.02)
    assert not write.done()
    gate.finish()
    read.wait()
    assert torch.equal(out, data)


def test_close_lets_copies_end_and_gives_everything_back(opened: Open) -> None:
    fds, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    device = opened()
    copies = [device.write_from_async(torch.full((9000,), number), 36_000 * number) for number in range(20)]
    device.close()
    device.close()
    assert all(copy.done() and copy.error is None for copy in copies)
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == (fds, threads)
    for use in (device.sync, lambda: device.read_into(torch.empty(1), 0)):
        with pytest.raises(StorageError, match="is closed"):
            use()


def test_a_device_that_nobody_closes_leaves_nothing_behind(fake: Path, disk: Path) -> None:
    gc.collect()  # what other tests have left open
    fds, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    gate = StorageCopy()
    for number in range(3):
        device = XnvmeDevice(f"{disk}?", library=fake, backend="fake", asynchronous="io_uring")
        copy = device.write_from_async(torch.full((3,), 5, dtype=torch.uint8), 512 * number, after=[gate])
        del device
    gc.collect()
    gate.finish()
    copy.wait()
    stop = time.monotonic() + 5
    while threading.active_count() > threads and time.monotonic() < stop:
        time.sleep(0.01)
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == (fds, threads)
    assert [disk.read_bytes()[512 * number :][:3] for number in range(3)] == [b"\5" * 3] * 3


def test_a_forked_process_is_told_to_open_it_again(opened: Open) -> None:
    device = opened()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: of forking with threads, the point here
        child = os.fork()
    if child == 0:
        try:
            device.read_into(torch.empty(3), 0)
        except StorageError as error:
            device.close()
            os._exit(17 if "Open it again" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
    device.read_into(torch.empty(3), 0)


def test_no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XNVME_LIBRARY_PATH", str(tmp_path / "absent.so"))
    with pytest.raises(StorageError, match=r"cannot be loaded: .*absent\.so.* Build it with `make xnvme`"):
        XnvmeDevice("/dev/ng0n1")


def test_another_library_or_version(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"is not an xNVMe library of version 0\.7: .*xnvme_ver_major"):
        XnvmeDevice("/dev/ng0n1", library="libc.so.6")
    newer = build(tmp_path, "-DVERSION_MINOR=8")
    with pytest.raises(StorageError, match=r"is xNVMe 0\.8\.5, whose structures may differ; 0\.7 is needed"):
        XnvmeDevice("/dev/ng0n1", library=newer)


@pytest.mark.parametrize("uri", ["disk", "/dev/null", "/dev/nvme0", "/dev/nvme0n1p2", "/dev/sda"])
def test_what_is_no_namespace_is_refused(fake: Path, uri: str) -> None:
    with pytest.raises(StorageError, match=r"is not an NVMe namespace\. Use /dev/ng0n1"):
        XnvmeDevice(uri, library=fake)


def test_a_node_that_is_not_there_and_a_pci_address_without_spdk(fake: Path) -> None:
    with pytest.raises(
        StorageError, match=r"/dev/ng97n1 cannot be opened .* No such file.* `nvme list` shows"
    ) as caught:
        XnvmeDevice("/dev/ng97n1", library=fake)
    assert caught.value.errno == 2
    with pytest.raises(StorageError, match=r"0000:01:00\.0 cannot be opened by xNVMe 0\.7\.5"):
        XnvmeDevice("0000:01:00.0", library=fake)


def test_a_node_that_this_user_may_not_open(opened: Open, fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = opened()
    real = device._library.xnvme_dev_open
    device._library.xnvme_dev_open = lambda *_: ctypes.set_errno(13)
    monkeypatch.setattr(xnvme, "load_library", lambda _: (device._library, "0.7.5"))
    try:
        with pytest.raises(StorageError, match=r"Permission denied\. Permission denied: run as root") as caught:
            XnvmeDevice("/dev/ng97n1", library=fake)
        assert caught.value.errno == 13
        device._library.xnvme_dev_open = lambda *_: ctypes.set_errno(6)
        with pytest.raises(StorageError, match=r"XNVME_SPDK=enabled"):
            XnvmeDevice("0000:01:00.0", library=fake)
    finally:
        device._library.xnvme_dev_open = real


def test_a_device_in_use_is_refused(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def busy(path: str, flags: int) -> int:
        asked.append((path, flags))
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(os, "open", busy)
    with pytest.raises(StorageError, match="/dev/ng97n1 is in use: mounted, or part of a volume group") as caught:
        XnvmeDevice("/dev/ng97n1", library=fake)
    assert caught.value.errno == 16
    assert asked == [("/dev/nvme97n1", os.O_RDONLY | os.O_EXCL)] * 3


def test_the_kernels_limit_counts_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"max_hw_sectors_kb": "128\n", "max_segments": "127\n"}
    monkeypatch.setattr(Path, "read_text", lambda path: said[path.name])
    assert xnvme._kernel_limit("/dev/ng0n1") == 131072
    said["max_hw_sectors_kb"] = "2048"
    assert xnvme._kernel_limit("/dev/nvme0n1") == 126 * 4096


@pytest.mark.parametrize(("depth", "submitters"), [(0, 1), (3, 1), (4096, 1), (8, 0)])
def test_depths_that_no_queue_has(fake: Path, depth: int, submitters: int) -> None:
    with pytest.raises(StorageError, match="a power of two from 1 to 2048"):
        XnvmeDevice("x", library=fake, backend="fake", queue_depth=depth, submitters=submitters)


def test_what_is_opened_and_cannot_be_used_is_closed_again(opened: Open) -> None:
    fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(UnsupportedError, match="geometry type 2"):
        opened("type=2")
    with pytest.raises(StorageError, match="in sectors of 100"):
        opened("sector=100")
    with pytest.raises(StorageError, match="cannot create a queue of 32 commands: Function not implemented"):
        opened("gone=0")
    assert len(os.listdir("/proc/self/fd")) == fds


def test_the_library_runs_out_of_buffers(opened: Open) -> None:
    device = opened()
    real = device._target.library.xnvme_buf_alloc
    device._target.library.xnvme_buf_alloc = lambda *_: None
    try:
        with pytest.raises(StorageError, match="cannot allocate a buffer of 65536 bytes"):
            device.read_into(torch.zeros(1), 1)
    finally:
        device._target.library.xnvme_buf_alloc = real


def test_layouts_are_the_librarys() -> None:
    assert ctypes.sizeof(xnvme_library.Geometry) == 64
    assert ctypes.sizeof(xnvme_library.CommandContext) == 128
    assert xnvme_library.Options.direct.offset == 57
    assert xnvme_library.Geometry.largest_transfer_bytes.offset == 48
