"""Settled steps have their copies made by C++, or by Python, on streams whose copies come as late as they may."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from offload.late_copies import CURRENT, LateCopies, Streams
from offload.steps import assert_same, saved_bytes, train
from offload.test_random_networks import ROWS, RandomNetwork, networks, options, step_of
from torchstorm.errors import BudgetError, StorageError
from torchstorm.memory.host import HostTier
from torchstorm.offload.native import library
from torchstorm.offload.replan.planned import Planned
from torchstorm.offload.replan.planner import Planner
from torchstorm.offload.session import Session
from torchstorm.offload.step.clock import Span, Took
from torchstorm.offload.step.residency import Residency
from torchstorm.plan.forecast import DISK

NUM_STEPS = 7  # the first is traced, and the next ones are timed
BY_PYTHON = "put", "get", "free"
COPY = rf"record on {CURRENT};wait on (\d+) for {CURRENT};(wait on \1 for \d+;)*copy \d+ on \1;record on \1;"
"""It follows what the model's stream was given, and an event follows it."""

Count = Callable[[], Counter[str]]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateCopies:
    return LateCopies(monkeypatch)


@pytest.fixture
def by_python(monkeypatch: pytest.MonkeyPatch) -> Count:
    """Returns how often Python's way through the tier was taken since it was last asked."""
    calls = Counter[str]()
    for name in BY_PYTHON:
        function = getattr(HostTier, name)

        def counted(self: HostTier, *args: Any, name: str = name, function: Any = function, **options: Any) -> Any:
            calls[name] += 1
            return function(self, *args, **options)

        monkeypatch.setattr(HostTier, name, counted)

    def count() -> Counter[str]:
        found = calls.copy()
        calls.clear()
        return found

    return count


