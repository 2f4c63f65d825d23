"""Layers and a loss of `torchstorm.kernels` within a budget: single operators, moved and computed again to the bit."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from offload.forced import at_random, force_recompute
from offload.steps import assert_exact_within, assert_same, saved_bytes, train
from offload.test_xlstm import rerun_kernels
from torchstorm.kernels import linear, linear_cross_entropy
from torchstorm.kernels.linear_cross_entropy import chunks
from torchstorm.models.gpt import GPT, GPTConfig
from torchstorm.offload.session import Session


class Model(nn.Module):
    """Tokens to a loss: an embedding, two layers with an activation, and the head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 32)
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(ids)
        h = linear(x, self.up.weight, self.up.bias, activation="gelu", variant="fused")
        x = x + linear(h, self.down.weight, self.down.bias, activation="relu", variant="fused")
        return linear_cross_entropy(x, self.embedding.weight, targets, softcap=10.0, variant="chunked")


def step(model: nn.Module, index: int) -> Tensor:
    ids = torch.randint(0, 500, (8, 65), generator=torch.Generator().manual_seed(index))
    loss: Tensor = model(ids[:, :-1], ids[:, 1:])
    loss.backward()
    return loss


def test_a_session_changes_no_bit(tmp_path: Path) -> None:
    assert_exact_within(Model, step, tmp_path, share=0.6)


def test_a_session_changes_no_bit_of_a_gpt_with_its_head_in_chunks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(chunks, "LEAST_BYTES", {"cpu": 0, "cuda": 0})
    config = GPTConfig(vocab_size=500, max_seq_len=64, num_layers=2, num_heads=2, width=32, dropout=0.1)

    def one(model: nn.Module, index: int) -> Tensor:
        ids = torch.randint(0, 500, (8, 65), generator=torch.Generator().manual_seed(index))
        loss: Tensor = model(ids[:, :-1], ids[:, 1:]).loss
        loss.backward()
        return loss

    assert_exact_within(lambda: GPT(config), one, tmp_path, share=0.6)


def test_what_is_kept_computed_again_and_moved_at_random_mixes_to_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    budget = int(saved_bytes(Model, step) * 0.6)
    expected, _ = train(Model, step, None)
    plans = force_recompute(monkeypatch, at_random(random.Random(0)))
    found, _ = train(Model, step, lambda model, _: Session(model, ram=budget, disk=str(tmp_path)))
    assert_same(expected, found)
    names = {"torchstorm.linear_forward.default", "torchstorm.linear_cross_entropy_forward.default"}
    assert names == set().union(*map(rerun_kernels, plans))
