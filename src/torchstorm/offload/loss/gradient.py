"""The gradient of cross entropy by one kernel, from two numbers a row, with the bits of PyTorch's operators.

PyTorch's log-softmax is `(x - most) - log_of_sum`, and its gradient `grad - exp(log_softmax) * sum_of_grads`, where the
compiler rounds the product and the difference at once. Of cross entropy one gradient a row is not zero, the label's, so
it is their sum. With the numbers of the row from the forward the rest is pointwise: a kernel that reads logits and
writes gradients of their type, where the operators go through copies in float32 several times. The label's own gradient
is what the operator makes of a row of two classes, the other of which has probability zero.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from torchstorm.offload.recompute import compared, fused, pointwise
from torchstorm.offload.recompute.compared import Bound, Example, Kernel
from torchstorm.offload.recompute.geometry import Geometry, Look
from torchstorm.offload.recompute.pointwise import Input, Operand, Operation

_MOST_ELEMENTS = 1 << 30  # of one launch, which counts them in 32 bits
_ALIGNED_BYTES = 32  # of eight numbers that a thread reads at once
_aten = torch.ops.aten
_LOGITS, _MOST, _LOG_OF_SUM, _OF_LABEL = (Operand("input", at) for at in range(4))


def numbers_of(logits: torch.Tensor, log_p: torch.Tensor, out: torch.Tensor) -> None:
    """What tells a row's log-softmax: the largest logit, and the logarithm of the sum of the exponentials.

    Args:
        logits: [num_rows, num_classes].
        log_p: [num_rows, num_classes], their log-softmax in float32.
        out: [2, num_rows], float32: the largest logit, which no order of comparing changes; and the logarithm, which is
            minus the row's largest log-softmax.
    """
    out[0] = logits.amax(1)
    torch.neg(log_p.amax(1), out=out[1])


@dataclass(frozen=True)
class Gradient:
    """Computes gradients of logits of one type and number of classes on one device.

    Attributes:
        kernel: which is compiled beside training, and compared with PyTorch's pointwise operations.
    """

    kernel: Kernel

    @staticmethod
    def of(logits: torch.Tensor) -> Gradient | None:
        """None where there are no such kernels.

        Args:
            logits: [num_rows, num_classes], contiguous.
        """
        if not fused.is_on(logits.device) or logits.dtype not in pointwise.C_TYPES:
            return None
        num_rows = min(len(logits), max(_MOST_ELEMENTS // logits.shape[1], 2))
        geometry = _geometry(logits, num_rows)
        if geometry is None:
            return None
        inputs = (Input(logits.dtype, 1), *(Input(torch.float32, 0) for _ in range(3)))
        dtypes = [torch.float32] * 3 + [logits.dtype]
        names = ("sub", "sub", "exp", pointwise.NEGATIVE_PRODUCT)
        read = [(_LOGITS, _MOST), (_made(0), _LOG_OF_SUM), (_made(1),), (_made(2), _OF_LABEL)]
        operations = tuple(Operation(*each) for each in zip(names, read, dtypes, strict=True))
        code = pointwise.source_of(
            operations, inputs, (3,), num_numbers=0, num_dims=len(geometry.sizes), width=geometry.width
        )
        calls: tuple[tuple[Any, tuple[Any, ...], dict[str, Any]], ...] = (
            (torch.sub, (_LOGITS, _MOST), {}),
            (torch.sub, (_made(0), _LOG_OF_SUM), {}),
            (torch.exp, (_made(1),), {}),
            (_negative_product, (_made(2), _OF_LABEL, logits.dtype), {}),
        )
        looks = _looks(logits, num_rows)
        wide = Look(torch.float32, looks[0].size, looks[0].stride)
        example = Example(
            calls=calls,
            results=(wide, wide, wide, looks[0]),
            looks=looks,
            outputs=(3,),
            numbers=(),
            inputs=inputs,
            num_dims=len(geometry.sizes),
            width=geometry.width,
        )
        return Gradient(compared.kernel_for(code, ("cross entropy's gradient",), example, logits.device))

    def takes(self, logits: torch.Tensor, numbers: torch.Tensor | None) -> bool:
        """Whether these lie as the kernel reads them, whatever hooks of a user have made of them since the forward."""
        return (
            numbers is not None
            and logits.dtype == self.kernel.example.looks[0].dtype
            and logits.is_contiguous()
            and logits.data_ptr() % _ALIGNED_BYTES == 0
            and numbers.dtype == torch.float32
            and numbers.is_contiguous()
            and logits.device == numbers.device == self.kernel.device
        )

    @property
    def is_compiled(self) -> bool:
        """Whether the kernel is there, or cannot be."""
        return self.kernel.is_compiled

    def is_exact(self) -> bool:
        """Whether the kernel gives the bits of PyTorch's pointwise operations, compared the first time."""
        if self.kernel.is_exact is None:
            self.kernel.is_exact = compared.is_exact(self.kernel)
        return self.kernel.is_exact

    def __call__(
        self, logits: torch.Tensor, target: torch.Tensor, numbers: torch.Tensor, of_label: torch.Tensor
    ) -> torch.Tensor:
        """The gradient of the logits.

        Args:
            logits: [num_rows, num_classes], contiguous.
            target: [num_rows], int64: a class each, where `of_label` is zero any one.
            numbers: as `numbers_of` has them.
            of_label: [num_rows], float32: the gradient of the label's log-softmax.
        """
        device = torch.cuda.device(logits.device) if logits.is_cuda else contextlib.nullcontext()
        with device:
            return self._computed(logits, target, numbers, of_label)

    def _computed(
        self, logits: torch.Tensor, target: torch.Tensor, numbers: torch.Tensor, of_label: torch.Tensor
    ) -> torch.Tensor:
        found = torch.empty_like(logits)
        num_launches = -(-logits.numel() // _MOST_ELEMENTS)
        bounds = [len(logits) * number // num_launches for number in range(num_launches + 1)]
        for start, stop in itertools.pairwise(bounds):
            rows = slice(start, stop)
            geometry = _geometry(logits, rows.stop - rows.start)
            example = self.kernel.example
            assert geometry is not None
            assert (len(geometry.sizes), geometry.width) == (example.num_dims, example.width)
            bound = Bound(self.kernel, geometry, 5, ())
            given = logits[rows], numbers[0, rows], numbers[1, rows], of_label[rows], found[rows]
            bound.run([one.data_ptr() for one in given])
        labels = target[:, None]
        log_p = (logits.gather(1, labels).float() - numbers[0, :, None]) - numbers[1, :, None]
        # Of a row of one class the operator has no sum, and a gradient of -0 would be another zero.
        two, two_log_p = F.pad(of_label[:, None], (0, 1)), F.pad(log_p, (0, 1), value=-math.inf)
        of_labels = _aten._log_softmax_backward_data(two, two_log_p, 1, torch.float32)
        found[torch.arange(len(logits), device=logits.device), target] = of_labels[:, 0].to(logits.dtype)
        return found


def _made(index: int) -> Operand:
    return Operand("made", index)


def _negative_product(made: torch.Tensor, of_label: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    exact = (0.0 - made.double() * of_label.double()).float()  # in float64 the product is exact
    return (exact * 1.0).to(dtype)  # a NaN as operations in float32 make it, which one from float64 is not


def _looks(logits: torch.Tensor, num_rows: int) -> tuple[Look, ...]:
    size = num_rows, logits.shape[1]
    of_rows = Look(torch.float32, size, (1, 0))
    return Look(logits.dtype, size, (logits.shape[1], 1)), of_rows, of_rows, of_rows


def _geometry(logits: torch.Tensor, num_rows: int) -> Geometry | None:
    looks = _looks(logits, num_rows)
    return Geometry.of(looks[0], looks, [0] * len(looks))
