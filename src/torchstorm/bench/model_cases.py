"""Hugging Face models with random weights, their batches and AdamW: the recorded ones, and tiny ones for a CPU."""

from __future__ import annotations

import contextlib
import importlib.util
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from torchstorm.bench.measure import Training
from torchstorm.bench.ways import Checkpointing, Contexts
from torchstorm.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ModelCase:
    """A Hugging Face model and its batch.

    Attributes:
        name: name in the rows.
        cls, config: names of the classes in transformers.
        options: options of the config.
        batch: number of samples.
        seq: tokens per sample; 0 for images.
        image: height and width in pixels.
        shares: budgets of a Session, of the unlimited run's peak, besides those that all models have.
        has_random_sizes: whether each batch has a size of its own, from half of the full one to that: sequences another
            length, or images another number.
    """

    name: str
    cls: str
    config: str
    options: dict[str, Any]
    batch: int
    seq: int = 0
    image: int = 224
    shares: tuple[float, ...] = ()
    has_random_sizes: bool = False

    @property
    def shape(self) -> str:
        """Name and batch, as in "llama-1.1b 2048x4" or "resnet-50 224x256"; "llama-1.1b 1024-2048x4" of all sizes."""
        largest = self.seq or self.batch
        sizes = f"{largest // 2}-{largest}" if self.has_random_sizes else f"{largest}"
        return f"{self.name} {sizes}x{self.batch}" if self.seq else f"{self.name} {self.image}x{sizes}"

    def share(self, seed: int) -> float:
        """Size of the batch that a seed gives, of the full one."""
        if not self.has_random_sizes:
            return 1.0
        largest = self.seq or self.batch
        return random.Random(seed).randint(largest // 2, largest) / largest


_SHARES = (1 / 2, 1 / 3)
ON_A_GPU = (
    # Published as TinyLlama 1.1B: eight heads of queries share one of keys and values.
    ModelCase(
        name="llama-1.1b",
        cls="LlamaForCausalLM",
        config="LlamaConfig",
        options={
            "vocab_size": 32000,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 22,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "max_position_embeddings": 8192,
        },
        batch=4,
        seq=2048,
    ),
    # Llama 3's.
    ModelCase(
        name="llama-8b",
        cls="LlamaForCausalLM",
        config="LlamaConfig",
        options={
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
        },
        batch=1,
        seq=8192,
    ),
    ModelCase(
        name="qwen2-1.5b",
        cls="Qwen2ForCausalLM",
        config="Qwen2Config",
        options={
            "vocab_size": 151936,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "max_position_embeddings": 8192,
        },
        batch=4,
        seq=4096,
    ),
    ModelCase(
        name="vit-large",
        cls="ViTForImageClassification",
        config="ViTConfig",
        options={
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "patch_size": 14,
            "image_size": 224,
            "num_labels": 1000,
        },
        batch=128,
    ),
    # With its dropout of 0.1, as BERT below.
    ModelCase(
        name="gpt2-xl",
        cls="GPT2LMHeadModel",
        config="GPT2Config",
        options={"n_embd": 1600, "n_layer": 48, "n_head": 25},
        batch=8,
        seq=1024,
    ),
    ModelCase(
        name="bert-large",
        cls="BertForMaskedLM",
        config="BertConfig",
        options={
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
        },
        batch=64,
        seq=512,
    ),
    # GPT-2 as it was published, 124 million parameters: the host is what its steps wait for.
    ModelCase(name="gpt2", cls="GPT2LMHeadModel", config="GPT2Config", options={}, batch=12, seq=1024),
    # OLMoE 1B-7B as it was published: 64 experts, 8 of them per token. The config's other defaults are its.
    ModelCase(
        name="olmoe-1b-7b",
        cls="OlmoeForCausalLM",
        config="OlmoeConfig",
        options={"intermediate_size": 1024},
        batch=2,
        seq=4096,
    ),
    # Qwen3-MoE's architecture with 16 layers and 16 experts, 4 of them per token: 2 billion parameters.
    ModelCase(
        name="qwen3-moe-2b",
        cls="Qwen3MoeForCausalLM",
        config="Qwen3MoeConfig",
        options={
            "vocab_size": 32000,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 1024,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "max_position_embeddings": 4096,
        },
        batch=2,
        seq=4096,
        shares=_SHARES,
    ),
    # ViT-H/14.
    ModelCase(
        name="vit-huge",
        cls="ViTForImageClassification",
        config="ViTConfig",
        options={
            "hidden_size": 1280,
            "intermediate_size": 5120,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "patch_size": 14,
            "image_size": 224,
            "num_labels": 1000,
        },
        batch=64,
        shares=_SHARES,
    ),
    # The config's defaults are ResNet-50.
    ModelCase(
        name="resnet-50",
        cls="ResNetForImageClassification",
        config="ResNetConfig",
        options={"num_labels": 1000},
        batch=256,
        shares=_SHARES,
    ),
)
_TINY = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 3}
ON_A_CPU = (
    ModelCase(
        name="llama-tiny",
        cls="LlamaForCausalLM",
        config="LlamaConfig",
        options={**_TINY, "intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 64},
        batch=4,
        seq=64,
    ),
    ModelCase(
        name="gpt2-tiny",
        cls="GPT2LMHeadModel",
        config="GPT2Config",
        options={
            **{"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 2, "n_positions": 64},
            **{"bos_token_id": None, "eos_token_id": None},  # its own are beyond so small a vocabulary
        },
        batch=4,
        seq=64,
    ),
    ModelCase(
        name="qwen3-moe-tiny",
        cls="Qwen3MoeForCausalLM",
        config="Qwen3MoeConfig",
        options={
            **_TINY,
            "intermediate_size": 64,
            "moe_intermediate_size": 32,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 64,
        },
        batch=4,
        seq=64,
    ),
    ModelCase(
        name="vit-tiny",
        cls="ViTForImageClassification",
        config="ViTConfig",
        options={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "patch_size": 4,
            "image_size": 32,
            "num_labels": 4,
        },
        batch=4,
        image=32,
        shares=_SHARES,
    ),
    ModelCase(
        name="resnet-tiny",
        cls="ResNetForImageClassification",
        config="ResNetConfig",
        options={"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2], "num_labels": 4},
        batch=4,
        image=64,
        shares=_SHARES,
    ),
    # Large enough that what a step computes counts, too.
    ModelCase(
        name="llama-small",
        cls="LlamaForCausalLM",
        config="LlamaConfig",
        options={
            "vocab_size": 1000,
            "hidden_size": 256,
            "intermediate_size": 688,
            "num_hidden_layers": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 256,
        },
        batch=8,
        seq=256,
        shares=(3 / 5,),
    ),
)


def check_transformers() -> None:
    """Makes sure that the models are there.

    Raises:
        ConfigError: transformers is not installed.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            "transformers is not installed, and its models are what this trains: pip install transformers."
        )


def make_model(case: ModelCase, device: torch.device) -> Training:
    """The model with random weights, bf16 on a GPU and float32 on a CPU, fused AdamW, and a batch of random data."""
    transformers = importlib.import_module("transformers")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = getattr(transformers, case.cls)(getattr(transformers, case.config)(**case.options))
    finally:
        torch.set_default_dtype(before)
    model = model.to(device=device, dtype=dtype).train()
    model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def data(seed: int) -> dict[str, Any]:
        generator = torch.Generator(device).manual_seed(seed)

        def whole(high: int, *shape: int) -> torch.Tensor:
            return torch.randint(high, shape, device=device, generator=generator)

        share = case.share(seed)
        if case.seq:
            tokens = whole(model.config.vocab_size, case.batch, round(case.seq * share))
            return {"input_ids": tokens, "labels": tokens}
        batch = round(case.batch * share)
        pixels = torch.randn(batch, 3, case.image, case.image, device=device, generator=generator)
        return {"pixel_values": pixels.to(dtype), "labels": whole(case.options["num_labels"], batch)}

    def loss(batch: dict[str, Any]) -> torch.Tensor:
        found: torch.Tensor = model(**batch).loss
        return found

    share = case.share if case.has_random_sizes else None
    return Training(model=model, device=device, data=data, loss=loss, optimizer=optimizer, share=share)


def checkpointing_of(model: Any) -> Checkpointing | None:
    """The model's own gradient checkpointing, None where it has none."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        return None
    switch = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"  # the newer name

    @contextlib.contextmanager
    def checkpointing(contexts: Contexts | None) -> Iterator[None]:
        options = {} if contexts is None else {"context_fn": contexts}
        getattr(model, f"{switch}_checkpointing_enable")({"use_reentrant": False, **options})
        try:
            yield
        finally:
            getattr(model, f"{switch}_checkpointing_disable")()

    return checkpointing
