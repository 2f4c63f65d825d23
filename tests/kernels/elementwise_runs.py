"""Elementwise operations, dropout, batch_norm_act held to the tolerance rule: on a CPU, in the interpreter, on a GPU.

Each check draws its inputs, runs the operation and its gradients twice, and fails where a result differs from float64
by more than the rule allows, in strides from PyTorch's, or from itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from close import assert_all_close
from torchstorm import kernels
from torchstorm.kernels.dropout.philox import keep, scale_of

Results = dict[str, Tensor]

ACTIVATIONS: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor], Tensor]]] = {
    "relu": (kernels.relu, F.relu),
    "sigmoid": (kernels.sigmoid, torch.sigmoid),
    "gelu": (kernels.gelu, F.gelu),
    "gelu_tanh": (partial(kernels.gelu, approximate="tanh"), partial(F.gelu, approximate="tanh")),
    "silu": (kernels.silu, F.silu),
}
"""Ours and PyTorch's, by name."""

LAYOUTS: dict[str, Callable[..., Tensor]] = {
    "flat": lambda **to: torch.randn(11003, **to),
    "odd": lambda **to: torch.randn(3, 131, **to),
    "one number": lambda **to: torch.randn((), **to),
    "nothing": lambda **to: torch.randn(3, 0, 2, **to),
    "transposed": lambda **to: torch.randn(37, 101, **to).t(),
    "channels last": lambda **to: torch.randn(2, 5, 7, 3, **to).to(memory_format=torch.channels_last),
    "every third": lambda **to: torch.randn(19, 130, **to)[:, ::3],
    "expanded": lambda **to: torch.randn(13, 1, 5, **to).expand(13, 4, 5),
    "six dimensions": lambda **to: torch.randn(4, 4, 4, 4, 4, 6, **to)[::2, ::3, ::2, ::3, ::2, ::4],
}
PAIRS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "same": ((67, 131), (67, 131)),
    "a bias": ((67, 131), (131,)),
    "a factor a row": ((19, 1), (19, 132)),
    "a row and a column": ((1, 131), (19, 1)),
    "one number": ((67, 131), ()),
    "of each channel": ((3, 5, 40), (5, 1)),
    "of each batch and column": ((3, 50, 40), (3, 1, 40)),
    "tangled": ((2, 1, 3, 1, 2, 1), (1, 2, 1, 2, 1, 3)),
    "nothing": ((0, 4), (4,)),
    "a long bias": ((5000, 24), (24,)),
    "a factor for each of many rows": ((303, 520), (303, 1)),
    "one number for many": ((9001,), (1,)),
}
SPECIAL = (float("nan"), float("inf"), -float("inf"), 1e20, -1e20, 3.0, -3.0, 0.0, -0.0, 90.0, -90.0)


def check_activation(name: str, layout: str, variant: str, dtype: torch.dtype, device: str = "cpu") -> None:
    ours, theirs = ACTIVATIONS[name]
    x = LAYOUTS[layout](device=device).mul(2.0)
    x = x.to(dtype) if layout != "expanded" else x[:, :1].to(dtype).expand(x.shape)
    dy = torch.randn(x.shape, device=device).to(dtype)
    _hold(partial(ours, variant=variant), theirs, [x], dy)


def check_pair(op: str, pair: str, variant: str, dtype: torch.dtype, device: str = "cpu") -> None:
    a, b = (torch.randn(size, device=device).to(dtype) for size in PAIRS[pair])
    dy = torch.randn(torch.broadcast_shapes(a.shape, b.shape), device=device).to(dtype)
    _hold(partial(getattr(kernels, op), variant=variant), getattr(torch, op), [a, b], dy)


