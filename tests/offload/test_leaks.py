"""Nothing grows, whatever the steps do; and nothing is left behind when a Session goes, in whatever way it goes."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import forked
from offload.steps import saved_bytes
from torchstorm.offload import session as session_module
from torchstorm.offload.replan.plans import Plans
from torchstorm.offload.session import Session
from torchstorm.offload.step.kept import KeptTensors

WIDTH, ROWS = 32, 512
MIB = 2**20


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Models this small only lose by more; the root conftest puts it back."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _nothing_of_other_tests() -> None:
    """Sessions that other tests left to the collector end now, and their threads before anything is counted."""
    gc.collect()
    stop = time.monotonic() + 5
    while leaving := [one for one in _own_threads() if one not in _lasting]:
        if time.monotonic() > stop:  # of a Session that something still refers to: it is waited for once
            _lasting.update(leaving)
        time.sleep(0.02)


_lasting: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def _own_threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name.startswith("torchstorm")]


def mlp() -> nn.Sequential:
    layers = [(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(4)]
    return nn.Sequential(*(layer for group in layers for layer in group))


def forward(model: nn.Module, rows: int = ROWS) -> torch.Tensor:
    return model(torch.randn(rows, WIDTH)).square().mean()


def plain_step(model: nn.Module, index: int) -> torch.Tensor:
    loss = forward(model)
    loss.backward()
    return loss


@dataclass
class Held:
    """What a process and a Session hold at one moment."""

    resident_bytes: int
    disk_bytes: int
    num_records: int
    num_threads: int
    num_fds: int
    num_spill_directories: int
    anonymous_bytes: int


def anonymous_bytes() -> int:
    found = re.search(r"^RssAnon:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def held(session: Session, spill: Path) -> Held:
    gc.collect()
    saved, residency = session._shared.saved, session._shared.saved.residency
    records = (
        saved._let_go._dropped,
        saved._let_go._awaited,
        saved._run.inputs,
        saved._run.numbered,
        residency.kept.by_ordinal,
    )
    parcels = (residency.resident, residency.away, residency.known._at, residency.absent, residency.kept.released)
    return Held(
        resident_bytes=residency.resident_bytes - residency.staging_bytes,
        disk_bytes=session._shared.tiers.slow["disk"].used_bytes,
        num_records=sum(map(len, records + parcels)),
        num_threads=threading.active_count(),
        num_fds=len(os.listdir("/proc/self/fd")),
        num_spill_directories=len(list(spill.iterdir())),
        anonymous_bytes=anonymous_bytes(),
    )


def session_on(model: nn.Module, spill: Path, *, share: float = 0.4) -> Session:
    return Session(model, ram=int(saved_bytes(mlp, plain_step) * share), disk=str(spill))


def run(session: Session, model: nn.Module, index: int) -> None:
    for parameter in model.parameters():
        parameter.grad = None
    with session.step():
        plain_step(model, index)


class OnPurpose(Exception):
    pass


def raise_in_backward(gradient: torch.Tensor) -> torch.Tensor:
    raise OnPurpose


def broken_step(session: Session, model: nn.Sequential, where: str) -> None:
    with contextlib.suppress(OnPurpose), session.step():
        x = model[:6](torch.randn(ROWS, WIDTH))
        if where == "forward":
            raise OnPurpose
        x.register_hook(raise_in_backward)
        model[6:](x).mean().backward()


def dropped_graph_step(session: Session, model: nn.Module) -> None:
    with session.step():
        forward(model)  # and never its backward
        forward(model).backward()


def dropped_later_step(session: Session, model: nn.Module, graphs: list[torch.Tensor]) -> None:
    with session.step():
        graphs.append(forward(model))
    del graphs[:-1]


def retained_step(session: Session, model: nn.Module) -> None:
    with session.step():
        loss = forward(model)
        loss.backward(retain_graph=True)
        del loss


def changing_step(session: Session, model: nn.Module, index: int) -> None:
    with session.step():
        forward(model, ROWS - 8 * (index % 3)).backward()


@pytest.mark.no_cover
def test_sixty_steps_leave_everything_as_it_was(tmp_path: Path) -> None:
    model = mlp()
    with session_on(model, tmp_path) as session:
        for index in range(20):
            run(session, model, index)
        before = held(session, tmp_path)
        for index in range(60):
            run(session, model, index)
        after = held(session, tmp_path)
    assert after.resident_bytes == before.resident_bytes == 0
    assert after.disk_bytes == before.disk_bytes == 0
    assert after.num_records == before.num_records == 0
    assert after.num_threads == before.num_threads
    assert after.num_fds == before.num_fds
    assert after.num_spill_directories == before.num_spill_directories == 1
    # A step saves more than 1 MiB and moves a good part of it: what leaked even once a step, or a fifth of every
    # step's bytes, would be far above this, and the noise of malloc's arenas is below it.
    assert saved_bytes(mlp, plain_step) > MIB
    assert after.anonymous_bytes - before.anonymous_bytes < 8 * MIB


@pytest.mark.no_cover
@pytest.mark.parametrize(
    "kind", ["forward raises", "backward raises", "graph dropped", "graph dropped later", "graph retained", "lengths"]
)
def test_odd_steps_leave_nothing_either(kind: str, tmp_path: Path) -> None:
    model = mlp()
    graphs: list[torch.Tensor] = []

    def odd(index: int) -> None:
        if kind == "forward raises":
            broken_step(session, model, "forward")
        elif kind == "backward raises":
            broken_step(session, model, "backward")
        elif kind == "graph dropped":
            dropped_graph_step(session, model)
        elif kind == "graph dropped later":
            dropped_later_step(session, model, graphs)
        elif kind == "graph retained":
            retained_step(session, model)
        else:
            changing_step(session, model, index)

    # Two graphs at once need more than one does.
    with session_on(model, tmp_path, share=0.9) as session:
        snapshots = []
        for turns in (20, 20):  # what malloc keeps for itself settles in the first ones
            for index in range(turns):
                odd(index)
                run(session, model, index)
            graphs.clear()
            snapshots.append(held(session, tmp_path))
        before, after = snapshots
    assert after.resident_bytes == before.resident_bytes == 0
    assert after.disk_bytes == before.disk_bytes == 0
    assert after.num_records == before.num_records == 0
    assert after.num_threads == before.num_threads
    assert after.num_fds == before.num_fds
    assert after.num_spill_directories == 1
    assert after.anonymous_bytes - before.anonymous_bytes < 8 * MIB


@pytest.mark.no_cover
def test_new_shapes_for_ever_do_not_keep_a_plan_each_for_ever(tmp_path: Path) -> None:
    """Every new length is measured and planned anew; thirty of them must not hold thirty steps' memory or files."""
    model = mlp()
    with session_on(model, tmp_path, share=0.9) as session:
        before = held(session, tmp_path)
        for index in range(30):
            with session.step():
                forward(model, ROWS - index).backward()
        after = held(session, tmp_path)
    assert after.resident_bytes == before.resident_bytes == 0
    assert after.disk_bytes == 0
    assert after.num_fds <= before.num_fds + 1
    assert after.num_spill_directories == 1


