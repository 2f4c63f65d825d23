"""The arena, with pinning pretended: what it pins, what it gives back, and whom it makes wait for whom."""

from __future__ import annotations

import gc
import mmap
import random
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchstorm.errors import BudgetError
from torchstorm.transfer.pinned import PinnedArena, Slot

PAGE = mmap.PAGESIZE
AMPLE = 1 << 40


class FakePin:
    """Pins nothing; remembers what it was asked."""

    def __init__(self) -> None:
        self.pinned: list[tuple[int, int]] = []
        self.num_unpinned = 0

    def __call__(self, buffer: torch.Tensor) -> Callable[[], None]:
        entry = (buffer.data_ptr(), buffer.nbytes)
        self.pinned.append(entry)

        def unpin() -> None:
            self.num_unpinned += 1
            self.pinned.remove(entry)

        return unpin


class FakeCopy:
    """A copy that ends when the test says so."""

    def __init__(self) -> None:
        self.ended = False
        self.num_waits = 0

    def wait(self) -> None:
        raise AssertionError("the arena makes no stream wait")

    def synchronize(self) -> None:
        self.num_waits += 1
        self.ended = True

    def done(self) -> bool:
        return self.ended


def make_arena(
    capacity_pages: int,
    *,
    pin: Callable[[torch.Tensor], Callable[[], None]] | None = None,
    available: Callable[[], int] = lambda: AMPLE,
    segment_pages: int = 4,
    largest_pages: int = 1024,
) -> PinnedArena:
    return PinnedArena(
        capacity_pages * PAGE,
        pin=pin,
        available_bytes=available,
        segment_bytes=segment_pages * PAGE,
        largest_bytes=largest_pages * PAGE,
    )


def only(slot: Slot) -> torch.Tensor:
    """The memory of a slot that lies in one piece."""
    (piece,) = slot.pieces
    return piece


