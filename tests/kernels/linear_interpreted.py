"""Runs the Triton kernels of linear_cross_entropy and linear in Triton's interpreter; see test_linear_triton.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from mended_interpreter import mend  # first: it chooses the interpreter

# isort: split
import torch
from torch import Tensor
from torch.nn import functional as F

from torchstorm.kernels.linear import op as linear_op
from torchstorm.kernels.linear.op import linear_forward
from torchstorm.kernels.linear.plain import linear_reference
from torchstorm.kernels.linear_cross_entropy import chunks, rows_triton
from torchstorm.kernels.linear_cross_entropy.op import linear_cross_entropy_forward
from torchstorm.kernels.linear_cross_entropy.rows_torch import Options


def cross_entropy(case: dict[str, Any]) -> dict[str, Any]:
    dtype = getattr(torch, case["dtype"])
    N, K, V = case["shape"]
    x, weight = torch.randn(N, K).to(dtype), (torch.randn(V, K) * K**-0.5 * case["spread"]).to(dtype)
    given = [x, weight] + ([torch.randn(V).to(dtype)] if case["bias"] else [])
    target = torch.randint(0, V, (N,))
    target[:: case["ignored"]] = -100
    reduction, softcap, smoothing = case["reduction"], case["softcap"], case["smoothing"]

    def kernels(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        options = -100, smoothing, softcap, reduction, True, True, bias is not None
        return linear_cross_entropy_forward(x, weight, bias, target, *options, "fused")[0]

    def plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        logits = F.linear(x, weight, bias)
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        return F.cross_entropy(logits, target, reduction=reduction, label_smoothing=smoothing)

    names = ["loss", "dx", "dweight", "dbias"][: len(given) + 1]
    return compared(
        kernels, plain, given, torch.linspace(0.5, 2, N) if reduction == "none" else torch.tensor(1.5), names
    )


def layer(case: dict[str, Any]) -> dict[str, Any]:
    dtype = getattr(torch, case["dtype"])
    M, K, N = case["shape"]
    given = [torch.randn(M, K).to(dtype), (torch.randn(N, K) * K**-0.5).to(dtype)]
    given += [torch.randn(N).to(dtype)] if case["bias"] else []
    activation = case["activation"]
    if case["transposed"]:
        given[:2] = (t.mT.contiguous().mT for t in given[:2])
        given[2] = given[2][:1].expand(N)

    def kernels(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear_forward(x, weight, bias, activation, True, case["variant"])[0]

    def plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear_reference(x, weight, bias, activation)

    names = ["y", "dx", "dweight", "dbias"][: len(given) + 1]
    found = compared(kernels, plain, given, torch.randn(M, N).to(dtype), names)
    # Without gradients nothing is kept, and another path taken.
    without = linear_forward(*given, *[None] * (3 - len(given)), activation, False, case["variant"])
    assert without[1].numel() == 0
    found["errors"]["y alone"] = error(without[0], plain(*(t.double() for t in given)))
    found["yardsticks"]["y alone"] = found["yardsticks"]["y"]
    return found


def compared(
    kernels: Callable[..., Tensor],
    plain: Callable[..., Tensor],
    given: list[Tensor],
    d_out: Tensor,
    names: list[str],
) -> dict[str, Any]:
    """Errors of both to `plain` in float64, by name."""

    def results(function: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in given]
        out = function(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, d_out.to(out.dtype))]

    dtype = given[0].dtype
    truth, ours, theirs = results(plain, torch.float64), results(kernels, dtype), results(plain, dtype)
    return {
        "errors": dict(zip(names, map(error, ours, truth), strict=True)),
        "yardsticks": dict(zip(names, map(error, theirs, truth), strict=True)),
        "epsilon": torch.finfo(dtype).eps,
    }


def error(out: Tensor, truth: Tensor) -> float:
    """Relative to the truth; infinite where anything is not finite, or not 0 where all of the truth is."""
    if not torch.isfinite(out).all():
        return float("inf")
    difference, size = (out.double() - truth).norm().item(), truth.norm().item()
    return difference / size if size else float("inf") if difference else 0.0


def extremes(case: dict[str, Any]) -> dict[str, Any]:
    """Rows of logits with infinities, NaN, and targets that are no class: what comes of each."""
    inf, nan = float("inf"), float("nan")
    rows = [[0.0, -inf, 1.0], [-inf] * 3, [0.0, inf, 1.0], [0.0, nan, 1.0], [3e4, -3e4, 0.0], [0.0, 0.0, 0.0]]
    target = torch.tensor([0, 0, 0, 0, 1, -100])
    options = Options(ignore_index=-100, label_smoothing=0.0, softcap=None)
    logits, loss, lse = torch.tensor(rows), torch.empty(6), torch.empty(6)
    rows_triton.losses(logits, 3, target, options, loss, lse, torch.ones(()))
    z = torch.tensor(rows, requires_grad=True)
    theirs = F.cross_entropy(z, target, reduction="none")
    (gradient,) = torch.autograd.grad(theirs.sum(), z)
    wrong = torch.zeros(2, 3)
    rows_triton.losses(wrong, 3, torch.tensor([3, -1]), options, loss[:2].clone(), lse[:2], torch.ones(()))
    return {
        "loss": loss.tolist(), "gradient": logits.tolist(), "their_loss": theirs.tolist(),
        "their_gradient": gradient.tolist(), "wrong": wrong.tolist(),
    }  # fmt: skip


RUNS = {"cross_entropy": cross_entropy, "layer": layer, "extremes": extremes}

if __name__ == "__main__":
    torch.set_num_threads(1)
    mend()
    linear_op._by_pytorch = lambda x, weight: False
    chunks.LEAST_BYTES["cpu"], chunks.ROW_BYTES["cpu"] = 0, 16
    for case in json.load(sys.stdin):
        torch.manual_seed(0)
        print(json.dumps({"name": case["name"], **RUNS[case["run"]](case)}), flush=True)
