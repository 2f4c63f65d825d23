"""On a GPU: a plan file reproduces a run, and a plan gives way to one that fits once memory is not as it was."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import nn

from offload.steps import assert_same
from offload.test_cuda_gpu import MIB, Mlp, budget_for, run, square
from torchstorm.offload.session import Session

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _nothing_left_of_earlier_tests() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def test_a_plan_file_reproduces_the_run_from_its_first_step(tmp_path: Path) -> None:
    budget = budget_for(Mlp, square, 0.5)
    measured = run(Mlp, square, lambda model, optimizer: Session(model, vram=budget, optimizer=optimizer))
    assert measured.session is not None
    plan = measured.session.plan()
    assert plan is not None
    assert len({placement.tier for placement in plan.placements}) > 1
    measured.session.close()
    plan.save(tmp_path / "plan.json")
    again = run(
        Mlp,
        square,
        lambda model, optimizer: Session(model, vram=budget, optimizer=optimizer, plan=tmp_path / "plan.json"),
    )
    assert again.session is not None
    assert_same(again.outcome, measured.outcome)
    assert again.session.report().num_planned == len(again.peaks)
    assert max(again.peaks) <= budget
    # What the plan takes for granted of other memory may have changed by a little: losses that are held, for one.
    assert abs(again.peaks[-1] - plan.forecast.vram_bytes) <= MIB
    again.session.close()


@pytest.mark.parametrize("grows", [True, False], ids=["more", "less"])
def test_other_memory_that_changes_between_steps_changes_the_plan_and_not_the_peak(grows: bool) -> None:
    budget = budget_for(Mlp, square, 0.7)
    others: list[torch.Tensor] = []
    moved: list[int] = []

    torch.manual_seed(1)
    model = Mlp().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if not grows:
        others.append(torch.empty(48 * MIB, dtype=torch.uint8, device="cuda"))
    with Session(model, vram=budget, optimizer=optimizer) as session:
        for index in range(10):
            if index == 5 and grows:
                others.append(torch.empty(48 * MIB, dtype=torch.uint8, device="cuda"))
            elif index == 5:
                others.clear()
            with session.step():
                square(model, index)
            assert session.usage().vram_bytes <= budget
            moved.append(session.report().moved_bytes)
            optimizer.step()
            optimizer.zero_grad()
    assert (moved[-1] > moved[4]) if grows else (moved[-1] < moved[4])


class Thirsty(nn.Module):
    """After a few steps it takes more room for a moment than it did when it was measured."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Mlp()
        self.extra_bytes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        torch.empty(self.extra_bytes, dtype=torch.uint8, device="cuda")
        return x


def test_steps_that_take_more_than_the_budget_are_planned_anew_within_three() -> None:
    budget = budget_for(Thirsty, square, 0.7)
    torch.manual_seed(1)
    model = Thirsty().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    peaks = []
    with Session(model, vram=budget, optimizer=optimizer) as session:
        for index in range(10):
            model.extra_bytes = 128 * MIB if index >= 5 else 0
            with session.step():
                square(model, index)
            peaks.append(session.usage().vram_bytes)
            optimizer.step()
            optimizer.zero_grad()
        notes = session.report().notes
    assert max(peaks[:5]) <= budget < peaks[5], peaks
    assert max(peaks[8:]) <= budget, peaks
    assert any("were planned anew, with" in note for note in notes)
