"""Steps that begin alike and go on differently: each sequence of operations has a plan of its own, and a step goes over
from one to another; what no plan is for keeps the budget, too, by moving or by computing again."""

from __future__ import annotations

import contextlib
import random
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from offload.forced import at_random, force_recompute
from offload.test_watched import Doubled
from torchstorm.errors import BudgetError
from torchstorm.offload.session import Session
from torchstorm.offload.step.letting_go import LetGo, _read_later
from torchstorm.offload.step.tracing import Recorder

WIDTH, ROWS, NUM_BLOCKS = 32, 512, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, *, masks: bool) -> torch.Tensor:
        y = self.norm(x)
        if masks:
            y = y * torch.sigmoid(y)
        return x + self.down(F.dropout(F.gelu(self.up(y)), 0.1))


class Net(nn.Module):
    """Blocks that a step may mask, and may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))

    def forward(self, x: torch.Tensor, masked_from: int, skipped: frozenset[int] = frozenset()) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            if index not in skipped:
                x = block(x, masks=index >= masked_from)
        return x


def network() -> Net:
    torch.manual_seed(0)
    return Net()


Step = tuple[int, int, frozenset[int]]
"""Rows, the first block that masks, the blocks that are left out."""

PLAIN: Step = (ROWS, NUM_BLOCKS, frozenset())
MASKED: Step = (ROWS, 0, frozenset())


def take(model: Net, step: Step, seed: int, session: Session | None) -> list[torch.Tensor]:
    rows, masked_from, skipped = step
    torch.manual_seed(seed)
    x = torch.randn(rows, WIDTH)
    if session is None:
        model(x, masked_from, skipped).square().mean().backward()
    else:
        with session.step():
            model(x, masked_from, skipped).square().mean().backward()
    return taken(model)


def taken(model: nn.Module) -> list[torch.Tensor]:
    """The gradients, which the model has no more: zero for a weight that was not used."""
    found = [torch.zeros(()) if one.grad is None else one.grad.clone() for one in model.parameters()]
    model.zero_grad()
    return found


def peak_bytes(step: Step) -> int:
    model = network()
    session = Session(model, unlimited=True)
    take(model, step, 0, session)
    return session.usage().ram_bytes


def assert_exact(model: Net, plain: Net, session: Session, step: Step, seed: int, *, may_fail: bool = False) -> None:
    """Takes a step. Where it `may_fail`, it may raise that it is over the budget: with RAM alone, what an unknown step
    has kept by the plan of another one was not recorded, and so cannot be let go."""
    expected = take(plain, step, seed, None)
    try:
        found = take(model, step, seed, session)
    except BudgetError:
        assert may_fail
        model.zero_grad()
        return
    assert all(map(torch.equal, expected, found)), (step, seed)
    assert session.usage().ram_bytes <= session.report().budget.ram, (step, seed)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    """The steps that were traced from now on, whole or in part."""
    found: list[Recorder] = []
    make = Recorder.__init__

    def noted(self: Recorder, *args: object, **options: object) -> None:
        found.append(self)
        make(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Recorder, "__init__", noted)
    return found


@pytest.mark.parametrize("seed", [2, 3, 7, 11])  # after which such steps come about
def test_what_stays_waits_only_for_what_is_to_be_computed_again_from_it(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle, waiting, needless = LetGo.settle, [0], []

    def noted(self: LetGo) -> None:
        settle(self)
        awaited = self._residency.kept.awaited
        if len(awaited) > waiting[0]:
            read = _read_later(self._residency.absent)
            needless.extend(one for one in awaited if one.value not in read)
        waiting[0] = len(awaited)

    force_recompute(monkeypatch, at_random(random.Random(seed)))
    monkeypatch.setattr(LetGo, "settle", noted)
    plain, model = network(), network()
    with Session(model, ram=peak_bytes(MASKED) * 2) as session:
        rng = random.Random(seed)
        for step in range(12):
            assert_exact(model, plain, session, rng.choice((PLAIN, (ROWS, 3, frozenset[int]()))), step)
    assert not needless


@pytest.mark.parametrize("has_disk", [True, False], ids=["RAM and disk", "RAM alone"])
@pytest.mark.parametrize("masked_from", [0, 3, NUM_BLOCKS - 1])
@pytest.mark.no_cover
def test_two_kinds_of_steps_that_take_turns_follow_two_plans(
    masked_from: int, has_disk: bool, tmp_path: Path, traced: list[Recorder]
) -> None:
    plain, model = network(), network()
    masked = (ROWS, masked_from, frozenset[int]())
    budget = peak_bytes(PLAIN) * 6 // 10
    session = Session(model, ram=budget, disk=str(tmp_path) if has_disk else None)
    rng = random.Random(0)
    for seed in range(12):
        assert_exact(model, plain, session, rng.choice((PLAIN, masked)), seed)
    num_planned, num_traced = session.report().num_planned, len(traced)
    for seed in range(12, 24):
        assert_exact(model, plain, session, rng.choice((PLAIN, masked)), seed)
    assert session.report().num_planned >= num_planned + 10  # one may be timed once more
    assert len(traced) == num_traced
    highest = session.report().highest
    assert highest is not None
    assert highest.ram_bytes <= budget


@pytest.mark.parametrize("has_disk", [True, False], ids=["RAM and disk", "RAM alone"])
@pytest.mark.parametrize("draw", range(3))
def test_what_is_computed_again_is_exact_whichever_plan_a_step_ends_with(
    draw: int, has_disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_recompute(monkeypatch, at_random(random.Random(draw), 0.6))
    plain, model = network(), network()
    session = Session(model, ram=2 * peak_bytes(MASKED), disk=str(tmp_path) if has_disk else None)
    rng = random.Random(draw)
    for seed in range(16):
        step = rng.choice((PLAIN, MASKED, (ROWS, 3, frozenset({1}))))
        assert_exact(model, plain, session, step, seed, may_fail=not has_disk)
    assert session.report().num_planned > 4


@pytest.mark.no_cover
def test_shorter_steps_go_over_to_the_plans_of_longer_ones(tmp_path: Path, traced: list[Recorder]) -> None:
    plain, model = network(), network()
    session = Session(model, ram=peak_bytes(PLAIN) * 6 // 10, disk=str(tmp_path))
    for seed in range(10):
        assert_exact(model, plain, session, (PLAIN, MASKED)[seed % 2], seed)
    num_planned, num_traced = session.report().num_planned, len(traced)
    rng = random.Random(0)
    for seed in range(10, 20):
        rows, masked_from, skipped = rng.choice((PLAIN, MASKED))
        assert_exact(model, plain, session, (rng.randrange(100, rows), masked_from, skipped), seed)
    assert session.report().num_planned >= num_planned + 8  # one or two of them were timed
    assert len(traced) == num_traced


def test_steps_that_are_never_alike_are_exact_within_the_budget_and_seldom_planned(tmp_path: Path) -> None:
    plain, model = network(), network()
    session = Session(model, ram=peak_bytes(PLAIN) * 6 // 10, disk=str(tmp_path))
    rng = random.Random(0)
    for seed in range(24):
        skipped = frozenset(index for index in range(NUM_BLOCKS) if rng.random() < 0.3)
        assert_exact(model, plain, session, (ROWS, rng.randrange(NUM_BLOCKS + 1), skipped), seed)
    assert len(session._shared.plans._all) < 10


def test_a_plan_is_kept_while_other_steps_come_in_between(tmp_path: Path, traced: list[Recorder]) -> None:
    plain, model = network(), network()
    session = Session(model, ram=peak_bytes(PLAIN) * 6 // 10, disk=str(tmp_path))
    for seed in range(4):
        assert_exact(model, plain, session, PLAIN, seed)
    for seed in range(4, 10):
        assert_exact(model, plain, session, (ROWS, NUM_BLOCKS, frozenset({seed % NUM_BLOCKS})), seed)
    num_planned, num_traced = session.report().num_planned, len(traced)
    assert_exact(model, plain, session, PLAIN, 10)
    assert session.report().num_planned == num_planned + 1
    assert len(traced) == num_traced


class Acting(nn.Module):
    """Its activation may change between steps, and saves as much whichever it is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BLOCKS))
        self.act: Callable[[torch.Tensor], torch.Tensor] = F.gelu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.act(layer(x)).sin()
        return x