def layers() -> nn.Module:
    """Each layer saves 1 MiB for its activation, which moves alone."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6)))


def step(model: nn.Module, index: int) -> torch.Tensor:
    loss = model(torch.randn(1024, 256)).square().mean()
    loss.backward()
    return loss


def only_moving(late: LateCopies, ram: int) -> Callable[[nn.Module, torch.optim.Optimizer], Session]:
    return lambda model, optimizer: late.session(model, ram, optimizer=optimizer, recompute=False)


def settled(late: LateCopies) -> tuple[nn.Module, Session]:
    """A model whose steps have followed their plan for a while."""
    model = layers()
    session = late.session(model, saved_bytes(layers, step) // 2, recompute=False)
    for index in range(NUM_STEPS):
        with session.step():
            step(model, index)
    return model, session


@pytest.mark.usefixtures("short_way")
@pytest.mark.parametrize("share", [0.4, 0.7])
def test_what_moves_comes_back_to_the_bit_and_no_step_but_the_first_ones_asks_python(
    share: float, late: LateCopies, by_python: Count
) -> None:
    asked = list[Counter[str]]()

    def noted(model: nn.Module, index: int) -> torch.Tensor:
        asked.append(by_python())
        late.streams.log.clear()
        return step(model, index)

    ram = int(share * saved_bytes(layers, step))
    expected, _ = train(layers, step, None, num_steps=NUM_STEPS)
    found, session = train(layers, noted, only_moving(late, ram), num_steps=NUM_STEPS)
    assert session is not None
    assert_same(expected, found)
    report = session.report()
    plan = session.plan()
    assert report.highest is not None
    assert report.highest.ram_bytes <= ram
    assert plan is not None
    assert plan.num_moved >= 3
    settled = Counter({name: plan.num_moved for name in BY_PYTHON})
    assert asked[-1] == (Counter() if library.library() is not None else settled)
    (tier,) = late.tiers
    assert tier.used_bytes == 0
    if library.library() is not None:  # Python's copies wait for company
        other = re.sub(COPY, "", "".join(f"{one};" for one in late.streams.log))
        assert {one.partition(" for ")[0] for one in other.split(";")} == {f"wait on {CURRENT}", ""}, (
            "only the model waits"
        )
    assert not late.streams.races
    moved = [one for one, to in zip(plan.trace.parcels, plan.placements, strict=True) if to.tier == DISK]
    assert tier.peak_bytes == sum(-(-one.nbytes // 4096) * 4096 for one in moved)
    session.close()


@pytest.mark.usefixtures("short_way")
def test_a_step_that_tells_how_long_it_waited_for_copies_asks_python_for_no_more(
    late: LateCopies, by_python: Count, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Planner, "judge", lambda *_: None)  # whatever its steps take, the plan stays
    model, session = settled(late)
    plan, dropped, noted = session.plan(), list[object](), list[list[tuple[Any, Any]]]()
    drop, note_waits = Residency.drop, Span.note_waits
    monkeypatch.setattr(Planned, "is_to_tell_waits", lambda *_: True)
    monkeypatch.setattr(Residency, "drop", lambda self, parcel: (dropped.append(parcel), drop(self, parcel)))
    monkeypatch.setattr(Span, "note_waits", lambda self: noted.append(note_waits(self)) or noted[-1])
    by_python()
    with session.step():
        step(model, NUM_STEPS)
    assert plan is not None
    (waits,) = noted
    assert len(waits) == plan.num_moved >= 3
    assert all(before <= after for before, after in waits)
    if library.library() is not None:
        assert not dropped
        assert not by_python()
    session.close()


@pytest.mark.usefixtures("short_way")
def test_a_model_that_did_not_wait_for_its_copies_would_be_noticed(late: LateCopies) -> None:
    def hasty(model: nn.Module, index: int) -> torch.Tensor:
        late.streams.ignores_waits = index >= 4
        return step(model, index)

    expected, _ = train(layers, step, None, num_steps=NUM_STEPS)
    found, session = train(layers, hasty, only_moving(late, saved_bytes(layers, step) // 2), num_steps=NUM_STEPS)
    assert session is not None
    with pytest.raises(AssertionError):
        assert_same(expected, found)
    late.streams.forget()
    session.close()


@pytest.mark.usefixtures("short_way")
def test_steps_by_which_a_plan_is_judged_tell_how_long_they_have_waited_for_copies_in_forward(
    late: LateCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    reach, judge, took = late.streams.reach, Planner.judge, list[Took]()

    def slow(point: Any) -> None:
        time.sleep(2e-3)
        reach(point)

    def noted(self: Planner, planned: Planned, one: Took) -> Planned | None:
        took.append(one)
        return judge(self, planned, one)

    monkeypatch.setattr(Planner, "judge", noted)
    _, session = train(layers, step, only_moving(late, saved_bytes(layers, step) // 2), num_steps=NUM_STEPS)
    assert session is not None
    plan, planned = session.plan(), session._shared.plans.in_force
    assert plan is not None
    assert planned is not None
    turn = plan.trace.turn
    num_waits = sum(one.tier == DISK and one.drop < turn for one in plan.placements)
    assert num_waits
    late.streams.reach = slow  # type: ignore[method-assign]
    for times_s in [], [0.1] * 9:
        planned.times_s = list[float](times_s)
        with session.step():
            step(session._shared.model, 0)
        assert session._shared.plans.in_force is planned
    judged, later = took[-2:]
    assert judged.waited_s is not None
    assert 2e-3 * num_waits <= judged.waited_s < judged.forward_s
    assert later.waited_s is None
    assert judged.scaled(2.0).waited_s == 2 * judged.waited_s
    planned.times_s, planned.num_marked = [], 0  # and none of its steps counts, as where sizes are new
    key, half = planned.kind.key, (tuple(one / 2 for one in planned.kind.key[0]), *planned.kind.key[1:])
    assert not planned.is_to_tell_waits(half)
    assert [planned.is_to_tell_waits(key) for _ in range(30)] == [True] * 12 + [False] * 18
    assert session._shared.residency.waits is None
    session.close()


@pytest.mark.usefixtures("short_way")
def test_a_copy_that_fails_is_told_in_the_runtimes_own_words(late: LateCopies) -> None:
    model, session = settled(late)
    late.streams.status = 719
    said = "CUDA error 719 in a copy between host and device: out of luck"
    with pytest.raises(RuntimeError, match=said), session.step():
        step(model, 0)
    late.streams.status = 0
    session.close()


@pytest.mark.usefixtures("short_way")
def test_where_another_thread_has_a_lock_the_step_waits_for_it(late: LateCopies, by_python: Count) -> None:
    """As one does that gives pinned memory back, or queues copies."""
    model, session = settled(late)
    model.zero_grad()
    torch.manual_seed(0)
    with session.step():
        step(model, 0)
    gradients = [one.grad.clone() for one in model.parameters() if one.grad is not None]
    model.zero_grad()
    (tier,) = late.tiers
    assert tier._engine is not None
    for lock in tier.arena.lock, tier._engine._to_host._lock, tier._engine._to_device._lock:
        by_python()
        held, asked = threading.Event(), Counter[str]()

        def hold(lock: Any = lock, held: threading.Event = held, asked: Counter[str] = asked) -> None:
            until_s = time.monotonic() + 10
            with lock:  # until Python waits for it
                held.set()
                while not asked and time.monotonic() < until_s:
                    time.sleep(0.005)
                    asked.update(by_python())

        holder = threading.Thread(target=hold)
        holder.start()
        assert held.wait(10)
        torch.manual_seed(0)
        with session.step():
            step(model, 0)
        holder.join()
        assert asked
        for one, before in zip(model.parameters(), gradients, strict=True):
            assert one.grad is not None
            assert torch.equal(one.grad, before)
        model.zero_grad()
    session.close()


@pytest.mark.usefixtures("short_way")
def test_copies_that_wait_for_company_are_begun_before_those_that_do_not(late: LateCopies, by_python: Count) -> None:
    """Another one of the engine's users has left some to be queued."""
    asked = list[int]()

    def beside(model: nn.Module, index: int) -> torch.Tensor:
        (tier,) = late.tiers
        asked.append(sum(by_python().values()))
        source = torch.full((4096,), index, dtype=torch.uint8)
        handle = tier.put(source)
        loss = step(model, index)
        back = torch.empty(4096, dtype=torch.uint8)
        tier.get(handle, back).wait()
        assert torch.equal(back, source)
        tier.free(handle)
        return loss

    expected, _ = train(layers, step, None, num_steps=NUM_STEPS)
    found, session = train(layers, beside, only_moving(late, saved_bytes(layers, step) // 2), num_steps=NUM_STEPS)
    assert session is not None
    assert_same(expected, found)
    assert not late.streams.races
    assert asked[-1] > 3, "the first copies of the step are not C++'s"
    session.close()


@pytest.mark.usefixtures("short_way")
@pytest.mark.parametrize("share", [0.4, 0.7])
def test_whatever_stream_the_model_runs_on_no_slot_is_written_while_it_is_read(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = LateCopies(monkeypatch, Streams(has_many=True))
    expected, _ = train(layers, step, None, num_steps=30)
    ram = int(share * saved_bytes(layers, step))
    found, session = train(layers, step, only_moving(late, ram), num_steps=30)
    assert session is not None
    assert_same(expected, found)
    assert not late.streams.races
    session.close()


@pytest.mark.usefixtures("short_way")
def test_a_session_that_is_closed_between_forward_and_backward_says_so(late: LateCopies) -> None:
    model, session = settled(late)
    with session.step():
        loss = model(torch.randn(1024, 256)).square().mean()
    session.close()
    with pytest.raises(StorageError, match="closed"):
        loss.backward()


@pytest.mark.usefixtures("short_way")
@pytest.mark.no_cover
@settings(options, max_examples=8)
@given(
    names=networks,
    rows=st.sampled_from(ROWS[1:]),
    ending=st.sampled_from(["once", "twice", "accumulated"]),
    share=st.floats(0.2, 0.9),
    recompute=st.booleans(),
)
def test_a_random_network_whose_copies_come_late_is_exact(
    names: list[str], rows: int, ending: str, share: float, recompute: bool
) -> None:
    torch.set_num_threads(1)

    def make() -> nn.Module:
        return RandomNetwork(names)

    step = step_of(rows, ending)
    budget = int(share * saved_bytes(make, step))
    expected, _ = train(make, step, None, num_steps=6)
    with pytest.MonkeyPatch.context() as patch:
        late = LateCopies(patch)
        try:
            found, session = train(
                make, step, lambda model, _: late.session(model, budget, recompute=recompute), num_steps=6
            )
        except BudgetError:
            return  # not a matter of copies
        assert session is not None
        assert_same(expected, found)
        (tier,) = late.tiers
        assert tier.used_bytes == 0
        assert not late.streams.races
        session.close()
