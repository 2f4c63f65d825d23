"""A plan knows which model and batch it is for, and is refused for another."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import torchstorm
from torchstorm.errors import BudgetError, ConfigError, DeviceError, PlanError
from torchstorm.offload.replan.user_plan import check_inputs, read_plan
from torchstorm.offload.replan.workload import workload_of
from torchstorm.offload.session import Session
from torchstorm.plan.plan import Plan
from torchstorm.plan.trace import Trace


def model_of(width: int = 64) -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, width), nn.GELU(), nn.BatchNorm1d(width), nn.Linear(width, 32))


def plan_of(model: nn.Module, **options: object) -> Plan:
    found: Plan = torchstorm.plan(
        model, torch.zeros(256, 32), lambda model, x: model(x).sum(), machine="rtx4090", **options
    )
    return found


def step(session: Session, model: nn.Module, rows: int = 256) -> torch.Tensor:
    model.zero_grad()
    with session.step():
        loss: torch.Tensor = model(torch.randn(rows, 32)).square().mean()
        loss.backward()
    return loss.detach()


def test_a_plan_fits_the_model_it_was_made_for_wherever_that_is(tmp_path: Path) -> None:
    plan_of(model_of()).save(tmp_path / "plan.json")
    plan = replace(Plan.load(tmp_path / "plan.json"), trace=on_cpu(plan_of(model_of())))
    assert read_plan(plan, model_of()) is plan
    check_inputs(plan, ("256x32 float32",))
    check_inputs(plan, None)  # the model's forward was not called
    assert read_plan(replace(plan, workload=None), nn.Linear(2, 2)).workload is None  # nothing is known of its model


def on_cpu(plan: Plan) -> Trace:
    return replace(plan.trace, device="cpu")


def test_a_plan_that_was_measured_knows_its_batch_and_its_machine() -> None:
    model = model_of()
    plan = torchstorm.plan(model, torch.zeros(256, 32), lambda model, x: model(x).sum(), ram="1GiB")
    assert plan.workload == workload_of(model, [torch.zeros(256, 32)])
    assert plan.workload.inputs == ("256x32 float32",)
    assert plan.machine is not None
    assert not plan.simulated


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (model_of(128), r"Sequential with 4320 parameters, this one 8608"),
        (nn.Sequential(nn.Linear(32, 135, bias=False)), r"Sequential with 4320 parameters of other names"),
        (model_of().to(torch.bfloat16), r"Sequential with 4320 parameters of other names, shapes or types"),
    ],
    ids=["size", "names", "type"],
)
def test_a_plan_for_another_model_is_refused(other: nn.Module, said: str) -> None:
    plan = plan_of(model_of())
    with pytest.raises(PlanError, match=rf"for another model: {said}.* torchstorm.plan\("):
        Session(other, plan=replace(plan, trace=on_cpu(plan)))


def test_a_plan_for_another_device_is_refused() -> None:
    with pytest.raises(PlanError, match="for a step on 'cuda', but the model is on 'cpu'"):
        Session(model_of(), plan=plan_of(model_of()))


def measured_plan(tmp_path: Path, model: nn.Module, *, share: float = 0.5) -> tuple[Path, list[torch.Tensor], Plan]:
    """A plan file of a Session within a share of what the model needs, and that Session's losses."""
    with Session(copy.deepcopy(model), unlimited=True) as session:
        step(session, session._shared.model)
        needed = session.usage().ram_bytes
    torch.manual_seed(1)
    with Session(model, ram=int(needed * share), disk=str(tmp_path)) as session:
        losses = [step(session, model) for _ in range(4)]
        plan = session.plan()
    assert plan is not None
    plan.save(tmp_path / "plan.json")
    return tmp_path / "plan.json", losses, plan


@pytest.mark.parametrize("how", ["file", "plan"])
def test_a_plan_file_reproduces_the_run_from_its_first_step(how: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = mlp()
    file, losses, plan = measured_plan(tmp_path, copy.deepcopy(model))
    assert plan.workload == workload_of(model, [torch.zeros(256, 32)])
    assert plan.machine is not None
    assert len({placement.tier for placement in plan.placements}) > 1
    torch.manual_seed(1)
    with Session(model, disk=str(tmp_path), plan=file if how == "file" else plan) as session:
        assert session.plan() is not None
        for loss in losses:
            assert torch.equal(step(session, model), loss)
            assert session.usage().ram_bytes == plan.forecast.ram_bytes
            assert session.usage().disk_bytes == plan.forecast.disk_bytes
        report = session.report()
        found = session.plan()
    assert report.budget.ram == plan.budget.ram
    assert report.num_planned == len(losses)
    assert found is not None
    assert (found.placements, found.trace, found.workload) == (plan.placements, plan.trace, plan.workload)


def test_a_plan_for_another_batch_is_refused_in_the_first_step_with_both_shapes(tmp_path: Path) -> None:
    model = mlp()
    file, _, _ = measured_plan(tmp_path, model)
    with Session(model, disk=str(tmp_path), plan=file) as session:
        for _ in range(2):
            with pytest.raises(
                PlanError, match=r"batch of \(256x32 float32\), but Sequential was given \(128x32 float32\)"
            ):
                step(session, model, rows=128)
        step(session, model)
        assert session.report().num_planned == 1
        step(session, model, rows=128)  # a smaller one follows it, too, once the given one has been taken over
        assert session.report().num_planned == 2


def test_a_plan_of_another_step_that_says_nothing_of_its_model_gives_way_and_is_reported(tmp_path: Path) -> None:
    file, _, plan = measured_plan(tmp_path, mlp())
    other = mlp(num_layers=5)
    expected = copy.deepcopy(other)
    torch.manual_seed(2)
    expected(torch.randn(256, 32)).square().mean().backward()
    replace(plan, workload=None).save(file)
    torch.manual_seed(2)
    with Session(other, disk=str(tmp_path), ram="64MiB", plan=file) as session:
        step(session, other)
        for one, two in zip(other.parameters(), expected.parameters(), strict=True):
            assert torch.equal(one.grad, two.grad)
        assert any("given plan is for another step" in note for note in session.report().notes)
        for _ in range(3):
            step(session, other)
        assert session.report().num_planned > 0


def test_a_plan_that_cannot_be_kept_to_is_refused_with_the_way_out(tmp_path: Path) -> None:
    model = mlp()
    file, _, plan = measured_plan(tmp_path, model)
    with pytest.raises(ConfigError, match=rf'disk="DIR:{plan.budget.disk}"'):
        Session(model, plan=file)
    needed = plan.forecast.ram_bytes
    with pytest.raises(BudgetError, match=f"given plan needs .* Give ram={needed} ") as caught:
        Session(model, plan=file, ram=needed - 1, disk=str(tmp_path))
    assert caught.value.smallest_bytes == needed
    if plan.recomputes:
        with pytest.raises(ConfigError, match="recomputes tensors, but recompute=False"):
            Session(model, plan=file, recompute=False, disk=str(tmp_path))
    with pytest.raises(DeviceError, match="unlimited=True was given together with"):
        Session(model, plan=replace(plan, placements=()), unlimited=True, disk=str(tmp_path))
    with pytest.raises(PlanError, match="cannot be read"):
        Session(model, plan=tmp_path / "nowhere.json")


def mlp(num_layers: int = 12) -> nn.Sequential:
    return nn.Sequential(*(part for _ in range(num_layers) for part in (nn.Linear(32, 32), nn.GELU(), nn.Tanh())))
