"""The training loop of one run, from the first step or a checkpoint to the last step."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from torchstorm.errors import ConfigError
from torchstorm.models.families import SIZES, LanguageModel, ModelConfig, make_model
from torchstorm.models.gpt import GPTConfig
from torchstorm.offload.compiled.repeatable import allow_products, deterministically
from torchstorm.offload.report import first_said, known_ms
from torchstorm.offload.session import Session
from torchstorm.plan.forecast import Figures
from torchstorm.train.checkpoint import Checkpoint, restore
from torchstorm.train.config import TrainConfig
from torchstorm.train.data import Tokens
from torchstorm.train.optimize import learning_rate, make_optimizer, set_learning_rate
from torchstorm.train.seeds import derive_seed

_FIGURES = ("forecast", "corrected", "measured", "highest")


@dataclass(kw_only=True)
class RunState:
    """The progress of a run. The loop updates it.

    Attributes:
        step: number of completed optimizer steps.
        losses: training loss of each step, in nats per token.
        val_losses: (completed steps, validation loss in nats per token).
        train_seconds: time of training steps, without validations and checkpoints.
        step_seconds: time of each of those steps.
        forecast: what the Session first said: the bytes of its first plan, before any step followed it, and the time of
            a step as soon as it knew one; NaN until then. None without a plan.
        corrected: of the plan in force after the last step; None without a plan, and before that.
        measured: measured over the steps with a plan (without a plan over all steps); None before the last step.
        highest: peak bytes over all steps, the unplanned first one included, and the time of the slowest step.
        notes: the Session's notes for the user.
        weights_sha256: hash of all parameters; "" until the run is complete.
        sample: generated text; "" until the run is complete.
    """

    step: int = 0
    losses: list[float] = field(default_factory=list)
    val_losses: list[tuple[int, float]] = field(default_factory=list)
    train_seconds: float = 0.0
    step_seconds: list[float] = field(default_factory=list)
    forecast: Figures | None = None
    corrected: Figures | None = None
    measured: Figures | None = None
    highest: Figures | None = None
    notes: list[str] = field(default_factory=list)
    weights_sha256: str = ""
    sample: str = ""

    def to_json(self) -> dict[str, Any]:
        """The state as a dictionary for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> RunState:
        """Creates the state from the result of `to_json`."""
        return cls(
            **{
                **record,
                "val_losses": [(step, loss) for step, loss in record["val_losses"]],
                **{name: record[name] and Figures(**record[name]) for name in _FIGURES},
            }
        )


@dataclass(frozen=True, kw_only=True)
class StepInfo:
    """The results of one step, for display.

    Attributes:
        step: number of completed optimizer steps.
        loss: training loss in nats per token.
        val_loss: validation loss in nats per token; None without a validation after this step.
        tokens_per_s: training tokens per second.
        vram_bytes, ram_bytes, disk_bytes: peaks of the step.
    """

    step: int
    loss: float
    val_loss: float | None
    tokens_per_s: float
    vram_bytes: int
    ram_bytes: int
    disk_bytes: int


AfterStep = Callable[[RunState, nn.Module, torch.optim.Optimizer, StepInfo], None]
"""Called after each step. It may raise an exception to end the run."""


def model_config(config: TrainConfig, vocab_size: int) -> ModelConfig:
    """Returns the configuration of a run's model.

    Raises:
        ConfigError: the model's name is unknown, or its options are invalid.
    """
    if config.model not in SIZES:
        raise ConfigError(f"--model={config.model!r} is not known: use one of {', '.join(SIZES)}.")
    named = SIZES[config.model]
    if isinstance(named, GPTConfig):
        named = replace(named, max_seq_len=config.seq)
    return replace(
        named,
        vocab_size=vocab_size,
        num_layers=config.layers or named.num_layers,
        num_heads=config.heads or named.num_heads,
        width=config.width or named.width,
        dropout=config.dropout,
    )


