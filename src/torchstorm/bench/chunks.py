"""Trains on a batch that no GPU can hold: `Session.run` splits it into micro-batches.

GPT blocks with hidden size 8192 and AdamW, on 128 sequences of 8192 tokens: their activations alone would need about a
TiB. The gradients are compared with those of plain PyTorch with checkpointing of every block, in as many micro-batches.
"""

from __future__ import annotations

import math
import time
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from torchstorm.bench.bits import relative_error
from torchstorm.bench.cases import Blocks, OffloadCase, bench_device, make_blocks
from torchstorm.bench.measure import Training, synchronize
from torchstorm.bench.rows import GIB, HEADER, Results, Row
from torchstorm.bench.sessions import joined
from torchstorm.offload.run.split import Work
from torchstorm.offload.session import Session

ON_A_GPU = OffloadCase(width=8192, num_layers=4, num_heads=64, batch=128, seq=8192, dtype=torch.bfloat16)
SMALL = OffloadCase(
    width=64, num_layers=3, num_heads=2, batch=24, seq=64, dtype=torch.float32, budgets_gib=(2**21 / GIB,)
)
# For bfloat16 gradients, since attention sums them in varying order. On a CPU they must be bit-identical.
_CLOSE = 0.01


def bench_chunks(device: str | None, *, steps: int, json_path: Path | None, console: Console) -> None:
    """Trains on the batch, prints a row, and writes it to `json_path`.

    Args:
        device: "cpu", "cuda" or "cuda:N"; None for CUDA if available.
        steps: timed steps, after one that finds the micro-batches and one that is measured.
        json_path: JSON file; None for no file.
        console: where to print.

    Raises:
        TorchstormError: the device does not exist, the file cannot be written, or a single sequence does not fit.
    """
    target = bench_device(device)
    say = partial(console.print, highlight=False, soft_wrap=True, markup=False)
    results = Results("chunks", target, path=json_path, say=say)
    case = ON_A_GPU if target.type == "cuda" else SMALL
    results.say(case.title + ", with AdamW")
    results.say(HEADER)
    results.add(run_chunks(case, target, steps=steps))
    results.write()


def run_chunks(case: OffloadCase, device: torch.device, *, steps: int) -> Row:
    """Trains on one case's batch; see `bench_chunks`."""
    training, model = make_blocks(case, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    on_gpu = device.type == "cuda"
    given = next((int(gib * GIB) for gib in case.budgets_gib), None)
    calls: list[int] = []

    def fn(x_BTC: torch.Tensor) -> tuple[torch.Tensor, int]:
        calls.append(len(x_BTC))
        return _loss(training, x_BTC), len(x_BTC)

    seconds: list[float] = []
    error, note = math.inf, ""
    with Session(model, vram=given if on_gpu else None, ram=None if on_gpu else given, optimizer=optimizer) as storm:
        for index in range(2 + steps):
            batch = training.data(index)
            calls.clear()
            synchronize(device)
            start = time.perf_counter()
            storm.run(fn, batch)
            synchronize(device)
            took = time.perf_counter() - start
            if index == 0:
                num_parts = _last(calls, case.batch)
                note = f"found in {took:.1f} s and {len(calls)} calls"
                error = _compare(training, model, batch, num_parts)
            start = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad()
            synchronize(device)
            seconds.append(took + time.perf_counter() - start)
            del batch
        usage, report = storm.usage(), storm.report()
    num_parts = _last(calls, case.batch)
    row = Row(
        shape=case.shape,
        way="session-run",
        budget_gib=(report.budget.vram if on_gpu else report.budget.ram) / GIB,
        peak_gib=(usage.vram_bytes if on_gpu else usage.ram_bytes) / GIB,
        ram_gib=usage.ram_bytes / GIB,
        moved_gib=report.moved_bytes * num_parts / GIB,
        checked=error <= (_CLOSE if on_gpu else 0.0),
        steps=steps,
        note=joined(
            f"{num_parts} micro-batches of {case.batch / num_parts:g} sequences",
            note,
            f"gradients within {error:.1%} of checkpointing in as many",
        ),
    )
    return row.timed(seconds[2:]) if row.checked else row


def _last(calls: list[int], num_rows: int) -> int:
    """Number of micro-batches of the last attempt: the last calls that together have all rows."""
    count = 0
    while num_rows > 0:
        count += 1
        num_rows -= calls[-count]
    return count


def _compare(training: Training, model: Blocks, batch: torch.Tensor, num_parts: int) -> float:
    """Relative error of the current gradients compared with checkpointing. The gradients are kept."""
    named = dict(model.named_parameters())
    found = {name: p.grad.to("cpu", copy=True) for name, p in named.items() if p.grad is not None}
    model.zero_grad()
    with model.checkpointing():
        for part, _ in Work.of(batch).parts(num_parts):
            loss = _loss(training, part)
            torch.autograd.backward(loss, torch.full_like(loss, 1 / len(batch)))
    error = relative_error({name: p.grad for name, p in named.items() if p.grad is not None}, found)
    for name, parameter in named.items():
        parameter.grad = found[name].to(parameter.device)
    return error


def _loss(training: Training, x_BTC: torch.Tensor) -> torch.Tensor:
    """Sum over sequences of the mean square of the output."""
    return training.loss(x_BTC) * len(x_BTC)
