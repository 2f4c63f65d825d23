"""What the steps of one Session share, since it lives longer than a step."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from copy import copy
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from torchstorm.errors import BudgetError
from torchstorm.offload import torch_private as private
from torchstorm.offload.budget import Tiers
from torchstorm.offload.compiled.compile import CompiledBlocks
from torchstorm.offload.loss.by_rows import LossesByRows
from torchstorm.offload.misuse import Watch
from torchstorm.offload.replan.explain import with_settled_forward
from torchstorm.offload.replan.measured import Measured
from torchstorm.offload.replan.planned import NUM_JUDGED, Planned
from torchstorm.offload.replan.planner import Planner
from torchstorm.offload.replan.plans import Plans
from torchstorm.offload.state.optimizer_state import OptimizerState
from torchstorm.offload.step.clock import Clock
from torchstorm.offload.step.garbage import collect_early
from torchstorm.offload.step.hooks import SavedTensors
from torchstorm.offload.step.inputs import ModelTensors
from torchstorm.offload.step.pace import Pace
from torchstorm.offload.step.residency import Residency
from torchstorm.offload.step.saving import buffers_of
from torchstorm.plan.choose import Blocks, Choice
from torchstorm.plan.forecast import KEEP
from torchstorm.plan.packing import Buffers
from torchstorm.plan.plan import Plan
from torchstorm.plan.trace import Trace
from torchstorm.sizes import format_size


class Retiming(NamedTuple):
    """What a step has measured that followed its plan.

    Attributes:
        pace: what it took.
        planned: its plan.
        scale: as much more work as the plan is for.
    """

    pace: Pace
    planned: Planned
    scale: float


class Unfinished(NamedTuple):
    """What follows from a step that has ended.

    Attributes:
        key: of its kind.
        conclusion: concludes that.
    """

    key: Hashable
    conclusion: Callable[[], None]


@dataclass(eq=False, kw_only=True)
class Shared:
    """The parts of a Session that its steps work with.

    Attributes:
        model: what is trained.
        tensors: of the model.
        state: of the optimizer.
        tiers: budget and tiers.
        recompute: whether tensors may be recomputed.
        unlimited: whether everything is kept.
        clock: marks times on the device.
        residency: what is where, and moves it.
        saved: the saved-tensor hooks.
        plans: by kind of step.
        planner: makes them.
        watch: notices misuse.
        losses: of the model.
        measured: what steps took.
        compiled: the model's compiled blocks; None for none.
        runs_compiled: whether Dynamo has compiled something that steps run, besides those.
        base_bytes: device memory that was not the Session's when the last step began.
        retiming: what a step has measured that followed its plan, until the device has come to its end.
        unfinished: of the last step, where it waits for the next one to begin.
        refused: by kind of step, why such a step needs more than the budget, as has shown when the next one began.
    """

    model: torch.nn.Module
    tensors: ModelTensors
    state: OptimizerState
    tiers: Tiers
    recompute: bool
    unlimited: bool
    clock: Clock
    residency: Residency
    saved: SavedTensors
    plans: Plans
    planner: Planner
    watch: Watch
    losses: LossesByRows
    measured: Measured = field(default_factory=Measured)
    compiled: CompiledBlocks | None = None
    runs_compiled: bool = False
    base_bytes: int = 0
    retiming: Retiming | None = None
    unfinished: Unfinished | None = None
    refused: dict[Hashable, BudgetError] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """The fast device."""
        return self.tiers.fast.device

    def buffers(self) -> Buffers:
        """What is put together where a step is decided on the spot."""
        return buffers_of(self.residency.limit_bytes, can_move=self.residency.default_tier != KEEP)

    def num_compiled(self) -> int:
        """How many graphs Dynamo has captured so far, besides those of the compiled blocks."""
        return private.num_compiled() - (self.compiled.num_compiled if self.compiled is not None else 0)

    def conclude(self, conclusion: Callable[[], None], *, key: Hashable, was_measured: bool) -> None:
        """Concludes what follows from a step that has ended. Where compiled blocks may run once more for that, to be
        compared and timed, and the budget has no room for it beside all gradients, it waits for `finish`.

        Args:
            conclusion: does so.
            key: of the step's kind.
            was_measured: whether the step was.

        Raises:
            BudgetError: the step, or the last such one that has waited, needs more than the budget.
        """
        compiled = self.compiled
        runs_blocks = compiled is not None and compiled.compares and (was_measured or compiled.is_to_compare)
        if runs_blocks and not self._has_room():
            if key in self.refused:
                raise copy(self.refused[key])
            self.unfinished = Unfinished(key, conclusion)
            return
        conclusion()
        if runs_blocks:
            self.measured.note_vram(self.tiers.fast.peak_bytes())

    def finish(self) -> None:
        """Concludes, as a step begins, what has waited since the last one."""
        if self.compiled is None or (self.unfinished is None and not self.planner.has_chosen):
            return
        waiting, self.unfinished = self.unfinished, None
        self.compiled.has_room = self._has_room()
        try:
            if waiting is not None:
                try:
                    waiting.conclusion()
                except BudgetError as error:  # not of the step that begins: the next such one raises it at its end
                    self.refused[waiting.key] = copy(error)  # without frames, which hold tensors
            self.learn(is_between=True)
        finally:
            self.compiled.has_room = True
            self.measured.note_vram(self.tiers.fast.peak_bytes())
            self.tiers.fast.reset_peak()

    def _has_room(self) -> bool:
        """Whether compiled blocks may run by themselves beside what is allocated now."""
        needed = self.compiled.needed_bytes if self.compiled is not None else 0
        return needed <= self.tiers.fast.unused_bytes(self.residency.limit_bytes)

    def take_better(self) -> None:
        """Takes over a plan that was found beside training."""
        if self.retiming is None and self.planner.take_better():
            self._changed()

    def learn(self, *, is_between: bool = False) -> None:
        """Compares the steps that have ended with the forecast of the plan in force.

        It is called as a step ends: a GPU is then still at work, as a rule, with what backward gave it. At a step's
        begin it would wait for this.

        Args:
            is_between: whether it is called as a step begins: no gradients are in the way of compiled blocks then.
        """
        if self.unfinished is not None:
            return
        if self.retiming is not None:
            if not self.retiming.pace.is_reached:
                return
            self._retime(*self.retiming)
        if self.planner.learn(self.measured.new_times(), self.measured.new_vram_bytes()):
            self._changed()
        if self.planner.has_chosen and (is_between or self._has_room()):
            self._take_choice(*self.planner.take_choice())
        planned = self.plans.in_force
        if self.compiled is None or planned is None or not planned.is_proven or not self.plans.has(planned):
            return
        if self.compiled.go_back(planned.kind, planned.took_s):
            self.plans.drop(planned)

    def _changed(self) -> None:
        self.measured.plan_changed()
        self.trim()

    def _retime(self, pace: Pace, planned: Planned, scale: float) -> None:
        """A plan goes on with the times of a step that has followed it, and a better one is searched for."""
        self.retiming = None
        plans, planner = self.plans, self.planner
        if planned.plan is None or not plans.has(planned):
            return
        trace = self.settled(pace, planned, planned.plan, scale)
        blocks = self.compiled.to_choose(trace) if self.compiled is not None else None
        num_measured = planned.num_measured + 1
        found = planner.retimed(planned, planned.plan, trace, num_measured=num_measured, blocks=blocks)
        self.put(found, planned)
        self.trim()
        if plans.stand_for_smaller(found):
            self.measured.plan_changed()

    def _take_choice(self, planned: Planned, blocks: Blocks, choice: Choice) -> None:
        """Compiled blocks take variants that were found to be better beside training, if they are worth it.

        Args:
            planned: of the step by which they were chosen.
            blocks: as they were then.
            choice: of these.
        """
        now = self.plans.now(planned)  # what has been learnt meanwhile may have replaced it
        if self.compiled is None or now is None:
            return
        is_of_now = not self.compiled.fixed and blocks.measured == self.compiled.variants
        took_s = now.took_s if len(now.recent) == NUM_JUDGED else None
        is_taken = is_of_now and self.compiled.take(choice, now.kind, took_s)
        if is_taken:
            self.plans.drop(now)
        else:
            others = self.compiled.to_choose(now.trace) if is_taken is None else None
            self.planner.search_after_choice(now, others)

    def timed(self, trace: Trace) -> Trace:
        """A step's trace with what compiled blocks take a GPU by themselves, if there are any."""
        fast = self.tiers.fast
        return self.compiled.timed(trace, fast) if self.compiled is not None and fast.is_beside_host else trace

    def settled(self, pace: Pace, planned: Planned, plan: Plan, scale: float) -> Trace:
        """A trace with the times of a step that has followed a plan. The host of that step came late, as it timed every
        operation; that of the steps before it did not, so their forward tells how long it is at most.

        Args:
            pace, planned, scale: as in `Retiming`.
            plan: that it has followed.
        """
        timed = pace.refine(planned.trace, plan, self.planner.machine(), scale=scale)
        steps = self.measured.new_times() if self.plans.in_force is planned else []  # else they are of another kind
        seen = with_settled_forward(timed, plan, steps)
        return seen if seen.forward_s < timed.forward_s else timed

    def put(self, planned: Planned, instead_of: Planned | None = None) -> None:
        """Steps follow this plan from now on, maybe in another one's place."""
        if self.plans.in_force is None:
            collect_early(planned.trace.num_moments)
        self.plans.put(planned, instead_of)
        self.measured.plan_changed()

    def trim(self) -> None:
        """Gives pinned memory back that no plan has a use for, once the steps of the one in force were timed; until
        then others may be traced, which take more."""
        if self.plans.in_force is None or not self.plans.is_measured_again(self.plans.in_force):
            self.tiers.trim(self.plans.most_ram_bytes())

    def fixed_bytes(self, tier: str) -> int:
        """What a step needs on a tier however small its batch is, as far as is known; what plans keep free included."""
        spare: int = getattr(self.tiers.spare, tier)
        if tier != self.tiers.fast.name:
            return spare
        return self.base_bytes + self.reserve_bytes() + self.residency.staging_bytes + spare

    def explained(self, error: BudgetError) -> BudgetError:
        """The error, with what is kept free for an optimizer that nobody named."""
        reserved = self.reserve_bytes()
        if error.tier != self.tiers.fast.name or self.state.optimizer() is not None or not reserved:
            return error
        return error.with_reason(
            f"{format_size(reserved)} of that are kept free for the state of an optimizer that this Session does not "
            "know. Session(model, optimizer=optimizer, ...) keeps free what yours will take: nothing, if that is there."
        )

    def reserve_bytes(self) -> int:
        """Optimizer state that does not exist yet and will."""
        if not self.tiers.fast.counts_all or (self.state.optimizer() is None and self.measured.num_steps > 1):
            return 0
        return self.state.missing_bytes()
