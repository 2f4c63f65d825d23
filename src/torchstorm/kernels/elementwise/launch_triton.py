"""Grids and blocks of the elementwise Triton kernels."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import Tensor

from torchstorm.kernels.dtypes import HALVES
from torchstorm.kernels.elementwise import plain
from torchstorm.kernels.elementwise.kernels_triton import flat_kernel, row_sums_kernel, strided_kernel, sums_kernel
from torchstorm.kernels.elementwise.layout import Walk, same_memory, walk
from torchstorm.kernels.elementwise.operations_triton import (
    BACKWARD,
    FORWARD,
    HALF_BACKWARD,
    HALF_FORWARD,
    add,
    mul,
    mul_gradients,
)
from torchstorm.kernels.rows import chained, following, num_sms, power_of_two

_MOST_DIMENSIONS = 4
_MOST_COLUMNS = 1024
SUM_COLUMNS = 256  # columns per program that sums over rows: 512 contiguous bytes of fp16
SUM_BYTES = 4096  # of each input per iteration
SUM_STAGES = 4  # iterations in flight
SUM_PROGRAMS = 4  # per multiprocessor; 8 would fit, but are 4 % slower
PRODUCT_PROGRAMS = 6  # the same for programs that also write a product
SUM_WARPS = 4
_ROW_PROGRAMS = 64  # rows per multiprocessor from which on a program processes whole rows
_PART_TILE = 2048  # fp32 elements per program that sums parts
_FEW_PARTS = 8  # up to this number of parts, a program sums 256 columns; with more parts 16


@dataclass(frozen=True, kw_only=True)
class Tile:
    """The elements that a program processes per iteration.

    Attributes:
        lane_bytes: bytes of each input per thread; 0 for one element.
        num_warps: warps per program.
        programs: programs per multiprocessor if they loop over blocks; 0 for one program per block.
    """

    lane_bytes: int = 0
    num_warps: int = 4
    programs: int = 0

    def block(self, x: Tensor) -> int:
        """Numbers."""
        return 32 * self.num_warps * max(1, self.lane_bytes // x.element_size())


TILES = {"naive": Tile(), "vectorised": Tile(lane_bytes=16), "persistent": Tile(lane_bytes=32, programs=8)}


def unary(name: str, x: Tensor, y: Tensor, variant: str) -> None:
    """Fills y."""
    operation = (HALF_FORWARD if x.dtype in HALVES else FORWARD)[name]
    launch(operation, (x,), (y,), variant)


def unary_backward(name: str, dy: Tensor, x: Tensor, dx: Tensor, variant: str) -> None:
    """Fills dx."""
    operation = (HALF_BACKWARD if x.dtype in HALVES else BACKWARD)[name]
    launch(operation, (dy, x), (dx,), variant)


def binary(name: str, a: Tensor, b: Tensor, y: Tensor, variant: str) -> None:
    """Fills y, which has the broadcast shape of a and b."""
    launch({"add": add, "mul": mul}[name], (a.expand(y.shape), b.expand(y.shape)), (y,), variant)


def mul_backward(dy: Tensor, a: Tensor, b: Tensor, da: Tensor, db: Tensor, variant: str) -> None:
    """Fills da and db. b's shape may broadcast to a's."""
    if a.shape == b.shape:
        launch(mul_gradients, (dy, a, b), (da, db), variant)
    elif da.stride() != a.stride() or not b.is_contiguous() or not _sum(dy, a, db, b, da):
        launch(mul, (dy, b.expand(dy.shape)), (da,), variant)
        product_sum(dy, a, db)


def launch(operation: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor], variant: str) -> None:
    """Applies an operation of `operations_triton`. The outputs are dense and have the inputs' shape."""
    num = outputs[0].numel()
    if num == 0:
        return
    tile = TILES[variant]
    block = tile.block(outputs[0])
    given = *_padded(inputs, 3), *_padded(outputs, 2)
    counts: dict[str, Any] = {"INPUTS": len(inputs), "OUTPUTS": len(outputs), "num_warps": tile.num_warps}
    found = None if same_memory([*outputs, *inputs]) else walk([*outputs, *inputs])
    if found is None or found.is_flat:
        grid = -(-num // block)
        if tile.programs:
            grid = min(grid, tile.programs * num_sms(outputs[0]))
        flat_kernel[(grid,)](*given, num, operation, **counts, STRIDES=tile.programs > 0, BLOCK=block)
    elif len(found.sizes) > _MOST_DIMENSIONS:
        launch(operation, [torch.empty_like(outputs[0]).copy_(x) for x in inputs], outputs, variant)
    else:
        i, j, rows, columns = _last_four(found.sizes, 1)
        steps = [_last_four(own, 0) for own in found.strides]
        own_outputs, own_inputs = steps[: len(outputs)], steps[len(outputs) :]
        COLUMNS = min(block if rows == 1 else _MOST_COLUMNS, power_of_two(columns), block)
        ROWS = 1 if rows == 1 else block // COLUMNS
        row_tiles, column_tiles = -(-rows // ROWS), -(-columns // COLUMNS)
        filled = _filled(own_inputs, 3) + _filled(own_outputs, 2)
        strides = [stride for own in filled for stride in own]
        unit = gcd(16, columns)
        strided_kernel[(i * j * row_tiles * column_tiles,)](
            *given, rows, columns, j, row_tiles, column_tiles, *strides, operation, **counts,
            ONE_ROW=_bits([own[2] == 0 for own in own_inputs]),
            ONE_COLUMN=_bits([own[3] == 0 and own[2] != 0 for own in own_inputs]),
            UNITS=(unit, *(gcd(unit, *own[:3]) for own in filled)), ROWS=ROWS, COLUMNS=COLUMNS,
        )  # fmt: skip


def product_sum(a: Tensor, b: Tensor | None, out: Tensor) -> None:
    """Fills out with a, or a * b, summed over the dimensions that out lacks or in which it has size 1.

    The sum is computed in parts that are then added, or at once if there are few or short rows, always in the same
    order. A sum over one of three dimensions needs no copy. Other cases store the product in fp32, and PyTorch sums it.
    """
    if out.numel() == 0 or a.numel() == 0:
        out.zero_()
        return
    if not _sum(a, b, out):
        plain.product_sum(a, b, out)


def _sum(a: Tensor, b: Tensor | None, out: Tensor, factor: Tensor | None = None, product: Tensor | None = None) -> bool:
    """Computes `product_sum`, and product = a * factor. Returns False if the kernel does not support the layout."""
    given = [a] if b is None else [a, b.expand(a.shape)]
    plan = _rows_to_add(walk([*given, out.expand(a.shape)])) if a.numel() else None
    if plan is None:
        return False
    i, rows, columns, steps = plan
    unit = gcd(16, columns if columns > 1 else rows, *(own[0] for own in steps))
    if columns == 1 and i >= num_sms(a) * _ROW_PROGRAMS:
        ROWS = SUM_BYTES // a.element_size() // SUM_COLUMNS
        row_sums_kernel[(-(-i // ROWS),)](
            a, b, out, factor, product, i, rows, *steps[0][:2], *steps[-1][:2], INPUTS=len(given), UNIT=unit,
            ROWS=ROWS, COLUMNS=SUM_COLUMNS, STAGES=SUM_STAGES, num_warps=SUM_WARPS,
        )  # fmt: skip
        return True
    COLUMNS = min(SUM_COLUMNS, power_of_two(columns))
    ROWS = SUM_BYTES // a.element_size() // COLUMNS
    tiles, column_tiles = -(-rows // ROWS), -(-columns // COLUMNS)
    programs = (SUM_PROGRAMS if product is None else PRODUCT_PROGRAMS) * num_sms(a)
    part_tiles = -(-tiles // max(1, programs // (i * column_tiles)))
    part_tiles = max(part_tiles, min(tiles, SUM_STAGES))
    parts = -(-tiles // part_tiles)
    sums = out if parts == 1 else a.new_empty((i, parts, columns), dtype=torch.float32)
    if columns > 1:
        unit = gcd(unit, *(own[1] for own in steps))
    sums_kernel[(i * parts * column_tiles,)](
        a, b, sums, factor, product, rows, columns, parts, part_tiles, column_tiles, *steps[0], *steps[-1],
        INPUTS=len(given), UNIT=unit, ROWS=ROWS, COLUMNS=COLUMNS, STAGES=SUM_STAGES, num_warps=SUM_WARPS,
        LEADS=parts > 1 and chained(a), CHAINED=False,
    )  # fmt: skip
    if parts > 1:
        strides = parts * columns, columns, 1
        COLUMNS = min(256 if parts <= _FEW_PARTS else 16, power_of_two(columns))
        ROWS = _PART_TILE // COLUMNS
        column_tiles = -(-columns // COLUMNS)
        sums_kernel[(i * column_tiles,)](
            sums, None, out, None, None, parts, columns, 1, -(-parts // ROWS), column_tiles, *strides, *strides,
            INPUTS=1, UNIT=gcd(16, columns if columns > 1 else parts), ROWS=ROWS, COLUMNS=COLUMNS, STAGES=SUM_STAGES,
            num_warps=SUM_WARPS, LEADS=False, **following(a),
        )  # fmt: skip
    return True


def _rows_to_add(found: Walk) -> tuple[int, int, int, list[tuple[int, ...]]] | None:
    """(i, rows, columns) and the inputs' strides over them if the sum is over rows only; otherwise None."""
    *inputs, out = found.strides
    added = [d for d, stride in enumerate(out) if stride == 0]
    if len(added) != 1 or len(found.sizes) > 3 or added[0] > 1 or len(found.sizes) - added[0] > 2:
        return None
    before, after = (1,) * (1 - added[0]), (1,) * (added[0] + 2 - len(found.sizes))
    i, rows, columns = before + found.sizes + after
    steps = [(0,) * len(before) + own + (0,) * len(after) for own in (*inputs, out)]
    if (i > 1 and steps[-1][0] != columns) or (columns > 1 and steps[-1][2] != 1):
        return None
    return i, rows, columns, steps[:-1]


def _padded(tensors: Sequence[Tensor], num: int) -> tuple[Tensor | None, ...]:
    return (*tensors, *(None,) * (num - len(tensors)))


def _last_four(values: tuple[int, ...], fill: int) -> tuple[int, ...]:
    return (fill,) * (_MOST_DIMENSIONS - len(values)) + values


def _filled(steps: list[tuple[int, ...]], num: int) -> list[tuple[int, ...]]:
    return steps + [(0,) * _MOST_DIMENSIONS] * (num - len(steps))


def _bits(flags: Sequence[bool]) -> int:
    return sum(flag << number for number, flag in enumerate(flags))
