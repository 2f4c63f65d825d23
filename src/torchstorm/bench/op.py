"""An operation's ladder side by side: every variant, PyTorch and others' kernels, timed and checked in the same run.

A time is shown only where the very tensors that are timed passed their check against float64. Inputs are random, and
taken in turn until they have left the cache. The first row of the definition in plain PyTorch is called "reference".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import get_args

import torch
from rich.console import Console
from torch import Tensor
from torch._functorch import config as functorch_config

from torchstorm.bench.accuracy import allowed, error_of
from torchstorm.bench.bars import Panel, draw_bars
from torchstorm.bench.cases import bench_device, bench_dtype, dtype_name, pick
from torchstorm.bench.ceilings import Ceilings
from torchstorm.bench.measure import clean
from torchstorm.bench.op_cases import Inputs, OpCase, Outputs, Pass, Sizes, Way
from torchstorm.bench.op_rows import HEADER, OpRow, format_row
from torchstorm.bench.ops import OPS
from torchstorm.bench.record import Record
from torchstorm.bench.side_by_side import failure
from torchstorm.bench.timing import Run, Took, over, take_in_turn
from torchstorm.errors import ConfigError, TorchstormError
from torchstorm.report.picture import check_picture

REFERENCE = "reference"
_CACHE_BYTES = 60 * 10**6
_MOST_SETS = 16


def bench_op(
    op: str,
    device: str | None,
    *,
    sizes: str = "small",
    dtype: str | None = None,
    variant_names: str | None = None,
    json_path: Path | None = None,
    plot: Path | None = None,
    console: Console,
) -> bool:
    """Times and checks every way at every shape, prints a table a shape, and writes what was measured.

    Args:
        op: a key of `OPS`.
        device: "cpu", "cuda" or "cuda:N"; None for CUDA where there is one.
        sizes: "small", or "target" for the shapes with times to beat, on a GPU; or any shapes, as in
            "8192x8192x8192,500x300x200".
        dtype: "float32", "float16" or "bfloat16"; None for bfloat16 on a GPU and float32 on a CPU.
        variant_names: some of the ways, with commas between; None for all.
        json_path: where the rows go, after each shape; rows of the same machine that it has already stay.
        plot: where a picture goes; its ending says the format.
        console: where the tables are printed.

    Returns:
        Whether every check of ours passed.

    Raises:
        TorchstormError: the device is not there, a name is not known, or a file cannot be written.
    """
    target = bench_device(device)
    chosen = bench_dtype(dtype, target)
    dtype = dtype_name(chosen)
    if plot is not None:
        check_picture(plot, "--plot")
    cases = _cases(op, sizes, target, chosen)
    names = tuple(dict.fromkeys(name for case in cases for name in _ways(case)))
    picked = names if variant_names is None else pick(variant_names, names, option="--variant")
    say = partial(console.print, highlight=False, soft_wrap=True, markup=False)
    record = Record(op, target, OpRow, format_row, path=json_path, say=say)
    ceilings = Ceilings(target)
    say(f"{record.device}: {ceilings.told(chosen)}")
    _give_autograd_a_context(target)
    for case in cases:
        say(f"\n{case.op} {case.shape} {dtype}")
        say(HEADER)
        run_case(case, target, picked, ceilings, record)
        clean(target)
    record.write()
    if plot is not None:
        _draw([row for row in record.all_rows() if row.dtype == dtype], plot, title=f"{op}, {dtype}, {record.device}")
    others = {REFERENCE, *(name for case in cases for name in case.peers)}
    return not any(row.error is not None and not row.checked for row in record.rows if row.variant not in others)


def _give_autograd_a_context(device: torch.device) -> None:
    """By a kernel of PyTorch's on autograd's thread of that GPU: of one that begins with cuBLAS, PyTorch warns."""
    one = torch.ones((), device=device, requires_grad=True)
    one.square().backward()


def _cases(op: str, sizes: str, device: torch.device, dtype: torch.dtype) -> tuple[OpCase, ...]:
    if sizes == "target" and device.type not in OPS[op].targets:
        raise ConfigError(f"--sizes target has shapes for a GPU, but --device is {device}: --sizes small.")
    module, _, function = OPS[op].cases.partition(":")
    made: Callable[[Sizes, torch.device, torch.dtype], tuple[OpCase, ...]] = getattr(import_module(module), function)
    cases = {"small": made("small", device, dtype), "target": made("target", device, dtype)}
    if sizes in cases:
        return cases[sizes]
    found: dict[str, tuple[OpCase, ...]] = {}
    for text in sizes.split(","):
        shape = _parsed(op, text.strip(), sizes)
        name = "x".join(map(str, shape))
        known = tuple(case for each in cases.values() for case in each if _sizes_of(case) == name)
        found[name] = known or made(shape, device, dtype)
    return tuple(case for each in found.values() for case in each)


def _parsed(op: str, text: str, sizes: str) -> tuple[int, ...]:
    """A shape of an operation.

    Raises:
        ConfigError: it is none.
    """
    parts, takes = text.split("x"), OPS[op].takes
    is_shape = all(part.isascii() and part.isdigit() and int(part) for part in parts)
    if not is_shape or len(parts) not in {len(names.split("x")) for names in takes}:
        raise ConfigError(
            f"--sizes {sizes!r}, but {op} takes small, target, or shapes {' or '.join(takes)}; not {text!r}."
        )
    return tuple(map(int, parts))


def _sizes_of(case: OpCase) -> str:
    """A shape without what else is said of the case, as in "64x1000, tanh"."""
    return case.shape.replace(",", " ").split()[0]


def _ways(case: OpCase) -> dict[str, Way]:
    ours = {name: partial(_ours, case, name) for name in case.variants}
    return {REFERENCE: case.reference, **case.peers, **ours}


def _ours(case: OpCase, variant: str, inputs: Inputs) -> Outputs:
    return case.ours(inputs, variant)


@dataclass(frozen=True)
class _Truth:
    """What a case's outputs and gradients are in float64, and how far each may be from that."""

    right: Outputs
    allowed: Mapping[str, float]

    def worst(self, found: Outputs, *, gradients: bool) -> tuple[str, float]:
        """The result with the largest error for what it may have, and that error."""
        errors = {name: error_of(found[name], x) for name, x in self.right.items() if gradients or not _is_grad(name)}
        name = max(errors, key=lambda name: errors[name] / self.allowed[name])
        return name, errors[name]


