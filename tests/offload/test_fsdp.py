"""FSDP2 with and without a Session: the same bits, whether gathered weights are freed in between or not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from offload.fsdp_runs import compare_together_and_alone

pytestmark = pytest.mark.no_cover


def test_gradients_under_fsdp2_are_its_own_to_the_last_bit(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(compare_together_and_alone, args=(str(tmp_path),), nprocs=2)
