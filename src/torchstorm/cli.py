"""The `torchstorm` command. Options become a config here; the work is done in the rooms.

Exit codes: 0 done; 2 a mistake in what was asked, told in one line on standard error; 130 and 143 stopped by Ctrl-C or
SIGTERM, after saving. The commands of `bench` are in bench/commands.py. Rooms that need torch are imported inside the
commands, so that --help is quick.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from torchstorm.bench.commands import bench_app
from torchstorm.paths import check_output
from torchstorm.report.terminal import console_beside, document_option, installed_version, told
from torchstorm.train.config import TrainConfig, parse_betas

app = typer.Typer(
    name="torchstorm",
    help="Name a memory budget and train PyTorch models as if you had more VRAM.",
    epilog="Example: torchstorm train --ram 120MiB --disk spill:2GiB --compare",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},  # of all commands below, too
)

_DEFAULT = TrainConfig()
app.add_typer(bench_app, name="bench")


def _show_version(asked: bool) -> None:
    if asked:
        torch, python = installed_version("torch"), platform.python_version()
        print(f"torchstorm {installed_version('torchstorm')} (PyTorch {torch}, Python {python})")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Tell the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


def _option(name: str, text: str) -> Any:
    value = getattr(_DEFAULT, name)
    shown = ",".join(map(str, value)) if isinstance(value, tuple) else value
    return typer.Option(help=text if value is None else f"{text} (default: {shown})", show_default=False)


# Options that several commands have.
Model = Annotated[
    str | None,
    _option(
        "model",
        "gpt-nano, -micro, -mini, gpt2, gpt2-medium, -large or -xl; "
        "xlstm-nano, -micro, -mini, -125m, -350m, -1.3b or -7b.",
    ),
]
Batch = Annotated[int | None, _option("batch", "Sequences in a micro-batch.")]
Seq = Annotated[int | None, _option("seq", "Tokens in a sequence.")]
Device = Annotated[str | None, _option("device", "cpu, cuda or cuda:N; left out: cuda where there is one.")]
Dtype = Annotated[str | None, _option("dtype", "float32, or bfloat16 for autocast.")]
Vram = Annotated[str | None, _option("vram", "Budget for GPU memory, as in 8GiB.")]
Ram = Annotated[str | None, _option("ram", "Budget for RAM, as in 32GiB.")]
Disk = Annotated[str | None, _option("disk", "Folder for spilled tensors, as in /nvme or /nvme:200GiB.")]
Layers = Annotated[int | None, _option("layers", "Blocks, instead of the model's.")]
Heads = Annotated[int | None, _option("heads", "Heads, instead of the model's.")]
Width = Annotated[int | None, _option("width", "Width, instead of the model's.")]
Dropout = Annotated[float | None, _option("dropout", "Dropout probability.")]
Tokenizer = Annotated[str | None, _option("tokenizer", "bytes or chars.")]


@app.command(epilog="Example: torchstorm train --data texts --ram 120MiB --disk spill:2GiB")
def train(
    model: Model = None,
    data: Annotated[
        str | None, _option("data", "Text file, folder, or volume of `pack`; left out: the Python library's source.")
    ] = None,
    steps: Annotated[int | None, _option("steps", "Optimizer steps in all.")] = None,
    batch: Batch = None,
    seq: Seq = None,
    device: Device = None,
    dtype: Dtype = None,
    vram: Vram = None,
    ram: Ram = None,
    disk: Disk = None,
    plan: Annotated[str | None, _option("plan", "Follow the plan in this file, which `plan --json` wrote.")] = None,
    compare: Annotated[
        bool | None, typer.Option("--compare/--no-compare", help="Run again without the budget and compare.")
    ] = None,
    seed: Annotated[int | None, _option("seed", "What weights, batches and dropout are drawn from.")] = None,
    out: Annotated[str | None, _option("out", "Folder for checkpoints; left out: torchstorm-runs/<time>.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder.", show_default=False)] = None,
    json: Annotated[Path | None, document_option("Write the results here; -: to standard output.")] = None,
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
    tokenizer: Tokenizer = None,
    val_every: Annotated[int | None, _option("val_every", "Steps between validations; 0: only at the end.")] = None,
    val_batches: Annotated[int | None, _option("val_batches", "Batches in a validation.")] = None,
    checkpoint_every: Annotated[
        int | None, _option("checkpoint_every", "Steps between checkpoints; 0: only at the end.")
    ] = None,
    sample_chars: Annotated[int | None, _option("sample_chars", "Tokens of text to write at the end.")] = None,
) -> None:
    """Train a GPT or xLSTM under a memory budget, and see what was forecast beside what was measured."""
    given = {name: value for name, value in locals().items() if name != "resume" and value is not None}
    from torchstorm.train.job import train as run

    with told():
        if betas is not None:
            given["betas"] = parse_betas(betas)
        run(given, resume=resume, console=console_beside(json))


@app.command(epilog="Example: torchstorm plan --model gpt2 --machine rtx4090 --vram 8GiB")
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
    machine: Annotated[
        str | None,
        typer.Option(help="Plan for hardware that is not here: rtx4090, rtx3090, a100, h100, h200 or gb200."),
    ] = None,
    curve: Annotated[
        Path | None,
        document_option("Draw step time against budget here, as in FILE.png; needs matplotlib."),
    ] = None,
    json: Annotated[
        Path | None,
        document_option("Write the plan here; with --curve, the curve; -: to standard output."),
    ] = None,
    layers: Layers = None,
    heads: Heads = None,
    width: Width = None,
    dropout: Dropout = None,
) -> None:
    """Forecast a training without doing it: which tensors go where, peak per tier, step time."""
    given = {name: value for name, value in locals().items() if name not in ("machine", "curve") and value is not None}
    from torchstorm.report.curve import write_curve
    from torchstorm.report.picture import check_picture
    from torchstorm.train.forecast import plan_training

    console = console_beside(curve, json)
    with told():
        if curve is None:
            plan_training(given, console=console, machine=machine)
            return
        check_picture(curve, "--curve")
        given.pop("json", None)  # for the curve
        if json is not None:
            check_output(json, name="--json")
        found = plan_training(given, console=console, machine=machine)
        config = TrainConfig(**given)
        title = f"{config.model}, {config.batch} x {config.seq} tokens"
        write_curve(found, curve, json_path=json, title=title)
        console.print(f"curve: {curve}", markup=False, highlight=False, soft_wrap=True)


@app.command(epilog="Example: torchstorm pack texts x.storm --tokenizer chars")
def pack(
    sources: Annotated[list[Path], typer.Argument(metavar="SOURCE", help="Text files, .npy files, or folders.")],
    out: Annotated[Path, typer.Argument(metavar="OUT.storm", help="The volume to make.")],
    tokenizer: Tokenizer = None,
    seq: Annotated[int | None, _option("seq", "Tokens in a sequence of text; a record has one more.")] = None,
    records: Annotated[
        str | None, typer.Option(help="Name of the kind that arrays become (default: data).", show_default=False)
    ] = None,
    checks: Annotated[
        bool, typer.Option("--checks/--no-checks", help="A check for each record, held against it when it is read.")
    ] = True,
    replace: Annotated[bool, typer.Option("--replace", help="Overwrite OUT once the new volume is whole.")] = False,
) -> None:
    """Pack text or .npy files into a volume that is read by record, as by `train --data OUT.storm`."""
    from torchstorm.train.pack import pack as run

    with told():
        run(
            sources,
            out,
            records=records,
            tokenizer=tokenizer,
            seq=seq,
            checks=checks,
            replace=replace,
            console=Console(),
        )


@app.command(epilog="Example: torchstorm doctor --directory /nvme")
def doctor(
    directory: Annotated[Path, typer.Option(help="Folder whose disk is measured; 64 MiB are written.")] = Path("."),
) -> None:
    """Tell what this machine has: GPUs, link, RAM, disk; which path is active and why."""
    from torchstorm.report.doctor import doctor as examine

    with told():
        examine(Console(), directory=str(directory))


@app.command(epilog="Example: torchstorm demo --device cpu")
def demo(device: Device = None) -> None:
    """Take a short tour of this device: memory there and back, the ladder of matrix products, how exact they are."""
    from torchstorm.bench.demo import demo as tour

    with told():
        if not tour(device, console=Console()):
            raise typer.Exit(1)


def main() -> None:
    """Runs the command."""
    app()
