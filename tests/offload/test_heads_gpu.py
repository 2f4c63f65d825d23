"""On a GPU: a model whose head is most of its memory peaks where it was forecast, computed again and not moved."""

from __future__ import annotations

import gc

import pytest
import torch

from offload.test_heads import Model, by_hand
from torchstorm.offload.session import Session
from torchstorm.plan.recompute import RECOMPUTE

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

TOKENS, WIDTH, VOCABULARY = 4096, 512, 2**15
LOGITS_BYTES = TOKENS * VOCABULARY * 4
MIB = 2**20


def train(storm: Session, model: torch.nn.Module) -> list[tuple[int, int]]:
    """The peak of every step that followed a plan, and that plan's forecast."""
    tokens, targets = (torch.randint(VOCABULARY, (TOKENS,), device="cuda") for _ in range(2))
    found = []
    for index in range(5):
        plan = storm.plan()
        with storm.step():
            model(tokens, targets).backward()
        model.zero_grad()
        if plan is not None and index > 1:
            found.append((storm.usage().vram_bytes, plan.forecast.vram_bytes))
    return found


def test_a_head_of_tanh_peaks_where_it_was_forecast() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    model = Model(by_hand, width=WIDTH, vocabulary=VOCABULARY).cuda()
    optimizer = torch.optim.SGD(model.parameters())  # without a state of its own
    with Session(model, optimizer=optimizer) as storm:
        full = train(storm, model)[-1][0]
    # What tanh made must go while the loss runs backward, and has nowhere to go.
    budget = full - LOGITS_BYTES // 2
    with Session(model, vram=budget, ram="64MiB", optimizer=optimizer) as storm:
        peaks = train(storm, model)
        plan, report = storm.plan(), str(storm.report())
    assert plan is not None
    parcels = zip(plan.trace.parcels, plan.placements, strict=True)
    assert RECOMPUTE in [placement.tier for parcel, placement in parcels if parcel.nbytes == LOGITS_BYTES]
    for peak, forecast in peaks:
        assert peak <= budget
        assert abs(peak - forecast) <= MIB
    assert "of device memory, where" not in report
