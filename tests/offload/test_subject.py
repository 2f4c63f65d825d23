"""A plan knows which model and batch it is for, and is refused for another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import torchstorm
from torchstorm.errors import PlanError
from torchstorm.offload.subject import check_fits, subject_of
from torchstorm.plan.plan import Plan


def model_of(width: int = 64) -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, width), nn.GELU(), nn.BatchNorm1d(width), nn.Linear(width, 32))


def plan_of(model: nn.Module, **options: object) -> Plan:
    found: Plan = torchstorm.plan(
        model, torch.zeros(256, 32), lambda model, x: model(x).sum(), machine="rtx4090", **options
    )
    return found


def test_a_plan_fits_the_model_it_was_made_for_wherever_that_is(tmp_path: Path) -> None:
    plan_of(model_of()).save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    check_fits(plan, model_of())
    check_fits(plan, model_of().to("meta"), [torch.zeros(256, 32)])
    check_fits(replace(plan, subject=None), nn.Linear(2, 2))  # nothing is known of its model


def test_a_plan_that_was_measured_knows_its_batch_too(tmp_path: Path) -> None:
    model = model_of()
    plan = torchstorm.plan(model, torch.zeros(256, 32), lambda model, x: model(x).sum(), ram="1GiB")
    assert plan.subject == subject_of(model, [torch.zeros(256, 32)])
    assert plan.subject.inputs == ("256x32 float32",)
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
    with pytest.raises(PlanError, match=rf"for another model: {said}.* torchstorm.plan\("):
        check_fits(plan_of(model_of()), other)


def test_a_plan_for_another_shape_is_refused_with_both() -> None:
    plan = plan_of(model_of())
    with pytest.raises(PlanError, match=r"batch of \(256x32 float32\), but Sequential was given \(128x32 float32\)"):
        check_fits(plan, model_of(), [torch.zeros(128, 32)])
