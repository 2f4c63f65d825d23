"""The Triton kernels of linear_cross_entropy and linear, compiled for sm_80 and sm_90 without a GPU: nothing spills."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from kernels.compiling import SHARED_BYTES, compiled, usage
from torchstorm.kernels.linear_cross_entropy import rows_triton
from torchstorm.kernels.linear_cross_entropy.rows_torch import Options

__all__ = ["compiled"]  # a fixture

# Registers a thread at most, recorded with Triton 3.6.0. With 512 threads 32 of them fill an SM.
ROWS_REGISTERS = {torch.bfloat16: 40, torch.float16: 40, torch.float32: 40}


def rows(dtype: torch.dtype, V: int, n: int = 8, *, capped: bool, smoothed: bool) -> None:
    """As the forward pass does with and without gradients, and backward."""
    options = Options(ignore_index=-100, label_smoothing=0.1 if smoothed else 0.0, softcap=5.0 if capped else None)
    logits, target = torch.zeros(n, -(-V // 64) * 64, dtype=dtype)[:, :V], torch.zeros(n, dtype=torch.int64)
    loss, lse, scale = torch.zeros(n), torch.zeros(n), torch.ones(())
    rows_triton.losses(logits, target, options, loss, lse, None)
    rows_triton.losses(logits, target, options, loss, lse, scale)
    rows_triton.gradients(logits, target, options, lse, loss)


@pytest.mark.parametrize(
    ("compiled", "dtype", "capped", "smoothed"),
    [
        (90, torch.bfloat16, False, False),
        (90, torch.float32, True, True),
        (80, torch.bfloat16, True, True),
        (80, torch.float16, False, False),
    ],
    indirect=["compiled"],
)
def test_the_softmax_of_rows(compiled: list[tuple[str, Any]], dtype: torch.dtype, capped: bool, smoothed: bool) -> None:
    rows(dtype, 131072, capped=capped, smoothed=smoothed)
    check(compiled, ROWS_REGISTERS[dtype])
    assert [name for name, _ in compiled] == ["rows_kernel"] * 3
    first = {id(kernel) for _, kernel in compiled}
    for V in (50257, 128256, 99999):  # whole groups are read whatever V is
        rows(dtype, V, 3, capped=capped, smoothed=smoothed)
    assert {id(kernel) for _, kernel in compiled} - first == {id(kernel) for _, kernel in compiled[3:6]} - first
    ptx = compiled[5][1].asm["ptx"]
    assert "v4" in ptx, "rows are read 16 bytes at a time"


def check(compiled: list[tuple[str, Any]], most_registers: int) -> None:
    for name, kernel in compiled:
        registers, stack = usage(kernel)
        shared = kernel.metadata.shared
        print(f"{name}: {registers} registers, {stack} bytes of stack, {shared} of shared memory")
        assert registers <= most_registers, f"{name}: {registers} registers, recorded {most_registers}"
        assert stack == 0, f"{name}: {stack} bytes of stack"
        assert shared <= SHARED_BYTES[kernel.metadata.target.arch], f"{name}: {shared} bytes of shared memory"
