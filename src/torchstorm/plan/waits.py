"""What a plan costs beside the model's own compute: seconds of recomputing, and what each copy makes compute wait."""

from __future__ import annotations

from collections.abc import Sequence

from torchstorm.plan.forecast import Placement, forecast_s
from torchstorm.plan.machine import Machine
from torchstorm.plan.recompute import replays
from torchstorm.plan.trace import Trace


def recompute_seconds(trace: Trace, placements: Sequence[Placement]) -> list[float]:
    """For every parcel, seconds of operations that run again because it is needed; shared among those made at once."""
    seconds = [0.0] * len(trace.parcels)
    for replay in (replays(trace, placements) or {}).values():
        for number in replay.made:
            seconds[number] += replay.seconds / len(replay.made)
    return seconds


def waiting_seconds(trace: Trace, placements: Sequence[Placement], machine: Machine) -> list[float]:
    """For every parcel, seconds that compute waits for its copies: at its drop until it has left, and when it is needed
    until it is back.
    """
    waits = [0.0] * len(trace.parcels)
    forecast_s(trace, placements, machine, waits=waits)
    return waits
