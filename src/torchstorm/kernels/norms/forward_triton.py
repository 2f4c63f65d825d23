"""LayerNorm and RMSNorm forward in Triton: "naive", "online", "fused" and "persistent"; see `function.py`.

x, y (M, N) with contiguous columns, x with any stride of rows; weight, bias (N,) or None; mean, rstd (M,) in fp32. A
tile is (ROWS, BLOCK), computed in fp32. CENTRED for LayerNorm; RMSNorm writes no mean.

The rounding error of a mean in fp32 is large relative to the spread if rows are constant or far from 0. So the variance
is that of x - mean, and the mean of x - mean, `rest`, is subtracted, too.
Imported only with a GPU or Triton's interpreter.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from torchstorm.kernels.rows_triton import load, middle, multiple


@triton.jit
def vector(p_ptr, column, N, NOTHING: tl.constexpr, FULL: tl.constexpr = False):
    """A tile's part of weight or bias in fp32; `NOTHING` where there is none. FULL: all columns are inside."""
    if p_ptr is None:
        p = tl.full(column.shape, NOTHING, tl.float32)
    elif FULL:
        p = tl.load(p_ptr + column).to(tl.float32)
    else:
        p = tl.load(p_ptr + column, mask=column < N, other=0.0).to(tl.float32)
    return p


@triton.jit
def _mean(total, N):
    """total / N to the last bit. A plain quotient would be a product that the compiler adds without rounding it first,
    and what is left of equal numbers without their mean would no longer be a few units in their last place."""
    return tl.div_rn(total, tl.zeros_like(total) + N)


@triton.jit
def _inverse_root(variance, eps):
    return tl.div_rn(1.0, tl.sqrt_rn(variance + eps))


@triton.jit
def _store(at, inside, y, STREAM: tl.constexpr, FULL: tl.constexpr):
    y = y.to(at.dtype.element_ty)
    if FULL:
        tl.store(at, y)
    elif STREAM:
        tl.store(at, y, mask=inside, cache_modifier=".cs")
    else:
        tl.store(at, y, mask=inside)


@triton.jit
def _write(y_ptr, row, column, inside, y, N, STREAM: tl.constexpr):
    _store(y_ptr + row[:, None] * N + column[None, :], inside, y, STREAM, False)


@triton.jit
def _write_statistics(mean_ptr, rstd_ptr, row, mean, rstd, M, CENTRED: tl.constexpr):
    """Where backward will need them."""
    if mean_ptr is not None:
        if CENTRED:
            tl.store(mean_ptr + row, mean, mask=row < M)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + row, rstd, mask=row < M)


@triton.jit(do_not_specialize=["M"])
def naive_forward_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, M, N, x_row, eps, CENTRED: tl.constexpr, BLOCK: tl.constexpr
):
    """One program a row; a pass over it for the mean, one for the variance, one to write."""
    row = tl.program_id(0) + tl.arange(0, 1).to(tl.int64)
    x_ptr += tl.program_id(0).to(tl.int64) * x_row
    block = tl.arange(0, BLOCK)
    first = tl.zeros([1], tl.float32)
    rest = tl.zeros([1], tl.float32)
    if CENTRED:
        total = tl.zeros([1, BLOCK], tl.float32)
        for start in range(0, N, BLOCK):
            column = (start + block)[None, :]
            total += tl.load(x_ptr + column, mask=column < N, other=0.0).to(tl.float32)
        first = _mean(tl.sum(total, axis=1), N)
    total = tl.zeros([1, BLOCK], tl.float32)
    squares = tl.zeros([1, BLOCK], tl.float32)
    for start in range(0, N, BLOCK):
        column = (start + block)[None, :]
        x = tl.load(x_ptr + column, mask=column < N, other=0.0).to(tl.float32)
        left = tl.where(column < N, x - first[:, None], 0.0)
        total += left
        squares += left * left
    if CENTRED:
        rest = _mean(tl.sum(total, axis=1), N)
    variance = tl.maximum(tl.sum(squares, axis=1) / N - rest * rest, 0.0, propagate_nan=tl.PropagateNan.ALL)
    rstd = _inverse_root(variance, eps)
    _write_statistics(mean_ptr, rstd_ptr, row, first + rest, rstd, M, CENTRED)
    for start in range(0, N, BLOCK):
        column = start + block
        inside = (column < N)[None, :]
        x = tl.load(x_ptr + column[None, :], mask=inside, other=0.0).to(tl.float32)
        left = x - first[:, None] - rest[:, None]
        y = left * rstd[:, None] * vector(w_ptr, column, N, 1.0)[None, :] + vector(b_ptr, column, N, 0.0)[None, :]
        _write(y_ptr, row, column, inside, y, N, STREAM=False)