def test_steps_that_differ_in_what_makes_a_tensor_and_in_nothing_else_are_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_recompute(monkeypatch)
    torch.manual_seed(0)
    model = Acting()
    session = Session(model, ram="500KiB", disk=str(tmp_path))
    rng = random.Random(0)
    for seed in range(16):
        model.act = rng.choice((F.gelu, F.silu))
        torch.manual_seed(seed)
        x = torch.randn(ROWS, WIDTH)
        model(x).square().mean().backward()
        expected = taken(model)
        with session.step():
            model(x).square().mean().backward()
        assert all(map(torch.equal, expected, taken(model))), seed


@pytest.mark.no_cover
@pytest.mark.parametrize("has_disk", [True, False], ids=["RAM and disk", "RAM alone"])
def test_a_llama_whose_batches_are_padded_now_and_then_follows_plans(has_disk: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4}

    def llama() -> nn.Module:
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes))

    def take_batch(model: nn.Module, seed: int, length: int, session: Session | None) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        tokens = torch.randint(1, 64, (4, length))
        mask = torch.ones_like(tokens)
        mask[1, length // 2 :] = seed % 3 == 0
        with session.step() if session is not None else contextlib.nullcontext():
            model(input_ids=tokens, attention_mask=mask, labels=tokens, use_cache=False).loss.backward()
        return taken(model)

    plain, model = llama(), llama()
    with Session(model, unlimited=True) as session:
        take_batch(model, 1, 64, session)
        budget = session.usage().ram_bytes * 6 // 10
    rng = random.Random(0)
    with Session(model, ram=budget, disk=str(tmp_path) if has_disk else None) as session:
        for seed in range(24):
            if seed == 12:
                num_planned = session.report().num_planned
            length = 64 if seed < 6 else rng.randrange(20, 64)
            expected, found = take_batch(plain, seed, length, None), take_batch(model, seed, length, session)
            assert all(map(torch.equal, expected, found)), seed
            assert session.usage().ram_bytes <= budget, seed
        assert session.report().num_planned >= num_planned + 10


# ---------------------------------------------------------------------- without a plan


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
def test_the_first_step_of_all_keeps_a_budget_of_ram_alone_by_computing_again(share: float) -> None:
    plain, model = network(), network()
    budget = int(peak_bytes(PLAIN) * share)
    session = Session(model, ram=budget)
    assert_exact(model, plain, session, PLAIN, 0)
    assert session.usage().ram_bytes > budget // 2
    assert not any("nowhere was room" in note for note in session.report().notes)


def test_the_first_step_computes_nothing_again_whose_operation_gives_other_bytes_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = nn.Linear(WIDTH, WIDTH), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(8):
                noise = torch.empty_like(x)
                noise.data_ptr()
                noise.numpy()[:] = self.calls  # nobody sees this write
                self.calls += 1
                x = torch.tanh(self.layer(x) * noise).sin()
            return x

    torch.manual_seed(0)
    plain, model = Counting(), Counting()
    plain.load_state_dict(model.state_dict())
    x = torch.randn(ROWS, WIDTH)
    plain(x).mean().backward()
    measured = Session(model, unlimited=True)
    with measured.step():
        model(x).mean().backward()
    model.zero_grad()
    budget = measured.usage().ram_bytes * 9 // 10
    measured.close()
    model.calls = 0
    session = Session(model, ram=budget)
    with session.step():
        model(x).mean().backward()
    assert session.usage().ram_bytes <= budget
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


class InParts(nn.Module):
    """Saves parts of one storage with a version counter each: as they are, or changed after the first was saved."""

    def __init__(self, *, is_recurrent: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(NUM_BLOCKS))
        self.recurrent = nn.GRU(WIDTH, WIDTH) if is_recurrent else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recurrent is not None:
            return self.recurrent(x.view(8, -1, WIDTH))[0]
        for layer in self.layers:
            one, other = torch.unsafe_chunk(layer(x), 2, -1)
            x = one * other
        return x


@pytest.mark.parametrize("share", [0.7, 0.9])
@pytest.mark.parametrize("is_recurrent", [True, False], ids=["GRU", "unsafe_chunk"])
def test_parts_of_a_storage_are_exact_in_steps_that_compute_again(is_recurrent: bool, share: float) -> None:
    torch.manual_seed(0)
    model = InParts(is_recurrent=is_recurrent)
    x = torch.randn(ROWS, WIDTH)

    def gradients(session: Session | None) -> list[torch.Tensor]:
        with session.step() if session is not None else contextlib.nullcontext():
            model(x).square().mean().backward()
        return taken(model)

    expected = gradients(None)
    with Session(model, unlimited=True) as session:
        gradients(session)
        budget = int(session.usage().ram_bytes * share)
    with Session(model, ram=budget) as session:
        for index in range(4):
            assert all(map(torch.equal, expected, gradients(session)))
            assert session.usage().ram_bytes <= budget or not index, "only plans compute parts again"


def test_what_nobody_saves_is_not_held_for_the_sake_of_unknown_steps() -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    class Adding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BLOCKS))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                y = Doubled.apply(torch.tanh(layer(x)))
                made.append(weakref.ref(y))
                x = x + y
            return x

    torch.manual_seed(0)
    model = Adding()
    x = torch.randn(ROWS, WIDTH)
    with Session(model, unlimited=True) as session, session.step():
        model(x).mean().backward()
    budget = session.usage().ram_bytes * 7 // 10
    with Session(model, ram=budget) as session:
        for _ in range(4):
            made.clear()
            with session.step():
                loss = model(x).mean()
                assert sum(one() is not None for one in made) <= 1
                loss.backward()


