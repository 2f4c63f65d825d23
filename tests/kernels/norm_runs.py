"""What the tests of softmax, log_softmax, layer_norm and rms_norm share: inputs, results with gradients, the truth."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from close import assert_all_close
from torchstorm.kernels.norms.op import norm_forward
from torchstorm.kernels.norms.reference import layer_norm_reference, rms_norm_reference
from torchstorm.kernels.softmax.op import softmax_forward
from torchstorm.kernels.softmax.reference import log_softmax_reference, softmax_reference

OPS = ("softmax", "log_softmax", "layer_norm", "rms_norm")
EPS = 1e-5

Inputs = dict[str, Any]
Compute = Callable[[Inputs], Tensor]


def draw(
    op: str,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    *,
    mask: tuple[int, ...] | None = None,
    params: str = "all",
    param_dtype: torch.dtype | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> Inputs:
    """x and dy, a mask of a shape for softmax, with a row that sees nothing, and "all", "weight" or "no" params."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    made: Inputs = {"x": (2 * normal(*shape) + 0.5).to(dtype), "dy": normal(*shape).to(dtype)}
    if mask is not None:
        seen = torch.rand(mask, generator=generator) > 0.4
        if len(mask) > 1:
            seen[(0,) * (len(mask) - 1)] = False
        made["mask"] = seen
    if op.endswith("norm"):
        names = {"all": ("weight", "bias"), "weight": ("weight",), "no": ()}[params]
        for name in names if op == "layer_norm" else names[:1]:
            made[name] = (1 + normal(shape[-1]) / 2).to(param_dtype or dtype)
    return {name: x.to(device) for name, x in made.items()}


def reference(op: str, given: Inputs) -> Tensor:
    """The definition, in the dtype of what is given."""
    x, mask, weight, bias = (given.get(name) for name in ("x", "mask", "weight", "bias"))
    assert x is not None
    if op == "layer_norm":
        return layer_norm_reference(x, weight, bias, EPS)
    if op == "rms_norm":
        return rms_norm_reference(x, weight, EPS)
    return (softmax_reference if op == "softmax" else log_softmax_reference)(x, mask)


def by(op: str, variant: str) -> Compute:
    """The operator by a variant, wherever the inputs are: in Triton's interpreter they are on the CPU."""

    def compute(given: Inputs) -> Tensor:
        x, mask, weight, bias = (given.get(name) for name in ("x", "mask", "weight", "bias"))
        if op.endswith("norm"):
            return norm_forward(x, weight, bias, EPS, op == "layer_norm", torch.is_grad_enabled(), variant)[0]
        return softmax_forward(x, mask, op == "log_softmax", variant)

    return compute


def results(compute: Compute, inputs: Inputs, *, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """y and the gradients, in another dtype where one is given. What a mask hides in y is taken out of it."""
    own: Inputs = {}
    for name, x in inputs.items():
        x = x if dtype is None or not x.is_floating_point() else x.to(dtype)
        own[name] = x.detach().requires_grad_() if name in ("x", "weight", "bias") else x
    y = compute(own)
    names = [name for name in ("x", "weight", "bias") if name in own]
    grads = torch.autograd.grad(y, [own[name] for name in names], own["dy"])
    y = y.detach()
    if "mask" in inputs:
        hidden = ~inputs["mask"].expand(y.shape)
        assert bool(((y == 0) | (y == -torch.inf))[hidden].all()), "what is hidden is neither 0 nor -inf"
        y = y.masked_fill(hidden, 0.0)
    return {"y": y, **{f"d{name}": x for name, x in zip(names, grads, strict=True)}}


def assert_right(
    op: str, variant: str, inputs: Inputs, *, floor: float | None = None, compute: Compute | None = None
) -> None:
    """Against float64, with PyTorch in the same dtype as yardstick; and the same bits twice."""
    compute = compute or by(op, variant)
    found, again = results(compute, inputs), results(compute, inputs)
    for name, x in found.items():
        assert torch.equal(x, again[name]), f"{name} differs from run to run"
        assert x.dtype == inputs[{"y": "x"}.get(name, name.removeprefix("d"))].dtype
    plain = functools.partial(reference, op)
    truth = results(plain, inputs, dtype=torch.float64)
    assert_all_close(found, truth, results(plain, inputs), floor=floor, scales=_scales(op, inputs))


def _scales(op: str, inputs: Inputs) -> dict[str, float]:
    """Of dx of a norm, the size of its first term: of one or two features, or equal ones, the others leave little."""
    if not op.endswith("norm"):
        return {}
    x, g = inputs["x"].double(), inputs["dy"].double()
    left = x - x.mean(-1, keepdim=True) if op == "layer_norm" else x
    rstd = (left.square().mean(-1, keepdim=True) + EPS).rsqrt()
    return {"dx": float((g * inputs.get("weight", torch.ones_like(g)) * rstd).norm())}


def extremes(N: int = 40) -> Tensor:
    """Rows with NaN, infinities, large numbers, or all alike: (9, N) in float32."""
    x = torch.randn(9, N, generator=torch.Generator().manual_seed(0))
    x[0, 3], x[1, N - 1], x[2, 5] = torch.nan, torch.inf, -torch.inf
    x[3], x[4] = -torch.inf, 3.7
    x[5, 1:3] = torch.inf
    x[6] *= 1e4
    x[7], x[8] = torch.nan, 0.0
    return x


def assert_as_pytorch_at_extremes(op: str, variant: str, x: Tensor) -> None:
    """NaN and infinities in y where PyTorch has them, and in the same rows of dx; elsewhere float64's numbers.

    PyTorch's own are not the measure: of a row of 3.7 alone its kernel for a GPU makes 7.5e-5 where the truth is 0. Nor
    is its float64 on a GPU: RMSNorm there takes the mean of squares as variance + mean^2 (2.11), so that an infinity
    makes the whole row NaN, where in float32, and on a CPU, the row's other numbers become 0. So the truth is a CPU's.
    """
    inputs = draw(op, tuple(x.shape), x.dtype, params="no", device=str(x.device)) | {"x": x}
    found = {name: t.cpu() for name, t in results(by(op, variant), inputs).items()}
    plain = functools.partial(reference, op)
    truth = results(plain, {name: t.cpu() for name, t in inputs.items()}, dtype=torch.float64)
    theirs = results(plain, inputs)["y"].cpu()
    finite = theirs.isfinite()
    assert torch.equal(found["y"].isfinite(), finite)
    torch.testing.assert_close(found["y"][~finite], theirs[~finite], equal_nan=True)
    torch.testing.assert_close(found["y"][finite].double(), truth["y"][finite], rtol=1e-4, atol=1e-5)
    rows = truth["dx"].isfinite().all(-1)
    torch.testing.assert_close(found["dx"][rows].double(), truth["dx"][rows], rtol=1e-3, atol=1e-4)
    assert not found["dx"][~rows].isfinite().all(-1).any()
