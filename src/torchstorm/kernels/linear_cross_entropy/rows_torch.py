"""The softmax of a chunk of rows in plain PyTorch: computes losses, and overwrites logits with their gradients."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from torchstorm.kernels.dtypes import wide


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a row's loss."""

    ignore_index: int
    label_smoothing: float
    softcap: float | None


def losses(
    logits: Tensor, V: int, target: Tensor, options: Options, loss: Tensor, lse: Tensor, scale: Tensor | None
) -> None:
    """Fills loss (n). With a scale, overwrites the logits (n, V) with scale * gradients of their rows' losses.

    Columns from V on are padding: they are not read, and become 0. scale is a scalar or has one value per row (n). lse
    is not filled, since this implementation recomputes the log-softmax.
    """
    if scale is not None:
        logits[:, V:] = 0
    logits = logits[:, :V]
    z = logits.to(wide(logits.dtype))
    if options.softcap is not None:
        z = z.div(options.softcap).tanh_().mul_(options.softcap)
    log_p = F.log_softmax(z, 1)
    ignored = target == options.ignore_index
    at_target = target.masked_fill(ignored, 0)[:, None]
    smooth = options.label_smoothing
    row_loss = log_p.gather(1, at_target)[:, 0].mul_(smooth - 1)
    if smooth:
        row_loss.sub_(log_p.sum(1), alpha=smooth / log_p.shape[1])
    loss.copy_(row_loss.masked_fill_(ignored, 0.0))
    if scale is None:
        return
    gradient = log_p.exp_()
    if smooth:
        gradient.sub_(smooth / log_p.shape[1])
    gradient.scatter_add_(1, at_target, gradient.new_full((), smooth - 1).expand_as(at_target))
    if options.softcap is not None:
        gradient.addcmul_(gradient, (z / options.softcap).square_(), value=-1)
    gradient.mul_(scale if scale.dim() == 0 else scale[:, None])
    logits.copy_(gradient.masked_fill_(ignored[:, None], 0.0))


def gradients(logits: Tensor, V: int, target: Tensor, options: Options, lse: Tensor, scale: Tensor) -> None:
    """Overwrites the logits with scale * gradients of their rows' losses; scale (n)."""
    losses(logits, V, target, options, scale.new_empty(target.shape), lse, scale)
