"""Compares the losses of models with similar numbers of parameters, trained on the same tokens.

Every model is trained with the default options of `torchstorm train`, and the same batches in the same order. The final
validation loss must be at most 5 % above the first model's.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from torchstorm.bench.cases import bench_device, pick
from torchstorm.bench.record import environment
from torchstorm.bench.sources import SOURCES
from torchstorm.models.families import SIZES
from torchstorm.paths import check_output
from torchstorm.report.losses import Curve, draw_losses
from torchstorm.report.picture import check_picture
from torchstorm.train.config import TrainConfig
from torchstorm.train.loop import run_training
from torchstorm.train.packed import opened_data
from torchstorm.train.result import write_json
from torchstorm.train.stamp import Stamp, stamp

MOST_ABOVE = 0.05
_VALIDATIONS = 20


@dataclass(frozen=True, kw_only=True)
class Learned:
    """The result of one model's run.

    Attributes:
        model: a named size.
        num_params: number of parameters, with embeddings.
        losses: training loss of each step, in nats per token.
        val_losses: (completed steps, validation loss in nats per token).
        train_seconds: time of all steps.
        above: the final validation loss relative to the first model's, minus 1.
    """

    model: str
    num_params: int
    losses: list[float]
    val_losses: list[tuple[int, float]]
    train_seconds: float
    above: float

    @property
    def near(self) -> bool:
        """Whether the loss is low enough."""
        return self.above <= MOST_ABOVE

    def __str__(self) -> str:
        return (
            f"{self.model:<14}{self.num_params:>12,} parameters  validation loss {self.val_losses[-1][1]:.4f}  "
            f"{self.above:+.1%}  {self.train_seconds:.0f} s  {'holds' if self.near else 'FAILS'}"
        )


def bench_learn(
    device: str | None,
    *,
    model_names: str,
    steps: int,
    batch: int,
    seq: int,
    data: str | None,
    picture: Path | None,
    json_path: Path | None,
    console: Console,
) -> bool:
    """Trains every model, prints the results, and optionally writes and plots the losses.

    Args:
        device: "cpu", "cuda" or "cuda:N"; None for CUDA if available.
        model_names: comma-separated named sizes; the first is the reference.
        steps: optimizer steps per model.
        batch: sequences per step.
        seq: tokens per sequence.
        data: text; None for the source of Python's standard library.
        picture: file of the plot; None for no plot.
        json_path: JSON file for the losses; None for no file.
        console: where to print.

    Returns:
        Whether all losses are low enough.

    Raises:
        TorchstormError: the device or the text does not exist, a name is unknown, or a file cannot be written.
    """
    target = bench_device(device)
    names = pick(model_names, tuple(SIZES), option="--model")
    say = partial(console.print, highlight=False, soft_wrap=True, markup=False)
    if picture is not None:
        check_picture(picture, "--png")
    if json_path is not None:
        check_output(json_path, name="--json")
    code = stamp(SOURCES["learn"])
    found: list[Learned] = []
    for name in names:
        config = TrainConfig(
            model=name,
            steps=steps,
            batch=batch,
            seq=seq,
            data=data,
            val_every=max(1, steps // _VALIDATIONS),
            val_batches=8,
            sample_chars=0,
        )
        found.append(_train(config, target, found))
        say(str(found[-1]))
    if picture is not None:
        curves = [
            Curve(name=f"{one.model}, {one.num_params:,} parameters", losses=one.losses, val_losses=one.val_losses)
            for one in found
        ]
        title = f"{steps} steps of {batch} x {seq} tokens, {_source(data)}"
        draw_losses(curves, picture, tokens_per_step=batch * seq, title=title, option="--png")
    if json_path is not None:
        write_json(json_path, _record(found, config, target, code))
    return all(one.near for one in found)


def _train(config: TrainConfig, device: torch.device, before: list[Learned]) -> Learned:
    with opened_data(config) as corpus:
        state, model, _ = run_training(config, corpus, device, unlimited=True, after_step=lambda *_: None)
    last = state.val_losses[-1][1]
    mark = before[0].val_losses[-1][1] if before else last
    return Learned(
        model=config.model,
        num_params=model.num_params(),
        losses=state.losses,
        val_losses=state.val_losses,
        train_seconds=state.train_seconds,
        above=last / mark - 1,
    )


def _source(data: str | None) -> str:
    return "source of Python's standard library" if data is None else Path(data).name


def _record(found: list[Learned], config: TrainConfig, device: torch.device, code: Stamp) -> dict[str, Any]:
    options = {name: value for name, value in config.to_json().items() if name != "model"}
    runs = [{**asdict(one), "near": one.near} for one in found]
    tokens = config.tokens_per_step * config.steps
    return {"op": "learn", **environment(device), **vars(code), "config": options, "tokens": tokens, "runs": runs}
