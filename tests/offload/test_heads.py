"""Peaks of models whose head is most of their memory, on a GPU that the CPU stands in for: as forecast, to the byte."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from offload.forced import at_random, force_recompute, num_recomputed
from offload.rehearsed import Rehearsal
from torchstorm.errors import BudgetError
from torchstorm.offload.session import Session
from torchstorm.plan.forecast import fast_profile

pytestmark = pytest.mark.no_cover  # what they reach, test_recompute.py does, too

# A row of tokens takes 1 MiB or more everywhere, so that every storage travels alone whatever the budget is.
TOKENS, WIDTH, VOCABULARY = 1024, 256, 2048
LOGITS_BYTES = TOKENS * VOCABULARY * 4

Head = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def soft_capped(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = 15.0 * torch.tanh(logits / 15.0)
    return F.cross_entropy(logits, targets)


def with_temperature(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits / 0.7, targets)


def gated(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits * torch.sigmoid(logits), targets)


def by_hand(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.nll_loss(torch.log_softmax(torch.tanh(logits), -1), targets)


def in_chunks(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    parts = zip(logits.chunk(4), targets.chunk(4), strict=True)
    losses = [F.cross_entropy(5.0 * torch.tanh(part / 5.0), target) for part, target in parts]
    return torch.stack(losses).mean()


def with_dropout(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Its mask is made in three operations, two of them in place."""
    return F.cross_entropy(F.dropout(logits, 0.1), targets)


HEADS: dict[str, Head] = {
    "plain": F.cross_entropy,
    "soft cap": soft_capped,
    "temperature": with_temperature,
    "gate": gated,
    "log_softmax and nll": by_hand,
    "chunks": in_chunks,
    "dropout": with_dropout,
}


class Model(nn.Module):
    def __init__(self, head: Head, *, width: int = WIDTH, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        layers = ((nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(2))
        self.blocks = nn.ModuleList(nn.Sequential(*three) for three in layers)
        self.project = nn.Linear(width, vocabulary, bias=False)
        self.head = head

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.project(x), targets)


class Turned(nn.Module):
    """Attention in several operations, none of which saves what it is given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.three, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("angles", torch.rand(1, width // 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = [one.view(4, -1, 2, one.shape[1] // 2).transpose(1, 2) for one in self.three(x).chunk(3, -1)]
        given = [one * self.angles.cos() + one.neg() * self.angles.sin() for one in given]
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            made = F.scaled_dot_product_attention(*given)
        return self.out(made.transpose(1, 2).reshape(x.shape))


def train(storm: Session, model: nn.Module, *, num_steps: int) -> list[tuple[int, int]]:
    """The peak of every step that followed a plan, and the most that is to be there by that plan's trace."""
    tokens, targets = (torch.randint(VOCABULARY, (TOKENS,)) for _ in range(2))
    found = []
    for index in range(num_steps):
        plan = storm.plan()
        with storm.step():
            loss = model(tokens, targets)
            loss.backward()
        del loss
        model.zero_grad()
        if plan is not None and index > 1:  # the plan that was made of the first step is measured by the second
            found.append((storm.usage().vram_bytes, int(fast_profile(plan.trace, plan.placements).max())))
    return found


def smallest_budget(gpu: Rehearsal, model: nn.Module) -> int:
    """What the error of a budget that is too small names, until one does."""
    budget = LOGITS_BYTES
    for _ in range(4):
        with gpu.session(model, budget) as storm:
            try:
                train(storm, model, num_steps=2)
            except BudgetError as error:
                budget = error.smallest_bytes
            else:
                return budget
    raise AssertionError(f"{budget} bytes are still too few")


@pytest.mark.parametrize(
    ("head", "link_bytes_per_s"),
    [pytest.param(HEADS[name], 1e7, id=name) for name in ("soft cap", "gate", "log_softmax and nll", "chunks")]
    + [pytest.param(soft_capped, 1e12, id="soft cap, fast link")],
)
def test_a_peak_is_what_was_forecast(head: Head, link_bytes_per_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    gpu = Rehearsal(monkeypatch, link_bytes_per_s=link_bytes_per_s)
    model = Model(head)
    with gpu.meter:
        train(gpu.session(model, 1 << 40), model, num_steps=1)  # as warm as the ones to come
        least = smallest_budget(gpu, model)
        for budget in (least, least + LOGITS_BYTES // 2):
            with gpu.session(model, budget) as storm:
                for peak, forecast in train(storm, model, num_steps=5):
                    assert peak == forecast <= budget
                assert "device memory" not in str(storm.report())


def test_a_step_runs_operations_again_only_where_the_budget_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    gpu = Rehearsal(monkeypatch, link_bytes_per_s=1e7, is_even=True)
    model = Model(in_chunks)
    with gpu.meter:
        budget = smallest_budget(gpu, model)
        with gpu.session(model, budget) as storm:
            train(storm, model, num_steps=1)
            assert storm.usage().vram_bytes <= budget


@pytest.mark.parametrize("chosen", [2, 3, 5, 11])
def test_attention_keeps_nothing_alive_that_the_operations_do_not_read_which_are_computed_again(
    chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    gpu = Rehearsal(monkeypatch, link_bytes_per_s=1e9)
    model = Model(soft_capped)
    model.blocks = nn.ModuleList(Turned(WIDTH) for _ in range(2))
    made = force_recompute(monkeypatch, at_random(random.Random(chosen), share=0.2))
    with gpu.meter, gpu.session(model, 1 << 40) as storm:
        peaks = train(storm, model, num_steps=4)
        assert num_recomputed(made[-1]) > 0
        for peak, forecast in peaks:
            assert peak == forecast


@pytest.mark.parametrize(
    ("head", "seed"),
    [pytest.param(head, 0, id=name) for name, head in HEADS.items()]
    + [pytest.param(HEADS[name], 1, id=f"{name}, half") for name in ("soft cap", "chunks")],
)
def test_whatever_is_computed_again_a_peak_is_what_was_forecast(
    head: Head, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(seed)
    gpu = Rehearsal(monkeypatch, link_bytes_per_s=1e9)
    model = Model(head)
    rng = random.Random(seed)
    made = force_recompute(monkeypatch, at_random(rng, share=1.0 if seed == 0 else 0.5))
    with gpu.meter, gpu.session(model, 1 << 40) as storm:
        peaks = train(storm, model, num_steps=4)
        assert num_recomputed(made[-1]) > 0
        for peak, forecast in peaks:
            assert peak == forecast