def _is_grad(name: str) -> bool:
    return name.startswith("d_")


def run_case(
    case: OpCase, device: torch.device, picked: tuple[str, ...] | None, ceilings: Ceilings, record: Record[OpRow]
) -> None:
    """Times and checks the ways of one case; adds a row for each pass of each.

    Args:
        case: the operation at a shape.
        device: where.
        picked: names of the ways; None for all.
        ceilings: of the device.
        record: what gets the rows.
    """
    first_set = dict(case.make(device, 0))
    num_bytes = sum(x.nbytes for x in first_set.values())
    num_sets = max(1, min(_MOST_SETS, math.ceil(2 * _CACHE_BYTES / max(num_bytes, 1)))) if device.type == "cuda" else 1
    sets = [first_set, *(case.make(device, seed) for seed in range(1, num_sets))]
    truth = _truth(case, first_set)
    ways = {name: way for name, way in _ways(case).items() if picked is None or name in picked}
    # What backward reuses the memory of could be used once only; the graph is gone through again and again here.
    with functorch_config.patch(donated_buffer=False):
        checked: list[OpRow] = []
        for name, way in ways.items():
            checked += _checked(case, name, way, first_set, truth)
        prepare = {
            (row.variant, row.pass_): partial(_prepare, ways[row.variant], case, row.pass_, sets)
            for row in checked
            if row.checked
        }
        took = take_in_turn(prepare, device)
    rows = [_timed(row, case, took.get((row.variant, row.pass_)), ceilings) for row in checked]
    for row in rows:
        others = {each.variant: each.ms for each in rows if each.pass_ == row.pass_ and each.ms is not None}
        first = next((others[name] for name in case.variants if name in others), None)
        plain = others.get(REFERENCE)
        is_ours = row.variant in case.variants
        over_first = first / row.ms if first and row.ms and is_ours else None
        record.add(replace(row, over_first=over_first, over_pytorch=plain / row.ms if plain and row.ms else None))


def _truth(case: OpCase, inputs: Inputs) -> _Truth:
    wide = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    right = _results(case.truth or case.reference, case, wide)
    plain = _results(case.reference, case, inputs)
    return _Truth(right, {name: allowed([plain[name]], x, case.dtype) for name, x in right.items()})


