"""Compares all implementations of the mLSTM: each is timed, and checked against float64, in one run.

A time is shown only if the timed tensors passed their check (`mlstm_checks`). Times are medians of device time after a
warm-up run, with several sets of random inputs in turn, so that no set is in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from rich.console import Console

from torchstorm.bench.bars import Panel, draw_bars
from torchstorm.bench.cases import bench_device, bench_dtype, dtype_name, pick
from torchstorm.bench.measure import clean
from torchstorm.bench.mlstm_cases import Inputs, MLSTMCase, mlstm_cases
from torchstorm.bench.mlstm_checks import Check, Truth, check_alone, outputs_and_gradients
from torchstorm.bench.mlstm_rows import HEADER, MLSTMRow, format_row
from torchstorm.bench.mlstm_ways import Way, peers, ways_for
from torchstorm.bench.record import Record
from torchstorm.bench.side_by_side import failure
from torchstorm.bench.timing import take_alone
from torchstorm.report.picture import check_picture


def bench_mlstm(
    device: str | None,
    *,
    sizes: str = "small",
    dtype: str | None = None,
    variant_names: str | None = None,
    json_path: Path | None = None,
    plot: Path | None = None,
    console: Console,
) -> bool:
    """Times and checks every implementation at every shape, prints a table per shape, and writes the results.

    Args:
        device: "cpu", "cuda" or "cuda:N"; None for CUDA if available.
        sizes: "small", "target" or "all"; a CPU has small ones only.
        dtype: "float32", "float16" or "bfloat16"; None for bfloat16 on a GPU and float32 on a CPU.
        variant_names: comma-separated names; None for all that are not too slow.
        json_path: JSON file, written after each row; None for no file.
        plot: file of the plot. Its suffix is the format. None for no plot.
        console: where to print.

    Returns:
        Whether every check of ours passed.

    Raises:
        TorchstormError: the device does not exist, a name is unknown, or a file cannot be written.
    """
    target = bench_device(device)
    chosen = bench_dtype(dtype, target)
    dtype = dtype_name(chosen)
    cases = mlstm_cases(sizes, target)
    ladder = ways_for(target)
    ways = ladder
    if variant_names is not None:
        names = pick(variant_names, tuple(way.name for way in ways), option="--variant")
        ways = tuple(way for way in ways if way.name in names)
    if plot is not None:
        check_picture(plot, "--plot")
    say = partial(console.print, highlight=False, soft_wrap=True, markup=False)
    record = Record("mlstm", target, MLSTMRow, format_row, path=json_path, say=say)
    ours = {way.name for way in ways if way.is_ours}
    for case in cases:
        say(f"\n{case.shape} {dtype}{_best_known(case, chosen)}")
        say(HEADER)
        for row in _rows(case, ways, target, chosen, even_slow=variant_names is not None):
            row = replace(row, over_first=_over_first(row, ladder, record.all_rows()))
            _relate_to_peer(record, record.add(row))
        clean(target)
    record.write()
    if plot is not None:
        shown = [row for row in record.all_rows() if row.dtype == dtype]
        _draw(shown, plot, title=f"mLSTM, {dtype}, {record.device}")
    return not any(row.variant in ours and row.error is not None and not row.checked for row in record.rows)


def _draw(rows: list[MLSTMRow], path: Path, *, title: str) -> None:
    panels = []
    for shape in dict.fromkeys(row.shape for row in rows):
        here = [row for row in rows if row.shape == shape]
        known = next((row.best_known_ms for row in here if row.best_known_ms is not None), ())
        bars = [(row.variant, (row.fwd_ms, row.fwdbwd_ms)) for row in here]
        panels.append(Panel(title=shape, bars=bars, lines=known))
    draw_bars(
        panels, path, title=title, legend="forward, and with backward, ms; dashed: best known, where there is one"
    )


def _best_known(case: MLSTMCase, dtype: torch.dtype) -> str:
    found = case.best_known_ms(dtype)
    return "" if found is None else f", best known on an H200: {found[0]} ms forward, {found[1]} ms with backward"


def _rows(
    case: MLSTMCase, ways: tuple[Way, ...], device: torch.device, dtype: torch.dtype, *, even_slow: bool
) -> Iterator[MLSTMRow]:
    sets = _inputs(case, device, dtype)
    truth = Truth(sets[0])
    for way in ways:
        row = MLSTMRow(
            shape=case.shape,
            variant=way.name,
            dtype=dtype_name(dtype),
            best_known_ms=case.best_known_ms(dtype),
        )
        why_not = "" if even_slow or device.type == "cpu" else way.why_not(case, dtype)
        if why_not:
            yield replace(row, note=why_not)
            continue
        try:
            row = _measure(row, way, case, sets, truth) if way.is_ours else _apart(row, case, device, dtype)
        except Exception as error:  # becomes the row's note; the others still run
            yield replace(row, note=failure(error))
            continue
        finally:
            clean(device)
        yield row


def _inputs(case: MLSTMCase, device: torch.device, dtype: torch.dtype) -> list[Inputs]:
    return [case.make(device, dtype, seed) for seed in range(case.num_sets(dtype))]


def _apart(row: MLSTMRow, case: MLSTMCase, device: torch.device, dtype: torch.dtype) -> MLSTMRow:
    """`_measure` of a peer in another process. Raises its exception, or BrokenProcessPool if it was killed."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_alone, row, case, device, dtype).result()


