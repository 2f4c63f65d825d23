"""Times of one step without what happened to disturb it: a kernel that was loaded, a host that came too late.

A model repeats its blocks, so most operations and intervals have many of their kind. What takes far longer than its
kind usually does takes as long as its kind.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from torchstorm.plan.trace import Trace

_FAR = 2.0  # times as long as usual
_FEW = 4  # of a kind, of which nobody knows what is usual
_AROUND = 3  # moments on each side that tell an interval's kind


def typical(trace: Trace) -> Trace:
    """The trace with usual times in place of far longer ones.

    Args:
        trace: of one step, with times as they were measured.
    """
    sizes = [value.nbytes for value in trace.values]
    of_ops = _usual(
        [(op.name, *(sizes[one] for one in op.inputs), -1, *(sizes[one] for one in op.outputs)) for op in trace.ops],
        [op.compute_s for op in trace.ops],
        part=4,  # whatever disturbs an operation makes it longer
    )
    edge = [("", 0)] * _AROUND
    looks = [*edge, *((moment.kind, moment.nbytes) for moment in trace.moments), *edge]
    of_moments = _usual(
        [tuple(looks[at : at + 2 * _AROUND + 1]) for at in range(trace.num_moments)],
        [moment.compute_s for moment in trace.moments],
        part=2,
    )
    return replace(
        trace,
        ops=tuple(replace(op, compute_s=took) for op, took in zip(trace.ops, of_ops, strict=True)),
        moments=tuple(replace(one, compute_s=took) for one, took in zip(trace.moments, of_moments, strict=True)),
    )


def _usual(kinds: Sequence[Hashable], seconds: Sequence[float], *, part: int) -> list[float]:
    """The times, far too long ones of a kind replaced by what the fastest 1/`part` of that kind stay within."""
    by_kind: dict[Hashable, list[float]] = {}
    for kind, took in zip(kinds, seconds, strict=True):
        by_kind.setdefault(kind, []).append(took)
    usual = {kind: sorted(times)[len(times) // part] for kind, times in by_kind.items() if len(times) >= _FEW}
    return [
        usual[kind] if kind in usual and took > _FAR * usual[kind] else took
        for kind, took in zip(kinds, seconds, strict=True)
    ]
