"""Measures a Session at a budget: one under deterministic algorithms for the gradients, another for the time."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from torchstorm.bench.measure import Meter, Reference, clean
from torchstorm.bench.rows import GIB, Row
from torchstorm.errors import BudgetError
from torchstorm.offload.native import library
from torchstorm.offload.report import Report, first_said, known_ms
from torchstorm.offload.session import Session
from torchstorm.plan.forecast import Figures
from torchstorm.plan.recompute import RECOMPUTE
from torchstorm.sizes import format_size

CHECKED_STEPS = 7
"""Steps that a reference needs: of so many, a Session on a GPU measures the first, second and fourth."""
UNEVEN = 3
"""So many times as many where sizes differ: a plan for steps as large as any comes late."""
_COMPILED_CHECKED_STEPS = 16
"""The same where blocks are compiled: what was measured may have them run in other variants, whose steps begin anew."""
PLANNED_STEPS = 3
"""So many of these must follow a plan, whichever, and not be measured."""

_MOST_WARM = 24
# Of searches for better plans, which take ten; counted from the first step that follows one, if that comes so soon.
_MOST_SEARCHED_S = 30.0
_SETTLED = 5  # steps by one plan, and by one forecast, after which a Session has nothing more to correct in it


def measure_session(
    meter: Meter,
    reference: Reference,
    row: Row,
    make: Callable[[int], Session],
    *,
    steps: int,
    compiled: bool = False,
) -> Row:
    """Checks and times Sessions that `make` opens.

    Args:
        meter: of what is trained.
        reference: what its gradients must be.
        row: what is known before.
        make: opens a Session with so many bytes on the fast tier.
        steps: timed, all after the plan is made.
        compiled: whether the Session compiles the model's blocks.

    Returns:
        The row, filled in. Without times where gradients differ.

    Raises:
        TorchstormError: as the Session raises.
    """
    assert row.budget_gib is not None
    budget_bytes = int(row.budget_gib * GIB)
    repeated = meter.num_repeated
    wrong, checked_note = _check(meter, reference, make, budget_bytes, compiled=compiled)
    clean(meter.training.device)
    with make(budget_bytes) as session, _blocks(session, compiled) as blocks:
        library.wait()  # what a compiler builds beside a machine's first Session
        meter.highest_bytes = 0
        meter.meet_sizes(session.step, steps=steps)  # the largest ones are planned for then
        before, forecast = settle(session, lambda: meter.step(session.step))
        timing = meter.time(session.step, warm=0, steps=steps)
        report = session.report()
        busy = meter.profile(session.step)
        on_cpu, is_uneven = meter.training.device.type == "cpu", meter.training.share is not None
        assert report.measured is not None
        assert report.highest is not None
        highest_bytes = report.highest.ram_bytes if on_cpu else max(meter.highest_bytes, report.highest.vram_bytes)
        row = replace(
            row,
            peak_gib=(report.measured.ram_bytes if on_cpu else timing.peak_bytes) / GIB,
            highest_gib=highest_bytes / GIB,
            moved_gib=report.moved_bytes / GIB,
            recomputed_gib=_recomputed_gib(session, blocks),
            ram_gib=report.measured.ram_bytes / GIB,
            forward_backward_s=None if wrong or is_uneven else report.measured.step_ms / 1e3,
            gpu_busy=busy.gpu_busy,
            overlap=busy.overlap,
            steps=steps,
            **({} if is_uneven else _said(forecast, before.forecast, on_cpu=on_cpu)),
            note=joined(
                row.note,
                _planned_note(before, report, steps, is_uneven=is_uneven),
                f"a step took {format_size(highest_bytes)}, more than the budget" * (highest_bytes > budget_bytes),
                f"{meter.num_repeated - repeated} steps repeated, out of memory" * (meter.num_repeated > repeated),
                checked_note,
                reference.note,
                *(blocks.notes if blocks is not None else ()),
            ),
        )
    if wrong:
        return replace(row, note=joined(row.note, f"gradients: {wrong}; so no time is shown"))
    return replace(row.timed(timing.seconds), checked=True, host_s=timing.host_s)


def compiled_reference(meter: Meter) -> Reference:
    """What the same compiled blocks compute when they save everything."""
    steps = _COMPILED_CHECKED_STEPS * (1 if meter.training.share is None else UNEVEN)
    with Session(meter.training.model, unlimited=True) as session, _blocks(session, True):
        return meter.reference(session.step, steps=steps)


def _check(
    meter: Meter, reference: Reference, make: Callable[[int], Session], budget_bytes: int, *, compiled: bool
) -> tuple[str, str]:
    """What is wrong with the gradients, and what is to be said about the check; "" for nothing."""

    def check(nbytes: int) -> str:
        with make(nbytes) as session, _blocks(session, compiled):
            return meter.compare(
                session.step, reference, enough=lambda _: session.report().num_planned >= PLANNED_STEPS
            )

    note = ""
    for _ in range(2):
        try:
            return check(budget_bytes), note
        except BudgetError as error:
            # Deterministic attention takes more memory than the kind that is timed. Where that is not the reason, the
            # Session that is timed fails, too.
            if error.smallest_bytes is None or meter.training.device.type == "cpu":
                raise
            budget_bytes = error.smallest_bytes + error.smallest_bytes // 50  # pragma: gpu
        note = f"gradients checked at {format_size(budget_bytes)}: deterministic ones need more"  # pragma: gpu
        clean(meter.training.device)  # pragma: gpu
    return check(budget_bytes), note  # pragma: gpu


@contextlib.contextmanager
def _blocks(session: Session, compiled: bool) -> Iterator[Any]:
    """The Session's compiled blocks, or None; uncompiled again afterwards."""
    if not compiled:
        yield None
        return
    blocks = session.compile()
    try:
        yield blocks
    finally:
        blocks.undo()
        torch._dynamo.reset()


