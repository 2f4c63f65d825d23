"""A text and a run small enough to train in a second."""

import io
import random
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    words = ["storm", "tensor", "budget", "tier", "disk", "plan", "and", "the"]
    file = tmp_path / "text.txt"
    file.write_text(" ".join(random.Random(0).choices(words, k=2000)))
    return file


@pytest.fixture
def options(text_file: Path, tmp_path: Path) -> dict[str, Any]:
    # A step is large enough that 60 % of it is more than the Session's staging.
    return {
        "data": str(text_file),
        "out": str(tmp_path / "out"),
        "device": "cpu",
        "layers": 4,
        "heads": 2,
        "width": 32,
        "batch": 4,
        "seq": 32,
        "steps": 6,
        "val_every": 2,
        "val_batches": 2,
        "sample_chars": 12,
        "warmup": 2,
    }


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=200)
