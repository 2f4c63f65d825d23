"""PyTorch's cross entropy within steps: of large logits some rows at a time, wherever a model or its user calls it.

What `torch.nn.functional.cross_entropy` calls is an operator that is made of others. From the first Session on, it has
an implementation of its own where autograd would see these, which asks whether a step runs. So it is reached from C++
and from Python, by whatever name, and nothing that belongs to others is replaced. It stays until the process ends: once
it had been taken back, PyTorch 2.13 failed to compile the operator.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from torchstorm.errors import KernelError
from torchstorm.offload import torch_private as private
from torchstorm.offload.loss.gradient import Gradient
from torchstorm.offload.loss.place import WORTH_BYTES
from torchstorm.offload.loss.rows import ALIGNED, MEAN, SUM, CrossEntropyByRows, How, has_same_bits, rows_at_a_time

_FAR = 110.0  # below a row's largest logit: an exponential that is zero in float32
_KINDS = frozenset({"cpu", "cuda", "meta"})  # of devices whose operators treat every row by itself

_operator = torch.ops.aten.cross_entropy_loss.default
_vmap_level = torch._C._functorch.maybe_current_level
_STEP = "torchstorm.step"
_implementations: list[torch.library.Library] = []  # one at most


class CrossEntropy:
    """A Session's cross entropies, by rows where that is possible.

    Attributes:
        differs: whether some rows at a time have had other bits than the whole at once, which is computed then.
    """

    def __init__(self) -> None:
        self.differs = False
        self._is_same: dict[tuple[Any, ...], bool] = {}
        self._gradients: dict[tuple[Any, ...], Gradient | None] = {}
        self._are_compared: set[tuple[Any, ...]] = set()  # those whose kernel has the same bits
        _implement()

    @contextmanager
    def running(self) -> Iterator[None]:
        """A step runs in this thread, and in those in which autograd runs its backward."""
        before = running()
        private.stash_in_thread(_STEP, self)
        try:
            yield
        finally:
            private.stash_in_thread(_STEP, before)

    def __call__(
        self,
        logits: torch.Tensor,
        dtype: torch.dtype,
        target: Any,
        weight: torch.Tensor | None,
        reduction: int,
        ignore_index: int,
        label_smoothing: float,
    ) -> torch.Tensor | None:
        """What PyTorch's operator computes, or None where that is not possible by rows.

        Args:
            logits: as they are.
            dtype: what they are to be cast to.
            target, weight, reduction, ignore_index, label_smoothing: the operator's.
        """
        is_known = weight is None and not label_smoothing and reduction in (MEAN, SUM)
        # On meta tensors autocast is whoever simulates it, and has been there before.
        is_known &= dtype == torch.float32 or logits.is_meta or not torch.is_autocast_enabled(logits.device.type)
        is_table = logits.dim() == 2 and logits.is_contiguous() and len(logits) >= 2 * ALIGNED
        if not is_known or not is_table or not _are_classes(target, logits):
            return None
        key = logits.shape[1], logits.dtype, dtype, logits.device
        num_rows = rows_at_a_time(logits, dtype)
        how = How(dtype, reduction, ignore_index, num_rows, keeps_numbers=_keeps_numbers(logits, dtype))
        if key not in self._is_same:
            if _is_capturing(logits):
                return None
            self._gradients[key] = Gradient.of(logits) if how.keeps_numbers else None
            with torch.no_grad(), _disable_current_modes():  # no mode of anybody's sees what is done only once
                self._is_same[key] = logits.is_meta or has_same_bits(logits, target, how)
            self.differs |= not self._is_same[key]
        if not self._is_same[key]:
            return None
        if self._gradients[key] is not None:
            how = self._by_kernel(key, logits, target, how)
        loss: torch.Tensor = CrossEntropyByRows.apply(logits, target, how)  # type: ignore[no-untyped-call]
        return loss

    def _by_kernel(self, key: tuple[Any, ...], logits: torch.Tensor, target: torch.Tensor, how: How) -> How:
        """With a kernel for the gradient, once that is compiled and has been found to have the same bits."""
        gradient = self._gradients[key]
        assert gradient is not None
        if key not in self._are_compared:
            if not gradient.is_compiled or _is_capturing(logits):
                return how
            # Few rows: it may be the moment of a step at which there is least room.
            few = replace(how, num_rows=ALIGNED, gradient=gradient)
            far = torch.linspace(0, -_FAR, logits.shape[1], device=logits.device, dtype=logits.dtype)
            with torch.no_grad(), _disable_current_modes(), suppress(KernelError, torch.OutOfMemoryError):
                tables = (logits, far.expand(2 * ALIGNED, -1).contiguous())
                if gradient.is_exact() and all(has_same_bits(one, target, few) for one in tables):
                    self._are_compared.add(key)
            if key not in self._are_compared:
                self._gradients[key] = None
                return how
        return replace(how, gradient=gradient)


def running() -> CrossEntropy | None:
    """Of the step that runs in this thread."""
    found: CrossEntropy | None = private.stashed_in_thread(_STEP)
    return found


def wants_gradients() -> bool:
    """Whether gradients are asked for, and a function does now no more than it is told to do."""
    return (
        torch.is_grad_enabled()
        and forward_ad._current_level < 0
        and _vmap_level() is None
        and not torch.compiler.is_compiling()
    )


def is_worth_it(given: Any) -> bool:
    """Whether something may be logits whose loss takes much memory."""
    return (
        type(given) is torch.Tensor
        and given.nbytes >= WORTH_BYTES
        and given.requires_grad
        and given.is_floating_point()
        and given.device.type in _KINDS
    )


def _is_capturing(logits: torch.Tensor) -> bool:
    return logits.is_cuda and torch.cuda.is_current_stream_capturing()


def _keeps_numbers(logits: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a step saves what a kernel needs: on GPUs, and where one is simulated."""
    return not logits.is_cpu and dtype == torch.float32


def _are_classes(target: Any, logits: torch.Tensor) -> bool:
    return (
        type(target) is torch.Tensor
        and target.dtype == torch.int64
        and target.shape == logits.shape[:1]
        and target.device == logits.device
    )


def _cross_entropy_loss(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    options = weight, reduction, ignore_index, label_smoothing
    by_rows = running()
    if by_rows is not None and wants_gradients() and is_worth_it(logits):
        loss = by_rows(logits, logits.dtype, target, *options)
        if loss is not None:
            return loss
    return _operator.decompose(logits, target, *options)


def _implement() -> None:
    if not _implementations:
        _implementations.append(torch.library.Library("aten", "IMPL"))
        for key in ("AutogradCPU", "AutogradCUDA", "AutogradMeta"):
            _implementations[0].impl("cross_entropy_loss", _cross_entropy_loss, key)
