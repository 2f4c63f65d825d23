"""xLSTM's blocks: two kinds with mLSTM and one with sLSTM.

    "mlstm": x + down(skip(headnorm(mLSTM(conv(up(x))))) * silu(gate(x))): the recurrence at twice the model's width
    "slstm": x + headnorm(sLSTM(conv(x))), then x + GELU-gated MLP
    "mlstm-mlp": x + out(headnorm(mLSTM(x)) * sigmoid(gate(x))), then x + SwiGLU MLP: the 7B model's

Shape suffixes: B sequences, T tokens, C width of the residual stream, I width inside, H heads, D width of one head.
Every module maps (B, T, C) to (B, T, C). `forward` has no state between calls. `advance` takes the state of the
previous call (None at first) and returns the next one, whose size does not depend on T. All norms are LayerNorm without
a bias; xLSTM 7B uses RMSNorm before its layers.
Sources: Beck et al. 2024, "xLSTM: Extended Long Short-Term Memory", arXiv 2405.04517, figures 10 and 11; Beck et al.
2025, "xLSTM 7B", arXiv 2503.13427.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchstorm.kernels import MLSTMState, mlstm, mlstm_step
from torchstorm.kernels.slstm import SLSTMState, slstm
from torchstorm.models.norm import layer_norm

State = tuple[Tensor, ...]
"""The state of a block after some tokens. The first dimension of each tensor is B."""

CONV_TOKENS = 4
PROJECTION_BLOCK = 4
_UP = 2
_FORGET_BIAS = (3.0, 6.0)


class Shape(Protocol):
    """The attributes of `XLSTMConfig` that a block uses."""

    @property
    def width(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def dropout(self) -> float: ...
    @property
    def qk_share(self) -> float: ...
    @property
    def mlp_share(self) -> float: ...
    @property
    def gate_cap(self) -> float: ...
    @property
    def input_gate_bias(self) -> float: ...


class Norm(nn.Module):
    """LayerNorm without a bias; with `num_heads`, of each head separately."""

    def __init__(self, width: int, num_heads: int = 1) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Maps (B, T, C) to (B, T, C)."""
        if self.num_heads == 1:
            return layer_norm(x_BTC, self.weight)
        # group_norm with tokens as samples and heads as groups: one operation, which saves only its input.
        return F.group_norm(x_BTC.flatten(0, 1), self.num_heads, self.weight).view_as(x_BTC)


class CausalConv(nn.Module):
    """A depthwise causal convolution over time (token t uses tokens t - 3 to t), followed by SiLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(CONV_TOKENS)
        self.weight = nn.Parameter(torch.empty(width, 1, CONV_TOKENS).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Maps (B, T, C) to (B, T, C), with zeros before the first token."""
        return self._convolve(F.pad(x_BTC.transpose(1, 2), (CONV_TOKENS - 1, 0)))

    def advance(self, x_BTC: Tensor, past_BCT: Tensor | None) -> tuple[Tensor, Tensor]:
        """Continues after the last three tokens, (B, C, 3)."""
        if past_BCT is None:
            past_BCT = x_BTC.new_zeros(x_BTC.shape[0], x_BTC.shape[2], CONV_TOKENS - 1)
        seen_BCT = torch.cat([past_BCT, x_BTC.transpose(1, 2)], dim=2)
        return self._convolve(seen_BCT), seen_BCT[:, :, 1 - CONV_TOKENS :].clone()

    def _convolve(self, x_BCT: Tensor) -> Tensor:
        return F.silu(F.conv1d(x_BCT, self.weight, self.bias, groups=x_BCT.shape[1])).transpose(1, 2)


