"""Programmatic dependent launch, from Hopper on: a kernel of an operation starts before the previous one has ended.

A kernel that is followed by another signals at its start that the next one may launch. The next kernel waits, before
its first memory access, until the previous one has ended and its writes are visible. So the launch latency overlaps
with the end of the previous kernel. The waiting blocks occupy resources, so the next kernel must be small or the last.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def next_may_begin(CHAINED: tl.constexpr):
    """Of a kernel that another follows."""
    if CHAINED:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(CHAINED: tl.constexpr):
    """Of a kernel that follows, launched with `rows.following`."""
    if CHAINED:
        gdc_wait()
