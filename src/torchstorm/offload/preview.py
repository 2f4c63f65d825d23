"""`torchstorm.plan`: forecasts the time and memory of training a model within a budget, without training."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from torchstorm.errors import BudgetError
from torchstorm.offload.session import Session
from torchstorm.offload.simulated.named_machine import plan_elsewhere, with_micro_batch
from torchstorm.plan.machine import Machine
from torchstorm.plan.plan import Plan
from torchstorm.plan.profiles import named_machine

Batch = TypeVar("Batch")


def plan(
    model: torch.nn.Module,
    example_batch: Batch,
    loss_fn: Callable[[torch.nn.Module, Batch], torch.Tensor],
    *,
    vram: int | str | None = None,
    ram: int | str | None = None,
    disk: str | os.PathLike[str] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    machine: str | Machine | None = None,
) -> Plan:
    """Plans a training step within a budget, from two measured steps; for another machine from shapes alone.

    Weights are not changed. Gradients, buffers and torch's random states are restored afterwards.

    Args:
        model: any nn.Module. With `machine`, on any device, also "meta", so it can exceed this machine's memory.
        example_batch: a batch as in training.
        loss_fn: called as `loss_fn(model, example_batch)`; returns the loss, a scalar.
        vram, ram, disk, optimizer: as in `Session`; with `machine`, those of that machine.
        machine: "rtx4090", "rtx3090", "a100", "h100", "h200" or "gb200", or a `Machine` with the rates of its GPU. The
            step is then computed from shapes, and the plan is marked as a forecast.

    Returns:
        The plan, with its forecast; prints as a table.

    Raises:
        BudgetError: the model needs more than the budget, or the step fits only without a plan. The message names the
            smallest budget, and the micro-batch that would fit.
        PlanError: the machine is unknown. The message lists the known ones.
        SizeError, DeviceError, StorageError, UnsupportedError: as in `Session`; UnsupportedError also if a step for
            another machine depends on values, not only on shapes.
    """
    if machine is not None:
        target = named_machine(machine) if isinstance(machine, str) else machine
        return plan_elsewhere(model, example_batch, loss_fn, target, vram=vram, ram=ram, disk=disk, optimizer=optimizer)
    try:
        with _unchanged(model), Session(model, vram=vram, ram=ram, disk=disk, optimizer=optimizer) as session:
            for _ in range(2):  # the second step's times are free of warm-up
                for parameter in model.parameters():
                    parameter.grad = None
                with session.step():
                    loss_fn(model, example_batch).backward()
            found = session.plan()
            report = session.report()
    except BudgetError as error:
        raise with_micro_batch(error, model, example_batch, loss_fn, vram=vram, ram=ram, disk=disk) from error
    if found is None:
        raise BudgetError(
            "This step stays within the budget only without a plan, because storages stay saved after "
            f"their first use (retain_graph, double backward). The measurement without a plan:\n{report}"
        )
    return found


@contextlib.contextmanager
def _unchanged(model: torch.nn.Module) -> Iterator[None]:
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = sorted({p.device.index for p, _ in gradients if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