class BlockLinear(nn.Module):
    """A linear layer with a block-diagonal matrix."""

    def __init__(self, width: int, block: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width // block, block, block))
        nn.init.normal_(self.weight, std=math.sqrt(2 / (5 * block)))

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Maps (B, T, C) to (B, T, C)."""
        x_BTGI = x_BTC.unflatten(-1, (self.weight.shape[0], -1))
        out_BTC: Tensor = torch.einsum("btgi,goi->btgo", x_BTGI, self.weight).flatten(2)
        return out_BTC


class Gates(nn.Module):
    """Pre-activations of the input and forget gates, one of each per head."""

    def __init__(self, width: int, config: Shape, *, from_zero: bool) -> None:
        super().__init__()
        self.cap = config.gate_cap
        self.linear = nn.Linear(width, 2 * config.num_heads)
        if from_zero:
            nn.init.zeros_(self.linear.weight)
        else:
            nn.init.normal_(self.linear.weight, std=math.sqrt(2 / (5 * width)))
        with torch.no_grad():
            self.linear.bias[: config.num_heads] = config.input_gate_bias
            self.linear.bias[config.num_heads :] = torch.linspace(*_FORGET_BIAS, config.num_heads)

    def forward(self, x_BTC: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (i, f), each (B, H, T), in at least fp32, since they are summed over time."""
        gates_BGT = self.linear(x_BTC).transpose(1, 2)
        gates_BGT = gates_BGT.to(torch.promote_types(gates_BGT.dtype, torch.float32))
        if self.cap:
            gates_BGT = self.cap * torch.tanh(gates_BGT / self.cap)
        i_BHT, f_BHT = gates_BGT.chunk(2, dim=1)
        return i_BHT, f_BHT


Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""The arguments q, k, v, i and f of `mlstm`."""


def _recur(inputs: Inputs) -> Tensor:
    h_BTC: Tensor = mlstm(*inputs).transpose(1, 2).flatten(2)
    return h_BTC


def _recur_on(inputs: Inputs, state: State | None) -> tuple[Tensor, State]:
    """As `_recur`, with a state. A single token uses the step kernel."""
    before = None if state is None else MLSTMState(*state)
    if before is not None and inputs[0].shape[2] == 1:
        q, k, v, i, f = (part.squeeze(2) for part in inputs)
        h_BHD, after = mlstm_step(q, k, v, i, f, before)
        return h_BHD.flatten(1).unsqueeze(1), after
    h_BHTD, after = mlstm(*inputs, initial_state=before, return_state=True)
    return h_BHTD.transpose(1, 2).flatten(2), after


def _heads(x_BTC: Tensor, num_heads: int) -> Tensor:
    x_BHTD: Tensor = x_BTC.unflatten(-1, (num_heads, -1)).transpose(1, 2)
    return x_BHTD


class UpMLSTM(nn.Module):
    """mLSTM at twice the model's width, between an up and a down projection."""

    def __init__(self, config: Shape) -> None:
        super().__init__()
        inner = _UP * config.width
        self.num_heads = config.num_heads
        self.up = nn.Linear(config.width, 2 * inner, bias=False)
        self.conv = CausalConv(inner)
        self.q, self.k, self.v = (BlockLinear(inner, PROJECTION_BLOCK) for _ in range(3))
        self.gates = Gates(3 * inner, config, from_zero=True)
        self.norm = Norm(inner, config.num_heads)
        self.skip = nn.Parameter(torch.ones(inner))
        self.down = nn.Linear(inner, config.width, bias=False)
        _init_linear(self.up)
        _init_residual(self.down, config)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Maps (B, T, C) to (B, T, C)."""
        x_BTI, gate_BTI = self.up(x_BTC).chunk(2, dim=-1)
        conv_BTI = self.conv(x_BTI)
        return self._out(_recur(self._inputs(x_BTI, conv_BTI)), conv_BTI, gate_BTI)

    def advance(self, x_BTC: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Continues from the state (the convolution's last tokens, C, n, m)."""
        x_BTI, gate_BTI = self.up(x_BTC).chunk(2, dim=-1)
        conv_BTI, past = self.conv.advance(x_BTI, None if state is None else state[0])
        h_BTI, cell = _recur_on(self._inputs(x_BTI, conv_BTI), None if state is None else state[1:])
        return self._out(h_BTI, conv_BTI, gate_BTI), (past, *cell)

    def _inputs(self, x_BTI: Tensor, conv_BTI: Tensor) -> Inputs:
        q, k, v = self.q(conv_BTI), self.k(conv_BTI), self.v(x_BTI)
        i, f = self.gates(torch.cat([q, k, v], dim=-1))
        return _heads(q, self.num_heads), _heads(k, self.num_heads), _heads(v, self.num_heads), i, f

    def _out(self, h_BTI: Tensor, conv_BTI: Tensor, gate_BTI: Tensor) -> Tensor:
        out_BTC: Tensor = self.down((self.norm(h_BTI) + self.skip * conv_BTI) * F.silu(gate_BTI))
        return out_BTC


class MLSTM(nn.Module):
    """mLSTM at the model's width, with an output gate."""

    def __init__(self, config: Shape) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qk_width = round(config.width * config.qk_share)
        # One matrix product for q, k, v and the output gate.
        self.qkvo = nn.Linear(config.width, 2 * self.qk_width + 2 * config.width, bias=False)
        self.gates = Gates(config.width, config, from_zero=False)
        self.norm = Norm(config.width, config.num_heads)
        self.out = nn.Linear(config.width, config.width, bias=False)
        _init_linear(self.qkvo)
        _init_residual(self.out, config)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Maps (B, T, C) to (B, T, C)."""
        inputs, gate_BTC = self._inputs(x_BTC)
        return self._out(_recur(inputs), gate_BTC)

    def advance(self, x_BTC: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Continues from the state (C, n, m)."""
        inputs, gate_BTC = self._inputs(x_BTC)
        h_BTC, state = _recur_on(inputs, state)
        return self._out(h_BTC, gate_BTC), state

    def _inputs(self, x_BTC: Tensor) -> tuple[Inputs, Tensor]:
        C = x_BTC.shape[-1]
        q, k, v, gate_BTC = self.qkvo(x_BTC).split([self.qk_width, self.qk_width, C, C], dim=-1)
        i, f = self.gates(x_BTC)
        heads = _heads(q, self.num_heads), _heads(k, self.num_heads), _heads(v, self.num_heads)
        return (*heads, i, f), gate_BTC

    def _out(self, h_BTC: Tensor, gate_BTC: Tensor) -> Tensor:
        out_BTC: Tensor = self.out(self.norm(h_BTC) * torch.sigmoid(gate_BTC))
        return out_BTC


class SLSTM(nn.Module):
    """sLSTM at the model's width, with recurrent connections within each head."""

    def __init__(self, config: Shape) -> None:
        super().__init__()
        H, D = config.num_heads, config.width // config.num_heads
        self.num_heads = H
        self.conv = CausalConv(config.width)
        # i and f use the convolution's output, z and o its input.
        self.conv_gates, self.token_gates = (nn.Parameter(torch.empty(H, D, 2 * D)) for _ in range(2))
        self.bias = nn.Parameter(torch.zeros(H, 4, D))
        self.recurrent = nn.Parameter(torch.zeros(H, D, 4 * D))
        self.norm = Norm(config.width, H)
        for weight in (self.conv_gates, self.token_gates):
            nn.init.normal_(weight, std=math.sqrt(2 / (5 * D)))
        with torch.no_grad():
            self.bias[:, 1] = torch.linspace(*_FORGET_BIAS, D)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Maps (B, T, C) to (B, T, C)."""
        return self._recur(x_BTC, self.conv(x_BTC), None)[0]

    def advance(self, x_BTC: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Continues from the state (the convolution's last tokens, h, c, n, m)."""
        conv_BTC, past = self.conv.advance(x_BTC, None if state is None else state[0])
        out_BTC, cell = self._recur(x_BTC, conv_BTC, None if state is None else SLSTMState(*state[1:]))
        # Copies, since the returned states are views of the states of all tokens.
        return out_BTC, (past, *(part.clone() for part in cell))

    def _recur(self, x_BTC: Tensor, conv_BTC: Tensor, state: SLSTMState | None) -> tuple[Tensor, SLSTMState]:
        halves = [
            torch.einsum("bthd,hdf->bthf", part_BTC.unflatten(-1, (self.num_heads, -1)), weight)
            for part_BTC, weight in ((conv_BTC, self.conv_gates), (x_BTC, self.token_gates))
        ]
        raw_BTHGD = torch.cat(halves, dim=-1).unflatten(-1, (4, -1))
        raw_BTHGD = raw_BTHGD + self.bias.to(raw_BTHGD.dtype)
        h_BTHD, state = slstm(raw_BTHGD, self.recurrent.to(raw_BTHGD.dtype), initial_state=state)
        out_BTC: Tensor = self.norm(h_BTHD.flatten(2))
        return out_BTC, state


class MLP(nn.Module):
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, config: Shape, share: float, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        hidden = mlp_width(config.width, share)
        self.activation = activation
        self.gate_up = nn.Linear(config.width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, config.width, bias=False)
        _init_linear(self.gate_up)
        _init_residual(self.down, config)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Maps (B, T, C) to (B, T, C)."""
        gate_BTF, up_BTF = self.gate_up(x_BTC).chunk(2, dim=-1)
        out_BTC: Tensor = self.down(self.activation(gate_BTF) * up_BTF)
        return out_BTC


class Block(nn.Module):
    """A pre-norm block: the recurrence, and in two of the three kinds an MLP.

    Args:
        config: configuration of the model.
        kind: a key of `MIXERS`.
    """

    def __init__(self, config: Shape, kind: str) -> None:
        super().__init__()
        self.norm_mixer = Norm(config.width)
        self.mixer = MIXERS[kind](config)
        self.norm_mlp, self.mlp = None, None
        if kind != "mlstm":
            share, activation = (4 / 3, F.gelu) if kind == "slstm" else (config.mlp_share, F.silu)
            self.norm_mlp, self.mlp = Norm(config.width), MLP(config, share, activation)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Maps (B, T, C) to (B, T, C), from an empty initial state."""
        return self._add_mlp(x_BTC + self.dropout(self.mixer(self.norm_mixer(x_BTC))))

    def advance(self, x_BTC: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Continues from the state of an earlier call."""
        mixed_BTC, state = self.mixer.advance(self.norm_mixer(x_BTC), state)
        return self._add_mlp(x_BTC + self.dropout(mixed_BTC)), state

    def _add_mlp(self, x_BTC: Tensor) -> Tensor:
        if self.mlp is None or self.norm_mlp is None:
            return x_BTC
        out_BTC: Tensor = x_BTC + self.dropout(self.mlp(self.norm_mlp(x_BTC)))
        return out_BTC


MIXERS: dict[str, type[UpMLSTM] | type[SLSTM] | type[MLSTM]] = {
    "mlstm": UpMLSTM,
    "slstm": SLSTM,
    "mlstm-mlp": MLSTM,
}
"""The recurrence of each kind of block."""


def mlp_width(width: int, share: float) -> int:
    """Width inside an MLP: width * share, rounded up to a multiple of 64 (of 8 in models narrower than 512)."""
    multiple = 64 if width >= 512 else 8
    return math.ceil(width * share / multiple) * multiple


def _init_linear(linear: nn.Linear) -> None:
    nn.init.normal_(linear.weight, std=math.sqrt(2 / (5 * linear.in_features)))


def _init_residual(linear: nn.Linear, config: Shape) -> None:
    """Smaller initial weights for projections into the residual stream, since every layer adds to it."""
    nn.init.normal_(linear.weight, std=2 / (config.num_layers * math.sqrt(config.width)))
