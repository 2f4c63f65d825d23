"""Implements `torchstorm plan`: forecasts the time and memory of a training run. It measures two steps on random
tokens, without training. For another machine (`--machine`), it runs no step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from rich.console import Console

from torchstorm.errors import ConfigError
from torchstorm.models.families import LanguageModel, make_model
from torchstorm.offload.preview import plan
from torchstorm.paths import check_output
from torchstorm.plan.plan import Plan
from torchstorm.plan.profiles import named_machine
from torchstorm.train.config import TrainConfig
from torchstorm.train.device import resolve_device
from torchstorm.train.loop import deterministic, micro_loss, model_config
from torchstorm.train.optimize import make_optimizer
from torchstorm.train.result import write_json

_BYTES_VOCABULARY = 256


def plan_training(options: Mapping[str, Any], *, console: Console, machine: str | None = None) -> Plan:
    """Prints and returns the plan for one micro-batch of a training run.

    Args:
        options: fields of `TrainConfig` by name; the others have their defaults. With `json`, the plan is written to
            that file, for `Plan.load`.
        console: where to print.
        machine: name of a machine profile; None for this machine.

    Raises:
        TorchstormError: see `torchstorm.errors`.
    """
    config = TrainConfig(**options)
    if config.json is not None:
        check_output(config.json, name="--json")
    found = _plan_here(config) if machine is None else _plan_elsewhere(config, machine)
    console.print(str(found), markup=False, highlight=False, soft_wrap=True)
    if config.json is not None:
        write_json(config.json, found.to_dict())
    return found


def _plan_here(config: TrainConfig) -> Plan:
    device = resolve_device(config.device, vram=config.vram)
    torch.manual_seed(config.seed)
    model = make_model(model_config(config, _BYTES_VOCABULARY)).to(device)
    with deterministic(device):
        return _plan(config, model, device, None)


def _plan_elsewhere(config: TrainConfig, machine: str) -> Plan:
    named_machine(machine)
    if config.device is not None:
        raise ConfigError(
            f"--device {config.device} was given together with --machine {machine}, whose forecast uses no device: "
            "leave one of them out."
        )
    shape = model_config(config, _BYTES_VOCABULARY)
    with torch.device("meta"):  # shapes are enough, so the model may exceed this machine's memory
        model = make_model(shape)
    return _plan(config, model, torch.device("cpu"), machine)


def _plan(config: TrainConfig, model: LanguageModel, device: torch.device, machine: str | None) -> Plan:
    # Inputs and targets in separate storages, as in training, so that the traced step is the same.
    x_BT, y_BT = (torch.randint(0, _BYTES_VOCABULARY, (config.batch, config.seq), device=device) for _ in range(2))

    def loss_fn(_: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return micro_loss(model, config, device, batch[0], batch[1])

    return plan(
        model,
        (x_BT, y_BT),
        loss_fn,
        vram=config.vram,
        ram=config.ram,
        disk=config.disk,
        optimizer=make_optimizer(model, config),
        machine=machine,
    )
