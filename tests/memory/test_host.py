"""What the suite for every tier does not ask of host memory: checks, poison, and the order of copies on streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from torchstorm.errors import BudgetError, CorruptionError
from torchstorm.memory.host import DoneCopy, HostHandle, HostTier
from torchstorm.memory.tier import TierSpec
from torchstorm.transfer.engine import StreamCopy
from torchstorm.transfer.pinned import PinnedArena

PAGE = 4096


class LateCopy:
    """A copy that runs when somebody waits for it, after those it must follow and those before it on its stream."""

    def __init__(
        self, target: torch.Tensor, source: torch.Tensor, after: Sequence[StreamCopy], stream: list[LateCopy]
    ) -> None:
        self.target, self.source, self.after = target, source, list(after)
        self.before = list(stream)
        self.ended = False
        stream.append(self)

    def wait(self) -> None:
        self.synchronize()

    def synchronize(self) -> None:
        if not self.ended:
            for copy in [*self.before, *self.after]:
                copy.synchronize()
            self.target.copy_(self.source)
            self.ended = True

    def done(self) -> bool:
        return self.ended


class LateEngine:
    """Stands for the copy streams: nothing happens before it has to."""

    def __init__(self) -> None:
        self.copies: list[LateCopy] = []
        self._out: list[LateCopy] = []
        self._back: list[LateCopy] = []

    def copy_out(self, host: torch.Tensor, source: torch.Tensor, *, after: Sequence[StreamCopy] = ()) -> LateCopy:
        self.copies.append(LateCopy(host, source, after, self._out))
        return self.copies[-1]

    def copy_in(self, out: torch.Tensor, host: torch.Tensor, *, after: Sequence[StreamCopy] = ()) -> LateCopy:
        self.copies.append(LateCopy(out, host, after, self._back))
        return self.copies[-1]

    def synchronize(self) -> None:
        for copy in self.copies:
            copy.synchronize()


def make_tier(*, engine: Any = None, check: bool = False, capacity_pages: int = 64) -> HostTier:
    capacity = capacity_pages * PAGE
    arena = PinnedArena(capacity, pin=None, available_bytes=lambda: 1 << 40)
    return HostTier(arena, engine=engine, spec=TierSpec(name="ram", capacity_bytes=capacity), check=check)


@pytest.fixture(params=["at once", "late"])
def checked(request: pytest.FixtureRequest) -> Iterator[HostTier]:
    tier = make_tier(engine=LateEngine() if request.param == "late" else None, check=True)
    yield tier
    tier.close()


def data(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def fetch(tier: HostTier, handle: Any) -> torch.Tensor:
    out = torch.full((handle.nbytes,), 0xEE, dtype=torch.uint8)
    tier.get(handle, out).wait()
    return out


def test_checked_bytes_that_did_not_change_come_back(checked: HostTier) -> None:
    handle = checked.put(data(5000), label="h.3")
    for _ in range(2):
        assert torch.equal(fetch(checked, handle), data(5000))


@pytest.mark.parametrize(("label", "named"), [("h.3.mlp", "h.3.mlp"), ("", "a saved tensor")])
def test_checked_bytes_that_changed_in_host_memory_are_named(checked: HostTier, label: str, named: str) -> None:
    handle = checked.put(data(5000), label=label)
    handle.written.synchronize()
    assert handle.slot is not None
    handle.slot.pieces[-1][-1] ^= 1
    with pytest.raises(CorruptionError, match=rf"^{named} \(5000 bytes\) changed in host memory"):
        checked.get(handle, torch.empty(5000, dtype=torch.uint8))
    handle.slot.pieces[-1][-1] ^= 1
    assert torch.equal(fetch(checked, handle), data(5000))


def test_checked_slots_are_poisoned_when_they_are_freed(checked: HostTier) -> None:
    handle = checked.put(data(5000))
    out = torch.empty(5000, dtype=torch.uint8)
    copy = checked.get(handle, out)
    assert handle.slot is not None
    (piece,) = handle.slot.pieces
    checked.free(handle)
    assert copy.done(), "poison follows the copies out of the slot"
    assert torch.equal(out, data(5000))
    assert bool((piece == 0xFF).all())


def test_unchecked_slots_are_left_as_they_are() -> None:
    tier = make_tier()
    handle = tier.put(data(5000))
    assert handle.slot is not None
    (piece,) = handle.slot.pieces
    assert handle.checksum is None
    tier.free(handle)
    assert torch.equal(piece, data(5000))


def in_pieces(tier: HostTier, *, num_pages: int = 8) -> HostHandle:
    """Fills the tier, frees every other page and puts what lies in what they leave: in half as many pieces."""
    handles = [tier.put(data(PAGE, seed)) for seed in range(num_pages)]
    for handle in handles[::2]:
        tier.free(handle)
    large = tier.put(data(num_pages // 2 * PAGE - 5, 99), label="h.9")
    assert large.slot is not None
    assert len(large.slot.pieces) == num_pages // 2
    assert large.nbytes == num_pages // 2 * PAGE - 5
    return large


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_what_lies_in_pieces_comes_back(late: bool, check: bool) -> None:
    tier = make_tier(engine=LateEngine() if late else None, check=check, capacity_pages=8)
    large = in_pieces(tier)
    for _ in range(2):
        assert torch.equal(fetch(tier, large), data(4 * PAGE - 5, 99))
    assert large.slot is not None
    pieces = large.slot.pieces
    tier.free(large)
    assert tier.used_bytes == 4 * PAGE
    if check:
        assert all(bool((piece == 0xFF).all()) for piece in pieces)
    tier.close()


@pytest.mark.parametrize("which", range(4))
def test_checked_bytes_that_changed_in_any_piece_are_found(which: int) -> None:
    tier = make_tier(check=True, capacity_pages=8)
    large = in_pieces(tier)
    assert large.slot is not None
    large.slot.pieces[which][0] ^= 1
    with pytest.raises(CorruptionError, match=rf"^h\.9 \({4 * PAGE - 5} bytes\) changed in host memory"):
        tier.get(large, torch.empty(4 * PAGE - 5, dtype=torch.uint8))


def test_copies_of_pieces_follow_those_before_them() -> None:
    engine = LateEngine()
    tier = make_tier(engine=engine, capacity_pages=8)
    large = in_pieces(tier)
    before, writes = engine.copies[:8], engine.copies[8:]
    assert len(writes) == 4
    for write in writes:
        assert set(before[::2]) <= set(write.after), "each follows all whose memory it takes"
    assert large.written is writes[-1], "on one stream the last to be queued is the last to end"
    read = tier.get(large, torch.empty(large.nbytes, dtype=torch.uint8))
    assert [copy.after for copy in engine.copies[12:]] == [[large.written]] * 4
    assert read is engine.copies[-1]


def test_closed_while_late_copies_are_under_way() -> None:
    engine = LateEngine()
    tier = make_tier(engine=engine)
    handle = tier.put(data(5000))
    copy = tier.get(handle, out := torch.zeros(5000, dtype=torch.uint8))
    assert not copy.done()
    tier.close()
    assert copy.done()
    assert torch.equal(out, data(5000))
    assert tier.arena.held_bytes == 0


def test_a_machine_that_has_less_than_the_budget_is_told_apart() -> None:
    left = [2 * PAGE]
    arena = PinnedArena(64 * PAGE, pin=None, available_bytes=lambda: left[0])
    tier = HostTier(arena, engine=None, spec=TierSpec(name="ram", capacity_bytes=64 * PAGE))
    handle = tier.put(data(PAGE))
    left[0] = 0
    with pytest.raises(BudgetError, match=r"ram=256\.00 KiB, but .* 0 B available on this machine") as caught:
        tier.put(data(2 * PAGE))
    assert caught.value.tier == "ram"
    assert tier.used_bytes == tier.peak_bytes == PAGE
    assert torch.equal(fetch(tier, handle), data(PAGE))


def test_freed_twice_is_freed_once() -> None:
    tier = make_tier(capacity_pages=2)
    first = tier.put(data(PAGE))
    tier.free(first)
    tier.free(first)
    assert tier.used_bytes == 0
    second = tier.put(data(PAGE, 1))
    tier.free(first)
    assert tier.used_bytes == PAGE
    assert torch.equal(fetch(tier, second), data(PAGE, 1))


def test_used_and_peak_are_the_arena_s() -> None:
    tier = make_tier()
    handles = [tier.put(data(PAGE + 1, seed)) for seed in range(3)]
    assert tier.used_bytes == tier.peak_bytes == 6 * PAGE
    for handle in handles[:2]:
        tier.free(handle)
    assert (tier.used_bytes, tier.peak_bytes) == (2 * PAGE, 6 * PAGE)
    tier.reset_peak()
    assert tier.peak_bytes == 2 * PAGE
    tier.put(data(1))
    assert tier.peak_bytes == tier.used_bytes == 3 * PAGE
    tier.close()
    tier.close()
    assert tier.arena.held_bytes == 0


def test_a_full_arena_says_so_and_stays_usable() -> None:
    tier = make_tier(capacity_pages=2)
    handle = tier.put(data(PAGE))
    with pytest.raises(BudgetError) as caught:
        tier.put(data(PAGE + 1), label="h.3")
    assert str(caught.value) == (
        "ram=8.00 KiB, but h.3 needs 8.00 KiB more with 4.00 KiB in use. Give ram= at least 12.00 KiB, or a larger "
        "budget on a faster tier."
    )
    assert (caught.value.tier, caught.value.budget_bytes, caught.value.needed_bytes) == ("ram", 2 * PAGE, 3 * PAGE)
    assert tier.used_bytes == tier.peak_bytes == PAGE
    assert torch.equal(fetch(tier, handle), data(PAGE))
    assert torch.equal(fetch(tier, tier.put(data(PAGE, 1))), data(PAGE, 1))


def test_nothing_can_be_put_even_into_a_full_arena() -> None:
    tier = make_tier(capacity_pages=1)
    tier.put(data(PAGE))
    assert fetch(tier, tier.put(data(0))).nbytes == 0


def test_a_read_follows_its_write_and_the_next_owner_both() -> None:
    engine = LateEngine()
    tier = make_tier(engine=engine, capacity_pages=2)
    handle = tier.put(data(PAGE))
    out = torch.zeros(PAGE, dtype=torch.uint8)
    read = tier.get(handle, out)
    assert not handle.written.done()
    tier.free(handle)
    assert tier.used_bytes == 0, "room is given back in program order"
    following = tier.put(data(2 * PAGE, 1))
    write, copy_in, next_write = engine.copies
    assert copy_in.after == [write]
    assert next_write.after == [copy_in], "and with it the first write"
    following.written.synchronize()
    assert read.done()
    assert torch.equal(out, data(PAGE))
    assert torch.equal(fetch(tier, following), data(2 * PAGE, 1))


def test_reads_that_have_ended_are_forgotten() -> None:
    tier = make_tier(engine=LateEngine())
    handle = tier.put(data(100))
    for _ in range(50):
        fetch(tier, handle)
    assert len(handle.reads) == 1


def test_a_copy_that_was_done_at_once() -> None:
    tier = make_tier()
    handle = tier.put(data(100))
    assert isinstance(handle.written, DoneCopy)
    assert handle.written.done()
    handle.written.synchronize()
    handle.written.wait()


def test_the_source_may_change_once_it_is_written() -> None:
    tier = make_tier()
    source = data(100)
    handle = tier.put(source)
    source.zero_()
    assert torch.equal(fetch(tier, handle), data(100))


def test_where_memory_could_not_be_pinned_the_arena_says_why() -> None:
    assert make_tier().arena.not_pinned == "no CUDA device"
