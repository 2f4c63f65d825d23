"""Runs every example as a user would, and checks its output."""

import sys
from pathlib import Path

import pytest

import forked

EXAMPLES = Path(__file__).parents[1] / "examples"
SAYS = {
    "any_batch_size.py": ["split into", "losses equal up to the order of summation: True"],
    "offload_any_model.py": ["forecast", "measured", "losses bit-identical: True"],
    "through_disk.py": ["path direct", "16 blocks are bit-identical to the same rounds in memory"],
    "train_gpt.py": ["forecast", "measured", "losses and weights bit-identical: True"],
}


def test_every_example_is_run_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == SAYS.keys()


@pytest.mark.parametrize("name", SAYS)
def test_an_example_runs_and_says_what_it_shows(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", str(EXAMPLES / name)]
    done = forked.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    for words in SAYS[name]:
        assert words in done.stdout
    assert list(tmp_path.iterdir()) == []
