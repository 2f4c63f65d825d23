"""What follows from a step that has ended: a plan for the next ones of its kind, or other variants of its blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torchstorm.errors import BudgetError
from torchstorm.offload.replan.foresight import came_true
from torchstorm.offload.replan.mistaken import correct
from torchstorm.offload.replan.planned import Kind, Planned
from torchstorm.offload.replan.plans import Plans
from torchstorm.offload.replan.smaller import ask_for_plan
from torchstorm.offload.replan.workload import workload_of
from torchstorm.offload.run.split import with_micro_batch
from torchstorm.offload.step.inputs import NoteInputs
from torchstorm.offload.step.pace import Pace
from torchstorm.offload.step.shared import Retiming, Shared
from torchstorm.offload.step.tracing import Recorder

_FREE = 1.01  # a plan that takes so little longer than the model's own compute needs nothing better


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A step that has ended.

    Attributes:
        key: of its kind; None where it has saved nothing.
        inputs: of the model.
        base_bytes: device memory that was not the Session's when it began.
        reserve_bytes: optimizer state that did not exist when it ended, where it was measured.
        recorder: what has measured it, if anything has.
        last: the plan that it has followed, maybe not to its end.
        larger: the plan that it had beside, where that is for smaller steps.
        foreseen: the plan that was made for it before it ran.
        mistaken: plans that have a storage made by what did not make it, with its position.
        left_plan: whether it was another step than all before.
        is_planned_for: whether what was measured is for a plan.
        is_exact: whether that is for steps of just these sizes, and not for larger ones.
        is_recorded: whether its operations were recorded.
    """

    key: tuple[Any, ...] | None
    inputs: NoteInputs
    base_bytes: int
    reserve_bytes: int
    recorder: Recorder | Pace | None
    last: Planned | None
    larger: Planned | None
    foreseen: Planned | None
    mistaken: tuple[tuple[Planned, int], ...]
    left_plan: bool
    is_planned_for: bool
    is_exact: bool
    is_recorded: bool

    @property
    def planned(self) -> Planned | None:
        """The plan that it has followed to its end."""
        return self.last if not self.left_plan else None

    def tells_of(self, plans: Plans) -> bool:
        """Whether what was measured is for a plan that steps follow still, or for a new one."""
        is_followed = self.planned is None or plans.has(self.planned)  # else it has shown to exceed the budget
        return self.is_planned_for and is_followed

    def scale_of(self, planned: Planned) -> float:
        """How many times the work of this step its plan is for."""
        return 1.0 if self.is_exact or self.key is None else planned.work_over(self.key)


def conclude(shared: Shared, ended: Ended) -> None:
    """Plans the next steps like one that has ended, where it was measured; compares and chooses the variants of blocks.

    Raises:
        BudgetError: the step needs more than the budget.
    """
    plans, planned, recorder = shared.plans, ended.planned, ended.recorder
    other_variants = shared.compiled is not None and shared.compiled.settle()
    # Whether what blocks do is seen from now on, or no longer: then the next step is measured for the plan.
    is_measured = shared.compiled is not None and shared.compiled.settle_whether_whole()
    if is_measured and planned is None and not other_variants:
        _choose_at_once(shared, ended)
    other_variants |= is_measured
    if ended.left_plan and ended.last is not None and ended.last.is_from_user:
        plans.drop(ended.last)
        shared.planner.lessons.append("The given plan is for another step: a new plan is made for these steps.")
    elif isinstance(recorder, Pace) and planned is not None and shared.planner.is_beside and not other_variants:
        shared.retiming = Retiming(recorder, planned, ended.scale_of(planned))
    elif recorder is not None and ended.key is not None and ended.tells_of(plans) and not other_variants:
        found = _plan_next(shared, ended, recorder)
        is_measured = True  # and planned for, or the next one, in which compiled blocks run otherwise, will be
        if found is not None:
            if planned is None:
                workload = replace(workload_of(shared.model), inputs=ended.inputs.shapes or ())
                found.kind = Kind(ended.key, workload, ended.inputs.num_calls, is_of_rest=ended.left_plan)
            shared.put(found, planned)
            shared.trim()
            planned = found
    if planned is not None and plans.stand_for_smaller(planned):
        shared.measured.plan_changed()
    if planned is not None and recorder is None and not ended.is_exact:
        ask_for_plan(plans, shared.planner, ended.larger or planned, ended.inputs.shapes, shared.buffers())
    if correct(plans, shared.planner, ended.mistaken):
        shared.measured.plan_changed()
    shortfall = shared.residency.shortfall
    if shortfall is not None:
        shared.planner.lessons.append(shared.tiers.judge_shortfall(*shortfall, is_measured=is_measured))


