"""GPT-2's architecture in plain PyTorch.

    x_BTC = token embedding + learned position embedding, dropout
    each block:  x_BTC = x_BTC + attention(LayerNorm(x_BTC))
                 x_BTC = x_BTC + mlp(LayerNorm(x_BTC))
    logits_BTV = LayerNorm(x_BTC) @ token embedding transposed (the head is tied to the embedding)

Shape suffixes: B sequences per batch, T tokens per sequence, C width of the residual stream, V vocabulary,
H attention heads, D = C / H width of one head, F = 4 C width inside the MLP. `x_BTC` has the shape (B, T, C).

One `c_attn` computes q, k and v at once, as three views of one (B, T, 3 C) buffer. Attention is
`scaled_dot_product_attention` with `is_causal=True`, so PyTorch picks the kernel; on CUDA without dropout no (T, T)
matrix is ever stored. Module names follow GPT-2's own (wte, wpe, ln_1, c_attn, ...), with the blocks in `blocks`.
Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", and the released code's layout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchstorm.errors import ConfigError
from torchstorm.models.head import next_token_loss
from torchstorm.models.norm import LayerNorm
from torchstorm.models.sampling import check_sampling, draw

_INIT_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The configuration of a GPT.

    Attributes:
        vocab_size: V, the number of token ids.
        max_seq_len: the largest T; each position has a learned embedding.
        num_layers: number of blocks.
        num_heads, width: H and C; H must divide C.
        dropout: probability in [0, 1) of zeroing, on embeddings, attention weights and both residual branches.

    Raises:
        ConfigError: a count is below 1, `num_heads` does not divide `width`, or `dropout` is outside [0, 1).
    """

    vocab_size: int = 50257
    max_seq_len: int = 1024
    num_layers: int
    num_heads: int
    width: int
    dropout: float = 0.1

    def __post_init__(self) -> None:
        for name in ("vocab_size", "max_seq_len", "num_layers", "num_heads", "width"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}, but it must be at least 1.")
        if self.width % self.num_heads:
            raise ConfigError(
                f"width={self.width} cannot be split over num_heads={self.num_heads}: each head would be "
                f"{self.width / self.num_heads:.2f} wide. Use width="
                f"{self.num_heads * math.ceil(self.width / self.num_heads)}, or another number of heads."
            )
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout={self.dropout}, but it is a probability: 0 <= dropout < 1.")


SIZES: dict[str, GPTConfig] = {
    "gpt-nano": GPTConfig(num_layers=3, num_heads=3, width=48),
    "gpt-micro": GPTConfig(num_layers=4, num_heads=4, width=128),
    "gpt-mini": GPTConfig(num_layers=6, num_heads=6, width=192),
    "gpt2": GPTConfig(num_layers=12, num_heads=12, width=768),
    "gpt2-medium": GPTConfig(num_layers=24, num_heads=16, width=1024),
    "gpt2-large": GPTConfig(num_layers=36, num_heads=20, width=1280),
    "gpt2-xl": GPTConfig(num_layers=48, num_heads=25, width=1600),
}
"""The named sizes, with GPT-2's vocabulary of 50257 and 1024 positions. `dataclasses.replace` changes other options."""


class GPTOutput(NamedTuple):
    """The result of forward: logits (B, T, V), or with targets the mean cross-entropy in nats."""

    logits: Tensor | None
    loss: Tensor | None


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.c_attn = nn.Linear(config.width, 3 * config.width)
        self.c_proj = nn.Linear(config.width, config.width)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Maps (B, T, C) to (B, T, C). Position t attends to positions 0..t."""
        B, T, C = x_BTC.shape
        q_BHTD, k_BHTD, v_BHTD = (
            part_BTC.view(B, T, self.num_heads, C // self.num_heads).transpose(1, 2)
            for part_BTC in self.c_attn(x_BTC).split(C, dim=2)
        )
        y_BHTD = F.scaled_dot_product_attention(
            q_BHTD, k_BHTD, v_BHTD, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        y_BTC = y_BHTD.transpose(1, 2).reshape(B, T, C)
        out_BTC: Tensor = self.resid_dropout(self.c_proj(y_BTC))
        return out_BTC


class MLP(nn.Module):
    """Two linear layers with GELU (tanh form, as GPT-2 was trained) between."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.width, 4 * config.width)
        self.c_proj = nn.Linear(4 * config.width, config.width)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Maps (B, T, C) to (B, T, C)."""
        hidden_BTF = F.gelu(self.c_fc(x_BTC), approximate="tanh")
        out_BTC: Tensor = self.resid_dropout(self.c_proj(hidden_BTF))
        return out_BTC


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(config.width)
        self.attn = Attention(config)
        self.ln_2 = LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Maps (B, T, C) to (B, T, C)."""
        x_BTC = x_BTC + self.attn(self.ln_1(x_BTC))
        out_BTC: Tensor = x_BTC + self.mlp(self.ln_2(x_BTC))
        return out_BTC


