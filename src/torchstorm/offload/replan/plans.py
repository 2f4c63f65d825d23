"""The plans of a Session, one for each kind of step: how it begins, and the sequence of operations after that."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torchstorm.offload.replan.planned import Key, Kind, Planned
from torchstorm.plan.beside import Problem
from torchstorm.plan.forecast import Figures
from torchstorm.plan.machine import Machine
from torchstorm.plan.plan import Plan
from torchstorm.plan.scaled import run_alike, save_alike
from torchstorm.plan.trace import SavedStorage, Trace, num_shared

_MOST_PLANS = 64  # of a Session; each holds a whole trace
_MOST_NEAR = 4
_MOST_SMALLER = 16  # traces of steps for which a larger plan stands
_MUCH_SMALLER = 0.5  # steps of less than this part of a plan's work keep a plan of their own
_MOST_SIZES = 2**14  # that are remembered
_MOST_WAITS = 12  # powers of two: so many steps that differ from all plans go by, before one of them is traced


class Plans:
    """The plans of one Session; the longest unused are forgotten.

    Steps that begin alike may go on differently: transformers drops a mask that is all ones, a layer is left out, a
    loss is added now and then. Each sequence of operations gets a plan of its own. A step begins with the plan that was
    next when the last step's came before, and goes over to another one where it turns out to be for that.

    Args:
        from_user: the plan that the user brought, for the first kind of step.
        num_to_measure: so many steps of a kind are measured.
    """

    def __init__(self, from_user: Plan | None, num_to_measure: int) -> None:
        self.num_to_measure = num_to_measure
        self.in_force: Planned | None = None  # the one that was made or followed last
        self._all: list[Planned] = []  # the last one used is the last one forgotten
        self._smaller: list[Planned] = []  # no longer followed, since one of `_all` serves steps of their sizes, too
        self._sizes: set[Any] = set()  # that the model was given in steps which followed a plan for larger ones
        self._last: Kind | None = None  # of the last step that followed a plan
        self._num_left = 0  # steps that differed from all plans, since the rest of one was traced
        self.have_left = False  # whether steps have differed from all plans
        self.num_put = 0  # plans that have come
        self._state: int | None = None  # of the model, in which these plans were made
        self._state_now: int | None = None
        self.from_user = from_user  # until the first step asks for a plan
        if from_user is not None:
            trace, base = from_user.trace, from_user.trace.base_bytes
            self.in_force = Planned(from_user, trace, from_user.forecast, base, num_to_measure, is_from_user=True)

    def begin(self, state: int | None) -> None:
        """A step begins with the model in this state, None where that is not known. In another one, plans are forgotten
        as soon as something is saved: to follow them until they do not fit could break the budget."""
        self._state_now = state

    @property
    def _are_others(self) -> bool:
        return None not in (self._state, self._state_now) and self._state != self._state_now

    def get(self, key: Key) -> Planned | None:
        """The plan for steps that begin so: of several the one that came next the last time, or was followed last."""
        if self._are_others:
            self._all.clear()
            self._smaller.clear()
            self.have_left, self._last = False, None
        self._state = self._state_now
        if self.from_user is not None and self.in_force is not None:
            self.from_user, self.in_force.kind.key = None, key
            self._all.append(self.in_force)
        alike = [one for one in reversed(self._all) if one.kind.key == key]
        then = self._last.then if self._last is not None else None
        planned = next((one for one in alike if one.kind is then), alike[0] if alike else None)
        if planned is not None:
            self.use(planned)
        return planned

    def covering(self, key: Key) -> Planned | None:
        """The plan for the smallest larger steps: with as many dimensions, none of them smaller. None where there is
        none."""
        found = [one for one in reversed(self._all) if _covers(one.kind.key, key) and one.plan is not None]
        if not found:
            return None
        planned = min(found, key=lambda one: math.prod(one.kind.key[0]))
        self.use(planned)
        return planned

    def others(self, planned: Planned, key: Key) -> Iterator[tuple[Planned, bool]]:
        """Plans that a step which has followed one so far may go on with, the last used first; and whether each is for
        steps of just its sizes."""
        for one in reversed(self._all):
            is_exact = one.kind.key == key
            if one is planned or one.plan is None or one.is_from_user:
                continue
            if is_exact or _covers(one.kind.key, key):
                yield one, is_exact

    def latest_first(self) -> list[Planned]:
        """All plans for the model as it is, the last used first, and then those that are no longer followed."""
        return [] if self._are_others else self._all[::-1] + self._smaller[::-1]

    def near(self, planned: Planned, key: Key) -> Iterator[Plan]:
        """The few plans that a step is most likely to go over to from one."""
        for one, _ in itertools.islice(self.others(planned, key), _MOST_NEAR):
            assert one.plan is not None
            yield one.plan

    def placed_before(self, trace: Trace) -> dict[int, str]:
        """Where plans for other steps have the parcels of a step before it parts from those. A plan that has them there
        as well can be gone over to from these."""
        found: dict[int, str] = {}
        for planned in reversed(self._all):
            plan = planned.plan
            if plan is None or self.is_measured_again(planned):
                continue
            shared = num_shared(trace, plan.trace)
            if shared == trace.num_moments == plan.trace.num_moments:
                continue  # it is for the same steps
            for number, (one, other) in enumerate(zip(trace.parcels, plan.trace.parcels, strict=False)):
                if max(one.sealed, other.sealed) >= shared or one.num_storages != other.num_storages:
                    break
                found.setdefault(number, plan.placements[number].tier)
        return found

    def has(self, planned: Planned) -> bool:
        """Whether steps may follow a plan still."""
        return planned in self._all

    def now(self, planned: Planned) -> Planned | None:
        """What steps follow now that had this plan: itself, or what has taken its place since; None for none."""
        return next((one for one in self._all if one.kind is planned.kind), None)

    def use(self, planned: Planned) -> None:
        """A step follows this plan, which is forgotten last."""
        self._all.remove(planned)
        self._all.append(planned)

    def followed(self, planned: Planned) -> None:
        """A step has followed this plan to its end."""
        if self._last is not None:
            self._last.then = planned.kind
        self._last, planned.kind.is_followed = planned.kind, True

    def nearly(self, planned: Planned, key: Key | None, sizes: Any) -> float:
        """The work of a step that a plan is for, by that of a smaller one which has followed it.

        Returns:
            0 where that is so much smaller that its time tells nothing of the plan; for the first step of its sizes,
            for which libraries have chosen their kernels meanwhile; and without sizes.
        """
        if key is None or sizes is None:
            return 0.0
        is_known = sizes in self._sizes
        if len(self._sizes) < _MOST_SIZES:
            self._sizes.add(sizes)
        return planned.work_over(key) if is_known and planned.is_nearly_for(key) else 0.0

    def stand_for_smaller(self, planned: Planned) -> bool:
        """A whole step was as this plan has it, which from now on serves smaller steps of the same operations, too, but
        not much smaller ones. With a plan for each, every step would be recorded for what the others compute again, and
        a new size would often be measured. Returns whether another plan was in force."""
        if planned.stands_for_smaller:
            return False
        its_own = planned.is_from_user or planned.is_unrecorded or planned.kind.is_of_rest
        if planned.plan is None or its_own or planned not in self._all:
            return False
        planned.stands_for_smaller = True
        key, was_in_force = planned.kind.key, False
        for one in [one for one in self._all if one is not planned and not one.is_from_user]:
            if not _covers(key, one.kind.key) or math.prod(one.kind.key[0]) < _MUCH_SMALLER * math.prod(key[0]):
                continue
            if one.plan is not None and not one.kind.is_of_rest and _serves(planned.trace, one.trace):
                self._all.remove(one)
                self._smaller.append(one)
                was_in_force |= one is self.in_force
        del self._smaller[:-_MOST_SMALLER]
        if was_in_force:
            self.in_force = planned
        return was_in_force

    def left(self) -> bool:
        """A step differs from all plans. Returns whether the rest of it is to be traced for one more: the more seldom,
        the more plans were made so and have not been of use again."""
        self.have_left = True
        self._num_left += 1
        num_unused = sum(one.kind.is_of_rest and not one.kind.is_followed for one in self._all)
        if self._num_left < 2 ** min(num_unused, _MOST_WAITS):
            return False
        self._num_left = 0
        return True

    def put(self, planned: Planned, instead_of: Planned | None = None) -> None:
        """Steps follow this plan from now on, maybe in another one's place."""
        if instead_of is not None:
            planned.kind = instead_of.kind
            self._all = [one for one in self._all if one.kind is not planned.kind]
        elif planned.kind.is_of_rest:
            # What the first part of the other one was said to be made by was another step's.
            for one in [one for one in self._all if one.kind.is_of_rest and _are_alike(one, planned)]:
                self.drop(one)
        self._all.append(planned)
        self.num_put += 1
        self.in_force = planned
        for one in self._all[:-_MOST_PLANS]:
            self.drop(one)

    def drop(self, planned: Planned | None) -> None:
        """No step follows this plan any more, if there is one."""
        if planned is None:
            return
        if planned in self._all:
            self._all.remove(planned)
        planned.kind.then = None
        self._last = None if self._last is planned.kind else self._last

    def replace(self, old: Planned, new: Planned | None) -> bool:
        """Puts a plan in another's place, and in force; for None such steps are measured anew. False where the other is
        not in use."""
        if old not in self._all:
            return False
        if new is None:
            self.drop(old)
        else:
            self.put(new, old)
        return True

    def waiting_for(self, problem: Problem) -> Planned | None:
        """The plan in use that a problem's answer is to replace, or that has none before that."""
        return next((one for one in self._all_and_smaller() if one.asked is problem), None)

    def nothing_is_asked(self) -> None:
        """No better plan will come: nothing waits for one."""
        for one in self._all:
            one.asked = None
            for sizes in [sizes for sizes, small in one.smaller.items() if small.asked is not None]:
                del one.smaller[sizes]

    def _all_and_smaller(self) -> Iterator[Planned]:
        for one in self._all:
            yield one
            yield from one.smaller.values()

    def most_ram_bytes(self) -> int:
        """The most that any plan in use keeps in host memory beside a GPU."""
        return max((one.forecast.ram_bytes for one in self._all_and_smaller()), default=0)

    def plan_in_force(self, machine: Callable[[], Machine]) -> Plan | None:
        """The plan in force, with the machine whose speeds it has, and what it is for."""
        planned = self.in_force
        if planned is None or planned.plan is None or planned.plan.machine is not None:
            return planned.plan if planned is not None else None
        return replace(planned.plan, machine=machine(), workload=planned.kind.workload)

    def forecast(self) -> Figures | None:
        """What can be said of steps that follow the plan in force; None without one. The time of a plan is not known as
        long as it is that of a measured step, which takes longer, or another plan is about to come."""
        planned = self.in_force
        if planned is None or planned.plan is None or planned.is_from_user:
            return planned.forecast if planned is not None else None
        if self.is_measured_again(planned) or planned.asked is not None or planned.is_quick:
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
        if len(self._all) != 1 or self.have_left or self._are_others:
            return True  # where steps have differed, the next one may be new again
        (planned,) = self._all
        is_traced = planned.is_unrecorded or self.is_measured_again(planned) or planned.is_to_tell
        recomputes = planned.recomputes or any(one.recomputes for one in planned.smaller.values())
        return is_traced or recomputes or is_outdated(planned)