def _results(way: Way, case: OpCase, inputs: Inputs) -> Outputs:
    """Outputs by name and, as "d_NAME", the gradients of what is differentiable."""
    outputs, leaves = _forward(way, case, inputs)
    found = {name: x.detach() for name, x in outputs.items()}
    return found | {f"d_{name}": x for name, x in zip(leaves, _grads(outputs, leaves, inputs), strict=True)}


def _forward(way: Way, case: OpCase, inputs: Inputs) -> tuple[Outputs, dict[str, Tensor]]:
    given = {name: x for name, x in inputs.items() if not _is_grad(name)}
    leaves = {name: given[name].detach().requires_grad_() for name in case.differentiable}
    return way(given | leaves), leaves


def _grads(outputs: Outputs, leaves: Mapping[str, Tensor], inputs: Inputs, *, again: bool = False) -> list[Tensor]:
    if not leaves:
        return []
    wanted = [inputs[f"d_{name}"] for name in outputs]
    return list(torch.autograd.grad(list(outputs.values()), list(leaves.values()), wanted, retain_graph=again))


def _checked(case: OpCase, name: str, way: Way, inputs: Inputs, truth: _Truth) -> list[OpRow]:
    """One row for each pass, not yet timed; where the way cannot run or is wrong, the rows say so."""
    row = OpRow(
        op=case.op,
        shape=case.shape,
        dtype=dtype_name(case.dtype),
        variant=name,
        pass_="forward",
        unit=case.unit,
    )
    try:
        found = _results(way, case, inputs)
    except (TorchstormError, RuntimeError, ImportError) as failed:  # this way's result; the others still run
        return [replace(row, pass_=each, note=failure(failed)) for each in case.work]
    rows = []
    for each in case.work:
        where, error = truth.worst(found, gradients=each != "forward")
        limit = truth.allowed[where]
        is_right = error <= limit
        note = "" if is_right else f"{where} is off by {error:.2e}, allowed {limit:.2e}"
        rows.append(replace(row, pass_=each, error=error, where=where, allowed=limit, checked=is_right, note=note))
    return rows


def _timed(row: OpRow, case: OpCase, took: Took | TorchstormError | RuntimeError | None, ceilings: Ceilings) -> OpRow:
    if took is None:
        return row
    if not isinstance(took, Took):
        return replace(row, note=failure(took))
    rate = case.work[row.pass_] / took.ms * 1e3
    return replace(
        row,
        ms=took.ms,
        fastest_ms=took.fastest_ms,
        slowest_ms=took.slowest_ms,
        host_ms=took.host_ms,
        extra_bytes=took.extra_bytes,
        rate=rate,
        share_of_ceiling=rate / ceilings.of(case.unit, case.dtype),
    )


def _prepare(way: Way, case: OpCase, which: Pass, sets: list[Inputs]) -> Run:
    def forward(inputs: Inputs) -> None:
        with torch.no_grad():
            way({name: x for name, x in inputs.items() if not _is_grad(name)})

    def both(inputs: Inputs) -> None:
        outputs, leaves = _forward(way, case, inputs)
        _grads(outputs, leaves, inputs)

    def backward(graph: tuple[Outputs, dict[str, Tensor], Inputs]) -> None:
        outputs, leaves, inputs = graph
        _grads(outputs, leaves, inputs, again=True)

    if which == "backward":
        return over(backward, [(*_forward(way, case, inputs), inputs) for inputs in sets])
    return over(forward if which == "forward" else both, sets)


def _draw(rows: list[OpRow], path: Path, *, title: str) -> None:
    passes = [each for each in get_args(Pass) if any(row.pass_ == each for row in rows)]
    panels = []
    for op, shape in dict.fromkeys((row.op, row.shape) for row in rows):
        times = {(row.variant, row.pass_): row.ms for row in rows if (row.op, row.shape) == (op, shape)}
        names = dict.fromkeys(variant for variant, _ in times)
        bars = [(name, [times.get((name, each)) for each in passes]) for name in names]
        panels.append(Panel(title=f"{op} {shape}", bars=bars))
    draw_bars(panels, path, title=title, legend=f"{', '.join(passes)}: ms")
