"""Chooses a variant for every compiled block; `plan.solve` then moves what the blocks save.

One measured step gives the times and the memory of all blocks in their current variants. For others its trace is
rewritten.

The first blocks' tensors are needed last, when the gradients exist. So only mixes are tried in which they save least.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from torchstorm.errors import BudgetError
from torchstorm.plan.mixed import as_measured, mixed_trace, span_of, warm_trace
from torchstorm.plan.plan import Plan
from torchstorm.plan.trace import Trace
from torchstorm.plan.typical import LATE, without_waiting
from torchstorm.plan.variants import VARIANTS, BlockTable


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A variant for every block.

    Attributes:
        variants: variant by block.
        step_ms: forecast step time; None if no mix was found within the budget, and the one with the least memory was
            taken.
        measured_ms: the same of the mix that the traced step ran in; None if no plan for that is within the budget.
        num_tried: number of mixes that were planned.
    """

    variants: dict[str, str]
    step_ms: float | None
    measured_ms: float | None
    num_tried: int


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Compiled blocks that variants are to be chosen for.

    Attributes:
        tables: of each.
        measured: the variant of each in the traced step.
        memory_bytes_per_s: approximate rate at which element-wise operations write.
    """

    tables: Sequence[BlockTable]
    measured: Mapping[str, str]
    memory_bytes_per_s: float

    def timed_alone(self, trace: Trace, ran_once: Collection[str]) -> Trace:
        """The trace of a step whose every moment was marked, with blocks that take what they take a GPU by themselves
        where it has waited for the host. Those that were not timed stay as they are.

        Args:
            trace: of the step.
            ran_once: names of blocks that were called once in it; of others it is not known which call saved what.
        """
        moments, blocks_s = list(trace.moments), list[tuple[str, float]]()
        for table in self.tables:
            measured = self.measured[table.name]
            variant = as_measured(trace, table, measured).nearest(measured)
            span = span_of(trace, trace.storages, table.name)
            if span is None or not variant.forward_s or table.name not in ran_once:
                continue
            blocks_s.append((table.name, variant.forward_s))
            (at,) = span.backward()
            if moments[at].compute_s > LATE * variant.backward_s:
                moments[at] = replace(moments[at], compute_s=variant.backward_s)
        return without_waiting(replace(trace, moments=tuple(moments), blocks_s=tuple(blocks_s)))


def choose_variants(
    trace: Trace,
    blocks: Blocks,
    plan_of: Callable[[Trace], Plan | None],
    *,
    max_tries: int = 60,
    max_seconds: float = 10.0,
) -> Choice:
    """Finds the fastest mix whose plan is within the budget.

    Args:
        trace: a measured step.
        blocks: of the step.
        plan_of: plans a trace within the budget; None or BudgetError if that is impossible.
        max_tries, max_seconds: limits of the search; the best mix found by then is returned.
    """
    num, measured, memory_bytes_per_s = len(blocks.tables), blocks.measured, blocks.memory_bytes_per_s
    tables = sorted(
        (as_measured(trace, table, measured[table.name]) for table in blocks.tables),
        key=lambda table: trace.first_save(table.name),
    )  # in the order of forward
    trace = warm_trace(trace, tables, measured)
    stop = time.monotonic() + max_seconds
    scores: dict[tuple[str, ...], tuple[int, float]] = {}  # by the variants of the blocks

    def names(cuts: tuple[int, ...]) -> dict[str, str]:
        """The variant of block i is the number of cuts after it."""
        return {
            table.name: table.nearest(VARIANTS[sum(index < cut for cut in cuts)]).name
            for index, table in enumerate(tables)
        }

    def planned(variants: dict[str, str], than_ms: float = inf) -> tuple[int, float]:
        """0 and the time in ms of a step in this mix, or 1 and the bytes that it needs where no plan fits. Where its
        compute alone takes no less than `than_ms`, it is not planned, and its time is not known: 1 and infinity."""
        mix = tuple(variants.values())
        if mix not in scores:
            mixed = mixed_trace(trace, tables, measured, variants, memory_bytes_per_s=memory_bytes_per_s)
            if mixed.compute_s * 1e3 >= than_ms:
                return 1, inf
            try:
                plan = plan_of(mixed)
                scores[mix] = (1, inf) if plan is None else (0, plan.forecast.step_ms)
            except BudgetError as error:
                scores[mix] = (1, float(error.needed_bytes))
        return scores[mix]

    def score(cuts: tuple[int, ...]) -> tuple[int, float]:
        best_ms = min((ms for does_not_fit, ms in scores.values() if not does_not_fit), default=inf)
        return planned(names(cuts), best_ms)

    num_cuts = len(VARIANTS) - 1
    best = min(
        (tuple(num if level <= lean else 0 for level in range(1, num_cuts + 1)) for lean in range(num_cuts + 1)),
        key=score,
    )
    step = 1 << max(0, num.bit_length() - 1)
    while step and len(scores) <= max_tries and time.monotonic() < stop:
        better = min((moved for moved in _neighbours(best, step, num)), key=score, default=best)
        # Differences below a tenth of a percent are within the forecast's error.
        if score(better) < (score(best)[0], score(best)[1] * 0.999):
            best = better
        else:
            step //= 2
    feasible = score(best)[0] == 0
    does_not_fit, measured_ms = planned({table.name: table.nearest(measured[table.name]).name for table in tables})
    return Choice(
        variants=names(best if feasible else (num,) * num_cuts),
        step_ms=score(best)[1] if feasible else None,
        measured_ms=None if does_not_fit else measured_ms,
        num_tried=len(scores),
    )


def _neighbours(cuts: tuple[int, ...], step: int, num: int) -> list[tuple[int, ...]]:
    """Mixes with one cut moved. Other cuts are moved along to keep their order."""
    found = []
    for place in range(len(cuts)):
        for delta in (-step, step):
            to = min(max(cuts[place] + delta, 0), num)
            moved = [max(cut, to) for cut in cuts[:place]] + [to] + [min(cut, to) for cut in cuts[place + 1 :]]
            if tuple(moved) != cuts:
                found.append(tuple(moved))
    return found
