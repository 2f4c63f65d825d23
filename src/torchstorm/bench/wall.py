"""The memory wall: a training step that needs twice the VRAM allowed, at nearly full speed.

A GPT with bf16 weights, gradients and fused AdamW state, on 32768 tokens: forward, backward and the optimizer. What it
needs is measured first, with everything kept. Then the allocator is capped at half of that, and a Session gets a little
less than 45 %. Every demand is answered by a figure of this run.

On a CPU a small case runs the same way: there the need is what autograd saves, a Session gets less than 45 % of it with
a disk, and demands about the GPU and about speed do not apply.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from torchstorm.bench import ways
from torchstorm.bench.cases import bench_device
from torchstorm.bench.measure import Meter
from torchstorm.bench.rows import GIB, HEADER, Results, Row
from torchstorm.bench.side_by_side import SideBySide
from torchstorm.bench.trainings import make_training
from torchstorm.errors import DeviceError
from torchstorm.models.gpt import GPTConfig

_CAP = 0.50
_ALLOWED = 0.45
_GIVEN = 0.4475  # "45 % minus a little"


@dataclass(frozen=True, kw_only=True)
class WallCase:
    """A GPT and its batch.

    Attributes:
        config: of the GPT.
        batch: sequences of `config.max_seq_len` tokens.
        dtype: of weights, gradients and optimizer state.
    """

    config: GPTConfig
    batch: int
    dtype: torch.dtype

    @property
    def shape(self) -> str:
        """Tokens by sequences."""
        return f"{self.config.max_seq_len}x{self.batch}"


ON_A_GPU = WallCase(
    config=GPTConfig(vocab_size=256, max_seq_len=32768, num_layers=10, num_heads=32, width=4096, dropout=0.0),
    batch=1,
    dtype=torch.bfloat16,
)
SMALL = WallCase(
    config=GPTConfig(vocab_size=64, max_seq_len=64, num_layers=4, num_heads=2, width=64, dropout=0.0),
    batch=4,
    dtype=torch.float32,
)


@dataclass(frozen=True, kw_only=True)
class Demand:
    """One thing that must hold.

    Attributes:
        name: what it is about.
        must: the demand, for people.
        found: what was measured; None where it was not.
        holds: whether it does; None where it does not apply on this device.
    """

    name: str
    must: str
    found: float | None
    holds: bool | None

    def __str__(self) -> str:
        verdict = {True: "holds", False: "FAILS", None: "does not apply here"}[self.holds]
        found = "-" if self.found is None else f"{self.found:.4g}"
        return f"{self.name:<42}{found:>8}  must be {self.must:<15}{verdict}"


def bench_wall(
    device: str | None,
    *,
    disk: str | None,
    steps: int,
    json_path: Path | None,
    console: Console,
) -> bool:
    """Runs the proof, prints a verdict per demand, and with `json_path` writes all of it.

    Args:
        device: "cpu", "cuda" or "cuda:N"; None for CUDA where there is one.
        disk: where Session spills to on a CPU; None for a new folder.
        steps: timed steps a row.
        json_path: where the record goes; an earlier one there is replaced.
        console: where it is printed.

    Returns:
        Whether every demand holds that applies.

    Raises:
        TorchstormError: the device is not there, or the file cannot be written.
    """
    target = bench_device(device)
    say = partial(console.print, highlight=False, soft_wrap=True, markup=False)
    results = Results("wall", target, path=json_path, say=say, merge=False)
    case = ON_A_GPU if target.type == "cuda" else SMALL
    with tempfile.TemporaryDirectory() as spill:
        found = run_wall(case, target, results, disk=disk or spill, steps=steps)
    for demand in found:
        results.say(str(demand))
    return all(demand.holds is not False for demand in found)


def run_wall(case: WallCase, device: torch.device, results: Results, *, disk: str | None, steps: int) -> list[Demand]:
    """Runs one case; see `bench_wall`."""
    config = case.config
    training = make_training(config, batch=case.batch, seq=config.max_seq_len, dtype=case.dtype, device=device)
    bench = SideBySide(Meter(training), case.shape, results, disk=disk, steps=steps)
    num_parameters = sum(parameter.numel() for parameter in bench.meter.training.model.parameters())
    results.say(f"GPT of {num_parameters / 1e9:.3g} billion parameters, {case.shape} tokens, with AdamW")
    results.say(HEADER)
    unlimited = bench.add_unlimited()
    if unlimited.peak_gib is None:
        raise DeviceError(f"The step that keeps everything does not run here: {unlimited.note}")
    need_gib = unlimited.peak_gib
    results["need_gib"], results["cap_gib"] = need_gib, _CAP * need_gib
    with _capped(device, int(_CAP * need_gib * GIB)):
        bench.add_session(_GIVEN * need_gib)
    bench.settle(ways.UNLIMITED, unlimited, bench.add(f"{ways.UNLIMITED}-again", ways.keep_everything))
    session = next(row for row in results.rows if row.way == ways.SESSION)
    found = demands(session, need_gib=need_gib, device=device)
    results["demands"] = [asdict(demand) for demand in found]
    results.write()
    return found


def demands(session: Row, *, need_gib: float, device: torch.device) -> list[Demand]:
    """What must hold of a Session's row.

    Args:
        session: the row.
        need_gib: peak of the run that keeps everything.
        device: where it ran.
    """

    def demand(name: str, found: float | None, low: float, high: float, *, applies: bool = True) -> Demand:
        if low == -math.inf:
            must = f"at most {high:g}"
        else:
            must = f"at least {low:g}" if high == math.inf else f"{low:g} to {high:g}"
        holds = found is not None and low <= found <= high
        return Demand(name=name, must=must, found=found, holds=holds if applies else None)

    on_gpu = device.type == "cuda"
    given, peak = session.budget_gib, session.peak_gib
    return [
        demand("need / VRAM allowed", need_gib / given if given else None, 2, math.inf),
        demand("peak / need", None if peak is None else peak / need_gib, -math.inf, _ALLOWED),
        demand("gradients as unlimited, to the last bit", float(session.checked), 1, math.inf),
        demand("step time / unlimited", session.over_unlimited, -math.inf, 1.05, applies=on_gpu),
        demand("GPU busy", session.gpu_busy, 0.8, math.inf, applies=on_gpu),
        demand("forecast of the peak, off by", _off(session.forecast_peak_gib, peak), -0.02, 0.05),
        demand(
            "forecast of forward and backward, off by",
            _off(session.forecast_step_s, session.forward_backward_s),
            -0.02,
            0.08,
            applies=on_gpu,
        ),
    ]


@contextlib.contextmanager
def _capped(device: torch.device, cap_bytes: int) -> Iterator[None]:
    """Inside, PyTorch's allocator has no more than that of the GPU."""
    if device.type == "cpu":
        yield
        return
    index = torch.cuda.current_device() if device.index is None else device.index  # pragma: gpu
    total = torch.cuda.get_device_properties(index).total_memory  # pragma: gpu
    torch.cuda.set_per_process_memory_fraction(cap_bytes / total, index)  # pragma: gpu
    try:  # pragma: gpu
        yield
    finally:  # pragma: gpu
        torch.cuda.set_per_process_memory_fraction(1.0, index)


def _off(forecast: float | None, found: float | None) -> float | None:
    return None if forecast is None or not found else forecast / found - 1
