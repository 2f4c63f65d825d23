"""Cross entropy of logits over a large vocabulary, a few rows at a time, with the bits of the whole at once.

At once, PyTorch makes copies of all logits: in float32 where they are of a smaller type, their log-softmax, which is
saved, and two gradients in backward. But every row is treated by itself. So the forward keeps one number a row, and
backward computes the log-softmax of some rows again, and their gradients, each with the operator that PyTorch has for
it. The mean over the rows is PyTorch's own, too: of a table with a single column.

On a GPU, which kernel takes a row, and in which order it adds, depends on the row's length and on how it is aligned. So
parts begin at a multiple of eight rows, which are aligned as they are in the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from torchstorm.offload import torch_private as private
from torchstorm.offload.loss.gradient import Gradient, numbers_of
from torchstorm.storage.aligned import round_down

ALIGNED = 8
"""Rows after which any type is aligned as at the beginning, for what a kernel reads at once."""

_NUM_PARTS = 16
_LEAST_BYTES, _MOST_BYTES = 2**24, 2**27  # of a part: a smaller one takes the host longer than the device
NONE, MEAN, SUM = 0, 1, 2
"""Reductions, as PyTorch's operators number them."""

_IGNORED = -100  # in the table with one column
_aten = torch.ops.aten


@dataclass(frozen=True)
class How:
    """How a cross entropy is computed.

    Attributes:
        dtype: in which.
        reduction: `MEAN` or `SUM`.
        ignore_index: the label of rows that do not count.
        num_rows: in a part, a multiple of `ALIGNED`.
        keeps_numbers: whether two more numbers a row are kept, which a kernel needs. A GPU's steps save them with and
            without one, so that a plan serves both.
        gradient: by one kernel that has been found to have the same bits; None where there is none, or not yet.
    """

    dtype: torch.dtype
    reduction: int
    ignore_index: int
    num_rows: int
    keeps_numbers: bool = False
    gradient: Gradient | None = field(default=None, compare=False)


