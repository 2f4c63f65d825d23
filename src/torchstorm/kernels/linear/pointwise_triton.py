"""The operations besides the matrix products: bias, activation and its gradient, and row sums for the bias's gradient.

All are bound by memory; each docstring says how often M x N elements are read and written. Arithmetic in fp32. Sums
have a fixed order, so results are deterministic; atomics would add in the order in which programs end.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchstorm.kernels.linear import activations_triton as activations

BLOCK_ROWS = 4
BLOCK_COLUMNS = 512
NUM_WARPS = 4
ROWS = 16  # rows per program of the activation
SUM_ROWS = 128  # rows per program of the sums


@triton.jit(do_not_specialize=["M"])
def activation_kernel(
    z_ptr, bias_ptr, y_ptr, M, N, ACTIVATION: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y = act(z + bias), which may be z's own place: z read, y written."""
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    bias = tl.zeros([BLOCK_N], tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + column, mask=column < N, other=0.0).to(tl.float32)
    for start in tl.static_range(0, ROWS, BLOCK_M):
        row = tl.program_id(0).to(tl.int64) * ROWS + start + tl.arange(0, BLOCK_M)
        at = row[:, None] * N + column[None, :]
        mask = (row < M)[:, None] & (column < N)[None, :]
        z = tl.load(z_ptr + at, mask=mask, other=0.0).to(tl.float32) + bias[None, :]
        y = activations.activate(z, ACTIVATION, y_ptr.dtype.element_ty != tl.float32)
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def gradient_kernel(
    dy_ptr, kept_ptr, bias_ptr, dz_ptr, sums_ptr, M, N, ACTIVATION: tl.constexpr, SUMS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dz = dy act'(kept + bias): both read, dz written; with SUMS each program's sum over its rows in passing."""
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    bias = tl.zeros([BLOCK_N], tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + column, mask=column < N, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, ROWS, BLOCK_M):
        row = tl.program_id(0).to(tl.int64) * ROWS + start + tl.arange(0, BLOCK_M)
        at = row[:, None] * N + column[None, :]
        mask = (row < M)[:, None] & (column < N)[None, :]
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        kept = tl.load(kept_ptr + at, mask=mask, other=0.0).to(tl.float32) + bias[None, :]
        dz = activations.activation_gradient(dy, kept, ACTIVATION, dz_ptr.dtype.element_ty != tl.float32)
        tl.store(dz_ptr + at, dz.to(dz_ptr.dtype.element_ty), mask=mask)
        if SUMS:
            total += tl.where(mask, dz, 0.0)
    if SUMS:
        tl.store(sums_ptr + tl.program_id(0).to(tl.int64) * N + column, tl.sum(total, 0), mask=column < N)


@triton.jit(do_not_specialize=["M", "rows"])
def column_sums_kernel(x_ptr, sums_ptr, M, N, rows, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The sum over each run of so many rows of x (M, N): x read, M / rows sums of every column written."""
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(0).to(tl.int64) * rows
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, rows, BLOCK_M):
        row = first + start + tl.arange(0, BLOCK_M)
        mask = (row < tl.minimum(first + rows, M))[:, None] & (column < N)[None, :]
        total += tl.load(x_ptr + row[:, None] * N + column[None, :], mask=mask, other=0.0).to(tl.float32)
    at = tl.program_id(0).to(tl.int64) * N + column
    tl.store(sums_ptr + at, tl.sum(total, 0).to(sums_ptr.dtype.element_ty), mask=column < N)


def activate(z: Tensor, bias: Tensor | None, activation: str, y: Tensor) -> Tensor:
    """Fills y (M, N) with act(z + bias)."""
    M, N = z.shape
    activation_kernel[(triton.cdiv(M, ROWS), triton.cdiv(N, BLOCK_COLUMNS))](
        z, bias, y, M, N, ACTIVATION=activation, ROWS=ROWS, BLOCK_M=BLOCK_ROWS, BLOCK_N=BLOCK_COLUMNS,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    return y


def gradient(
    dy: Tensor, kept: Tensor, bias: Tensor | None, activation: str, *, sums: bool
) -> tuple[Tensor, Tensor | None]:
    """dz (M, N); with `sums` also its sums over each 128 rows, in fp32."""
    M, N = dy.shape
    dz = torch.empty_like(dy)
    partial = dy.new_empty((triton.cdiv(M, SUM_ROWS), N), dtype=torch.float32) if sums else None
    gradient_into(dz, partial, dy, kept, activation, bias)
    return dz, partial


def gradient_into(
    dz: Tensor, sums: Tensor | None, dy: Tensor, kept: Tensor, activation: str, bias: Tensor | None = None
) -> None:
    """Fills dz (M, N), and the first M / 128 rows of `sums` if given. All tensors are contiguous."""
    M, N = dy.shape
    gradient_kernel[(triton.cdiv(M, SUM_ROWS), triton.cdiv(N, BLOCK_COLUMNS))](
        dy, kept, bias, dz, sums, M, N, ACTIVATION=activation, SUMS=sums is not None, ROWS=SUM_ROWS,
        BLOCK_M=BLOCK_ROWS, BLOCK_N=BLOCK_COLUMNS, num_warps=NUM_WARPS,
    )  # fmt: skip


def column_sums(x: Tensor, rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Sums over each group of `rows` rows: (M / rows, N)."""
    M, N = x.shape
    num = triton.cdiv(M, rows)
    sums = x.new_empty((num, N), dtype=dtype)
    block = 128
    column_sums_kernel[(num, triton.cdiv(N, block))](x, sums, M, N, rows, BLOCK_M=16, BLOCK_N=block, num_warps=4)
    return sums
