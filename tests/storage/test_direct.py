import contextlib
import ctypes
import errno
import gc
import mmap
import os
import random
import subprocess
import sys
import textwrap
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import forked
from torchstorm.errors import StorageError, UnsupportedError
from torchstorm.storage.aligned import aligned_empty, byte_view
from torchstorm.storage.backend import Backend, StorageCopy
from torchstorm.storage.direct import DirectFile

CANARY = 0xA5
LIMIT = 40_000


@contextlib.contextmanager
def opened(path: Path, **options: object) -> Iterator[DirectFile]:
    file = DirectFile(path, **({"create": True} | options))  # type: ignore[arg-type]
    try:
        yield file
    finally:
        file.close()


def placed(nbytes: int, shift: int | None) -> tuple[torch.Tensor, Callable[[], bool]]:
    """(nbytes,) uint8 `shift` bytes past a page, or page-aligned for None; and whether all around it is untouched."""
    if shift is None:
        return aligned_empty(nbytes), lambda: True
    around = aligned_empty(nbytes + shift + 8192).fill_(CANARY)
    rest = [around[:shift], around[shift + nbytes :]]
    return around[shift : shift + nbytes], lambda: all(bool((part == CANARY).all()) for part in rest)


OFFSETS = st.one_of(st.integers(0, LIMIT), st.integers(0, LIMIT // 4096).map(lambda block: block * 4096))
LENGTHS = st.one_of(st.integers(0, LIMIT), st.sampled_from([1, 511, 512, 4095, 4096, 4097, 8192, 16384, 32768]))
SHIFTS = st.one_of(st.none(), st.sampled_from([0, 1, 64, 512, 4096]))


@pytest.mark.no_cover
@settings(max_examples=150, deadline=None)
@given(
    writes=st.lists(st.tuples(OFFSETS, LENGTHS, SHIFTS), max_size=6),
    reads=st.lists(st.tuples(OFFSETS, LENGTHS, SHIFTS), min_size=1, max_size=6),
    direct=st.sampled_from([True, True, False]),
    seed=st.integers(0, 2**20),
)
def test_any_offset_and_length_as_a_plain_file(
    place: Path,
    writes: list[tuple[int, int, int | None]],
    reads: list[tuple[int, int, int | None]],
    direct: bool,
    seed: int,
) -> None:
    path = place / "any"
    expected = bytearray(random.Random(seed).randbytes(seed % LIMIT))
    path.write_bytes(expected)
    with opened(path, threads=3, block_bytes=8192, direct=direct) as file:
        for number, (offset, nbytes, shift) in enumerate(writes):
            source, _ = placed(nbytes, shift)
            source.copy_(torch.randint(256, (nbytes,), generator=torch.Generator().manual_seed(seed + number)))
            file.write_from(source, offset)
            if nbytes:
                expected.extend(bytes(max(offset + nbytes - len(expected), 0)))
                expected[offset : offset + nbytes] = byte_view(source)
        assert path.read_bytes() == expected
        for offset, nbytes, shift in reads:
            out, untouched = placed(nbytes, shift)
            if nbytes and offset + nbytes > len(expected):
                with pytest.raises(StorageError, match=rf"wanted {nbytes} bytes at offset {offset}, got"):
                    file.read_into(out, offset)
            else:
                file.read_into(out, offset)
                assert bytes(byte_view(out)) == expected[offset : offset + nbytes]
            assert untouched()
        counters = file.info().counters
        if direct:
            assert counters.buffered_read_bytes == 0
        else:
            assert counters.direct_read_requests == counters.direct_write_requests == 0


@settings(max_examples=60, deadline=None)
@given(pages=st.integers(0, 3), nbytes=LENGTHS, shift=SHIFTS)
def test_whole_blocks_are_written_directly_and_no_further(
    place: Path, pages: int, nbytes: int, shift: int | None
) -> None:
    path = place / "whole"
    path.write_bytes(bytes([CANARY]) * 80_000)
    with opened(path, block_bytes=8192) as file:
        dirty, _ = placed(8192, 1)
        file.write_from(dirty.fill_(9), 65_536)  # the bounce buffer, which must not show in the padding
        path.write_bytes(bytes([CANARY]) * 80_000)
        source, _ = placed(nbytes, shift)
        source.fill_(7)
        file.write_batch_async([(source, pages * 4096)], whole_blocks=True).synchronize()
        assert file.info().counters.buffered_write_bytes == 0
        found = path.read_bytes()
        start, stop = pages * 4096, pages * 4096 + nbytes
        assert found[start:stop] == bytes([7]) * nbytes
        assert found[:start] == bytes([CANARY]) * start
        end = -(-stop // 4096) * 4096
        assert found[stop:end] == bytes(end - stop)
        assert found[end:] == bytes([CANARY]) * (80_000 - end)
        # From an offset within a block, the caller cannot own that block: edges are buffered as ever.
        file.write_batch_async([(source, start + 1)], whole_blocks=True).synchronize()
        assert path.read_bytes()[start + 1 : stop + 1] == bytes([7]) * nbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.float64, torch.complex64])
def test_any_dtype_and_shape(place: Path, dtype: torch.dtype) -> None:
    with opened(place / "dtype") as file:
        source = torch.randn(7, 5, 3, requires_grad=True).to(dtype)
        file.write_from(source, 5)
        out = torch.empty_like(source)
        file.read_into(out, 5)
        assert torch.equal(out, source)
        scalar = torch.tensor(3.0)
        file.write_from(scalar, 1)
        file.read_into(out_scalar := torch.tensor(0.0), 1)
        assert out_scalar == 3


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(4, 4).t(), torch.empty(4, device="meta"), torch.zeros(2, dtype=torch.complex64).conj()],
)
def test_what_is_not_contiguous_host_memory_is_refused(place: Path, tensor: torch.Tensor) -> None:
    with opened(place / "refused") as file, pytest.raises(UnsupportedError, match="contiguous CPU tensor"):
        file.write_from(tensor, 0)


