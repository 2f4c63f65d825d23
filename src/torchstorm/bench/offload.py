"""Offloading side by side: GPT blocks, forward and backward, by every way that is installed, in one run.

Each way trains the same blocks on fresh random data. Before its time counts, its gradients are compared to the last bit
with those of the run that keeps everything, under deterministic algorithms; a way that fails shows no time.

Overlap is the part of the time that host-device copies run in which a kernel runs too, from one profiled step
(intervals of kernels and of copies as CUPTI reports them).
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import importlib.util
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from torchstorm.errors import DeviceError, TorchstormError
from torchstorm.models.gpt import Block, GPTConfig
from torchstorm.offload.measure import cpu_name
from torchstorm.offload.session import Session
from torchstorm.sizes import format_size
from torchstorm.train.result import write_json


@dataclass(frozen=True, kw_only=True)
class OffloadCase:
    """One model and batch.

    Attributes:
        width, num_layers, num_heads: of the blocks.
        batch, seq: B sequences of T tokens.
        dtype: of weights and activations.
        budgets: shares of the unlimited run's peak that Session is given, or bytes where above 1.
    """

    width: int
    num_layers: int
    num_heads: int
    batch: int
    seq: int
    dtype: torch.dtype
    budgets: tuple[float, ...]

    @property
    def name(self) -> str:
        """Short, for tables."""
        return f"{self.num_layers} blocks, hidden {self.width}, {self.seq} x {self.batch}"


GIB = 2**30
CASES = (
    OffloadCase(
        width=4096,
        num_layers=10,
        num_heads=32,
        batch=4,
        seq=4096,
        dtype=torch.bfloat16,
        budgets=(0.7, 0.5, 9.8 * GIB, 0.36),
    ),
    OffloadCase(
        width=4096, num_layers=10, num_heads=32, batch=1, seq=32768, dtype=torch.bfloat16, budgets=(0.8, 0.6, 0.5, 0.4)
    ),
)
SMALL = OffloadCase(width=64, num_layers=3, num_heads=2, batch=4, seq=64, dtype=torch.float32, budgets=(0.6,))


@dataclass(frozen=True, kw_only=True)
class OffloadRow:
    """One way's result.

    Attributes:
        way: "unlimited", "save_on_cpu", "checkpoint", "trl", or "session".
        budget_bytes: what Session was given on the fast tier; 0 for the others.
        step_ms: median of one step; None where the check failed or the way does not run.
        peak_bytes: peak of allocated device memory; on CPU, of saved storages.
        moved_bytes: bytes copied off the device in one step; None where not counted.
        overlap: share of copy time during which a kernel ran; None where not measured.
        forecast_ms, forecast_bytes: Session's own forecast.
        checked: whether gradients agree to the last bit with the unlimited run's.
        note: why a field is missing.
    """

    case: str
    way: str
    budget_bytes: int = 0
    step_ms: float | None = None
    slowest_ms: float | None = None
    peak_bytes: int | None = None
    moved_bytes: int | None = None
    overlap: float | None = None
    forecast_ms: float | None = None
    forecast_bytes: int | None = None
    ram_bytes: int | None = None
    checked: bool = False
    note: str = ""


class _Blocks(torch.nn.Module):
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
        self.recompute = False

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x_BTC = checkpoint(block, x_BTC, use_reentrant=False) if self.recompute else block(x_BTC)
        return x_BTC


def run_offload(
    case: OffloadCase,
    device: torch.device,
    *,
    disk: str | None = None,
    steps: int = 8,
    say: Callable[[str], None] = print,
) -> list[OffloadRow]:
    """Runs one case by every way.

    Args:
        case: what to train.
        device: where.
        disk: "DIR" or "DIR:SIZE" for Session on a CPU.
        steps: timed steps a way.
        say: told every row as it is done.

    Returns:
        A row a way, "unlimited" first.
    """
    torch.manual_seed(0)
    with torch.device(device):
        model = _Blocks(case).to(dtype=case.dtype)
    bench = _Bench(case, device, model, steps, say)
    bench.add("unlimited", lambda: contextlib.nullcontext())
    unlimited = bench.rows[0]
    if device.type == "cuda":  # pragma: gpu
        bench.add("save_on_cpu", lambda: save_on_cpu(pin_memory=True))
        if importlib.util.find_spec("trl") is None:
            bench.rows.append(OffloadRow(case=case.name, way="trl", note="trl is not installed"))
        else:
            from accelerate import PartialState  # type: ignore[import-not-found]
            from trl.models.activation_offloading import OffloadActivations  # type: ignore[import-not-found]

            PartialState()  # TRL's logger will not warn without it
            bench.add("trl", OffloadActivations)
        model.recompute = True
        bench.add("checkpoint", lambda: contextlib.nullcontext())
        model.recompute = False
    assert unlimited.peak_bytes is not None
    for budget in case.budgets:
        budget_bytes = int(budget if budget > 1 else budget * unlimited.peak_bytes)
        bench.add_session(budget_bytes, disk)
    return bench.rows


class _Bench:
    def __init__(
        self, case: OffloadCase, device: torch.device, model: _Blocks, steps: int, say: Callable[[str], None]
    ) -> None:
        self.case, self.device, self.model, self.steps = case, device, model, steps
        self.rows: list[OffloadRow] = []
        self._say = say
        self._reference: list[list[torch.Tensor]] = []  # gradients of each checked step
        self._seed = 0

    def add(self, way: str, context: Callable[[], AbstractContextManager[Any]]) -> None:
        """Checks and times a way that is a context around forward and backward."""
        row = OffloadRow(case=self.case.name, way=way)
        try:
            self._measure(row, context, None)
        except RuntimeError as error:  # one way's failure (out of memory, say) is that way's result
            self._finish(replace(row, note=(str(error).splitlines() or [type(error).__name__])[0]))

    def add_session(self, budget_bytes: int, disk: str | None) -> None:
        """Checks and times Session at a budget on the fast tier."""
        row = OffloadRow(case=self.case.name, way="session", budget_bytes=budget_bytes)
        optimizer = torch.optim.SGD(self.model.parameters())  # no state: the others have none either
        try:
            if self.device.type == "cuda":  # pragma: gpu
                session = Session(self.model, vram=budget_bytes, optimizer=optimizer)
            else:
                session = Session(self.model, ram=budget_bytes, disk=disk, optimizer=optimizer)
            with session:
                self._measure(row, session.step, session)
        except TorchstormError as error:
            self._finish(replace(row, note=str(error)))

    def _measure(
        self, row: OffloadRow, context: Callable[[], AbstractContextManager[Any]], session: Session | None
    ) -> None:
        checked = self._check(context)
        for _ in range(2):  # Session plans in the first and learns warm times in the second
            self._step(context)
        times, peaks = [], []
        for _ in range(self.steps):
            seconds, peak = self._step(context)
            times.append(seconds * 1e3)
            peaks.append(peak)
        fields: dict[str, Any] = asdict(row)
        fields.update(checked=checked, peak_bytes=max(peaks))
        if checked:
            fields.update(step_ms=statistics.median(times), slowest_ms=max(times))
        else:
            fields.update(note="gradients differ from the unlimited run's, so no time is shown")
        if session is not None:
            report = session.report()
            assert report.forecast is not None
            assert report.measured is not None
            fast = "ram_bytes" if self.device.type == "cpu" else "vram_bytes"
            fields.update(
                moved_bytes=report.moved_bytes,
                forecast_ms=report.forecast.step_ms,
                forecast_bytes=getattr(report.forecast, fast),
                ram_bytes=report.measured.ram_bytes,
            )
            if self.device.type == "cpu":
                fields.update(peak_bytes=report.measured.ram_bytes)
        if self.device.type == "cuda":  # pragma: gpu
            fields.update(overlap=self._overlap(context))
        elif session is None:
            fields.update(peak_bytes=self._saved_bytes())
        self._finish(OffloadRow(**fields))

    def _saved_bytes(self) -> int:
        with Session(self.model, unlimited=True) as session:
            self._step(session.step)
            return session.usage().ram_bytes

    def _finish(self, row: OffloadRow) -> None:
        self.rows.append(row)
        self._say(format_row(row))
        gc.collect()
        if self.device.type == "cuda":  # pragma: gpu
            torch.cuda.empty_cache()
            # What the others pinned through PyTorch's cache would be missing from the memory that the next may use.
            torch._C._host_emptyCache()

    def _data(self, seed: int) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        shape = (self.case.batch, self.case.seq, self.case.width)
        return torch.randn(shape, device=self.device, generator=generator).to(self.case.dtype)

    def _step(self, context: Callable[[], AbstractContextManager[Any]], seed: int | None = None) -> tuple[float, int]:
        self._seed += 1
        self.model.zero_grad(set_to_none=True)
        x = self._data(self._seed if seed is None else seed)
        self._synchronize()
        if self.device.type == "cuda":  # pragma: gpu
            torch.cuda.reset_peak_memory_stats(self.device)
        start = time.perf_counter()
        with context():
            loss = self.model(x).float().square().mean()
            loss.backward()
        self._synchronize()
        seconds = time.perf_counter() - start
        return seconds, torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0

    def _check(self, context: Callable[[], AbstractContextManager[Any]]) -> bool:
        """Whether three steps' gradients are the unlimited run's, bit for bit."""
        same = True
        with _deterministic():
            for turn, seed in enumerate((-1, -2, -3)):
                self._step(context, seed)
                parameters = list(self.model.parameters())
                gradients = [p.grad.to("cpu", copy=True) for p in parameters if p.grad is not None]
                if turn == len(self._reference):
                    self._reference.append(gradients)
                reference = self._reference[turn]
                same = same and len(parameters) == len(gradients) == len(reference)
                same = same and all(torch.equal(a, b) for a, b in zip(reference, gradients, strict=True))
        return same

    def _overlap(self, context: Callable[[], AbstractContextManager[Any]]) -> float | None:  # pragma: gpu
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as run:
            self._step(context)
        kernels: list[tuple[float, float]] = []
        copies: list[tuple[float, float]] = []
        for event in run.events() or []:
            if event.device_type != torch._C._autograd.DeviceType.CUDA:
                continue
            crosses = "HtoD" in event.name or "DtoH" in event.name
            (copies if crosses else kernels).append((event.time_range.start, event.time_range.end))
        return overlap(copies, kernels)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":  # pragma: gpu
            torch.cuda.synchronize(self.device)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def overlap(first: Sequence[tuple[float, float]], second: Sequence[tuple[float, float]]) -> float | None:
    """Share of the union of `first` during which some interval of `second` runs; None where `first` is empty."""
    ones, others = _union(first), _union(second)
    total = sum(stop - start for start, stop in ones)
    if total == 0:
        return None
    shared, index = 0.0, 0
    for start, stop in ones:
        while index < len(others) and others[index][1] <= start:
            index += 1
        at = index
        while at < len(others) and others[at][0] < stop:
            shared += min(stop, others[at][1]) - max(start, others[at][0])
            at += 1
    return shared / total


def _union(intervals: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def format_row(row: OffloadRow) -> str:
    """One line of the table."""

    def size(value: int | None) -> str:
        return "-" if not value else format_size(value)

    time_ms = "-" if row.step_ms is None else f"{row.step_ms:.0f} ms"
    shared = "-" if row.overlap is None else f"{row.overlap:.0%}"
    forecast = "" if row.forecast_ms is None else f"forecast {row.forecast_ms:.0f} ms, {size(row.forecast_bytes)}"
    return (
        f"{row.way:<12}{size(row.budget_bytes):>12}{time_ms:>10}{size(row.peak_bytes):>12}{size(row.moved_bytes):>12}"
        f"{shared:>6}  {'bit-identical' if row.checked else 'NOT CHECKED'}  {forecast}{row.note}"
    )


def bench_offload(
    device: str | None, *, disk: str | None, steps: int, json_path: Path | None, console: Console
) -> list[OffloadRow]:
    """Runs and prints every case; with `json_path`, writes what was measured with versions and machine.

    Raises:
        TorchstormError: the device is not there, or the file cannot be written.
    """
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    rows: list[OffloadRow] = []
    with tempfile.TemporaryDirectory() as spill:
        for case in cases_for(target):
            console.print(case.name, highlight=False)
            say = partial(console.print, highlight=False, soft_wrap=True)
            rows += run_offload(case, target, disk=disk or spill, steps=steps, say=say)
    if json_path is not None:
        record = {"op": "offload", **environment(target), "steps": steps, "rows": [asdict(row) for row in rows]}
        write_json(json_path, record)
    return rows


def environment(device: torch.device) -> dict[str, Any]:
    """What a figure depends on besides the code: machine and versions, and the commit where git knows it."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "driver": driver_version() if device.type == "cuda" else "",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "commit": git.stdout.strip() if git.returncode == 0 else "",
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def driver_version() -> str:  # pragma: gpu
    """The NVIDIA driver's version, "" where it cannot be asked."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return ""


def cases_for(device: torch.device) -> tuple[OffloadCase, ...]:
    """The recorded cases on a GPU, a small one on a CPU.

    Raises:
        DeviceError: a CUDA device was asked for and there is none.
    """
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError(f"--device {device} was asked, but PyTorch sees no GPU here; --device cpu runs a small case.")
    return CASES if device.type == "cuda" else (SMALL,)
