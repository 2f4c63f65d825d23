"""Inputs for tests of matmul, and the one check of a product and of its gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from close import assert_close
from torchstorm.kernels import matmul

Shape = tuple[int, ...]
SHAPES: dict[str, tuple[Shape, Shape]] = {
    "square": ((64, 64), (64, 64)),
    "one": ((1, 1), (1, 1)),
    "odd": ((33, 129), (129, 65)),
    "prime": ((131, 67), (67, 257)),
    "long": ((5, 1031), (1031, 3)),
    "row and column": ((1, 300), (300, 1)),
    "batch": ((3, 17, 40), (3, 40, 24)),
    "broadcast": ((2, 1, 17, 40), (3, 40, 24)),
    "linear": ((2, 5, 17, 40), (40, 24)),
    "vectors": ((77,), (77,)),
    "row times matrices": ((40,), (3, 40, 24)),
    "matrices times column": ((3, 17, 40), (40,)),
    "no rows": ((0, 5), (5, 7)),
    "no columns": ((3, 5), (5, 0)),
    "no k": ((3, 0), (0, 7)),
    "no batch": ((0, 3, 5), (5, 7)),
}
"""Of a and b, by what they are for."""
FEW = 100
"""Results of which an average says little."""


def draw(shapes: tuple[Shape, Shape], dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """a and b, standard normal."""
    a, b = (torch.randn(shape, dtype=torch.float64).to(device, dtype) for shape in shapes)
    return a, b


def strided(x: Tensor, how: str) -> Tensor:
    """The same numbers with other strides."""
    if how == "transposed":
        return x.mT.contiguous().mT
    if how == "sliced":
        return torch.stack([x, x + 1], -1)[..., 0]
    if how == "offset":
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    if how == "permuted":  # batches of a model that keeps heads beside features
        return x.movedim(0, -2).contiguous().movedim(-2, 0)
    assert how == "packed"
    return x


def assert_right(a: Tensor, b: Tensor, variant: str) -> None:
    """The product and both gradients against float64, beside PyTorch in the same dtype; and the same bits twice."""
    mine = run(lambda x, y: matmul(x, y, variant=variant), a, b)
    again = run(lambda x, y: matmul(x, y, variant=variant), a, b)
    truth, theirs = run(torch.matmul, a.double(), b.double()), run(torch.matmul, a, b)
    assert mine["c"].is_contiguous()
    eps = torch.finfo(a.dtype).eps
    terms = {"c": a.shape[-1], "da": b.shape[-1], "db": truth["c"].numel() // max(b.shape[-1], 1)}
    for name, x in mine.items():
        assert torch.equal(x, again[name]), f"{name} differs from run to run"
        # PyTorch's float64 is the truth itself, and a few sums of its may happen to be exact.
        exact = a.dtype == torch.float64 or x.numel() < FEW
        scale = float(truth[f"terms of {name}"].norm()) if exact else 0.0
        floor = 8 * eps if exact else eps
        if a.dtype == torch.float32 and a.is_cuda:
            # Where results are few, cuBLAS has several threads share a sum, which makes it more exact than a plain one.
            floor = max(floor, eps * terms[name] ** 0.5 / 4)
        assert_close(x, truth[name], theirs[name], floor=floor, scale=scale, name=name)


def run(compute: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> dict[str, Tensor]:
    """c, da and db, for a dc that every dtype holds exactly. In float64 also the size of their terms."""
    a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
    c = compute(a, b)
    dc = torch.randn(c.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(c.device, c.dtype)
    da, db = torch.autograd.grad(c, (a, b), dc)
    found = {"c": c.detach(), "da": da, "db": db}
    if compute is torch.matmul and a.dtype == torch.float64:
        squares = [x.detach().square().requires_grad_() for x in (a, b)]
        terms = compute(*squares)
        grads = torch.autograd.grad(terms, squares, dc.square())
        found |= {f"terms of {name}": x.sqrt() for name, x in zip(found, (terms.detach(), *grads), strict=True)}
    return found
