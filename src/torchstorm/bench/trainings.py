"""Trainings of whole language models, as benches run them."""

from __future__ import annotations

import torch

from torchstorm.bench.measure import Training
from torchstorm.models.families import ModelConfig, make_model


def make_training(config: ModelConfig, *, batch: int, seq: int, dtype: torch.dtype, device: torch.device) -> Training:
    """A language model, random tokens to predict, and AdamW.

    Args:
        config: the model's shape.
        batch: sequences.
        seq: tokens in a sequence.
        dtype: of weights, gradients and optimizer state.
        device: where.
    """
    torch.manual_seed(0)
    with torch.device(device):
        model = make_model(config).to(dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def data(seed: int) -> torch.Tensor:
        generator = torch.Generator(device).manual_seed(seed)
        return torch.randint(config.vocab_size, (batch, seq + 1), device=device, generator=generator)

    def loss(tokens_BT: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor | None = model(tokens_BT[:, :-1], tokens_BT[:, 1:]).loss
        assert found is not None
        return found

    return Training(model=model, device=device, data=data, loss=loss, optimizer=optimizer)
