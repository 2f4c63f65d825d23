"""Blocks are found by structure, whatever they are called and wherever they lie."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchstorm.errors import ConfigError
from torchstorm.models.gpt import GPT, GPTConfig
from torchstorm.offload.compiled.blocks import named_blocks, repeated_blocks, structure

CONFIG = GPTConfig(vocab_size=16, max_seq_len=8, num_layers=3, num_heads=2, width=8)


class Mixer(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.GELU())
        self.norm = nn.LayerNorm(width)


class Residual(nn.Module):
    """A residual block of a convolutional network; the first of a stage changes the number of channels."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, after, 3)
        self.norm = nn.BatchNorm2d(after)
        if before != after:
            self.shortcut = nn.Conv2d(before, after, 1)


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixer() for _ in range(2))
        self.down = nn.Linear(8, 8)


class WithExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4))


def names(model: nn.Module) -> list[str]:
    return list(named_blocks(model))


def test_the_layers_of_a_transformer_are_found() -> None:
    assert names(GPT(CONFIG)) == ["blocks.0", "blocks.1", "blocks.2"]


def test_layers_that_are_attributes_of_their_own_are_found() -> None:
    model = nn.Module()
    for name in ("encoder", "decoder"):
        setattr(model, name, nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 2, enable_nested_tensor=False))
    assert names(model) == ["encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1"]


def test_residual_blocks_are_found_in_every_stage_the_first_of_each_included() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.Sequential(Residual(4, 4), Residual(4, 4)),
        nn.Sequential(Residual(4, 8), Residual(8, 8)),
    )
    assert names(model) == ["1.0", "1.1", "2.0", "2.1"]
    blocks = repeated_blocks(model)
    assert structure(blocks[0]) == structure(blocks[1])
    assert structure(blocks[2]) != structure(blocks[3])


def test_of_stages_made_of_blocks_the_blocks_are_found() -> None:
    model = nn.Sequential(Stage(), Stage())
    assert names(model) == ["0.layers.0", "0.layers.1", "1.layers.0", "1.layers.1"]


def test_a_mixture_of_experts_is_one_block() -> None:
    assert names(nn.Sequential(WithExperts(), WithExperts())) == ["0", "1"]


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(4, 4),
        nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)),
        nn.Sequential(Mixer(), nn.Linear(8, 8)),
        nn.Sequential(nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU())),
    ],
    ids=["one layer", "bare layers", "one block", "nothing to learn"],
)
def test_a_model_without_repeated_blocks_has_none(model: nn.Module) -> None:
    assert repeated_blocks(model) == []


def test_a_module_that_is_used_twice_is_one_block() -> None:
    block = Mixer()
    assert len(repeated_blocks(nn.Sequential(block, Mixer(), block))) == 2


def test_structure_tells_frozen_from_trained_and_one_dtype_from_another() -> None:
    frozen = Mixer()
    frozen.norm.weight.requires_grad_(False)
    kinds = {structure(module) for module in (Mixer(), Mixer(), frozen, Mixer().to(torch.bfloat16), Mixer(4))}
    assert len(kinds) == 4


def test_the_user_may_name_blocks_or_give_them() -> None:
    model = GPT(CONFIG)
    found = named_blocks(model, ["blocks.2", model.ln_f])
    assert list(found) == ["blocks.2", "ln_f"]
    assert found["blocks.2"] is model.blocks[2]


@pytest.mark.parametrize("blocks", [["blocks.7"], [nn.Linear(2, 2)], [""]])
def test_a_block_that_the_model_does_not_have_is_refused(blocks: list[nn.Module | str]) -> None:
    with pytest.raises(ConfigError, match=r"no module inside the GPT .* 'wte'"):
        named_blocks(GPT(CONFIG), blocks)


def test_a_block_within_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'blocks\.1\.mlp', which lies within the block 'blocks\.1'"):
        named_blocks(GPT(CONFIG), ["blocks.1", "blocks.1.mlp"])
