"""What the mLSTM's tests on a GPU ask of every variant there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from close import assert_all_close
from kernels.mlstm_runs import Inputs, results, truth, yardsticks
from torchstorm.kernels import mlstm


def nan_wherever_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that kernels are given to fill holds NaN."""
    new_empty, empty_like = Tensor.new_empty, torch.empty_like

    def filled(made: Tensor) -> Tensor:
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(Tensor, "new_empty", lambda self, *size, **options: filled(new_empty(self, *size, **options)))
    monkeypatch.setattr(torch, "empty_like", lambda like, **options: filled(empty_like(like, **options)))


def by(variant: str, chunk: int | None = None) -> Callable[..., Any]:
    """A `compute` for `results`."""
    return lambda q, k, v, i, f, state, cu_seqlens, gate: mlstm(
        q, k, v, i, f, initial_state=state, return_state=True, cu_seqlens=cu_seqlens, chunk=chunk, gate=gate,
        variant=variant,
    )  # fmt: skip


def assert_right(
    variant: str, inputs: Inputs, *, gate: str = "exp", chunk: int | None = None, through_state: bool = True
) -> None:
    """Against float64, with both forms in PyTorch in the same dtype as yardsticks; and the same bits twice."""
    options: dict[str, Any] = {"gate": gate, "through_state": through_state}
    found = results(by(variant, chunk), inputs, **options)
    again = results(by(variant, chunk), inputs, **options)
    for name, x in found.items():
        assert torch.equal(x, again[name]), f"{name} differs from run to run"
    if inputs.q.shape[2] <= 1024:
        right, forms = truth(inputs, **options), ("recurrent", "quadratic")
    else:
        right, forms = results(by("chunkwise"), inputs.to(torch.float64), **options), ("quadratic",)
    theirs = [] if inputs.q.shape[2] > 8192 else yardsticks(inputs, **options, forms=forms)
    # fp32 weights pass exp2 with an error of two units in the last place, where PyTorch's may happen to be exact.
    eps = torch.finfo(inputs.q.dtype).eps
    floor = max(eps, 8 * torch.finfo(torch.float32).eps) if theirs else 8 * eps
    assert_all_close(found, right, *theirs, floor=floor)
