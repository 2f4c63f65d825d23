"""The ring between a file and a GPU: the same bytes at any offset and length, no leak and no hang."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from torchstorm.errors import StorageError, UnsupportedError
from torchstorm.storage.direct import DirectFile
from torchstorm.storage.staged import StagedFile

PAGE = 4096
PIECE = 4 * PAGE
CPU = torch.device("cpu")


class DelayedCopy:
    """A copy that is made when it, or a later one of its stream, is first waited for: the link may be late."""

    def __init__(self, stream: list[DelayedCopy], copy: Callable[[], object], lock: threading.Lock) -> None:
        self._stream, self._copy, self._lock = stream, copy, lock
        stream.append(self)

    def wait(self) -> None:
        self.synchronize()

    def synchronize(self) -> None:
        with self._lock:
            while self in self._stream:
                self._stream.pop(0)._copy()

    def done(self) -> bool:
        return self not in self._stream


class LateEngine:
    """Stands for a GPU's copy streams. A copy is only made once somebody waits for it."""

    def __init__(self) -> None:
        self.queued: list[tuple[str, int]] = []
        self.refuse = False
        self._streams: dict[str, list[DelayedCopy]] = {"out": [], "in": []}
        self._lock = threading.Lock()

    def mark(self) -> str:
        return threading.current_thread().name

    def copy_out(self, host: torch.Tensor, source: torch.Tensor, *, ready: object) -> DelayedCopy:
        return self._copy("out", host, source, ready)

    def copy_in(self, out: torch.Tensor, host: torch.Tensor, *, ready: object) -> DelayedCopy:
        return self._copy("in", out, host, ready)

    def _copy(self, way: str, target: torch.Tensor, source: torch.Tensor, ready: object) -> DelayedCopy:
        if self.refuse:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        assert ready != threading.current_thread().name  # marked by whoever asked, not by the ring's thread
        self.queued.append((way, target.nbytes))
        with self._lock:
            return DelayedCopy(self._streams[way], lambda: target.copy_(source), self._lock)


class Room:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.engine = LateEngine()
        self.content = torch.randint(256, (40 * PAGE + 123,), dtype=torch.uint8).numpy().tobytes()
        path.write_bytes(self.content)
        self.file = self.open()

    def open(self, **options: Any) -> StagedFile:
        inner = DirectFile(self.path, threads=2, block_bytes=2 * PAGE)
        return StagedFile(inner, CPU, self.engine, **{"pin": None, "num_buffers": 3, "piece_bytes": PIECE, **options})


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    room = Room(tmp_path / "file")
    yield room
    room.file.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "torchstorm-staged"]


