"""Many reads with one system call, and what becomes of them where the kernel gives no ring."""

from __future__ import annotations

import errno
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchstorm.errors import StorageError
from torchstorm.storage import direct
from torchstorm.storage.aligned import aligned_empty
from torchstorm.storage.direct import DirectFile
from torchstorm.storage.uring import Ring

PAGE = 4096
PAGES = 300
ENTRIES = 8


@pytest.fixture(scope="module")
def content() -> torch.Tensor:
    return torch.randint(256, (PAGES * PAGE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, content: torch.Tensor) -> Path:
    path = tmp_path_factory.mktemp("ring") / "file"
    path.write_bytes(content.numpy().tobytes())
    return path


@pytest.fixture(scope="module")
def ring() -> Ring:
    try:
        return Ring(ENTRIES)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EACCES, errno.ENOSYS):
            raise
        pytest.skip(f"io_uring is switched off here: {error}")


def ask(ring: Ring, fd: int, pages: list[int], nbytes: int = PAGE) -> tuple[list[int], torch.Tensor]:
    out = torch.full((len(pages), nbytes), 0xA5, dtype=torch.uint8)
    places = out.data_ptr() + np.arange(len(pages)) * nbytes
    return ring.read(fd, places, np.array(pages, dtype=np.int64) * PAGE, nbytes).tolist(), out


@settings(max_examples=50, deadline=None)
@given(pages=st.lists(st.integers(0, PAGES - 1), max_size=ENTRIES), nbytes=st.integers(1, PAGE))
def test_every_piece_comes_to_its_own_place(
    pages: list[int], nbytes: int, ring: Ring, path: Path, content: torch.Tensor
) -> None:
    with open(path, "rb") as file:
        came, out = ask(ring, file.fileno(), pages, nbytes)
    assert came == [nbytes] * len(pages)
    for page, row in zip(pages, out, strict=True):
        assert torch.equal(row, content[page * PAGE : page * PAGE + nbytes])


def test_what_is_short_or_fails_is_told_piece_by_piece(ring: Ring, path: Path) -> None:
    with open(path, "rb") as file:
        came, _ = ask(ring, file.fileno(), [0, PAGES - 1, PAGES], 2 * PAGE)
        assert came == [2 * PAGE, PAGE, 0]
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        assert ask(ring, directory, [0, 1])[0] == [-errno.EISDIR] * 2
    finally:
        os.close(directory)
    assert ask(ring, directory, [0, 1])[0] == [-errno.EBADF] * 2
    with open(path, "rb") as file:
        assert ask(ring, file.fileno(), [3])[0] == [PAGE], "the ring goes on after errors"


def test_a_signal_in_the_middle_loses_nothing(ring: Ring) -> None:
    """A read from a pipe waits; meanwhile signals interrupt the system call again and again."""
    reader, writer = os.pipe()
    num_signals = []
    before = signal.signal(signal.SIGALRM, lambda *_: num_signals.append(1))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        late = threading.Timer(0.2, os.write, (writer, b"x" * 100))
        late.start()
        out = torch.zeros(100, dtype=torch.uint8)
        came = ring.read(reader, np.array([out.data_ptr()]), np.array([-1]), 100)
        late.join()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        os.close(reader)
        os.close(writer)
    assert came.tolist() == [100]
    assert out.eq(ord("x")).all()
    assert num_signals


def rows(path: Path, pages: list[int]) -> tuple[torch.Tensor, DirectFile]:
    out = aligned_empty(len(pages) * PAGE).view(len(pages), PAGE)
    file = DirectFile(path, threads=2, read_only=True)
    try:
        file.read_rows_async(out, [page * PAGE for page in pages]).wait()
    finally:
        file.close()
    return out, file


@pytest.mark.parametrize("code", [None, errno.EPERM, errno.ENOSYS, errno.ENOMEM])
def test_rows_are_the_same_with_a_ring_and_without(
    code: int | None, path: Path, content: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    if code is not None:

        def refuse(entries: int) -> Ring:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(direct, "Ring", refuse)
    pages = np.random.default_rng(0).permutation(PAGES).tolist()
    out, file = rows(path, pages)
    assert torch.equal(out, content.view(PAGES, PAGE)[pages])
    counters = file.info().counters
    assert counters.direct_read_bytes + counters.buffered_read_bytes == PAGES * PAGE


def test_a_row_behind_the_end_is_an_error_that_names_it_and_the_others_are_asked_for(path: Path) -> None:
    with pytest.raises(StorageError, match=rf"is too short: wanted {PAGE} bytes at offset {PAGES * PAGE}"):
        rows(path, [*range(40), PAGES, *range(40)])


def test_a_ring_gives_its_descriptor_back(ring: Ring) -> None:
    before = len(os.listdir("/proc/self/fd"))
    rings = [Ring(4) for _ in range(20)]
    assert len(os.listdir("/proc/self/fd")) > before
    del rings
    assert len(os.listdir("/proc/self/fd")) == before
