"""Softmax and log-softmax of rows in Triton: "naive", "online", "fused" and "persistent"; see `function.py`.

x, y, dy, dx (M, N) with contiguous columns and any stride of rows, y and dx contiguous; fp32, fp16 or bf16, computed in
fp32. A tile is (ROWS, BLOCK). The mask is uint8, or None for no mask; its row r starts at
    r // inner_rows // middle_rows * outer + r // inner_rows % middle_rows * middle + r % inner_rows * inner,
so a broadcast mask is not expanded.
Imported only with a GPU or Triton's interpreter.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from torchstorm.kernels.elementwise.operations_triton import exp
from torchstorm.kernels.rows_triton import load, multiple

_ROW_COUNTS = ["M", "middle_rows", "inner_rows"]  # other values need no recompilation
_LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _seen(mask_ptr, row, column, inside, middle_rows, inner_rows, outer, middle, inner, columns):
    seen = inside
    if mask_ptr is not None:
        begin = row // inner_rows // middle_rows * outer + row // inner_rows % middle_rows * middle
        begin += row % inner_rows * inner
        at = mask_ptr + begin[:, None] + column[None, :] * columns
        seen = inside & (tl.load(at, mask=inside, other=0) != 0)
    return seen


@triton.jit
def _write(y_ptr, row, column, inside, y, N, STREAM: tl.constexpr):
    at = y_ptr + row[:, None] * N + column[None, :]
    if STREAM:
        tl.store(at, y.to(y_ptr.dtype.element_ty), mask=inside, cache_modifier=".cs")
    else:
        tl.store(at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _of_row(x, mask_ptr, seen, m, total, LOG: tl.constexpr):
    """y of a tile from x, -inf where it is hidden, and what its rows have in all."""
    if LOG:
        y = x - m[:, None] - tl.log(total)[:, None]
    else:
        y = exp(x - m[:, None]) * (1 / total)[:, None]
    if mask_ptr is not None:
        y = tl.where(seen, y, float("-inf") if LOG else 0.0)
    return y


@triton.jit
def _gradient(dy, y, seen, total, LOG: tl.constexpr):
    """dx of a tile; `total` is the sum over its rows of dy y, for log-softmax of dy."""
    if LOG:
        dx = tl.where(seen, dy - exp(y) * total[:, None], 0.0)
    else:
        dx = y * (dy - total[:, None])
    return dx


@triton.jit(do_not_specialize=_ROW_COUNTS)
def naive_forward_kernel(
    x_ptr, mask_ptr, y_ptr, M, N, x_row, middle_rows, inner_rows, outer, middle, inner, columns, LOG: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row, three passes over it."""
    row = tl.program_id(0) + tl.arange(0, 1).to(tl.int64)
    block = tl.arange(0, BLOCK)
    top = tl.full([1, BLOCK], float("-inf"), tl.float32)
    for start in range(0, N, BLOCK):
        column = start + block
        inside = (column < N)[None, :]
        seen = _seen(mask_ptr, row, column, inside, middle_rows, inner_rows, outer, middle, inner, columns)
        x = tl.load(x_ptr + row[:, None] * x_row + column[None, :], mask=seen, other=float("-inf")).to(tl.float32)
        top = tl.maximum(top, x)
    m = tl.max(top, axis=1)
    total = tl.zeros([1, BLOCK], tl.float32)
    for start in range(0, N, BLOCK):
        column = start + block
        inside = (column < N)[None, :]
        seen = _seen(mask_ptr, row, column, inside, middle_rows, inner_rows, outer, middle, inner, columns)
        x = tl.load(x_ptr + row[:, None] * x_row + column[None, :], mask=seen, other=float("-inf")).to(tl.float32)
        total += tl.where(seen, exp(x - m[:, None]), 0.0)
    total = tl.sum(total, axis=1)
    for start in range(0, N, BLOCK):
        column = start + block
        inside = (column < N)[None, :]
        seen = _seen(mask_ptr, row, column, inside, middle_rows, inner_rows, outer, middle, inner, columns)
        x = tl.load(x_ptr + row[:, None] * x_row + column[None, :], mask=seen, other=float("-inf")).to(tl.float32)
        _write(y_ptr, row, column, inside, _of_row(x, mask_ptr, seen, m, total, LOG), N, STREAM=False)


