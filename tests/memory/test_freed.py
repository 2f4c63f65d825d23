"""Freed memory is given back where the process holds more than the budget allows, and rarely, as that costs time."""

from __future__ import annotations

import ctypes
import threading
import time

import pytest
import torch

from torchstorm.memory import freed
from torchstorm.memory.freed import FreedMemory, anonymous_bytes, freed_memory

MIB = 2**20
BUDGET = 100 * MIB


class Process:
    """What a process holds, and a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held, self.free, self.now, self.num_times = 500 * MIB, 0, 50.0, 0
        monkeypatch.setattr(time, "thread_time", lambda: self.now)
        self.freed = FreedMemory(BUDGET, held_bytes=lambda: self.held, give_back=self.give_back)

    def give_back(self) -> None:
        self.num_times += 1
        self.now += 0.01
        self.held, self.free = self.held - self.free, 0

    def grow(self, nbytes: int) -> None:
        self.held += nbytes
        self.free += nbytes


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    return Process(monkeypatch)


def test_what_is_beyond_the_budget_and_a_tenth_is_given_back(process: Process) -> None:
    process.grow(110 * MIB)
    process.freed.add(20 * MIB, used_bytes=0)
    assert process.num_times == 0
    process.grow(1 * MIB)
    process.freed.add(20 * MIB, used_bytes=0)
    assert process.num_times == 1
    assert process.held == 500 * MIB


def test_after_giving_back_it_rests_until_that_was_a_small_share_of_the_time(process: Process) -> None:
    for _ in range(1000):
        process.now += 0.01
        process.grow(120 * MIB)
        process.freed.add(20 * MIB, used_bytes=0)
    # 10 s of work; each time takes 10 ms, and taking the memory again is reckoned at 50 ms more: 2 % are three times,
    # and the first one is free.
    assert process.num_times == 4


def test_what_the_program_holds_for_other_things_is_told_apart_after_one_time(process: Process) -> None:
    process.held += 300 * MIB  # gradients, say: nothing of it is free
    process.freed.add(20 * MIB, used_bytes=40 * MIB)
    assert process.num_times == 1
    process.now += 1000
    process.freed.add(20 * MIB, used_bytes=40 * MIB)
    assert process.num_times == 1


def test_small_amounts_and_other_threads_are_not_looked_at(process: Process) -> None:
    process.grow(300 * MIB)
    process.freed.add(4 * MIB, used_bytes=0)
    other = threading.Thread(target=process.freed.add, args=(50 * MIB,), kwargs={"used_bytes": 0})
    other.start()
    other.join()
    assert process.num_times == 0
    process.freed.add(1 * MIB, used_bytes=0)
    assert process.num_times == 1


def test_bytes_in_use_beyond_the_budget_are_not_taken_for_freed_ones(process: Process) -> None:
    process.held += 150 * MIB
    process.freed.add(20 * MIB, used_bytes=150 * MIB)
    assert process.num_times == 0


def test_the_system_tells_what_the_process_holds() -> None:
    if not anonymous_bytes():
        pytest.skip("only Linux tells it")
    before = anonymous_bytes()
    tensor = torch.ones(16 * MIB)
    assert anonymous_bytes() - before > 60 * MIB
    del tensor


def test_without_malloc_trim_nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert freed_memory(BUDGET) is None


def test_where_the_system_does_not_tell_nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freed, "anonymous_bytes", lambda: 0)
    assert freed_memory(BUDGET) is None
