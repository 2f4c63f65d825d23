"""The decision: for every parcel of a traced step, where it waits and when it moves. A frozen value; prints, JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from torchstorm.errors import PlanError
from torchstorm.plan.forecast import DISK, KEEP, RAM, Figures, Placement
from torchstorm.plan.trace import Trace, trace_from_dict
from torchstorm.sizes import format_size


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


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a Session does in a step like the traced one.

    Attributes:
        trace: the step it was made from.
        budget: what it keeps to.
        placements: one per parcel of the trace.
        forecast: peak bytes per tier and step time.
    """

    trace: Trace
    budget: Budget
    placements: tuple[Placement, ...]
    forecast: Figures

    def moved_bytes(self, tier: str) -> int:
        """Bytes that one step sends to a tier ("ram" or "disk")."""
        return sum(
            parcel.nbytes
            for parcel, placement in zip(self.trace.parcels, self.placements, strict=True)
            if placement.tier == tier
        )

    @cached_property
    def drops(self) -> dict[int, list[int]]:
        """Parcels whose room on the fast tier is given back, by moment."""
        return self._by_moment("drop")

    @cached_property
    def fetches(self) -> dict[int, list[int]]:
        """Parcels whose copy back begins, by moment."""
        return self._by_moment("fetch")

    def _by_moment(self, field: str) -> dict[int, list[int]]:
        schedule: dict[int, list[int]] = {}
        for number, placement in enumerate(self.placements):
            if placement.tier != KEEP:
                schedule.setdefault(getattr(placement, field), []).append(number)
        return schedule

    def __str__(self) -> str:
        lines = [
            f"{len(self.trace.storages)} saved storages, {format_size(self.trace.saved_bytes)}, "
            f"in {len(self.trace.parcels)} parcels; {self.trace.num_moments} moments",
            f"{'block':<28}{'keep':>12}{'ram':>12}{'disk':>12}",
        ]
        rows: dict[str, dict[str, int]] = {}
        for storage in self.trace.storages:
            tier = KEEP if storage.parcel < 0 else self.placements[storage.parcel].tier
            row = rows.setdefault(outer_block(storage.block), {KEEP: 0, RAM: 0, DISK: 0})
            row[tier] += storage.nbytes
        for block, row in rows.items():
            cells = "".join(f"{format_size(row[tier]) if row[tier] else '-':>12}" for tier in (KEEP, RAM, DISK))
            lines.append(f"{block or '(model)':<28}{cells}")
        sums = [sum(row[tier] for row in rows.values()) for tier in (KEEP, RAM, DISK)]
        total = "".join(f"{format_size(nbytes) if nbytes else '-':>12}" for nbytes in sums)
        lines.append(f"{'total':<28}{total}")
        lines.append(f"{'forecast':<12}{'peak':>12}{'budget':>12}")
        for tier in ("vram", "ram", "disk"):
            peak, limit = getattr(self.forecast, f"{tier}_bytes"), getattr(self.budget, tier)
            if peak or limit:
                lines.append(f"{tier:<12}{format_size(peak):>12}{format_size(limit) if limit else '-':>12}")
        lines.append(f"{'step':<12}{self.forecast.step_ms:>9.1f} ms")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The plan, its trace included, as JSON takes it."""
        return asdict(self)

    def to_json(self) -> str:
        """The same as JSON text."""
        return json.dumps(self.to_dict())

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
            )
        except (ValueError, TypeError, KeyError) as error:
            raise PlanError(f"this is not a plan that torchstorm wrote: {error}") from error
        if len(plan.placements) != len(plan.trace.parcels):
            raise PlanError(
                f"this plan places {len(plan.placements)} parcels, but its trace has {len(plan.trace.parcels)}: it was "
                "changed after it was written."
            )
        return plan


def outer_block(name: str) -> str:
    """The repeated block a module belongs to: "h.3.mlp.c_fc" -> "h.3"; names without a number keep two parts."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return ".".join(parts[:2])
