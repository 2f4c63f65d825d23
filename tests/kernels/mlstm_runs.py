"""Inputs for the mLSTM, and its outputs and gradients by any way of computing it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchstorm.kernels.mlstm.reference import MLSTMState, mlstm_reference

GATES = ("normal", "forget", "remember", "shut", "open", "equal", "wild")
"""How gates are drawn: normally; sigmoid(f) near 0, near 1 throughout; i = -30, +30; all equal; i from -30 to 30."""


class Inputs(NamedTuple):
    """What `mlstm` takes, and the weights of a linear loss over what it returns."""

    q: Tensor
    k: Tensor
    v: Tensor
    i: Tensor
    f: Tensor
    state: MLSTMState | None
    cu_seqlens: Tensor | None
    loss: tuple[Tensor, Tensor, Tensor, Tensor]

    def to(self, dtype: torch.dtype, state_dtype: torch.dtype | None = None) -> Inputs:
        """The same values in another dtype, the state and its gradients in that or one of its own."""
        wide = state_dtype or dtype
        state = None if self.state is None else MLSTMState(*(x.to(wide) for x in self.state))
        h, *rest = self.loss
        loss = h.to(dtype), *(x.to(wide) for x in rest)
        q, k, v, i, f = (x.to(dtype) for x in self[:5])
        return Inputs(q, k, v, i, f, state, self.cu_seqlens, loss)  # type: ignore[arg-type]


def draw(
    B: int,
    H: int,
    S: int,
    K: int,
    V: int,
    *,
    dtype: torch.dtype = torch.float32,
    gates: str | tuple[str, ...] = "normal",
    state: bool = True,
    lengths: list[int] | None = None,
    device: str = "cpu",
) -> Inputs:
    """Inputs in `dtype`, drawn from the global generator; packed sequences of those lengths where some are given.

    With several ways to draw gates, each row of the batch has the next one.
    """
    N = B if lengths is None else len(lengths)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, dtype=torch.float64, device=device)

    i, f = normal(B, H, S), normal(B, H, S)
    ways = (gates,) if isinstance(gates, str) else gates
    rows = [_gates(ways[row % len(ways)], i[row : row + 1], f[row : row + 1]) for row in range(B)]
    i, f = (torch.cat(gate) for gate in zip(*rows, strict=True)) if rows else (i, f)
    start = MLSTMState(normal(N, H, K, V), normal(N, H, K), normal(N, H)) if state else None
    loss = normal(B, H, S, V), normal(N, H, K, V), normal(N, H, K), normal(N, H)
    cu_seqlens = None
    if lengths is not None:
        cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0)
    inputs = Inputs(normal(B, H, S, K), normal(B, H, S, K), normal(B, H, S, V), i, f, start, cu_seqlens, loss)
    return inputs.to(dtype, torch.float64 if dtype == torch.float64 else torch.float32)


def conditioned(inputs: Inputs) -> Inputs:
    """The same with q, k and the initial n >= 0: q.n is far from 0 in every row.

    Where it is near 0, that one row, with its huge 1 / |q.n|, makes up the error of all, and luck says whose is less.
    """
    state = inputs.state and inputs.state._replace(n=inputs.state.n.abs())
    return inputs._replace(q=inputs.q.abs(), k=inputs.k.abs(), state=state)


def _gates(way: str, i: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
    return {
        "normal": (i, f + 2),
        "forget": (i, f - 30),
        "remember": (i, f + 30),
        "shut": (i * 0 - 30, f + 2),
        "open": (i * 0 + 30, f + 2),
        "equal": (i * 0 + 1, f * 0 + 1),
        "wild": (i.tanh() * 30, f * 10),
    }[way]


def results(
    compute: Callable[..., Any], inputs: Inputs, *, gate: str = "exp", through_state: bool = True
) -> dict[str, Tensor]:
    """Outputs and all gradients, by name.

    `compute(q, k, v, i, f, state, cu_seqlens, gate)` returns (h, final state). The loss is linear in h and, with
    `through_state`, in the final state.
    """
    leaves = {name: x.clone().requires_grad_() for name, x in zip("qkvif", inputs[:5], strict=True)}
    start = None
    if inputs.state is not None:
        # The sigmoid gate knows neither n nor m.
        kept = inputs.state._fields if gate == "exp" else ("C",)
        start = MLSTMState(*(x.clone().requires_grad_(name in kept) for name, x in inputs.state._asdict().items()))
        leaves |= {f"{name}0": getattr(start, name) for name in kept}
    h, state = compute(*list(leaves.values())[:5], start, inputs.cu_seqlens, gate)
    outputs = {"h": h, **state._asdict()}
    reached = {name: x for name, x in outputs.items() if x.requires_grad and (through_state or name == "h")}
    weights = dict(zip(outputs, inputs.loss, strict=True))
    grads = torch.autograd.grad(
        [x for x in reached.values()],
        list(leaves.values()),
        [weights[name].to(x.dtype) for name, x in reached.items()],
        materialize_grads=True,
    )
    found = {name: x.detach() for name, x in outputs.items()}
    return found | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def by_row(found: dict[str, Tensor], ways: tuple[str, ...] = GATES) -> dict[str, Tensor]:
    """The same for each row of the batch by itself, so that a large one does not hide a small one."""
    return {
        f"{name} of row {row} ({ways[row % len(ways)]})": part
        for name, x in found.items()
        for row, part in enumerate(x)
    }


def truth(inputs: Inputs, *, gate: str = "exp", through_state: bool = True) -> dict[str, Tensor]:
    """`results` of the recurrence in float64."""
    return results(by_definition("recurrent"), inputs.to(torch.float64), gate=gate, through_state=through_state)


def yardsticks(
    inputs: Inputs,
    *,
    gate: str = "exp",
    through_state: bool = True,
    forms: tuple[str, ...] = ("recurrent", "quadratic"),
) -> list[dict[str, Tensor]]:
    """`results` of the recurrence and of the quadratic form, all in the inputs' own dtype.

    What overflows in fp16 in all of them is that of bfloat16 with its error made as small as fp16's rounding is beside
    bfloat16's: a plain computation in fp16 that had the range.
    """
    options: dict[str, Any] = {"gate": gate, "through_state": through_state}
    found = [results(by_definition(form), inputs.to(inputs.q.dtype), **options) for form in forms]
    lost = [name for name in found[0] if not any(one[name].isfinite().all() for one in found)]
    if inputs.q.dtype == torch.float16 and lost:
        ratio = torch.finfo(torch.float16).eps / torch.finfo(torch.bfloat16).eps
        right, coarse = truth(inputs, **options), inputs.to(torch.bfloat16)
        coarse_right = truth(coarse, **options)
        for form, one in zip(forms, found, strict=True):
            wide = results(by_definition(form), coarse, **options)
            one |= {name: right[name] + (wide[name].double() - coarse_right[name]) * ratio for name in lost}
    return found


def by_definition(form: str) -> Callable[..., Any]:
    """A `compute` for `results`, in the inputs' dtype."""
    return lambda q, k, v, i, f, state, cu_seqlens, gate: mlstm_reference(
        q, k, v, i, f, state, cu_seqlens=cu_seqlens, gate=gate, form=form
    )
