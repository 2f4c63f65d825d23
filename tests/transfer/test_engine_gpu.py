"""Copies on real streams: what they follow, what follows them, and that the host never has to wait."""

from __future__ import annotations

import pytest
import torch

from torchstorm.storage.aligned import aligned_empty
from torchstorm.transfer.engine import CudaCopy, Engine, StreamClock
from torchstorm.transfer.pinned import PinnedArena, pin_memory

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

MIB = 2**20
LONG = 400_000_000  # cycles: about 0.2 s


def on_gpu(nbytes: int, value: int = 0) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8, device="cuda")


def pinned(nbytes: int, value: int = 0) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8, pin_memory=True)


def is_all(tensor: torch.Tensor, value: int) -> bool:
    return bool((tensor == value).all())


@pytest.fixture
def engine() -> Engine:
    # Allocating from the driver can wait for the device, so the small tensors of a test come from a warm pool.
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    warm = [on_gpu(MIB) for _ in range(16)], [pinned(MIB) for _ in range(4)]
    del warm
    torch.cuda.synchronize()
    return Engine(torch.device("cuda", torch.cuda.current_device()))


def slow_copy(engine: Engine) -> CudaCopy:
    """A copy out that ends in about 0.2 s, with nothing of it on the current stream."""
    host, source = pinned(1), on_gpu(1)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(LONG)
        return engine.copy_out(host, source)