def check_strided_pair(op: str, variant: str, dtype: torch.dtype, device: str = "cpu") -> None:
    """A transposed factor, one of every other row, and a gradient that is one number, expanded."""
    a = torch.randn(66, 43, device=device).to(dtype).t()
    b = torch.randn(86, 66, device=device).to(dtype)[::2]
    dy = torch.ones((), dtype=dtype, device=device).expand(43, 66)
    _hold(partial(getattr(kernels, op), variant=variant), getattr(torch, op), [a, b], dy)


def check_special(name: str, variant: str, dtype: torch.dtype, device: str = "cpu") -> None:
    """NaN, infinities and what overflows within: finite results are right, and others of PyTorch's kind."""
    ours, theirs = ACTIVATIONS[name]
    # In float64; for gelu of infinity, PyTorch's vectorised code on a CPU makes NaN, and its GPU's does not.
    value, slope = [], []
    for number in SPECIAL:
        x = torch.tensor(number, dtype=dtype).double().requires_grad_()
        y = x if name.startswith("gelu") and number == float("inf") else theirs(x)
        value.append(y.detach())
        slope.append(torch.autograd.grad(theirs(x), x)[0])
    for count in (1, 8):
        x = torch.tensor(SPECIAL, dtype=dtype, device=device).repeat(count).requires_grad_()
        y = ours(x, variant=variant)
        (dx,) = torch.autograd.grad(y.sum(), x)
        for found, wanted in ((y, value), (dx, slope)):
            truth = torch.stack(wanted).to(dtype).repeat(count)
            torch.testing.assert_close(found.detach().cpu(), truth, equal_nan=True, rtol=1e-2, atol=1e-30)


SEEDS = ((-(2**63), 0.1), (2**63 - 1, 0.9), (0, 0.5), (7, 0.0), (7, 1.0))


def check_dropout(
    variant: str, dtype: torch.dtype, device: str = "cpu", num: int = 9001, num_seeds: int = len(SEEDS)
) -> None:
    """The mask is that of the seed alone, the same for the gradient; NaN stays, dropped or not."""
    x = torch.randn(num, device=device).to(dtype).requires_grad_()
    for seed, p in SEEDS[:num_seeds]:
        mask = keep(torch.tensor(seed), num, p).to(device)
        scale = scale_of(p)
        y = kernels.dropout(x, p, seed=seed, variant=variant)
        dy = torch.randn(num, device=device).to(dtype)
        (dx,) = torch.autograd.grad(y, x, dy)
        kept = mask & (p < 1.0)
        truth = {"y": x.detach().double() * kept * scale, "dx": dy.double() * kept * scale}
        plain = {name: each.to(dtype) for name, each in truth.items()}
        assert_all_close({"y": y.detach(), "dx": dx}, truth, plain)
        assert torch.equal(y != 0, kept & (x != 0))
    x = torch.full((5, 7), float("nan"), dtype=dtype, device=device)
    assert kernels.dropout(x, 0.5, seed=1, variant=variant).isnan().all()


NORMS: dict[str, tuple[tuple[int, ...], str]] = {
    "of features": ((67, 13), ""),
    "of images": ((3, 5, 7, 11), ""),
    "of images, channels last": ((3, 20, 7, 11), "channels last"),
    "of images, transposed": ((5, 6, 4, 8), "transposed"),
    "of long rows": ((2, 2, 4500), ""),
    "of many rows": ((9000, 6), ""),
    "of several tiles": ((3, 20, 1500), ""),
    "of one sample": ((1, 17, 23), ""),
    "of a first sample far off": ((400, 6), "far"),
    "of many channels, one sample far off": ((300, 1030), "far"),
}
"""Shapes, and how x lies in memory, or what else is special."""


