"""xLSTM beside GPT: tokens a second in training, by context length, with everything kept and within half of that.

Both have 350 million parameters, weights and AdamW state in bf16, and as many tokens in a step at every context length.
Attention costs more per token the longer the context; mLSTM costs the same. A Session's budget is half of what the same
model takes with everything kept. Gradients are held to those of that run, to the last bit, as in every bench.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from torchstorm.bench import ways
from torchstorm.bench.cases import bench_device, pick
from torchstorm.bench.measure import Meter, clean
from torchstorm.bench.rows import HEADER, Results, Row
from torchstorm.bench.side_by_side import SideBySide, failure
from torchstorm.bench.trainings import make_training
from torchstorm.models.families import SIZES, ModelConfig
from torchstorm.models.gpt import GPTConfig

_SHARE = 0.5
_VOCABULARY = 50304  # GPT-2's, up to a multiple of 64 that matrix products like


@dataclass(frozen=True, kw_only=True)
class ModelAt:
    """A model at a context length.

    Attributes:
        model: a named size.
        changes: to that size, by field.
        batch, seq: B sequences of T tokens.
        dtype: of weights, gradients and optimizer state.
    """

    model: str
    changes: tuple[tuple[str, int], ...] = (("vocab_size", _VOCABULARY),)
    batch: int
    seq: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def shape(self) -> str:
        """Model, tokens and sequences, as in "xlstm-350m 8192x4"."""
        return f"{self.model} {self.context}"

    @property
    def context(self) -> str:
        """Tokens and sequences, as in "8192x4"."""
        return f"{self.seq}x{self.batch}"

    @property
    def tokens(self) -> int:
        """In a step."""
        return self.batch * self.seq

    def config(self) -> ModelConfig:
        """The model's shape; no dropout, and positions for the whole context where it has any."""
        config = replace(SIZES[self.model], dropout=0.0, **dict(self.changes))  # type: ignore[arg-type]
        return replace(config, max_seq_len=self.seq) if isinstance(config, GPTConfig) else config


ON_A_GPU = tuple(
    ModelAt(model=model, batch=batch, seq=seq)
    for batch, seq in ((4, 8192), (1, 32768))
    for model in ("gpt2-medium", "xlstm-350m")
)
SMALL = tuple(
    ModelAt(model=model, changes=(("vocab_size", 64),), batch=batch, seq=seq, dtype=torch.float32)
    for batch, seq in ((4, 64), (1, 256))
    for model in ("gpt-nano", "xlstm-nano")
)


@dataclass(frozen=True, kw_only=True)
class Speed:
    """One way's tokens a second.

    Attributes:
        shape, way, budget_gib: of its row.
        tokens_per_s: in forward, backward and the optimizer; None where its gradients were not those they must be.
        over_gpt: by those of the GPT at the same context, kept in full or not as this one is; None for the GPT itself.
    """

    shape: str
    way: str
    budget_gib: float | None
    tokens_per_s: float | None
    over_gpt: float | None = None

    def __str__(self) -> str:
        budget = "everything kept" if self.budget_gib is None else f"within {self.budget_gib:.3g} GiB"
        speed = "-" if self.tokens_per_s is None else f"{self.tokens_per_s:,.0f}"
        beside = "" if self.over_gpt is None else f"  {self.over_gpt:.2f} x the GPT"
        return f"{self.shape:<24}{budget:<20}{speed:>12} tokens/s{beside}"


def bench_xlstm(
    device: str | None,
    *,
    disk: str | None,
    steps: int,
    json_path: Path | None,
    console: Console,
    shape_names: str | None = None,
) -> list[Speed]:
    """Runs and prints every model at every context; with `json_path`, writes what was measured, row by row.

    Args:
        device: "cpu", "cuda" or "cuda:N"; None for CUDA where there is one, else small models on the CPU.
        disk: where Session spills to on a CPU; None for a new folder.
        steps: timed steps a row.
        json_path: rows of the same machine and versions that it has already stay, unless they are made anew.
        console: where rows are printed.
        shape_names: some contexts, or models at one, as in "8192x4,xlstm-350m 32768x1"; None for all.

    Returns:
        Tokens a second of this run's rows.

    Raises:
        TorchstormError: the device is not there, a shape is not known, or the file cannot be written.
    """
    target = bench_device(device)
    cases = all_cases = ON_A_GPU if target.type == "cuda" else SMALL
    if shape_names is not None:
        known = tuple(dict.fromkeys(name for case in cases for name in (case.shape, case.context)))
        names = pick(shape_names, known, option="--shape")
        cases = tuple(case for case in cases if case.shape in names or case.context in names)
    say = partial(console.print, highlight=False, soft_wrap=True, markup=False)
    results = Results("xlstm", target, path=json_path, say=say)
    with tempfile.TemporaryDirectory() as spill:
        for case in cases:
            _run(case, target, results, disk=disk or spill, steps=steps)
            clean(target)
    found = speeds(results.rows, cases)
    for speed in found:
        results.say(str(speed))
    results["speeds"] = [asdict(speed) for speed in speeds(results.all_rows(), all_cases)]
    results.write()
    return found


def _run(case: ModelAt, device: torch.device, results: Results, *, disk: str | None, steps: int) -> None:
    try:
        config = case.config()
        training = make_training(config, batch=case.batch, seq=case.seq, dtype=case.dtype, device=device)
        size = f"{sum(parameter.numel() for parameter in training.model.parameters()) / 1e6:.4g} million parameters"
        results.say(f"{case.shape}: {size}, with AdamW")
        results.say(HEADER)
        bench = SideBySide(Meter(training), case.shape, results, disk=disk, steps=steps)
        unlimited = bench.add_unlimited(note=size)
    except Exception as error:  # this model's result; the others still run
        results.add(Row(shape=case.shape, way=ways.UNLIMITED, note=failure(error)))
        return
    if unlimited.peak_gib is not None:
        bench.add_session(_SHARE * unlimited.peak_gib, name=f"{_SHARE:.0%} of the unlimited peak")
    bench.settle(ways.UNLIMITED, unlimited, bench.add(f"{ways.UNLIMITED}-again", ways.keep_everything, slow=True))


def speeds(rows: list[Row], cases: tuple[ModelAt, ...]) -> list[Speed]:
    """Tokens a second of every row that is kept in full or a Session's.

    Args:
        rows: of the bench.
        cases: what they are of; a model of another family follows the GPT of its context.
    """
    found: list[Speed] = []
    gpt: dict[tuple[str, str], float] = {}
    for case in cases:
        context = case.context
        for row in rows:
            if row.shape != case.shape or row.way not in (ways.UNLIMITED, ways.SESSION):
                continue
            rate = case.tokens / row.step_s if row.step_s else None
            speed = Speed(shape=row.shape, way=row.way, budget_gib=row.budget_gib, tokens_per_s=rate)
            beside = gpt.get((context, row.way))
            if isinstance(SIZES[case.model], GPTConfig):
                if rate is not None:
                    gpt[context, row.way] = rate
            elif rate is not None and beside is not None:
                speed = replace(speed, over_gpt=rate / beside)
            found.append(speed)
    return found