def run_training(
    config: TrainConfig,
    corpus: Tokens,
    device: torch.device,
    *,
    unlimited: bool,
    after_step: AfterStep,
    start: Checkpoint | None = None,
) -> tuple[RunState, LanguageModel, torch.optim.Optimizer]:
    """Trains a new model, or resumes from a checkpoint, to the last step.

    Weights, batches and dropout depend only on the seed and the step, and PyTorch's deterministic algorithms are on. So
    two runs on the same machine give bit-identical losses, however often they were stopped and resumed.

    Args:
        config: the options. The budget is ignored with `unlimited`.
        corpus: the training data.
        device: the device.
        unlimited: keeps all saved tensors, and only measures memory.
        after_step: called after each step.
        start: checkpoint to resume from. Its record has `RunState.to_json()` under "run".

    Returns:
        The complete state, the model and its optimizer.

    Raises:
        BudgetError: the budget is below what the model needs.
        CheckpointError: `start` is damaged or from another model.
        StorageError: the disk tier failed.
    """
    torch.manual_seed(derive_seed(config.seed, "weights"))
    model = make_model(model_config(config, corpus.tokenizer.vocab_size)).to(device)
    optimizer = make_optimizer(model, config)
    state = RunState()
    if start is not None:
        restore(start, model, optimizer)
        state = RunState.from_json(start.record["run"])
    budget: dict[str, Any] = {"unlimited": True}
    if not unlimited:
        tiers = {"vram": config.vram, "ram": config.ram, "disk": config.disk}
        budget = {**tiers, "plan": config.plan, "optimizer": optimizer}
    with deterministic(device), Session(model, **budget) as storm:
        for step in range(state.step, config.steps):
            began = time.perf_counter()
            set_learning_rate(optimizer, learning_rate(step, config))
            loss = _train_step(model, optimizer, storm, config, corpus, device, step)
            seconds = time.perf_counter() - began
            done, val_loss = step + 1, None
            state.losses.append(loss)
            state.step, state.train_seconds = done, state.train_seconds + seconds
            state.step_seconds.append(seconds)
            if not unlimited and known_ms(state.forecast) is None:
                state.forecast = first_said(state.forecast, storm.report().forecast)
            if done == config.steps or (config.val_every and done % config.val_every == 0):
                val_loss = evaluate(model, config, corpus, device)
                state.val_losses.append((done, val_loss))
            usage = storm.usage()
            info = StepInfo(
                step=done,
                loss=loss,
                val_loss=val_loss,
                tokens_per_s=config.tokens_per_step / seconds,
                vram_bytes=usage.vram_bytes,
                ram_bytes=usage.ram_bytes,
                disk_bytes=usage.disk_bytes,
            )
            if done == config.steps:
                report = storm.report()
                state.corrected, state.measured = report.forecast, report.measured
                state.highest, state.notes = report.highest, list(report.notes)
            after_step(state, model, optimizer, info)
    if not state.weights_sha256:
        state.weights_sha256 = _weights_sha256(model)
        state.sample = sample_text(model, config, corpus, device)
    return state, model, optimizer


@torch.no_grad()
def evaluate(model: LanguageModel, config: TrainConfig, corpus: Tokens, device: torch.device) -> float:
    """Returns the mean loss in nats per token on `config.val_batches` validation batches, without dropout."""
    model.eval()
    total = 0.0
    for number in range(config.val_batches):
        x_BT, y_BT = corpus.batch("val", batch=config.batch, seq=config.seq, seed=config.seed, index=(number,))
        with autocast(config, device):
            total += loss_of(model, x_BT.to(device), y_BT.to(device)).item()
    model.train()
    return total / config.val_batches


def sample_text(model: LanguageModel, config: TrainConfig, corpus: Tokens, device: torch.device) -> str:
    """Generates `config.sample_chars` tokens after the first token of the validation part."""
    if not config.sample_chars:
        return ""
    generator = torch.Generator(device).manual_seed(derive_seed(config.seed, "sample"))
    start_BT = corpus.first_held_back().to(device)[None]
    ids_BT = model.generate(start_BT, config.sample_chars, temperature=0.8, top_k=40, generator=generator)
    return corpus.tokenizer.decode(ids_BT[0].tolist())


def _train_step(
    model: LanguageModel,
    optimizer: torch.optim.Optimizer,
    storm: Session,
    config: TrainConfig,
    corpus: Tokens,
    device: torch.device,
    step: int,
) -> float:
    torch.manual_seed(derive_seed(config.seed, "dropout", step))
    loss_sum = torch.zeros((), device=device)
    with storm.step():
        for micro in range(config.accumulate):
            with torch.no_grad():  # computing a batch is not part of the planned step
                x_BT, y_BT = corpus.batch(
                    "train",
                    batch=config.batch,
                    seq=config.seq,
                    seed=config.seed,
                    index=(step, micro),
                    ahead=_following(config, step, micro),
                )
                x_BT, y_BT = x_BT.to(device, non_blocking=True), y_BT.to(device, non_blocking=True)
            loss = micro_loss(model, config, device, x_BT, y_BT)
            loss.backward()
            loss_sum += loss.detach()
    if config.grad_clip:
        nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
    optimizer.step()
    optimizer.zero_grad()
    return loss_sum.item()


def _following(config: TrainConfig, step: int, micro: int) -> tuple[int, int] | None:
    """Index of the micro-batch after this one; None after the last."""
    if micro + 1 < config.accumulate:
        return step, micro + 1
    return (step + 1, 0) if step + 1 < config.steps else None


def micro_loss(
    model: LanguageModel, config: TrainConfig, device: torch.device, x_BT: torch.Tensor, y_BT: torch.Tensor
) -> torch.Tensor:
    """The part of one micro-batch in the step's loss, with autocast if configured: a scalar tensor."""
    with autocast(config, device):
        return loss_of(model, x_BT, y_BT) / config.accumulate


def loss_of(model: LanguageModel, x_BT: torch.Tensor, y_BT: torch.Tensor) -> torch.Tensor:
    """The mean loss in nats per token: a scalar tensor."""
    loss: torch.Tensor | None = model(x_BT, y_BT).loss
    assert loss is not None
    return loss


def autocast(config: TrainConfig, device: torch.device) -> torch.autocast:
    """Autocast to bfloat16 if configured; otherwise disabled."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.dtype == "bfloat16")


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Turns PyTorch's deterministic algorithms on, and restores the settings at the end."""
    allow_products(device)
    # By default MKL chooses its number of threads per call, and its results are reproducible only for a fixed number
    # (oneMKL Developer Guide, "Reproducibility Conditions").
    torch.set_num_threads(torch.get_num_threads())
    fill_before = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    # Off, since filling every torch.empty would cost a pass over memory, and no code reads uninitialized values.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        with deterministically():
            yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fill_before  # type: ignore[attr-defined]


def _weights_sha256(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
