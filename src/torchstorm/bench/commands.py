"""The commands of `torchstorm bench`. Each converts its options and calls another module of this package.

Modules that need torch are imported inside the commands, so that --help is fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from torchstorm.bench.ops import OPS, Op
from torchstorm.report.terminal import console_beside, document_option, told

bench_app = typer.Typer(
    help="Compare and check implementations of an operation, or ways to train.",
    epilog="Example: torchstorm bench norms --device cpu --json norms.json",
    no_args_is_help=True,
)

BenchDevice = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N (default: cuda if available).")]
BenchDisk = Annotated[str | None, typer.Option(help="On a CPU, the Session's spill directory (default: a new folder).")]
BenchSteps = Annotated[int, typer.Option(min=1, help="Timed steps per row; a record needs five.")]
BenchWay = Annotated[str | None, typer.Option(help="Only these and their baselines, as in session,checkpoint.")]
BenchJson = Annotated[
    Path | None,
    document_option(
        "Write each row here as it is done; a file of the same machine keeps its other rows. "
        "-: all rows at the end, to standard output."
    ),
]


# Options of most operations.
BenchDtype = Annotated[
    str | None, typer.Option(help="float32, float16 or bfloat16 (default: bfloat16 on a GPU, float32 on a CPU).")
]
BenchPlot = Annotated[
    Path | None,
    document_option("Draw bars of milliseconds here, as in FILE.png; needs matplotlib."),
]


@bench_app.command(epilog="Example: torchstorm bench offload --device cpu --json offload.json")
def offload(
    device: BenchDevice = None,
    disk: BenchDisk = None,
    steps: BenchSteps = 8,
    shape: Annotated[str | None, typer.Option(help="Only these shapes, as in 32768x1,4096x4 (default: all).")] = None,
    way: BenchWay = None,
    json: BenchJson = None,
) -> None:
    """Compare ways to train in less memory: checkpointing, torch.compile, TRL, save_on_cpu, Session."""
    from torchstorm.bench.offload import bench_offload

    with told():
        bench_offload(
            device,
            disk=disk,
            steps=steps,
            json_path=json,
            console=console_beside(json),
            shape_names=shape,
            way_names=way,
        )


@bench_app.command(epilog="Example: torchstorm bench wall --json wall.json")
def wall(
    device: BenchDevice = None,
    disk: BenchDisk = None,
    steps: BenchSteps = 8,
    json: Annotated[
        Path | None,
        document_option("Write what was measured and every verdict here; -: to standard output."),
    ] = None,
) -> None:
    """Check that a step that needs twice the allowed VRAM runs at almost full speed. Exit code 1 if not."""
    from torchstorm.bench.wall import bench_wall

    with told():
        if not bench_wall(device, disk=disk, steps=steps, json_path=json, console=console_beside(json)):
            raise typer.Exit(1)


@bench_app.command(epilog="Example: torchstorm bench chunks --device cpu")
def chunks(
    device: BenchDevice = None,
    steps: BenchSteps = 5,
    json: BenchJson = None,
) -> None:
    """Train on a batch that no GPU can hold, split by Session.run: on a GPU 128 x 8192 tokens, hidden size 8192."""
    from torchstorm.bench.chunks import bench_chunks

    with told():
        bench_chunks(device, steps=steps, json_path=json, console=console_beside(json))


@bench_app.command(epilog="Example: torchstorm bench models --model gpt2-xl")
def models(
    device: BenchDevice = None,
    disk: BenchDisk = None,
    steps: BenchSteps = 12,
    model: Annotated[str | None, typer.Option(help="Only these, as in llama-8b,gpt2-xl (default: all).")] = None,
    way: BenchWay = None,
    random_lengths: Annotated[
        bool,
        typer.Option("--random-lengths", help="Each batch has another length (images: another number), half to full."),
    ] = False,
    json: BenchJson = None,
) -> None:
    """Train Hugging Face models with random weights and fused AdamW in every way, and with a Session."""
    from torchstorm.bench.models import bench_models

    with told():
        bench_models(
            device,
            disk=disk,
            steps=steps,
            json_path=json,
            console=console_beside(json),
            model_names=model,
            way_names=way,
            has_random_sizes=random_lengths,
        )


@bench_app.command(epilog="Example: torchstorm bench host --json host.json")
def host(
    device: BenchDevice = None,
    steps: BenchSteps = 20,
    model: Annotated[str | None, typer.Option(help="Only these, as in llama-1.1b (default: all).")] = None,
    json: BenchJson = None,
) -> None:
    """Time steps of 64 tokens, which wait for the host alone: what a Session costs it, and where that goes."""
    from torchstorm.bench.host import bench_host

    with told():
        bench_host(device, steps=steps, json_path=json, console=console_beside(json), model_names=model)


@bench_app.command(epilog="Example: torchstorm bench xlstm --json xlstm.json")
def xlstm(
    device: BenchDevice = None,
    disk: BenchDisk = None,
    steps: BenchSteps = 6,
    shape: Annotated[
        str | None, typer.Option(help="Only these: contexts, or models at one, as in 8192x4 (default: all).")
    ] = None,
    json: BenchJson = None,
) -> None:
    """Compare tokens/s of a 350M xLSTM and a 350M GPT at 8k and 32k context, unlimited and in half the memory."""
    from torchstorm.bench.xlstm import bench_xlstm

    with told():
        bench_xlstm(device, disk=disk, steps=steps, json_path=json, console=console_beside(json), shape_names=shape)


@bench_app.command(epilog="Example: torchstorm bench learn --steps 100 --png losses.png")
def learn(
    device: BenchDevice = None,
    model: Annotated[
        str, typer.Option(help="The reference model, and the models to compare with it.")
    ] = "gpt-nano,xlstm-nano",
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps per model.")] = 600,
    batch: Annotated[int, typer.Option(min=1, help="Sequences per step.")] = 16,
    seq: Annotated[int, typer.Option(min=1, help="Tokens per sequence.")] = 256,
    data: Annotated[
        str | None, typer.Option(help="Text file or folder (default: the source of Python's library).")
    ] = None,
    png: Annotated[Path | None, document_option("Draw the losses here; needs matplotlib.")] = None,
    json: Annotated[
        Path | None,
        document_option("Write the losses here; -: to standard output."),
    ] = None,
) -> None:
    """Train models on the same tokens and compare losses. Exit code 1 if one is more than 5 % above the first."""
    from torchstorm.bench.learn import bench_learn

    with told():
        if not bench_learn(
            device,
            model_names=model,
            steps=steps,
            batch=batch,
            seq=seq,
            data=data,
            picture=png,
            json_path=json,
            console=console_beside(json, png),
        ):
            raise typer.Exit(1)


@bench_app.command(epilog="Example: torchstorm bench storage --size 64MiB --seconds 0.1")
def storage(
    directory: Annotated[
        str | None, typer.Option(help="Directory of the test file (default: the temporary directory).")
    ] = None,
    size: Annotated[str, typer.Option(help="Size of the file.")] = "1GiB",
    seconds: Annotated[float, typer.Option(min=0.01, help="A turn of a row of reads or writes, of five.")] = 0.6,
    pattern: Annotated[
        str | None, typer.Option(help="Only these of read, write, randread, randwrite, load, as in randread,load.")
    ] = None,
    device: BenchDevice = None,
    json: BenchJson = None,
) -> None:
    """Compare reads and writes with fio, by block size and depth, and loading with torch's DataLoader."""
    from torchstorm.bench.storage import bench_storage
    from torchstorm.sizes import parse_size

    with told():
        bench_storage(
            directory,
            device,
            patterns=pattern,
            size_bytes=parse_size(size),
            seconds=seconds,
            json_path=json,
            console=console_beside(json),
        )


