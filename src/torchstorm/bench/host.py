"""What a Session costs the host: steps so small that the device waits for it, and where their time goes.

Hugging Face models with random weights, on 64 tokens. Hooks that do nothing show what PyTorch takes to call any, and a
Session must have some. One that keeps everything only counts and guards. One that follows the plan of a full batch,
within the peak of the model's own checkpointing, also moves and computes again what that plan says, however little of
it there is.
"""

from __future__ import annotations

import contextlib
import cProfile
import gc
import pstats
import statistics
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from torchstorm.bench.cases import bench_device, pick
from torchstorm.bench.measure import Context, Meter, Training, clean
from torchstorm.bench.model_cases import ON_A_CPU, ON_A_GPU, ModelCase, check_transformers, checkpointing_of, make_model
from torchstorm.bench.record import Record, RecordRow
from torchstorm.offload.native import library
from torchstorm.offload.session import Session
from torchstorm.plan.recompute import RECOMPUTE

_TOKENS = 64
_FULL_STEPS = 12  # of a full batch, after which a plan is in force and its times are learnt
_WARM = 4
_GPT2 = ModelCase(name="gpt2-124m", cls="GPT2LMHeadModel", config="GPT2Config", options={}, batch=12, seq=1024)
# As many layers as Llama 1.1B has, and so narrow that a CPU, too, takes little time for what they compute.
_NARROW = replace(
    ON_A_CPU[0],
    name="llama-narrow",
    options={**ON_A_CPU[0].options, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 22},
    batch=2,
)
_CPU_SHARE = 0.6  # of what everything kept takes; a model's own checkpointing takes less than a plan can on a CPU
# Where the profiler says that time went, by the first folder that fits; the model and PyTorch have the rest.
CAUSES = {
    "hooks": ("offload/step", "offload/session.py", "offload/misuse.py"),
    "recording": tuple(
        f"offload/recompute/{name}.py" for name in ("tape", "watched", "repeats", "operators", "tensors")
    ),
    "running again": ("offload/recompute",),
    "copies": ("transfer", "memory", "storage"),
    "planner": ("plan", "offload/replan"),
}
_OURS = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class HostRow(RecordRow):
    """A model's small step by one way.

    Attributes:
        model: its name.
        way: what is around it.
        tokens: of the step.
        step_s, fastest_s, slowest_s: seconds of a step, with nothing but the host to wait for; the first the median.
        alone_s: median of the model alone, in turns with these; 0 in records made before that was so.
        ratio: of the two medians.
        num_moved, num_recomputed: of the saved storages, those that the plan moves and computes again.
        causes: share of a step's time, by cause, in a profile of one; the profiler's own time is in it. What hooks do
            in C++ is in none: it counts as the operation's within which autograd calls them.
    """

    model: str
    way: str
    tokens: int
    step_s: float
    fastest_s: float
    slowest_s: float
    ratio: float
    alone_s: float = 0.0
    num_moved: int = 0
    num_recomputed: int = 0
    causes: dict[str, float]

    @property
    def key(self) -> Hashable:
        """A model and a way."""
        return self.model, self.way


def bench_host(
    device: str | None, *, steps: int, json_path: Path | None, console: Console, model_names: str | None = None
) -> list[HostRow]:
    """Times small steps by every way and prints a row each.

    Args:
        device: "cpu", "cuda" or "cuda:N"; None for CUDA if available, else small models on the CPU.
        steps: timed steps a row.
        json_path: JSON file; None for no file.
        console: where to print.
        model_names: some models, with commas between; None for all.

    Raises:
        TorchstormError: the device or transformers is not there, a name is not known, or the file cannot be written.
    """
    target = bench_device(device)
    check_transformers()
    cases = (ON_A_GPU[0], _GPT2) if target.type == "cuda" else (_NARROW,)
    names = tuple(case.name for case in cases)
    chosen = names if model_names is None else pick(model_names, names, option="--model")
    say = partial(console.print, highlight=False, soft_wrap=True, markup=False)
    record = Record("host", target, HostRow, _line, path=json_path, say=say)
    for case in cases:
        if case.name in chosen:
            run_host(case, target, record, steps=steps)
    record.write()
    return record.rows


