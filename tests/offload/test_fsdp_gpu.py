"""FSDP2 on a GPU with and without a Session: the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from offload.fsdp_runs import CASES, compare

pytestmark = pytest.mark.gpu


def test_gradients_under_fsdp2_are_its_own_to_the_last_bit(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(compare, args=(1, "cuda", str(tmp_path), CASES[:3]), nprocs=1)