def _choose_at_once(shared: Shared, ended: Ended) -> None:
    """Compiled blocks take other variants after the step that has told whether they are whole, where they were timed by
    themselves. So it is the next one that is planned for, and not the one after that."""
    compiled, recorder = shared.compiled, ended.recorder
    if compiled is None or not isinstance(recorder, Recorder) or not ended.is_planned_for or ended.key is None:
        return
    trace = shared.timed(recorder.trace())
    if compiled.is_timed:
        base_bytes = trace.base_bytes + ended.reserve_bytes
        compiled.rechoose(trace, partial(shared.planner.quick_plan, base_bytes=base_bytes), most=1)


def _plan_next(shared: Shared, ended: Ended, recorder: Recorder | Pace) -> Planned | None:
    """The plan for further steps of this kind, by what this one has measured; None where compiled blocks take other
    variants first.

    Raises:
        BudgetError: none fits.
    """
    planner, planned = shared.planner, ended.planned
    if planned is not None and planned.plan is not None and isinstance(recorder, Pace):
        trace = shared.settled(recorder, planned, planned.plan, ended.scale_of(planned))
    else:
        assert isinstance(recorder, Recorder)
        trace = shared.timed(recorder.refine(planned.trace) if planned is not None else recorder.trace())
    num_measured = planned.num_measured + 1 if planned else 1
    base = ended.base_bytes if planned else trace.base_bytes + ended.reserve_bytes
    blocks = shared.compiled if planned is ended.last else None
    quick_plan = partial(planner.quick_plan, base_bytes=base)
    is_waited_for = planned is None or not planner.is_beside  # else variants are chosen beside training
    if blocks is not None and is_waited_for and blocks.rechoose(trace, quick_plan, most=num_measured):
        shared.plans.drop(planned)
        return None
    blind = planned is None and shared.recompute and not ended.is_recorded
    try:
        foreseen = planned if planned is ended.foreseen and isinstance(recorder, Pace) else None
        found = came_true(foreseen, trace, planner.machine())
        earlier = planned
        if planned is not None and isinstance(recorder, Recorder):  # it has told what memory such steps take
            earlier = replace(planned, margin_bytes=0, is_foreseen=False)
        found = found or planner.plan(trace, base_bytes=base, num_measured=num_measured, earlier=earlier)
        blind = blind and found.forecast.step_ms > trace.compute_s * 1e3 * _FREE
    except BudgetError as error:
        if planned is not None and planned.plan is not None and isinstance(recorder, Pace):
            found = planned  # only times changed: what fitted before still fits
            found.num_measured = num_measured
        elif blocks is not None and blocks.rechoose(trace, quick_plan, is_urgent=True):
            shared.plans.drop(planned)
            return None
        elif not blind and (
            shared.residency.shortfall is not None
            or shared.residency.has_forgotten
            or not shared.tiers.allows(shared.measured.last, base - trace.base_bytes)
        ):
            raise with_part_that_fits(shared, error, ended.inputs) from None
        else:
            # Storages that stay saved after their first use (retain_graph, double backward) may leave again in
            # between, which no plan foresees: such steps go on as this one. Or the next one is recorded.
            assert shared.measured.last is not None
            found = Planned(None, trace, shared.measured.last, base, shared.plans.num_to_measure)
    found.is_unrecorded = blind
    return found


def with_part_that_fits(shared: Shared, error: BudgetError, inputs: NoteInputs) -> BudgetError:
    """The error, with the part of the batch that should fit."""
    return with_micro_batch(
        shared.explained(error),
        num_samples=inputs.num_samples if error.tier == shared.tiers.fast.name else 0,
        fixed_bytes=shared.fixed_bytes(error.tier),
    )
