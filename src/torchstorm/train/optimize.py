"""AdamW for language models, and its learning rate schedule."""

import math

import torch
from torch import nn

from torchstorm.train.config import TrainConfig


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Creates AdamW with weight decay for matrices and embeddings only, not for biases and norms."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    # On CUDA, the fused kernel is one launch instead of hundreds. On the CPU, the default is as fast at these sizes.
    fused = all(parameter.is_cuda for parameter in parameters)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=fused)


def learning_rate(step: int, config: TrainConfig) -> float:
    """The learning rate of a step, counted from 0: linear warm-up to lr, then cosine decay to min_lr."""
    if step < config.warmup:
        return config.lr * (step + 1) / (config.warmup + 1)
    min_lr = config.lr / 10 if config.min_lr is None else config.min_lr
    share = (step - config.warmup) / max(1, config.steps - config.warmup)
    return min_lr + (config.lr - min_lr) * (1 + math.cos(math.pi * min(1.0, share))) / 2


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = lr