@pytest.mark.parametrize("offset", [-1, 2**63 - 3])
def test_offsets_no_file_has_are_refused(place: Path, offset: int) -> None:
    with opened(place / "offsets") as file, pytest.raises(StorageError, match="offsets go from 0"):
        file.write_from(torch.zeros(1), offset)


@pytest.mark.no_cover
def test_neighbours_in_one_block_lose_nothing(place: Path) -> None:
    """Odd-sized pieces written side by side, at once, by many threads, through two files and another process."""
    path = place / "neighbours"
    sizes = [random.Random(0).choice([1, 100, 777, 4096, 5000, 12_345]) for _ in range(300)]
    offsets = [sum(sizes[:index]) for index in range(len(sizes))]
    script = textwrap.dedent("""
        import sys, torch
        from torchstorm.storage.direct import DirectFile
        file = DirectFile(sys.argv[1], block_bytes=8192)
        pieces = [tuple(map(int, piece.split(":"))) for piece in sys.argv[2:]]
        print("ready", flush=True)
        sys.stdin.readline()
        for value in range(20):
            for offset, size in pieces:
                file.write_from(torch.full((size,), (value + offset) % 251, dtype=torch.uint8), offset)
        file.close()
    """)
    path.touch()
    theirs = [f"{offsets[index]}:{sizes[index]}" for index in range(0, 300, 3)]
    arguments = [sys.executable, "-c", script, str(path), *theirs]
    with (
        opened(path, block_bytes=8192) as first,
        opened(path, block_bytes=8192) as second,
        forked.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other,
        ThreadPoolExecutor(6) as threads,
    ):
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"

        def write(index: int) -> None:
            file = (first, second)[index % 2]
            for value in range(20):
                data = torch.full((sizes[index],), (value + offsets[index]) % 251, dtype=torch.uint8)
                file.write_from(data, offsets[index])

        assert other.stdin is not None
        other.stdin.write("go\n")
        other.stdin.flush()
        list(threads.map(write, [index for index in range(300) if index % 3]))
        assert other.wait(30) == 0
    found = path.read_bytes()
    for offset, size in zip(offsets, sizes, strict=True):
        assert found[offset : offset + size] == bytes([(19 + offset) % 251]) * size, offset


