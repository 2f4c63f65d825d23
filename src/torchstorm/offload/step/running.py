"""What the saved-tensor hooks know of the step that runs: made at its entry, dropped at its exit."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torchstorm.offload.recompute.probe import TracingProbe
from torchstorm.offload.recompute.tape import Tape
from torchstorm.offload.recompute.watched import WatchedCalls
from torchstorm.offload.step.pace import Pace
from torchstorm.offload.step.parcels import Parcel
from torchstorm.offload.step.settled import Settled, Table
from torchstorm.offload.step.tracing import Recorder
from torchstorm.plan.plan import Plan

Choice = tuple[Plan | None, Recorder | Pace | None, bool]
"""The plan to follow, or None; who measures the step, or None; whether the plan is for steps of just these sizes."""


@dataclass(eq=False, kw_only=True, slots=True)
class Running:
    """The state of a step; of none, as long as none runs.

    Attributes:
        in_step: whether a step runs.
        fixed: addresses of storages that never move: parameters and buffers.
        inputs: the model's inputs by storage address, which the reference keeps taken.
        choose: called at the first save; None after it.
        moment: number of the latest moment.
        num_saved: storages saved so far.
        call_begins: the number of the first storage that the running autograd.Function saves.
        plan: the plan that is followed; None where it is decided on the spot.
        is_exact: whether it is for steps of just these sizes; else none may be larger.
        left_plan: whether the step turned out to be another one than its plan is for.
        numbered: parcels by their number in the plan.
        settled: the short way; None where the long one is taken.
        recorder: measures the step.
        pace: measures only what a settled step takes.
        tape: records its operations.
        watched: within which calls it does so; None where it sees all of the step.
        table: of the plan that is followed.
        probe: finds out what of them can run again.
        open: the buffer that takes the next small storage.
        blocks: names of the modules that run, innermost last.
    """

    in_step: bool = False
    fixed: set[int] = field(default_factory=set)
    inputs: dict[int, StorageWeakRef] = field(default_factory=dict)
    choose: Callable[[tuple[Any, ...]], Choice] | None = None
    moment: int = 0
    num_saved: int = 0
    call_begins: int = 0
    plan: Plan | None = None
    is_exact: bool = True
    left_plan: bool = False
    numbered: dict[int, Parcel] = field(default_factory=dict)
    settled: Settled | None = None
    recorder: Recorder | None = None
    pace: Pace | None = None
    tape: Tape | None = None
    watched: WatchedCalls | None = None
    table: Table | None = None
    probe: TracingProbe | None = None
    open: Parcel | None = None
    blocks: list[str] = field(default_factory=list)

    def set_up_tape(self, device: torch.device, *, room_bytes: Callable[[], int]) -> None:
        """The step's plan is known now, or that it is traced: so is what its operations are recorded for.

        Args:
            device: the fast device.
            room_bytes: what may be allocated on it beside all that is there.
        """
        tape, recorder = self.tape, self.recorder
        if tape is None:
            return
        if recorder is not None:
            recorder.calls = tape.calls
            if self.plan is None:
                self.probe = tape.probe = TracingProbe(device, aside=recorder.aside, room_bytes=room_bytes)
        elif self.table is None or not self.table.operations:
            tape.clear()
        else:
            if self.pace is not None:
                self.pace.calls, tape.mark = tape.calls, self.pace.mark
            else:
                tape.mark = None
            self.record_only(self.table.operations, self.table.calls)

    def record_only(self, operations: Collection[int], calls: Collection[int]) -> None:
        """From now on the tape records these operations, which run within these calls; where it sees all, it records
        all."""
        if self.tape is not None and self.watched is not None:
            self.tape.wanted = operations
            self.watched.record_within(calls)
