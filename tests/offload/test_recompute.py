"""What is computed again is the same to the last bit, whatever the model does and whatever else moves."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from offload.forced import at_random, force_recompute, num_recomputed
from offload.steps import Step, assert_same, saved_bytes, train
from offload.test_exact import CASES
from offload.test_huggingface import CASES as HUGGING_FACE
from offload.test_odd_models import CASES as ODD
from offload.test_odd_models import IN_A_CHILD, THIRD_PARTY
from torchstorm.errors import CorruptionError
from torchstorm.offload.recompute import replay
from torchstorm.offload.session import Session
from torchstorm.offload.step.views import row_of

# Steps that are never planned, or that save nothing large enough to be computed again.
NOTHING_RECOMPUTED: set[str] = set()
ALL = (
    CASES
    | {f"odd: {name}": case for name, case in ODD.items() if name not in IN_A_CHILD}
    | {f"hugging face: {name}": (*case, 0.5) for name, case in HUGGING_FACE.items()}
)


@pytest.mark.filterwarnings(*THIRD_PARTY)
@pytest.mark.parametrize("name", ALL)
def test_everything_that_can_be_is_computed_again_to_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, step, _ = ALL[name]
    expected, _ = train(make, step, None)
    plans = force_recompute(monkeypatch)
    found, session = train(make, step, lambda model, _: Session(model, ram="1GiB", check=True))
    assert_same(expected, found)
    assert session is not None
    assert any(num_recomputed(plan) for plan in plans) == (name not in NOTHING_RECOMPUTED)


@pytest.mark.no_cover
@pytest.mark.filterwarnings(*THIRD_PARTY)
@pytest.mark.parametrize(  # test_random_networks.py mixes others at random
    "name", ["dropout", "tied weights", "views of one buffer", "in-place operations", "batch norm and in-place relu"]
)
def test_what_is_kept_computed_again_and_moved_at_random_mixes_to_the_same_bits(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make, step, share = ALL[name]
    budget = int(saved_bytes(make, step) * share)
    expected, _ = train(make, step, None)
    force_recompute(monkeypatch, at_random(random.Random(name)))
    found, session = train(make, step, lambda model, _: Session(model, ram=budget, disk=str(tmp_path)))
    assert_same(expected, found)
    assert session is not None
    session.close()


# ---------------------------------------------------------------------- the traps, each by its name


class Residual(nn.Module):
    """Convolutions whose outputs are changed in place after they were made."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        for conv in self.convs:
            out_BCHW = conv(x_BCHW)
            out_BCHW += x_BCHW
            x_BCHW = F.relu(out_BCHW, inplace=True) * 1.5
        return x_BCHW


class RandomTwice(nn.Module):
    """Several random operations, of which a plan may compute any again and reuse any other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x_RC: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x_RC = F.dropout(layer(x_RC), 0.3)
            x_RC = torch.tanh(x_RC + torch.rand_like(x_RC)) * torch.empty_like(x_RC).bernoulli_(0.8)
        return x_RC


class Normed(nn.Module):
    """Batch norms, whose running statistics and counters must move once a step."""

    def __init__(self) -> None:
        super().__init__()
        layers = [
            m for _ in range(3) for m in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        ]
        self.body = nn.Sequential(*layers)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        return self.body(x_BCHW)


class Autocast(nn.Module):
    """Half precision, whose casts of weights are cached over the forward pass and not beyond."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x_RC: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(4):
                x_RC = F.gelu(self.layer(x_RC))
        return x_RC.float()


