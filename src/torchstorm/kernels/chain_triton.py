"""Kernels of one operation that begin while the one before still ends: programmatic dependent launch, from Hopper on.

A kernel that others follow says at once that the next may begin; that one waits, before it reads or writes anything,
until all of the one before is done and seen. So the next kernel's blocks stand ready when the last of the one before
go, and a launch's time passes meanwhile. What follows must be small or come last: its waiting blocks take room.
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
