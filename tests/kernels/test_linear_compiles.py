"""The Triton kernels of linear_cross_entropy and linear, compiled for sm_80 and sm_90 without a GPU: nothing spills."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from kernels.compiling import SHARED_BYTES, compiled, usage
from torchstorm.errors import ShapeError
from torchstorm.kernels.linear import blas, gemm_triton, persistent_triton
from torchstorm.kernels.linear_cross_entropy import rows_triton
from torchstorm.kernels.linear_cross_entropy.rows_torch import Options

__all__ = ["compiled"]  # a fixture

# Registers a thread at most, recorded with Triton 3.6.0. With 512 threads 32 of them fill an SM.
ROWS_REGISTERS = {torch.bfloat16: 40, torch.float16: 40, torch.float32: 40}

LAYER_REGISTERS = {
    "naive_kernel": 80,
    "fused_kernel": 255,
    "persistent_kernel": 255,
    "activation_kernel": 72,
    "gradient_kernel": 80,
    "column_sums_kernel": 48,
}


def rows(dtype: torch.dtype, V: int, n: int = 8, *, capped: bool, smoothed: bool) -> None:
    """As the forward pass does with and without gradients, and backward."""
    options = Options(ignore_index=-100, label_smoothing=0.1 if smoothed else 0.0, softcap=5.0 if capped else None)
    logits, target = torch.zeros(n, -(-V // 64) * 64, dtype=dtype)[:, :V], torch.zeros(n, dtype=torch.int64)
    loss, lse, scale = torch.zeros(n), torch.zeros(n), torch.ones(())
    rows_triton.losses(logits, V, target, options, loss, lse, None)
    rows_triton.losses(logits, V, target, options, loss, lse, scale)
    rows_triton.gradients(logits, V, target, options, lse, loss)


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


def test_layers(compiled: list[tuple[str, Any]]) -> None:
    """Of the target's size, forward with all kept, and backward by every rung."""
    x, weight, bias = (torch.zeros(size, dtype=torch.bfloat16) for size in ((256, 128), (512, 128), (512,)))
    for activation in ("gelu", "gelu_tanh"):
        gemm_triton.fused_forward(x, weight, bias, activation, True)
        persistent_triton.forward(x, weight, bias, activation, True)
    gemm_triton.fused_forward(x, weight[:, :127], None, "relu", True)
    gemm_triton.fused_forward(x.float(), weight.float(), bias.float(), "silu", True)
    gemm_triton.naive_forward(x, weight, bias, "gelu", True)
    y, _ = blas.forward(x, weight, bias, "gelu", True)
    for activation, given in (("", bias), ("", None), ("relu", bias), ("silu", None)):
        blas.forward(x, weight, given, activation, False)
    blas.dz_and_dbias(y, y, None, "", "warp-reduced", True)
    blas.dz_and_dbias(y, y, None, "relu", "warp-reduced", False)
    for rung in ("naive", "atomic-free", "warp-reduced"):
        for activation in ("relu", "gelu", "gelu_tanh", "silu"):
            blas.dz_and_dbias(y, y, bias, activation, rung, True)
    for name, kernel in compiled:
        check([(name, kernel)], LAYER_REGISTERS[name])


def test_rows_that_tma_cannot_take_are_refused() -> None:
    x = torch.zeros(16, 33, dtype=torch.bfloat16)
    with pytest.raises(ShapeError, match=r"x \(16, 33\), weight \(64, 33\).*multiples of 8; 'fused' takes any"):
        persistent_triton.forward(x, torch.zeros(64, 33, dtype=torch.bfloat16), None, "", False)


def test_other_rows_compile_nothing_new(compiled: list[tuple[str, Any]]) -> None:
    weight, bias = torch.zeros(512, 128, dtype=torch.bfloat16), torch.zeros(512, dtype=torch.bfloat16)
    seen = []
    for M in (256, 77, 1000):
        compiled.clear()
        x = torch.zeros(M, 128, dtype=torch.bfloat16)
        gemm_triton.naive_forward(x, weight, bias, "gelu", True)
        gemm_triton.fused_forward(x, weight, bias, "gelu", True)
        persistent_triton.forward(x, weight, bias, "gelu", True)
        y, _ = blas.forward(x, weight, bias, "gelu", True)
        blas.dz_and_dbias(y, y, bias, "gelu", "warp-reduced", True)
        seen.append([id(kernel) for _, kernel in compiled])
    assert seen[0] == seen[1] == seen[2]


def check(compiled: list[tuple[str, Any]], most_registers: int) -> None:
    for name, kernel in compiled:
        registers, stack = usage(kernel)
        shared = kernel.metadata.shared
        print(f"{name}: {registers} registers, {stack} bytes of stack, {shared} of shared memory")
        assert registers <= most_registers, f"{name}: {registers} registers, recorded {most_registers}"
        assert stack == 0, f"{name}: {stack} bytes of stack"
        assert shared <= SHARED_BYTES[kernel.metadata.target.arch], f"{name}: {shared} bytes of shared memory"