def run_host(case: ModelCase, device: torch.device, record: Record[HostRow], *, steps: int) -> None:
    """Times one model by every way; see `bench_host`."""
    training = make_model(case, device)
    small = _few_tokens_of(training)
    checkpointing = checkpointing_of(training.model)
    assert checkpointing is not None

    def measure(
        way: str, context: Context, session: Session | None = None, *, around: Context = contextlib.nullcontext
    ) -> None:
        meter = Meter(small)
        seconds: list[float] = []
        alone: list[float] = []
        for number in range(-_WARM, steps):  # in turns: hosts are slower in one minute than in another
            alone_s = meter.step(contextlib.nullcontext).seconds
            with around():
                step_s = meter.step(context).seconds
            if number >= 0:
                alone += alone_s
                seconds += step_s
        median_s, median_alone_s = statistics.median(seconds), statistics.median(alone)
        with around():
            causes = causes_of(lambda: meter.step(context))
        plan = session.plan() if session is not None else None
        tiers = Counter(placement.tier for placement in plan.placements) if plan is not None else Counter[str]()
        record.add(
            HostRow(
                model=case.name,
                way=way,
                tokens=_TOKENS,
                step_s=median_s,
                fastest_s=min(seconds),
                slowest_s=max(seconds),
                alone_s=median_alone_s,
                ratio=median_s / median_alone_s,
                num_moved=tiers["ram"] + tiers["disk"],
                num_recomputed=tiers[RECOMPUTE],
                causes=causes,
            )
        )

    measure("none", contextlib.nullcontext)
    budget = _peak_of(Meter(training), partial(checkpointing, None), device)
    measure("checkpoint", contextlib.nullcontext, around=partial(checkpointing, None))
    measure("hooks that do nothing", partial(torch.autograd.graph.saved_tensors_hooks, _as_it_is, _as_it_is))
    with Session(training.model, optimizer=training.optimizer, unlimited=True) as session:
        library.wait()  # what a compiler builds beside a machine's first Session
        measure("session, unlimited", session.step, session)
    with _session(training, device, budget_bytes=1 << 40) as session:
        _settle(Meter(small), session, _FULL_STEPS)
        measure("session, everything kept", session.step, session)
    clean(device)
    with _session(training, device, budget_bytes=budget) as session:
        _settle(Meter(training), session, _FULL_STEPS)
        measure("session, plan of a full batch", session.step, session)
    clean(device)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _few_tokens_of(training: Training) -> Training:
    """The same model on a few tokens."""
    data = training.data

    def few(seed: int) -> dict[str, torch.Tensor]:
        return {name: tensor[:1, :_TOKENS].contiguous() for name, tensor in data(seed).items()}

    return replace(training, data=few)


def _session(
    training: Training, device: torch.device, *, budget_bytes: int
) -> contextlib.AbstractContextManager[Session]:
    if device.type == "cuda":  # pragma: gpu
        most = int(torch.cuda.get_device_properties(device).total_memory * 0.9)
        return Session(training.model, optimizer=training.optimizer, vram=min(budget_bytes, most))
    return Session(training.model, optimizer=training.optimizer, ram=min(budget_bytes, 2**30))


def _settle(meter: Meter, session: Session, num_steps: int) -> None:
    for _ in range(num_steps):
        meter.step(session.step)


def _peak_of(meter: Meter, context: Context, device: torch.device) -> int:
    """What a step within a context takes on the fast tier."""
    if device.type == "cpu":
        return int(_CPU_SHARE * meter.saved_bytes(contextlib.nullcontext))
    with context():  # pragma: gpu
        return max(meter.step(contextlib.nullcontext).peak_bytes for _ in range(2))  # pragma: gpu


def causes_of(step: Callable[[], object]) -> dict[str, float]:
    """Share of a step's time by cause, by a profile of one: what a function of ours calls in C++ counts as its own."""
    gc.collect()  # else what earlier Sessions left behind may be let go of, by our code, within this step
    profile = cProfile.Profile()
    profile.enable()
    try:
        step()
    finally:
        profile.disable()
    seconds: Counter[str] = Counter()
    for function, (_, _, own_s, _, callers) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        if function[0] != "~":
            seconds[_cause(function[0])] += own_s
            continue
        for caller, (_, _, of_caller_s, _) in callers.items():
            seconds[_cause(caller[0])] += of_caller_s
    total = sum(seconds.values())
    return {cause: seconds[cause] / total for cause in CAUSES}


def _cause(file: str) -> str:
    try:
        path = Path(file).relative_to(_OURS).as_posix()
    except ValueError:
        return ""
    return next((cause for cause, places in CAUSES.items() if path.startswith(places)), "")


def _line(row: HostRow) -> str:
    shares = ", ".join(f"{cause} {share:.0%}" for cause, share in row.causes.items() if share >= 0.005)
    return (
        f"{row.model:12} {row.way:30} {row.step_s * 1e3:8.1f} ms ({row.fastest_s * 1e3:.1f} to "
        f"{row.slowest_s * 1e3:.1f}) {row.ratio:6.3f}x  moved {row.num_moved}, again {row.num_recomputed}  {shares}"
    ).rstrip()
