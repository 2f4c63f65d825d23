"""Sampling of the next token from logits, for `generate` of all language models."""

from __future__ import annotations

import torch
from torch import Tensor

from torchstorm.errors import ConfigError


def check_sampling(idx_BT: Tensor, *, temperature: float, top_k: int | None) -> None:
    """Checks the arguments of `generate`.

    Raises:
        ConfigError: idx_BT (B, T) has no token, `temperature` is negative, or `top_k` is below 1.
    """
    if idx_BT.shape[1] < 1:
        raise ConfigError(f"idx_BT has shape {tuple(idx_BT.shape)}, but each sequence needs at least 1 token.")
    if temperature < 0:
        raise ConfigError(f"temperature={temperature}, but it must be 0 (the likeliest token) or above.")
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k={top_k}, but it must be at least 1, or None for the whole vocabulary.")


def draw(logits_BV: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """Samples one int64 id for each row of logits (B, V). Returns (B, 1).

    Args:
        logits_BV: logits of the next token.
        temperature: divides the logits; 0 takes the most likely token.
        top_k: sample only from the k most likely tokens; None for all.
        generator: random generator; None for PyTorch's global one.
    """
    if temperature == 0:
        return logits_BV.argmax(dim=-1, keepdim=True)
    logits_BV = logits_BV / temperature
    if top_k is not None and top_k < logits_BV.shape[-1]:
        kept_BK, kept_id_BK = logits_BV.topk(top_k, dim=-1)
        return kept_id_BK.gather(1, torch.multinomial(kept_BK.softmax(dim=-1), 1, generator=generator))
    return torch.multinomial(logits_BV.softmax(dim=-1), 1, generator=generator)
