"""Plans for a machine that is not here, and what of a batch fits where the whole does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchstorm
from torchstorm.errors import BudgetError, PlanError, SizeError
from torchstorm.plan.machine import Machine
from torchstorm.plan.plan import Plan

GIB = 2**30


def model_of(num_layers: int = 8) -> nn.Sequential:
    with torch.device("meta"):
        layers = [nn.Sequential(nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048)) for _ in range(num_layers)]
        return nn.Sequential(*layers).to(torch.bfloat16)


def batch_of(rows: int = 65536) -> torch.Tensor:
    return torch.empty(rows, 2048, dtype=torch.bfloat16, device="meta")


def square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).float().square().mean()
    return loss


def plan_of(**options: Any) -> Plan:
    options = {"machine": "rtx4090", **options}
    found: Plan = torchstorm.plan(model_of(), batch_of(), square, **options)
    return found


def test_a_plan_keeps_to_the_budget_of_a_machine_that_is_not_here_and_says_so() -> None:
    found = plan_of(vram="10GiB", ram="32GiB")
    assert 0 < found.forecast.vram_bytes <= 10 * GIB == found.budget.vram
    assert found.simulated
    assert found.machine is not None
    assert found.machine.name == "rtx4090"
    assert "FORECAST for rtx4090" in str(found)
    assert any(placement.tier != "keep" for placement in found.placements)


def test_without_budgets_they_are_shares_of_the_machine() -> None:
    found = plan_of()
    assert (found.budget.vram, found.budget.ram, found.budget.disk) == (24 * GIB * 9 // 10, 32 * GIB, 0)
    assert plan_of(disk="no/such/folder:10GiB").budget.disk == 10 * GIB  # nothing is written there
    assert plan_of(disk=".").budget.disk == 500 * GIB


@pytest.mark.no_cover
def test_a_faster_machine_is_forecast_faster() -> None:
    times = [plan_of(machine=name).forecast.step_ms for name in ("rtx3090", "rtx4090", "a100", "h100", "gb200")]
    assert times == sorted(times, reverse=True)


def test_room_for_the_optimizers_state_is_kept() -> None:
    model = model_of()
    forecasts = [
        torchstorm.plan(model, batch_of(), square, machine="h200", optimizer=optimizer).forecast.vram_bytes
        for optimizer in (torch.optim.SGD(model.parameters()), torch.optim.AdamW(model.parameters()), None)
    ]
    state = 2 * sum(parameter.nbytes for parameter in model.parameters())
    assert forecasts == [forecasts[0], forecasts[0] + state, forecasts[0] + state]


def test_a_machine_of_ones_own_is_taken_and_one_without_rates_refused() -> None:
    small = torchstorm.plan(
        model_of(1),
        batch_of(64),
        square,
        machine=Machine(name="mine", vram_bytes=GIB, half_flops=1e12, memory_bytes_per_s=1e11, launch_s=1e-5),
    )
    assert small.budget.vram == GIB * 9 // 10
    with pytest.raises(BudgetError, match=r"machine 'mine' says vram_bytes=0, .*all three above 0"):
        plan_of(machine=Machine(name="mine"))


def test_what_is_asked_wrongly_is_reported() -> None:
    with pytest.raises(PlanError, match="use one of rtx4090"):
        plan_of(machine="rtx5090")
    with pytest.raises(SizeError, match="vram='much'"):
        plan_of(vram="much")
    with pytest.raises(BudgetError, match=r"vram=48.00 GiB, but rtx4090 has 24.00 GiB"):
        plan_of(vram="48GiB")


def test_what_does_not_fit_names_the_smallest_budget_and_the_micro_batch_and_both_are_true() -> None:
    with pytest.raises(
        BudgetError, match=r"Smallest feasible: vram=.* Or a micro-batch: \d+ of this batch of 65536"
    ) as e:
        plan_of(vram="3GiB", ram="32GiB")
    smallest, size = e.value.smallest_bytes, e.value.micro_batch
    assert smallest is not None
    assert size is not None
    plan_of(vram=smallest + 16 * 2**20, ram="32GiB")
    torchstorm.plan(model_of(), batch_of(size), square, machine="rtx4090", vram="3GiB", ram="32GiB")
    with pytest.raises(BudgetError):
        torchstorm.plan(model_of(), batch_of(size * 3 // 2), square, machine="rtx4090", vram="3GiB", ram="32GiB")


def test_a_measured_plan_that_does_not_fit_names_a_micro_batch_that_does(tmp_path: Path) -> None:
    model, batch = nn.Sequential(*[nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)] * 4), torch.randn(1024, 64)
    with pytest.raises(BudgetError, match=r"Or a micro-batch: \d+ of this batch of 1024 samples") as caught:
        torchstorm.plan(model, batch, square, ram="1MiB", disk=str(tmp_path))
    size = caught.value.micro_batch
    assert size is not None
    found = torchstorm.plan(model, batch[:size], square, ram="1MiB", disk=str(tmp_path))
    assert found.forecast.ram_bytes <= 2**20


def test_a_step_that_cannot_be_simulated_keeps_its_own_estimate(tmp_path: Path) -> None:
    model, batch = nn.Sequential(*[nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)] * 4), torch.randn(1024, 64)

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss = square(model, batch)
        assert loss.item() > 0
        return loss

    with pytest.raises(BudgetError, match="Smallest feasible: ram=") as caught:
        torchstorm.plan(model, batch, loss_fn, ram="1MiB", disk=str(tmp_path))
    assert caught.value.micro_batch is not None
    assert 1 <= caught.value.micro_batch < 1024
    assert str(caught.value).count("micro-batch") == 1
