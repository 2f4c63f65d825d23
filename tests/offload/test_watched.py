"""In a settled step only the operations that will run again are recorded: the bits are those of a step of one's own,
whatever the model does otherwise than in the step that was planned."""

from __future__ import annotations

import contextlib
import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from offload.forced import at_random, force_recompute
from torchstorm.errors import UnsupportedError
from torchstorm.offload.recompute.tape import Tape
from torchstorm.offload.recompute.watched import Calls, WatchedCalls, call_of
from torchstorm.offload.session import Session
from torchstorm.offload.step.running import Running
from torchstorm.offload.torch_private import num_compiled

WIDTH, ROWS, NUM_BLOCKS = 32, 256, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("offset", torch.zeros(ROWS, WIDTH))  # larger than what a record keeps a copy of

    def forward(self, x: torch.Tensor, way: Ways) -> torch.Tensor:
        # Of these two autograd saves the first. The sum is saved by the sine, and can be computed again.
        either = torch.tanh(x), torch.neg(x)
        hidden = (either[way.takes_other_branch] + self.offset).sin()
        hidden = self.norm(hidden) * way.temperature
        hidden = way.activation(self.up(hidden))
        if way.logs:
            way.logged.append(hidden.detach().norm().item())
        hidden = F.dropout(hidden, way.dropout)
        with torch.no_grad():
            self.offset.add_(0.01)
        return x + self.down(hidden) * (hidden.sin().mean() + 1)


