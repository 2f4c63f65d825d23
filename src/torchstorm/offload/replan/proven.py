"""Whether a plan that was found to be better is, by what steps take that follow it."""

from __future__ import annotations

from dataclasses import replace

from torchstorm.offload.replan.planned import NOISE, NUM_JUDGED, Planned


def as_it_was(earlier: Planned, planned: Planned) -> tuple[Planned, str] | None:
    """The plan that another one has replaced, if its steps took less, whatever was forecast, and what to say of that;
    else None. The fastest ones tell: what disturbs the host, as the search for the new plan itself, only adds, and may
    last for seconds."""
    earlier_s, measured_s = min(one.step_s for one in earlier.recent), min(planned.times_s)
    if earlier.plan is None or planned.plan is None or measured_s <= earlier_s * (1 + NOISE):
        return None
    if earlier.plan.placements == planned.plan.placements:
        return None
    said = (
        f"Steps took {measured_s * 1e3:.1f} ms by a new plan, and {earlier_s * 1e3:.1f} ms by the one before it, "
        "which is back."
    )
    forecast = replace(earlier.forecast, step_ms=earlier_s * 1e3)
    was = replace(
        earlier,
        plan=replace(earlier.plan, forecast=forecast),
        forecast=forecast,
        num_lessons=planned.num_lessons + 1,
        times_s=[],
        asked=None,
        is_quick=planned.is_quick,
    )
    return was, said


def last_proven(planned: Planned) -> Planned | None:
    """The last plan, up to this one, whose steps have shown what it takes."""
    return planned if len(planned.recent) == NUM_JUDGED else planned.replaced
