"""The demo: every part is told, and what is wrong is not passed over."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from rich.console import Console

from torchstorm.bench import demo as tour
from torchstorm.bench import timing
from torchstorm.bench.demo import demo
from torchstorm.errors import DeviceError


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_SECONDS_A_TIME", 0.0)
    monkeypatch.setattr(tour, "_SIZE", 32)
    monkeypatch.setattr(tour, "_COPY_BYTES", 2**16)
    monkeypatch.setattr("torchstorm.bench.ceilings.Ceilings.of", lambda self, unit, dtype: 1e9)


def run() -> tuple[bool, str]:
    text = io.StringIO()
    return demo("cpu", console=Console(file=text, width=300)), text.getvalue()


def test_the_tour_tells_of_memory_a_product_the_ladder_accuracy_and_a_verdict() -> None:
    passed, text = run()
    assert passed
    for part in ("the same bytes came back", "58   64", "139  154", "naive", "beside float64", "Verdict: ", "is right"):
        assert part in text, part


def test_a_wrong_product_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    case = tour.matmul_case

    def spoiled(*given: Any) -> Any:
        from dataclasses import replace

        found = case(*given)
        return replace(found, ours=lambda inputs, variant: {"c": found.ours(inputs, variant)["c"] * 1.1})

    monkeypatch.setattr(tour, "matmul_case", spoiled)
    passed, text = run()
    assert not passed
    assert "NOT RIGHT: " in text


def test_bytes_that_do_not_come_back_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "equal", lambda *_: False)
    passed, text = run()
    assert not passed
    assert "OTHER BYTES CAME BACK" in text
    assert "NOT RIGHT: memory" in text


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(DeviceError):
        demo("cuda:99", console=Console(file=io.StringIO()))
