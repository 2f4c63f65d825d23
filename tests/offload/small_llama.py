"""A Llama of transformers that takes no time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")


def llama(num_words: int = 100) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=num_words,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config)
