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
from dataclasses import dataclass
from typing import Any

import torch

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
    """

    dtype: torch.dtype
    reduction: int
    ignore_index: int
    num_rows: int

    def parts(self, logits: torch.Tensor, target: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Of every part the number of its first row, the log-softmax of its logits and its labels."""
        for start in range(0, len(logits), self.num_rows):
            labels = target[start : start + self.num_rows]
            yield start, _aten._log_softmax(logits[start : start + self.num_rows].to(self.dtype), 1, False), labels


def rows_at_a_time(logits: torch.Tensor, dtype: torch.dtype) -> int:
    """How many rows a part has.

    Args:
        logits: [num_rows, num_classes].
        dtype: in which they are computed.
    """
    row_bytes = logits.shape[1] * dtype.itemsize
    part_bytes = min(max(len(logits) * row_bytes // _NUM_PARTS, _LEAST_BYTES), _MOST_BYTES)
    return max(part_bytes // row_bytes // ALIGNED * ALIGNED, ALIGNED)


def forward(logits: torch.Tensor, target: torch.Tensor, how: How) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss and the number of rows that count, both scalars of `how.dtype`.

    Args:
        logits: [num_rows, num_classes], contiguous.
        target: [num_rows], int64: a class each, or `how.ignore_index`.
    """
    picked = torch.empty(len(logits), dtype=how.dtype, device=logits.device)
    for start, log_p, labels in how.parts(logits, target):
        found, _ = _aten.nll_loss_forward(log_p, labels, None, NONE, how.ignore_index)
        picked[start : start + how.num_rows] = found
    counted = torch.where(target == how.ignore_index, _IGNORED, 0)
    loss, weight = _aten.nll_loss_forward(-picked[:, None], counted, None, how.reduction, _IGNORED)
    return loss, weight


def backward(
    grad: torch.Tensor, logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor, how: How
) -> torch.Tensor:
    """The gradient of the logits, in their dtype.

    Args:
        grad: of the loss.
        logits, target: as in `forward`.
        weight: the number of rows that count.
    """
    found = torch.empty_like(logits)
    for start, log_p, labels in how.parts(logits, target):
        of_log_p = _aten.nll_loss_backward(grad, log_p, labels, None, how.reduction, how.ignore_index, weight)
        found[start : start + how.num_rows] = _aten._log_softmax_backward_data(of_log_p, log_p, 1, how.dtype)
    return found


class CrossEntropyByRows(torch.autograd.Function):
    """`torch.nn.functional.cross_entropy` of [num_rows, num_classes] logits and [num_rows] labels, by rows."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, how: How) -> torch.Tensor:
        loss, weight = forward(logits, target, how)
        ctx.save_for_backward(logits, target, weight)
        ctx.how = how
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, target, weight = ctx.saved_tensors
        how: How = ctx.how
        if not torch.is_grad_enabled():
            return backward(grad, logits, target, weight, how), None, None
        whole = _aten.cross_entropy_loss(logits.to(how.dtype), target, None, how.reduction, how.ignore_index)
        return torch.autograd.grad(whole, logits, grad, create_graph=True)[0], None, None


def has_same_bits(logits: torch.Tensor, target: torch.Tensor, how: How) -> bool:
    """Whether some rows at a time have the bits of the whole at once here, compared for the first rows.

    Args:
        logits, target: as in `forward`, of at least twice `ALIGNED` rows.
        how: in parts that are as large as they are to be.
    """
    few = max(_LEAST_BYTES // (logits.shape[1] * how.dtype.itemsize) // ALIGNED, 1) * ALIGNED
    num_rows = min(few, how.num_rows, len(logits) // 2 // ALIGNED * ALIGNED)
    logits, target = logits[: 2 * num_rows].detach(), target[: 2 * num_rows]
    target = torch.where(target == how.ignore_index, 0, target)  # so that all of them tell
    log_p = _aten._log_softmax(logits.to(how.dtype), 1, False)
    loss, weight = _aten.nll_loss_forward(log_p, target, None, MEAN, _IGNORED)
    grad = torch.ones_like(loss)
    of_log_p = _aten.nll_loss_backward(grad, log_p, target, None, MEAN, _IGNORED, weight)
    of_logits = _aten._log_softmax_backward_data(of_log_p, log_p, 1, how.dtype).to(logits.dtype)
    in_parts = How(how.dtype, MEAN, _IGNORED, num_rows)
    pairs = zip((loss, weight), forward(logits, target, in_parts), strict=True)
    found = backward(grad, logits, target, weight, in_parts)
    return all(_has_bits_of(*pair) for pair in (*pairs, (of_logits, found)))


def _has_bits_of(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
