"""Plans that compute as much as possible again, whatever it costs: so that every way of doing it is gone through."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from torchstorm.offload.recompute.operators import Operator
from torchstorm.offload.recompute.tape import Tape
from torchstorm.offload.replan import problems
from torchstorm.plan.forecast import KEEP, Placement
from torchstorm.plan.plan import Plan
from torchstorm.plan.recompute import RECOMPUTE, can_recompute, replays
from torchstorm.plan.solve import solve

Choose = Callable[[int], bool]


def force_recompute(monkeypatch: pytest.MonkeyPatch, wanted: Choose = lambda _: True) -> list[Plan]:
    """From now on every Session's plans compute again what they can, of those parcels that `wanted` says.

    Returns:
        The plans made, as they are made.
    """
    made: list[Plan] = []

    def forced(trace: Any, machine: Any, budget: Any, **options: Any) -> Plan:
        found = recomputing(solve(trace, machine, budget, **options), wanted)
        made.append(found)
        return found

    monkeypatch.setattr(problems, "solve", forced)
    return made


def at_random(rng: random.Random, share: float = 0.5) -> Choose:
    """A choice that stays the same for each parcel."""
    drawn: dict[int, bool] = {}
    return lambda number: drawn.setdefault(number, rng.random() < share)


def recomputing(plan: Plan, wanted: Choose) -> Plan:
    """The plan with as many of the wanted parcels as possible computed again."""
    trace = plan.trace
    placements = list(plan.placements)
    alone = can_recompute(trace)
    for number, parcel in enumerate(trace.parcels):
        if not alone[number] or not wanted(number):
            continue
        before = placements[number]
        placements[number] = Placement(tier=RECOMPUTE, drop=parcel.sealed, fetch=parcel.needed)
        if replays(trace, placements) is None:
            placements[number] = before
    found = replays(trace, placements)
    assert found is not None
    for moment, replay in found.items():
        for number in replay.made:
            placements[number] = replace(placements[number], fetch=moment)
        for number in replay.sources:
            if placements[number].tier not in (KEEP, RECOMPUTE):
                placements[number] = replace(placements[number], fetch=min(placements[number].fetch, moment))
    return replace(plan, placements=tuple(placements))


def recorded_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operations of functions that are recorded as a whole from now on, as they are."""
    recorded: list[str] = []
    record = Tape.record_function

    def noted(self: Tape, func: Any, again: Any, what: Operator, *rest: Any) -> Any:
        recorded.append(what.name)
        return record(self, func, again, what, *rest)

    monkeypatch.setattr(Tape, "record_function", noted)
    return recorded


def num_recomputed(plan: Plan) -> int:
    """Parcels that a plan computes again."""
    return sum(placement.tier == RECOMPUTE for placement in plan.placements)
