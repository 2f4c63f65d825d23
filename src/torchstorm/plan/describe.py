"""Formats a plan as a table: what happens to each block's tensors and why, then the forecast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torchstorm.plan.forecast import DISK, KEEP, RAM, Figures, Placement
from torchstorm.plan.machine import Machine
from torchstorm.plan.recompute import RECOMPUTE
from torchstorm.plan.trace import Trace
from torchstorm.plan.waits import recompute_seconds, waiting_seconds
from torchstorm.sizes import format_size

_TIERS = (KEEP, RECOMPUTE, RAM, DISK)
_NO_WAIT_S = 50e-6  # shorter waits are not mentioned


def describe(
    trace: Trace,
    placements: Sequence[Placement],
    forecast: Figures,
    limits: Mapping[str, int],
    *,
    machine: Machine | None,
    simulated: bool,
    notes: Sequence[str] = (),
) -> str:
    """Formats a plan.

    Args:
        trace: the traced step.
        placements: one per parcel of the trace.
        forecast: forecast of the step with them.
        limits: bytes per tier ("vram", "ram", "disk"); 0 for no tier.
        machine: machine of the plan; None leaves out times spent waiting for copies.
        simulated: whether the trace was computed instead of measured on that machine.
        notes: further remarks for the user, one per line.

    Returns:
        Lines of at most about 120 characters, as a table.
    """
    lines = []
    if simulated and machine is not None:
        lines.append(
            f"FORECAST for {machine.name}, from its profile and the model's shapes: nothing was measured there"
        )
    lines += [
        f"{len(trace.storages)} saved storages, {format_size(trace.saved_bytes)}, "
        f"in {len(trace.parcels)} parcels; {trace.num_moments} moments",
        f"{'block':<28}" + "".join(f"{tier:>12}" for tier in _TIERS) + "  why",
    ]
    rows: dict[str, dict[str, int]] = {}
    again_s: dict[str, float] = {}
    wait_s: dict[str, float] = {}
    again = recompute_seconds(trace, placements)
    waits = waiting_seconds(trace, placements, machine) if machine is not None else None
    for storage in trace.storages:
        tier = KEEP if storage.parcel < 0 else placements[storage.parcel].tier
        row = rows.setdefault(outer_block(storage.block), dict.fromkeys(_TIERS, 0))
        row[tier] += storage.nbytes
    for number, parcel in enumerate(trace.parcels):
        block = outer_block(parcel.block)
        again_s[block] = again_s.get(block, 0.0) + again[number]
        wait_s[block] = wait_s.get(block, 0.0) + (waits[number] if waits is not None else 0.0)
    for block, row in rows.items():
        why = _why(row, again_s.get(block, 0.0), wait_s.get(block, 0.0) if waits is not None else None)
        lines.append(f"{block or '(model)':<28}{_cells(row)}  {why}")
    lines.append(f"{'total':<28}{_cells({tier: sum(row[tier] for row in rows.values()) for tier in _TIERS})}".rstrip())
    lines.append(f"{'forecast':<12}{'peak':>12}{'budget':>12}")
    for tier in ("vram", "ram", "disk"):
        peak, limit = getattr(forecast, f"{tier}_bytes"), limits[tier]
        if peak or limit:
            lines.append(f"{tier:<12}{format_size(peak):>12}{format_size(limit) if limit else '-':>12}")
    recompute_ms = sum(again) * 1e3
    waiting_ms = max(0.0, forecast.step_ms - trace.compute_s * 1e3 - recompute_ms)
    beside = f"  {recompute_ms:.1f} ms of it recompute, {waiting_ms:.1f} ms waiting for copies"
    lines.append(f"{'step':<12}{forecast.step_ms:>9.1f} ms{beside}")
    return "\n".join([*lines, *(f"note: {note}" for note in notes)])


def outer_block(name: str) -> str:
    """The repeated block of a module: "h.3.mlp.c_fc" -> "h.3". Names without a number keep two parts."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return ".".join(parts[:2])


def _cells(row: Mapping[str, int]) -> str:
    return "".join(f"{format_size(row[tier]) if row[tier] else '-':>12}" for tier in _TIERS)


def _why(row: Mapping[str, int], again_s: float, wait_s: float | None) -> str:
    reasons = []
    if row[RECOMPUTE]:
        reasons.append(f"cheap to recompute: {again_s * 1e3:.1f} ms")
    if row[RAM] or row[DISK]:
        if wait_s is None:
            reasons.append("moved to make room")
        elif wait_s < _NO_WAIT_S:
            reasons.append("hidden behind compute")
        else:
            reasons.append(f"stalls {wait_s * 1e3:.1f} ms")
    return "; ".join(reasons) or "fits"
