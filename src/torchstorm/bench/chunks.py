"""A batch that no GPU holds: `Session.run` finds how many micro-batches it takes, and trains on them.

GPT blocks of hidden 8192 with AdamW, 128 sequences of 8192 tokens: with everything kept their activations alone would
take about a TiB. Its gradients are held against those of plain PyTorch with every block checkpointed, in as many
micro-batches.
"""

from __future__ import annotations

import math
import time
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from torchstorm.bench.bits import relative_error
from torchstorm.bench.cases import Blocks, OffloadCase, bench_device, make_subject
from torchstorm.bench.measure import Subject, synchronize
from torchstorm.bench.rows import GIB, HEADER, Results, Row
from torchstorm.bench.sessions import joined
from torchstorm.offload.session import Session
from torchstorm.offload.split import Work

ON_A_GPU = OffloadCase(width=8192, num_layers=4, num_heads=64, batch=128, seq=8192, dtype=torch.bfloat16)
SMALL = OffloadCase(
    width=64, num_layers=3, num_heads=2, batch=24, seq=64, dtype=torch.float32, budgets_gib=(2**21 / GIB,)
)
# Of gradients in bfloat16 that attention adds up in another order each time. On a CPU they must be the same bits.
_CLOSE = 0.01


def bench_chunks(device: str | None, *, steps: int, json_path: Path | None, console: Console) -> None:
    """Trains on the batch, prints a row, and with `json_path` writes it.

    Args:
        device: "cpu", "cuda" or "cuda:N"; None for CUDA where there is one.
        steps: timed steps, after one that finds the micro-batches and one that is measured.
        json_path: where the row goes.
        console: where it is printed.

    Raises:
        TorchstormError: the device is not there, the file cannot be written, or not even one sequence fits.
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
    subject, model = make_subject(case, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    on_gpu = device.type == "cuda"
    given = next((int(gib * GIB) for gib in case.budgets_gib), None)
    calls: list[int] = []

    def fn(x_BTC: torch.Tensor) -> tuple[torch.Tensor, int]:
        calls.append(len(x_BTC))
        return _loss(subject, x_BTC), len(x_BTC)

    seconds: list[float] = []
    error, note = math.inf, ""
    with Session(model, vram=given if on_gpu else None, ram=None if on_gpu else given, optimizer=optimizer) as storm:
        for index in range(2 + steps):
            batch = subject.data(index)
            calls.clear()
            synchronize(device)
            start = time.perf_counter()
            storm.run(fn, batch)
            synchronize(device)
            took = time.perf_counter() - start
            if index == 0:
                num_parts = _last(calls, case.batch)
                note = f"found in {took:.1f} s and {len(calls)} calls"
                error = _compare(subject, model, batch, num_parts)
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
    """Into how many micro-batches the last try split a batch: it made the last calls, which have all its rows."""
    count = 0
    while num_rows > 0:
        count += 1
        num_rows -= calls[-count]
    return count


def _compare(subject: Subject, model: Blocks, batch: torch.Tensor, num_parts: int) -> float:
    """Relative error of the gradients that there are against checkpointing's. They stay."""
    named = dict(model.named_parameters())
    found = {name: p.grad.to("cpu", copy=True) for name, p in named.items() if p.grad is not None}
    model.zero_grad()
    with model.checkpointing():
        for part, _ in Work.of(batch).parts(num_parts):
            loss = _loss(subject, part)
            torch.autograd.backward(loss, torch.full_like(loss, 1 / len(batch)))
    error = relative_error({name: p.grad for name, p in named.items() if p.grad is not None}, found)
    for name, parameter in named.items():
        parameter.grad = found[name].to(parameter.device)
    return error


def _loss(subject: Subject, x_BTC: torch.Tensor) -> torch.Tensor:
    """Sum over sequences of the mean square of what comes out."""
    return subject.loss(x_BTC) * len(x_BTC)
