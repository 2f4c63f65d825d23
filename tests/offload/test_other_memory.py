"""Plans on a GPU that the CPU stands in for, beside memory that is not the Session's: optimizer state that comes after
the first step, another model, tensors that come and go between steps. Peaks as forecast, to the byte."""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from offload.rehearsed import Rehearsal
from plan import naive
from torchstorm.errors import BudgetError
from torchstorm.offload import budget as budgets
from torchstorm.offload.session import Session
from torchstorm.plan.forecast import KEEP
from torchstorm.plan.plan import Plan
from torchstorm.sizes import format_size
from torchstorm.transfer.pinned import PinnedArena

pytestmark = pytest.mark.no_cover  # what they reach without a GPU, test_plans.py and test_user_plan.py do, too

MIB = 2**20
# A row of WIDTH numbers a token takes 1 MiB, so that nothing but a LayerNorm's statistics shares a buffer.
ROWS, WIDTH = 1024, 256
SPARE_BYTES = 2 * MIB
OTHER_BYTES = 6 * MIB
COUNTS_BYTES = 1024  # more than AdamW's counts of steps take, which nobody foresees
FAST_LINK, SLOW_LINK = 1e12, 1e7  # bytes per second: with the one tensors are moved, with the other computed again


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@dataclass
class Training:
    """What was there after every step, and the last plan.

    Attributes:
        peaks, forecasts: bytes.
        kept: bytes of what the plan keeps.
        num_planned: steps that had followed a plan.
    """

    peaks: list[int] = field(default_factory=list)
    forecasts: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    num_planned: list[int] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    plan: Plan | None = None


def train(
    gpu: Rehearsal,
    vram: int,
    *,
    plan: Plan | None = None,
    num_steps: int = 5,
    before: Callable[[int], None] = lambda _: None,
    prepare: Callable[[Session], None] = lambda _: None,
) -> Training:
    """Trains a fresh model with AdamW; `prepare` has the Session first, and `before(index)` comes before every step."""
    gc.collect()  # what the training before left in cycles would count
    torch.manual_seed(0)
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    found = Training()
    with gpu.session(model, vram, optimizer=optimizer, plan=plan, spare_bytes=SPARE_BYTES) as storm:
        prepare(storm)
        for index in range(num_steps):
            before(index)
            with storm.step():
                model(torch.randn(ROWS, WIDTH)).square().mean().backward()
                followed = storm.plan()  # once the step has ended, a better one may be in force
            note(found, storm, followed or storm.plan())
            optimizer.step()
            optimizer.zero_grad()
    return found


def note(found: Training, storm: Session, plan: Plan | None) -> None:
    report = storm.report()
    assert plan is not None
    placed = zip(plan.trace.parcels, plan.placements, strict=True)
    found.peaks.append(storm.usage().vram_bytes)
    found.forecasts.append(plan.forecast.vram_bytes)
    found.kept.append(sum(parcel.nbytes for parcel, placement in placed if placement.tier == KEEP))
    found.num_planned.append(report.num_planned)
    found.notes, found.plan = report.notes, plan


def budget(gpu: Rehearsal, share: float) -> int:
    """A share of the way from what a step needs when everything moves to what it takes when nothing does."""
    plan = train(gpu, 1 << 40, num_steps=3).plan
    assert plan is not None
    least, most = naive.all_away_bytes(plan.trace), naive.all_kept_bytes(plan.trace)
    return int(least + share * (most - least)) + SPARE_BYTES


def test_a_plan_that_is_given_comes_true_from_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Rehearsal(monkeypatch, link_bytes_per_s=FAST_LINK)
    with gpu.meter:
        vram = budget(gpu, 0.5)
        measured = train(gpu, vram)
        again = train(gpu, vram, plan=measured.plan)
    assert measured.plan is not None
    assert again.plan is not None
    assert any(placement.tier != KEEP for placement in measured.plan.placements)
    assert again.plan.placements == measured.plan.placements
    assert again.num_planned == [1, 2, 3, 4, 5]
    state_bytes = 2 * sum(parameter.nbytes for parameter in Mlp().parameters())
    assert again.forecasts[0] - again.peaks[0] == pytest.approx(state_bytes, abs=COUNTS_BYTES)
    assert again.peaks[1:] == again.forecasts[1:] == [measured.peaks[-1]] * 4