def _alone(row: MLSTMRow, case: MLSTMCase, device: torch.device, dtype: torch.dtype) -> MLSTMRow:
    (way,) = (way for way in peers() if way.name == row.variant)
    sets = _inputs(case, device, dtype)
    return _measure(row, way, case, sets, Truth(sets[0]))


def _measure(row: MLSTMRow, way: Way, case: MLSTMCase, sets: list[Inputs], truth: Truth) -> MLSTMRow:
    """Checks, then times. A wrong result is not timed, unless it is the peer's."""
    device, dtype = sets[0]["q"].device, sets[0]["q"].dtype
    check = _check(way, sets[0], truth)
    worst = check.worst_gradient
    row = replace(
        row,
        error=check.errors["h"],
        allowed=check.allowed["h"],
        gradient=worst,
        gradient_error=check.errors.get(worst),
        gradient_allowed=check.allowed.get(worst),
        checked=not check.wrong,
    )
    if check.wrong and way.is_ours:
        return replace(row, note=_told(check))

    def forward(inputs: Inputs) -> None:
        with torch.no_grad():
            way.function(*way.given(inputs))

    def forward_backward(inputs: Inputs) -> None:
        outputs_and_gradients(way.function, inputs)

    forward_took = take_alone(forward, sets, device)
    both_took = take_alone(forward_backward, sets, device) if way.has_backward else None
    fwd_ms, fwdbwd_ms = forward_took.ms, None if both_took is None else both_took.ms
    row = replace(row, peer=(fwd_ms, fwdbwd_ms)) if not way.is_ours else row
    if check.wrong:
        took = f"took {fwd_ms:.4g} ms forward, {fwdbwd_ms:.4g} ms with backward"
        return replace(row, fwd_ms=None if "h" in check.wrong else fwd_ms, note=f"{_told(check)}; {took}")
    longer_s = (fwdbwd_ms or fwd_ms) / 1e3
    return replace(
        row,
        fwd_ms=fwd_ms,
        fwdbwd_ms=fwdbwd_ms,
        fwd_range_ms=(forward_took.fastest_ms, forward_took.slowest_ms),
        fwdbwd_range_ms=None if both_took is None else (both_took.fastest_ms, both_took.slowest_ms),
        tflops=case.flops(way.work, backward=way.has_backward) / longer_s / 1e12,
        gb_per_s=case.least_bytes(way.work, dtype, backward=way.has_backward) / longer_s / 1e9,
    )


def _check(way: Way, inputs: Inputs, truth: Truth) -> Check:
    if way.reference is None:
        return truth.check(outputs_and_gradients(way.function, inputs))
    given = way.given(inputs)
    with torch.no_grad():
        return check_alone(way.function(*given), way.reference, given, num_heads=truth.num_heads)


def _told(check: Check) -> str:
    parts = [f"{name} is off by {check.errors[name]:.1%}, allowed {check.allowed[name]:.1%}" for name in check.wrong]
    return ", ".join(parts)


def _over_first(row: MLSTMRow, ladder: tuple[Way, ...], measured: list[MLSTMRow]) -> float | None:
    """Speedup over the first measured implementation that computes the same."""
    (own,) = (way for way in ladder if way.name == row.variant)
    there = {one.variant: one for one in measured if (one.shape, one.dtype) == (row.shape, row.dtype)}
    there[row.variant] = row

    def took(way: Way) -> float | None:
        found = there.get(way.name)
        return None if found is None else found.fwdbwd_ms if own.has_backward else found.fwd_ms

    took_ms = took(own)
    if not own.is_whole or took_ms is None:
        return None
    alike = (way for way in ladder if way.is_whole and way.has_backward == own.has_backward)
    return next(first_ms for way in alike if (first_ms := took(way)) is not None) / took_ms


def _relate_to_peer(record: Record[MLSTMRow], row: MLSTMRow) -> None:
    """Adds the peer's times to all rows of its shape."""
    if row.peer is not None:
        record.change(lambda one: replace(one, peer=row.peer) if one.shape == row.shape else one)