class Growing(nn.Module):
    """A layer that keeps what it has seen, as a cache of keys and values does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.seen: list[torch.Tensor] = []
        self.calls = 0

    def forward(self, x_RC: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(torch.tanh(self.layer(x_RC)))
        return torch.sigmoid(torch.stack(self.seen).sum(0))


def image_step(model: nn.Module, index: int) -> torch.Tensor:
    loss = model(torch.randn(4, 8, 24, 24)).square().mean()
    loss.backward()
    return loss.detach()


def row_step(model: nn.Module, index: int) -> torch.Tensor:
    for module in model.modules():
        if isinstance(module, Growing):
            module.seen.clear()
    loss = model(torch.randn(256, 64)).square().mean()
    loss.backward()
    return loss.detach()


TRAPS: dict[str, tuple[Callable[[], nn.Module], Step]] = {
    "an output changed in place after it was made": (Residual, image_step),
    "random operations one by one": (RandomTwice, row_step),
    "batch norms": (Normed, image_step),
    "autocast's cache": (Autocast, row_step),
    "a cache that grows": (lambda: nn.Sequential(*(Growing() for _ in range(3))), row_step),
}


@pytest.mark.no_cover
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", TRAPS)
def test_a_known_trap_of_recomputing_is_no_trap_here(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    make, step = TRAPS[name]
    expected, _ = train(make, step, None)
    share = (1.0, 0.5, 0.3)[seed]
    plans = force_recompute(monkeypatch, at_random(random.Random(seed), share))
    found, _ = train(make, step, lambda model, _: Session(model, ram="1GiB", check=True))
    assert_same(expected, found)
    assert num_recomputed(plans[-1]) > 0


def test_what_is_changed_in_place_is_computed_again_too(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = force_recompute(monkeypatch)
    train(Normed, image_step, lambda model, _: Session(model, ram="1GiB", check=True))
    trace = plans[-1].trace
    names = {trace.ops[trace.values[s.value].op].name for s in trace.storages if s.value >= 0}
    assert "aten.relu_.default" in names


def test_no_code_of_the_model_runs_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    force_recompute(monkeypatch)
    _, session = train(Growing, row_step, lambda model, _: Session(model, ram="1GiB"), num_steps=3)
    assert session is not None
    assert session._shared.model.calls == 3


class _WritesUnseen(torch.autograd.Function):
    """What a kernel that PyTorch does not see does: it writes into its input, and no version counter tells."""

    @staticmethod
    def forward(ctx: Any, x_RC: torch.Tensor) -> torch.Tensor:
        x_RC.detach().numpy()[...] *= 2
        return x_RC.view_as(x_RC)

    @staticmethod
    def backward(ctx: Any, grad_RC: torch.Tensor) -> torch.Tensor:
        return grad_RC * 2


class Unseen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x_RC: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x_RC = torch.tanh(_WritesUnseen.apply(layer(x_RC)) + 1).exp()
        return x_RC


def test_what_an_unseen_kernel_wrote_into_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = train(Unseen, row_step, None)
    plans = force_recompute(monkeypatch)
    found, _ = train(Unseen, row_step, lambda model, _: Session(model, ram="1GiB", check=True))
    assert_same(expected, found)
    trace = plans[-1].trace
    ops = {op.name for op in trace.ops}
    assert "aten.exp.default" in ops
    assert "aten.addmm.default" not in ops


def test_self_check_names_what_came_out_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    force_recompute(monkeypatch)
    run = replay.run

    def other(call: Any, there: Any) -> list[torch.Tensor]:
        found = run(call, there)
        if call.operator.name == "torch.tanh" and armed:
            row_of(found[0])[5] ^= 1
        return found

    armed: list[int] = []
    monkeypatch.setattr(replay, "run", other)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    session = Session(model, ram="1GiB", check=True)
    for _ in range(2):
        with session.step():
            row_step(model, 0)
    armed.append(1)
    with pytest.raises(CorruptionError, match=r"made by torch\.tanh"), session.step():
        row_step(model, 0)


def test_a_weight_changed_in_place_between_forward_and_backward_is_told_and_not_computed_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    force_recompute(monkeypatch)
    model = nn.Sequential(nn.LayerNorm(64), nn.Tanh())
    session = Session(model, ram="1GiB")
    for _ in range(2):
        with session.step():
            row_step(model, 0)
    with session.step():
        loss = model(torch.randn(256, 64)).square().mean()
        with torch.no_grad():
            model[0].weight.mul_(2)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation|changed since"):
            loss.backward()


def test_an_input_changed_in_place_after_its_use_is_computed_from_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(model: nn.Module, index: int) -> torch.Tensor:
        x_RC = torch.randn(256, 64)
        # Neither the sum nor the product by a number is saved with x, which so may change before backward.
        loss = model(x_RC).square().mean()
        x_RC.zero_()
        loss.backward()
        return loss.detach()

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64))

        def forward(self, x_RC: torch.Tensor) -> torch.Tensor:
            return torch.tanh((x_RC + self.weight) * 2).exp()

    expected, _ = train(Shifted, step, None)
    plans = force_recompute(monkeypatch)
    found, _ = train(Shifted, step, lambda model, _: Session(model, ram="1GiB", check=True))
    assert_same(expected, found)
    assert num_recomputed(plans[-1]) > 0
