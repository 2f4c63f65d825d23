"""The plans of a Session, one for each kind of step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torchstorm.plan.beside import Problem
from torchstorm.plan.forecast import Figures
from torchstorm.plan.machine import Machine
from torchstorm.plan.plan import Plan, Workload
from torchstorm.plan.trace import Trace

_MOST_PLANS = 64  # of a Session; each holds a whole trace


Key = tuple[Any, ...]
"""What tells a kind of step from others: how it begins."""


@dataclass(eq=False)
class Planned:
    """A plan in use, and what it takes for granted.

    Attributes:
        plan: None for a step that fits only when it is decided as it goes.
        trace: the step, without memory that was moved into it since.
        forecast: of the plan; of a step without one what was measured.
        base_bytes: bytes that are not the Session's at the step's entry.
        num_measured: steps that measured something of it.
        num_lessons: how often its times were corrected.
        is_over: whether the plan before it took more than the budget, and this one keeps free what was missing.
        is_least: whether it takes more than the budget, and no plan that keeps free what was missing exists.
        times_s: of steps that followed it, since it was last judged.
        recent_s: of the last steps that followed it.
        replaced: the plan before it, until so many steps have followed this one that the two can be compared.
        is_given: whether the user brought it. It is kept to whatever it costs, as long as it fits.
        subject: the model and batch of the step; None where that was not noted.
        asked: what is solved beside training for a better plan; None for nothing.
    """

    plan: Plan | None
    trace: Trace
    forecast: Figures
    base_bytes: int
    num_measured: int = 0
    num_lessons: int = 0
    is_over: bool = False
    is_least: bool = False
    times_s: list[float] = field(default_factory=list)
    recent_s: list[float] = field(default_factory=list)
    replaced: Planned | None = None
    is_given: bool = False
    subject: Workload | None = None
    asked: Problem | None = None

    @property
    def recomputes(self) -> bool:
        """Whether a step that follows it computes anything again."""
        return self.plan is not None and self.plan.recomputes


class Plans:
    """The plans of one Session, one for each kind of step; the longest unused are forgotten.

    Args:
        given: the plan that the user brought, for the first kind of step.
        num_to_measure: so many steps of a kind are measured.
    """

    def __init__(self, given: Plan | None, num_to_measure: int) -> None:
        self.num_to_measure = num_to_measure
        self.in_force: Planned | None = None  # the one that was made or followed last
        self._by_key: dict[Key, Planned] = {}
        self._unrecorded: set[Key] = set()
        self._own: set[Key] = set()  # steps that a plan for larger ones was not for
        self._state: int | None = None  # of the model, in which these plans were made
        self._state_now: int | None = None
        self.given = given  # until the first step asks for a plan
        if given is not None:
            base = given.trace.base_bytes
            self.in_force = Planned(given, given.trace, given.forecast, base, num_to_measure, is_given=True)

    def begin(self, state: int | None) -> None:
        """A step begins with the model in this state, None where that is not known. In another one, plans are forgotten
        as soon as something is saved: to follow them until they do not fit could break the budget."""
        self._state_now = state

    @property
    def _are_others(self) -> bool:
        return None not in (self._state, self._state_now) and self._state != self._state_now

    def get(self, key: Key) -> Planned | None:
        """The plan for steps of a kind."""
        if self._are_others:
            self._by_key.clear()
            self._unrecorded.clear()
            self._own.clear()
        self._state = self._state_now
        if self.given is not None and self.in_force is not None:
            self.given, self._by_key[key] = None, self.in_force
        planned = self._by_key.get(key)
        if planned is not None:
            self._by_key[key] = self._by_key.pop(key)  # the last one used is the last one forgotten
        return planned

    def covering(self, key: Key) -> Planned | None:
        """The plan for the smallest larger steps: with as many dimensions, none of them smaller. None where there is
        none, or where such a plan was not for steps of this kind."""
        if key in self._own:
            return None
        found = [other for other in self._by_key if _covers(other, key) and self._is_settled(self._by_key[other])]
        if not found:
            return None
        nearest = min(found, key=lambda other: math.prod(other[0]))
        planned = self._by_key[nearest] = self._by_key.pop(nearest)
        return planned

    def _is_settled(self, planned: Planned) -> bool:
        return planned.plan is not None and not self.is_measured_again(planned)

    def note_own(self, key: Key) -> None:
        """Steps of this kind are others than larger ones: they need a plan of their own."""
        self._own.add(key)

    def put(self, key: Key, planned: Planned) -> None:
        """Steps of a kind follow this plan from now on."""
        old = self._by_key.pop(key, None)
        if planned.subject is None and old is not None:
            planned.subject = old.subject
        self._by_key[key] = self.in_force = planned
        while len(self._by_key) > _MOST_PLANS:
            del self._by_key[next(iter(self._by_key))]

    def drop(self, key: Key) -> Planned | None:
        """Steps of a kind are measured anew; returns the plan that was not theirs."""
        return self._by_key.pop(key, None)

    def replace(self, old: Planned, new: Planned | None) -> bool:
        """Puts a plan in another's place, and in force; for None such steps are measured anew. False where the other is
        not in use."""
        key = next((key for key, one in self._by_key.items() if one is old), None)
        if key is None:
            return False
        if new is None:
            self.drop(key)
        else:
            self.put(key, new)
        return True

    def waiting_for(self, problem: Problem) -> Planned | None:
        """The plan in use that is to be replaced by a problem's answer."""
        return next((one for one in self._by_key.values() if one.asked is problem), None)

    def plan_in_force(self, machine: Callable[[], Machine]) -> Plan | None:
        """The plan in force, with the machine whose speeds it has, and what it is for."""
        planned = self.in_force
        if planned is None or planned.plan is None or planned.plan.machine is not None:
            return planned.plan if planned is not None else None
        return replace(planned.plan, machine=machine(), workload=planned.subject)

    def forecast(self) -> Figures | None:
        """What can be said of steps that follow the plan in force; None without one. The time of a plan is not known as
        long as it is that of a measured step, which takes longer, or another plan is about to come."""
        planned = self.in_force
        if planned is None or planned.plan is None or planned.is_given:
            return planned.forecast if planned is not None else None
        if self.is_measured_again(planned) or planned.asked is not None:
            return replace(planned.forecast, step_ms=math.nan)
        return planned.forecast

    def is_measured_again(self, planned: Planned) -> bool:
        """Whether the next step that follows it measures something."""
        return planned.num_measured < self.num_to_measure

    def needs_operations(self, is_outdated: Callable[[Planned], bool]) -> bool:
        """Whether the next step's operations must be recorded: by a plan that recomputes, or for one to be made.

        Args:
            is_outdated: whether a plan gives way to another one within the step, which may recompute.
        """
        if len(self._by_key) != 1 or self._unrecorded or self._are_others:
            return True  # where steps have differed, the next one may be new again
        (planned,) = self._by_key.values()
        return self.is_measured_again(planned) or planned.recomputes or is_outdated(planned)

    def note_unrecorded(self, key: Key) -> None:
        """A step of this kind was traced without its operations: the next one is traced again, with them."""
        self._unrecorded.add(key)

    def take_unrecorded(self, key: Key) -> bool:
        """Whether this step, whose operations are recorded, was waited for."""
        if key not in self._unrecorded:
            return False
        self._unrecorded.remove(key)
        return True


def _covers(larger: Key, key: Key) -> bool:
    """Whether a step's first saved tensor is no larger than another's, and else alike."""
    if len(larger) != len(key) or not key or larger[1:] != key[1:]:
        return False
    ours, others = key[0], larger[0]
    return len(ours) == len(others) and all(one <= other for one, other in zip(ours, others, strict=True))