def settle(session: Session, step: Callable[[], object]) -> tuple[Report, Figures | None]:
    """Runs steps until a Session has no more to find out. For a while it searches for plans beside its steps, and the
    times of those that follow one may have it search again.

    Returns:
        What it reports then, and what it forecast first.
    """
    num_steps, num_said, forecast, begun = 0, 0, None, math.inf
    report = session.report()
    while True:
        # Where sizes differ, hardly a step is the very one that its plan is for.
        if report.num_in_force or num_steps >= _MOST_WARM:
            begun = min(begun, time.perf_counter())
        is_followed, searched_s = report.num_in_force >= _SETTLED, time.perf_counter() - begun
        if report.forecast is None or searched_s >= _MOST_SEARCHED_S:
            if is_followed or num_steps >= _MOST_WARM:
                return report, forecast
        elif is_followed and num_said >= _SETTLED and known_ms(report.forecast) is not None:
            return report, forecast
        step()
        said, report = report.forecast, session.report()
        num_steps, num_said = num_steps + 1, num_said + 1 if report.forecast == said else 0
        if session.plan() is not None:
            forecast = first_said(forecast, report.forecast)


def _said(first: Figures | None, last: Figures | None, *, on_cpu: bool) -> dict[str, Any]:
    """A row's forecasts: what the Session said first and later, as far as it said something."""
    return {
        f"{name}_{what}": value
        for name, figures in (("forecast", first), ("corrected", last))
        if figures is not None
        for what, value in (
            ("step_s", None if known_ms(figures) is None else figures.step_ms / 1e3),
            ("peak_gib", (figures.ram_bytes if on_cpu else figures.vram_bytes) / GIB),
        )
    }


def _recomputed_gib(session: Session, blocks: Any) -> float | None:
    plan = session.plan()
    if plan is None:
        return None
    nbytes = plan.moved_bytes(RECOMPUTE)
    if blocks is not None:
        for table in blocks.tables():
            nbytes += table.nearest("save").saved_bytes - table.nearest(blocks.variants[table.name]).saved_bytes
    return nbytes / GIB


def _planned_note(before: Report, after: Report, steps: int, *, is_uneven: bool) -> str:
    planned = after.num_planned - before.num_planned
    if planned == 0:
        return "no step followed a plan"
    if is_uneven:
        return f"{planned} of {steps} timed steps followed a plan" if planned < steps else ""
    last = min(planned, after.num_in_force)
    if last < steps:
        return f"planned anew in the timed steps: {last} of {steps} followed the last plan"
    return ""


def joined(*notes: str) -> str:
    """Those notes that say something, in one line."""
    return "; ".join(note for note in notes if note)
