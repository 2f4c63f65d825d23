"""Triton kernels that apply any elementwise operation: one to three inputs, one or two outputs.

`flat_kernel` processes tensors with equal memory layout as one dimension. `strided_kernel` supports any strides (0 for
broadcast dimensions) over up to four dimensions. `sums_kernel` sums over broadcast dimensions, in a fixed order.
Arithmetic in fp32. Absent tensors are None. Memory traffic: each input is read once, each output written once.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from torchstorm.kernels.chain_triton import next_may_begin, wait_for_previous


@triton.jit
def _apply(a, b, c, OP: tl.constexpr, INPUTS: tl.constexpr):
    if INPUTS == 1:
        return OP(a)
    elif INPUTS == 2:
        return OP(a, b)
    else:
        return OP(a, b, c)


@triton.jit
def _flat_block(a, b, c, y, z, at, end, OP: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr):
    inside = at < end
    left = tl.load(a + at, mask=inside, other=0.0).to(tl.float32)
    middle = left
    right = left
    if INPUTS > 1:
        middle = tl.load(b + at, mask=inside, other=0.0).to(tl.float32)
    if INPUTS > 2:
        right = tl.load(c + at, mask=inside, other=0.0).to(tl.float32)
    if OUTPUTS == 2:
        first, second = _apply(left, middle, right, OP, INPUTS)
        tl.store(y + at, first.to(y.dtype.element_ty), mask=inside)
        tl.store(z + at, second.to(z.dtype.element_ty), mask=inside)
    else:
        tl.store(y + at, _apply(left, middle, right, OP, INPUTS).to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num"])
def flat_kernel(a, b, c, y, z, num, OP: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
                STRIDES: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Blocks of consecutive numbers; with STRIDES, each program goes on by as many blocks as there are programs.

    A mask forbids reading 16 bytes at once unless its end is known to be a multiple of them. So blocks end at a
    multiple of 16 numbers, and the first program also does the few after it: one compiled kernel for any `num`.
    """
    num = num.to(tl.int64)
    end = num // 16 * 16
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offset = tl.arange(0, BLOCK)
    if STRIDES:
        while start < end:
            _flat_block(a, b, c, y, z, start + offset, end, OP, INPUTS, OUTPUTS)
            start += tl.num_programs(0).to(tl.int64) * BLOCK
    else:
        _flat_block(a, b, c, y, z, start + offset, end, OP, INPUTS, OUTPUTS)
    if (tl.program_id(0) == 0) & (end < num):
        _flat_block(a, b, c, y, z, end + tl.arange(0, 16), num, OP, INPUTS, OUTPUTS)


@triton.jit
def _read(a, base, row, column, row_in, column_in, row_stride, column_stride, ONE_ROW: tl.constexpr,
          ONE_COLUMN: tl.constexpr):  # fmt: skip
    """A tile, or the one row or column of it that all others repeat."""
    a += base
    if ONE_ROW:
        return tl.load(a + (column * column_stride)[None, :], mask=column_in[None, :], other=0.0).to(tl.float32)
    elif ONE_COLUMN:
        return tl.load(a + (row * row_stride)[:, None], mask=row_in[:, None], other=0.0).to(tl.float32)
    else:
        at = (row * row_stride)[:, None] + (column * column_stride)[None, :]
        return tl.load(a + at, mask=row_in[:, None] & column_in[None, :], other=0.0).to(tl.float32)


@triton.jit
def _write(y, value, base, row, column, row_in, column_in, row_stride, column_stride):
    at = (row * row_stride)[:, None] + (column * column_stride)[None, :]
    value = tl.broadcast_to(value, (row.shape[0], column.shape[0])).to(y.dtype.element_ty)
    tl.store(y + base + at, value, mask=row_in[:, None] & column_in[None, :])


@triton.jit
def _multiples(i_stride, j_stride, row_stride, UNIT: tl.constexpr):
    """The same numbers, known to be multiples; of 16, they are known to be without."""
    if UNIT < 16:
        i_stride = i_stride // UNIT * UNIT
        j_stride = j_stride // UNIT * UNIT
        row_stride = row_stride // UNIT * UNIT
    return i_stride, j_stride, row_stride


