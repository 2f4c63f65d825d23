"""The named sizes of GPT and xLSTM models, and a function that creates either."""

from __future__ import annotations

from torchstorm.models import gpt, xlstm
from torchstorm.models.gpt import GPT, GPTConfig
from torchstorm.models.xlstm import XLSTM, XLSTMConfig

LanguageModel = GPT | XLSTM
"""Called with ids and targets (B, T), returns logits and a loss. `generate` continues a text."""

ModelConfig = GPTConfig | XLSTMConfig

SIZES: dict[str, ModelConfig] = {**gpt.SIZES, **xlstm.SIZES}
"""All named sizes."""


def make_model(config: ModelConfig) -> LanguageModel:
    """Creates a model with new random weights."""
    return GPT(config) if isinstance(config, GPTConfig) else XLSTM(config)