class Ways:
    """What changes between steps."""

    def __init__(self) -> None:
        self.temperature = 1.5
        self.dropout = 0.1
        self.activation: Callable[[torch.Tensor], torch.Tensor] = F.gelu
        self.takes_other_branch = False
        self.skipped: int | None = None
        self.autocast = False
        self.logs = False
        self.logged: list[float] = []


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.order = list(range(NUM_BLOCKS))
        self.way = Ways()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            if index != self.way.skipped:
                x = self.blocks[index](x, self.way)
        return x


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def take_step(model: nn.Module, index: int, autocast: bool = False, backward: Any = None) -> list[torch.Tensor]:
    """Runs a step; returns loss and gradients."""
    torch.manual_seed(index)
    x = torch.randn(ROWS, WIDTH)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(x).square().mean()
    if backward is None:
        loss.backward()
    else:
        backward(loss)
    found = [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    model.zero_grad()
    return found


@pytest.fixture(autouse=True)
def _computing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    force_recompute(monkeypatch, at_random(random.Random(0), 0.7))


def ram_of(make: Callable[[], nn.Module]) -> int:
    """What a step takes where everything is kept."""
    model = make()
    with Session(model, unlimited=True) as session:
        with session.step():
            take_step(model, 0)
        return session.usage().ram_bytes


@contextlib.contextmanager
def settled(folder: Path, make: Callable[[], nn.Module] = net, share: float = 0.9) -> Iterator[tuple[Any, Session]]:
    """A model whose steps follow a plan that computes tensors again."""
    model = make()
    with Session(model, ram=int(share * ram_of(make)), disk=str(folder)) as session:
        for index in range(4):
            with session.step():
                take_step(model, index)
        plan = session.plan()
        assert plan is not None
        assert plan.recomputes
        yield model, session


def scaled(way: Ways) -> None:
    way.temperature = 0.7


def dropping(way: Ways) -> None:
    way.dropout = 0.4


def other_activation(way: Ways) -> None:
    way.activation = F.relu


def other_branch(way: Ways) -> None:
    way.takes_other_branch = True


def skipping(way: Ways) -> None:
    way.skipped = 2


def under_autocast(way: Ways) -> None:
    way.autocast = True


def logging(way: Ways) -> None:
    way.logs = True


CHANGES = [scaled, dropping, other_activation, other_branch, skipping, under_autocast, logging]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.no_cover
def test_what_changes_between_two_steps_changes_their_gradients_and_nothing_else(
    change: Callable[[Ways], None], tmp_path: Path
) -> None:
    def run(session: Session | None, model: Net) -> list[list[torch.Tensor]]:
        results = []
        for index in range(10, 18):
            model.way = Ways()
            if index % 2:
                change(model.way)
            with session.step() if session is not None else contextlib.nullcontext():
                results.append(take_step(model, index, autocast=model.way.autocast))
        return results

    plain = net()
    for index in range(4):
        take_step(plain, index)
    expected = run(None, plain)
    with settled(tmp_path) as (model, session):
        found = run(session, model)
    assert all(
        torch.equal(one, other)
        for ones, others in zip(expected, found, strict=True)
        for one, other in zip(ones, others, strict=True)
    )


def test_two_layers_that_change_places_are_computed_again_with_their_own_weights(tmp_path: Path) -> None:
    def run(session: Session | None, model: Net) -> list[list[torch.Tensor]]:
        results = []
        for index in range(6):
            model.order[1], model.order[4] = model.order[4], model.order[1]
            with session.step() if session is not None else contextlib.nullcontext():
                results.append(take_step(model, index))
        return results

    plain = net()
    for index in range(4):
        take_step(plain, index)
    with settled(tmp_path) as (model, session):
        before = session.report().num_planned
        found = run(session, model)
        assert session.report().num_planned == before + 6, "the operations are the planned ones"
    for ones, others in zip(run(None, plain), found, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


def test_a_step_that_logs_a_few_numbers_still_follows_its_plan(tmp_path: Path) -> None:
    with settled(tmp_path) as (model, session):
        before = session.report().num_planned
        model.way.logs = True
        for index in range(3):
            with session.step():
                take_step(model, index)
        assert session.report().num_planned == before + 3
        assert len(model.way.logged) == 3 * NUM_BLOCKS


class TwoLosses(nn.Module):
    """What the first saves, a sum, is computed again from what the second saves, and autograd has no other use for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BLOCKS))

    def forward(self, x: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        inputs = [layer(x).detach().requires_grad_() for layer in self.layers]
        sums = sum((one + 1).sin().sum() for one in inputs), sum(one.cos().sum() for one in inputs)
        return list(sums), inputs


def test_what_autograd_lets_go_of_too_early_is_there_for_what_is_computed_from_it(tmp_path: Path) -> None:
    def run(model: TwoLosses, index: int) -> list[torch.Tensor]:
        losses, inputs = model(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(index)))
        while losses:
            losses.pop(-1 if index in (5, 7) else 0).backward()
        return [one.grad for one in inputs if one.grad is not None]

    model = TwoLosses()
    with Session(model, ram="1MiB", disk=str(tmp_path)) as session:
        for index in range(8):
            expected = run(model, index)
            with session.step():
                found = run(model, index)
            assert len(found) == NUM_BLOCKS
            assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True)), index
            if index == 4:
                plan = session.plan()
                assert plan is not None
                assert plan.recomputes


def test_a_settled_step_shows_the_tape_only_what_it_will_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    dispatch = Tape.dispatch

    def counted(self: Tape, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(func)
        return dispatch(self, func, types, args, kwargs)

    monkeypatch.setattr(Tape, "__torch_dispatch__", counted)
    with settled(tmp_path) as (model, session):
        plan = session.plan()
        assert plan is not None
        again = sum(placement.tier == "recompute" for placement in plan.placements)
        seen.clear()
        with session.step():
            take_step(model, 9)
        assert again
        assert len(seen) < 0.5 * len(plan.trace.ops), (len(seen), len(plan.trace.ops), again)


def test_saved_tensors_that_outlive_their_step_are_computed_again_after_it(tmp_path: Path) -> None:
    plain = net()
    for index in range(4):
        take_step(plain, index)
    with settled(tmp_path) as (model, session):
        torch.manual_seed(7)
        with session.step():
            loss = model(torch.randn(ROWS, WIDTH)).square().mean()
        loss.backward()
        found = [parameter.grad for parameter in model.parameters()]
    torch.manual_seed(7)
    plain(torch.randn(ROWS, WIDTH)).square().mean().backward()
    for one, other in zip(plain.parameters(), found, strict=True):
        assert torch.equal(one.grad, other)


class Doubled(torch.autograd.Function):
    """What it makes comes from no call that is seen."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class WithCustom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = Doubled.apply(layer(x).tanh())
            x = (x * 0.5).sigmoid().exp() * x
        return x


class WithEncoder(nn.Module):
    """Its frozen part computes in another way while a function mode is active."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True)
        self.frozen.requires_grad_(False)
        self.net = net()

    def train(self, mode: bool = True) -> WithEncoder:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = self.frozen(x.view(8, -1, WIDTH)).view(-1, WIDTH)
        return self.net(x)


class WithCompiled(nn.Module):
    """A function of it is compiled by its user."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList((net(), net()))
        self.scale = torch.compile(lambda x: (x * 2).tanh(), backend="aot_eager")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.nets[1](self.scale(self.nets[0](x)))


@pytest.mark.no_cover
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo looks at it
@pytest.mark.parametrize("kind", [WithCustom, WithEncoder, WithCompiled])
def test_models_with_parts_that_no_function_call_shows_train_to_the_same_bits(
    kind: type[nn.Module], tmp_path: Path
) -> None:
    def make() -> nn.Module:
        torch.manual_seed(2)
        return kind().train()

    plain, model = make(), make()
    with Session(model, ram=min(ram_of(make), 3 * 2**19), disk=str(tmp_path)) as session:
        for index in range(7):
            expected = take_step(plain, index)
            with session.step():
                found = take_step(model, index)
            assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True)), index
        plan = session.plan()
        assert plan is not None
        assert plan.recomputes
        assert session.report().num_planned >= 2


