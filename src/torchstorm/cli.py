"""The `torchstorm` command. Options become a config here; the work is done in the rooms.

Exit codes: 0 done; 2 a mistake in what was asked, told in one line on standard error; 130 and 143 stopped by Ctrl-C or
SIGTERM, after saving. Rooms that need torch are imported inside the commands, so that --help is quick.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from torchstorm.errors import TorchstormError
from torchstorm.train.config import TrainConfig, parse_betas

app = typer.Typer(
    name="torchstorm",
    help="Name a memory budget and train PyTorch models as if you had more VRAM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_DEFAULT = TrainConfig()
bench_app = typer.Typer(help="Time an op's ways side by side, each checked in the same run.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")


@bench_app.callback()
def _bench() -> None:
    """Keeps `offload` a command of its own while it is the only one."""


def _option(name: str, text: str) -> Any:
    value = getattr(_DEFAULT, name)
    shown = ",".join(map(str, value)) if isinstance(value, tuple) else value
    return typer.Option(help=text if value is None else f"{text} (default: {shown})", show_default=False)


# Options that several commands have.
Model = Annotated[str | None, _option("model", "gpt-nano, -micro, -mini, gpt2, gpt2-medium, -large or -xl.")]
Batch = Annotated[int | None, _option("batch", "Sequences in a micro-batch.")]
Seq = Annotated[int | None, _option("seq", "Tokens in a sequence.")]
Device = Annotated[str | None, _option("device", "cpu, cuda or cuda:N; left out: cuda where there is one.")]
Dtype = Annotated[str | None, _option("dtype", "float32, or bfloat16 for autocast.")]
Vram = Annotated[str | None, _option("vram", "Budget for GPU memory, as in 8GiB.")]
Ram = Annotated[str | None, _option("ram", "Budget for RAM, as in 32GiB.")]
Disk = Annotated[str | None, _option("disk", "Folder for spilled tensors, as in /nvme or /nvme:200GiB.")]
Layers = Annotated[int | None, _option("layers", "Blocks, instead of the model's.")]
Heads = Annotated[int | None, _option("heads", "Attention heads, instead of the model's.")]
Width = Annotated[int | None, _option("width", "Width, instead of the model's.")]
Dropout = Annotated[float | None, _option("dropout", "Dropout probability.")]


@app.command()
def train(
    model: Model = None,
    data: Annotated[str | None, _option("data", "Text file or folder; left out: the Python library's source.")] = None,
    steps: Annotated[int | None, _option("steps", "Optimizer steps in all.")] = None,
    batch: Batch = None,
    seq: Seq = None,
    device: Device = None,
    dtype: Dtype = None,
    vram: Vram = None,
    ram: Ram = None,
    disk: Disk = None,
    compare: Annotated[
        bool | None, typer.Option("--compare/--no-compare", help="Run again without the budget and compare.")
    ] = None,
    seed: Annotated[int | None, _option("seed", "What weights, batches and dropout are drawn from.")] = None,
    out: Annotated[str | None, _option("out", "Folder for checkpoints; left out: torchstorm-runs/<time>.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder.", show_default=False)] = None,
    json: Annotated[str | None, _option("json", "Write the results here.")] = None,
    layers: Layers = None,
    heads: Heads = None,
    width: Width = None,
    dropout: Dropout = None,
    lr: Annotated[float | None, _option("lr", "Learning rate after warm-up.")] = None,
    min_lr: Annotated[float | None, _option("min_lr", "Learning rate at the end; left out: lr / 10.")] = None,
    warmup: Annotated[int | None, _option("warmup", "Steps of warm-up.")] = None,
    weight_decay: Annotated[float | None, _option("weight_decay", "AdamW's weight decay.")] = None,
    betas: Annotated[str | None, _option("betas", "AdamW's betas.")] = None,
    grad_clip: Annotated[float | None, _option("grad_clip", "Largest gradient norm; 0: no clipping.")] = None,
    accumulate: Annotated[int | None, _option("accumulate", "Micro-batches in a step.")] = None,
    tokenizer: Annotated[str | None, _option("tokenizer", "bytes or chars.")] = None,
    val_every: Annotated[int | None, _option("val_every", "Steps between validations; 0: only at the end.")] = None,
    val_batches: Annotated[int | None, _option("val_batches", "Batches in a validation.")] = None,
    checkpoint_every: Annotated[
        int | None, _option("checkpoint_every", "Steps between checkpoints; 0: only at the end.")
    ] = None,
    sample_chars: Annotated[int | None, _option("sample_chars", "Tokens of text to write at the end.")] = None,
) -> None:
    """Train a GPT under a memory budget, and see what was forecast beside what was measured."""
    given = {name: value for name, value in locals().items() if name != "resume" and value is not None}
    from torchstorm.train.job import train as run

    with _told():
        if betas is not None:
            given["betas"] = parse_betas(betas)
        run(given, resume=resume, console=Console())


@app.command()
def plan(
    model: Model = None,
    batch: Batch = None,
    seq: Seq = None,
    device: Device = None,
    dtype: Dtype = None,
    vram: Vram = None,
    ram: Ram = None,
    disk: Disk = None,
    seed: Annotated[int | None, _option("seed", "What weights and tokens are drawn from.")] = None,
    json: Annotated[str | None, _option("json", "Write the plan here.")] = None,
    layers: Layers = None,
    heads: Heads = None,
    width: Width = None,
    dropout: Dropout = None,
) -> None:
    """Forecast a training without doing it: which tensors go where, peak per tier, step time."""
    given = {name: value for name, value in locals().items() if value is not None}
    from torchstorm.train.forecast import plan_training

    with _told():
        plan_training(given, console=Console())


@app.command()
def doctor(
    directory: Annotated[Path, typer.Option(help="Folder whose disk is measured; 64 MiB are written.")] = Path("."),
) -> None:
    """Tell what this machine has: GPUs, link, RAM, disk; which path is active and why."""
    from torchstorm.report.doctor import doctor as examine

    with _told():
        examine(Console(), directory=str(directory))


@bench_app.command()
def offload(
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; left out: cuda where there is one.")] = None,
    disk: Annotated[str | None, typer.Option(help="On a CPU, where Session spills to (default: a new folder).")] = None,
    steps: Annotated[int, typer.Option(help="Timed steps a row.")] = 8,
    json: Annotated[Path | None, typer.Option(help="Write the rows here.")] = None,
) -> None:
    """Compare ways of offloading in one run: keep everything, save_on_cpu, TRL, checkpointing, Session."""
    from torchstorm.bench.offload import bench_offload

    with _told():
        bench_offload(device, disk=disk, steps=steps, json_path=json, console=Console())


@contextmanager
def _told() -> Iterator[None]:
    """Tells a mistake in one line, and a stop with the way to go on."""
    from torchstorm.train.stop import Stopped

    try:
        yield
    except TorchstormError as error:
        line = " ".join(str(error).split())
        errors = Console(stderr=True)
        errors.print(f"{type(error).__name__}: {line}", style="bold red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    except Stopped as stopped:
        folder = shlex.quote(str(stopped.checkpoint_dir))
        Console().print(f"Stopped by {stopped}.\nGo on with: torchstorm train --resume {folder}", soft_wrap=True)
        raise typer.Exit(stopped.exit_code) from None


def main() -> None:
    """Runs the command."""
    app()


if __name__ == "__main__":
    main()
