"""`torchstorm.plan` says what a training would cost, and changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import torchstorm
from torchstorm.errors import BudgetError
from torchstorm.offload.session import Session
from torchstorm.offload.step import conclude as conclude_module
from torchstorm.storage.unattended import Unattended


def model_of() -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64), nn.BatchNorm1d(64)]
    return nn.Sequential(*layers)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def test_a_plan_is_what_a_session_then_does(tmp_path: Path) -> None:
    model, batch = model_of(), torch.randn(1024, 64)
    found = torchstorm.plan(model, batch, loss_of, ram="6MiB", disk=f"{tmp_path}:1GiB")
    assert found.budget.ram == 6 * 2**20
    assert 0 < found.forecast.ram_bytes <= found.budget.ram
    assert found.forecast.disk_bytes > 0
    with Session(model, ram="6MiB", disk=f"{tmp_path}:1GiB") as session:
        for _ in range(4):
            with session.step():
                loss_of(model, batch).backward()
        plan, measured = session.plan(), session.report().measured
    assert plan is not None
    assert measured is not None
    # What moves depends on times, which differ from run to run; the step and its need do not.
    assert [moment.signature for moment in plan.trace.moments] == [m.signature for m in found.trace.moments]
    assert measured.ram_bytes == pytest.approx(plan.forecast.ram_bytes, rel=0.05)
    assert measured.disk_bytes == pytest.approx(plan.forecast.disk_bytes, rel=0.05)


def test_planning_leaves_weights_gradients_buffers_and_random_numbers_as_they_were(tmp_path: Path) -> None:
    model, batch = model_of(), torch.randn(1024, 64)
    loss_of(model, batch).backward()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [parameter.grad for parameter in model.parameters()]
    values = [gradient.clone() for gradient in gradients if gradient is not None]
    random_state = torch.get_rng_state()
    torchstorm.plan(model, batch, loss_of, ram="6MiB", disk=str(tmp_path))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is gradient for parameter, gradient in zip(model.parameters(), gradients, strict=True))
    assert all(torch.equal(p.grad, value) for p, value in zip(model.parameters(), values, strict=True))
    assert list(tmp_path.iterdir()) == []


def test_a_budget_below_what_is_possible_says_what_is(tmp_path: Path) -> None:
    model, batch = model_of(), torch.randn(1024, 64)
    with pytest.raises(BudgetError, match="Smallest feasible: ram=") as caught:
        torchstorm.plan(model, batch, loss_of, ram="1MiB", disk=str(tmp_path))
    smallest = caught.value.smallest_bytes
    assert smallest is not None
    assert torchstorm.plan(model, batch, loss_of, ram=smallest, disk=str(tmp_path)).forecast.ram_bytes <= smallest


@pytest.mark.parametrize("is_slow", [False, True], ids=["fast disk", "slow disk"])
def test_a_step_that_only_fits_unplanned_is_told_apart(
    is_slow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_slow:  # nothing has ended until somebody waits for it
        drive = Unattended.drive
        monkeypatch.setattr(Unattended, "drive", lambda self, wait: drive(self, wait) if wait else True)
    model, batch = nn.Sequential(*[nn.Linear(64, 64) for _ in range(12)]), torch.randn(4096, 64)

    def twice(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss = torch.tanh(model(batch)).square().mean()
        loss.backward(retain_graph=True)
        return loss

    with pytest.raises(BudgetError, match="only without a plan"):
        torchstorm.plan(model, batch, twice, ram="6MiB", disk=str(tmp_path))


def test_a_report_prints_forecast_beside_measured(tmp_path: Path) -> None:
    model, batch = model_of(), torch.randn(1024, 64)
    with Session(model, ram="6MiB", disk=f"{tmp_path}:1GiB") as session:
        assert "0 steps" in str(session.report())
        assert session.usage().ram_bytes == 0
        for index in range(4):
            with session.step():
                loss_of(model, batch).backward()
            measured = session.report().measured
            assert measured is not None
            assert measured.step_ms > 0, f"after step {index}"
        report = session.report()
        assert session.plan() is not None
    text = str(report)
    assert text.splitlines()[0].split() == ["budget", "forecast", "measured", "highest"]
    assert "6.00 MiB" in text
    assert "1.00 GiB" in text
    assert "4 steps, 2 by a plan, 2 by the one in force" in text
    assert "disk: " in text
    assert "vram" not in text


@pytest.mark.parametrize("has_disk", [True, False], ids=["RAM and disk", "RAM alone"])
def test_a_longer_batch_that_comes_when_nothing_is_computed_again_so_far_is_after_all(
    has_disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conclude_module, "_FREE", 0.0)  # a plan that moves alone is not good enough
    torch.manual_seed(0)
    model = nn.Sequential(*(part for _ in range(8) for part in (nn.Linear(64, 64), nn.GELU(), nn.Tanh())))
    with Session(model, ram="3MiB", disk=str(tmp_path) if has_disk else None) as session:

        def step(rows: int) -> None:
            model.zero_grad()
            with session.step():
                model(torch.randn(rows, 64)).square().mean().backward()

        for _ in range(4):
            step(64)
        short = session.plan()
        assert short is not None
        assert not short.recomputes, "it fits"
        step(1024)
        assert session.usage().ram_bytes <= 3 * 2**20
        first = session.plan()
        assert first is not None
        assert bool(first.trace.ops) != has_disk, "with a disk, nothing was recorded any more"
        for _ in range(4):
            step(1024)
            assert session.usage().ram_bytes <= 3 * 2**20
        found = session.plan()
        assert found is not None
        assert found.trace.ops
        assert found.recomputes or has_disk
        step(64)
        again = session.plan()
        assert again is not None
        assert again.trace.storages == short.trace.storages


def test_the_error_of_a_step_names_the_micro_batch_that_would_fit_and_it_fits() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.GELU())

    def step(rows: int) -> None:
        with Session(model, ram="512KiB") as session, session.step():
            model(torch.randn(rows, 64)).square().mean().backward()

    with pytest.raises(BudgetError, match=r"Or a micro-batch: \d+ of this batch of 1024 samples.*storm\.run") as caught:
        step(1024)
    assert caught.value.micro_batch is not None
    assert 1 <= caught.value.micro_batch < 1024
    step(caught.value.micro_batch)
