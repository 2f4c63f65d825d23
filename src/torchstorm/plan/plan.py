"""A plan: for every parcel of a traced step, its tier and the moments of its copies. Immutable; prints, JSON."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from torchstorm.errors import PlanError
from torchstorm.paths import user_path, write_document
from torchstorm.plan.describe import describe
from torchstorm.plan.forecast import KEEP, Figures, Placement
from torchstorm.plan.machine import Machine
from torchstorm.plan.recompute import RECOMPUTE
from torchstorm.plan.trace import Trace, trace_from_dict


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """The memory limit of each tier in bytes; 0 for no tier.

    Attributes:
        vram: peak of allocated device memory within a step, weights included. Unused on CPU.
        ram: pinned arena and staging on CUDA; saved storages, prefetched ones and staging on CPU.
        disk: bytes in spill files.
    """

    vram: int = 0
    ram: int = 0
    disk: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The model and batch that a plan is for.

    Attributes:
        model: name of the model's class, for messages.
        num_parameters: number of elements of all parameters; tied ones count once.
        shapes_sha256: hash of the names, shapes and dtypes of all parameters and buffers.
        inputs: shape and dtype of each input tensor, as in "4x128 int64".
    """

    model: str
    num_parameters: int
    shapes_sha256: str
    inputs: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a Session does with each saved tensor in a step like the traced one.

    Attributes:
        trace: the traced step.
        budget: the memory limits.
        placements: one per parcel of the trace.
        forecast: peak bytes per tier, and step time.
        notes: remarks for the user, such as that the planner ran out of time.
        machine: the machine of the forecast; None if unknown.
        simulated: whether the trace was computed from the model's shapes instead of measured on that machine.
        workload: the model and batch; None if unknown.
    """

    trace: Trace
    budget: Budget
    placements: tuple[Placement, ...]
    forecast: Figures
    notes: tuple[str, ...] = ()
    machine: Machine | None = None
    simulated: bool = False
    workload: Workload | None = None

    @property
    def tiers(self) -> tuple[str, ...]:
        """What becomes of each parcel: its placement's tier."""
        return tuple(one.tier for one in self.placements)

    def moved_bytes(self, tier: str) -> int:
        """Bytes that a step moves to a tier ("ram" or "disk")."""
        return sum(
            parcel.nbytes
            for parcel, placement in zip(self.trace.parcels, self.placements, strict=True)
            if placement.tier == tier
        )

    @property
    def num_moved(self) -> int:
        """Number of storages that move to a slower tier."""
        return sum(
            parcel.num_storages
            for parcel, placement in zip(self.trace.parcels, self.placements, strict=True)
            if placement.tier not in (KEEP, RECOMPUTE)
        )

    def maker(self, ordinal: int) -> tuple[int, str]:
        """Number and name of the operation that creates a storage; equal in steps with the same operations."""
        op = self.trace.ops[self.trace.values[self.trace.storages[ordinal].value].op]
        return op.number, op.name

    @cached_property
    def drops(self) -> dict[int, list[int]]:
        """Moment -> parcels whose memory on the fast tier is freed."""
        return self._by_moment("drop")

    @cached_property
    def fetches(self) -> dict[int, list[int]]:
        """Moment -> parcels whose copy back starts, in the order in which they are needed."""
        parcels = self.trace.parcels
        return {
            moment: sorted(numbers, key=lambda number: (parcels[number].needed, number))
            for moment, numbers in self._by_moment("fetch").items()
        }

    @cached_property
    def recomputes(self) -> bool:
        """Whether any parcel is recomputed."""
        return any(placement.tier == RECOMPUTE for placement in self.placements)

    def _by_moment(self, field: str) -> dict[int, list[int]]:
        schedule: dict[int, list[int]] = {}
        for number, placement in enumerate(self.placements):
            if placement.tier not in (KEEP, RECOMPUTE):
                schedule.setdefault(getattr(placement, field), []).append(number)
        return schedule

    def __str__(self) -> str:
        return describe(
            self.trace,
            self.placements,
            self.forecast,
            asdict(self.budget),
            machine=self.machine,
            simulated=self.simulated,
            notes=self.notes,
        )

    def to_dict(self) -> dict[str, Any]:
        """The plan with its trace as a dictionary for JSON."""
        return asdict(self)

    def to_json(self) -> str:
        """The plan with its trace as JSON text."""
        return json.dumps(self.to_dict())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan to a file. The file is replaced atomically.

        Raises:
            ConfigError: `path` is no path.
            StorageError: the file cannot be written.
        """
        write_document(path, self.to_json(), name="The plan")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Reads a file that `save` wrote.

        Raises:
            ConfigError: `path` is no path.
            PlanError: the file does not exist, or is not a plan.
        """
        path = user_path(path, name="plan")
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(
                f"The plan {path} cannot be read: {error}. Give a file that Plan.save() wrote, or create "
                "one with torchstorm.plan(...) or `torchstorm plan --json FILE`."
            ) from error
        try:
            return Plan.from_json(text)
        except PlanError as error:
            raise PlanError(
                f"{path}: {str(error).rstrip(chr(46))}. Write it again: torchstorm.plan(...).save(...)."
            ) from error

    @staticmethod
    def from_json(text: str) -> Plan:
        """Parses the text of `to_json`.

        Raises:
            PlanError: the text is not a plan.
        """
        try:
            fields = json.loads(text)
            plan = Plan(
                trace=trace_from_dict(fields["trace"]),
                budget=Budget(**fields["budget"]),
                placements=tuple(Placement(**placement) for placement in fields["placements"]),
                forecast=Figures(**fields["forecast"]),
                machine=Machine(**fields["machine"]) if fields["machine"] else None,
                simulated=bool(fields["simulated"]),
                workload=_workload(fields["workload"]),
                notes=tuple(fields["notes"]),
            )
        except (ValueError, TypeError, KeyError) as error:
            raise PlanError(f"the text is not a plan written by torchstorm: {error}") from error
        if len(plan.placements) != len(plan.trace.parcels):
            raise PlanError(
                f"the plan has {len(plan.placements)} placements, but its trace has {len(plan.trace.parcels)} parcels: "
                "it was changed after it was written."
            )
        return plan


def _workload(fields: dict[str, Any] | None) -> Workload | None:
    return None if fields is None else Workload(**{**fields, "inputs": tuple(fields["inputs"])})
