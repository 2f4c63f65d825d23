"""Sessions in several processes: with gradients that are summed over them (DDP), and on one spill directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import forked
from offload import spilling

TIMEOUT_S = 240  # a machine may be busy, and each process imports torch

# For every case, one training without a Session and one with, in the same process group: gradients, parameters and
# buffers agree to the bit. A small bucket makes DDP send gradients while backward still runs.
DDP = """
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchstorm import Session
from torchstorm.plan import search

search._STEPS = 2  # as `short_search` has it, for another process
store, rank, spill, cases = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4:]
torch.set_num_threads(1)
limit = timedelta(seconds=60)  # where one fails, the others do not wait for ever


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(64, 128), nn.BatchNorm1d(128), nn.Linear(128, 64)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.down(self.dropout(self.norm(self.up(x)).tanh()))


def train(with_session, ram=None):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    options = dict(ram=ram, disk=spill) if recompute == "no" else dict(ram=ram)
    options = options | dict(recompute=recompute == "yes") if ram else dict(unlimited=True)
    session = Session(model, **options) if with_session and made == "before" else None
    wrapped = model
    for index in range(6):
        if index == (2 if made == "before" else 0):  # of the first two steps each process keeps its own gradients
            if index:
                for tensor in [*model.parameters(), *model.buffers()]:
                    dist.broadcast(tensor.data, 0)
            wrapped = DistributedDataParallel(model, bucket_cap_mb=0.02)
            if with_session and made != "before":
                session = Session(model if made == "of the model" else wrapped, **options)
        torch.manual_seed(100 * index + rank)
        x = torch.randn(512, 64)
        if session is None:
            wrapped(x).square().mean().backward()
        else:
            with session.step():
                wrapped(x).square().mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    if session is not None:
        usage, plan = session.usage(), session.plan()
        session.close()
        if ram is None:
            return [], usage.ram_bytes
        assert usage.ram_bytes <= ram, usage
        assert plan.recomputes if recompute == "yes" else usage.disk_bytes > 0, plan
        assert session.report().num_planned >= 2, session.report()
    return [*model.parameters(), *model.buffers()], 0


# First both processes together, then each in a group of its own with every second case.
for place, size, store, own in ((rank, 2, store, cases), (0, 1, f"{store}{rank}", cases[rank::2])):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=place, world_size=size, timeout=limit)
    for case in own:
        made, recompute = case.split(",")
        gradients = []
        ram = train(True)[1] * 6 // 10
        gradients.clear()
        state, _ = train(False)
        expected, gradients = gradients, []
        other_state, _ = train(True, ram)
        assert len(expected) == len(gradients) == 6, case
        for ones, others in zip([*expected, state], [*gradients, other_state]):
            assert all(torch.equal(one, other) for one, other in zip(ones, others, strict=True)), case
        first = expected[-1][0].clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, expected[-1][0]), f"{case}: the processes do not share their gradients"
        print(size, case, flush=True)
    dist.destroy_process_group()
"""
# When the Session is made (before the model is wrapped, then of the model or of what wraps it), and whether tensors are
# computed again; else they are moved. In the same two processes for all, since each process imports torch.
CASES = [f"{made},{again}" for made in ("before", "of the model", "of the wrapped model") for again in ("yes", "no")]


def test_a_model_wrapped_for_ddp_trains_to_the_same_bits(tmp_path: Path) -> None:
    spill = tmp_path / "spill"
    commands = [
        [sys.executable, "-c", DDP, str(tmp_path / "store"), str(rank), str(spill), *CASES] for rank in range(2)
    ]
    children = [
        forked.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=one_thread())
        for command in commands
    ]
    try:
        told = [child.communicate(timeout=TIMEOUT_S) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    for rank, (out, errors) in enumerate(told):
        done = [*(f"2 {case}" for case in CASES), *(f"1 {case}" for case in CASES[rank::2])]
        assert out.splitlines() == done, errors[-3000:]
    assert not spill.exists() or list(spill.iterdir()) == []


# ---------------------------------------------------------------------- one spill directory


def one_thread() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


def start(directory: Path, seed: int) -> subprocess.Popen[str]:
    command = [sys.executable, spilling.__file__, str(directory), str(seed)]
    pipe = subprocess.PIPE
    return forked.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=one_thread())


def read(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def go_on(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()


def test_processes_share_a_spill_directory_and_one_that_is_killed_harms_no_other(tmp_path: Path) -> None:
    """Two train and a third starts after one was killed in the middle of a step: those left have the bits of a run
    without a Session, the killed one's files go when the third one starts, and nothing is left in the end."""
    children: list[subprocess.Popen[str]] = []
    expected = [spilling.train(seed) for seed in (1, 3)]
    try:
        first, killed = start(tmp_path, 1), start(tmp_path, 2)
        children += [first, killed]
        assert [read(first), read(killed)] == ["ready", "ready"]
        both = set(tmp_path.iterdir())
        assert len(both) == 2
        assert all(any(file.stat().st_size for file in each.iterdir()) for each in both), "nothing lay on the disk"
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        go_on(first)
        assert read(first) == "ready"
        assert set(tmp_path.iterdir()) == both, "nobody has started since"
        third = start(tmp_path, 3)
        children.append(third)
        assert read(third) == "ready"
        (left,) = both & set(tmp_path.iterdir())
        assert str(first.pid) in left.name
        found = []
        for child in (first, third):
            go_on(child)
            while (line := read(child)) == "ready":
                go_on(child)
            found.append(line)
        assert found == expected
        assert [child.wait(TIMEOUT_S) for child in (first, third)] == [0, 0]
        assert list(tmp_path.iterdir()) == []
    finally:
        for child in children:
            child.kill()
            child.communicate()
