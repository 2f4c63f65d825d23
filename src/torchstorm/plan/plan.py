"""The decision: for every parcel of a traced step, where it waits and when it moves. A frozen value; prints, JSON."""

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
    """Bytes that may be taken on each tier; 0 where there is none.

    Attributes:
        vram: peak of allocated device memory within a step, weights and all. Unused on CPU.
        ram: on CUDA pinned arena and staging; on CPU saved storages with staging and prefetched ones.
        disk: bytes in spill files.
    """

    vram: int = 0
    ram: int = 0
    disk: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """What a plan is for, as far as it tells one model and batch from another.

    Attributes:
        model: the class's name, for people.
        num_parameters: elements of all parameters, tied ones once.
        shapes_sha256: of the names, shapes and types of all parameters and buffers.
        inputs: shape and type of every tensor that the model was given, as in "4x128 int64".
    """

    model: str
    num_parameters: int
    shapes_sha256: str
    inputs: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a Session does in a step like the traced one.

    Attributes:
        trace: the step it was made from.
        budget: what it keeps to.
        placements: one per parcel of the trace.
        forecast: peak bytes per tier and step time.
        notes: what the user should know, such as that the planner ran out of time.
        machine: whose speeds the forecast has; None where they were not kept.
        simulated: whether the trace was computed from the model's shapes instead of measured on that machine.
        subject: the model and batch; None where they were not noted.
    """

    trace: Trace
    budget: Budget
    placements: tuple[Placement, ...]
    forecast: Figures
    notes: tuple[str, ...] = ()
    machine: Machine | None = None
    simulated: bool = False
    subject: Subject | None = None

    def moved_bytes(self, tier: str) -> int:
        """Bytes that one step sends to a tier ("ram" or "disk")."""
        return sum(
            parcel.nbytes
            for parcel, placement in zip(self.trace.parcels, self.placements, strict=True)
            if placement.tier == tier
        )

    def maker(self, ordinal: int) -> tuple[int, int]:
        """Number and signature of the operation that makes a storage; where a step's differ, it came another way."""
        op = self.trace.ops[self.trace.values[self.trace.storages[ordinal].value].op]
        return op.number, op.signature

    @cached_property
    def drops(self) -> dict[int, list[int]]:
        """Parcels whose room on the fast tier is given back, by moment."""
        return self._by_moment("drop")

    @cached_property
    def fetches(self) -> dict[int, list[int]]:
        """Parcels whose copy back begins, by moment, in the order in which they are needed."""
        parcels = self.trace.parcels
        return {
            moment: sorted(numbers, key=lambda number: (parcels[number].needed, number))
            for moment, numbers in self._by_moment("fetch").items()
        }

    @cached_property
    def recomputes(self) -> bool:
        """Whether anything is computed again."""
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
        """The plan, its trace included, as JSON takes it."""
        return asdict(self)

    def to_json(self) -> str:
        """The same as JSON text."""
        return json.dumps(self.to_dict())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan, so that whoever reads `path` at any moment finds a whole file: this one or the one before.

        Raises:
            ConfigError: `path` is no path.
            StorageError: the file cannot be written.
        """
        write_document(path, self.to_json(), name="The plan")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Reads what `save` wrote.

        Raises:
            ConfigError: `path` is no path.
            PlanError: there is no such file, or it is not a plan.
        """
        path = user_path(path, name="plan")
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(
                f"The plan {path} cannot be read: {error}. Give a file that Plan.save() wrote, or make one "
                "with torchstorm.plan(...) or `torchstorm plan --json FILE`."
            ) from error
        try:
            return Plan.from_json(text)
        except PlanError as error:
            raise PlanError(
                f"{path}: {str(error).rstrip(chr(46))}. Make it anew with torchstorm.plan(...).save(...)."
            ) from error

    @staticmethod
    def from_json(text: str) -> Plan:
        """Reads what `to_json` wrote.

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
                subject=_subject(fields["subject"]),
                notes=tuple(fields["notes"]),
            )
        except (ValueError, TypeError, KeyError) as error:
            raise PlanError(f"this is not a plan that torchstorm wrote: {error}") from error
        if len(plan.placements) != len(plan.trace.parcels):
            raise PlanError(
                f"this plan places {len(plan.placements)} parcels, but its trace has {len(plan.trace.parcels)}: it was "
                "changed after it was written."
            )
        return plan


def _subject(fields: dict[str, Any] | None) -> Subject | None:
    return None if fields is None else Subject(**{**fields, "inputs": tuple(fields["inputs"])})
