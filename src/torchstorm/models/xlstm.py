"""xLSTM language models in PyTorch, on torchstorm's mLSTM and sLSTM kernels.

    x_BTC = token embedding, dropout
    each block (`models/xlstm_blocks.py`): x_BTC = x_BTC + recurrence(norm(x_BTC)), and an MLP in some kinds
    logits_BTV = norm(x_BTC) @ head, soft-capped where the config says so

There are no position embeddings: the recurrence encodes the order, and a sequence can be longer than in training. Time
and memory per token do not depend on the number of earlier tokens. Shape suffixes: B sequences, T tokens, C width, V
vocabulary.
Sources: Beck et al. 2024, "xLSTM: Extended Long Short-Term Memory", arXiv 2405.04517; Beck et al. 2025, "xLSTM 7B: A
Recurrent LLM for Fast and Efficient Inference", arXiv 2503.13427.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchstorm.errors import ConfigError
from torchstorm.models.head import next_token_loss
from torchstorm.models.sampling import check_sampling, draw
from torchstorm.models.xlstm_blocks import MIXERS, PROJECTION_BLOCK, Block, Norm, State


@dataclass(frozen=True, kw_only=True)
class XLSTMConfig:
    """The configuration of an xLSTM.

    Attributes:
        vocab_size: V, the number of token ids.
        num_layers: number of blocks.
        num_heads, width: H and C; H must divide C and C times `qk_share`, and C be even with "mlstm".
        dropout: probability in [0, 1) of zeroing, on embeddings and both residual branches.
        pattern: kinds of the blocks, "mlstm", "slstm" or "mlstm-mlp"; repeated if there are more blocks.
        qk_share: width of q and of k relative to C, in "mlstm-mlp".
        mlp_share: width inside the MLP relative to C, in "mlstm-mlp".
        gate_cap: gate pre-activations become cap * tanh(x / cap); 0 for no cap.
        logit_cap: the same for logits.
        input_gate_bias: initial bias of mLSTM's input gate.
        tied: whether the head and the embedding share their weight.

    Raises:
        ConfigError: a count is below 1, heads do not divide a width, or another value is out of its range.
    """

    vocab_size: int = 50257
    num_layers: int
    num_heads: int
    width: int
    dropout: float = 0.1
    pattern: tuple[str, ...] = ("mlstm-mlp",)
    qk_share: float = 0.5
    mlp_share: float = 8 / 3
    gate_cap: float = 15.0
    logit_cap: float = 30.0
    input_gate_bias: float = -10.0
    tied: bool = True

    def __post_init__(self) -> None:
        for name in ("vocab_size", "num_layers", "num_heads", "width"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}, but it must be at least 1.")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout={self.dropout}, but it is a probability: 0 <= dropout < 1.")
        unknown = [kind for kind in self.pattern if kind not in MIXERS]
        if unknown or not self.pattern:
            raise ConfigError(f"pattern={self.pattern} names {unknown or 'nothing'}; there are {', '.join(MIXERS)}.")
        for name in ("mlp_share", "gate_cap", "logit_cap"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)}, but it must be at least 0.")
        if not self.qk_share > 0:
            raise ConfigError(f"qk_share={self.qk_share}, but it must be above 0.")
        if not self._can_split(self.width):
            fitting = next((width for width in range(self.width, 100 * self.width) if self._can_split(width)), None)
            raise ConfigError(
                f"width={self.width}, with q and k {self.width * self.qk_share:g} wide, cannot be split over num_heads="
                f"{self.num_heads}. Use {f'width={fitting}, or ' if fitting else ''}another number of heads."
            )

    def kind(self, layer: int) -> str:
        """The kind of a block, counted from 0."""
        return self.pattern[layer % len(self.pattern)]

    def _can_split(self, width: int) -> bool:
        in_blocks = "mlstm" not in self.pattern or 2 * width % PROJECTION_BLOCK == 0
        return in_blocks and width % self.num_heads == 0 == width * self.qk_share % self.num_heads


SIZES: dict[str, XLSTMConfig] = {
    "xlstm-nano": XLSTMConfig(num_layers=3, num_heads=3, width=48, qk_share=1.0, mlp_share=3.0),
    "xlstm-micro": XLSTMConfig(num_layers=4, num_heads=4, width=128),
    "xlstm-mini": XLSTMConfig(num_layers=6, num_heads=6, width=192),
    "xlstm-125m": XLSTMConfig(num_layers=12, num_heads=6, width=768),
    "xlstm-350m": XLSTMConfig(num_layers=24, num_heads=4, width=1024),
    "xlstm-1.3b": XLSTMConfig(num_layers=24, num_heads=8, width=2048),
    "xlstm-7b": XLSTMConfig(num_layers=32, num_heads=8, width=4096, tied=False),
}
"""The named sizes, with GPT-2's vocabulary of 50257. `dataclasses.replace` changes other options."""


