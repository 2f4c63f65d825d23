"""Implements `torchstorm train`: device, text, the run under the budget, the run without one, and the results."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from torchstorm.errors import BudgetError, CheckpointError, ConfigError, OutOfVRAMError, StorageError, TorchstormError
from torchstorm.offload.native import library
from torchstorm.offload.native.classes import classes
from torchstorm.paths import check_output, user_path
from torchstorm.train.checkpoint import Checkpoint, find_checkpoint, has_checkpoint, save_checkpoint
from torchstorm.train.config import TrainConfig, resumed_config
from torchstorm.train.data import Tokens
from torchstorm.train.device import resolve_device
from torchstorm.train.loop import RunState, StepInfo, model_config, run_training
from torchstorm.train.packed import opened_data, packed_tokenizer
from torchstorm.train.progress import Display
from torchstorm.train.result import TrainResult, device_name, write_json
from torchstorm.train.stamp import TRAINING, Stamp, stamp
from torchstorm.train.stop import Stopped, StopRequest


def train(
    options: Mapping[str, Any], *, resume: str | os.PathLike[str] | None = None, console: Console | None = None
) -> TrainResult:
    """Trains, saves, compares and prints.

    Args:
        options: fields of `TrainConfig` by name; the others have their defaults, or with `resume` the saved values.
        resume: folder of a run to resume.
        console: where to print; None for standard output.

    Returns:
        The printed result. It is also written to the option `json`, if given.

    Raises:
        TorchstormError: see `torchstorm.errors`.
        Stopped: SIGINT or SIGTERM was received, and the run is saved.
    """
    console = console or Console()
    resume = None if resume is None else user_path(resume, name="--resume")
    start = None if resume is None else find_checkpoint(resume)
    if start is None:
        config = TrainConfig(**{**packed_tokenizer(options.get("data")), **options})
    else:
        config = resumed_config(start.record["config"], options)
    device = resolve_device(config.device, vram=config.vram)
    out = _out_folder(config, options, resume)
    if config.json is not None:
        _make_folder(Path(config.json).parent, "--json")
        check_output(config.json, name="--json")
    code = Stamp() if config.json is None else stamp((*TRAINING, "train"))  # before anybody changes the files
    with StopRequest() as stop, opened_data(config) as corpus:
        if start is not None:
            _check_same_text(start, corpus)
        _print_intro(console, config, corpus, device, start)
        if config.compare:
            _build_first(console)
        run = _run_saved(config, corpus, device, console, stop, out, start)
        unlimited, unlimited_error = None, ""
        if config.compare:
            # The first run's weights and optimizer are already freed, so they do not count in the second run's memory.
            gc.collect()
            if stop.signum is not None:
                raise Stopped(stop.signum, run.step, out)
            try:
                unlimited = _run_unlimited(config, corpus, device, console, stop, out)
            except (torch.OutOfMemoryError, OutOfVRAMError) as error:
                unlimited_error = (
                    f"Without a budget, the run does not fit on this machine: {str(error).splitlines()[0]}"
                )
    result = TrainResult(
        config=config,
        device=device_name(device),
        run=run,
        unlimited=unlimited,
        unlimited_error=unlimited_error,
        checkpoint_dir=out,
        stamp=code,
    )
    result.print_to(console)
    if config.json is not None:
        write_json(config.json, result.to_json())
    return result


def _build_first(console: Console) -> None:
    """Waits for the C++ of settled steps, which else is built beside the first run and takes its processor's time."""
    library.begin(classes)
    if library.is_building():
        console.print(
            "Builds the C++ of settled steps, once for this PyTorch, before the runs that are compared.", soft_wrap=True
        )
        library.wait()


