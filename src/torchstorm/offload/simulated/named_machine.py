"""Plans for a machine that is not here, and what of a batch would fit where the whole does not."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from torchstorm.errors import BudgetError, TorchstormError
from torchstorm.memory.limits import available_ram_bytes
from torchstorm.offload.budget import bounce_buffers, model_device, parse_disk, vram_spare_bytes
from torchstorm.offload.replan.workload import workload_of
from torchstorm.offload.simulated.step import Simulation, simulate
from torchstorm.offload.state.optimizer_state import expected_state_bytes
from torchstorm.offload.step.saving import slab_bytes
from torchstorm.plan.machine import Machine
from torchstorm.plan.microbatch import largest_micro_batch
from torchstorm.plan.plan import Budget, Plan
from torchstorm.plan.profiles import named_machine
from torchstorm.plan.solve import shift_base, solve
from torchstorm.plan.trace import Trace
from torchstorm.sizes import format_size, parse_size

Batch = TypeVar("Batch")
LossFn = Callable[[torch.nn.Module, Batch], torch.Tensor]
_ANY_GPU = "h200"  # where only bytes are asked for, not seconds


def plan_elsewhere(
    model: torch.nn.Module,
    example_batch: Batch,
    loss_fn: LossFn[Batch],
    machine: Machine,
    *,
    vram: int | str | None,
    ram: int | str | None,
    disk: str | os.PathLike[str] | None,
    optimizer: torch.optim.Optimizer | None,
) -> Plan:
    """Plans a step for a machine that is not here; see `torchstorm.plan`.

    The budgets' defaults are a Session's: 90 % of the GPU, half of the RAM, no disk.

    Raises:
        BudgetError: the budget is more than the machine has, or below what the model needs.
        SizeError: a budget cannot be read.
        UnsupportedError: the step depends on numbers, not only on shapes.
    """
    budget = _budget_elsewhere(machine, vram, ram, disk)
    found = simulate(model, example_batch, loss_fn, machine, limit_bytes=budget.vram)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if optimizer is None:
        reserve = 2 * sum(parameter.nbytes for parameter in parameters)
    else:
        reserve = expected_state_bytes(optimizer)
    trace = shift_base(found.trace, reserve)
    own_bytes = _own_bytes_on_gpu(budget.vram)
    try:
        plan = solve(trace, machine, budget, spare=_spare(budget), own_bytes=own_bytes)
    except BudgetError as error:
        raise _told(error, found, trace, machine, budget, own_bytes) from error
    return replace(plan, machine=machine, simulated=True, workload=workload_of(model, found.inputs))


def with_micro_batch(
    error: BudgetError,
    model: torch.nn.Module,
    example_batch: Batch,
    loss_fn: LossFn[Batch],
    *,
    vram: int | str | None,
    ram: int | str | None,
    disk: str | os.PathLike[str] | None,
) -> BudgetError:
    """The same error, with the micro-batch that would fit where that can be told from the model's shapes."""
    machine = replace(named_machine(_ANY_GPU), disk_write_bytes_per_s=1e9, disk_read_bytes_per_s=1e9)
    on_gpu = model_device(model).type == "cuda"
    ram_bytes = available_ram_bytes() // 2 if ram is None else parse_size(ram, name="ram")
    directory, disk_bytes = parse_disk(disk)
    budget = Budget(
        vram=error.budget_bytes if vram is None else parse_size(vram, name="vram"),
        ram=ram_bytes,
        disk=0 if directory is None else disk_bytes or 1 << 50,
    )
    try:
        found = simulate(model, example_batch, loss_fn, machine, limit_bytes=budget.vram if on_gpu else budget.ram)
    except (TorchstormError, RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError):
        return error  # nobody asked for a simulation: that it cannot be done must not hide the error there is
    if on_gpu:
        return _told(error, found, found.trace, machine, budget, _own_bytes_on_gpu(budget.vram))
    threads, block = bounce_buffers(budget.ram)
    staging = threads * block if budget.disk else 0
    return _told(error, found, _as_on_cpu(found.trace, staging), machine, replace(budget, vram=0), None)


def _spare(budget: Budget) -> Budget:
    """What a Session on a GPU keeps free of its plans."""
    return Budget(vram=vram_spare_bytes(budget.vram))


def _told(
    error: BudgetError,
    found: Simulation,
    trace: Trace,
    machine: Machine,
    budget: Budget,
    own_bytes: Callable[[int], int] | None,
) -> BudgetError:
    """The error, with the largest micro-batch beside the smallest budget."""
    batch_size = next((tensor.shape[0] for tensor in found.inputs if tensor.dim()), 1)
    most = largest_micro_batch(trace, machine, budget, batch_size, spare=_spare(budget), own_bytes=own_bytes)
    if most >= batch_size:
        return error
    of = f"of this batch of {batch_size} sample{'s' if batch_size != 1 else ''}"
    hint = f"Or a micro-batch: {most} {of} would fit by estimate." if most else f"No micro-batch {of} would fit."
    return error.with_micro_batch(hint, most)


def _budget_elsewhere(
    machine: Machine, vram: int | str | None, ram: int | str | None, disk: str | os.PathLike[str] | None
) -> Budget:
    if not machine.vram_bytes or not machine.memory_bytes_per_s or not machine.half_flops:
        raise BudgetError(
            f"machine {machine.name!r} says vram_bytes={machine.vram_bytes}, half_flops={machine.half_flops:g} and "
            f"memory_bytes_per_s={machine.memory_bytes_per_s:g}, but a forecast needs a GPU with all three above 0.",
            tier="vram",
        )
    directory, disk_bytes = parse_disk(disk)
    budget = Budget(
        vram=machine.vram_bytes * 9 // 10 if vram is None else parse_size(vram, name="vram"),
        ram=machine.ram_bytes // 2 if ram is None else parse_size(ram, name="ram"),
        disk=0 if directory is None else machine.disk_bytes if disk_bytes is None else disk_bytes,
    )
    for tier in ("vram", "ram"):
        asked, there = getattr(budget, tier), getattr(machine, f"{tier}_bytes")
        if asked > there:
            raise BudgetError(
                f"{tier}={format_size(asked)}, but {machine.name} has {format_size(there)}. Give at most "
                f"{tier}={there}, or another machine.",
                tier=tier,
                budget_bytes=asked,
                needed_bytes=there,
            )
    return budget


def _own_bytes_on_gpu(limit_bytes: int) -> Callable[[int], int]:
    """What a Session with another budget than this takes of it: larger shared buffers."""
    return lambda fast_bytes: 2 * max(0, slab_bytes(fast_bytes) - slab_bytes(limit_bytes))


def _as_on_cpu(trace: Trace, staging_bytes: int) -> Trace:
    """The same step where RAM is the fast tier: only what autograd saved counts, from the moment it does."""
    return replace(
        trace,
        device="cpu",
        moments=tuple(replace(moment, other_bytes=0, still_bytes=0) for moment in trace.moments),
        storages=tuple(replace(storage, owned=storage.made) for storage in trace.storages),
        parcels=tuple(replace(parcel, owned=parcel.made) for parcel in trace.parcels),
        base_bytes=0,
        staging_bytes=staging_bytes,
    )
