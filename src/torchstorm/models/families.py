"""GPT and xLSTM as one: their named sizes, and how a model is made from a shape of either."""

from __future__ import annotations

from torchstorm.models import gpt, xlstm
from torchstorm.models.gpt import GPT, GPTConfig
from torchstorm.models.xlstm import XLSTM, XLSTMConfig

LanguageModel = GPT | XLSTM
"""Called with ids and targets (B, T), gives logits and a loss; `generate` continues a text."""

ModelConfig = GPTConfig | XLSTMConfig

SIZES: dict[str, ModelConfig] = {**gpt.SIZES, **xlstm.SIZES}
"""Every named size."""


def make_model(config: ModelConfig) -> LanguageModel:
    """The model of that shape, with fresh weights."""
    return GPT(config) if isinstance(config, GPTConfig) else XLSTM(config)
