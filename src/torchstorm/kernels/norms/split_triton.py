"""Backward of long rows in one launch with two interleaved phases: "split"; see `function.py`.

A row of 64k numbers with its sums of dw fits neither into registers nor into shared memory of an SM. So rows are
processed in chunks of a few megabytes. Phase 1 of a chunk reads x and dy and writes, for each row and each part of its
columns, the sums of g x^ and of g. Phase 2 reads x and dy again, from L2, writes dx, and sums dw and db over the
chunk.

Programs draw work items from a counter. An item is a tile of phase 1 of chunk t, or one of phase 2 of chunk t - lag,
which waits until phase 1 of that chunk has ended. Those items were drawn earlier, by programs that do not wait. So
there is no deadlock, whatever else runs on the GPU. No sum is atomic, so results are deterministic.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from torchstorm.kernels.norms.backward_triton import (
    gradient,
    load_rows,
    load_statistics,
    normalized,
    store_rows,
)
from torchstorm.kernels.norms.forward_triton import vector


@triton.jit
def _sum_part(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, sums_ptr, row_number, part, M, N, dy_row, x_row, CENTRED: tl.constexpr,
    BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Phase 1: one row's sums over one part of its columns."""
    row = row_number + tl.arange(0, 1).to(tl.int64)
    column = part * BLOCK + tl.arange(0, BLOCK)
    inside = (row < M)[:, None] & (column < N)[None, :]
    mean, rstd = load_statistics(mean_ptr, rstd_ptr, row, M, CENTRED)
    x_hat = normalized(load_rows(x_ptr, row, column, x_row, inside, "evict_last"), mean, rstd, CENTRED)
    g = load_rows(dy_ptr, row, column, dy_row, inside, "evict_last") * vector(w_ptr, column, N, 1.0)[None, :]
    at = sums_ptr + (row * PARTS + part) * 2
    tl.store(at, tl.sum(g * x_hat, axis=1), mask=row < M)
    tl.store(at + 1, tl.sum(g, axis=1), mask=row < M)


@triton.jit
def _finish_columns(
    dy_ptr, x_ptr, w_ptr, dx_ptr, mean_ptr, rstd_ptr, sums_ptr, parts_w_ptr, parts_b_ptr, chunk, column, M, N, dy_row,
    x_row, CENTRED: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Phase 2: some columns of a chunk of rows."""
    w = vector(w_ptr, column, N, 1.0)
    part = tl.arange(0, PARTS_BLOCK)
    sum_w = tl.zeros([ROWS, COLUMNS], tl.float32)
    sum_b = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, CHUNK, ROWS, num_stages=STAGES):
        row = chunk * CHUNK + start + tl.arange(0, ROWS).to(tl.int64)
        inside = (row < M)[:, None] & (column < N)[None, :]
        x = load_rows(x_ptr, row, column, x_row, inside, "evict_first")
        dy = load_rows(dy_ptr, row, column, dy_row, inside, "evict_first")
        mean, rstd = load_statistics(mean_ptr, rstd_ptr, row, M, CENTRED)
        at = sums_ptr + (row[:, None] * PARTS + part[None, :]) * 2
        summed = (row < M)[:, None] & (part < PARTS)[None, :]
        of_x_hat = tl.sum(tl.load(at, mask=summed, other=0.0), axis=1) / N
        of_one = tl.sum(tl.load(at + 1, mask=summed, other=0.0), axis=1) / N
        x_hat = normalized(x, mean, rstd, CENTRED)
        dx = gradient(dy * w[None, :], x_hat, of_x_hat, of_one, rstd, CENTRED)
        store_rows(dx_ptr, row, column, N, inside, dx, True)
        sum_w += dy * x_hat
        sum_b += dy
    at = chunk.to(tl.int64) * N + column
    if parts_w_ptr is not None:
        tl.store(parts_w_ptr + at, tl.sum(sum_w, axis=0), mask=column < N)
    if parts_b_ptr is not None:
        tl.store(parts_b_ptr + at, tl.sum(sum_b, axis=0), mask=column < N)


@triton.jit(do_not_specialize=["M"])
def split_kernel(
    dy_ptr, x_ptr, w_ptr, dx_ptr, mean_ptr, rstd_ptr, sums_ptr, parts_w_ptr, parts_b_ptr, turns_ptr, M, N, dy_row,
    x_row, CENTRED: tl.constexpr, CHUNK: tl.constexpr, LAG: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr, COLUMN_TILES: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """turns (1 + chunks,) int32, zeros: the counter of turns, then of each chunk how much of phase 1 is done."""
    turn = tl.atomic_add(turns_ptr, 1)
    num_chunks = tl.cdiv(M, CHUNK)
    per_chunk: tl.constexpr = CHUNK * PARTS + COLUMN_TILES
    chunk = turn // per_chunk
    tile = turn % per_chunk
    if tile < CHUNK * PARTS:
        if chunk < num_chunks:
            row_number = chunk * CHUNK + tile // PARTS
            _sum_part(
                dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, sums_ptr, row_number, tile % PARTS, M, N, dy_row, x_row,
                CENTRED, BLOCK, PARTS,
            )  # fmt: skip
            tl.debug_barrier()  # all threads' sums are written before it is said so
            tl.atomic_add(turns_ptr + 1 + chunk, 1, sem="release")
    elif chunk >= LAG:
        chunk -= LAG
        while tl.atomic_add(turns_ptr + 1 + chunk, 0, sem="acquire") < CHUNK * PARTS:
            pass
        tl.debug_barrier()
        column = (tile - CHUNK * PARTS) * COLUMNS + tl.arange(0, COLUMNS)
        _finish_columns(
            dy_ptr, x_ptr, w_ptr, dx_ptr, mean_ptr, rstd_ptr, sums_ptr, parts_w_ptr, parts_b_ptr, chunk, column, M, N,
            dy_row, x_row, CENTRED, CHUNK, ROWS, COLUMNS, PARTS, PARTS_BLOCK, STAGES,
        )  # fmt: skip
