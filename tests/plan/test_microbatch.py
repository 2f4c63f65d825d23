"""The micro-batch that would fit, from the trace of a batch that does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plan.traces import blocks_trace
from torchstorm.errors import BudgetError
from torchstorm.plan.machine import Machine
from torchstorm.plan.microbatch import largest_micro_batch, scaled
from torchstorm.plan.plan import Budget
from torchstorm.plan.solve import solve
from torchstorm.plan.trace import Trace

MIB = 2**20
LINK = Machine(name="link", d2h_bytes_per_s=1e10, h2d_bytes_per_s=1e10)
WEIGHTS = 100 * MIB


def trace_of_batch(samples: int) -> Trace:
    """Blocks whose saved tensors and temporaries grow with the batch, beside weights that do not."""
    trace = blocks_trace(4, 3, nbytes=samples * MIB)
    moments = tuple(
        replace(moment, other_bytes=WEIGHTS + samples * 2 * MIB, still_bytes=WEIGHTS) for moment in trace.moments
    )
    return replace(trace, moments=moments, base_bytes=WEIGHTS)


@pytest.mark.parametrize("samples", [1, 3, 8, 16])
def test_a_part_of_a_batch_leaves_the_trace_that_is_foreseen(samples: int) -> None:
    part, real = scaled(trace_of_batch(16), samples / 16), trace_of_batch(samples)
    assert [m.other_bytes for m in part.moments] == [m.other_bytes for m in real.moments]
    assert [m.signature for m in part.moments] == [m.signature for m in real.moments]
    assert (part.storages, part.parcels) == (real.storages, real.parcels)


@pytest.mark.parametrize("budget_mib", [110, 120, 150, 190])
def test_the_size_named_fits_and_one_more_sample_does_not(budget_mib: int) -> None:
    budget = Budget(vram=budget_mib * MIB, ram=2**33)
    most = largest_micro_batch(trace_of_batch(64), LINK, budget, 64)
    assert 0 < most < 64
    solve(trace_of_batch(most), LINK, budget)
    with pytest.raises(BudgetError):
        solve(trace_of_batch(most + 1), LINK, budget)


def test_where_the_weights_alone_do_not_fit_no_size_does() -> None:
    assert largest_micro_batch(trace_of_batch(64), LINK, Budget(vram=90 * MIB, ram=2**33), 64) == 0


def test_a_batch_that_fits_is_named_whole() -> None:
    assert largest_micro_batch(trace_of_batch(8), LINK, Budget(vram=2**33, ram=2**33), 8) == 8


def test_without_a_tier_to_move_to_only_what_is_kept_counts() -> None:
    budget = Budget(vram=160 * MIB)
    most = largest_micro_batch(trace_of_batch(64), LINK, budget, 64)
    assert most == 2  # 4 blocks of 1 + 2 + 3 MiB a sample and 2 MiB beside: 26 MiB a sample, in 60 MiB
