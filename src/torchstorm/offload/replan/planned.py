"""A plan in use, and the kind of steps that it is for."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import Any

from torchstorm.offload.step.clock import Took
from torchstorm.plan.beside import Problem
from torchstorm.plan.forecast import Figures
from torchstorm.plan.plan import Plan, Workload
from torchstorm.plan.trace import Trace

NUM_JUDGED = 3  # a step's time is judged by the median of so many that followed the plan
NOISE = 0.02  # of a step's time: a miss that is none
_UNTOLD = (8, 64, 512)  # after so many much smaller steps of unknown sizes, one is traced
_NEARLY = 1.05  # times the work of a step whose time tells of a plan for larger ones
_MOST_MARKED = 12  # steps of one plan, of which some do not count
_MOST_FAR = 24  # smaller steps, before one of them tells what larger ones take
_NUM_TRIES = 4  # of the next steps, one that is much smaller is
_MUCH = 0.4  # of the budget: another step may well need more than all of it


Key = tuple[Any, ...]
"""What tells a kind of step from others: how it begins."""


@dataclass(eq=False)
class Kind:
    """Steps that begin alike and run the same sequence of operations: all plans that they had one after the other.

    Attributes:
        key: how such steps begin.
        workload: their model and batch; None where that was not noted.
        num_calls: how often such a step calls the model; 0 where that was not noted.
        is_of_rest: whether only the rest of a step was traced, which had followed another plan so far.
        is_followed: whether a step has followed a plan for it to its end.
        then: the kind of the step after the last one.
    """

    key: Key = ()
    workload: Workload | None = None
    num_calls: int = 0
    is_of_rest: bool = False
    is_followed: bool = False
    then: Kind | None = None


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
        recent: what the last steps took that followed it.
        fastest_s: the least that one of all of them took. What disturbs steps only adds, and may do so for seconds.
        replaced: the plan before it, until so many steps have followed this one that the two can be compared.
        is_from_user: whether the user brought it. It is kept to whatever it costs, as long as it fits.
        asked: what is solved beside training for a better plan; None for nothing.
        is_quick: whether it was found in little time, and a better one is searched for when its steps have been timed.
        is_unrecorded: whether the step was traced without its operations, and the next one is to be traced with them.
        stands_for_smaller: whether it stands for all plans that it can; see `Plans.stand_for_smaller`.
        is_foreseen: whether what such steps take was never measured, but follows from steps of other sizes.
        margin_bytes: kept free beside the slack, by this plan and by better ones for such steps. As long as no step of
            just their sizes has followed one, and where they are foreseen, that is what may be missing from its
            forecast; else what was.
        smaller: those for much smaller steps, by the sizes of what the model is given in the largest of these. One has
            no plan while that is searched for, and where none fits.
        num_marked: steps that marked their waits, since it is in use.
        num_smaller: smaller steps since it is a quick plan: those that have followed it, or a plan for smaller steps in
            its place.
        num_far: steps that could have been timed for it, but were much smaller.
        num_untold: much smaller steps of whose sizes the traces did not tell, and the few steps of any size that were
            ready to be traced for that.
        untold: these sizes, and the number of plans that had come when they were last asked for.
        kind: of the steps.
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
    recent: list[Took] = field(default_factory=list)
    fastest_s: float = math.inf
    replaced: Planned | None = None
    is_from_user: bool = False
    asked: Problem | None = None
    is_quick: bool = False
    is_unrecorded: bool = False
    stands_for_smaller: bool = False
    is_foreseen: bool = False
    margin_bytes: int = 0
    smaller: dict[tuple[int, ...], Planned] = field(default_factory=dict)
    num_marked: int = 0
    num_smaller: int = 0
    num_far: int = 0
    num_untold: int = 0
    untold: dict[tuple[int, ...], int] = field(default_factory=dict)
    kind: Kind = field(default_factory=Kind)

    @property
    def is_to_tell(self) -> bool:
        """Whether a much smaller step is to be traced, since a single size tells nothing of others."""
        return any(at <= self.num_untold < at + _NUM_TRIES for at in _UNTOLD)

    def took_bytes(self, vram_bytes: int, *, is_exact: bool) -> None:
        """A step has followed it whose peak was this; `is_exact`: it was of just the sizes that the plan is for."""
        missed_bytes = max(0, vram_bytes - self.forecast.vram_bytes)
        may_be_more = self.is_foreseen or not is_exact
        self.margin_bytes = max(self.margin_bytes, missed_bytes) if may_be_more else missed_bytes

    def told(self) -> None:
        """Such a step is traced."""
        self.num_untold += _NUM_TRIES

    @property
    def took_s(self) -> float:
        """The median of what the last steps took."""
        return statistics.median(one.step_s for one in self.recent)

    @property
    def to_beat_ms(self) -> float:
        """What another plan has to be forecast to take less than: clearly less than the fastest step, or else less than
        was forecast."""
        if len(self.recent) < NUM_JUDGED:
            return self.forecast.step_ms
        return self.fastest_s * (1 - NOISE) * 1e3

    @property
    def is_proven(self) -> bool:
        """Whether steps have shown what it takes, and no better one is searched for."""
        return len(self.recent) == NUM_JUDGED and self.asked is None and not self.is_quick and self.plan is not None

    def is_to_tell_waits(self, key: Key) -> bool:
        """Whether a step is one of the few that mark their waits for copies, which takes the host a while.

        Args:
            key: how it begins. Of much smaller steps than the plan is for nobody asks.
        """
        is_one = len(self.times_s) < NUM_JUDGED and self.num_marked < _MOST_MARKED and self.is_nearly_for(key)
        self.num_marked += is_one
        return is_one

    def is_timed_by(self, key: Key) -> bool:
        """Whether a step tells what those take that the plan is for. On a GPU a much smaller one tells little: the host
        takes as long for it. It does where only such steps come.

        Args:
            key: how it begins.
        """
        if self.is_nearly_for(key):
            return True
        self.num_far += 1
        return self.num_far > _MOST_FAR

    @property
    def recomputes(self) -> bool:
        """Whether a step that follows it computes anything again."""
        return self.plan is not None and self.plan.recomputes

    def is_tight(self, limit_bytes: int) -> bool:
        """Whether a step that saves more than another, as far as can be expected, might not fit into so many bytes."""
        return self.recomputes or self.trace.saved_bytes > _MUCH * limit_bytes

    def is_nearly_for(self, key: Key) -> bool:
        """Whether steps that begin so are as much work as those that the plan is for, or nearly."""
        return key == self.kind.key or self.work_over(key) <= _NEARLY

    def work_over(self, key: Key) -> float:
        """About how many times the work of a step that begins so a step is that the plan was made for."""
        planned_for, ours = math.prod(self.kind.key[0]), math.prod(key[0])
        return float(planned_for / ours) if ours else 1.0
