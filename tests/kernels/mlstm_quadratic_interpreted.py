"""Runs the quadratic Triton kernels of the mLSTM in Triton's interpreter, as mlstm_interpreted.py the chunkwise ones."""

from __future__ import annotations

import json
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import mlstm_interpreted  # first: it chooses the interpreter
import torch

from torchstorm.kernels.mlstm import quadratic_triton


def run(case: dict[str, Any]) -> dict[str, Any]:
    names = ("forward", "backward")
    chosen = {name: partial(getattr(quadratic_triton, name), tensor_cores=case["tensor_cores"]) for name in names}
    mlstm_interpreted.chunkwise_triton = SimpleNamespace(**chosen)  # type: ignore[assignment]
    return mlstm_interpreted.run(case)


if __name__ == "__main__":
    torch.set_num_threads(1)
    mlstm_interpreted.mend()
    for case in json.load(sys.stdin):
        print(json.dumps(run(case)), flush=True)
