"""Steps whose sizes change: a plan serves all steps that are no larger, exactly and within the budget."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import nn

from torchstorm.offload.session import Session

WIDTH, LONGEST = 32, 96
MIB = 2**20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.up, self.down, self.dropout = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.mix(y, y, y, need_weights=False)[0]
        return x + self.down(self.dropout(nn.functional.gelu(self.up(x))))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(64, WIDTH), *(Block() for _ in range(4)))


def gradients(model: nn.Module, length: int, session: Session | None) -> list[torch.Tensor]:
    torch.manual_seed(length)
    tokens = torch.randint(0, 64, (4, length))
    if session is None:
        model(tokens).square().mean().backward()
    else:
        with session.step():
            model(tokens).square().mean().backward()
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return found


def peak_bytes() -> int:
    model = network()
    session = Session(model, unlimited=True)
    gradients(model, LONGEST, session)
    return session.usage().ram_bytes


@pytest.mark.parametrize("recompute", [True, False], ids=["computed again", "moved"])
@pytest.mark.no_cover
def test_steps_no_longer_than_a_planned_one_follow_its_plan_exactly(recompute: bool, tmp_path: Path) -> None:
    plain, model = network(), network()
    budget = peak_bytes() * 6 // 10
    options = {} if recompute else {"disk": str(tmp_path)}
    session = Session(model, ram=budget, recompute=recompute, **options)  # type: ignore[arg-type]
    for _ in range(3):
        gradients(model, LONGEST, session)
    num_before = session.report().num_planned
    lengths = random.Random(0).choices(range(5, LONGEST), k=7)  # after eight, one of them is traced
    for length in lengths:
        assert all(map(torch.equal, gradients(plain, length, None), gradients(model, length, session))), length
        assert session.usage().ram_bytes <= budget, length
    assert session.report().num_planned == num_before + len(lengths)


def test_a_longer_step_is_planned_anew_and_serves_the_others_from_then_on(tmp_path: Path) -> None:
    plain, model = network(), network()
    session = Session(model, ram=peak_bytes() * 6 // 10, disk=str(tmp_path))
    for length in (40, 40, 40, LONGEST, LONGEST, LONGEST, 60, 41):
        before = session.report().num_planned
        assert all(map(torch.equal, gradients(plain, length, None), gradients(model, length, session))), length
    assert session.report().num_planned == before + 1


@pytest.mark.no_cover
def test_one_plan_stands_for_all_lengths_but_much_shorter_ones_and_traces_of_others_still_tell_of_longer_ones(
    tmp_path: Path,
) -> None:
    plain, model = network(), network()
    session = Session(model, ram=peak_bytes() * 6 // 10, disk=str(tmp_path))
    plans = session._shared.plans
    for length in (20, 56, 64):
        for _ in range(2):
            assert all(map(torch.equal, gradients(plain, length, None), gradients(model, length, session))), length
    assert [one.kind.key[0][1] for one in plans._all] == [20, 64]
    assert [one.kind.key[0][1] for one in plans.latest_first()] == [64, 20, 56]
    num_before = session.report().num_planned
    for length in (60, 40, 15, 56, LONGEST, 90):
        assert all(map(torch.equal, gradients(plain, length, None), gradients(model, length, session))), length
    assert session.report().num_planned >= num_before + 4, "all but those that a plan's times are measured in"
    assert [one.kind.key[0][1] for one in plans._all] == [20, LONGEST], "which was foreseen"


class Translation(nn.Module):
    """Its two inputs have lengths of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = (nn.Sequential(*(Half() for _ in range(3))) for _ in range(2))

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.target(target + self.source(source).mean(0)).square().mean()
        return out


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.net(x)


@pytest.mark.no_cover
def test_a_plan_that_is_larger_in_one_input_alone_stands_for_no_other(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain, model = Translation(), Translation()
    plain.load_state_dict(model.state_dict())
    session = Session(model, ram="400KiB", disk=str(tmp_path))
    sizes = [(480, 640)] * 4 + [(640, 160)] * 4 + [(480, 640), (640, 160)] * 3
    num_planned = []
    for source, target in sizes:
        given = torch.randn(source, WIDTH), torch.randn(target, WIDTH)
        plain(*given).backward()
        with session.step():
            model(*given).backward()
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
        plain.zero_grad()
        model.zero_grad()
        num_planned.append(session.report().num_planned)
    assert len(session._shared.plans._all) == 2
    assert num_planned[-1] - num_planned[7] == 6, "each step has followed its plan"


class Other(nn.Module):
    """Runs something else on short sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.extra = network(), nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.net(tokens)
        return self.extra(x).tanh() * x.sigmoid() if tokens.shape[1] < 30 else x


@pytest.mark.no_cover
def test_a_shorter_step_of_other_operations_gets_a_plan_of_its_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain, model = Other(), Other()
    plain.load_state_dict(model.state_dict())
    session = Session(model, ram=peak_bytes() * 6 // 10, disk=str(tmp_path))
    for length in (LONGEST, LONGEST, LONGEST, 20, 20, 20, 20, 50):
        before = session.report().num_planned
        expected, found = gradients(plain, length, None), gradients(model, length, session)
        assert all(map(torch.equal, expected, found)), length
        if length == 50:
            assert session.report().num_planned == before + 1
    num_planned = session.report().num_planned
    gradients(model, 20, session)
    assert session.report().num_planned == num_planned + 1
