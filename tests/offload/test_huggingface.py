"""Unmodified Hugging Face models, randomly initialised: a Session at about half of what they save changes no bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from offload.steps import Step, assert_exact_within

transformers = pytest.importorskip("transformers")

VOCAB = 64
BATCH, LENGTH = 4, 48

pytestmark = pytest.mark.no_cover


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Models this small only lose by more, and much where others use the cores; the root conftest puts it back."""
    torch.set_num_threads(1)


def tokens() -> torch.Tensor:
    return torch.randint(3, VOCAB, (BATCH, LENGTH))


def language_step(model: nn.Module, index: int) -> torch.Tensor:
    ids = tokens()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss


def padded_step(model: nn.Module, index: int) -> torch.Tensor:
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[1:, LENGTH // 2 :] = 0
    loss = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), use_cache=False).loss
    loss.backward()
    return loss


def sequence_to_sequence_step(model: nn.Module, index: int) -> torch.Tensor:
    loss = model(input_ids=tokens(), labels=tokens()).loss
    loss.backward()
    return loss


def image_step(model: nn.Module, index: int) -> torch.Tensor:
    loss = model(pixel_values=torch.randn(BATCH, 3, 32, 32), labels=torch.randint(0, 4, (BATCH,))).loss
    loss.backward()
    return loss


def large_image_step(model: nn.Module, index: int) -> torch.Tensor:
    loss = model(pixel_values=torch.randn(2 * BATCH, 3, 64, 64), labels=torch.randint(0, 4, (2 * BATCH,))).loss
    loss.backward()
    return loss


def recurrent_step(model: nn.Module, index: int) -> torch.Tensor:
    ids = torch.randint(3, VOCAB, (BATCH, 12))  # the scan without kernels is a loop over the sequence
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss


def llama(**options: object) -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            **options,
        )
    )


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCAB,
            n_positions=64,
            n_embd=64,
            n_layer=3,
            n_head=4,
            resid_pdrop=0.2,
            attn_pdrop=0.2,
            embd_pdrop=0.2,
        )
    )


def qwen_moe() -> nn.Module:
    return transformers.Qwen2MoeForCausalLM(
        transformers.Qwen2MoeConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            moe_intermediate_size=48,
            shared_expert_intermediate_size=96,
            num_experts=4,
            num_experts_per_tok=2,
            output_router_logits=True,
        )
    )


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=VOCAB,
            d_model=64,
            d_kv=16,
            d_ff=128,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.1,
            decoder_start_token_id=0,
        )
    )


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=128,
            image_size=32,
            patch_size=4,
            num_labels=4,
            hidden_dropout_prob=0.1,
        )
    )


def mamba() -> nn.Module:
    return transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=VOCAB, hidden_size=64, state_size=8, num_hidden_layers=2, use_cache=False)
    )


def resnet() -> nn.Module:
    return transformers.ResNetForImageClassification(
        transformers.ResNetConfig(
            embedding_size=16, hidden_sizes=[16, 32], depths=[3, 3], layer_type="basic", num_labels=4
        )
    )


CASES: dict[str, tuple[Callable[[], nn.Module], Step]] = {
    "Llama": (llama, language_step),
    "Llama with padding and eager attention": (lambda: llama(attn_implementation="eager"), padded_step),
    "GPT-2 with dropout": (gpt2, language_step),
    "Qwen2 MoE": (qwen_moe, language_step),
    "T5": (t5, sequence_to_sequence_step),
    "ViT": (vit, image_step),
    "Mamba": (mamba, recurrent_step),
    "ResNet": (resnet, large_image_step),
}


@pytest.mark.parametrize("name", CASES)
def test_a_hugging_face_model_trains_to_the_same_bits_at_half_of_what_it_saves(name: str, tmp_path: Path) -> None:
    make, step = CASES[name]
    session = assert_exact_within(make, step, tmp_path, share=0.5, num_steps=3)
    assert session.report().moved_bytes > 0


def checkpointing_llama() -> nn.Module:
    model = llama()
    # transformers 5 renames the method; before that only the old name exists.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    return model.train()


def test_a_model_that_checkpoints_itself_trains_to_the_same_bits(tmp_path: Path) -> None:
    assert_exact_within(checkpointing_llama, language_step, tmp_path, share=0.6, num_steps=3)


def test_batch_norm_counts_and_averages_as_without_a_session(tmp_path: Path) -> None:
    model = resnet()
    names = {name for name, _ in model.named_buffers()}
    assert any("num_batches_tracked" in name for name in names), "this model was to show that buffers are kept exact"
    # `assert_exact_within` compares the whole state_dict, these buffers among it.
    assert names <= set(model.state_dict())
    assert_exact_within(resnet, large_image_step, tmp_path, share=0.5, num_steps=3)