@triton.jit(do_not_specialize=_ROW_COUNTS)
def naive_backward_kernel(
    dy_ptr, y_ptr, mask_ptr, dx_ptr, M, N, dy_row, middle_rows, inner_rows, outer, middle, inner, columns,
    LOG: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row, two passes over it."""
    row = tl.program_id(0) + tl.arange(0, 1).to(tl.int64)
    block = tl.arange(0, BLOCK)
    total = tl.zeros([1, BLOCK], tl.float32)
    for start in range(0, N, BLOCK):
        column = start + block
        inside = (column < N)[None, :]
        seen = _seen(mask_ptr, row, column, inside, middle_rows, inner_rows, outer, middle, inner, columns)
        dy = tl.load(dy_ptr + row[:, None] * dy_row + column[None, :], mask=seen, other=0.0).to(tl.float32)
        if LOG:
            total += dy
        else:
            total += dy * tl.load(y_ptr + row[:, None] * N + column[None, :], mask=inside, other=0.0).to(tl.float32)
    total = tl.sum(total, axis=1)
    for start in range(0, N, BLOCK):
        column = start + block
        inside = (column < N)[None, :]
        seen = _seen(mask_ptr, row, column, inside, middle_rows, inner_rows, outer, middle, inner, columns)
        dy = tl.load(dy_ptr + row[:, None] * dy_row + column[None, :], mask=seen, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + row[:, None] * N + column[None, :], mask=inside, other=0.0).to(tl.float32)
        _write(dx_ptr, row, column, inside, _gradient(dy, y, seen, total, LOG), N, STREAM=False)


@triton.jit(do_not_specialize=_ROW_COUNTS)
def online_forward_kernel(
    x_ptr, mask_ptr, y_ptr, M, N, x_row, middle_rows, inner_rows, outer, middle, inner, columns, LOG: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Programs that walk over the rows. A block's columns have maxima and sums of their own, which meet at the end.

    The maximum begins at the lowest number, not at -inf, of which -inf - -inf would make NaN.
    """
    block = tl.arange(0, BLOCK)
    for row_number in range(tl.program_id(0), M, tl.num_programs(0)):
        row = row_number + tl.arange(0, 1).to(tl.int64)
        top = tl.full([1, BLOCK], _LOWEST, tl.float32)
        total = tl.zeros([1, BLOCK], tl.float32)
        for start in range(0, N, BLOCK):
            column = start + block
            inside = (column < N)[None, :]
            seen = _seen(mask_ptr, row, column, inside, middle_rows, inner_rows, outer, middle, inner, columns)
            at = x_ptr + row[:, None] * x_row + column[None, :]
            x = tl.load(at, mask=seen, other=float("-inf"), eviction_policy="evict_last").to(tl.float32)
            # One exponential for both cases: it scales the sum down, or is what x adds to it.
            e = exp(-tl.abs(x - top))
            total = tl.where(x > top, total * e + 1, total + e)
            top = tl.maximum(top, x)
        m = tl.max(top, axis=1)
        total = tl.sum(total * exp(top - m[:, None]), axis=1)
        for start in range(0, N, BLOCK):
            column = start + block
            inside = (column < N)[None, :]
            seen = _seen(mask_ptr, row, column, inside, middle_rows, inner_rows, outer, middle, inner, columns)
            at = x_ptr + row[:, None] * x_row + column[None, :]
            x = tl.load(at, mask=seen, other=float("-inf"), eviction_policy="evict_first").to(tl.float32)
            _write(y_ptr, row, column, inside, _of_row(x, mask_ptr, seen, m, total, LOG), N, STREAM=True)


@triton.jit(do_not_specialize=_ROW_COUNTS)
def online_backward_kernel(
    dy_ptr, y_ptr, mask_ptr, dx_ptr, M, N, dy_row, middle_rows, inner_rows, outer, middle, inner, columns,
    LOG: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Programs that walk over the rows, with two passes over each, the second from L2."""
    block = tl.arange(0, BLOCK)
    for row_number in range(tl.program_id(0), M, tl.num_programs(0)):
        row = row_number + tl.arange(0, 1).to(tl.int64)
        total = tl.zeros([1, BLOCK], tl.float32)
        for start in range(0, N, BLOCK):
            column = start + block
            inside = (column < N)[None, :]
            seen = _seen(mask_ptr, row, column, inside, middle_rows, inner_rows, outer, middle, inner, columns)
            at = dy_ptr + row[:, None] * dy_row + column[None, :]
            dy = tl.load(at, mask=seen, other=0.0, eviction_policy="evict_last").to(tl.float32)
            if LOG:
                total += dy
            else:
                at = y_ptr + row[:, None] * N + column[None, :]
                total += dy * tl.load(at, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        total = tl.sum(total, axis=1)
        for start in range(0, N, BLOCK):
            column = start + block
            inside = (column < N)[None, :]
            seen = _seen(mask_ptr, row, column, inside, middle_rows, inner_rows, outer, middle, inner, columns)
            at = dy_ptr + row[:, None] * dy_row + column[None, :]
            dy = tl.load(at, mask=seen, other=0.0, eviction_policy="evict_first").to(tl.float32)
            at = y_ptr + row[:, None] * N + column[None, :]
            y = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
            _write(dx_ptr, row, column, inside, _gradient(dy, y, seen, total, LOG), N, STREAM=True)


@triton.jit
def _forward_rows(
    x_ptr, mask_ptr, y_ptr, row, M, N, x_row, middle_rows, inner_rows, outer, middle, inner, columns,
    LOG: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows that lie in registers as wholes."""
    column = tl.arange(0, BLOCK)
    inside = (row < M)[:, None] & (column < N)[None, :]
    seen = _seen(mask_ptr, row, column, inside, middle_rows, inner_rows, outer, middle, inner, columns)
    x = tl.load(x_ptr + row[:, None] * x_row + column[None, :], mask=seen, other=float("-inf")).to(tl.float32)
    m = tl.max(x, axis=1)
    total = tl.sum(tl.where(seen, exp(x - m[:, None]), 0.0), axis=1)
    _write(y_ptr, row, column, inside, _of_row(x, mask_ptr, seen, m, total, LOG), N, STREAM=False)


@triton.jit
def _backward_rows(
    dy_ptr, y_ptr, mask_ptr, dx_ptr, row, M, N, dy_row, middle_rows, inner_rows, outer, middle, inner, columns,
    LOG: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows that lie in registers as wholes."""
    column = tl.arange(0, BLOCK)
    inside = (row < M)[:, None] & (column < N)[None, :]
    seen = _seen(mask_ptr, row, column, inside, middle_rows, inner_rows, outer, middle, inner, columns)
    dy = tl.load(dy_ptr + row[:, None] * dy_row + column[None, :], mask=seen, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + row[:, None] * N + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if LOG:
        total = tl.sum(dy, axis=1)
    else:
        total = tl.sum(dy * y, axis=1)
    _write(dx_ptr, row, column, inside, _gradient(dy, y, seen, total, LOG), N, STREAM=False)


@triton.jit(do_not_specialize=_ROW_COUNTS)
def fused_forward_kernel(
    x_ptr, mask_ptr, y_ptr, M, N, x_row, middle_rows, inner_rows, outer, middle, inner, columns, LOG: tl.constexpr,
    BLOCK: tl.constexpr, TILES: tl.constexpr, EACH: tl.constexpr, UNIT: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """One program a row, in TILES of BLOCK numbers, which it reads again, from L1: few registers, so many programs.

    A thread's EACH numbers share a maximum: that is an exponential for each number, and one more for all of them. They
    are side by side where sizes are multiples of as many, as UNIT says; else a thread has every so many of a tile.
    FULL: whole tiles, and no mask.
    """
    N, x_row = multiple(N, UNIT), multiple(x_row, UNIT)
    row = tl.program_id(0) + tl.arange(0, 1).to(tl.int64)
    x_ptr += tl.program_id(0).to(tl.int64) * x_row
    block = tl.arange(0, BLOCK)
    top = tl.full([BLOCK // EACH], _LOWEST, tl.float32)
    total = tl.zeros([BLOCK // EACH], tl.float32)
    for start in tl.range(0, TILES * BLOCK, BLOCK):
        column = start + block
        inside = (column < N)[None, :]
        seen = _seen(mask_ptr, row, column, inside, middle_rows, inner_rows, outer, middle, inner, columns)
        x = load(x_ptr + column[None, :], seen, float("-inf"), FULL, "evict_last")
        before = top
        if UNIT == EACH:
            x = tl.reshape(x, [BLOCK // EACH, EACH])
            top = tl.maximum(top, tl.max(x, axis=1))
            total = total * exp(before - top) + tl.sum(exp(x - top[:, None]), axis=1)
        else:
            x = tl.reshape(x, [EACH, BLOCK // EACH])
            top = tl.maximum(top, tl.max(x, axis=0))
            total = total * exp(before - top) + tl.sum(exp(x - top[None, :]), axis=0)
    m = tl.max(top, axis=0)[None]
    total = tl.sum(total * exp(top - m), axis=0)[None]
    for start in tl.range(0, TILES * BLOCK, BLOCK):
        column = start + block
        inside = (column < N)[None, :]
        seen = _seen(mask_ptr, row, column, inside, middle_rows, inner_rows, outer, middle, inner, columns)
        x = load(x_ptr + column[None, :], seen, float("-inf"), FULL, "evict_first")
        _write(y_ptr, row, column, inside, _of_row(x, mask_ptr, seen, m, total, LOG), N, STREAM=False)


@triton.jit(do_not_specialize=_ROW_COUNTS)
def fused_backward_kernel(
    dy_ptr, y_ptr, mask_ptr, dx_ptr, M, N, dy_row, middle_rows, inner_rows, outer, middle, inner, columns,
    LOG: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, UNIT: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """One program a row, in tiles that it reads again, from L1, as forward does."""
    N, dy_row = multiple(N, UNIT), multiple(dy_row, UNIT)
    row = tl.program_id(0) + tl.arange(0, 1).to(tl.int64)
    dy_ptr += tl.program_id(0).to(tl.int64) * dy_row
    y_ptr += tl.program_id(0).to(tl.int64) * N
    block = tl.arange(0, BLOCK)
    total = tl.zeros([1, BLOCK], tl.float32)
    for start in tl.range(0, TILES * BLOCK, BLOCK):
        column = start + block
        inside = (column < N)[None, :]
        seen = _seen(mask_ptr, row, column, inside, middle_rows, inner_rows, outer, middle, inner, columns)
        dy = load(dy_ptr + column[None, :], seen, 0.0, FULL, "evict_last")
        if LOG:
            total += dy
        else:
            total += dy * load(y_ptr + column[None, :], inside, 0.0, FULL, "evict_last")
    total = tl.sum(total, axis=1)
    for start in tl.range(0, TILES * BLOCK, BLOCK):
        column = start + block
        inside = (column < N)[None, :]
        seen = _seen(mask_ptr, row, column, inside, middle_rows, inner_rows, outer, middle, inner, columns)
        dy = load(dy_ptr + column[None, :], seen, 0.0, FULL, "evict_first")
        y = load(y_ptr + column[None, :], inside, 0.0, FULL, "evict_first")
        _write(dx_ptr, row, column, inside, _gradient(dy, y, seen, total, LOG), N, STREAM=False)


@triton.jit(do_not_specialize=_ROW_COUNTS)
def persistent_forward_kernel(
    x_ptr, mask_ptr, y_ptr, M, N, x_row, middle_rows, inner_rows, outer, middle, inner, columns, LOG: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Programs that walk over the rows, some at a time."""
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        _forward_rows(
            x_ptr, mask_ptr, y_ptr, row, M, N, x_row, middle_rows, inner_rows, outer, middle, inner, columns, LOG, BLOCK
        )


@triton.jit(do_not_specialize=_ROW_COUNTS)
def persistent_backward_kernel(
    dy_ptr, y_ptr, mask_ptr, dx_ptr, M, N, dy_row, middle_rows, inner_rows, outer, middle, inner, columns,
    LOG: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Programs that walk over the rows, some at a time."""
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        _backward_rows(
            dy_ptr, y_ptr, mask_ptr, dx_ptr, row, M, N, dy_row, middle_rows, inner_rows, outer, middle, inner, columns,
            LOG, BLOCK,
        )  # fmt: skip
