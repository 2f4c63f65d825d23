"""The process itself shrinks: what a plan moves to disk is gone from its anonymous memory."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import forked

MIB = 2**20

# A chain of tanh: each saves its result, 8 MiB; 52 of them save 416 MiB. The peak of RssAnon is sampled all the
# while. Large blocks are in memory of torchstorm's own.
CHILD = """
import json, sys, threading
import torch
from torchstorm import Session
from torchstorm.offload.native import library

torch.set_num_threads(2)
torch.manual_seed(0)
budget, directory = int(sys.argv[1]), sys.argv[2]
peak_kib, stop = 0, threading.Event()

def sample():
    global peak_kib
    while not stop.wait(0.003):
        with open("/proc/self/status") as status:
            for line in status:
                if line.startswith("RssAnon"):
                    peak_kib = max(peak_kib, int(line.split()[1]))

class Chain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))
    def forward(self, x):
        x = x * self.scale
        for _ in range(int(sys.argv[4])):
            x = torch.tanh(x)
        return x

model = Chain()
session = Session(model, ram=budget, disk=directory, recompute=False) if budget else Session(model, unlimited=True)
assert library.wait() == ""
x = torch.randn(2 * 2**20)
with open("/proc/self/status") as status:
    before_kib = next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))
sampler = threading.Thread(target=sample)
gradients = []
for index in range(int(sys.argv[3])):
    if index == 1:  # the first step is measured and planned; the second one follows the plan
        sampler.start()
    model.scale.grad = None
    with session.step():
        model(x).mean().backward()
    gradients.append(model.scale.grad.item())
stop.set()
sampler.join()
report = session.report()
disk = session._shared.tiers.slow.get("disk")
counters = disk.counters() if disk else None
plan = session.plan()
print(json.dumps({
    "peak_bytes": peak_kib * 1024,
    "grown_bytes": (peak_kib - before_kib) * 1024,
    "gradients": gradients,
    "ram_bytes": report.highest.ram_bytes,
    "planned_disk_bytes": plan.forecast.disk_bytes if plan else 0,
    "written_bytes": counters.direct_write_bytes + counters.buffered_write_bytes if counters else 0,
    "read_bytes": counters.direct_read_bytes + counters.buffered_read_bytes if counters else 0,
}))
session.close()
"""


NUM_LAYERS, NUM_STEPS, BUDGET = 52, 3, 100 * MIB

Result = dict[str, Any]


def run(budget_bytes: int, directory: Path) -> Result:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = forked.run(
        [sys.executable, "-c", CHILD, str(budget_bytes), str(directory), str(NUM_STEPS), str(NUM_LAYERS)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    found: Result = json.loads(done.stdout)
    return found


def test_the_process_shrinks_by_what_the_plan_moves_to_disk_and_grows_by_no_more_than_the_budget(
    tmp_path: Path,
) -> None:
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    if free < 2**30:
        pytest.skip("1 GiB of free disk is needed")
    without, limited = run(0, tmp_path), run(BUDGET, tmp_path)
    assert without["ram_bytes"] >= 400 * MIB
    assert limited["gradients"] == without["gradients"]
    assert limited["ram_bytes"] <= BUDGET
    moved = limited["planned_disk_bytes"]
    assert moved >= 256 * MIB, "the plan must move most of 416 MiB for 100 MiB to do"
    fell = without["peak_bytes"] - limited["peak_bytes"]
    assert fell >= 0.7 * moved, f"the peak fell by {fell / MIB:.0f} MiB of {moved / MIB:.0f} MiB moved"
    # All steps went out and came back; of the first one, without a plan, what is needed soon may stay.
    assert limited["written_bytes"] >= (NUM_STEPS - 1) * moved + 256 * MIB
    assert limited["read_bytes"] >= (NUM_STEPS - 1) * moved + 256 * MIB
    most = without["grown_bytes"] - without["ram_bytes"] + BUDGET + 6 * MIB
    assert limited["grown_bytes"] <= most, f"{limited['grown_bytes'] / MIB:.0f} MiB, {most / MIB:.0f} allowed"
    assert list(tmp_path.iterdir()) == []
