"""Runs elementwise Triton kernels, dropout's and batch_norm_act's in Triton's interpreter; see interpreting.py.

A case names a check of `elementwise_runs` and its arguments; what comes back is what the check had to say.
"""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any

from mended_interpreter import mend  # first: it chooses the interpreter

# isort: split
import torch

from kernels import elementwise_runs
from torchstorm.kernels.variants import Variant


def run(case: dict[str, Any]) -> dict[str, str]:
    torch.manual_seed(0)
    arguments = case["arguments"] | {"dtype": getattr(torch, case["arguments"]["dtype"])}
    try:
        getattr(elementwise_runs, case["check"])(**arguments)
    except Exception:
        return {"name": case["name"], "failure": traceback.format_exc()}
    return {"name": case["name"], "failure": ""}


if __name__ == "__main__":
    torch.set_num_threads(1)
    mend()
    Variant.why_not = lambda *_: ""  # type: ignore[method-assign,assignment]
    for case in json.load(sys.stdin):
        print(json.dumps(run(case)), flush=True)
