"""The collector runs less often within steps, and as before outside of them."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from torchstorm.offload.session import Session
from torchstorm.offload.step import garbage
from torchstorm.offload.step.garbage import rare_collections


@pytest.fixture(autouse=True)
def _thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def test_a_step_collects_rarely_and_leaves_the_thresholds_as_they_were() -> None:
    model = nn.Linear(4, 4)
    with Session(model, ram="1MiB") as session:
        with session.step():
            assert gc.get_threshold() == (50_000, 10, 10)
            model(torch.ones(2, 4)).sum().backward()
        assert gc.get_threshold() == (700, 10, 10)
        with pytest.raises(ZeroDivisionError), session.step():
            _ = 1 / 0
        assert gc.get_threshold() == (700, 10, 10)


def test_garbage_of_a_long_step_is_still_found() -> None:
    collections = []
    gc.callbacks.append(lambda phase, info: collections.append(phase))
    try:
        with rare_collections():
            kept = [[] for _ in range(120_000)]
    finally:
        gc.callbacks.pop()
    assert len(kept) == 120_000
    assert 2 <= collections.count("start") <= 4


def test_two_steps_at_once_restore_what_was_before_the_first() -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with rare_collections():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with rare_collections():
        thread.start()
        inside.wait()
    assert gc.get_threshold() == (50_000, 10, 10)
    leave.set()
    thread.join()
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("asked", [(0, 10, 10), (1_000_000, 5, 5)])
def test_what_the_user_set_is_kept_where_it_collects_less_often(asked: tuple[int, int, int]) -> None:
    gc.set_threshold(*asked)
    with rare_collections():
        assert gc.get_threshold() == asked
    assert gc.get_threshold() == asked


@pytest.mark.parametrize(("is_enabled", "is_large"), [(True, True), (True, False), (False, True)])
def test_the_first_plan_of_a_large_step_is_collected_after_at_once_unless_the_user_has_it_off(
    is_enabled: bool, is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_large:
        monkeypatch.setattr(garbage, "MANY_MOMENTS", 1)
    generations: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            generations.append(info["generation"])

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    gc.callbacks.append(note)
    if not is_enabled:
        gc.disable()
    try:
        with Session(model, ram="1MiB") as session:
            seen = []
            for _ in range(3):
                generations.clear()
                with session.step():
                    model(torch.ones(2, 4)).sum().backward()
                seen.append(generations.count(2))
            assert session.report().num_planned > 0
    finally:
        gc.enable()
        gc.callbacks.remove(note)
    assert seen[0] == (is_enabled and is_large)
    assert sum(seen[1:]) == 0
