"""Transfers that the kernel makes while no thread takes part: the same bytes, errors and order as with threads."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchstorm.errors import StorageError
from torchstorm.storage import unattended
from torchstorm.storage.aligned import empty_at_phase
from torchstorm.storage.blocks import Block
from torchstorm.storage.direct import DirectFile
from torchstorm.storage.uring import Ring

PAGE, NUM_PAGES = 4096, 300


@pytest.fixture
def file(tmp_path: Path) -> Iterator[DirectFile]:
    file = DirectFile(tmp_path / "file", create=True, size_bytes=NUM_PAGES * PAGE, unattended=True)
    if file.drive is None:
        file.close()
        pytest.skip("io_uring is switched off here")
    yield file
    file.close()


def pages(num: int, seed: int = 0) -> torch.Tensor:
    out = empty_at_phase(num * PAGE, 0)
    return out.copy_(
        torch.randint(256, (num * PAGE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    )


def threads_of(file: DirectFile) -> int:
    return len(file._pool._executor._threads)


def test_whole_pages_go_out_and_come_back_without_a_thread(file: DirectFile) -> None:
    source, out = pages(200), empty_at_phase(200 * PAGE, 0)
    written = file.write_batch_async([(source, 8 * PAGE)], whole_blocks=True)
    read = file.read_batch_async([(out, 8 * PAGE)], after=[written])
    read.wait()
    assert written.done()
    assert torch.equal(out, source)
    assert threads_of(file) == 0
    counters = file.info().counters
    assert counters.direct_write_bytes == counters.direct_read_bytes == 200 * PAGE


@settings(max_examples=60, deadline=None)
@given(data=st.data())
@pytest.mark.no_cover
def test_whatever_is_asked_for_has_the_bytes_that_were_written_last(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("unattended") / "file"
    expected = torch.zeros(32 * PAGE, dtype=torch.uint8)
    file = DirectFile(path, create=True, size_bytes=expected.nbytes, block_bytes=2 * PAGE, unattended=True)
    last = []
    for seed in range(data.draw(st.integers(1, 12))):
        is_aligned = data.draw(st.booleans())
        start = data.draw(st.integers(0, 31)) * PAGE if is_aligned else data.draw(st.integers(0, 31 * PAGE))
        most = expected.nbytes - start
        size = data.draw(st.integers(1, most // PAGE)) * PAGE if is_aligned else data.draw(st.integers(1, most))
        source = empty_at_phase(size, 0 if data.draw(st.booleans()) else 64).copy_(pages(32, seed)[:size])
        last = [file.write_batch_async([(source, start)], after=last)]
        expected[start : start + size] = source
    out = empty_at_phase(expected.nbytes, 0)
    file.read_batch_async([(out, 0)], after=last).wait()
    assert torch.equal(out, expected)
    file.close()


def test_more_requests_than_the_ring_has_room_for_all_end(file: DirectFile) -> None:
    sources = [pages(1, number) for number in range(NUM_PAGES)]
    written = [file.write_batch_async([(one, at * PAGE)]) for at, one in enumerate(sources)]
    outs = [empty_at_phase(PAGE, 0) for _ in sources]
    read = [
        file.read_batch_async([(out, at * PAGE)], after=[copy])
        for at, (out, copy) in enumerate(zip(outs, written, strict=True))
    ]
    for copy in read:
        copy.wait()
    assert all(map(torch.equal, outs, sources))


def test_a_read_behind_the_end_is_an_error_of_its_copy_alone(file: DirectFile) -> None:
    far = file.read_batch_async([(empty_at_phase(PAGE, 0), (NUM_PAGES + 8) * PAGE)])
    near = file.read_batch_async([(empty_at_phase(PAGE, 0), 0)])
    near.wait()
    for _ in range(2):
        with pytest.raises(StorageError, match="is too short"):
            far.wait()


def test_what_the_kernel_refuses_is_transferred_as_without_it(
    file: DirectFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    source, out = pages(4), empty_at_phase(4 * PAGE, 0)
    monkeypatch.setattr(Ring, "submit", refuse)
    file.write_batch_async([(source, 0)]).wait()
    file.read_batch_async([(out, 0)]).wait()
    assert torch.equal(out, source)


def test_a_signal_or_a_full_ring_is_asked_for_again(file: DirectFile, monkeypatch: pytest.MonkeyPatch) -> None:
    enter, failing = Ring._enter, [errno.EINTR, errno.EAGAIN, errno.EBUSY] * 2

    def late(self: Ring, *args: int) -> int:
        if failing:
            code = failing.pop()
            raise OSError(code, os.strerror(code))
        return enter(self, *args)

    monkeypatch.setattr(Ring, "_enter", late)
    source, out = pages(4), empty_at_phase(4 * PAGE, 0)
    file.write_batch_async([(source, 0)]).wait()
    file.read_batch_async([(out, 0)]).wait()
    assert torch.equal(out, source)
    assert not failing


def test_many_threads_may_wait_and_ask_at_once(file: DirectFile) -> None:
    def work(number: int) -> None:
        source, out = pages(16, number), empty_at_phase(16 * PAGE, 0)
        for _ in range(20):
            written = file.write_batch_async([(source, number * 16 * PAGE)])
            read = file.read_batch_async([(out.zero_(), number * 16 * PAGE)], after=[written])
            while number % 2 and not read.done():
                pass
            read.wait()
            assert torch.equal(out, source)

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(work, range(8), timeout=60)) == [None] * 8


def test_closing_waits_for_what_nobody_has_asked_for_and_what_that_follows(tmp_path: Path) -> None:
    file = DirectFile(tmp_path / "file", create=True, unattended=True)
    source, begun = pages(64), threading.Event()
    write = file._write_block

    def late(whole_blocks: bool, block: Block) -> None:
        begun.wait()
        time.sleep(0.1)
        write(whole_blocks, block)

    file._write_block = late  # type: ignore[method-assign]
    by_threads = file.write_batch_async([(source[1:], 1)])
    copies = [file.write_batch_async([(source, at * source.nbytes)], after=[by_threads]) for at in range(16)]
    closing = threading.Thread(target=file.close, daemon=True)
    closing.start()
    begun.set()
    closing.join(30)
    assert not closing.is_alive()
    assert all(copy.done() for copy in [by_threads, *copies])
    assert (tmp_path / "file").read_bytes() == source.numpy().tobytes() * 16
    with pytest.raises(StorageError, match="is closed"):
        file.write_batch_async([(source, 0)])


def test_memory_that_the_kernel_still_uses_lives_on_though_all_have_forgotten_it(tmp_path: Path) -> None:
    file = DirectFile(tmp_path / "file", create=True, unattended=True)
    source = pages(2048)
    left = weakref.ref(source)
    file.write_batch_async([(source, 0)])
    del source, file
    gc.collect()
    assert left() is not None
    while unattended._busy:
        for one in list(unattended._busy):
            one.drive(True)
    gc.collect()
    assert left() is None
    assert (tmp_path / "file").stat().st_size == 2048 * PAGE


def test_a_forked_process_is_told_and_harms_nothing(file: DirectFile) -> None:
    source = pages(16)
    copy = file.write_batch_async([(source, 0)])
    child = os.fork()
    if not child:
        DirectFile(file.path, unattended=True).close()  # which asks others first what has ended
        try:
            copy.done()
            copy.wait()
        except StorageError as error:
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(0 if copy._ended.is_set() else 2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    copy.wait()
    out = empty_at_phase(source.nbytes, 0)
    file.read_batch_async([(out, 0)]).wait()
    assert torch.equal(out, source)


def test_without_io_uring_threads_do_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(entries: int) -> Ring:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(unattended, "Ring", none)
    file = DirectFile(tmp_path / "file", create=True, unattended=True)
    assert file.drive is None
    source, out = pages(4), empty_at_phase(4 * PAGE, 0)
    file.write_batch_async([(source, 0)]).wait()
    file.read_batch_async([(out, 0)]).wait()
    assert torch.equal(out, source)
    file.close()