@pytest.mark.parametrize("nbytes", [1, 4097, 64 * MIB + 3])
def test_bytes_go_out_and_come_back(engine: Engine, nbytes: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    source = torch.randint(256, (nbytes,), dtype=torch.uint8, device="cuda", generator=generator)
    host, back = pinned(nbytes), on_gpu(nbytes)
    out = engine.copy_out(host, source)
    home = engine.copy_in(back, host, after=[out])
    home.wait()
    assert torch.equal(back, source)
    assert torch.equal(host, source.cpu())
    assert out.done()
    assert home.done()
    engine.synchronize()


def test_a_copy_out_follows_what_the_current_stream_was_given(engine: Engine) -> None:
    source, host = on_gpu(MIB), pinned(MIB)
    torch.cuda._sleep(LONG)
    source.fill_(7)
    copy = engine.copy_out(host, source)
    assert not copy.done(), "the host is ahead"
    copy.synchronize()
    assert copy.done()
    assert is_all(host, 7)


def test_a_copy_follows_the_stream_that_is_current_and_no_other(engine: Engine) -> None:
    source, host = on_gpu(MIB, 3), pinned(MIB)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    busy = torch.cuda.current_stream()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        source.fill_(5)
        copy = engine.copy_out(host, source)
    copy.synchronize()
    assert is_all(host, 5)
    assert not busy.query(), "it did not wait for the default stream"
    torch.cuda.synchronize()


def test_a_copy_in_leaves_memory_alone_until_earlier_work_has_used_it(engine: Engine) -> None:
    memory, host = on_gpu(MIB, 1), pinned(MIB, 2)
    torch.cuda._sleep(LONG)
    before = memory.clone()
    copy = engine.copy_in(memory, host)
    copy.wait()
    after = memory.clone()
    assert is_all(before, 1)
    assert is_all(after, 2)


def test_work_after_wait_sees_the_bytes_and_work_before_does_not(engine: Engine) -> None:
    memory, host = on_gpu(MIB, 1), pinned(MIB, 2)
    torch.cuda.synchronize()
    slow = slow_copy(engine)
    copy = engine.copy_in(memory, host, after=[slow])
    early = memory.clone()
    copy.wait()
    late = memory.clone()
    assert not copy.done(), "the stream waits, the host does not"
    torch.cuda.synchronize()
    assert is_all(early, 1)
    assert is_all(late, 2)


def test_a_copy_follows_those_it_is_told_to_on_the_other_stream(engine: Engine) -> None:
    nbytes = 256 * MIB
    source, host, back = on_gpu(nbytes, 9), pinned(nbytes, 1), on_gpu(nbytes)
    torch.cuda.synchronize()
    out = engine.copy_out(host, source)
    home = engine.copy_in(back, host, after=[out])
    home.synchronize()
    assert is_all(back, 9)


def test_a_copy_may_follow_an_earlier_mark_instead_of_all_work(engine: Engine) -> None:
    source, host = on_gpu(MIB, 4), pinned(MIB)
    torch.cuda.synchronize()
    ready = engine.mark()
    torch.cuda._sleep(LONG)
    copy = engine.copy_out(host, source, ready=ready)
    copy.synchronize()
    assert is_all(host, 4)
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()


def test_memory_given_back_after_the_wait_is_not_overwritten_too_early(engine: Engine) -> None:
    """The rule of the house: the stream waits, then the tensor is dropped; its next owner cannot disturb the copy."""
    nbytes = 64 * MIB
    source, host = on_gpu(nbytes, 8), pinned(nbytes)
    torch.cuda.synchronize()
    slow = slow_copy(engine)
    copy = engine.copy_out(host, source, after=[slow])
    address = source.data_ptr()
    copy.wait()
    del source
    following = on_gpu(nbytes, 6)
    assert following.data_ptr() == address
    torch.cuda.synchronize()
    assert is_all(host, 8)


def test_synchronize_waits_for_both_directions(engine: Engine) -> None:
    host, there, device, here = pinned(1), on_gpu(1), on_gpu(1), pinned(1)
    slow = slow_copy(engine)
    copies = [engine.copy_out(host, there, after=[slow]), engine.copy_in(device, here, after=[slow])]
    engine.synchronize()
    assert all(copy.done() for copy in copies)


def late(engine: Engine, value: int) -> tuple[torch.Tensor, CudaCopy]:
    """A small copy out, which waits for company."""
    host, source = pinned(MIB), on_gpu(MIB, value)
    return host, engine.copy_out(host, source)


def test_small_copies_out_begin_together_when_anyone_waits_for_one_of_them(engine: Engine) -> None:
    first, second = late(engine, 3), late(engine, 4)
    torch.cuda.synchronize()
    assert is_all(first[0], 0), "it waits for company"
    first[1].synchronize()
    assert is_all(first[0], 3)
    assert second[1].done()
    assert is_all(second[0], 4)


def test_copies_that_wait_for_company_do_not_follow_what_is_queued_meanwhile(engine: Engine) -> None:
    hosts, sources = [pinned(8) for _ in range(2)], [on_gpu(8, value) for value in (1, 2)]
    first = engine.copy_out(hosts[0], sources[0])
    second = engine.copy_out(hosts[1], sources[1])
    torch.cuda._sleep(LONG)
    second.synchronize()
    assert not torch.cuda.current_stream().query(), "the copies have waited for work that came after them"
    assert first.done()
    assert [is_all(host, value) for host, value in zip(hosts, (1, 2), strict=True)] == [True, True]


def test_a_large_copy_out_takes_the_small_ones_before_it_along(engine: Engine) -> None:
    small, large = late(engine, 5), on_gpu(64 * MIB, 6)
    host = pinned(64 * MIB)
    engine.copy_out(host, large)
    torch.cuda.synchronize()
    assert is_all(small[0], 5)
    assert is_all(host, 6)


def test_a_copy_in_begins_what_was_to_go_out_before_it(engine: Engine) -> None:
    host, copy = late(engine, 7)
    engine.copy_in(on_gpu(MIB), pinned(MIB)).wait()
    torch.cuda.synchronize()
    assert is_all(host, 7)
    assert copy.done()


def test_each_of_two_streams_is_followed_by_its_own_copies(engine: Engine) -> None:
    one, other = late(engine, 1), pinned(MIB)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
        copy = engine.copy_out(other, on_gpu(MIB, 2))
    one[1].synchronize()
    assert is_all(one[0], 1)
    assert not side.query(), "it did not wait for the side stream"
    copy.synchronize()
    assert is_all(other, 2)


def test_what_is_freed_before_its_copy_begins_is_left_out(engine: Engine) -> None:
    gone, host = on_gpu(MIB, 9), pinned(MIB)
    lost, kept = engine.copy_out(host, gone), late(engine, 8)
    gone.untyped_storage().resize_(0)
    kept[1].synchronize()
    assert is_all(kept[0], 8)
    assert lost.done()


def test_the_clock_reads_device_time() -> None:
    clock = StreamClock(torch.device("cuda", torch.cuda.current_device()))
    start = clock.mark()
    torch.cuda._sleep(LONG)
    stop = clock.mark()
    stop.synchronize()
    assert 20 < start.elapsed_time(stop) < 5000


def test_pinning_and_unpinning() -> None:
    buffer = aligned_empty(4 * MIB)
    assert not buffer.is_pinned()
    unpin = pin_memory(buffer)
    assert buffer.is_pinned()
    assert buffer[MIB : MIB + 5].is_pinned()
    unpin()
    assert not buffer.is_pinned()


def test_a_refused_pin_says_so_and_leaves_the_device_usable() -> None:
    buffer = aligned_empty(4 * MIB)
    unpin = pin_memory(buffer)
    with pytest.raises(RuntimeError, match=r"cudaHostRegister refused 4.00 MiB with error 712"):
        pin_memory(buffer)
    # The runtime keeps the error until it is asked for it; the next kernel's launch must not be what asks.
    assert is_all(on_gpu(1000, 3), 3)
    unpin()


def test_the_arena_hands_out_pinned_memory(engine: Engine) -> None:
    arena = PinnedArena(64 * MIB, pin=pin_memory, available_bytes=lambda: 1 << 40, segment_bytes=16 * MIB)
    slot = arena.allocate(3 * MIB + 1)
    assert slot.pieces[0].is_pinned()
    assert arena.not_pinned == ""
    source, back = on_gpu(3 * MIB + 1, 5), on_gpu(3 * MIB + 1)
    out = engine.copy_out(slot.pieces[0], source, after=slot.after)
    home = engine.copy_in(back, slot.pieces[0], after=[out])
    arena.free(slot, after=[out, home])
    following = arena.allocate(3 * MIB + 1)
    assert following.pieces[0].data_ptr() == slot.pieces[0].data_ptr()
    home.wait()
    assert is_all(back, 5)
    arena.free(following, after=[])
    arena.close()
    assert not slot.pieces[0].is_pinned()