def check_batch_norm(
    norm: str,
    activation: Any,
    variant: str,
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    training: bool = True,
    affine: bool = True,
) -> None:
    """Means far from 0; the running statistics too."""
    shape, layout = NORMS[norm]
    C = shape[1]
    x = torch.randn(shape, device=device).add_(torch.arange(C, device=device).view(-1, *[1] * (len(shape) - 2)))
    x = x.to(dtype)
    if layout == "far":
        x[0] += 30
    elif layout:
        lying = {"channels last": (0, 2, 3, 1), "transposed": (3, 1, 0, 2)}[layout]
        x = x.permute(lying).contiguous().permute([lying.index(d) for d in range(4)])
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    weight, bias = (torch.randn(2, C, device=device) + 1.0).to(wide).unbind()
    running = torch.rand(2, C, device=device).add_(0.5).unbind()
    dy = torch.randn(shape, device=device).to(dtype)
    norm_parts = [weight, bias] if affine else []

    def ours(x: Tensor, *parts: Tensor) -> Tensor:
        return kernels.batch_norm_act(
            x, *(parts or (None, None)), *ours.running, training=training, momentum=0.3, eps=1e-3,  # type: ignore
            activation=activation, variant=variant,
        )  # fmt: skip

    def theirs(x: Tensor, *parts: Tensor) -> Tensor:
        mean, var = (each.to(torch.float64 if x.dtype == torch.float64 else wide, copy=True) for each in theirs.running)  # type: ignore
        z = F.batch_norm(x, mean, var, *(parts or (None, None)), training, 0.3, 1e-3)
        theirs.after = mean, var  # type: ignore[attr-defined]
        return getattr(F, activation)(z) if activation else z

    ours.running = [each.to(wide, copy=True) for each in running]  # type: ignore
    theirs.running = running  # type: ignore[attr-defined]
    before = [each.clone() for each in ours.running]  # type: ignore[attr-defined]
    ours(x, *norm_parts)
    after = ours.running  # type: ignore[attr-defined]
    theirs(x.double(), *(each.double() for each in norm_parts))
    truth = dict(zip(("mean", "var"), theirs.after, strict=True))  # type: ignore[attr-defined]
    theirs(x, *norm_parts)
    plain = dict(zip(("mean", "var"), theirs.after, strict=True))  # type: ignore[attr-defined]
    floor = 1e-12 if dtype == torch.float64 else None
    assert_all_close(dict(zip(("mean", "var"), after, strict=True)), truth, plain, floor=floor)
    assert training or all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    _hold(ours, theirs, [x, *norm_parts], dy)


def _hold(ours: Callable[..., Tensor], theirs: Callable[..., Tensor], inputs: Sequence[Tensor], dy: Tensor) -> None:
    truth, plain = _run(theirs, [x.double() for x in inputs], dy.double()), _run(theirs, inputs, dy)
    found, again = _run(ours, inputs, dy), _run(ours, inputs, dy)
    # Sums over what was broadcast, or over channels, may cancel: what they are sums of is the measure then.
    scales = {
        name: float(dy.double().norm()) * max(1.0, float(max(x.double().abs().max() for x in inputs)))
        for name, x in zip(("d0", "d1", "d2"), inputs, strict=False)
        if x.shape != dy.shape and dy.numel()
    }
    # In float64 the truth itself is no better. A GPU's e^x and 1 / x in fp32 are off by up to two units.
    floor = {torch.float64: 1e-12, torch.float32: 2 * torch.finfo(torch.float32).eps if dy.is_cuda else None}.get(
        dy.dtype
    )
    assert_all_close(found, truth, plain, scales=scales, floor=floor)
    for name, x in found.items():
        assert torch.equal(x, again[name]), f"{name} differs from run to run"
        assert x.dtype == plain[name].dtype
    dense = dy.numel() and all(x.shape == dy.shape for x in inputs)
    assert not dense or found["y"].stride() == torch.empty_like(inputs[0]).stride()


def _run(function: Callable[..., Tensor], inputs: Sequence[Tensor], dy: Tensor) -> Results:
    own = [x.detach().requires_grad_() for x in inputs]
    y = function(*own)
    grads = torch.autograd.grad(y, own, dy)
    return {"y": y.detach(), **{f"d{number}": grad for number, grad in enumerate(grads)}}