@triton.jit(do_not_specialize=["rows", "j_size", "row_tiles", "column_tiles"])
def strided_kernel(a, b, c, y, z, rows, columns, j_size, row_tiles, column_tiles,
                   a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, y0, y1, y2, y3, z0, z1, z2, z3,
                   OP: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, ONE_ROW: tl.constexpr,
                   ONE_COLUMN: tl.constexpr, UNITS: tl.constexpr, ROWS: tl.constexpr,
                   COLUMNS: tl.constexpr):  # fmt: skip
    """Dimensions i, j, rows, columns with their strides. Grid: i * j * row tiles * column tiles.

    ONE_ROW, ONE_COLUMN: a bit for each of a, b, c that is the same in all rows, or in all columns.
    UNITS: powers of two of which columns are a multiple, and of a, b, c, y, z the strides over all else; that many
    neighbours may be read at once.
    """
    if UNITS[0] < 16:
        columns = columns // UNITS[0] * UNITS[0]
    a0, a1, a2 = _multiples(a0, a1, a2, UNITS[1])
    b0, b1, b2 = _multiples(b0, b1, b2, UNITS[2])
    c0, c1, c2 = _multiples(c0, c1, c2, UNITS[3])
    y0, y1, y2 = _multiples(y0, y1, y2, UNITS[4])
    z0, z1, z2 = _multiples(z0, z1, z2, UNITS[5])
    tile = tl.program_id(0).to(tl.int64)
    column = (tile % column_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    tile = tile // column_tiles
    row = (tile % row_tiles) * ROWS + tl.arange(0, ROWS)
    tile = tile // row_tiles
    i = tile // j_size
    j = tile % j_size
    row_in = row < rows
    column_in = column < columns
    left = _read(a, i * a0 + j * a1, row, column, row_in, column_in, a2, a3, ONE_ROW & 1, ONE_COLUMN & 1)
    middle = left
    right = left
    if INPUTS > 1:
        middle = _read(b, i * b0 + j * b1, row, column, row_in, column_in, b2, b3, ONE_ROW & 2, ONE_COLUMN & 2)
    if INPUTS > 2:
        right = _read(c, i * c0 + j * c1, row, column, row_in, column_in, c2, c3, ONE_ROW & 4, ONE_COLUMN & 4)
    if OUTPUTS == 2:
        first, second = _apply(left, middle, right, OP, INPUTS)
        _write(y, first, i * y0 + j * y1, row, column, row_in, column_in, y2, y3)
        _write(z, second, i * z0 + j * z1, row, column, row_in, column_in, z2, z3)
    else:
        value = _apply(left, middle, right, OP, INPUTS)
        _write(y, value, i * y0 + j * y1, row, column, row_in, column_in, y2, y3)


@triton.jit(do_not_specialize=["rows", "parts", "part_tiles", "column_tiles"])
def sums_kernel(a, b, sums, factor, product, rows, columns, parts, part_tiles, column_tiles, a0, a1, a2, b0, b1, b2,
                INPUTS: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                STAGES: tl.constexpr, LEADS: tl.constexpr, CHAINED: tl.constexpr):  # fmt: skip
    """Sums of a, or of a b, over rows: of (i, rows, columns) into (i, parts, columns). Grid: i * parts * column tiles.

    Each program adds part_tiles tiles of ROWS rows into one, and its rows at its end. STAGES tiles are on their way at
    once, through shared memory: left to itself the compiler waits for each 16 bytes before it asks for the next.
    Besides, where given, a times a factor of (i, columns) into `product`, which lies as b does.
    UNIT: columns, or rows where there is one column, and strides over what is not neighbouring are multiples of this
    power of two, which lets as many neighbours be read at once.
    """
    wait_for_previous(CHAINED)
    next_may_begin(LEADS)
    a0 = a0 // UNIT * UNIT
    b0 = b0 // UNIT * UNIT
    if COLUMNS == 1:
        rows = rows // UNIT * UNIT
    else:
        columns = columns // UNIT * UNIT
        a1 = a1 // UNIT * UNIT
        b1 = b1 // UNIT * UNIT
    tile = tl.program_id(0).to(tl.int64)
    column = (tile % column_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    tile = tile // column_tiles
    part = tile % parts
    i = tile // parts
    column_in = column < columns
    scale = tl.full((COLUMNS,), 1.0, tl.float32)
    if factor is not None:
        scale = tl.load(factor + i * columns + column, mask=column_in, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in tl.range(0, part_tiles, num_stages=STAGES):
        row = (part * part_tiles + step) * ROWS + tl.arange(0, ROWS)
        row_in = row < rows
        value = _read(a, i * a0, row, column, row_in, column_in, a1, a2, False, False)
        if INPUTS == 2:
            total += value * _read(b, i * b0, row, column, row_in, column_in, b1, b2, False, False)
        else:
            total += value
        if product is not None:
            _write(product, value * scale[None, :], i * b0, row, column, row_in, column_in, b1, b2)
    at = (i * parts + part) * columns + column
    tl.store(sums + at, tl.sum(total, 0).to(sums.dtype.element_ty), mask=column_in)


@triton.jit(do_not_specialize=["rows"])
def row_sums_kernel(a, b, sums, factor, product, rows, columns, a0, a1, b0, b1, INPUTS: tl.constexpr,
                    UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Sums of a, or of a b, over columns: of (rows, columns) into (rows,). Grid: blocks of ROWS.

    Otherwise as `sums_kernel`; the factor is of (rows,).
    """
    a0 = a0 // UNIT * UNIT
    b0 = b0 // UNIT * UNIT
    columns = columns // UNIT * UNIT
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_in = row < rows
    scale = tl.full((ROWS,), 1.0, tl.float32)
    if factor is not None:
        scale = tl.load(factor + row, mask=row_in, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in tl.range(0, columns, COLUMNS, num_stages=STAGES):
        column = start + tl.arange(0, COLUMNS)
        column_in = column < columns
        value = _read(a, 0, row, column, row_in, column_in, a0, a1, False, False)
        if INPUTS == 2:
            total += value * _read(b, 0, row, column, row_in, column_in, b0, b1, False, False)
        else:
            total += value
        if product is not None:
            _write(product, value * scale[:, None], 0, row, column, row_in, column_in, b0, b1)
    tl.store(sums + row, tl.sum(total, 1).to(sums.dtype.element_ty), mask=row_in)
