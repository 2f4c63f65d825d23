"""Large tensors of a CPU are in memory of our own while a Session has a budget, and what is free there goes back."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torchstorm.offload.native import memory
from torchstorm.offload.native.library import Library, library
from torchstorm.offload.session import Session

MIB = 2**20
PAGE = 4096


@pytest.fixture(autouse=True)
def nobody() -> Iterator[None]:
    """No Session that another test has left open has such memory."""
    found, others = library(), list(memory._holders)
    assert found is not None
    for one in others:
        memory.let_go(one)
    yield
    for one in others:
        memory.begin_step(one)


@pytest.fixture
def own() -> Iterator[Library]:
    """The library, whose memory PyTorch uses."""
    found = library()
    assert found is not None
    holder = Holder()
    memory.begin_step(holder)
    yield found
    memory.let_go(holder)


class Holder:
    """Stands for a Session."""


def large(mib: float = 2) -> torch.Tensor:
    return torch.empty(int(mib * MIB), dtype=torch.uint8)


def held_bytes(found: Library) -> int:
    return found.own_memory_figures()[1]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(MIB, 9 * MIB), st.integers(0, 7)), min_size=1, max_size=60))
def test_no_two_tensors_share_memory_and_all_of_it_is_given_back(sizes: list[tuple[int, int]]) -> None:
    found, holder = library(), Holder()
    assert found is not None
    memory.begin_step(holder)
    before, _ = found.own_memory_figures()
    kept: dict[int, tuple[torch.Tensor, int]] = {}
    for number, (nbytes, place) in enumerate(sizes):
        if place in kept:  # what was there is freed after the new one has come
            tensor, value = kept[place]
            assert tensor[0] == tensor[-1] == tensor[tensor.numel() // 2] == value
        tensor = torch.empty(nbytes, dtype=torch.uint8)
        assert tensor.data_ptr() % PAGE == 0
        kept[place] = tensor.fill_(number % 251), number % 251
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor, _ in kept.values())
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    for tensor, value in kept.values():
        assert tensor[0] == tensor[-1] == value
    in_use, held = found.own_memory_figures()
    assert in_use - before == sum(-(-tensor.nbytes // PAGE) * PAGE for tensor, _ in kept.values())
    assert held >= in_use
    memory.let_go(holder)
    tensor, value = next(iter(kept.values()))
    assert tensor[0] == tensor[-1] == value, "what is still in use stays"
    kept.clear()
    del tensor
    assert found.own_memory_figures()[0] == before


def test_what_is_free_beside_the_peak_of_the_last_steps_goes_back_to_the_system(own: Library) -> None:
    holder = Holder()
    others, _ = own.own_memory_figures()  # of other tests, which may divide chunks of 2 MiB
    many = [large(8) for _ in range(16)]
    assert held_bytes(own) >= 128 * MIB
    many.clear()
    assert held_bytes(own) >= 128 * MIB, "the next step may need it"
    for _ in range(60):
        memory.begin_step(holder)
        large(8)
    assert held_bytes(own) <= 32 * MIB + 2 * others
    memory.let_go(holder)


def test_sizes_that_change_from_step_to_step_leave_no_more_than_a_part_of_the_peak_behind(own: Library) -> None:
    generator, holder = torch.Generator().manual_seed(0), Holder()
    most, others = 0, own.own_memory_figures()[0]
    for _ in range(200):
        memory.begin_step(holder)
        length = int(torch.randint(100, 257, (1,), generator=generator))
        saved, small = list[torch.Tensor](), list[torch.Tensor]()
        for layer in range(12):
            saved += [large(length / 64), large(length / 48 + layer % 3)]
            small += [torch.empty(1000) for _ in range(20)]
            large(length / 24)
        most = max(most, own.own_memory_figures()[0])
        while saved:
            large(length / 24)
            del saved[-1]
    assert held_bytes(own) <= 1.25 * most + 16 * MIB + others


def test_small_tensors_and_those_of_other_times_are_the_c_librarys() -> None:
    found = library()
    assert found is not None
    before, _ = found.own_memory_figures()
    apart = large()
    assert memory.empty(2 * MIB) is None
    holder, other = Holder(), Holder()
    memory.begin_step(holder)
    memory.begin_step(other)
    small = torch.empty(1000)
    assert memory.empty(1000) is None
    assert found.own_memory_figures()[0] == before
    memory.let_go(holder)
    assert memory.empty(2 * MIB) is not None, "another Session has it"
    del apart, small
    mine = large()
    memory.let_go(other)
    assert memory.empty(2 * MIB) is None
    mine.untyped_storage().resize_(4 * MIB)
    assert mine.untyped_storage().nbytes() == 4 * MIB
    del mine
    assert found.own_memory_figures()[0] == before


def test_a_session_that_is_gone_has_it_no_more() -> None:
    holder = Holder()
    memory.begin_step(holder)
    assert memory.empty(2 * MIB) is not None
    del holder
    assert memory.empty(2 * MIB) is None


def test_it_is_not_filled_where_pytorch_fills_new_tensors(own: Library) -> None:
    before = large(4).fill_(7)
    address = before.data_ptr()
    del before
    torch.use_deterministic_algorithms(True)
    try:
        found = memory.empty(4 * MIB)
    finally:
        torch.use_deterministic_algorithms(False)
    assert found is not None
    assert found.data_ptr() == address, "the lowest place that is free"
    assert found[0] == found[-1] == 7
    assert (found.shape, found.dtype, found.untyped_storage().nbytes()) == ((4 * MIB,), torch.uint8, 4 * MIB)


def test_threads_allocate_and_free_at_once(own: Library) -> None:
    wrong: list[int] = []

    def work(value: int) -> None:
        for _ in range(50):
            tensors = [large().fill_(value) for _ in range(4)]
            wrong.extend(value for one in tensors if one[0] != value or one[-1] != value)

    before, _ = own.own_memory_figures()
    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert wrong == []
    assert own.own_memory_figures()[0] == before


@pytest.mark.no_cover
def test_a_forked_process_goes_on_with_it(own: Library) -> None:
    tensor, stop = large().fill_(3), threading.Event()

    def work() -> None:
        while not stop.is_set():
            large()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(20):
            child = os.fork()
            if child == 0:  # few elements: OpenMP's threads are not there
                signal.alarm(20)
                mine = large()[-10:].fill_(5)
                os._exit(0 if bool((mine == 5).all()) and tensor[-1] == 3 else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        thread.join()


def test_the_profiler_sees_it(own: Library) -> None:
    with torch.profiler.profile(profile_memory=True) as profiler:
        tensor = large(3)
    (event,) = [one for one in profiler.key_averages() if one.key == "aten::empty"]
    assert event.cpu_memory_usage == 3 * MIB
    assert tensor.nbytes == 3 * MIB


def test_what_a_library_within_pytorch_took_before_or_meanwhile_is_let_go_of_at_any_time() -> None:
    found = library()
    assert found is not None
    before, _ = found.own_memory_figures()
    gelu, x = nn.GELU(), torch.randn(64, 3 * MIB // 64)  # by oneDNN, which allocates and frees by bare addresses
    expected = gelu(x)
    holder = Holder()
    memory.begin_step(holder)
    within = gelu(x)
    memory.let_go(holder)
    assert torch.equal(gelu(x), expected)
    assert torch.equal(within, expected)
    del within
    assert found.own_memory_figures()[0] == before


def test_a_session_with_a_budget_has_it_and_one_without_has_not() -> None:
    found = library()
    assert found is not None
    before = found.own_memory_figures()[0]
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    x, seen = torch.randn(1024, 512), list[int]()
    for one in model:
        one.register_forward_hook(lambda _, __, out: seen.append(found.own_memory_figures()[0] - before))
    with Session(model, unlimited=True) as session, session.step():
        model(x).sum().backward()
    assert seen == [0] * 4
    seen.clear()
    with Session(model, ram="64MiB") as session:
        for _ in range(3):
            with session.step():
                model(x).sum().backward()
    assert min(seen) >= x.nbytes
    model.zero_grad()
    assert found.own_memory_figures()[0] == before