def data(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.booleans(), st.integers(0, 30 * PAGE), st.integers(0, 10 * PAGE)), min_size=1, max_size=6
    ),
    num_buffers=st.integers(1, 4),
    direct=st.booleans(),
)
def test_any_offset_and_length_is_what_a_plain_file_has(
    requests: list[tuple[bool, int, int]], num_buffers: int, direct: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("staged") / "file"
    plain = bytearray(data(40 * PAGE + 11).numpy().tobytes())
    path.write_bytes(plain)
    inner = DirectFile(path, threads=2, block_bytes=2 * PAGE, direct=direct)
    file = StagedFile(inner, CPU, LateEngine(), pin=None, num_buffers=num_buffers, piece_bytes=PIECE)
    try:
        for seed, (write, offset, nbytes) in enumerate(requests):
            if write:
                source = data(nbytes, seed)
                file.write_from(source, offset)
                plain[offset : offset + nbytes] = source.numpy().tobytes()
            else:
                out = torch.empty(nbytes, dtype=torch.uint8)
                file.read_into(out, offset)
                assert out.numpy().tobytes() == plain[offset : offset + nbytes]
    finally:
        file.close()
    assert path.read_bytes() == plain


def test_many_threads_at_once_get_their_own_bytes(room: Room) -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        for turn in range(10):
            offset = number * 2 * PAGE + turn
            out = torch.empty(PAGE + number, dtype=torch.uint8)
            room.file.read_into(out, offset)
            if out.numpy().tobytes() != room.content[offset : offset + out.nbytes]:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


def test_pieces_are_cut_at_multiples_of_their_size_so_that_bodies_are_direct(room: Room) -> None:
    room.file.read_into(torch.empty(3 * PIECE, dtype=torch.uint8), 100)
    assert room.engine.queued == [("in", PIECE - 100), ("in", PIECE), ("in", PIECE), ("in", 100)]
    counters = room.file.info().counters
    assert counters.link_in_bytes == 3 * PIECE
    if room.file.info().reason.endswith("bytes"):  # O_DIRECT is to be had here
        assert counters.buffered_read_bytes == 0


def test_what_passes_is_shown_in_order_with_the_number_of_its_request(room: Room) -> None:
    seen: dict[int, bytes] = {}

    def on_bytes(number: int, view: memoryview) -> None:
        seen[number] = seen.get(number, b"") + bytes(view)

    outs = [torch.empty(nbytes, dtype=torch.uint8) for nbytes in (5 * PAGE, 0, 3 * PIECE + 1)]
    offsets = [7, 5, PAGE]
    room.file.read_batch_async(list(zip(outs, offsets, strict=True)), on_bytes=on_bytes).synchronize()
    assert seen == {n: room.content[offsets[n] : offsets[n] + outs[n].nbytes] for n in (0, 2)}
    seen.clear()
    source = data(2 * PIECE + 9)
    room.file.write_batch_async([(source, 3)], on_bytes=on_bytes).synchronize()
    assert seen == {0: source.numpy().tobytes()}


def test_an_error_below_is_told_by_every_wait_and_the_ring_stays_usable(room: Room) -> None:
    beyond = room.file.read_into_async(torch.empty(3 * PIECE, dtype=torch.uint8), len(room.content) - PAGE)
    for _ in range(2):
        with pytest.raises(StorageError, match="is too short"):
            beyond.wait()
    assert beyond.done()
    room.engine.refuse = True
    with pytest.raises(RuntimeError, match="illegal memory access"):
        room.file.read_into(torch.empty(2 * PIECE, dtype=torch.uint8), 0)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        room.file.write_from(data(2 * PIECE), 0)
    room.engine.refuse = False
    out = torch.empty(9 * PIECE, dtype=torch.uint8)
    room.file.read_into(out, 0)
    assert out.numpy().tobytes() == room.content[: 9 * PIECE]


def test_a_request_waits_for_those_it_comes_after(room: Room) -> None:
    gate = threading.Event()

    def on_bytes(number: int, view: memoryview) -> None:
        gate.wait(10)

    source = data(PIECE)
    write = room.file.write_batch_async([(source, 0)], on_bytes=on_bytes)
    out = torch.empty(PIECE, dtype=torch.uint8)
    read = room.file.read_into_async(out, 0, after=[write])
    time.sleep(0.05)
    assert not read.done()
    gate.set()
    read.synchronize()
    assert torch.equal(out, source)


def test_a_future_that_is_dropped_ends_by_itself_and_lets_go_of_its_tensor(room: Room) -> None:
    out = torch.empty(5 * PIECE, dtype=torch.uint8)
    storage = StorageWeakRef(out.untyped_storage())
    room.file.read_into_async(out, 0)
    del out
    stop = time.monotonic() + 10
    while not storage.expired() and time.monotonic() < stop:
        gc.collect()
        time.sleep(0.005)
    assert storage.expired()
    room.file.read_into(torch.empty(5 * PIECE, dtype=torch.uint8), 0)


def test_a_ring_that_cannot_be_had_is_an_error_and_no_hang(room: Room) -> None:
    def refuse(buffer: torch.Tensor) -> Callable[[], None]:
        raise MemoryError("no memory to pin")

    file = room.open(pin=refuse)
    try:
        for _ in range(2):
            with pytest.raises(MemoryError, match="no memory to pin"):
                file.read_into(torch.empty(PIECE, dtype=torch.uint8), 0)
    finally:
        file.close()


def test_what_is_not_contiguous_or_elsewhere_is_refused(room: Room) -> None:
    with pytest.raises(UnsupportedError, match="strides"):
        room.file.read_into(torch.empty(8, 8)[:, ::2], 0)
    with pytest.raises(UnsupportedError, match="offset of at least 0"):
        room.file.read_into(torch.empty(8), -1)
    with pytest.raises(UnsupportedError, match="on meta"):
        room.file.read_into(torch.empty(8, device="meta"), 0)


def test_a_closed_file_and_a_forked_child_say_so(room: Room) -> None:
    file = room.open()
    file.read_into(torch.empty(PIECE, dtype=torch.uint8), 0)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            file.read_into(torch.empty(PIECE, dtype=torch.uint8), 0)
        except StorageError as error:
            code = 0 if "forked" in str(error) else 2
        file.close()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    file.close()
    file.close()
    with pytest.raises(StorageError, match="is closed"):
        file.read_into(torch.empty(PIECE, dtype=torch.uint8), 0)


def test_a_file_that_is_dropped_ends_its_threads_and_returns_its_memory(room: Room) -> None:
    freed: list[int] = []

    def pin(buffer: torch.Tensor) -> Callable[[], None]:
        return lambda: freed.append(buffer.nbytes)

    file = room.open(pin=pin)
    file.read_into(torch.empty(PIECE, dtype=torch.uint8), 0)
    file.write_from(data(PIECE), 0)
    before = threading.active_count()
    del file
    gc.collect()
    assert threading.active_count() <= before - 2
    assert freed == [3 * (PIECE + PAGE)] * 2
