"""Runs the mLSTM's quadratic Triton kernels and its ladder in Triton's interpreter; see mlstm_interpreted.py."""

from __future__ import annotations

import json
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

from mended_interpreter import mend  # first: it chooses the interpreter

# isort: split
import mlstm_interpreted
import torch

from torchstorm.kernels.mlstm import ladder_triton, quadratic_triton
from torchstorm.kernels.mlstm.ladder import mlstm_ladder


def climb(case: dict[str, Any]) -> dict[str, Any]:
    """A rung of its own against its reference."""
    rung = next(rung for rung in mlstm_ladder() if rung.name == case["rung"])
    dtype = getattr(torch, case["dtype"])
    (q, k, v, i, f), *_ = mlstm_interpreted.make(case, dtype)
    named = {"q": q, "k": k, "k_t": k.mT, "v": v, "i": i, "f": f}
    given = [named[name] for name in rung.inputs]
    truth, out = rung.reference(*(x.double() for x in given)), getattr(ladder_triton, rung.name)(*given)
    errors = {"h": mlstm_interpreted.error(out, truth)}
    return {"name": case["name"], "errors": errors, "yardsticks": {"h": _plain(rung, given, truth)}}


def _plain(rung: Any, given: list[torch.Tensor], truth: torch.Tensor) -> float:
    return mlstm_interpreted.error(rung.reference(*given), truth)


def run(case: dict[str, Any]) -> dict[str, Any]:
    if "rung" in case:
        return climb(case)
    names = ("forward", "backward")
    chosen = {name: partial(getattr(quadratic_triton, name), tensor_cores=case["tensor_cores"]) for name in names}
    mlstm_interpreted.chunkwise_triton = SimpleNamespace(**chosen)  # type: ignore[assignment]
    return mlstm_interpreted.run(case)


if __name__ == "__main__":
    torch.set_num_threads(1)
    mend()
    for case in json.load(sys.stdin):
        print(json.dumps(run(case)), flush=True)
