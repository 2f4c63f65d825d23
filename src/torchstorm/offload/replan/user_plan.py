"""Reads a plan from the user, and refuses it if it is for another model, batch, device or budget."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from torchstorm.errors import BudgetError, ConfigError, PlanError
from torchstorm.offload.budget import model_device
from torchstorm.offload.replan.workload import workload_of
from torchstorm.plan.plan import Budget, Plan
from torchstorm.sizes import format_size

_WAY_OUT = "make a plan with torchstorm.plan(model, batch, loss_fn, ...), or leave plan= out."


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The budget arguments of a Session; None if left out."""

    vram: int | str | None
    ram: int | str | None
    disk: str | os.PathLike[str] | None

    def with_those_of(self, plan: Plan | None) -> Sizes:
        """Fills in the plan's budgets for those left out.

        Raises:
            ConfigError: the plan moves tensors to disk, and no directory was given.
        """
        if plan is None:
            return self
        if plan.budget.disk and self.disk is None and plan.forecast.disk_bytes:
            raise ConfigError(
                f"This plan moves {format_size(plan.forecast.disk_bytes)} to disk, but disk= was left out. Give a "
                f'directory: disk="DIR:{plan.budget.disk}".'
            )
        vram = plan.budget.vram if self.vram is None and plan.trace.device == "cuda" else self.vram
        return Sizes(vram=vram, ram=plan.budget.ram if self.ram is None else self.ram, disk=self.disk)


def read_plan(plan: Plan | str | os.PathLike[str], model: torch.nn.Module, *, recompute: bool = True) -> Plan:
    """Reads a plan, and checks that it is for this model.

    Args:
        plan: a plan, or a file from `Plan.save`. A plan without `workload` is accepted; the first step then detects
            whether it matches.
        model: the model to train.
        recompute: whether tensors may be recomputed.

    Raises:
        ConfigError: the plan recomputes tensors, but `recompute` is False.
        PlanError: the file cannot be read, or the plan is for another model or device. Names the difference.
    """
    if not isinstance(plan, Plan | str | os.PathLike):
        raise PlanError(f"plan={plan!r} is neither a Plan nor a file that Plan.save wrote: {_WAY_OUT}")
    found = plan if isinstance(plan, Plan) else Plan.load(plan)
    if found.recomputes and not recompute:
        raise ConfigError(
            "This plan recomputes tensors, but recompute=False or unlimited=True was given with it: leave one of "
            "the two out."
        )
    device = model_device(model).type
    if found.trace.device != device:
        raise PlanError(
            f"This plan is for a step on {found.trace.device!r}, but the model is on {device!r}. Move the model there, "
            f"or {_WAY_OUT}"
        )
    if found.workload is None:
        return found
    planned, here = found.workload, workload_of(model)
    if (planned.num_parameters, planned.shapes_sha256) != (here.num_parameters, here.shapes_sha256):
        differs = (
            f"{planned.num_parameters} parameters, this one {here.num_parameters}"
            if planned.num_parameters != here.num_parameters
            else f"{here.num_parameters} parameters of other names, shapes or types"
        )
        raise PlanError(
            f"This plan is for another model: {planned.model} with {differs} ({here.model}). Give that one, or "
            f"{_WAY_OUT}"
        )
    return found


def check_inputs(plan: Plan, shapes: tuple[str, ...] | None) -> None:
    """Checks that a plan is for a batch of these shapes.

    Args:
        plan: made or loaded before. One that says nothing of its batch passes.
        shapes: of the tensors that the model's forward was given, as `shape_of` writes them; None where it was not
            called.

    Raises:
        PlanError: it is for a batch of other shapes.
    """
    planned = plan.workload
    if planned is not None and planned.inputs and shapes is not None and planned.inputs != shapes:
        raise PlanError(
            f"This plan is for a batch of ({', '.join(planned.inputs)}), but {planned.model} was given "
            f"({', '.join(shapes)}). Give such a batch, or {_WAY_OUT}"
        )


def check_budget(plan: Plan, budget: Budget) -> None:
    """Checks that a plan is within a budget.

    Raises:
        BudgetError: its forecast exceeds the budget.
    """
    for tier in ("vram", "ram", "disk"):
        needed, limit = getattr(plan.forecast, f"{tier}_bytes"), getattr(budget, tier)
        if needed > limit:
            raise BudgetError(
                f"{tier}={format_size(limit)}, but the given plan needs {format_size(needed)} there. Give "
                f"{tier}={needed} ({format_size(needed)}), or leave plan= out to make a plan for this budget.",
                tier=tier,
                budget_bytes=limit,
                needed_bytes=needed,
                smallest_bytes=needed,
            )
