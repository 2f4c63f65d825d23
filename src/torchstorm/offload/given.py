"""A plan that the user brings: read, and refused where it is for another model, batch, device or budget."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from torchstorm.errors import BudgetError, ConfigError, PlanError
from torchstorm.offload.stack import model_device
from torchstorm.offload.subject import subject_of
from torchstorm.plan.plan import Budget, Plan
from torchstorm.sizes import format_size

_WAY_OUT = "make a plan with torchstorm.plan(model, batch, loss_fn, ...), or leave plan= out."


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Budgets as a Session takes them; None where they were left out."""

    vram: int | str | None
    ram: int | str | None
    disk: str | os.PathLike[str] | None

    def with_those_of(self, plan: Plan | None) -> Sizes:
        """Those of a plan in place of what was left out.

        Raises:
            ConfigError: the plan moves to disk, and no directory was named.
        """
        if plan is None:
            return self
        if plan.budget.disk and self.disk is None and plan.forecast.disk_bytes:
            raise ConfigError(
                f"This plan moves {format_size(plan.forecast.disk_bytes)} to disk, but disk= was left out. Name a "
                f'directory: disk="DIR:{plan.budget.disk}".'
            )
        vram = plan.budget.vram if self.vram is None and plan.trace.device == "cuda" else self.vram
        return Sizes(vram=vram, ram=plan.budget.ram if self.ram is None else self.ram, disk=self.disk)


def read_plan(plan: Plan | str | os.PathLike[str], model: torch.nn.Module, *, recompute: bool = True) -> Plan:
    """Reads a plan for a model, and makes sure that it is for this one.

    Args:
        plan: a file that `Plan.save` wrote, or the plan. One that says nothing of its model passes: whether it fits
            then shows in the first step, which leaves a plan that is not its own.
        model: the one to train.
        recompute: whether tensors may be computed again.

    Raises:
        ConfigError: the plan computes something again, which may not be.
        PlanError: the file cannot be read, or it is a plan for another model or device; says what differs.
    """
    found = plan if isinstance(plan, Plan) else Plan.load(plan)
    if found.recomputes and not recompute:
        raise ConfigError(
            "This plan computes tensors again, but recompute=False or unlimited=True was given with it: leave one of "
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
    planned, here = found.workload, subject_of(model)
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
    """Makes sure that a plan is for such a batch.

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
    """Makes sure that a plan keeps to a budget.

    Raises:
        BudgetError: its forecast is above.
    """
    for tier in ("vram", "ram", "disk"):
        needed, limit = getattr(plan.forecast, f"{tier}_bytes"), getattr(budget, tier)
        if needed > limit:
            raise BudgetError(
                f"{tier}={format_size(limit)}, but the plan that was given needs {format_size(needed)} there. Give "
                f"{tier}={needed} ({format_size(needed)}), or leave plan= out: a plan for this budget is then made.",
                tier=tier,
                budget_bytes=limit,
                needed_bytes=needed,
                smallest_bytes=needed,
            )