class XLSTMOutput(NamedTuple):
    """The result of forward: logits (B, T, V), or with targets the mean cross-entropy in nats."""

    logits: Tensor | None
    loss: Tensor | None


class XLSTM(nn.Module):
    """An xLSTM language model.

    Args:
        config: its configuration. Weights are drawn from PyTorch's global generator as in the papers: matrices normal
            with standard deviation sqrt(2 / (5 in)), for projections into the residual stream 2 / (num_layers sqrt(C)).
            Forget gates start almost open, with biases from 3 to 6 over the heads.
    """

    def __init__(self, config: XLSTMConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, config.kind(layer)) for layer in range(config.num_layers))
        self.norm = Norm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        for table in (self.embedding, self.head):
            nn.init.normal_(table.weight, std=math.sqrt(2 / (5 * config.width)))

    def forward(self, idx_BT: Tensor, targets_BT: Tensor | None = None) -> XLSTMOutput:
        """Predicts the next token at each position, from an empty initial state.

        Args:
            idx_BT: int64 token ids (B, T), T at least 1.
            targets_BT: int64 ids (B, T) to predict, -100 to ignore a position; None for no loss.

        Returns:
            Logits (B, T, V); with targets only the mean cross-entropy in nats, which needs less memory.
        """
        x_BTC = self.drop(self.embedding(idx_BT))
        for block in self.blocks:
            x_BTC = block(x_BTC)
        if targets_BT is None:
            return XLSTMOutput(self._logits(x_BTC), None)
        cap = self.config.logit_cap
        return XLSTMOutput(None, next_token_loss(self.norm(x_BTC), self.head.weight, targets_BT, softcap=cap))

    def advance(
        self, idx_BT: Tensor, states: tuple[State | None, ...] | None = None
    ) -> tuple[Tensor, tuple[State, ...]]:
        """Processes tokens and updates the states. A single token uses the step kernel.

        Args:
            idx_BT: int64 ids (B, T), T at least 1.
            states: states of the previous call, one per block; None at the start of a text.

        Returns:
            Logits of the next token (B, V), and the states. Their size does not depend on T.
        """
        x_BTC = self.drop(self.embedding(idx_BT))
        following: list[State] = []
        for block, state in zip(self.blocks, states or (None,) * len(self.blocks), strict=True):
            assert isinstance(block, Block)
            x_BTC, after = block.advance(x_BTC, state)
            following.append(after)
        return self._logits(x_BTC[:, -1]), tuple(following)

    def _logits(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(x))
        cap = self.config.logit_cap
        return cap * torch.tanh(logits / cap) if cap else logits

    def num_params(self, *, embeddings: bool = True) -> int:
        """Number of parameters, a tied head once. Without `embeddings`, the embedding and the head are not counted."""
        total = sum(parameter.numel() for parameter in self.parameters())
        tables = self.embedding.weight.numel() * (1 if self.config.tied else 2)
        return total if embeddings else total - tables

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
        """Continues each sequence by `num_tokens` tokens, one at a time.

        The text so far is processed once. Then time and memory per token do not depend on the length of the text.
        Dropout is off.

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
            found, unread_BT, states = [idx_BT], idx_BT, None
            for _ in range(num_tokens):
                logits_BV, states = self.advance(unread_BT, states)
                unread_BT = draw(logits_BV.float(), temperature, top_k, generator)
                found.append(unread_BT)
        finally:
            self.train(was_training)
        return torch.cat(found, dim=1)