def pages(slot: Slot) -> int:
    """Pages that a slot takes: its bytes, rounded up once, however many pieces there are."""
    assert sum(size for _, _, size in slot.extents) == -(-slot.nbytes // PAGE) * PAGE
    return -(-slot.nbytes // PAGE)


def test_without_a_gpu_memory_is_pageable_and_the_arena_says_so() -> None:
    arena = make_arena(16)
    assert arena.not_pinned == "no CUDA device"
    slot = arena.allocate(100)
    assert (slot.nbytes, only(slot).nbytes, only(slot).dtype, slot.after) == (100, 100, torch.uint8, [])
    only(slot).fill_(7)
    assert only(slot).tolist() == [7] * 100
    assert only(slot).data_ptr() % PAGE == 0
    assert (arena.used_bytes, arena.peak_bytes, arena.held_bytes) == (PAGE, PAGE, 4 * PAGE)
    arena.free(slot, after=[])
    assert (arena.used_bytes, arena.peak_bytes, arena.held_bytes) == (0, PAGE, 4 * PAGE)


def test_segments_are_pinned_as_they_are_needed_and_kept() -> None:
    pin = FakePin()
    arena = make_arena(16, pin=pin)
    assert arena.not_pinned == ""
    assert pin.pinned == []
    slots = [arena.allocate(PAGE) for _ in range(4)]
    assert [nbytes for _, nbytes in pin.pinned] == [4 * PAGE]
    slots.append(arena.allocate(1))
    assert [nbytes for _, nbytes in pin.pinned] == [4 * PAGE, 4 * PAGE]
    for slot in slots:
        first = only(slot).data_ptr()
        assert any(begin <= first < begin + nbytes for begin, nbytes in pin.pinned)
        arena.free(slot, after=[])
    assert (len(pin.pinned), pin.num_unpinned) == (2, 0)
    arena.allocate(3 * PAGE)
    assert len(pin.pinned) == 2


def test_what_is_larger_than_a_segment_gets_one_of_its_own() -> None:
    pin = FakePin()
    arena = make_arena(32, pin=pin)
    slot = arena.allocate(9 * PAGE + 1)
    assert [nbytes for _, nbytes in pin.pinned] == [10 * PAGE]
    assert only(slot).nbytes == slot.nbytes == 9 * PAGE + 1
    assert arena.held_bytes == arena.used_bytes == 10 * PAGE


def test_the_last_segment_is_what_the_budget_leaves() -> None:
    arena = make_arena(6)
    arena.allocate(4 * PAGE)
    arena.allocate(PAGE)
    assert arena.held_bytes == 6 * PAGE
    arena.allocate(PAGE)
    assert arena.held_bytes == arena.used_bytes == 6 * PAGE


def test_the_budget_holds_to_the_page() -> None:
    arena = make_arena(6)
    slots = [arena.allocate(3 * PAGE), arena.allocate(2 * PAGE)]
    with pytest.raises(BudgetError) as caught:
        arena.allocate(PAGE + 1)
    error = caught.value
    assert str(error) == (
        "ram=24.00 KiB, but 4.00 KiB more is needed with 24.00 KiB already held (20.00 KiB of it in use) and "
        "1.00 TiB available on this machine. Give a larger ram=, or disk=, or a larger vram=."
    )
    assert (error.tier, error.budget_bytes) == ("ram", 6 * PAGE)
    assert arena.used_bytes == arena.peak_bytes == 5 * PAGE
    arena.free(slots[0], after=[])
    assert only(arena.allocate(PAGE + 1)).nbytes == PAGE + 1


def test_what_is_said_to_be_needed_is_enough() -> None:
    arena = make_arena(6)
    sizes = [3 * PAGE, 2 * PAGE, PAGE + 1]
    for nbytes in sizes[:2]:
        arena.allocate(nbytes)
    with pytest.raises(BudgetError) as caught:
        arena.allocate(sizes[2])
    needed = caught.value.needed_bytes
    enough = PinnedArena(needed, pin=None, available_bytes=lambda: AMPLE, segment_bytes=4 * PAGE)
    slots = [enough.allocate(nbytes) for nbytes in sizes]
    assert [slot.nbytes for slot in slots] == sizes


def test_a_budget_below_a_page_holds_nothing() -> None:
    arena = PinnedArena(PAGE - 1, pin=None, available_bytes=lambda: AMPLE)
    with pytest.raises(BudgetError, match="1 B more is needed with 0 B already held"):
        arena.allocate(1)


def test_the_machine_may_have_less_than_the_budget() -> None:
    left = 3 * PAGE + 5

    def available() -> int:
        return left

    arena = make_arena(100, available=available, segment_pages=8)
    arena.allocate(2 * PAGE)
    assert arena.held_bytes == 3 * PAGE
    left = PAGE - 1
    arena.allocate(PAGE)
    with pytest.raises(BudgetError, match=r"and 4\.00 KiB available on this machine") as caught:
        arena.allocate(PAGE)
    assert caught.value.tier == "ram"
    left = AMPLE
    arena.allocate(PAGE)


def test_empty_segments_make_room_for_one_that_is_large_enough() -> None:
    pin = FakePin()
    arena = make_arena(8, pin=pin)
    slots = [arena.allocate(4 * PAGE) for _ in range(2)]
    for slot in slots:
        arena.free(slot, after=[])
    assert arena.held_bytes == 8 * PAGE
    large = arena.allocate(7 * PAGE)
    assert [nbytes for _, nbytes in pin.pinned] == [7 * PAGE]
    assert pin.num_unpinned == 2
    assert large.after == []


def test_empty_segments_are_given_back_before_the_machine_is_said_to_be_full() -> None:
    arena = make_arena(100, available=lambda: 8 * PAGE - arena.held_bytes)
    arena.free(arena.allocate(4 * PAGE), after=[])
    assert only(arena.allocate(6 * PAGE)).nbytes == 6 * PAGE


def test_where_pinning_is_refused_memory_stays_pageable() -> None:
    asked = []

    def refuse(buffer: torch.Tensor) -> Callable[[], None]:
        asked.append(buffer.nbytes)
        raise RuntimeError("cudaHostRegister refused 16.00 KiB with error 2")

    arena = make_arena(8, pin=refuse)
    assert arena.not_pinned == ""
    slot = arena.allocate(5)
    only(slot).fill_(1)
    assert arena.not_pinned == "cudaHostRegister refused 16.00 KiB with error 2"
    arena.allocate(4 * PAGE)
    assert asked == [4 * PAGE], "it is asked once"
    arena.close()
    assert arena.held_bytes == 0


def test_trim_gives_empty_segments_back_down_to_what_is_kept() -> None:
    pin = FakePin()
    arena = make_arena(32, pin=pin)
    slots = [arena.allocate(4 * PAGE) for _ in range(4)]
    arena.trim(0)
    assert arena.held_bytes == 16 * PAGE, "none is empty"
    for slot in slots[:3]:
        arena.free(slot, after=[])
    arena.trim(13 * PAGE)
    assert arena.held_bytes == 16 * PAGE, "one less would be below what is kept"
    arena.trim(9 * PAGE)
    assert arena.held_bytes == 12 * PAGE
    arena.trim(0)
    assert (arena.held_bytes, arena.used_bytes, pin.num_unpinned) == (4 * PAGE, 4 * PAGE, 3)
    only(slots[3]).fill_(3)


def test_trim_gives_the_largest_segment_back_though_small_ones_came_first() -> None:
    arena = make_arena(32)
    for slot in [arena.allocate(nbytes * PAGE) for nbytes in (4, 4, 16)]:
        arena.free(slot, after=[])
    arena.trim(6 * PAGE)
    assert arena.held_bytes == 8 * PAGE, "16 pages held for 6 would be more than twice too much"
    arena.close()


def test_a_segment_under_copy_is_waited_for_before_it_is_unpinned() -> None:
    pin = FakePin()
    arena = make_arena(8, pin=pin)
    copy = FakeCopy()
    arena.free(arena.allocate(PAGE), after=[copy])
    arena.trim(0)
    assert (copy.num_waits, pin.num_unpinned, arena.held_bytes) == (1, 1, 0)


def test_what_is_unpinned_one_by_one_counts_as_held_until_it_is() -> None:
    pin = FakePin()
    arena = make_arena(16, pin=pin)
    for slot in [arena.allocate(4 * PAGE) for _ in range(4)]:
        arena.free(slot, after=[FakeCopy()])
    arena.trim(5 * PAGE, one_by_one=True)
    assert (arena.held_bytes, pin.num_unpinned) == (16 * PAGE, 0)
    for num_left in (3, 2, 2):
        arena.release_one()
        assert (arena.held_bytes, pin.num_unpinned) == (num_left * 4 * PAGE, 4 - num_left)
    arena.trim(0, one_by_one=True)
    arena.close()
    assert (pin.pinned, pin.num_unpinned, arena.held_bytes) == ([], 4, 0)


def test_what_was_chosen_to_be_unpinned_is_used_again_before_more_is_pinned() -> None:
    pin = FakePin()
    arena = make_arena(12, pin=pin)
    slots = [arena.allocate(4 * PAGE) for _ in range(3)]
    for slot in slots[:2]:
        arena.free(slot, after=[])
    arena.trim(0, one_by_one=True)
    arena.release_one()
    again = arena.allocate(4 * PAGE)
    assert (pin.num_unpinned, arena.held_bytes, len(pin.pinned)) == (1, 8 * PAGE, 2)
    arena.free(again, after=[])
    arena.trim(0, one_by_one=True)
    arena.allocate(8 * PAGE)  # for which the budget has room once that is given back
    arena.release_one()  # nothing is left
    assert (pin.num_unpinned, arena.held_bytes) == (2, 12 * PAGE)


def test_a_larger_plan_keeps_what_a_smaller_one_would_have_given_back() -> None:
    arena = make_arena(16)
    for slot in [arena.allocate(4 * PAGE) for _ in range(4)]:
        arena.free(slot, after=[])
    arena.trim(4 * PAGE, one_by_one=True)
    arena.release_one()
    arena.trim(12 * PAGE, one_by_one=True)
    arena.release_one()
    assert arena.held_bytes == 12 * PAGE
    arena.close()


def test_what_is_larger_than_any_segment_has_a_piece_in_each_of_several_and_the_same_ones_again() -> None:
    pin = FakePin()
    arena = make_arena(20, pin=pin, largest_pages=4)
    slot = arena.allocate(10 * PAGE - 1)
    assert [piece.nbytes for piece in slot.pieces] == [4 * PAGE, 4 * PAGE, 2 * PAGE - 1]
    assert max(nbytes for _, nbytes in pin.pinned) == 4 * PAGE, "each can be unpinned in little time"
    copy = FakeCopy()
    arena.free(slot, after=[copy])
    again = arena.allocate(10 * PAGE - 1)
    assert (again, again.after, arena.used_bytes) == (slot, [copy], 10 * PAGE)
    arena.free(again, after=[])
    assert arena.used_bytes == 0
    arena.close()
    assert pin.pinned == []


def test_what_finds_room_for_some_of_its_pieces_alone_takes_none_of_them() -> None:
    arena = make_arena(10, largest_pages=4)
    held = arena.allocate(3 * PAGE)
    with pytest.raises(BudgetError, match="more is needed"):
        arena.allocate(8 * PAGE)
    assert arena.used_bytes == 3 * PAGE
    arena.free(held, after=[])
    assert len(arena.allocate(10 * PAGE).pieces) >= 3
    arena.close()


def test_large_slots_whose_size_changes_lie_where_the_last_ones_lay() -> None:
    pin = FakePin()
    arena = make_arena(100, pin=pin, segment_pages=1, largest_pages=4)
    for index in range(60):
        arena.free(arena.allocate((10 + index % 2) * PAGE), after=[])
    assert arena.held_bytes <= 16 * PAGE
    assert pin.num_unpinned == 0


def test_a_large_slot_takes_back_no_more_of_what_is_leaving_than_it_needs() -> None:
    pin = FakePin()
    arena = make_arena(60, pin=pin, largest_pages=4)
    for slot in [arena.allocate(4 * PAGE) for _ in range(10)]:
        arena.free(slot, after=[])
    arena.trim(0, one_by_one=True)
    slot = arena.allocate(8 * PAGE)
    assert len(slot.pieces) == 2
    assert arena.is_leaving
    for _ in range(8):
        arena.release_one()
    assert (arena.is_leaving, arena.held_bytes, pin.num_unpinned) == (False, 8 * PAGE, 8)


def test_what_breaks_off_between_two_pieces_takes_none() -> None:
    class Interrupted(FakePin):
        def __call__(self, buffer: torch.Tensor) -> Callable[[], None]:
            if self.pinned:
                raise KeyboardInterrupt
            return super().__call__(buffer)

    arena = make_arena(8, pin=Interrupted(), largest_pages=4)
    with pytest.raises(KeyboardInterrupt):
        arena.allocate(8 * PAGE)
    arena.trim(0)
    assert (arena.used_bytes, arena.held_bytes) == (0, 0)


def test_nothing_is_pinned_for_what_does_not_fit_anyway() -> None:
    pin = FakePin()
    arena = make_arena(100, pin=pin, largest_pages=4)
    arena.allocate(PAGE)
    num_pinned = len(pin.pinned)
    with pytest.raises(BudgetError):
        arena.allocate(101 * PAGE)
    assert (len(pin.pinned), pin.num_unpinned) == (num_pinned, 0)


def test_close_unpins_everything_whatever_is_in_use() -> None:
    pin = FakePin()
    arena = make_arena(32, pin=pin)
    copy = FakeCopy()
    slots = [arena.allocate(4 * PAGE) for _ in range(3)]
    arena.free(slots[0], after=[copy])
    arena.close()
    arena.close()
    assert (pin.pinned, pin.num_unpinned, arena.held_bytes, copy.num_waits) == ([], 3, 0, 1)


def test_the_next_owner_follows_the_copies_of_the_last() -> None:
    arena = make_arena(4)
    written, read = FakeCopy(), FakeCopy()
    first, second = arena.allocate(2 * PAGE), arena.allocate(2 * PAGE)
    place = only(first).data_ptr()
    arena.free(first, after=[written, read])
    part = arena.allocate(PAGE)
    assert only(part).data_ptr() == place
    assert part.after == [written, read]
    rest = arena.allocate(PAGE)
    assert rest.after == [written, read], "each part of it follows them"
    arena.free(part, after=[])
    written.ended = True
    assert arena.allocate(PAGE).after == [read], "what has ended is forgotten"
    arena.free(second, after=[])
    assert arena.allocate(2 * PAGE).after == [], "its memory was another's"


def test_copies_are_handed_on_past_an_owner_who_came_between() -> None:
    """The second owner's own copies follow the first's, but it may be freed before any of them has ended."""
    arena = make_arena(2, segment_pages=2)
    first, second = FakeCopy(), FakeCopy()
    arena.free(arena.allocate(2 * PAGE), after=[first])
    slot = arena.allocate(PAGE)
    arena.free(slot, after=[second])
    assert set(arena.allocate(2 * PAGE).after) == {first, second}


def test_copies_that_go_on_are_listed_once_however_often_their_memory_is_given_up() -> None:
    arena = make_arena(2, segment_pages=2)
    copies = [FakeCopy() for _ in range(18)]
    for number, copy in enumerate(copies):
        arena.free(arena.allocate((1 + number % 2) * PAGE), after=[copy])
    after = arena.allocate(PAGE).after
    assert len(after) == len(set(after)) <= len(copies)


def test_a_slot_is_the_next_one_of_just_its_size() -> None:
    arena = make_arena(4)
    first, second = arena.allocate(PAGE), arena.allocate(PAGE)
    places, copy = [only(first).data_ptr(), only(second).data_ptr()], FakeCopy()
    arena.free(second, after=[copy])
    arena.free(first, after=[])
    assert arena.used_bytes == 0
    again = [arena.allocate(PAGE) for _ in range(2)]
    assert [only(one).data_ptr() for one in again] == places[::-1], "the first freed first"
    assert [one.after for one in again] == [[copy], []]
    assert arena.used_bytes == 2 * PAGE
    for one in again:
        arena.free(one, after=[])
    assert arena.allocate(4 * PAGE).nbytes == 4 * PAGE, "all of it is there for another size"


def test_ended_copies_do_not_pile_up() -> None:
    arena = make_arena(4)
    for _ in range(100):
        copy = FakeCopy()
        slot = arena.allocate(PAGE)
        arena.free(slot, after=[copy])
        copy.ended = True
    slot = arena.allocate(PAGE)
    assert slot.after == []
    ((segment, start, nbytes),) = slot.extents
    assert (start, nbytes) == (0, PAGE)
    assert len(segment.busy) < 10


def test_scattered_room_is_room_once_the_arena_cannot_grow() -> None:
    arena = make_arena(8)
    slots = [arena.allocate(PAGE) for _ in range(8)]
    for index, slot in enumerate(slots):
        only(slot).fill_(index)
        if index % 2 == 0:
            arena.free(slot, after=[])
    scattered = arena.allocate(4 * PAGE - 5)
    assert [piece.nbytes for piece in scattered.pieces] == [PAGE, PAGE, PAGE, PAGE - 5]
    assert (scattered.nbytes, pages(scattered)) == (4 * PAGE - 5, 4)
    assert arena.used_bytes == arena.held_bytes == 8 * PAGE
    for piece in scattered.pieces:
        piece.fill_(0xEE)
    for index in range(1, 8, 2):
        assert set(only(slots[index]).tolist()) == {index}
    with pytest.raises(BudgetError):
        arena.allocate(1)
    arena.free(scattered, after=[])
    assert arena.used_bytes == 4 * PAGE
    for index in range(1, 8, 2):
        arena.free(slots[index], after=[])
    assert [only(arena.allocate(4 * PAGE)).nbytes for _ in range(2)] == [4 * PAGE] * 2, "all of it has joined again"


def test_an_arena_that_can_grow_does_so_before_it_scatters() -> None:
    arena = make_arena(16)
    slots = [arena.allocate(PAGE) for _ in range(4)]
    for slot in slots[::2]:
        arena.free(slot, after=[])
    assert len(arena.allocate(2 * PAGE).pieces) == 1
    assert arena.held_bytes == 8 * PAGE


def test_every_piece_follows_the_copies_of_its_last_owner() -> None:
    arena = make_arena(8)
    copies = [FakeCopy() for _ in range(8)]
    slots = [arena.allocate(PAGE) for _ in range(8)]
    for slot, copy in list(zip(slots, copies, strict=True))[::2]:
        arena.free(slot, after=[copy])
    copies[2].ended = True
    scattered = arena.allocate(4 * PAGE)
    assert len(scattered.pieces) == 4
    assert len(scattered.after) == 3
    assert set(scattered.after) == {copies[0], copies[4], copies[6]}
    following = FakeCopy()
    arena.free(scattered, after=[following])
    assert set(arena.allocate(PAGE).after) & {following} == {following}, "and hands its own on, wherever it lay"


@pytest.mark.parametrize(("sizes", "freed", "wanted"), [((4, 2), 1, 4), ((3, 4), 1, 5), ((1, 4), 1, 7)])
def test_room_that_is_partly_free_and_partly_not_taken_yet_is_room(
    sizes: tuple[int, ...], freed: int, wanted: int
) -> None:
    """The free room alone is too little, and so is a new segment alone; together they are what the budget leaves."""
    arena = make_arena(8)
    slots = [arena.allocate(size * PAGE) for size in sizes]
    arena.free(slots[freed], after=[])
    assert arena.used_bytes + wanted * PAGE <= arena.capacity_bytes
    slot = arena.allocate(wanted * PAGE)
    assert pages(slot) == wanted
    assert arena.held_bytes <= arena.capacity_bytes


@pytest.mark.parametrize("capacity_pages", [0, 1, 8])
def test_nothing_takes_nothing(capacity_pages: int) -> None:
    arena = make_arena(capacity_pages)
    for _ in range(2):
        empty = arena.allocate(0)
        assert (empty.nbytes, empty.after, arena.used_bytes) == (0, [], 0)
        if capacity_pages:
            arena.allocate(PAGE)
            assert arena.allocate(0).nbytes == 0, "even where it is full"
        arena.free(empty, after=[])
        if capacity_pages:
            assert arena.used_bytes == PAGE
        arena.close()
        arena = make_arena(capacity_pages)


def test_what_nobody_closed_is_unpinned_when_it_is_collected() -> None:
    pin = FakePin()
    arena = make_arena(32, pin=pin)
    slots = [arena.allocate(4 * PAGE) for _ in range(2)]
    assert (len(pin.pinned), pin.num_unpinned) == (2, 0)
    del arena
    gc.collect()
    assert pin.num_unpinned == 0, "a slot keeps its segment pinned: a copy may be under way"
    del slots[0]
    gc.collect()
    assert (len(pin.pinned), pin.num_unpinned) == (1, 1)
    slots.clear()
    gc.collect()
    assert (pin.pinned, pin.num_unpinned) == ([], 2)


def test_a_closed_arena_unpins_once() -> None:
    pin = FakePin()
    arena = make_arena(8, pin=pin)
    slot = arena.allocate(PAGE)
    arena.close()
    del arena, slot
    gc.collect()
    assert (pin.pinned, pin.num_unpinned) == ([], 1)


def test_memory_goes_back_only_after_it_was_unpinned() -> None:
    """The view that pinning was given is alive until then, whoever else has let go."""
    alive: list[bool] = []
    seen: list[weakref.ref[torch.Tensor]] = []

    def pin(buffer: torch.Tensor) -> Callable[[], None]:
        seen.append(weakref.ref(buffer))

        def unpin() -> None:
            alive.append(buffer.nbytes == 4 * PAGE and int(buffer.sum()) == 0)

        return unpin

    arena = make_arena(8, pin=pin)
    arena.allocate(PAGE)
    del arena
    gc.collect()
    assert alive == [True]
    assert seen[0]() is None, "and no longer"


def test_pageable_memory_is_collected_likewise() -> None:
    arena = make_arena(8)
    memory = weakref.ref(arena.allocate(PAGE).extents[0][0])
    assert memory() is not None
    del arena
    gc.collect()
    assert memory() is None


def test_many_threads_never_share_memory_and_the_count_stays_right() -> None:
    pin = FakePin()
    arena = make_arena(24, pin=pin, segment_pages=3)
    start = threading.Barrier(8)

    def work(seed: int) -> None:
        rng = random.Random(seed)
        start.wait()
        for round_ in range(60):
            try:
                slot = arena.allocate(rng.choice((0, 1, PAGE, 2 * PAGE + 1, 3 * PAGE)))
            except BudgetError:
                continue
            mark = (seed * 31 + round_) % 256
            for piece in slot.pieces:
                piece.fill_(mark)
            if round_ % 7 == 0:
                arena.trim(rng.randint(0, 24) * PAGE, one_by_one=round_ % 2 == 0)
            arena.release_one()
            assert all(bool((piece == mark).all()) for piece in slot.pieces)
            assert arena.used_bytes <= arena.capacity_bytes
            arena.free(slot, after=[])

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert arena.used_bytes == 0
    assert arena.peak_bytes <= 24 * PAGE
    assert sum(nbytes for _, nbytes in pin.pinned) == arena.held_bytes <= 24 * PAGE
    arena.close()
    assert pin.pinned == []


@settings(max_examples=100, deadline=None)
@given(rng=st.randoms(use_true_random=False))
def test_any_calls_keep_to_the_budget_and_never_hand_out_memory_twice(rng: random.Random) -> None:
    """And what the sum has room for always fits."""
    pin = FakePin()
    capacity = rng.randint(1, 24)
    largest = rng.choice((3, 4, 1024))
    arena = make_arena(capacity, pin=pin, segment_pages=rng.randint(1, 6), largest_pages=largest)
    held: list[tuple[Slot, int]] = []
    used = peak = 0
    for mark in range(rng.randint(1, 40)):
        what = rng.choice(("allocate", "allocate", "free", "trim", "release"))
        if what == "allocate":
            nbytes = rng.choice((0, 1, PAGE, PAGE + 1, 3 * PAGE, 7 * PAGE - 1))
            if used + -(-nbytes // PAGE) * PAGE > capacity * PAGE:
                with pytest.raises(BudgetError):
                    arena.allocate(nbytes)
            else:
                slot = arena.allocate(nbytes)
                assert slot.nbytes == nbytes
                for piece in slot.pieces:
                    piece.fill_(mark)
                held.append((slot, mark))
        elif what == "free" and held:
            slot, _ = held.pop(rng.randrange(len(held)))
            arena.free(slot, after=[])
        elif what == "trim":
            arena.trim(rng.randint(0, capacity) * PAGE, one_by_one=rng.choice((False, True)))
        elif what == "release":
            arena.release_one()
        used = sum(pages(slot) * PAGE for slot, _ in held)
        peak = max(peak, used)
        assert (arena.used_bytes, arena.peak_bytes) == (used, peak)
        assert used <= arena.held_bytes <= capacity * PAGE
        assert sum(nbytes for _, nbytes in pin.pinned) == arena.held_bytes
        assert all(nbytes <= largest * PAGE for _, nbytes in pin.pinned)
        for slot, mark in held:
            assert all(bool((piece == mark).all()) for piece in slot.pieces)
    arena.close()
    assert pin.pinned == []