class GPT(nn.Module):
    """A GPT-2 language model.

    Args:
        config: its configuration. Weights are drawn from PyTorch's global generator: normal with standard deviation
            0.02, for projections into the residual stream scaled by 1 / sqrt(2 * num_layers); biases are zero.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.width)
        self.wpe = nn.Embedding(config.max_seq_len, config.width)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.ln_f = LayerNorm(config.width)
        self.lm_head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        # named_parameters lists the tied weight once, under wte, so it is initialized once.
        residual_std = _INIT_STD / math.sqrt(2 * config.num_layers)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() >= 2:
                nn.init.normal_(parameter, std=residual_std if name.endswith("c_proj.weight") else _INIT_STD)

    def forward(self, idx_BT: Tensor, targets_BT: Tensor | None = None) -> GPTOutput:
        """Predicts the next token at each position.

        Args:
            idx_BT: int64 token ids (B, T), T at most `config.max_seq_len`.
            targets_BT: int64 ids (B, T) to predict, -100 to ignore a position; None for no loss.

        Returns:
            Logits (B, T, V); with targets only the mean cross-entropy in nats, which needs less memory.

        Raises:
            ConfigError: T is above `config.max_seq_len`.
        """
        _, T = idx_BT.shape
        if self.config.max_seq_len < T:
            raise ConfigError(
                f"The input has {T} tokens, but this model has max_seq_len={self.config.max_seq_len} positions: "
                f"cut the input, or build the model with max_seq_len={T}."
            )
        position_T = torch.arange(T, device=idx_BT.device)
        x_BTC = self.drop(self.wte(idx_BT) + self.wpe(position_T))
        for block in self.blocks:
            x_BTC = block(x_BTC)
        x_BTC = self.ln_f(x_BTC)
        if targets_BT is None:
            return GPTOutput(self.lm_head(x_BTC), None)
        return GPTOutput(None, next_token_loss(x_BTC, self.lm_head.weight, targets_BT))

    def num_params(self, *, embeddings: bool = True) -> int:
        """Number of parameters, the tied head once. Without `embeddings`, wte (with the head) and wpe do not count."""
        total = sum(parameter.numel() for parameter in self.parameters())
        return total if embeddings else total - self.wte.weight.numel() - self.wpe.weight.numel()

    @torch.no_grad()
    def generate(
        self,
        idx_BT: Tensor,
        num_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continues each sequence by `num_tokens` tokens, one at a time, without a cache.

        Dropout is off. Of a sequence longer than `config.max_seq_len`, only the last tokens are used.

        Args:
            idx_BT: int64 ids (B, T), T at least 1.
            num_tokens: number of tokens to add.
            temperature: divides the logits; 0 always takes the most likely token.
            top_k: sample only from the k most likely tokens; None for all.
            generator: random generator on idx_BT's device; None for PyTorch's global one.

        Returns:
            int64 ids (B, T + num_tokens), starting with idx_BT.

        Raises:
            ConfigError: idx_BT is empty, `temperature` is negative or `top_k` below 1.
        """
        check_sampling(idx_BT, temperature=temperature, top_k=top_k)
        was_training = self.training
        self.eval()
        try:
            for _ in range(num_tokens):
                logits_BV = self(idx_BT[:, -self.config.max_seq_len :]).logits[:, -1].float()
                next_B1 = draw(logits_BV, temperature, top_k, generator)
                idx_BT = torch.cat([idx_BT, next_B1], dim=1)
        finally:
            self.train(was_training)
        return idx_BT


def load_gpt2_weights(model: GPT, state_dict: Mapping[str, Tensor]) -> None:
    """Copies the weights of a Hugging Face `GPT2LMHeadModel` (or `GPT2Model`) into `model`.

    In Hugging Face's model, the four projections of a block are `Conv1D` with a weight (in, out), which is transposed
    here. Masks in old checkpoints (`attn.bias`, `attn.masked_bias`) and the tied `lm_head.weight` are ignored.

    Args:
        model: a GPT with the same sizes.
        state_dict: the result of `GPT2LMHeadModel.state_dict()`.

    Raises:
        ConfigError: a weight is missing, unexpected, or has another shape. `model` is unchanged then.
    """
    theirs = {}
    for name, tensor in state_dict.items():
        name = name.removeprefix("transformer.")
        if name == "lm_head.weight" or name.endswith((".attn.bias", ".attn.masked_bias")):
            continue
        is_conv1d = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
        theirs[f"blocks.{name[2:]}" if name.startswith("h.") else name] = tensor.t() if is_conv1d else tensor
    ours = dict(model.named_parameters())
    if ours.keys() != theirs.keys():
        missing, unknown = sorted(ours.keys() - theirs.keys()), sorted(theirs.keys() - ours.keys())
        raise ConfigError(
            f"The weights do not match a GPT of {model.config.num_layers} layers: {len(missing)} missing "
            f"{missing[:3]}, {len(unknown)} unknown {unknown[:3]}."
        )
    for name, parameter in ours.items():
        if parameter.shape != theirs[name].shape:
            raise ConfigError(
                f"{name} is {tuple(theirs[name].shape)} in the weights, but {tuple(parameter.shape)} in the model: "
                "build the model with the GPTConfig of the weights."
            )
    with torch.no_grad():
        for name, parameter in ours.items():
            parameter.copy_(theirs[name])
