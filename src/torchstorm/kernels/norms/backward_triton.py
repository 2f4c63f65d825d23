"""LayerNorm and RMSNorm backward in Triton: dx and dw separately, or "persistent", both at once; see `function.py`.

x, dy, dx (M, N) with contiguous columns, x and dy with any stride of rows; weight (N,) or None; mean, rstd (M,) in
fp32. parts_w, parts_b (P, N) in fp32 are sums over the rows of each of P programs or spans; None if not required.
Imported only with a GPU or Triton's interpreter.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from torchstorm.kernels.chain_triton import next_may_begin, wait_for_previous
from torchstorm.kernels.norms.forward_triton import added, vector


@triton.jit
def load_rows(p_ptr, row, column, p_row, inside, EVICT: tl.constexpr):
    """A tile in fp32, 0 outside."""
    at = p_ptr + row[:, None] * p_row + column[None, :]
    return tl.load(at, mask=inside, other=0.0, eviction_policy=EVICT).to(tl.float32)


@triton.jit
def _widened_again(x):
    """x in fp32, for bf16 in other words than `to`: else the compiler keeps the first copy in registers until here."""
    if x.dtype == tl.bfloat16:
        wide = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = x.to(tl.float32)
    return wide


@triton.jit
def load_statistics(mean_ptr, rstd_ptr, row, M, CENTRED: tl.constexpr):
    """Mean and rstd of a tile's rows."""
    rstd = tl.load(rstd_ptr + row, mask=row < M, other=0.0)
    mean = rstd
    if CENTRED:
        mean = tl.load(mean_ptr + row, mask=row < M, other=0.0)
    return mean, rstd


@triton.jit
def normalized(x, mean, rstd, CENTRED: tl.constexpr):
    """x^ of a tile."""
    if CENTRED:
        x = x - mean[:, None]
    return x * rstd[:, None]


@triton.jit
def gradient(g, x_hat, of_x_hat, of_one, rstd, CENTRED: tl.constexpr):
    """dx of a tile, from the means over its rows of g x^ and of g. What rows have in common is multiplied first."""
    away = x_hat * (of_x_hat * rstd)[:, None]
    if CENTRED:
        away += (of_one * rstd)[:, None]
    return g * rstd[:, None] - away


@triton.jit
def _row_means(g, x_hat, N, CENTRED: tl.constexpr):
    """Of g x^ and of g, summed up together: threads wait for each other once."""
    if CENTRED:
        of_x_hat, of_one = tl.reduce((g * x_hat, g), 1, added)
        of_x_hat, of_one = of_x_hat / N, of_one / N
    else:
        of_x_hat = tl.sum(g * x_hat, axis=1) / N
        of_one = of_x_hat
    return of_x_hat, of_one


