"""Benchmark cases of the mLSTM: shapes, their work, and the best known times."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass

import torch
from torch import Tensor

from torchstorm.errors import ConfigError

Inputs = dict[str, Tensor]

_L2_BYTES = 60 * 10**6
_MOST_SETS = 16
_CHUNK = 64


@dataclass(frozen=True, kw_only=True)
class MLSTMCase:
    """One shape: B sequences of S tokens, H heads of d_qk and d_v."""

    batch: int
    heads: int
    seq: int
    d_qk: int
    d_v: int

    @property
    def shape(self) -> str:
        """The name of the shape: "8x16x8192 128/256"."""
        return f"{self.batch}x{self.heads}x{self.seq} {self.d_qk}/{self.d_v}"

    def best_known_ms(self, dtype: torch.dtype) -> tuple[float, float] | None:
        """Best known times on one H200, forward, and forward with backward; None if unknown."""
        if dtype != torch.bfloat16:
            return None
        return _BEST_KNOWN_MS.get((self.batch, self.heads, self.seq, self.d_qk, self.d_v))

    def num_sets(self, dtype: torch.dtype) -> int:
        """Number of input sets to use in turn, so that none is still in the cache."""
        return max(1, min(_MOST_SETS, math.ceil(2 * _L2_BYTES / self.input_bytes(dtype))))

    def make(self, device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
        """q, k, v, the gates i and f and a gradient dh. The gates are typical for models: most of the state is kept."""
        generator = torch.Generator(device).manual_seed(seed)
        per_token = (self.batch, self.heads, self.seq)

        def normal(*size: int) -> Tensor:
            return torch.randn((*per_token, *size), device=device, dtype=dtype, generator=generator)

        made = {"q": normal(self.d_qk), "k": normal(self.d_qk), "v": normal(self.d_v), "i": normal()}
        return {**made, "f": normal() + 3, "dh": normal(self.d_v)}

    def input_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of q, k, v, i and f."""
        return self._num_tokens * (2 * self.d_qk + self.d_v + 2) * dtype.itemsize

    def least_bytes(self, work: str, dtype: torch.dtype, *, backward: bool) -> int:
        """Bytes that must be read and written, each once, by forward alone or forward and backward."""
        if work == "product":
            return self._num_tokens * (2 * self.d_qk + self.seq) * dtype.itemsize
        h_bytes = self._num_tokens * self.d_v * dtype.itemsize
        forward = self.input_bytes(dtype) + h_bytes
        return forward + (2 * self.input_bytes(dtype) + h_bytes if backward else 0)

    def flops(self, work: str, *, backward: bool) -> float:
        """FLOPs of the matrix products (twice the multiply-adds), for forward, or for forward and backward.

        Args:
            work: "product" for q k^T; "pairs", "causal" for all pairs of tokens or those that count; "chunkwise" with
                chunks of 64, whatever chunk is taken; "recurrent".
            backward: counted with what it must make again.
        """
        S, K, V = self.seq, self.d_qk, self.d_v
        if work in ("product", "pairs", "causal"):
            forward = S * S * (K if work == "product" else K + V) / (2 if work == "causal" else 1)
            gradients = S * S / 2 * (3 * K + 2 * V)
        elif work == "chunkwise":
            forward = S * (2 * K * V + _CHUNK / 2 * (K + V))
            gradients = S * (5 * K * V + _CHUNK / 2 * (3 * K + 2 * V))
        else:
            forward, gradients = S * 2 * K * V, S * 4 * K * V
        return 2 * self.batch * self.heads * (forward + (gradients if backward else 0))

    @property
    def _num_tokens(self) -> int:
        return self.batch * self.heads * self.seq


_HEADS = ((16, 128, 256), (8, 256, 512), (32, 64, 64))
_LENGTHS = ((8, 8192), (64, 1024), (2, 32768))
_TARGET = tuple(
    MLSTMCase(batch=batch, heads=heads, seq=seq, d_qk=d_qk, d_v=d_v)
    for batch, seq in _LENGTHS
    for heads, d_qk, d_v in _HEADS
)
_SMALL_GPU = (
    MLSTMCase(batch=2, heads=4, seq=1000, d_qk=64, d_v=64),
    MLSTMCase(batch=2, heads=4, seq=2048, d_qk=128, d_v=256),
)
_SMALL_CPU = (
    MLSTMCase(batch=1, heads=2, seq=130, d_qk=16, d_v=16),
    MLSTMCase(batch=1, heads=2, seq=256, d_qk=24, d_v=40),
)
_BEST_KNOWN_MS = {
    (8, 16, 8192, 128, 256): (3.64, 11.13),
    (8, 8, 8192, 256, 512): (5.30, 18.1),
    (8, 32, 8192, 64, 64): (1.51, 4.72),
    (64, 16, 1024, 128, 256): (3.61, 11.2),
    (64, 8, 1024, 256, 512): (5.26, 18.2),
    (64, 32, 1024, 64, 64): (1.24, 4.81),
    (2, 16, 32768, 128, 256): (3.67, 11.4),
    (2, 8, 32768, 256, 512): (5.47, 18.3),
    (2, 32, 32768, 64, 64): (2.38, 7.76),
}


def mlstm_cases(sizes: str, device: torch.device) -> tuple[MLSTMCase, ...]:
    """The shapes "small", "target" or "all", or any with commas between, as in "2x4x1000 64/64".

    Raises:
        ConfigError: one is no shape, or the shapes need a GPU.
    """
    if device.type == "cpu":
        if sizes in ("target", "all"):
            raise ConfigError(f"--sizes {sizes} has shapes for a GPU, but --device is {device}: --sizes small.")
        sets: dict[str, tuple[MLSTMCase, ...]] = {"small": _SMALL_CPU}
    else:
        sets = {"small": _SMALL_GPU, "target": _TARGET, "all": _SMALL_GPU + _TARGET}
    names = tuple(dict.fromkeys(name.strip() for name in sizes.split(",")))
    return tuple(itertools.chain(*(sets[name] if name in sets else (_parsed(name, sizes),) for name in names)))


def _parsed(text: str, sizes: str) -> MLSTMCase:
    found = re.fullmatch(r"(\d+)x(\d+)x(\d+) (\d+)/(\d+)", text, re.ASCII)
    numbers = tuple(map(int, found.groups())) if found is not None else (0,)
    if not all(numbers):
        raise ConfigError(
            f"--sizes {sizes!r}, but it takes small, target, all, or shapes BxHxS d_qk/d_v; not {text!r}."
        )
    batch, heads, seq, d_qk, d_v = numbers
    return MLSTMCase(batch=batch, heads=heads, seq=seq, d_qk=d_qk, d_v=d_v)