def rows_at_a_time(logits: torch.Tensor, dtype: torch.dtype) -> int:
    """How many rows a part has.

    Args:
        logits: [num_rows, num_classes].
        dtype: in which they are computed.
    """
    row_bytes = logits.shape[1] * dtype.itemsize
    part_bytes = min(max(len(logits) * row_bytes // _NUM_PARTS, _LEAST_BYTES), _MOST_BYTES)
    return max(round_down(part_bytes // row_bytes, ALIGNED), ALIGNED)


def forward(
    logits: torch.Tensor, target: torch.Tensor, how: How
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The loss and the number of rows that count, both scalars of `how.dtype`; and what a kernel needs, if it is kept.

    Args:
        logits: [num_rows, num_classes], contiguous.
        target: [num_rows], int64: a class each, or `how.ignore_index`.
    """
    picked = torch.empty(len(logits), dtype=how.dtype, device=logits.device)
    numbers = picked.new_empty(2, len(logits)) if how.keeps_numbers else None
    for rows, log_p in _parts(logits, how):
        if numbers is not None:
            numbers_of(logits[rows], log_p, numbers[:, rows])
        found, _ = _aten.nll_loss_forward(log_p, target[rows], None, NONE, how.ignore_index)
        picked[rows] = found
    loss, weight = _aten.nll_loss_forward(-picked[:, None], _counted(target, how), None, how.reduction, _IGNORED)
    return loss, weight, numbers


def _counted(target: torch.Tensor, how: How) -> torch.Tensor:
    return torch.where(target == how.ignore_index, _IGNORED, 0)


def backward(
    grad: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor,
    how: How,
    numbers: torch.Tensor | None = None,
) -> torch.Tensor:
    """The gradient of the logits, in their dtype.

    Args:
        grad: of the loss.
        logits, target: as in `forward`.
        weight: the number of rows that count.
        numbers: what `forward` has kept for a kernel; not needed by parts.
    """
    if how.gradient is not None and numbers is not None and how.gradient.takes(logits, numbers):
        none_yet = numbers.new_zeros(len(logits), 1)
        given = grad, none_yet, _counted(target, how), None, how.reduction, _IGNORED, weight
        of_label = _aten.nll_loss_backward(*given)[:, 0]
        return how.gradient(logits, torch.where(target == how.ignore_index, 0, target), numbers, of_label)
    logits = logits.contiguous()  # a hook of a user may have them otherwise; PyTorch's `out=` is wrong then on a CPU
    found = torch.empty_like(logits)
    is_cast = how.dtype != logits.dtype
    scratch, cast = _buffer(logits, how), _buffer(logits, how) if is_cast else found
    for rows, log_p in _parts(logits, how, scratch):
        of_log_p, out = scratch[: len(log_p)], cast[: len(log_p)] if is_cast else found[rows]
        given = grad, log_p, target[rows], None, how.reduction, how.ignore_index, weight
        _aten.nll_loss_backward.grad_input(*given, grad_input=of_log_p)
        _aten._log_softmax_backward_data.out(of_log_p, log_p, 1, how.dtype, out=out)
        if is_cast:
            found[rows] = out
    return found


def _parts(logits: torch.Tensor, how: How, scratch: torch.Tensor | None = None) -> Iterator[tuple[slice, torch.Tensor]]:
    """Of every part which rows it has, and the log-softmax of its logits. All parts have the same memory: of what comes
    and goes, a process on a CPU would keep more and more.

    Args:
        scratch: a buffer for logits that are cast, to which its caller may write between parts; None for its own.
    """
    log_p, cast = _buffer(logits, how), None
    if how.dtype != logits.dtype:
        cast = scratch if scratch is not None else _buffer(logits, how)
    for start in range(0, len(logits), how.num_rows):
        rows = slice(start, min(start + how.num_rows, len(logits)))
        part, num_rows = logits[rows], rows.stop - start
        if cast is not None:
            part = cast[:num_rows].copy_(part)
        yield rows, _aten._log_softmax.out(part, 1, False, out=log_p[:num_rows])


def _buffer(logits: torch.Tensor, how: How) -> torch.Tensor:
    return torch.empty(min(how.num_rows, len(logits)), logits.shape[1], dtype=how.dtype, device=logits.device)


def _at_once(
    grad: torch.Tensor, logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor, how: How
) -> torch.Tensor:
    """What `backward` computes, by the operators as PyTorch calls them."""
    log_p = _aten._log_softmax(logits.to(how.dtype), 1, False)
    of_log_p = _aten.nll_loss_backward(grad, log_p, target, None, how.reduction, how.ignore_index, weight)
    found: torch.Tensor = _aten._log_softmax_backward_data(of_log_p, log_p, 1, how.dtype)
    return found.to(logits.dtype)


class CrossEntropyByRows(torch.autograd.Function):
    """`torch.nn.functional.cross_entropy` of [num_rows, num_classes] logits and [num_rows] labels, by rows."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, how: How) -> torch.Tensor:
        loss, weight, numbers = forward(logits, target, how)
        ctx.save_for_backward(logits, target, weight, *(() if numbers is None else (numbers,)))
        ctx.how = how
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, target, weight, *numbers = ctx.saved_tensors
        how: How = ctx.how
        if torch.is_grad_enabled():  # a second derivative may follow
            loss = _aten.nll_loss(logits.to(how.dtype).log_softmax(1), target, None, how.reduction, how.ignore_index)
            return torch.autograd.grad(loss, logits, grad, create_graph=True)[0], None, None
        if private.is_of_several(grad):
            return _at_once(grad, logits, target, weight, how), None, None
        return backward(grad, logits, target, weight, how, *numbers), None, None


def has_same_bits(logits: torch.Tensor, target: torch.Tensor, how: How) -> bool:
    """Whether some rows at a time have the bits of the whole at once here, compared for the first rows.

    Args:
        logits, target: as in `forward`, of at least twice `ALIGNED` rows.
        how: in parts that are as large as they are to be.
    """
    few = max(round_down(_LEAST_BYTES // (logits.shape[1] * how.dtype.itemsize), ALIGNED), ALIGNED)
    num_rows = min(few, how.num_rows, round_down(len(logits) // 2, ALIGNED))
    logits, target = logits[: 2 * num_rows].detach(), target[: 2 * num_rows]
    target = torch.where(target == how.ignore_index, 0, target)  # so that all of them tell
    in_parts = replace(how, reduction=MEAN, ignore_index=_IGNORED, num_rows=num_rows)
    log_p = _aten._log_softmax(logits.to(how.dtype), 1, False)
    loss, weight = _aten.nll_loss_forward(log_p, target, None, MEAN, _IGNORED)
    *found, numbers = forward(logits, target, in_parts)
    if not all(map(_has_bits_of, (loss, weight), found)):
        return False
    del log_p
    for one in (1.0, -0.3, 0.0):
        given = torch.full_like(loss, one), logits, target, weight, in_parts
        if not _has_bits_of(_at_once(*given), backward(*given, numbers)):
            return False
    return True


def _has_bits_of(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