@bench_app.command(epilog="Example: torchstorm bench mlstm --device cpu --json -")
def mlstm(
    sizes: Annotated[
        str, typer.Option(help="small, target (shapes with reference times; need a GPU) or all; or BxHxS d_qk/d_v.")
    ] = "small",
    device: BenchDevice = None,
    dtype: BenchDtype = None,
    variant: Annotated[
        str | None,
        typer.Option(help="Only these, as in gated,triton-quadratic, even slow ones (default: all)."),
    ] = None,
    json: BenchJson = None,
    plot: BenchPlot = None,
) -> None:
    """Compare all variants of the mLSTM, checked against float64. Exit code 1 if a check of ours fails."""
    from torchstorm.bench.mlstm import bench_mlstm

    with told():
        if not bench_mlstm(
            device,
            sizes=sizes,
            dtype=dtype,
            variant_names=variant,
            json_path=json,
            plot=plot,
            console=console_beside(json, plot),
        ):
            raise typer.Exit(1)


def _add(op: Op) -> None:
    """Adds the command of one operation, or of several that share their cases."""

    def command(
        sizes: Annotated[
            str,
            typer.Option(help="small; target: shapes with reference times, which need a GPU; or any shapes."),
        ] = "small",
        device: BenchDevice = None,
        dtype: BenchDtype = None,
        variant: Annotated[
            str | None, typer.Option(help="Only these, as in reference,naive,auto (default: all).")
        ] = None,
        json: BenchJson = None,
        plot: BenchPlot = None,
    ) -> None:
        from torchstorm.bench.op import bench_op

        with told():
            if not bench_op(
                op.name,
                device,
                sizes=sizes,
                dtype=dtype,
                variant_names=variant,
                json_path=json,
                plot=plot,
                console=console_beside(json, plot),
            ):
                raise typer.Exit(1)

    shapes = " or ".join(op.takes)
    help_text = f"Compare all variants of {op.title}, each checked, at {shapes}. Exit code 1 if a check of ours fails."
    epilog = f"Example: torchstorm bench {op.name} --variant reference,auto"
    bench_app.command(op.name, help=help_text, epilog=epilog)(command)


for _op in OPS.values():
    _add(_op)
