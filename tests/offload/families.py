"""Small models of 18 families of transformers, unmodified and randomly initialised, and a training step of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

VOCAB = 64
BATCH, LENGTH = 2, 24

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
_DECODER: dict[str, Any] = {
    **_COMMON,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
_ENCODER: dict[str, Any] = {
    **_COMMON,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


def language_batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCAB, (BATCH, LENGTH))
    return {"input_ids": ids, "labels": ids}


def image_batch() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, 16, 16), "labels": torch.randint(0, 4, (BATCH,))}


def speech_batch() -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(BATCH, 8, 48), "labels": torch.randint(3, VOCAB, (BATCH, 12))}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models.

    Attributes:
        model: its class in transformers.
        config: its configuration's class.
        options: of the configuration.
        dropout: names of the options that are rates of dropout.
        batch: makes a batch.
    """

    model: str
    config: str
    options: dict[str, Any]
    dropout: tuple[str, ...]
    batch: Callable[[], dict[str, torch.Tensor]] = language_batch

    def make(self, *, dropout: bool) -> nn.Module:
        """A model in training mode."""
        rates = dict.fromkeys(self.dropout, 0.1 if dropout else 0.0)
        config = getattr(transformers, self.config)(**self.options, **rates)
        model: nn.Module = getattr(transformers, self.model)(config)
        return model.train()

    def step(self, model: nn.Module) -> torch.Tensor:
        """Forward and backward of a random batch; returns the loss."""
        loss: torch.Tensor = model(**self.batch()).loss
        loss.backward()
        return loss


FAMILIES = {
    "Llama": Family(model="LlamaForCausalLM", config="LlamaConfig", options=_DECODER, dropout=("attention_dropout",)),
    "Mistral": Family(
        model="MistralForCausalLM", config="MistralConfig", options=_DECODER, dropout=("attention_dropout",)
    ),
    "Qwen3": Family(model="Qwen3ForCausalLM", config="Qwen3Config", options=_DECODER, dropout=("attention_dropout",)),
    "Gemma2": Family(
        model="Gemma2ForCausalLM",
        config="Gemma2Config",
        options={**_DECODER, "query_pre_attn_scalar": 16, "sliding_window": 8},
        dropout=("attention_dropout",),
    ),
    "Phi3": Family(
        model="Phi3ForCausalLM",
        config="Phi3Config",
        options={key: value for key, value in _DECODER.items() if key != "head_dim"},
        dropout=("attention_dropout", "resid_pdrop", "embd_pdrop"),
    ),
    "OLMo2": Family(
        model="Olmo2ForCausalLM",
        config="Olmo2Config",
        options={key: value for key, value in _DECODER.items() if key != "head_dim"},
        dropout=("attention_dropout",),
    ),
    "Falcon": Family(
        model="FalconForCausalLM",
        config="FalconConfig",
        options={**_COMMON, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4},
        dropout=("attention_dropout", "hidden_dropout"),
    ),
    "GPT-2": Family(
        model="GPT2LMHeadModel",
        config="GPT2Config",
        options={**_COMMON, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64},
        dropout=("attn_pdrop", "resid_pdrop", "embd_pdrop"),
    ),
    "GPT-NeoX": Family(
        model="GPTNeoXForCausalLM",
        config="GPTNeoXConfig",
        options=_ENCODER,
        dropout=("attention_dropout", "hidden_dropout"),
    ),
    "OPT": Family(
        model="OPTForCausalLM",
        config="OPTConfig",
        options={
            **_COMMON,
            "hidden_size": 64,
            "ffn_dim": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "word_embed_proj_dim": 64,
        },
        dropout=("attention_dropout", "dropout"),
    ),
    "BLOOM": Family(
        model="BloomForCausalLM",
        config="BloomConfig",
        options={**_COMMON, "hidden_size": 64, "n_layer": 4, "n_head": 4},
        dropout=("attention_dropout", "hidden_dropout"),
    ),
    "BERT": Family(
        model="BertForMaskedLM",
        config="BertConfig",
        options=_ENCODER,
        dropout=("attention_probs_dropout_prob", "hidden_dropout_prob"),
    ),
    "Mixtral": Family(
        model="MixtralForCausalLM",
        config="MixtralConfig",
        options={**_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2},
        dropout=("attention_dropout",),
    ),
    "T5": Family(
        model="T5ForConditionalGeneration",
        config="T5Config",
        options={
            **_COMMON,
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 96,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
        dropout=("dropout_rate",),
    ),
    "Whisper": Family(
        model="WhisperForConditionalGeneration",
        config="WhisperConfig",
        options={
            **_COMMON,
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 96,
            "decoder_ffn_dim": 96,
            "num_mel_bins": 8,
            "max_source_positions": 24,
            "max_target_positions": 24,
            "decoder_start_token_id": 1,
        },
        dropout=("attention_dropout", "activation_dropout", "dropout"),
        batch=speech_batch,
    ),
    "ViT": Family(
        model="ViTForImageClassification",
        config="ViTConfig",
        options={
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 4,
            "num_labels": 4,
        },
        dropout=("attention_probs_dropout_prob", "hidden_dropout_prob"),
        batch=image_batch,
    ),
    "Qwen2 MoE": Family(
        model="Qwen2MoeForCausalLM",
        config="Qwen2MoeConfig",
        options={
            **{key: value for key, value in _DECODER.items() if key != "head_dim"},
            **_EXPERTS,
            "shared_expert_intermediate_size": 48,
        },
        dropout=("attention_dropout",),
    ),
    "Mamba-2": Family(
        model="Mamba2ForCausalLM",
        config="Mamba2Config",
        options={
            **_COMMON,
            "hidden_size": 64,
            "state_size": 16,
            "num_heads": 8,
            "head_dim": 16,
            "n_groups": 2,
            "num_hidden_layers": 4,
            "chunk_size": 8,
        },
        dropout=(),
    ),
}
