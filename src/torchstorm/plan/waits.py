"""The overhead of a plan per parcel: seconds of recomputation, and seconds that compute waits for copies."""

from __future__ import annotations

from collections.abc import Sequence

from torchstorm.plan.forecast import Placement, forecast_s
from torchstorm.plan.machine import Machine
from torchstorm.plan.recompute import replays
from torchstorm.plan.trace import Trace


def recompute_seconds(trace: Trace, placements: Sequence[Placement]) -> list[float]:
    """Recompute seconds per parcel. Parcels that are recomputed together share them."""
    seconds = [0.0] * len(trace.parcels)
    for replay in (replays(trace, placements) or {}).values():
        for number in replay.made:
            seconds[number] += replay.compute_s / len(replay.made)
    return seconds


def waiting_seconds(trace: Trace, placements: Sequence[Placement], machine: Machine) -> list[float]:
    """Seconds per parcel that compute waits for its copies: for the copy out at its drop, and for the copy back when it
    is needed.
    """
    waits = [0.0] * len(trace.parcels)
    forecast_s(trace, placements, machine, waits=waits)
    return waits
