"""GPUDirect Storage through a stand-in for cuFile, in which device memory is host memory."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import random
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchstorm.errors import StorageError, UnsupportedError
from torchstorm.storage.aligned import byte_view
from torchstorm.storage.backend import Backend
from torchstorm.storage.direct import DirectFile
from torchstorm.storage.gds import GdsFile, open_gds
from torchstorm.storage.gds_resources import DevicePointer

CPU = torch.device("cpu")
PAGE = 4096
LIMIT = 40 * PAGE


class Mark:
    """Stands for a CUDA event; what the stream still does is done when somebody waits for it."""

    def __init__(self, work: Callable[[], object] = lambda: None) -> None:
        self._work = work

    def synchronize(self) -> None:
        self._work()


def opened(fake: Any, path: Path, **options: Any) -> GdsFile:
    below = DirectFile(path, threads=2, block_bytes=2 * PAGE, create=True)
    gds = {"device": CPU, "mark": Mark, "threads": 3, "block_bytes": 3 * PAGE, "paths": fake.paths}
    try:
        return open_gds(below, **gds | options)  # type: ignore[arg-type]
    except BaseException:
        below.close()
        raise


def random_bytes(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


class Room:
    def __init__(self, fake: Any, path: Path) -> None:
        self.fake, self.path = fake, path
        self.content = random_bytes(LIMIT + 123)
        path.write_bytes(bytes(byte_view(self.content)))
        self.file = opened(fake, path)
        self.file_opened = [fake["reads"], fake["writes"]]


@pytest.fixture
def room(fake: Any, tmp_path: Path) -> Iterator[Room]:
    room = Room(fake, tmp_path / "file")
    yield room
    room.file.close()


OFFSETS = st.one_of(st.integers(0, LIMIT), st.integers(0, LIMIT // PAGE).map(lambda page: page * PAGE))
LENGTHS = st.one_of(st.integers(0, LIMIT), st.sampled_from([1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 8 * PAGE, LIMIT]))


@pytest.mark.no_cover
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    writes=st.lists(st.tuples(OFFSETS, LENGTHS), max_size=5),
    reads=st.lists(st.tuples(OFFSETS, LENGTHS), min_size=1, max_size=5),
    short_bytes=st.sampled_from([0, 0, 1, PAGE - 1, PAGE, PAGE + 5]),
    shift=st.sampled_from([0, 1, 64]),
    batches=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_any_offset_and_length_as_a_plain_file(
    fake: Any,
    tmp_path: Path,
    writes: list[tuple[int, int]],
    reads: list[tuple[int, int]],
    short_bytes: int,
    shift: int,
    batches: bool,
    seed: int,
) -> None:
    path = tmp_path / "any"
    expected = bytearray(random.Random(seed).randbytes(seed % LIMIT))
    path.write_bytes(expected)
    file = opened(fake, path)
    fake["short_bytes"] = short_bytes
    try:
        for number, (offset, nbytes) in enumerate(writes):
            source = random_bytes(nbytes + shift, seed + number)[shift:]
            file.write_from(source, offset)
            if nbytes:
                expected.extend(bytes(max(offset + nbytes - len(expected), 0)))
                expected[offset : offset + nbytes] = byte_view(source)
        assert path.read_bytes() == expected
        asked = []
        for offset, nbytes in reads:
            around = torch.full((nbytes + shift + PAGE,), 0xA5, dtype=torch.uint8)
            out = around[shift : shift + nbytes]
            if nbytes and offset + nbytes > len(expected):
                with pytest.raises(StorageError, match=rf"wanted {nbytes} bytes at offset {offset}, got|is too short"):
                    file.read_into(out, offset)
            elif batches:
                asked.append((out, offset))
            else:
                file.read_into(out, offset)
                assert bytes(byte_view(out)) == expected[offset : offset + nbytes]
            assert bool((around[:shift] == 0xA5).all())
            assert bool((around[shift + nbytes :] == 0xA5).all())
        file.read_batch_async(asked).synchronize()
        for out, offset in asked:
            assert bytes(byte_view(out)) == expected[offset : offset + out.nbytes]
        assert file.info().path == "gds"
    finally:
        file.close()
        fake["short_bytes"] = 0


def test_the_body_goes_through_cufile_and_only_edges_below(room: Room) -> None:
    out = torch.empty(10 * PAGE, dtype=torch.uint8)
    room.file.read_into(out, PAGE - 7)
    assert torch.equal(out, room.content[PAGE - 7 : 11 * PAGE - 7])
    room.file.write_from(out, 3)
    info = room.file.info()
    counters = info.counters
    assert (info.path, counters.gds_read_bytes, counters.gds_write_bytes) == ("gds", 9 * PAGE, 9 * PAGE)
    # Blocks end at multiples of block_bytes: pages 1-2, 3-5, 6-8, 9.
    assert (counters.gds_read_requests, counters.gds_write_requests) == (4, 4)
    assert counters.buffered_write_bytes == PAGE
    assert counters.direct_read_bytes == 2 * PAGE  # the pages around 7 and PAGE - 7 bytes
    assert "nvidia_fs_reads 4" in info.reason
    assert "nvidia_fs_writes 4" in info.reason
    assert "cuFile 1.20" in info.reason


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.float64, torch.complex64])
def test_any_dtype_and_shape(room: Room, dtype: torch.dtype) -> None:
    source = torch.randn(7, 50, 31).to(dtype)
    room.file.write_from(source, 5)
    out = torch.empty_like(source)
    room.file.read_into(out, 5)
    assert torch.equal(out, source)
    room.file.write_from(torch.tensor(3.0), 1)
    room.file.read_into(scalar := torch.tensor(0.0), 1)
    assert scalar == 3
    assert room.file.info().counters.gds_read_requests > 0


def test_raw_pointers_are_moved_as_tensors_are(room: Room) -> None:
    memory = torch.zeros(9 * PAGE, dtype=torch.uint8)
    pointer = DevicePointer(address=memory.data_ptr() + 1, nbytes=memory.nbytes - 1, device_index=-1)
    room.file.register_buffer(pointer)
    room.file.read_into(pointer, PAGE)
    assert torch.equal(memory[1:], room.content[PAGE : 10 * PAGE - 1])
    assert memory[0] == 0
    room.file.write_from(pointer, 11 * PAGE)
    assert room.path.read_bytes()[11 * PAGE : 20 * PAGE - 1] == bytes(byte_view(memory[1:]))
    room.file.deregister_buffer(pointer)
    room.file.read_into(DevicePointer(address=0, nbytes=0, device_index=-1), 0)
    with pytest.raises(UnsupportedError, match=r"opened for cpu, but this is DevicePointer\(.*device_index=3"):
        room.file.read_into(DevicePointer(address=memory.data_ptr(), nbytes=5, device_index=3), 0)


def test_batches_hold_at_most_128_parts_and_the_rest_waits_for_the_next(room: Room) -> None:
    size = 300 * PAGE
    room.path.write_bytes(os.urandom(size))
    outs = [torch.empty(PAGE, dtype=torch.uint8) for _ in range(300)]
    order = random.Random(0).sample(range(300), 300)
    room.file.read_batch_async([(outs[page], page * PAGE) for page in order]).synchronize()
    content = room.path.read_bytes()
    assert b"".join(bytes(byte_view(out)) for out in outs) == content
    assert room.fake["batches"] == 3
    assert room.fake["largest_batch"] == 128
    assert room.fake["batch_parts"] == 300
    room.file.write_batch_async([(out, (299 - page) * PAGE) for page, out in enumerate(outs)]).synchronize()
    assert room.path.read_bytes() == b"".join(content[page * PAGE : (page + 1) * PAGE] for page in range(299, -1, -1))
    assert room.fake["setups"] <= 3  # a thread's is used again
    info = room.file.info()
    assert (info.counters.gds_read_requests, info.counters.gds_write_bytes) == (300, size)
    assert "nvidia_fs_batches 6" in info.reason
    room.file.read_batch_async([]).synchronize()


@pytest.mark.parametrize("setting", ["batch_fail", "batch_setup_code", "batch_submit_code"])
def test_what_a_batch_does_not_do_is_done_one_by_one(room: Room, setting: str) -> None:
    room.fake[setting] = 5035
    outs = [torch.empty(PAGE, dtype=torch.uint8) for _ in range(20)]
    room.file.read_batch_async([(out, page * PAGE) for page, out in enumerate(outs)]).synchronize()
    assert torch.equal(torch.cat(outs), room.content[: 20 * PAGE])
    room.file.write_batch_async([(out, (page + 20) * PAGE) for page, out in enumerate(outs)]).synchronize()
    assert room.path.read_bytes()[20 * PAGE : 40 * PAGE] == bytes(byte_view(torch.cat(outs)))
    assert room.file.info().counters.gds_read_bytes == 20 * PAGE


def test_a_batch_of_which_nothing_is_heard_is_an_error_and_no_hang(room: Room) -> None:
    room.fake["batch_silent"] = 1
    room.file._driver.batch_stall_s = 0.05
    outs = [torch.empty(PAGE, dtype=torch.uint8) for _ in range(4)]
    with pytest.raises(StorageError, match=r"reported no result for 4 of 4 parts of a batch for 0.05 s"):
        room.file.read_batch_async([(out, page * PAGE) for page, out in enumerate(outs)]).synchronize()
    assert room.fake.log[-2:] == ["cancel", "destroy"]


def test_a_registered_storage_is_pinned_once_and_named_by_its_base(room: Room, tmp_path: Path) -> None:
    ring = torch.zeros(16 * PAGE, dtype=torch.uint8)
    slots = ring.split(4 * PAGE)
    for slot in slots:
        room.file.register_buffer(slot)
    other = opened(room.fake, tmp_path / "file")
    other.register_buffer(ring)  # of one process, though of another file
    assert room.fake.log.count("pin") == 1
    for number, slot in enumerate(slots):
        room.file.read_into(slot, number * 4 * PAGE)
    assert torch.equal(ring, room.content[: 16 * PAGE])
    room.file.deregister_buffer(slots[2])
    assert "unpin" not in room.fake.log
    other.close()
    assert room.fake.log.count("unpin") == 1
    room.file.read_into(slots[0], PAGE)
    assert torch.equal(slots[0], room.content[PAGE : 5 * PAGE])
    room.file.deregister_buffer(ring)  # no longer: nothing
    room.fake["buffer_code"] = 5036
    with pytest.raises(StorageError, match=r"cuFileBufRegister of 65536 bytes failed with 5036: .*pinned"):
        room.file.register_buffer(ring)


def test_close_gives_back_in_the_order_that_cufile_wants(fake: Any, tmp_path: Path) -> None:
    fds = set(os.listdir("/proc/self/fd"))
    file = opened(fake, tmp_path / "file")
    ring = torch.zeros(8 * PAGE, dtype=torch.uint8)
    file.register_buffer(ring)
    file.write_batch_async([(ring[: 4 * PAGE], 0), (ring[4 * PAGE :], 4 * PAGE)]).synchronize()
    fake["delay_us"] = 50_000
    late = file.read_into_async(ring, 0)
    file.close()
    assert late.done()
    late.synchronize()
    file.close()
    opened_first = ["open", "register", "register", "deregister", "pin", "setup"]  # the file, the canary
    assert fake.log == [*opened_first, "destroy", "unpin", "deregister", "close"]
    assert set(os.listdir("/proc/self/fd")) == fds
    for call in (lambda: file.read_into(ring, 0), file.sync, lambda: file.register_buffer(ring)):
        with pytest.raises(StorageError, match=r"is closed. Open it again"):
            call()
    assert file.info().counters.gds_write_bytes == 8 * PAGE


def test_a_forgotten_file_is_given_back(fake: Any, tmp_path: Path) -> None:
    file = opened(fake, tmp_path / "file")
    file.write_from(torch.zeros(PAGE, dtype=torch.uint8), 0)
    below = file._below
    del file
    # A thread that has just ended the write may hold it for a moment.
    deadline = time.monotonic() + 10
    while fake.live() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.001)
    assert fake.live() == 0
    below.close()


def test_many_threads_in_disjoint_ranges(room: Room) -> None:
    size = 5 * PAGE + 333
    room.fake["delay_us"] = 1000
    failed: list[BaseException] = []
    start = threading.Barrier(64)

    def work(number: int) -> None:
        try:
            start.wait()
            source = random_bytes(size, number)
            for _ in range(3):
                room.file.write_from(source, number * size)
                room.file.read_into(out := torch.empty_like(source), number * size)
                assert torch.equal(out, source)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    content = room.path.read_bytes()
    for number in range(64):
        assert content[number * size : (number + 1) * size] == bytes(byte_view(random_bytes(size, number)))
    assert room.fake["most_at_once"] == 3  # all threads of the pool, so the interpreter's lock was let go


def test_requests_start_after_those_named_and_after_the_callers_stream(fake: Any, tmp_path: Path) -> None:
    source = torch.zeros(8 * PAGE, dtype=torch.uint8)
    callers = []

    def mark() -> Mark:
        callers.append(threading.current_thread())
        return Mark(lambda: source.fill_(7))  # a kernel that has not run when the write is asked for

    file = opened(fake, tmp_path / "file", mark=mark)
    source.zero_()  # the canary asked for a mark, too
    fake["delay_us"] = 20_000
    written = file.write_from_async(source, 0)
    read = file.read_into_async(out := torch.zeros(8 * PAGE, dtype=torch.uint8), 0, after=[written])
    read.synchronize()
    assert written.done()
    assert bool((out == 7).all())
    assert set(callers) == {threading.main_thread()}
    file.close()


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("write", [False, True])
def test_a_system_error_names_the_request_and_its_number(room: Room, write: bool, batch: bool) -> None:
    room.fake["fail_errno"] = errno.ENOSPC if write else errno.EIO
    tensors = [(torch.zeros(2 * PAGE, dtype=torch.uint8), page * PAGE) for page in ((4, 8) if batch else (4,))]
    copy = (room.file.write_batch_async if write else room.file.read_batch_async)(tensors)
    verb, name, number = ("writing", "cuFileWrite", 28) if write else ("reading", "cuFileRead", 5)
    for _ in range(2):
        with pytest.raises(
            StorageError, match=rf"{verb} 8192 bytes at offset 16384 .* {name} failed with {number}: "
        ) as e:
            copy.wait()
        assert e.value.errno == number
    room.fake["fail_errno"] = 0
    room.file.read_into(out := torch.zeros(2 * PAGE, dtype=torch.uint8), 0)
    assert torch.equal(out, room.content[: 2 * PAGE])  # one failed request is no reason to give up
    assert room.file.info().path == "gds"


def test_a_code_of_cufiles_own_is_told_as_such(room: Room) -> None:
    room.fake["fail_code"] = 5044
    with pytest.raises(StorageError, match=r"cuFileRead failed with 5044: cufile io error") as caught:
        room.file.read_into(torch.empty(PAGE, dtype=torch.uint8), 0)
    assert caught.value.errno == 5044


@pytest.mark.parametrize(("setting", "value"), [("fail_errno", errno.EINVAL), ("fail_code", 5008), ("fail_code", 5034)])
@pytest.mark.parametrize("batch", [False, True])
def test_what_cufile_refuses_goes_below_and_info_says_so(room: Room, setting: str, value: int, batch: bool) -> None:
    assert room.file.info().path == "gds"
    room.fake[setting] = value
    outs = [torch.empty(4 * PAGE, dtype=torch.uint8) for _ in range(3)]
    requests = [(out, number * 4 * PAGE) for number, out in enumerate(outs)]
    if batch:
        room.file.read_batch_async(requests).synchronize()
    else:
        for out, offset in requests:
            room.file.read_into(out, offset)
    assert torch.equal(torch.cat(outs), room.content[: 12 * PAGE])
    info = room.file.info()
    assert info.path in ("direct", "buffered")
    assert f"cuFile refuses this file (cuFileRead failed with {value}" in info.reason
    assert info.counters.gds_read_bytes == 0
    assert info.counters.direct_read_bytes + info.counters.buffered_read_bytes == 12 * PAGE
    calls = room.fake["reads"]
    room.file.read_into(outs[0], PAGE)
    room.file.write_from(outs[0], 0)
    assert room.fake["reads"] == calls  # not asked again
    assert room.path.read_bytes()[: 4 * PAGE] == bytes(byte_view(room.content[PAGE : 5 * PAGE]))


def test_memory_that_cufile_refuses_goes_below_alone(room: Room) -> None:
    room.fake["fail_code"] = 5013
    room.file.read_into(out := torch.empty(3 * PAGE, dtype=torch.uint8), 0)
    assert torch.equal(out, room.content[: 3 * PAGE])
    room.fake["fail_code"] = 0
    room.file.read_into(out, 3 * PAGE)
    info = room.file.info()
    assert (info.path, info.counters.gds_read_bytes) == ("gds", 3 * PAGE)
    assert "1 blocks used the underlying backend, since cuFile refused their memory" in info.reason


def test_the_path_is_not_gds_once_cufile_says_that_it_went_through_the_host(room: Room) -> None:
    room.fake["posix"] = 1
    room.file.read_into(torch.empty(3 * PAGE, dtype=torch.uint8), 0)
    info = room.file.info()
    assert info.path in ("direct", "buffered")
    assert info.reason.startswith("cuFile itself went through the host (posix_reads 1)")


def test_a_read_past_the_end_says_what_there_is(room: Room) -> None:
    size = LIMIT + 123
    out = torch.empty(8 * PAGE, dtype=torch.uint8)
    with pytest.raises(StorageError, match=rf"wanted 32768 bytes at offset 159744, got 4219; it is {size} bytes long"):
        room.file.read_into(out, 39 * PAGE)
    with pytest.raises(StorageError, match=r"wanted 32768 bytes at offset 409600, got 0; it is"):
        room.file.read_into(out, 100 * PAGE)
    for offset in (-1, 2**63 - 5):
        with pytest.raises(StorageError, match=r"offsets go to 2\*\*63 - 1"):
            room.file.read_into(out, offset)


def test_a_transfer_of_nothing_is_finished_below(room: Room) -> None:
    room.fake["end_bytes"] = 1
    room.file.read_into(out := torch.zeros(6 * PAGE, dtype=torch.uint8), PAGE)
    assert torch.equal(out, room.content[PAGE : 7 * PAGE])


def test_tensors_that_cannot_be_moved_are_refused_before_anything_moves(room: Room) -> None:
    reads = room.fake["reads"]
    with pytest.raises(UnsupportedError, match=r"a tensor is on meta"):
        room.file.read_into(torch.empty(PAGE, device="meta"), 0)
    for tensor in (torch.zeros(64, 64).t(), torch.zeros(PAGE, dtype=torch.complex64).conj()):
        with pytest.raises(UnsupportedError, match=r"a contiguous tensor is needed"):
            room.file.read_batch_async([(torch.zeros(PAGE, dtype=torch.uint8), 0), (tensor, 0)])
    assert room.fake["reads"] == reads


def test_it_is_a_backend_and_durable(room: Room) -> None:
    file: Backend = room.file
    file.write_from(torch.ones(PAGE, dtype=torch.uint8), 0)
    file.sync()
    assert (file.path, file.device) == (str(room.path), CPU)


def test_a_forked_process_gets_an_error_and_leaves_the_parents_file_alone(room: Room) -> None:
    room.file.read_into(out := torch.zeros(PAGE, dtype=torch.uint8), 0)
    log = room.fake.log
    told, tell = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads, which is what is tested
        child = os.fork()
    if child == 0:
        said = []
        for call in (lambda: room.file.read_into(out, 0), lambda: opened(room.fake, room.path)):
            try:
                call()
                said.append("no error")
            except (StorageError, UnsupportedError) as error:
                said.append(str(error))
        room.file.info()
        room.file.close()
        said.append("untouched" if room.fake.log == log else "touched")
        os.write(tell, "\n".join(said).encode())
        os._exit(0)
    os.close(tell)
    said = os.read(told, 4000).decode().splitlines()
    os.close(told)
    os.waitpid(child, 0)
    assert f"this is the forked process {child}" in said[0]
    assert f"cannot be used in the forked process {child}" in said[1]
    assert said[2:] == ["untouched"]
    room.file.read_into(out, PAGE)
    assert torch.equal(out, room.content[PAGE : 2 * PAGE])


def test_a_read_only_file_is_read(fake: Any, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 64)
    file = opened(fake, path, read_only=True)
    file.read_into(out := torch.empty(2 * PAGE, dtype=torch.uint8), PAGE)
    assert bytes(byte_view(out)) == path.read_bytes()[PAGE : 3 * PAGE]
    with pytest.raises(StorageError, match=r"cuFileWrite failed with 9: "):
        file.write_from(out, 0)
    file.close()


def test_two_files_share_one_driver(fake: Any, tmp_path: Path) -> None:
    files = [opened(fake, tmp_path / name) for name in ("one", "two")]
    for number, file in enumerate(files):
        file.write_from(torch.full((PAGE,), number, dtype=torch.uint8), 0)
    files[0].close()
    files[1].read_into(out := torch.empty(PAGE, dtype=torch.uint8), 0)
    assert bool((out == 1).all())
    files[1].close()
    assert [word for word in fake.log if word in ("open", "close")] == ["open", "close"]


def test_a_driver_that_somebody_else_opened_is_left_open(fake: Any, tmp_path: Path) -> None:
    fake["already_open"] = 1
    file = opened(fake, tmp_path / "file")
    file.write_from(torch.zeros(PAGE, dtype=torch.uint8), 0)
    file.close()
    assert "close" not in fake.log


def test_the_fake_sees_what_it_is_there_to_see(compiled_cufile: Any) -> None:
    fake = compiled_cufile
    fake.reset()
    library = ctypes.CDLL(str(fake.path))
    library.cuFileBufDeregister(ctypes.c_void_p(4096))
    library.cuFileDriverClose_v2()
    assert fake["violations"] == 2
    fake.reset()
