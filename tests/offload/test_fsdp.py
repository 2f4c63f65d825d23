"""FSDP2 with and without a Session: the same bits, whether gathered weights are freed in between or not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import forked

pytest.importorskip("transformers")

pytestmark = pytest.mark.no_cover

RANK = """
import sys
sys.path.insert(0, sys.argv[1])
from offload.fsdp_runs import compare_together_and_alone
compare_together_and_alone(int(sys.argv[2]), sys.argv[3])
"""


def test_gradients_under_fsdp2_are_its_own_to_the_last_bit(tmp_path: Path) -> None:
    tests = str(Path(__file__).parents[1])
    children = [
        forked.Popen([sys.executable, "-c", RANK, tests, str(rank), str(tmp_path)], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        told = [child.communicate(timeout=240)[1] for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert [child.returncode for child in children] == [0, 0], "\n".join(errors[-3000:] for errors in told)
