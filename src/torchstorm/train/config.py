"""The options of `torchstorm train` and their validation. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from torchstorm.errors import CheckpointError, ConfigError
from torchstorm.paths import path_text, user_path
from torchstorm.sizes import parse_size

DTYPES = ("float32", "bfloat16")
TOKENIZERS = ("bytes", "chars")

_FREE_ON_RESUME = frozenset(
    {
        *("data", "device", "vram", "ram", "disk", "plan", "compare", "out", "json"),
        *("val_every", "val_batches", "checkpoint_every", "sample_chars"),
    }
)
"""Options that may change when a run is resumed: they do not affect the losses. (A checksum detects other data.)"""

# name -> (smallest value, meaning of the smallest value)
_LEAST: dict[str, tuple[float, str]] = {
    "steps": (1, ""),
    "batch": (1, ""),
    "seq": (1, ""),
    "layers": (1, ""),
    "heads": (1, ""),
    "width": (1, ""),
    "accumulate": (1, ""),
    "val_batches": (1, ""),
    "min_lr": (0, ""),
    "warmup": (0, " (no warm-up)"),
    "weight_decay": (0, " (none)"),
    "grad_clip": (0, " (no clipping)"),
    "val_every": (0, " (only at the end)"),
    "checkpoint_every": (0, " (only at the end)"),
    "sample_chars": (0, " (no sample)"),
}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The options of a training run. Paths can be os.PathLike; they become strings with `~` expanded.

    Attributes:
        model: a named size of `torchstorm.models.families.SIZES`.
        layers, heads, width: override the named size; None keeps it.
        dropout: probability in [0, 1).
        data: a text file, a folder of text files, or a volume from `torchstorm pack`; None for the source of Python's
            standard library.
        tokenizer: "bytes" (256 ids) or "chars" (the distinct characters of the text). For a volume it must be the
            volume's tokenizer, which is also the default.
        steps: total number of optimizer steps, across resumed runs.
        batch: sequences per micro-batch.
        accumulate: micro-batches per optimizer step.
        seq: tokens per sequence.
        device: "cpu", "cuda" or "cuda:<index>"; None for cuda if available, else cpu.
        dtype: "float32", or "bfloat16" for autocast with weights and optimizer in float32.
        vram, ram, disk: the budget, as in `torchstorm.Session`; all None for no budget.
        plan: a file from `Plan.save` or `torchstorm plan --json`, which every step follows; None to plan in this run.
        compare: trains a second time without the budget, and compares both runs.
        seed: random seed of weights, batches and dropout.
        lr, min_lr, warmup: linear warm-up over `warmup` steps to `lr`, then cosine decay to `min_lr` (None: lr / 10).
        weight_decay: AdamW's weight decay, for parameters with two or more dimensions.
        betas: AdamW's betas.
        grad_clip: maximum norm of all gradients together; 0 for no clipping.
        val_every: steps between validations; 0 for only at the end.
        val_batches: batches per validation, always the same.
        checkpoint_every: steps between checkpoints; 0 for only at the end.
        sample_chars: number of tokens to generate at the end.
        out: folder of checkpoints; None for torchstorm-runs/<date and time>.
        json: file for the results; None for no file.

    Raises:
        ConfigError: a value is out of range or not a path, or two contradict each other.
        SizeError: `vram` or `ram` cannot be parsed.
    """

    model: str = "gpt-micro"
    layers: int | None = None
    heads: int | None = None
    width: int | None = None
    dropout: float = 0.1
    data: str | None = None
    tokenizer: str = "bytes"
    steps: int = 60
    batch: int = 16
    accumulate: int = 1
    seq: int = 256
    device: str | None = None
    dtype: str = "float32"
    vram: str | None = None
    ram: str | None = None
    disk: str | None = None
    plan: str | None = None
    compare: bool = False
    seed: int = 0
    lr: float = 1e-3
    min_lr: float | None = None
    warmup: int = 10
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)
    grad_clip: float = 1.0
    val_every: int = 30
    val_batches: int = 4
    checkpoint_every: int = 100
    sample_chars: int = 200
    out: str | None = None
    json: str | None = None

    def __post_init__(self) -> None:
        for name in ("data", "plan", "out", "json"):
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, str(user_path(given, name=f"--{name}")))
        if self.disk is not None:
            object.__setattr__(self, "disk", path_text(self.disk, name="--disk"))
        for name, (least, meaning) in _LEAST.items():
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise ConfigError(f"--{_flag(name)}={value}, but it must be at least {least}{meaning}.")
        if not self.lr > 0:
            raise ConfigError(f"--lr={self.lr}, but it must be above 0.")
        if self.min_lr is not None and self.min_lr > self.lr:
            raise ConfigError(f"--min-lr={self.min_lr} is above --lr={self.lr}: the rate falls from lr to min-lr.")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"--dropout={self.dropout}, but it is a probability: 0 <= dropout < 1.")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"--betas={self.betas[0]},{self.betas[1]}, but both must be in [0, 1).")
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype={self.dtype!r}, but it must be one of {', '.join(DTYPES)}.")
        if self.tokenizer not in TOKENIZERS:
            raise ConfigError(f"--tokenizer={self.tokenizer!r}, but it must be one of {', '.join(TOKENIZERS)}.")
        for name in ("vram", "ram"):
            if getattr(self, name) is not None:
                parse_size(getattr(self, name), name=f"--{name}")
        if self.compare and not self.has_budget:
            raise ConfigError(
                "--compare compares a run under a budget with one without, but no budget was given: "
                "add --ram SIZE and --disk DIR (or --vram SIZE on a GPU), or leave --compare out."
            )

    @property
    def has_budget(self) -> bool:
        """Whether a budget was given, or a plan, which has its own budget."""
        return any(given is not None for given in (self.vram, self.ram, self.disk, self.plan))

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimizer step."""
        return self.batch * self.seq * self.accumulate

    def to_json(self) -> dict[str, Any]:
        """The options as a dictionary for JSON."""
        return {**asdict(self), "betas": list(self.betas)}


def resumed_config(saved: Mapping[str, Any], changes: Mapping[str, Any]) -> TrainConfig:
    """Returns the options of a resumed run.

    Args:
        saved: `TrainConfig.to_json()` of the stopped run.
        changes: new options by name. Options that affect the losses must equal the saved ones.

    Raises:
        CheckpointError: `saved` has options of another version.
        ConfigError: a change affects the losses.
    """
    known = {field.name for field in fields(TrainConfig)}
    if saved.keys() != known:
        odd = sorted(saved.keys() ^ known)
        raise CheckpointError(
            f"The checkpoint's options are not those of this version of torchstorm: {', '.join(odd)} "
            "exist only in one of both. Resume with the version that wrote it."
        )
    options = {**saved, "betas": tuple(saved["betas"])}
    for name, value in changes.items():
        if name not in _FREE_ON_RESUME and value != options[name]:
            raise ConfigError(
                f"--{_flag(name)}={value} was given, but the checkpoint is from a run with "
                f"{_flag(name)}={options[name]}, and a resumed run must give the losses of an uninterrupted one. "
                f"Leave --{_flag(name)} out, or start a new run."
            )
    return TrainConfig(**{**options, **changes})


def parse_betas(text: str) -> tuple[float, float]:
    """Parses AdamW's two betas: "0.9,0.99" -> (0.9, 0.99).

    Raises:
        ConfigError: the text is not two numbers with a comma between.
    """
    try:
        first, second = (float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--betas={text!r} cannot be read: write two numbers, as in --betas 0.9,0.99.") from None
    return first, second


def _flag(name: str) -> str:
    return name.replace("_", "-")