def test_the_step_leaves_no_mode_behind(tmp_path: Path) -> None:
    with settled(tmp_path) as (model, session):
        with session.step():
            take_step(model, 0)
        model.way.activation = lambda x: x.view(-1, 7)
        with pytest.raises(RuntimeError, match="invalid for input"), session.step():
            model(torch.randn(ROWS, WIDTH))
        assert torch._C._len_torch_function_stack() == 0
        assert torch._C._len_torch_dispatch_stack() == 0

        class Failing(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError), session.step(), Failing():
            model(torch.zeros(ROWS, WIDTH))
        assert torch._C._len_torch_function_stack() == 0
        assert torch._C._len_torch_dispatch_stack() == 0


def test_what_is_computed_from_memory_that_was_freed_says_so(tmp_path: Path) -> None:
    seen: list[torch.Tensor] = []

    class Freeing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BLOCKS))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x).tanh()
                seen.append(x)
                x = (x + 1).sin()  # saves the sum, which can be computed again from what the layer before made
            return x

    model = Freeing()
    with Session(model, ram="1MiB", disk=str(tmp_path)) as session:
        for index in range(6):
            seen.clear()
            with session.step():
                take_step(model, index)
        with pytest.raises(UnsupportedError, match="freed or replaced before backward"), session.step():
            take_step(model, 7, backward=lambda loss: (seen[-1].untyped_storage().resize_(0), loss.backward()))


def test_thousands_of_operations_of_one_call_are_numbered_as_of_that_call() -> None:
    tape = Tape(torch.device("cpu"), is_leaf=lambda _: False, mark=lambda: 0.0)
    recurrent = nn.GRU(8, 8)
    with WatchedCalls(tape, Running(moment=3)):
        recurrent(torch.randn(400, 2, 8) * 2)
    found = Counter(call_of(call.number) for call in tape.calls)
    assert sorted(found.values())[-1] > 1024
    assert len(found) == 4, "what draws the input, the product, the first state, and the network"
    assert len({call.number for call in tape.calls}) == len(tape.calls)


@pytest.mark.parametrize("is_reset", [False, True], ids=["", "reset"])
def test_a_function_that_is_compiled_under_the_mode_is_compiled_once_and_whole(is_reset: bool) -> None:
    if is_reset:
        torch._dynamo.reset()
    whole = torch.compile(lambda x: (x.sin() * 2).cos(), backend="eager", fullgraph=True)
    tape = Tape(torch.device("cpu"), is_leaf=lambda _: False)
    before, x = num_compiled(), torch.randn(5, requires_grad=True)
    for index in range(3):
        calls = WatchedCalls(tape, Running(moment=1))
        calls.record_within(Calls(()))
        assert "__torch_function__" in vars(calls), "C++ stands for Python"
        with calls:
            assert whole(x).equal((x.sin() * 2).cos())
            assert ("__torch_function__" in vars(calls)) == (index > 0), "Dynamo knows only Python"
        left = weakref.ref(calls)
        del calls
        assert left() is None, "nothing is left for the collector"
    assert num_compiled() == before + 1
