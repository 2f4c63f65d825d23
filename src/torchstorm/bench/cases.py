"""Training cases of GPT blocks, with the shapes and budgets of the recorded results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from torchstorm.bench import ways
from torchstorm.bench.measure import Training
from torchstorm.errors import ConfigError, DeviceError
from torchstorm.models.gpt import Block, GPTConfig
from torchstorm.offload.compiled.repeatable import allow_products


@dataclass(frozen=True, kw_only=True)
class OffloadCase:
    """A model of GPT blocks and a batch.

    Attributes:
        width, num_layers, num_heads: of the blocks.
        batch, seq: B sequences of T tokens.
        dtype: of weights and activations.
        budgets_gib: GiB that a Session is given on the fast tier, besides the peaks of others.
        shares: more budgets, as shares of the unlimited run's peak.
    """

    width: int
    num_layers: int
    num_heads: int
    batch: int
    seq: int
    dtype: torch.dtype
    budgets_gib: tuple[float, ...] = ()
    shares: tuple[float, ...] = ()

    @property
    def shape(self) -> str:
        """Tokens by sequences, as in "32768x1"."""
        return f"{self.seq}x{self.batch}"

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.shape}: {self.num_layers} blocks, hidden {self.width}, {self.seq} tokens x {self.batch}"


CASES = (
    OffloadCase(
        width=4096,
        num_layers=10,
        num_heads=32,
        batch=1,
        seq=32768,
        dtype=torch.bfloat16,
        budgets_gib=(27.6, 16.0),
    ),
    OffloadCase(
        width=4096, num_layers=10, num_heads=32, batch=4, seq=4096, dtype=torch.bfloat16, budgets_gib=(12.5, 10.0)
    ),
)
SMALL = OffloadCase(width=64, num_layers=3, num_heads=2, batch=4, seq=64, dtype=torch.float32, shares=(0.6,))


class Blocks(torch.nn.Module):
    """Blocks of a GPT in a row."""

    def __init__(self, case: OffloadCase) -> None:
        super().__init__()
        config = GPTConfig(
            vocab_size=256,
            max_seq_len=case.seq,
            num_layers=case.num_layers,
            num_heads=case.num_heads,
            width=case.width,
            dropout=0.0,
        )
        self.blocks = torch.nn.ModuleList(Block(config) for _ in range(case.num_layers))
        self._call: Callable[..., Any] | None = None

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        """Maps (B, T, C) to (B, T, C)."""
        for block in self.blocks:
            x_BTC = block(x_BTC) if self._call is None else self._call(block, x_BTC)
        return x_BTC

    @contextlib.contextmanager
    def checkpointing(self, contexts: ways.Contexts | None = None) -> Iterator[None]:
        """Every block under torch.utils.checkpoint inside.

        Args:
            contexts: `context_fn` of it, for selective checkpointing.
        """
        options: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}
        self._call = partial(checkpoint, use_reentrant=False, **options)
        try:
            yield
        finally:
            self._call = None


def make_blocks(case: OffloadCase, device: torch.device) -> tuple[Training, Blocks]:
    """The blocks of a case on a device, and their training step: the loss is the mean square of the output."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Blocks(case).to(dtype=case.dtype)

    def data(seed: int) -> torch.Tensor:
        generator = torch.Generator(device).manual_seed(seed)
        return torch.randn((case.batch, case.seq, case.width), device=device, generator=generator).to(case.dtype)

    def loss(x_BTC: torch.Tensor) -> torch.Tensor:
        out_BTC: torch.Tensor = model(x_BTC)
        return out_BTC.float().square().mean()

    return Training(model=model, device=device, data=data, loss=loss), model


def cases_for(device: torch.device, shapes: str | None = None) -> tuple[OffloadCase, ...]:
    """The recorded cases on a GPU, a small one on a CPU.

    Args:
        device: the device.
        shapes: comma-separated shapes, such as "32768x1,4096x4"; None for all.

    Raises:
        DeviceError: there is no such CUDA device.
        ConfigError: a shape has no case.
    """
    bench_device(str(device))
    cases = CASES if device.type == "cuda" else (SMALL,)
    if shapes is None:
        return cases
    names = pick(shapes, tuple(case.shape for case in cases), option="--shape")
    return tuple(case for case in cases if case.shape in names)


def bench_device(name: str | None) -> torch.device:
    """The device of a benchmark; for None CUDA if available. It runs products where deterministic algorithms are on.

    Raises:
        DeviceError: there is no such CUDA device.
    """
    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError(f"--device {device} was given, but PyTorch finds no GPU: --device cpu runs a small case.")
    allow_products(device)
    return device


DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def bench_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """The dtype of a benchmark; for None bfloat16 on a GPU and float32 on a CPU.

    Raises:
        ConfigError: the dtype is not supported.
    """
    chosen = name or ("bfloat16" if device.type == "cuda" else "float32")
    if chosen not in DTYPES:
        raise ConfigError(f"--dtype {chosen!r}, but it must be one of {', '.join(DTYPES)}.")
    return DTYPES[chosen]


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def pick_ways(names: str | None, device: torch.device) -> tuple[str, ...]:
    """Ways of training, as in "session,checkpoint"; for None all on a GPU, and on a CPU those that do not take long.

    Raises:
        ConfigError: one is not known.
    """
    if names is None:
        return ways.WAYS if device.type == "cuda" else ways.ON_A_CPU
    return pick(names, ways.WAYS, option="--way")


def pick(text: str, known: tuple[str, ...], *, option: str) -> tuple[str, ...]:
    """Parses comma-separated names.

    Raises:
        ConfigError: one is not known.
    """
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise ConfigError(f"{option} {text!r} names {unknown or 'nothing'}; known names are {', '.join(known)}.")
    return names
