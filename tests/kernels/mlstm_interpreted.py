"""Runs the mLSTM's Triton kernels in Triton's interpreter, for test_mlstm_triton.py: cases in, errors out, as JSON.

A process of its own, because the interpreter is chosen when Triton is imported.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from mended_interpreter import mend  # first: it chooses the interpreter

# isort: split
import torch
from torch import Tensor

from torchstorm.kernels.mlstm import chunkwise_triton
from torchstorm.kernels.mlstm.op import mlstm_forward
from torchstorm.kernels.mlstm.reference import MLSTMState, mlstm_reference
from torchstorm.kernels.mlstm.tiles import Tile, Tiles

NAMES = ("h", "C", "n", "m", "dq", "dk", "dv", "di", "df", "dC0", "dn0", "dm0")


def small_tiles(group: int, chunk: int, chunk_backward: int, block: int, rows: int) -> Tiles:
    """Tiles so small that every loop over them runs."""
    tile = Tile(block_k=block, block_v=block, rows=rows)
    return Tiles(
        group=group,
        chunk=chunk,
        chunk_backward=chunk_backward,
        states=tile,
        outputs=tile,
        states_backward=tile,
        state_gradients=tile,
        q_gradients=tile,
        k_v_gradients=tile,
    )


def make(case: dict[str, Any], dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor]:
    """Inputs, states at the start, gradients to the states at the end, and dh."""
    torch.manual_seed(0)
    B, H, S, K, V = case["shape"]
    N = len(case["cu"]) - 1 if case["cu"] else B
    (i_mean, i_scale), (f_mean, f_scale) = case["gates"]
    if case["transposed"]:
        q, k, v, dh = (torch.randn(B, S, H, d).to(dtype).transpose(1, 2) for d in (K, K, V, V))
    else:
        q, k, v, dh = (torch.randn(B, H, S, d).to(dtype) for d in (K, K, V, V))
    i, f = torch.randn(B, H, S) * i_scale + i_mean, torch.randn(B, H, S) * f_scale + f_mean
    start, end = ([torch.randn(N, H, K, V), torch.randn(N, H, K), torch.randn(N, H)] for _ in range(2))
    if case["nothing_before"]:
        start[2].fill_(-torch.inf)
    return [q, k, v, i.to(dtype), f.to(dtype)], start, end, dh


def reference(case: dict[str, Any], dtype: torch.dtype, form: Any, made: Any) -> dict[str, Tensor]:
    """The definition under autograd, in a dtype."""
    inputs, start, end, dh = made
    sigmoid = case["gate"] == "sigmoid"
    inputs = [x.detach().to(dtype).requires_grad_() for x in inputs]
    first = [x.to(dtype).requires_grad_() for x in start] if case["state"] else []
    cu = torch.tensor(case["cu"]) if case["cu"] else None
    initial = MLSTMState(*first) if first else None
    h, state = mlstm_reference(*inputs, initial, cu_seqlens=cu, gate=case["gate"], form=form)
    loss = (h * dh.to(dtype)).sum()
    if case["state"]:
        wanted = zip(state, end, (True, not sigmoid, not sigmoid), strict=True)
        loss = loss + sum((x * dx.to(dtype)).sum() for x, dx, is_wanted in wanted if is_wanted)
    grads = torch.autograd.grad(loss, inputs + first, allow_unused=True)
    values = [h, *state, *grads]
    names = [name for name in NAMES if not (sigmoid and name in ("n", "m", "dn0", "dm0"))]
    return {name: x.detach() for name, x in zip(NAMES, values, strict=False) if name in names and x is not None}


def kernels(case: dict[str, Any], made: Any) -> dict[str, Tensor]:
    inputs, start, end, dh = made
    sigmoid = case["gate"] == "sigmoid"
    first, last = (start, end) if case["state"] else ([None] * 3, [None] * 3)
    if sigmoid:
        first, last = [first[0], None, None], [last[0], None, None]
    cu = torch.tensor(case["cu"], dtype=torch.int32) if case["cu"] else None
    tiles = small_tiles(**case["tiles"]) if case["tiles"] else None
    options = cu, case["chunk"], case["gate"]
    h, C, n, m, *kept = chunkwise_triton.forward(*inputs, *first, *options, tiles=tiles)
    grads = chunkwise_triton.backward(
        dh, *last, *inputs, *first, cu, h, *kept, C, n, m, case["chunk"], case["gate"], tiles=tiles
    )
    return {name: x for name, x in zip(NAMES, [h, C, n, m, *grads], strict=True) if x is not None}


def error(out: Tensor, truth: Tensor) -> float:
    """Relative to the truth, infinite where anything is not finite."""
    if not torch.isfinite(out).all():
        return float("inf")
    difference, size = (out.double() - truth).norm().item(), truth.norm().item()
    return difference / size if size else difference


def run(case: dict[str, Any]) -> dict[str, Any]:
    start = time.perf_counter()
    dtype = getattr(torch, case["dtype"])
    made = make(case, dtype)
    truth = reference(case, torch.float64, "recurrent", made)
    yardsticks = [reference(case, dtype, form, made) for form in ("recurrent", "quadratic")]
    out = kernels(case, made)
    seconds = time.perf_counter() - start
    errors = {name: error(out[name], x) for name, x in truth.items()}
    allowed = {name: max(error(y[name], x) for y in yardsticks) for name, x in truth.items()}
    sizes = {name: x.numel() for name, x in truth.items()}
    found = {"errors": errors, "yardsticks": allowed, "sizes": sizes, "epsilon": torch.finfo(dtype).eps}
    return {"name": case["name"], "seconds": seconds, **found}


def check_operator() -> dict[str, Any]:
    """torch.library.opcheck of the operator: schema, fake implementation, autograd, and tracing with other sizes."""
    verdicts = {}
    packed = torch.tensor([0, 5, 20], dtype=torch.int32)
    for name, cu, gate, num_given in (
        ("with a state", None, "exp", 3),
        ("packed, sigmoid", packed, "sigmoid", 1),
        ("packed", packed, "exp", 0),
    ):
        N = 1 if cu is None else 2
        sizes = (
            (1, 2, 20, 16),
            (1, 2, 20, 16),
            (1, 2, 20, 24),
            (1, 2, 20),
            (1, 2, 20),
            (N, 2, 16, 24),
            (N, 2, 16),
            (N, 2),
        )
        given = [torch.randn(size, requires_grad=True) for size in sizes]
        state = [*given[5 : 5 + num_given], None, None, None][:3]
        verdicts[name] = torch.library.opcheck(mlstm_forward, (*given[:5], *state, cu, 16, gate, "triton-chunkwise"))
    return {"name": "operator", "verdicts": verdicts}


if __name__ == "__main__":
    torch.set_num_threads(1)
    mend()
    print(json.dumps(check_operator()), flush=True)
    for case in json.load(sys.stdin):
        print(json.dumps(run(case)), flush=True)