@pytest.mark.no_cover
def test_closing_removes_files_threads_and_open_files(tmp_path: Path) -> None:
    model = mlp()
    run_first = session_on(model, tmp_path)
    run(run_first, model, 0)
    run_first.close()
    threads, fds = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        session = session_on(model, tmp_path)
        run(session, model, 0)
        session.close()
        session.close()
    assert list(tmp_path.iterdir()) == []
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == fds


def test_a_session_that_is_dropped_without_closing_takes_its_spill_files_along(tmp_path: Path) -> None:
    model = mlp()
    threads, fds = threading.active_count(), len(os.listdir("/proc/self/fd"))
    session = session_on(model, tmp_path)
    for index in range(3):
        run(session, model, index)
    assert len(list(tmp_path.iterdir())) == 1
    gone = weakref.ref(session)
    del session
    gc.collect()
    assert gone() is None
    assert list(tmp_path.iterdir()) == []
    deadline = time.monotonic() + 5
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)  # idle threads of a pool end a moment after it
    assert threading.active_count() <= threads  # those of tests before may have ended meanwhile
    assert len(os.listdir("/proc/self/fd")) == fds


def test_a_graph_outlives_its_session_without_harm(tmp_path: Path) -> None:
    model = mlp()
    session = session_on(model, tmp_path)
    run(session, model, 0)
    with session.step():
        loss = forward(model)
    session.close()
    del session, loss  # lets go of tensors in a tier that is closed
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_a_dropped_session_lives_on_while_a_graph_needs_it(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model, x = mlp().eval(), torch.randn(ROWS, WIDTH)
    model(x).square().mean().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    session = session_on(model, tmp_path)
    run(session, model, 0)
    for parameter in model.parameters():
        parameter.grad = None
    with session.step():
        loss = model(x).square().mean()
    del session
    gc.collect()
    loss.backward()
    found = [parameter.grad for parameter in model.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


@pytest.mark.no_cover
def test_graphs_let_go_by_another_thread_give_their_room_back(tmp_path: Path) -> None:
    model = mlp()
    with session_on(model, tmp_path, share=0.9) as session:
        run(session, model, 0)
        for index in range(20):
            graphs = []
            with session.step():
                graphs.append(forward(model))
                # It drops the graph while this thread packs and unpacks another one.
                other = threading.Thread(target=graphs.clear)
                other.start()
                forward(model).backward()
            other.join()
            run(session, model, index)
        now = held(session, tmp_path)
    assert now.resident_bytes == 0
    assert now.disk_bytes == 0


def test_room_that_another_thread_gives_back_while_it_is_looked_for_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, graphs, num_dropped = mlp(), list[torch.Tensor](), 0
    settle = KeptTensors.settle

    def settle_before_they_are_dropped(self: KeptTensors) -> None:
        nonlocal num_dropped
        settle(self)
        if graphs and sys._getframe(1).f_code is KeptTensors.give_up.__code__:
            graphs.clear()
            num_dropped += 1

    with session_on(model, tmp_path, share=0.9) as session:
        run(session, model, 0)
        monkeypatch.setattr(KeptTensors, "settle", settle_before_they_are_dropped)
        for index in range(3):
            with session.step():
                graphs.append(forward(model))
                forward(model).backward()
            run(session, model, index)
        now = held(session, tmp_path)
    assert num_dropped
    assert now.resident_bytes == 0


KILLED = """
import sys, time
import torch
from torchstorm import Session
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)), torch.nn.Tanh())
session = Session(model, ram="1.5MiB", disk=sys.argv[1])
with session.step():
    loss = model(torch.randn(2048, 64)).sum()
    print("ready", flush=True)
    time.sleep(60)
"""


def test_what_a_killed_training_left_goes_at_the_next_start(tmp_path: Path) -> None:
    child = forked.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    (left,) = tmp_path.iterdir()
    model = mlp()
    with session_on(model, tmp_path) as session:
        assert left.exists(), "its process was still alive"
        run(session, model, 0)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert any(file.stat().st_size for file in left.iterdir()), "it was killed before it spilled anything"
    with session_on(model, tmp_path) as session:
        assert not left.exists()
        run(session, model, 0)
    assert list(tmp_path.iterdir()) == []


EXITS = """
import os, sys
import torch
from torchstorm import Session
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)), torch.nn.Tanh())
for how in ("ends", "raises", "exits"):
    child = os.fork()
    if not child:
        break
    print(how, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
torch.set_num_threads(1)
session = Session(model, ram="1.5MiB", disk=sys.argv[1])
with session.step():
    loss = model(torch.randn(2048, 64)).sum()
    if how == "raises":
        raise KeyError
    if how == "exits":
        sys.exit(3)
"""


@pytest.mark.no_cover
def test_a_process_that_ends_without_closing_leaves_no_spill_files(tmp_path: Path) -> None:
    done = forked.run([sys.executable, "-c", EXITS, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.stdout.split("\n")[:-1] == ["ends 0", "raises 1", "exits 3"], done.stderr
    assert "Exception ignored" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 5, 6])
def test_a_session_that_ended_with_any_step_needs_no_collector_to_give_its_model_back(
    num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits for the collector is counted as memory of others by the next Session."""
    monkeypatch.setattr(session_module, "Plans", lambda given, _: Plans(given, 4))  # as on a GPU

    def train() -> list[weakref.ref[Any]]:
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        with Session(model, ram="64MiB") as session:
            for _ in range(num_steps):
                with session.step():
                    model(torch.randn(256, 64)).square().mean().backward()
                model.zero_grad()
            return [weakref.ref(model), weakref.ref(session), weakref.ref(session._shared)]

    train()  # what is imported and cached at the first use makes cycles of its own
    gc.collect()
    gc.disable()
    try:
        assert [found() for found in train()] == [None, None, None]
    finally:
        gc.enable()