def test_what_backward_needs_in_another_order_is_there_in_a_first_step_that_computes_again() -> None:
    torch.manual_seed(0)
    plain, model = network(), network()
    plain.load_state_dict(model.state_dict())

    def losses(net: Net, x: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for block in net.blocks:
            y = block(x, masks=True)
            x = y.detach()
            found.append(y.square().mean())
        return found

    budget = peak_bytes(MASKED) * 7 // 10
    for order in (1, -1):
        session = Session(model, ram=budget)
        for net in (plain, model):
            torch.manual_seed(3)
            x = torch.randn(ROWS, WIDTH, requires_grad=True)
            if net is model:
                with session.step():
                    for loss in losses(net, x)[::order]:
                        loss.backward()
            else:
                for loss in losses(net, x)[::order]:
                    loss.backward()
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            assert torch.equal(one.grad, other.grad), order
        plain.zero_grad()
        model.zero_grad()


@settings(
    max_examples=12,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from([ROWS, ROWS, 300, 700]),
            st.integers(0, NUM_BLOCKS),
            st.frozensets(st.integers(0, NUM_BLOCKS - 1), max_size=3),
        ),
        min_size=1,
        max_size=4,
        unique=True,
    ),
    share=st.sampled_from([0.55, 0.75]),
    has_disk=st.booleans(),
    order=st.randoms(use_true_random=False),
)
@pytest.mark.no_cover
def test_whatever_steps_come_in_whatever_order_they_are_exact_and_within_the_budget(
    steps: list[Step], share: float, has_disk: bool, order: random.Random
) -> None:
    budget = int(max(map(peak_bytes, steps)) * share)
    plain, model = network(), network()
    with tempfile.TemporaryDirectory() as directory:
        session = Session(model, ram=budget, disk=directory if has_disk else None)
        for seed in range(10):
            assert_exact(model, plain, session, order.choice(steps), seed, may_fail=not has_disk)
        session.close()