def _run_saved(
    config: TrainConfig,
    corpus: Tokens,
    device: torch.device,
    console: Console,
    stop: StopRequest,
    out: Path,
    start: Checkpoint | None,
) -> RunState:
    """Runs the training with checkpoints."""
    first_step = saved_step = 0 if start is None else start.step
    latest: tuple[RunState, nn.Module, torch.optim.Optimizer] | None = None

    def save(state: RunState, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        nonlocal saved_step
        record = {
            "config": config.to_json(),
            "tokenizer": corpus.tokenizer.to_json(),
            "text_sha256": corpus.sha256,
            "run": state.to_json(),
        }
        save_checkpoint(out, step=state.step, model=model, optimizer=optimizer, record=record)
        saved_step = state.step

    def after_step(state: RunState, model: nn.Module, optimizer: torch.optim.Optimizer, info: StepInfo) -> None:
        nonlocal latest
        latest = (state, model, optimizer)
        display.step(info)
        if state.step == config.steps:
            return  # saved below, with the final results
        if stop.signum is not None:
            save(state, model, optimizer)
            raise Stopped(stop.signum, state.step, out)
        if config.checkpoint_every and state.step % config.checkpoint_every == 0:
            save(state, model, optimizer)

    title = "under the budget" if config.has_budget else "training"
    with Display(console, title, first_step=first_step, num_steps=config.steps) as display:
        try:
            state, model, optimizer = run_training(
                config, corpus, device, unlimited=not config.has_budget, after_step=after_step, start=start
            )
        except TorchstormError:
            # Such a step has not changed any weight, so the steps before it can be saved.
            if latest is not None and latest[0].step > saved_step:
                with suppress(StorageError):
                    save(*latest)
                    console.print(f"Saved after step {saved_step}. Resume with --resume {out}", soft_wrap=True)
            raise
        except torch.OutOfMemoryError as error:
            advice = "give less --vram" if config.has_budget else "give a budget, as in --vram 8GiB --ram 32GiB"
            raise BudgetError(f"{device} ran out of memory: {str(error).splitlines()[0]} To fit, {advice}.") from error
    if state.step > first_step or out != (start and start.path.parent):
        save(state, model, optimizer)
    return state


def _run_unlimited(
    config: TrainConfig, corpus: Tokens, device: torch.device, console: Console, stop: StopRequest, out: Path
) -> RunState:
    """Runs the training again from the first step, without a budget and without checkpoints."""

    def after_step(state: RunState, model: nn.Module, optimizer: torch.optim.Optimizer, info: StepInfo) -> None:
        display.step(info)
        if stop.signum is not None:
            raise Stopped(stop.signum, config.steps, out)

    with Display(console, "without a budget", first_step=0, num_steps=config.steps) as display:
        state, _, _ = run_training(config, corpus, device, unlimited=True, after_step=after_step)
    return state


def _out_folder(config: TrainConfig, options: Mapping[str, Any], resume: Path | None) -> Path:
    if resume is not None and "out" not in options:
        return resume
    out = Path(config.out or time.strftime("torchstorm-runs/%Y-%m-%d-%H%M%S"))
    if has_checkpoint(out) and out != resume:
        raise ConfigError(
            f"--out {out} already holds a checkpoint, of step {find_checkpoint(out).step}: "
            f"resume it with --resume {out}, or give another --out."
        )
    _make_folder(out, "--out")
    return out


def _make_folder(folder: Path, option: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{option} needs the folder {folder}, which cannot be created: {error.strerror}.") from error


def _check_same_text(start: Checkpoint, corpus: Tokens) -> None:
    if start.record["text_sha256"] != corpus.sha256 or start.record["tokenizer"] != corpus.tokenizer.to_json():
        raise CheckpointError(
            f"The text has changed: {start.path} was trained on text with SHA-256 {start.record['text_sha256'][:16]}, "
            f"but {corpus.source} has {corpus.sha256[:16]}. Give --data the same text as before, or start a new run."
        )


def _print_intro(
    console: Console, config: TrainConfig, corpus: Tokens, device: torch.device, start: Checkpoint | None
) -> None:
    shape = model_config(config, corpus.tokenizer.vocab_size)
    resumed = "" if start is None else f", resumed after step {start.step}"
    console.print(
        f"{config.model}: {shape.num_layers} layers, {shape.num_heads} heads, {shape.width} wide, "
        f"{shape.vocab_size} ids; {config.steps} steps of {config.tokens_per_step:,} tokens in {config.dtype} "
        f"on {device_name(device)}{resumed}.\n"
        f"Text: {corpus.source}; {corpus.num_train:,} training tokens, {corpus.num_val:,} validation tokens.",
        highlight=False,
        soft_wrap=True,
    )
