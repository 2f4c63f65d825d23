"""What the bench of an operation needs to know: inputs at a shape, ways, the definition, and how much to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

Sizes = Literal["small", "target"] | tuple[int, ...]
"""Shapes that take seconds on any device, those with times to beat, or one shape of anybody's choice."""

Inputs = Mapping[str, Tensor]
Outputs = dict[str, Tensor]
Way = Callable[[Inputs], Outputs]
Pass = Literal["forward", "backward", "both"]
"""Forward without gradients; the gradients alone, of a forward pass that was made before; both together."""


def compiled(function: Callable[..., T]) -> Callable[..., T]:
    """A function through torch.compile, which takes seconds to import, from its first call on.

    Anew for each: after eight shapes of one function it would give up.
    """

    @cache
    def made() -> Callable[..., T]:
        torch.compiler.reset()
        return torch.compile(function, dynamic=False)

    return lambda *given: made()(*given)


@dataclass(frozen=True, kw_only=True)
class OpCase:
    """One operation at one shape.

    Attributes:
        op: its name in `torchstorm.kernels`.
        shape: for people and for rows, as in "8192x8192x8192".
        dtype: of the inputs.
        make: the inputs on a device from a seed, the same every time. Those named "d_NAME" are gradients of the output
            NAME, and given to no way.
        ours: the operation by a variant's name.
        variants: names, in order of history, "auto" among them.
        reference: the definition in plain PyTorch, in the inputs' dtype: the truth in float64, and otherwise the
            yardstick, what "over PyTorch" is said of.
        truth: the definition in float64 where `reference` of float64 inputs would not fit; None for that.
        peers: others' ways by name, as in "torch.compile"; those that are not installed left out.
        differentiable: inputs that gradients are wanted of; none for forward alone.
        work: operations or bytes of each pass that is to be timed, each byte counted once.
        unit: whether `work` counts operations, or bytes that are read or written.
    """

    op: str
    shape: str
    dtype: torch.dtype
    make: Callable[[torch.device, int], Inputs]
    ours: Callable[[Inputs, str], Outputs]
    variants: tuple[str, ...]
    reference: Way
    peers: Mapping[str, Way]
    differentiable: tuple[str, ...] = ()
    work: Mapping[Pass, float]
    unit: Literal["FLOP/s", "B/s"]
    truth: Way | None = None
