"""Errors of timed results: outputs and gradients of some heads, compared with the definition in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchstorm.bench.accuracy import allowed, error_of
from torchstorm.kernels.mlstm import mlstm
from torchstorm.kernels.mlstm.reference import mlstm_quadratic, mlstm_recurrent

Results = dict[str, Tensor]

_INPUTS = ("q", "k", "v", "i", "f")
_MOST_PAIRS = 8192  # most tokens for the quadratic reference, in float64 with two heads
_MOST_STEPS = 1024  # most tokens for the recurrent reference


@dataclass(frozen=True, kw_only=True)
class Check:
    """Relative errors, by the norm over all elements of some heads; infinite for NaN.

    Attributes:
        errors, allowed: of h and, where there are some, of dq, dk, dv, di and df.
    """

    errors: Mapping[str, float]
    allowed: Mapping[str, float]

    @property
    def wrong(self) -> tuple[str, ...]:
        """The results with a larger error than allowed."""
        return tuple(name for name, error in self.errors.items() if not error <= self.allowed[name])

    @property
    def worst_gradient(self) -> str:
        """The gradient with the largest error; "" without gradients."""
        gradients = {name: error for name, error in self.errors.items() if name != "h"}
        return max(gradients, key=lambda name: gradients[name], default="")


def some_heads(x: Tensor, num_heads: int) -> Tensor:
    """The last heads of the last sequence, which have the largest memory offsets."""
    return x[-1:, -num_heads:]


def outputs_and_gradients(compute: Callable[..., Tensor], inputs: Mapping[str, Tensor]) -> Results:
    """h, dq, dk, dv, di and df of `compute(q, k, v, i, f)` for the gradient inputs["dh"]."""
    leaves = [inputs[name].detach().requires_grad_() for name in _INPUTS]
    h = compute(*leaves)
    grads = torch.autograd.grad(h, leaves, inputs["dh"])
    return {"h": h.detach(), **{f"d{name}": grad for name, grad in zip(_INPUTS, grads, strict=True)}}


class Truth:
    """Reference results of some heads in float64, and the allowed error in the inputs' dtype.

    Attributes:
        num_heads: number of checked heads: two, or one for long sequences.
    """

    def __init__(self, inputs: Mapping[str, Tensor]) -> None:
        seq, dtype = inputs["q"].shape[2], inputs["q"].dtype
        self.num_heads = 2 if seq <= _MOST_PAIRS else 1
        here = {name: some_heads(x, self.num_heads) for name, x in inputs.items()}
        wide = {name: x.double() for name, x in here.items()}
        self._right = outputs_and_gradients(_quadratic if seq <= _MOST_PAIRS else _chunkwise, wide)
        plain = [_quadratic, _recurrent] if seq <= _MOST_STEPS else [_quadratic]
        yardsticks = [outputs_and_gradients(compute, here) for compute in plain]
        self._allowed = {
            name: allowed([y[name] for y in yardsticks], right, dtype) for name, right in self._right.items()
        }

    def check(self, results: Results) -> Check:
        """Checks some heads of the full tensors."""
        errors = {name: error_of(some_heads(x, self.num_heads), self._right[name]) for name, x in results.items()}
        return Check(errors=errors, allowed={name: self._allowed[name] for name in results})


def check_alone(out: Tensor, reference: Callable[..., Tensor], given: list[Tensor], *, num_heads: int) -> Check:
    """Checks an output without gradients against the given reference."""
    here = [some_heads(x, num_heads) for x in given]
    right = reference(*(x.double() for x in here))
    limit = allowed([reference(*here)], right, out.dtype)
    return Check(errors={"h": error_of(some_heads(out, num_heads), right)}, allowed={"h": limit})


def _quadratic(*inputs: Any) -> Tensor:
    return mlstm_quadratic(*inputs)[0]


def _recurrent(*inputs: Any) -> Tensor:
    return mlstm_recurrent(*inputs)[0]


def _chunkwise(*inputs: Any) -> Tensor:
    return mlstm(*inputs, variant="chunkwise")