def _serves(larger: Trace, one: Trace) -> bool:
    """Whether a plan for the larger of two steps serves the other one: both save the same, what made it is the same as
    far as that was recorded, and nothing is larger: of an encoder and a decoder one may have grown alone."""
    are_recorded = one.ops and larger.ops
    are_alike = run_alike(one, larger) if are_recorded else save_alike(one, larger)
    return are_alike and all(map(_is_no_larger, one.storages, larger.storages))


def _is_no_larger(one: SavedStorage, other: SavedStorage) -> bool:
    return one.nbytes <= other.nbytes


def _are_alike(one: Planned, other: Planned) -> bool:
    """Whether steps begin alike and have the same moments."""
    if one.kind.key != other.kind.key or one.trace.num_moments != other.trace.num_moments:
        return False
    pairs = zip(one.trace.moments, other.trace.moments, strict=True)
    return all(a.signature == b.signature for a, b in pairs)


def _covers(larger: Key, key: Key) -> bool:
    """Whether a step's first saved tensor is no larger than another's, and else alike."""
    if len(larger) != len(key) or not (key and isinstance(key[0], tuple)) or larger[1:] != key[1:]:
        return False  # a step that begins with a tensor of an earlier one has no sizes of its own
    ours, others = key[0], larger[0]
    return len(ours) == len(others) and all(one <= other for one, other in zip(ours, others, strict=True))