def test_a_file_that_ends_too_early_says_where(place: Path) -> None:
    path = place / "short"
    path.write_bytes(bytes(10_000))
    with opened(path) as file:
        with pytest.raises(StorageError, match=r"short is too short: wanted 9000 bytes at offset 5000, got 5000"):
            file.read_into(torch.empty(9000, dtype=torch.uint8), 5000)
        with pytest.raises(StorageError, match=r"wanted 4 bytes at offset 20000, got 0; it is 10000 bytes long"):
            file.read_into(torch.empty(1), 20_000)
        out = aligned_empty(10_000)
        file.read_into(out, 0)  # the last page holds less than a page of the file
    assert not out.any()


def test_size_bytes_sets_the_length(place: Path) -> None:
    path = place / "length"
    with opened(path, size_bytes=123_456):
        assert path.stat().st_size == 123_456
    with pytest.raises(StorageError, match="cannot be resized to -1 bytes"):
        DirectFile(path, size_bytes=-1)


@pytest.mark.parametrize("nbytes", [2**18, 2**18 - 4097, 2**18 + 5])
@pytest.mark.parametrize("shift", [0, 4096, 512, 3])
def test_where_nothing_goes_through_a_bounce_buffer_calls_may_be_larger(place: Path, nbytes: int, shift: int) -> None:
    with opened(place / "straight", block_bytes=2**13, straight_bytes=2**17) as file:
        data = aligned_empty(nbytes + shift)[shift:].random_(generator=torch.Generator().manual_seed(nbytes))
        back = aligned_empty(nbytes + shift)[shift:]
        for offset in (0, 4096, 100):
            before = file.info().counters
            file.write_from(data, offset)
            file.read_into(back, offset)
            assert torch.equal(data, back)
            counters = file.info().counters
            num_calls = counters.direct_read_requests - before.direct_read_requests
            if counters.buffered_read_requests == before.buffered_read_requests and shift % 4096 + offset % 4096 == 0:
                assert num_calls <= 5


def test_aligned_transfers_are_direct_and_leave_nothing_in_the_page_cache(place: Path) -> None:
    with opened(place / "cache", block_bytes=2**16) as file:
        data = aligned_empty(2**18)
        file.write_from(data, 0)
        file.read_into(data, 0)
        info = file.info()
        assert info.path == "direct"
        assert info.counters.direct_write_bytes == info.counters.direct_read_bytes == 2**18
        assert info.counters.direct_write_requests == info.counters.direct_read_requests == 4
        assert info.counters.buffered_write_requests == info.counters.buffered_read_requests == 0
        if "reports no alignment" not in info.reason:  # in a file system in memory the file is the cache
            assert _cached_pages(file.path) == 0
    with opened(place / "cache", direct=False) as file:
        file.write_from(data, 0)
        info = file.info()
        assert (info.path, info.reason, info.counters.buffered_write_bytes) == ("buffered", "asked for", 2**18)
        assert _cached_pages(file.path) == 64


def _cached_pages(path: str) -> int:
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        pages = (ctypes.c_ubyte * (len(memory) // mmap.PAGESIZE))()
        first = ctypes.c_char.from_buffer(memory)
        libc = ctypes.CDLL(None)
        assert libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(memory)), pages) == 0
        del first
        return sum(page & 1 for page in pages)


def test_bounce_buffers_are_one_a_thread(place: Path) -> None:
    with opened(place / "bounce", threads=3, block_bytes=10_000) as file:
        assert file.block_bytes == 12_288  # whole pages
        assert file.staging_bytes == 3 * 12_288
        data = torch.zeros(2**20 + 1, dtype=torch.uint8)[1:]
        file.write_from(data, 0)
        file.read_into(data, 0)
        assert 1 <= len(file._bounce) <= 3


