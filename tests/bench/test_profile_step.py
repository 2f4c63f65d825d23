"""A step that is profiled leaves nothing behind in the process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchstorm.bench.intervals import profile_step


def test_cupti_is_told_to_go_when_the_step_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str | None] = []

    @contextmanager
    def profile(**options: Any) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(events=list)
        told.append(os.environ.get("TEARDOWN_CUPTI"))

    monkeypatch.setenv("TEARDOWN_CUPTI", "0")
    monkeypatch.setattr(torch.profiler, "profile", profile)
    profile_step(lambda: 1.0)
    assert told == ["1"]