@triton.jit
def store_rows(p_ptr, row, column, N, inside, p, STREAM: tl.constexpr):
    """Writes a tile."""
    at = p_ptr + row[:, None] * N + column[None, :]
    if STREAM:
        tl.store(at, p.to(p_ptr.dtype.element_ty), mask=inside, cache_modifier=".cs")
    else:
        tl.store(at, p.to(p_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _dx_by_blocks(
    dy_ptr, x_ptr, w_ptr, dx_ptr, mean_ptr, rstd_ptr, row, M, N, dy_row, x_row, CENTRED: tl.constexpr,
    BLOCK: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, STREAM: tl.constexpr,
):  # fmt: skip
    """A row in two passes."""
    block = tl.arange(0, BLOCK)
    mean, rstd = load_statistics(mean_ptr, rstd_ptr, row, M, CENTRED)
    of_x_hat = tl.zeros([1, BLOCK], tl.float32)
    of_one = tl.zeros([1, BLOCK], tl.float32)
    for start in range(0, N, BLOCK):
        column = start + block
        inside = (row < M)[:, None] & (column < N)[None, :]
        x_hat = normalized(load_rows(x_ptr, row, column, x_row, inside, FIRST), mean, rstd, CENTRED)
        g = load_rows(dy_ptr, row, column, dy_row, inside, FIRST) * vector(w_ptr, column, N, 1.0)[None, :]
        of_x_hat += g * x_hat
        of_one += g
    of_x_hat = tl.sum(of_x_hat, axis=1) / N
    of_one = tl.sum(of_one, axis=1) / N
    for start in range(0, N, BLOCK):
        column = start + block
        inside = (row < M)[:, None] & (column < N)[None, :]
        x_hat = normalized(load_rows(x_ptr, row, column, x_row, inside, SECOND), mean, rstd, CENTRED)
        g = load_rows(dy_ptr, row, column, dy_row, inside, SECOND) * vector(w_ptr, column, N, 1.0)[None, :]
        store_rows(dx_ptr, row, column, N, inside, gradient(g, x_hat, of_x_hat, of_one, rstd, CENTRED), STREAM)


@triton.jit(do_not_specialize=["M"])
def naive_dx_kernel(
    dy_ptr, x_ptr, w_ptr, dx_ptr, mean_ptr, rstd_ptr, M, N, dy_row, x_row, CENTRED: tl.constexpr, BLOCK: tl.constexpr
):
    """One program a row."""
    row = tl.program_id(0) + tl.arange(0, 1).to(tl.int64)
    _dx_by_blocks(
        dy_ptr, x_ptr, w_ptr, dx_ptr, mean_ptr, rstd_ptr, row, M, N, dy_row, x_row, CENTRED, BLOCK, "", "", False
    )


@triton.jit(do_not_specialize=["M"])
def online_dx_kernel(
    dy_ptr, x_ptr, w_ptr, dx_ptr, mean_ptr, rstd_ptr, M, N, dy_row, x_row, CENTRED: tl.constexpr, BLOCK: tl.constexpr
):
    """Programs that walk over the rows, so few that a row is still in L2 at its second pass."""
    for row_number in range(tl.program_id(0), M, tl.num_programs(0)):
        row = row_number + tl.arange(0, 1).to(tl.int64)
        _dx_by_blocks(
            dy_ptr, x_ptr, w_ptr, dx_ptr, mean_ptr, rstd_ptr, row, M, N, dy_row, x_row, CENTRED, BLOCK,
            "evict_last", "evict_first", True,
        )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def fused_dx_kernel(
    dy_ptr, x_ptr, w_ptr, dx_ptr, mean_ptr, rstd_ptr, M, N, dy_row, x_row, CENTRED: tl.constexpr, BLOCK: tl.constexpr
):
    """One program a row, which lies in registers."""
    row = tl.program_id(0) + tl.arange(0, 1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = (row < M)[:, None] & (column < N)[None, :]
    mean, rstd = load_statistics(mean_ptr, rstd_ptr, row, M, CENTRED)
    x_hat = normalized(load_rows(x_ptr, row, column, x_row, inside, ""), mean, rstd, CENTRED)
    g = load_rows(dy_ptr, row, column, dy_row, inside, "") * vector(w_ptr, column, N, 1.0)[None, :]
    of_x_hat, of_one = _row_means(g, x_hat, N, CENTRED)
    store_rows(dx_ptr, row, column, N, inside, gradient(g, x_hat, of_x_hat, of_one, rstd, CENTRED), False)


@triton.jit(do_not_specialize=["M"])
def persistent_kernel(
    dy_ptr, x_ptr, w_ptr, dx_ptr, mean_ptr, rstd_ptr, parts_w_ptr, parts_b_ptr, M, N, dy_row, x_row,
    CENTRED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, ALL_STAYS: tl.constexpr,
    FULL: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Programs that walk over the rows, some at a time; each writes the sums over its rows at its end.

    ALL_STAYS: w, x^ and g, in registers, where the rows leave room. Otherwise w comes from L2 for every row, and x^
    and g are computed twice. FULL: whole tiles of BLOCK numbers a row.
    """
    next_may_begin(CHAINED)
    column = tl.arange(0, BLOCK)
    sum_w = tl.zeros([BLOCK], tl.float32)
    sum_b = tl.zeros([BLOCK], tl.float32)
    if ALL_STAYS:
        w = vector(w_ptr, column, N, 1.0, FULL)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        inside = (row < M)[:, None] & (column < N)[None, :]
        x_at = x_ptr + row[:, None] * x_row + column[None, :]
        dy_at = dy_ptr + row[:, None] * dy_row + column[None, :]
        if FULL:
            x, dy = tl.load(x_at), tl.load(dy_at)
        else:
            x, dy = tl.load(x_at, mask=inside, other=0.0), tl.load(dy_at, mask=inside, other=0.0)
        mean, rstd = load_statistics(mean_ptr, rstd_ptr, row, M, CENTRED)
        if not ALL_STAYS:
            w = vector(w_ptr, column, N, 1.0, FULL)
        wide_dy = dy.to(tl.float32)
        x_hat, g = normalized(x.to(tl.float32), mean, rstd, CENTRED), wide_dy * w[None, :]
        of_x_hat, of_one = _row_means(g, x_hat, N, CENTRED)
        if not ALL_STAYS:
            wide_dy = _widened_again(dy)
            x_hat, g = normalized(_widened_again(x), mean, rstd, CENTRED), wide_dy * w[None, :]
        dx = gradient(g, x_hat, of_x_hat, of_one, rstd, CENTRED)
        if FULL:
            tl.store(dx_ptr + row[:, None] * N + column[None, :], dx.to(dx_ptr.dtype.element_ty))
        else:
            store_rows(dx_ptr, row, column, N, inside, dx, False)
        if parts_w_ptr is not None:
            sum_w += tl.sum(wide_dy * x_hat, axis=0)
        if parts_b_ptr is not None:
            sum_b += tl.sum(wide_dy, axis=0)
    at = tl.program_id(0).to(tl.int64) * N + column
    if parts_w_ptr is not None:
        tl.store(parts_w_ptr + at, sum_w, mask=column < N)
    if parts_b_ptr is not None:
        tl.store(parts_b_ptr + at, sum_b, mask=column < N)


@triton.jit(do_not_specialize=["M", "span"])
def columns_kernel(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, parts_w_ptr, parts_b_ptr, M, N, dy_row, x_row, span, CENTRED: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """First stage of dw and db: one program a block of columns and a span of rows."""
    part = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sum_w = tl.zeros([ROWS, BLOCK], tl.float32)
    sum_b = tl.zeros([ROWS, BLOCK], tl.float32)
    end = tl.minimum(M, (part + 1) * span)
    for start in range(part * span, end, ROWS):
        row = start + tl.arange(0, ROWS).to(tl.int64)
        inside = (row < end)[:, None] & (column < N)[None, :]
        dy = load_rows(dy_ptr, row, column, dy_row, inside, "")
        sum_b += dy
        if parts_w_ptr is not None:
            mean, rstd = load_statistics(mean_ptr, rstd_ptr, row, end, CENTRED)
            sum_w += dy * normalized(load_rows(x_ptr, row, column, x_row, inside, ""), mean, rstd, CENTRED)
    at = part.to(tl.int64) * N + column
    if parts_w_ptr is not None:
        tl.store(parts_w_ptr + at, tl.sum(sum_w, axis=0), mask=column < N)
    if parts_b_ptr is not None:
        tl.store(parts_b_ptr + at, tl.sum(sum_b, axis=0), mask=column < N)


@triton.jit
def _write_total(parts_ptr, to_ptr, P, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, P, ROWS):
        part = start + tl.arange(0, ROWS).to(tl.int64)
        inside = (part < P)[:, None] & (column < N)[None, :]
        total += tl.load(parts_ptr + part[:, None] * N + column[None, :], mask=inside, other=0.0)
    tl.store(to_ptr + column, tl.sum(total, axis=0).to(to_ptr.dtype.element_ty), mask=column < N)


@triton.jit(do_not_specialize=["P"])
def totals_kernel(
    first_ptr, second_ptr, to_first_ptr, to_second_ptr, P, N, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Second stage, of one or two arrays of parts: sums over them, in an order that depends on their number alone."""
    wait_for_previous(CHAINED)
    if tl.program_id(1) == 0:
        _write_total(first_ptr, to_first_ptr, P, N, ROWS, BLOCK)
    elif second_ptr is not None:
        _write_total(second_ptr, to_second_ptr, P, N, ROWS, BLOCK)
