"""What the tests of several operators ask of each: compiled once, deaf to autocast, and thrifty with what it keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters


def assert_compiled_once(compute: Callable[..., Tensor], inputs: Callable[[int], Sequence[Tensor]]) -> None:
    """Whole, with the same values and gradients; once for the first number of rows and once for all others."""
    torch.compiler.reset()
    counters.clear()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(compute, backend=counter, fullgraph=True)
    for rows in (4, 7, 33):
        given = [x.requires_grad_() for x in inputs(rows)]
        found, right = compiled(*given), compute(*given)
        assert torch.equal(found, right)
        grads = torch.autograd.grad(found.square().sum(), given)
        for one, other in zip(grads, torch.autograd.grad(right.square().sum(), given), strict=True):
            torch.testing.assert_close(one, other)
    assert counter.frame_count <= 2  # the first shape, then any
    assert not counters["graph_break"]
    torch.compiler.reset()


def assert_same_bits_under_autocast(function: Callable[[], Tensor], inputs: Sequence[Tensor]) -> None:
    """Forward and backward."""
    expected = function()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = function()
    assert torch.equal(found, expected)
    wanted = torch.autograd.grad(expected.square().sum(), inputs)
    for one, other in zip(torch.autograd.grad(found.square().sum(), inputs), wanted, strict=True):
        assert torch.equal(one, other)


def saved_by(function: Callable[[], Any]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of what autograd keeps."""
    kept: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        function()
    return [(tuple(x.shape), x.dtype) for x in kept]
