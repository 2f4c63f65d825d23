"""On a GPU: operations that draw random numbers, and attention, recorded as in the last step."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from offload.forced import force_recompute
from offload.noted import note_repeats
from offload.test_repeats import LAYERS, Op, gradients, program
from torchstorm.offload.replan.planner import Planner
from torchstorm.offload.session import Session

pytestmark = pytest.mark.gpu

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
ROWS = 16384  # 1 MiB: smaller ones share a buffer, and are not computed again
DEVICE = torch.device("cuda")


@pytest.mark.parametrize("ops", [["drop"], ["attend"], ["drop", "attend", "norm", "join"]], ids=" ".join)
def test_what_draws_and_what_chooses_a_kernel_is_computed_again_by_the_records_of_the_last_step(
    ops: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_recompute(monkeypatch)
    monkeypatch.setattr(Planner, "judge", lambda *_: None)
    repeated: list[str] = []

    def note(func: object, is_repeated: bool) -> None:
        if is_repeated:
            repeated.append(getattr(func, "__name__", ""))

    note_repeats(monkeypatch, note)
    layers: list[Op] = [*LAYERS[:6], *((name, 3 + at, at + 1) for at, name in enumerate(ops)), *LAYERS[6:]]
    torch.use_deterministic_algorithms(True)
    try:
        plain, model = (program().to(DEVICE, torch.bfloat16) for _ in range(2))
        with Session(model, vram="2GiB", disk=str(tmp_path)) as session:
            for seed in range(9):
                repeated.clear()
                expected = gradients(plain, seed, layers, None, rows=ROWS)
                assert all(map(torch.equal, expected, gradients(model, seed, layers, session, rows=ROWS))), seed
    finally:
        torch.use_deterministic_algorithms(False)
    names = {"drop": "dropout", "attend": "scaled_dot_product_attention", "norm": "layer_norm", "join": "cat"}
    assert {names[one] for one in ops} <= set(repeated)