def test_where_o_direct_is_refused_at_open_the_page_cache_is_used() -> None:
    """procfs knows no O_DIRECT. A process's memory as a file: byte 0 of it is an I/O error."""
    data = aligned_empty(5000).fill_(9)
    with opened(Path("/proc/self/mem"), create=False, read_only=True) as file:
        out = torch.zeros(5000, dtype=torch.uint8)
        file.read_into(out, data.data_ptr())
        assert torch.equal(out, data)
        info = file.info()
        assert info.path == "buffered"
        assert "refuses O_DIRECT at open" in info.reason
        assert info.counters.buffered_read_bytes == 5000
        with pytest.raises(StorageError, match=r"mem: reading 5000 bytes at offset 0 failed .*dmesg") as caught:
            file.read_into(out, 0)
        assert caught.value.errno == errno.EIO


@pytest.mark.parametrize("writing", [False, True])
def test_where_o_direct_is_refused_later_the_page_cache_is_used(place: Path, writing: bool) -> None:
    path = place / "later"
    path.write_bytes(bytes(range(256)) * 32)
    with opened(path) as file:
        file._address_align = 1  # a lie, so that the kernel sees an odd address
        data, _ = placed(8192, 1)
        data.fill_(3)
        if writing:
            file.write_from(data, 0)
            assert path.read_bytes() == bytes([3]) * 8192
        else:
            file.read_into(data, 0)
            assert bytes(byte_view(data)) == path.read_bytes()
        info = file.info()
        if info.path == "buffered":  # some file systems take any address
            assert "refuses O_DIRECT transfers" in info.reason
            assert info.counters.direct_read_bytes == info.counters.direct_write_bytes == 0
        else:
            assert "reports no alignment" in info.reason


@pytest.mark.parametrize("most", [512, 4096, 5000])
def test_short_transfers_go_on(place: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    read, write = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: min(read(fd, views, offset), most))
    monkeypatch.setattr(os, "pwritev", lambda fd, views, offset: min(write(fd, views, offset), most))
    with opened(place / f"loops{most}", block_bytes=16_384) as file:
        source = torch.randint(256, (20_000,), dtype=torch.uint8)
        file.write_from(source, 100)
        out = torch.zeros_like(source)
        file.read_into(out, 100)
        assert torch.equal(out, source)
        assert file.info().path == "direct"  # never asked to go on from where it cannot


