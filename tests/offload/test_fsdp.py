"""FSDP2 with and without a Session: the same bits, whether gathered weights are freed in between or not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from offload.fsdp_runs import CASES, compare

pytestmark = pytest.mark.no_cover


@pytest.mark.parametrize(("world_size", "cases"), [(1, CASES), (2, CASES[1:4])])
def test_gradients_under_fsdp2_are_its_own_to_the_last_bit(world_size: int, cases: tuple, tmp_path: Path) -> None:
    torch.multiprocessing.spawn(compare, args=(world_size, "cpu", str(tmp_path), cases), nprocs=world_size)