@triton.jit(do_not_specialize=["M"])
def online_forward_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, M, N, x_row, eps, CENTRED: tl.constexpr, BLOCK: tl.constexpr
):
    """Programs that walk over the rows. A block's columns have means and spreads of their own that meet at the end."""
    block = tl.arange(0, BLOCK)
    for row_number in range(tl.program_id(0), M, tl.num_programs(0)):
        row = row_number + tl.arange(0, 1).to(tl.int64)
        first = tl.zeros([1], tl.float32)
        rest = tl.zeros([1], tl.float32)
        mean = tl.zeros([1, BLOCK], tl.float32)
        spread = tl.zeros([1, BLOCK], tl.float32)
        count = 0.0
        for start in range(0, N, BLOCK):
            column = (start + block)[None, :]
            at = x_ptr + row[:, None] * x_row + column
            x = tl.load(at, mask=column < N, other=0.0, eviction_policy="evict_last").to(tl.float32)
            if CENTRED:
                count += 1.0
                step = tl.where(column < N, x - mean, 0.0)
                mean += step * tl.div_rn(1.0, count)
                spread += step * tl.where(column < N, x - mean, 0.0)
            else:
                spread += x * x
        if CENTRED:
            # Of each column: how many numbers it has seen.
            counts = ((N - block + BLOCK - 1) // BLOCK).to(tl.float32)[None, :]
            first = _mean(tl.sum(counts * mean, axis=1), N)
            off = mean - first[:, None]
            rest = _mean(tl.sum(counts * off, axis=1), N)
            off -= rest[:, None]
            spread += counts * off * off
        rstd = _inverse_root(tl.sum(spread, axis=1) / N, eps)
        _write_statistics(mean_ptr, rstd_ptr, row, first + rest, rstd, M, CENTRED)
        for start in range(0, N, BLOCK):
            column = start + block
            inside = (column < N)[None, :]
            at = x_ptr + row[:, None] * x_row + column[None, :]
            x = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
            left = x - first[:, None] - rest[:, None]
            y = left * rstd[:, None] * vector(w_ptr, column, N, 1.0)[None, :] + vector(b_ptr, column, N, 0.0)[None, :]
            _write(y_ptr, row, column, inside, y, N, STREAM=True)


@triton.jit
def _statistics(x, inside, N, eps, CENTRED: tl.constexpr, SHORT: tl.constexpr):
    """Mean, in two parts, and rstd of rows that lie in registers as wholes.

    SHORT numbers, as bf16 are, need no second part: so few digits add up without rounding where they are alike, up to
    2^16 of them, and where they are not, they are further apart than a mean in fp32 is off.
    """
    first = tl.zeros([x.shape[0]], tl.float32)
    rest = first
    if CENTRED:
        first = _mean(tl.sum(x, axis=1), N)
        left = tl.where(inside, x - first[:, None], 0.0)
        variance = tl.sum(left * left, axis=1) / N
        if not SHORT:
            rest = _mean(tl.sum(left, axis=1), N)
            variance = tl.maximum(variance - rest * rest, 0.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        variance = tl.sum(x * x, axis=1) / N
    return first, rest, _inverse_root(variance, eps)


@triton.jit
def _normalized(x, first, rest, rstd, CENTRED: tl.constexpr, SHORT: tl.constexpr):
    if CENTRED:
        x -= first[:, None]
        if not SHORT:
            x -= rest[:, None]
    return x * rstd[:, None]


@triton.jit
def added(x_0, x_1, y_0, y_1):
    return x_0 + y_0, x_1 + y_1


@triton.jit
def _moments(x_ptr, near, N, CENTRED: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, FULL: tl.constexpr):
    """Mean and variance of what is left of a row without `near`; of RMSNorm 0 and the row's mean square."""
    total = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, TILES * BLOCK, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = load(x_ptr + column, column < N, 0.0, FULL, "evict_last")
        if CENTRED:
            x -= near
            if not FULL:
                x = tl.where(column < N, x, 0.0)
            total += x
        squares += x * x
    rest = 0.0
    if CENTRED:
        sum_x, sum_squares = tl.reduce((total, squares), 0, added)
        rest = _mean(sum_x, N)
        variance = tl.maximum(sum_squares / N - rest * rest, 0.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        variance = tl.sum(squares, axis=0) / N
    return rest, variance


@triton.jit(do_not_specialize=["M"])
def fused_forward_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, M, N, x_row, eps, CENTRED: tl.constexpr, BLOCK: tl.constexpr,
    TILES: tl.constexpr, UNIT: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """One program a row, in TILES of BLOCK numbers, which it reads again, from L1: few registers, so many programs.

    Mean and variance come from one pass, of distances from the middle one of three numbers of the row. Where that is so
    far off that they leave squares FAR times the variance, there is another one, of distances from the mean.
    Sizes are multiples of UNIT. FULL: whole tiles.
    """
    N, x_row = multiple(N, UNIT), multiple(x_row, UNIT)
    SHORT: tl.constexpr = x_ptr.dtype.element_ty == tl.bfloat16
    FAR: tl.constexpr = 1.0 if x_ptr.dtype.element_ty == tl.float32 else 16.0
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_row
    y_ptr += row * N
    first = 0.0
    if CENTRED:
        first = middle(tl.load(x_ptr), tl.load(x_ptr + N // 2), tl.load(x_ptr + N - 1)).to(tl.float32)
    rest, variance = _moments(x_ptr, first, N, CENTRED, BLOCK, TILES, FULL)
    if CENTRED:
        # Where squares overflow the variance is infinite, or not a number.
        if (rest * rest > FAR * variance) | (variance == float("inf")) | (variance != variance):
            first += rest
            rest, variance = _moments(x_ptr, first, N, CENTRED, BLOCK, TILES, FULL)
        mean = first + rest
        if SHORT:
            rest = 0.0
        else:  # what the sum was rounded by (Knuth): x - mean is short, and rounded by little
            part = mean - first
            rest = (first - (mean - part)) + (rest - part)
        first = mean
        if mean_ptr is not None:
            tl.store(mean_ptr + row, mean)
    rstd = _inverse_root(variance, eps)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + row, rstd)
    for start in tl.range(0, TILES * BLOCK, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = load(x_ptr + column, column < N, 0.0, FULL, "evict_first")
        if CENTRED:
            x -= first
            if not SHORT:
                x -= rest
        y = x * rstd * vector(w_ptr, column, N, 1.0, FULL) + vector(b_ptr, column, N, 0.0, FULL)
        _store(y_ptr + column, column < N, y, False, FULL)


@triton.jit(do_not_specialize=["M"])
def persistent_forward_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, M, N, x_row, eps, CENTRED: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Programs that walk over the rows, some at a time, and load the weights once."""
    SHORT: tl.constexpr = x_ptr.dtype.element_ty == tl.bfloat16
    column = tl.arange(0, BLOCK)
    w, b = vector(w_ptr, column, N, 1.0), vector(b_ptr, column, N, 0.0)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        inside = (row < M)[:, None] & (column < N)[None, :]
        x = load(x_ptr + row[:, None] * x_row + column[None, :], inside, 0.0, False, "")
        first, rest, rstd = _statistics(x, inside, N, eps, CENTRED, SHORT)
        _write_statistics(mean_ptr, rstd_ptr, row, first + rest, rstd, M, CENTRED)
        x_hat = _normalized(x, first, rest, rstd, CENTRED, SHORT)
        _write(y_ptr, row, column, inside, x_hat * w[None, :] + b[None, :], N, STREAM=False)
