"""Estimates the largest micro-batch that fits, from the trace of a batch that does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from torchstorm.errors import BudgetError
from torchstorm.plan.forecast import other_profile
from torchstorm.plan.machine import Machine
from torchstorm.plan.plan import Budget
from torchstorm.plan.recompute import can_recompute
from torchstorm.plan.solve import solve
from torchstorm.plan.trace import Trace

_SECONDS = 5.0  # time limit of the plan that verifies the estimate


def scaled(trace: Trace, share: float) -> Trace:
    """Estimates the trace of a batch of another size.

    All memory scales with the batch, except for memory that stays until the end of the step (gradients) or existed
    before it (weights).

    Args:
        trace: trace of the whole batch.
        share: size of the other batch relative to the whole, above 0.
    """

    def of(nbytes: int) -> int:
        return max(1, round(nbytes * share))

    stays = _staying(trace)
    moments = tuple(
        replace(
            moment,
            nbytes=of(moment.nbytes) if moment.storage >= 0 else moment.nbytes,
            compute_s=moment.compute_s * share,
            other_bytes=_grown(moment.other_bytes, fixed, share),
            still_bytes=_grown(moment.still_bytes, fixed, share),
        )
        for moment, fixed in zip(trace.moments, stays, strict=True)
    )
    return replace(
        trace,
        moments=moments,
        storages=tuple(replace(storage, nbytes=of(storage.nbytes)) for storage in trace.storages),
        parcels=tuple(replace(parcel, nbytes=of(parcel.nbytes)) for parcel in trace.parcels),
        ops=tuple(
            replace(op, compute_s=op.compute_s * share, scratch_bytes=round(op.scratch_bytes * share))
            for op in trace.ops
        ),
        values=tuple(replace(value, nbytes=of(value.nbytes)) for value in trace.values),
    )


def largest_micro_batch(
    trace: Trace,
    machine: Machine,
    budget: Budget,
    batch_size: int,
    *,
    spare: Budget | None = None,
    own_bytes: Callable[[int], int] | None = None,
) -> int:
    """The largest number of samples that fit at once.

    Args:
        trace: trace of the whole batch.
        machine, budget, spare, own_bytes: as in `solve`.
        batch_size: number of samples of the traced batch.

    Returns:
        The largest size, at most `batch_size`, with a plan within the budget; 0 if a single sample does not fit.
    """

    tier = "ram" if trace.device == "cpu" else "vram"
    spare = spare or Budget()
    limit = getattr(budget, tier) - getattr(spare, tier)
    below = budget.disk + (budget.ram if tier == "vram" else 0)
    most, too_many = 0, batch_size + 1
    while too_many - most > 1:
        middle = (most + too_many) // 2
        if _could_fit(scaled(trace, middle / batch_size), limit, below):
            most = middle
        else:
            too_many = middle
    while most:
        part = scaled(trace, most / batch_size)
        try:
            solve(part, machine, budget, spare=spare, own_bytes=own_bytes, time_limit_s=_SECONDS)
            return most
        except BudgetError:
            most = most * 4 // 5
    return 0


def _could_fit(trace: Trace, limit: int, below_bytes: int) -> bool:
    """Whether the step fits if every parcel is on a slower tier whenever it is not needed. Almost no plan needs less
    memory, and this is much faster to compute than a plan."""
    kept = np.zeros(trace.num_moments, dtype=np.int64)
    away = np.zeros(trace.num_moments, dtype=np.int64)
    can_leave = can_recompute(trace) if not below_bytes else [True] * len(trace.parcels)
    for storage in trace.storages:
        kept[storage.owned : storage.freed] += storage.nbytes
        if storage.parcel < 0 or not can_leave[storage.parcel]:
            away[storage.owned : storage.freed] += storage.nbytes
    for number, parcel in enumerate(trace.parcels):
        if can_leave[number]:
            away[parcel.owned : parcel.sealed + 1] += parcel.nbytes
            away[parcel.needed : parcel.freed] += parcel.nbytes
    other = other_profile(trace)
    over = int((kept + other).max()) - limit
    recomputable = sum(p.nbytes for p, can in zip(trace.parcels, can_recompute(trace), strict=True) if can)
    return int((away + other).max()) <= limit and over <= below_bytes + recomputable


def _staying(trace: Trace) -> list[int]:
    """For every interval, bytes that do not scale with the batch: they exist from then on to the end of the step, or
    existed before it and are not inputs of the model."""
    if trace.device == "cpu":
        return [0] * trace.num_moments
    inputs = sum(storage.nbytes for storage in trace.storages if storage.owned > trace.num_moments)
    stays: list[int] = []
    # The trace does not include the step's end. Some of its last moments, but not all, are within an operation.
    tail = trace.moments[-max(4, trace.num_moments // 16) :]
    least = min(moment.still_bytes for moment in tail)
    for moment in reversed(trace.moments):
        least = min(least, moment.still_bytes)
        stays.append(max(trace.base_bytes, least) - inputs)
    return stays[::-1]


def _grown(nbytes: int, fixed: int, share: float) -> int:
    return nbytes if nbytes <= fixed else fixed + round((nbytes - fixed) * share)
