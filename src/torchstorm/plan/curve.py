"""The frontier of step time and budget, compared with keeping everything and with checkpointing every block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from torchstorm.errors import BudgetError
from torchstorm.plan.describe import outer_block
from torchstorm.plan.forecast import KEEP, Placement, fast_profile
from torchstorm.plan.machine import Machine
from torchstorm.plan.plan import Budget
from torchstorm.plan.solve import solve
from torchstorm.plan.trace import Trace


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One way to run the step.

    Attributes:
        way: "plan", "unlimited" (everything kept) or "checkpoint" (every block recomputed).
        budget_bytes: budget of the plan on the fast tier; for the other ways, their peak.
        peak_bytes: forecast peak on the fast tier.
        step_ms: forecast step time in milliseconds.
        ram_bytes, disk_bytes: forecast peaks of the slower tiers. On CPU, `ram_bytes` is the fast tier.
    """

    way: str
    budget_bytes: int
    peak_bytes: int
    step_ms: float
    ram_bytes: int = 0
    disk_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The frontier of a step.

    Attributes:
        machine: name of the machine.
        tier: the fast tier, "vram" or "ram".
        points: plans by increasing budget; step times never increase.
        unlimited: the step with everything kept.
        checkpoint: the step with every block recomputed; None if the model has no repeated blocks.
    """

    machine: str
    tier: str
    points: tuple[Point, ...]
    unlimited: Point
    checkpoint: Point | None

    def to_dict(self) -> dict[str, Any]:
        """The curve as a dictionary for JSON."""
        return asdict(self)


def curve(
    trace: Trace,
    machine: Machine,
    budget: Budget,
    *,
    num_points: int = 14,
    spare: Budget | None = None,
    own_bytes: Callable[[int], int] | None = None,
) -> Curve:
    """Plans a step for several budgets, from the smallest feasible one to the one that keeps everything.

    Args:
        trace: the step.
        machine: speeds of the link and the disk.
        budget: budgets of the slower tiers; the fast tier's is ignored.
        num_points: number of budgets, at least 2.
        spare, own_bytes: as in `solve`.

    Returns:
        The frontier. Budgets for which the slower tiers are too small are left out.
    """
    tier = "ram" if trace.device == "cpu" else "vram"
    unlimited = unlimited_point(trace)
    most = unlimited.peak_bytes + (getattr(spare, tier) if spare is not None else 0)
    try:
        solve(trace, machine, replace(budget, **{tier: 1}), spare=spare, own_bytes=own_bytes)
        least = 1
    except BudgetError as error:
        least = error.smallest_bytes if error.tier == tier and error.smallest_bytes else most // num_points
    points: list[Point] = []
    for number in range(num_points):
        share = (number / (num_points - 1)) ** 1.6  # more points at small budgets, where the curve is steeper
        limit = round(least + (most - least) * share) if most > least else most
        try:
            plan = solve(trace, machine, replace(budget, **{tier: limit}), spare=spare, own_bytes=own_bytes)
        except BudgetError:
            continue
        found = Point(
            way="plan",
            budget_bytes=limit,
            peak_bytes=getattr(plan.forecast, f"{tier}_bytes"),
            step_ms=plan.forecast.step_ms,
            ram_bytes=plan.forecast.ram_bytes,
            disk_bytes=plan.forecast.disk_bytes,
        )
        # A plan for less memory is also valid for more.
        if points and points[-1].step_ms < found.step_ms:
            found = replace(points[-1], budget_bytes=limit)
        points.append(found)
        if most <= least:
            break
    return Curve(
        machine=machine.name,
        tier=tier,
        points=tuple(points),
        unlimited=unlimited,
        checkpoint=checkpoint_point(trace),
    )


def unlimited_point(trace: Trace) -> Point:
    """Everything kept."""
    peak = int(fast_profile(trace, [Placement(tier=KEEP)] * len(trace.parcels)).max())
    return _point("unlimited", trace, peak, trace.compute_s)


def checkpoint_point(trace: Trace) -> Point | None:
    """Models `torch.utils.checkpoint` around every block: the first saved tensor of a block (its input) is kept. Its
    forward runs again at the start of its backward, and all its saved tensors exist from then on.

    Returns:
        None if fewer than two blocks have a number in their name.
    """
    blocks: dict[str, list[int]] = {}
    for number, storage in enumerate(trace.storages):
        name = outer_block(storage.block)
        if any(part.isdigit() for part in name.split(".")):
            blocks.setdefault(name, []).append(number)
    if len(blocks) < 2:
        return None
    other = np.array([moment.other_bytes for moment in trace.moments], dtype=np.int64)
    still = np.array([moment.still_bytes for moment in trace.moments], dtype=np.int64)
    seconds = np.array([moment.compute_s for moment in trace.moments])
    inside = {number for numbers in blocks.values() for number in numbers[1:]}
    held = np.zeros(trace.num_moments, dtype=np.int64)
    for number, storage in enumerate(trace.storages):
        if number not in inside:
            held[storage.owned : storage.freed] += storage.nbytes
    again_s, peak_again = 0.0, 0
    for numbers in blocks.values():
        rest = [trace.storages[number] for number in numbers[1:]]
        begin = min((storage.needed for storage in rest), default=trace.num_moments)
        if begin >= trace.num_moments:
            continue
        first, last = trace.storages[numbers[0]].made, rest[-1].made
        again_s += float(seconds[first:last].sum())
        for storage in rest:
            held[begin : storage.freed] += storage.nbytes
        # While a block's forward runs again, it needs the same memory as the first time.
        made = np.zeros(last - first, dtype=np.int64)
        for storage in rest:
            made[max(0, storage.owned - first) :] += storage.nbytes
        busy = np.maximum(0, other[first:last] - still[first]) + made
        below = held[begin] - sum(storage.nbytes for storage in rest)
        peak_again = max(peak_again, int(still[begin] + below + busy.max(initial=0)))
    peak = max(int((held + other).max()), peak_again) + trace.staging_bytes
    return _point("checkpoint", trace, peak, trace.compute_s + again_s)


def _point(way: str, trace: Trace, peak_bytes: int, seconds: float) -> Point:
    return Point(
        way=way,
        budget_bytes=peak_bytes,
        peak_bytes=peak_bytes,
        step_ms=seconds * 1e3,
        ram_bytes=peak_bytes if trace.device == "cpu" else 0,
    )
