"""Runs softmax and the norms in Triton's interpreter, for test_softmax.py and test_norms.py: cases in, failures out.

A process of its own, because the interpreter is chosen when Triton is imported. Tiles are so small that all loops run.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from mended_interpreter import mend  # first: it chooses the interpreter

# isort: split
import torch

from kernels.norm_runs import assert_as_pytorch_at_extremes, assert_right, draw, extremes
from torchstorm.kernels.norms import launch_triton as norms
from torchstorm.kernels.rows import Tile
from torchstorm.kernels.softmax import launch_triton as softmax

_WALKING = {"online": Tile(block=16, per_sm=1), "persistent": Tile(block=64, rows=2, per_sm=1, stages=2)}


def small(variant: str, *_: Any, **__: Any) -> Tile:
    return _WALKING.get(variant, Tile(block=16 if variant == "naive" else 64))


def small_forward(variant: str, *_: Any, **__: Any) -> Tile:
    return Tile(block=16) if variant == "fused" else small(variant)


def run(case: dict[str, Any]) -> dict[str, Any]:
    op, variant, dtype = case["op"], case["variant"], getattr(torch, case["dtype"])
    try:
        if case["extremes"]:
            assert_as_pytorch_at_extremes(op, variant, extremes(case["shape"][1]))
        else:
            mask = None if case["mask"] is None else tuple(case["mask"])
            options = {"params": case["params"], "param_dtype": torch.float32}
            inputs = draw(op, tuple(case["shape"]), dtype, mask=mask, **options)
            if case["far"]:
                inputs["x"][..., (0, -1)] = case["far"]
            if case["transposed"]:
                inputs |= {name: inputs[name].transpose(0, 1).contiguous().transpose(0, 1) for name in ("x", "dy")}
            assert_right(op, variant, inputs)
    except AssertionError as failure:
        return {"name": case["name"], "failure": str(failure)}
    return {"name": case["name"], "failure": ""}


if __name__ == "__main__":
    torch.set_num_threads(1)
    mend()
    norms.backward_tile = small
    norms.forward_tile = softmax.forward_tile = softmax.backward_tile = small_forward
    norms.split_tile = lambda _: norms.SplitTile(chunk=4, lag=1, block=16, rows=2, columns=16)  # type: ignore[assignment]
    norms._COLUMN_TILE = Tile(block=16, rows=2, per_sm=2)
    norms._TOTAL_TILE = Tile(block=16, rows=2)
    for case in json.load(sys.stdin):
        print(json.dumps(run(case)), flush=True)