def test_a_disk_that_takes_nothing_is_an_error(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(place / "nothing") as file:
        monkeypatch.setattr(os, "pwritev", lambda *_: 0)
        with pytest.raises(StorageError, match="writing 4 bytes at offset 0 failed"):
            file.write_from(torch.zeros(1), 0)


def test_sync_tells_what_failed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(place / "sync") as file:
        file.write_from(torch.zeros(1), 0)
        file.sync()

        def fail(_: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(StorageError, match="making it durable failed: Input/output error"):
            file.sync()


def test_a_file_that_cannot_be_opened(place: Path) -> None:
    with pytest.raises(StorageError, match=r"absent/file cannot be opened: No such file") as caught:
        DirectFile(place / "absent" / "file", create=True)
    assert caught.value.errno == errno.ENOENT


def test_a_limit_on_file_size(place: Path) -> None:
    script = textwrap.dedent("""
        import resource, sys, torch
        from torchstorm.errors import StorageError
        from torchstorm.storage.aligned import aligned_empty
        from torchstorm.storage.direct import DirectFile
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
        file = DirectFile(sys.argv[1], create=True, block_bytes=65536)
        try:
            file.write_from(aligned_empty(2_000_000), 0)
        except StorageError as error:
            print(error.errno, error)
        data = torch.arange(100_000)
        file.write_from(data, 0)
        out = torch.empty_like(data)
        file.read_into(out, 0)
        print(torch.equal(out, data))
        file.close()
    """)
    path = place / "limited"
    ran = forked.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, timeout=60)
    assert ran.stderr == ""
    message, works = ran.stdout.splitlines()
    assert message.startswith(f"{errno.EFBIG} {path}: writing 2000000 bytes at offset 0 failed in the block at ")
    assert "ulimit -f" in message
    assert works == "True"


def test_discarded_bytes_are_given_back_to_the_disk(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = place / "discard"
    with opened(path) as file:
        file.write_from(aligned_empty(2**20).fill_(1), 0)
        before = path.stat()
        file.discard(2**16, 2**19)
        assert path.stat().st_size == before.st_size
        assert before.st_blocks - path.stat().st_blocks == 2**19 // 512
        assert path.read_bytes() == b"\1" * 2**16 + bytes(2**19) + b"\1" * (2**19 - 2**16)
        monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
        file.discard(0, 2**16)
        assert path.read_bytes()[0] == 1


def test_batches_are_one_copy(place: Path) -> None:
    with opened(place / "batch") as file:
        sources = [torch.full((1000,), number) for number in range(5)]
        file.write_batch_async([(source, 9000 * at) for at, source in enumerate(sources)]).wait()
        outs = [torch.empty_like(source) for source in sources]
        copy = file.read_batch_async([(out, 9000 * at) for at, out in enumerate(outs)])
        copy.synchronize()
        assert copy.done()
        assert all(torch.equal(out, source) for out, source in zip(outs, sources, strict=True))
        file.write_batch_async([]).wait()


def test_a_request_follows_those_it_names_and_tells_only_its_own_error(place: Path) -> None:
    with opened(place / "after", threads=4) as file:
        gate, failed = StorageCopy(), StorageCopy()
        data = torch.ones(1000)
        write = file.write_from_async(data, 0, after=[gate, failed])
        out = torch.zeros(1000)
        read = file.read_into_async(out, 0, after=[write])
        time.sleep(0.02)
        assert not write.done()
        assert not read.done()
        failed.finish(StorageError("not this one's"))
        gate.finish()
        read.wait()
        assert torch.equal(out, data)
        assert write.error is None
        missing = file.read_into_async(out, 10_000)
        for _ in range(2):
            with pytest.raises(StorageError, match="is too short"):
                missing.wait()


def test_the_source_lives_as_long_as_its_copy_and_no_longer(place: Path) -> None:
    with opened(place / "alive") as file:
        gate = StorageCopy()
        source = torch.full((100_000,), 5)
        alive = weakref.ref(source)
        copy = file.write_from_async(source, 0, after=[gate])
        del source
        gc.collect()
        assert alive() is not None
        gate.finish()
        copy.wait()
        assert alive() is None
        out = torch.empty(100_000, dtype=torch.int64)
        file.read_into(out, 0)
        assert (out == 5).all()


def test_close_lets_copies_end_and_gives_everything_back(place: Path) -> None:
    fds, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    file = DirectFile(place / "close", create=True)
    copies = [file.write_from_async(torch.full((100_000,), number), 800_000 * number) for number in range(20)]
    file.close()
    file.close()
    assert all(copy.done() and copy.error is None for copy in copies)
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == (fds, threads)
    for use in (file.sync, lambda: file.read_into(torch.empty(1), 0)):
        with pytest.raises(StorageError, match="is closed"):
            use()


def test_a_file_that_nobody_closes_leaves_nothing_behind(place: Path) -> None:
    fds, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        DirectFile(place / "forgotten", create=True).write_from(torch.zeros(3), 1)
    gc.collect()
    stop = time.monotonic() + 5
    while threading.active_count() > threads and time.monotonic() < stop:
        time.sleep(0.01)
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == (fds, threads)


def test_a_forked_process_is_told_to_open_the_file_again(place: Path) -> None:
    with opened(place / "forked") as file:
        file.write_from(torch.ones(3), 0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: of forking with threads, the point here
            child = os.fork()
        if child == 0:
            try:
                file.read_into(torch.empty(3), 0)
            except StorageError as error:
                file.close()
                os._exit(17 if "Open it again" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
        file.read_into(out := torch.empty(3), 0)
        assert out.sum() == 3


def test_a_copy_that_starts_too_late_at_exit_fails(place: Path) -> None:
    with opened(place / "exit") as file:
        gate = StorageCopy()
        copy = file.write_from_async(torch.zeros(3_000_000), 0, after=[gate])
        file._pool._executor.shutdown()  # as the interpreter does before it ends
        gate.finish()
        with pytest.raises(StorageError, match="cannot start a copy any more"):
            copy.wait()


def test_it_is_a_backend(place: Path) -> None:
    with opened(place / "typed") as file:
        backend: Backend = file
        assert backend.info().path == "direct"
