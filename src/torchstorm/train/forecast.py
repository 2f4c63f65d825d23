"""The job behind `torchstorm plan`: what would this training cost? Two measured steps on random tokens, no training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from torchstorm.models.gpt import GPT
from torchstorm.offload.planning import plan
from torchstorm.plan.plan import Plan
from torchstorm.train.config import TrainConfig
from torchstorm.train.device import resolve_device
from torchstorm.train.loop import autocast, deterministic, loss_of, model_config
from torchstorm.train.optimize import make_optimizer
from torchstorm.train.result import write_json

_BYTES_VOCABULARY = 256


def plan_training(options: Mapping[str, Any], *, console: Console) -> Plan:
    """Prints and returns the plan of one micro-batch of the run that `options` describe.

    Args:
        options: fields of `TrainConfig`, by name; those left out have its defaults. With `json`, the plan is written
            there.
        console: where to print.

    Raises:
        TorchstormError: as the message says; see `torchstorm.errors`.
    """
    config = TrainConfig(**options)
    device = resolve_device(config.device, vram=config.vram)
    torch.manual_seed(config.seed)
    model = GPT(model_config(config, _BYTES_VOCABULARY)).to(device)
    tokens = torch.randint(0, _BYTES_VOCABULARY, (2, config.batch, config.seq), device=device)

    def loss_fn(_: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with autocast(config, device):
            return loss_of(model, batch[0], batch[1])

    with deterministic(device):
        found = plan(
            model,
            tokens,
            loss_fn,
            vram=config.vram,
            ram=config.ram,
            disk=config.disk,
            optimizer=make_optimizer(model, config),
        )
    console.print(str(found), markup=False, highlight=False, soft_wrap=True)
    if config.json is not None:
        write_json(Path(config.json), found.to_dict())
    return found
