"""xLSTM within a budget: its kernels are operators like any other, moved and computed again to the same bits."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from offload.forced import at_random, force_recompute, num_recomputed
from offload.steps import Outcome, Step, assert_exact_within, assert_same, saved_bytes, train
from offload.test_compiled import run
from torchstorm.models.xlstm import XLSTM, XLSTMConfig
from torchstorm.offload.compiled.compile import CompiledBlocks
from torchstorm.offload.session import Session
from torchstorm.plan.plan import Plan
from torchstorm.plan.recompute import replays
from torchstorm.plan.variants import INPUTS, SAVE

CONFIG = XLSTMConfig(vocab_size=32, num_layers=3, num_heads=2, width=64, dropout=0.1, input_gate_bias=-1.0)
PATTERNS = [("mlstm",), ("slstm",), ("mlstm-mlp",), ("mlstm", "slstm", "mlstm-mlp")]
pytestmark = [
    pytest.mark.no_cover,
    pytest.mark.usefixtures("told_once"),
    # Said by Inductor and Dynamo of themselves.
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
each_pattern = pytest.mark.parametrize("pattern", PATTERNS, ids=" ".join)


def xlstm(pattern: tuple[str, ...]) -> Callable[[], XLSTM]:
    return lambda: XLSTM(replace(CONFIG, pattern=pattern))


def step(model: nn.Module, index: int) -> torch.Tensor:
    ids_BT = torch.randint(0, 32, (4, 65), generator=torch.Generator().manual_seed(index))
    loss: torch.Tensor = model(ids_BT[:, :-1], ids_BT[:, 1:]).loss
    loss.backward()
    return loss


def autocast_step(model: nn.Module, index: int) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return step(model, index)


def changing_length_step(model: nn.Module, index: int) -> torch.Tensor:
    ids_BT = torch.randint(0, 32, (4, (64, 33, 100)[index % 3]), generator=torch.Generator().manual_seed(index))
    loss = F.cross_entropy(model(ids_BT[:, :-1]).logits.flatten(0, 1), ids_BT[:, 1:].flatten())
    loss.backward()
    return loss


@pytest.mark.parametrize(
    ("pattern", "step"),
    [pytest.param(pattern, step, id=" ".join(pattern)) for pattern in PATTERNS]
    + [pytest.param(PATTERNS[-1], autocast_step, id="autocast")],
)
def test_a_session_changes_no_bit(pattern: tuple[str, ...], step: Step, tmp_path: Path) -> None:
    assert_exact_within(xlstm(pattern), step, tmp_path, share=0.5)


def test_a_session_changes_no_bit_where_lengths_change(tmp_path: Path) -> None:
    assert_exact_within(xlstm(PATTERNS[-1]), changing_length_step, tmp_path, share=0.6, num_steps=7)


@each_pattern
def test_everything_that_can_be_is_computed_again_to_the_same_bits(
    pattern: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = train(xlstm(pattern), step, None)
    plans = force_recompute(monkeypatch)
    found, _ = train(xlstm(pattern), step, lambda model, _: Session(model, ram="1GiB", check=True))
    assert_same(expected, found)
    assert any(num_recomputed(plan) for plan in plans)
    assert rerun_kernels(plans[-1]), "no recurrence was run again"


def test_what_is_kept_computed_again_and_moved_at_random_mixes_to_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pattern = PATTERNS[-1]
    budget = int(saved_bytes(xlstm(pattern), step) * 0.5)
    expected, _ = train(xlstm(pattern), step, None)
    force_recompute(monkeypatch, at_random(random.Random(" ".join(pattern))))
    found, _ = train(xlstm(pattern), step, lambda model, _: Session(model, ram=budget, disk=str(tmp_path)))
    assert_same(expected, found)


@pytest.mark.no_cover
@pytest.mark.usefixtures("quickly")
def test_compiled_blocks_of_every_kind_have_the_same_bits_whatever_is_computed_again() -> None:
    outcomes = []
    for variant in (SAVE, INPUTS):
        torch.manual_seed(1)
        model = XLSTM(replace(CONFIG, pattern=("slstm", "mlstm-mlp"), num_layers=2))
        compiled = CompiledBlocks(model, variant=variant)
        outcomes.append(run(model, step))
        assert not compiled.notes
    assert_same(*outcomes)


@pytest.mark.no_cover
@pytest.mark.usefixtures("quickly")
def test_within_a_budget_a_compiled_model_has_the_same_bits_as_without(tmp_path: Path) -> None:
    def compiled(budget: int | None) -> tuple[Outcome, Session]:
        torch.manual_seed(1)
        model = XLSTM(CONFIG)
        tiers = {"unlimited": True} if budget is None else {"ram": budget, "disk": str(tmp_path)}
        with Session(model, **tiers) as session:
            session.compile()
            return run(model, step, session=session, num_steps=5), session

    expected, free = compiled(None)
    budget = free.usage().ram_bytes // 2
    found, tight = compiled(budget)
    assert_same(expected, found)
    report = tight.report()
    assert report.highest is not None
    assert report.highest.ram_bytes <= budget
    assert report.num_planned > 0


def rerun_kernels(plan: Plan) -> set[str]:
    """Operators of our own among those that a plan runs again."""
    found = replays(plan.trace, plan.placements)
    assert found is not None
    names = {plan.trace.ops[number].name for replay in found.values() for number in replay.ops}
    return {name for name in names if name.startswith("torchstorm.")}