def test_a_plan_that_is_given_gives_way_where_other_memory_is_more(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Rehearsal(monkeypatch, link_bytes_per_s=FAST_LINK)
    with gpu.meter:
        vram = budget(gpu, 0.7)
        measured = train(gpu, vram)
        other = gpu.meter.hold(torch.empty(OTHER_BYTES, dtype=torch.uint8))
        again = train(gpu, vram, plan=measured.plan)
    assert other.nbytes == OTHER_BYTES
    assert any("such steps are planned anew" in said for said in again.notes)
    assert max(again.peaks) <= vram
    assert again.plan is not None
    assert measured.plan is not None
    assert again.plan.trace.base_bytes - measured.plan.trace.base_bytes == OTHER_BYTES
    assert again.peaks[1:] == again.forecasts[1:]


@pytest.mark.parametrize(
    ("link_bytes_per_s", "share", "grows"),
    [
        pytest.param(FAST_LINK, 0.7, True, id="moves-more"),
        pytest.param(SLOW_LINK, 1.01, True, id="computes again-more"),
        pytest.param(SLOW_LINK, 1.01, False, id="computes again-less"),
    ],
)
def test_the_step_that_finds_other_memory_changed_follows_a_plan_for_it(
    link_bytes_per_s: float, share: float, grows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Rehearsal(monkeypatch, link_bytes_per_s=link_bytes_per_s)
    others: list[torch.Tensor] = []

    def before(index: int) -> None:
        if index == (5 if grows else 0):
            others.append(gpu.meter.hold(torch.empty(OTHER_BYTES, dtype=torch.uint8)))
        elif index == 5:
            others.clear()

    with gpu.meter:
        vram = budget(gpu, share)
        found = train(gpu, vram, num_steps=10, before=before)
    assert max(found.peaks) <= vram
    assert (found.kept[5] < found.kept[4]) if grows else (found.kept[5] > found.kept[4])
    assert [number - found.num_planned[4] for number in found.num_planned[5:]] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("knows_optimizer", [True, False])
def test_what_is_kept_free_for_an_optimizer_that_is_not_known_is_told_where_it_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, knows_optimizer: bool
) -> None:
    gpu = Rehearsal(monkeypatch, link_bytes_per_s=FAST_LINK)
    model = Mlp()
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    with gpu.meter:
        # A step fits, and the state that SGD does not have does not.
        vram = weight_bytes * 2 + 12 * MIB
        session = gpu.session(model, vram, knows_optimizer=knows_optimizer)
        x = gpu.meter.hold(torch.randn(ROWS, WIDTH))
        with contextlib.ExitStack() as expected:
            if not knows_optimizer:
                told = f"{format_size(2 * weight_bytes)} of that are kept free for the state of an optimizer that this"
                expected.enter_context(pytest.raises(BudgetError, match=re.escape(told)))
            with session.step():
                model(x).square().mean().backward()
        session.close()


@pytest.mark.parametrize("num_rows", [ROWS * 15 // 16, ROWS // 2], ids=["nearly as large", "much smaller"])
def test_a_plan_is_given_up_or_made_anew_where_a_smaller_step_takes_more_than_the_budget(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Rehearsal(monkeypatch, link_bytes_per_s=FAST_LINK, is_even=True)
    with gpu.meter:
        vram = budget(gpu, 0.5)
        torch.manual_seed(0)
        model = Mlp()
        with gpu.session(model, vram, optimizer=torch.optim.SGD(model.parameters()), spare_bytes=SPARE_BYTES) as storm:

            def step(num: int) -> int:
                with storm.step():
                    model(torch.randn(num, WIDTH)).square().mean().backward()
                model.zero_grad()
                return storm.usage().vram_bytes

            peaks = [step(num) for num in (ROWS * 3 // 4, ROWS, ROWS, ROWS, ROWS, ROWS, *[num_rows] * 3)]
            assert max(peaks) <= vram
            at_end_bytes = list[int]()
            noting = model.layers[3].register_forward_hook(lambda *_: at_end_bytes.append(gpu.meter.live_bytes))
            step(num_rows)
            noting.remove()
            more_bytes = vram - at_end_bytes[0] + MIB

            def take_more(*_: object) -> None:
                gpu.meter.hold(torch.empty(more_bytes, dtype=torch.uint8))

            model.layers[3].register_forward_hook(take_more)
            assert step(num_rows) > vram
            assert all(step(num_rows) <= vram for _ in range(4))
            assert any("allowed" in note or "more than the budget" in note for note in storm.report().notes)


@pytest.mark.no_cover
def test_pinned_memory_that_plans_have_no_use_for_is_given_back_when_the_device_is_idle_at_a_step_s_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = Rehearsal(monkeypatch, link_bytes_per_s=FAST_LINK)
    arena = PinnedArena(64 * MIB, pin=None, available_bytes=lambda: 1 << 40, segment_bytes=MIB)
    for slot in [arena.allocate(MIB) for _ in range(6)]:
        arena.free(slot, after=[])
    held, clock = list[int](), [0.0]
    monkeypatch.setattr(budgets, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def release_one() -> None:
        clock[0] += 0.002
        PinnedArena.release_one(arena)

    monkeypatch.setattr(arena, "release_one", release_one)

    def before(_: int) -> None:
        held.append(arena.held_bytes // MIB)
        clock[0] += 0.6

    def prepare(storm: Session) -> None:
        storm._shared.tiers.arenas.append(arena)
        monkeypatch.setattr(storm._shared.tiers.fast, "is_idle", lambda: len(held) != 7)

    with gpu.meter:
        train(gpu, 1 << 40, num_steps=14, before=before, prepare=prepare)
    assert held[:5] == [6, 6, 6, 6, 6], "the plan was timed in the fourth step"
    assert held[5:] == [5, 5, 5, 4, 4, 3, 3, 2, 2], "in every second step, for 0.2 % of the time, once it is idle"


def test_a_measured_step_that_takes_more_than_the_budget_is_told_with_what_was_forecast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = Rehearsal(monkeypatch, link_bytes_per_s=FAST_LINK)
    now: list[int] = []
    with gpu.meter:
        vram = budget(gpu, 0.5)

        def prepare(session: Session) -> None:
            def take(*_: object) -> None:
                if now == [0, 1]:  # the second step is measured, too
                    torch.zeros(3 * MIB)  # of four bytes each

            session._shared.model.layers[-1].register_forward_pre_hook(take)  # type: ignore[index, operator, union-attr]

        found = train(gpu, vram, before=now.append, prepare=prepare)
    assert found.peaks[1] > vram
    taken, forecast, allowed = (format_size(nbytes) for nbytes in (found.peaks[1], found.forecasts[0], vram))
    said = f"took {taken} of vram={allowed}, where {forecast} were forecast."
    assert [one for one in found.notes if one.startswith("A step that was measured")] == [
        f"A step that was measured {said}"
    ]


class SavesAtItsEnd(torch.autograd.Function):
    """Takes much memory in between, and saves all that backward needs at its end, as a compiled block does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        a = x @ weight
        b = torch.cat([a] * 8).sigmoid()[: len(a)].clone()
        ctx.save_for_backward(x, weight, a, b)
        return b * a

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        x, weight, a, b = ctx.saved_tensors
        of_a = grad * (b + a * b * (1 - b))
        return of_a @ weight.T, x.T @ of_a


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / WIDTH for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x + SavesAtItsEnd.apply(x, weight)
        return x.square().mean()


@pytest.mark.parametrize("vram", [28 * MIB, 32 * MIB, 40 * MIB, 44 * MIB])
@pytest.mark.parametrize("beside", [0, 100 * MIB])
def test_the_first_plan_counts_what_a_block_saved_until_the_next_one_has_run(
    monkeypatch: pytest.MonkeyPatch, vram: int, beside: int
) -> None:
    gpu = Rehearsal(monkeypatch, link_bytes_per_s=FAST_LINK, is_even=True)
    model = Blocks()
    others = gpu.meter.hold(torch.empty(beside, dtype=torch.uint8))  # as weights and optimizer state are
    vram += others.nbytes
    with gpu.meter, gpu.session(model, vram) as storm:
        for _ in range(4):
            plan = storm.plan()
            with storm.step():
                model(torch.randn(ROWS, WIDTH)).backward()
            model.zero_grad()
            assert storm.usage().vram_bytes <= vram
            if plan is not None:
                assert plan.forecast.vram_bytes - 4096 <= storm.usage().vram_bytes <= plan.forecast.vram_bytes
    assert not storm.report().notes


def test_what_fits_is_kept_once_a_step_has_followed_a_plan_that_left_some_of_the_budget_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = Rehearsal(monkeypatch, link_bytes_per_s=FAST_LINK, is_even=True)
    model, vram = Blocks(), 41 * MIB + MIB // 4
    peaks = []
    with gpu.meter, gpu.session(model, vram) as storm:
        for _ in range(3):
            with storm.step():
                model(torch.randn(ROWS, WIDTH)).backward()
            model.zero_grad()
            peaks.append(storm.usage().vram_bytes)
    assert peaks[1] <= vram - vram // 100 < peaks[2] <= vram


@pytest.mark.parametrize("vram", [32 * MIB, 40 * MIB, 64 * MIB])
def test_parts_of_a_storage_with_a_version_counter_each_leave_in_a_step_without_a_plan(
    monkeypatch: pytest.MonkeyPatch, vram: int
) -> None:
    gpu = Rehearsal(monkeypatch, link_bytes_per_s=FAST_LINK, is_even=True)
    model = nn.ParameterList(torch.randn(WIDTH, 2 * WIDTH) / WIDTH for _ in range(10))
    with gpu.meter, gpu.session(model, vram) as storm:
        for _ in range(3):
            with storm.step():
                x = torch.randn(2 * ROWS, WIDTH)
                for weight in model:
                    one, other = (x @ weight).unsafe_chunk(2, 1)
                    x = x + one.sigmoid_() * other.tanh_()
                x.square().mean().backward()
            del x, one, other
            model.zero_grad()
            assert storm.usage().vram_bytes <= vram


class SavesMuchAtItsEnd(torch.autograd.Function):
    """What it has saved takes several times what it computes with."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        many = [(x @ weight * (at + 1)).tanh() for at in range(7)]
        ctx.save_for_backward(x, weight, *many)
        return torch.stack(many).sum(0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        x, weight, *many = ctx.saved_tensors
        of_all = torch.zeros_like(grad)
        for at, one in enumerate(many):
            of_all += (at + 1) * grad * (1 - one * one)
        return of_all @ weight.T, x.T @ of_all


@pytest.mark.parametrize("vram", [36 * MIB, 40 * MIB, 52 * MIB])
def test_the_budget_comes_first_in_steps_that_no_plan_is_for(monkeypatch: pytest.MonkeyPatch, vram: int) -> None:
    gpu = Rehearsal(monkeypatch, link_bytes_per_s=FAST_LINK, is_even=True)
    model = nn.ParameterList(torch.randn(WIDTH, WIDTH) / WIDTH for _ in range(6))
    with gpu.meter, gpu.session(model, vram) as storm:
        for _ in range(3):
            with storm.step():
                x = torch.randn(2 * ROWS, WIDTH)
                for weight in model:
                    x = x + SavesMuchAtItsEnd.apply(x, weight)
                loss = x.square().mean()
                loss.backward(retain_graph=True)  # of such steps no plan is made
                loss.backward()
            del loss, x
            model.zero_grad()
            assert storm.usage().vram_bytes <= vram
